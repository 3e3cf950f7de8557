"""PipeDream's partitioner against exhaustive search, and what must be true of it."""

from __future__ import annotations

import random

import pytest

from deepspeed_partition import Chain
from deepspeed_partition.planner.solvers.contiguous.replicated import (
    Level,
    ReplicatedStage,
    pipedream_replicated,
)
from tests.planner.instances import chain


def random_chain(generator: random.Random, num_layers: int) -> Chain:
    return chain(
        [generator.randint(1, 9) for _ in range(num_layers)],
        [generator.randint(1, 9) for _ in range(num_layers)],
        weights=[generator.randint(0, 30) for _ in range(num_layers)],
        outputs=[generator.randint(0, 12) for _ in range(num_layers)],
    )


def one_stage(model: Chain, start: int, stop: int, num_workers: int, levels: list[Level]) -> float:
    weights = sum(layer.weight_bytes for layer in model.layers[start:stop])
    allreduce = 2 * (num_workers - 1) / num_workers * weights / levels[-1].bandwidth
    return max(shortest(model, start, stop, levels[:-1]), allreduce) / num_workers


def shortest(model: Chain, start: int, stop: int, levels: list[Level]) -> float:
    """Every cut and every share of the workers, one stage after the other."""
    if not levels:
        return sum(layer.compute_seconds for layer in model.layers[start:stop])

    def rest(first: int, num_workers: int) -> float:
        best = one_stage(model, first, stop, num_workers, levels)
        for cut in range(first + 1, stop):
            transfers = 2 * model.boundary_bytes(cut) / levels[-1].bandwidth
            for here in range(1, num_workers):
                slowest = max(one_stage(model, first, cut, here, levels), transfers, rest(cut, num_workers - here))
                best = min(best, slowest)
        return best

    return rest(start, levels[-1].num_workers)


def reached(model: Chain, stages: tuple[ReplicatedStage, ...], bandwidths: list[float]) -> float:
    """The period of the pipeline that was answered."""
    if not stages:
        return 0.0
    slowest = 0.0
    for stage in stages:
        layers = model.layers[slice(*stage.layers)]
        compute = sum(layer.compute_seconds for layer in layers)
        inside = reached(model, stage.inside, bandwidths[:-1]) if stage.inside else compute
        weights = sum(layer.weight_bytes for layer in layers)
        allreduce = 2 * (stage.num_replicas - 1) / stage.num_replicas * weights / bandwidths[-1]
        slowest = max(slowest, max(inside, allreduce) / stage.num_replicas)
    cuts = [stage.layers[1] for stage in stages[:-1]]
    return max([slowest, *(2 * model.boundary_bytes(cut) / bandwidths[-1] for cut in cuts)])


@pytest.mark.parametrize("seed", range(60))
def test_shortest_of_all(seed: int) -> None:
    generator = random.Random(seed)
    model = random_chain(generator, generator.randint(1, 5))
    levels = [Level(num_workers=generator.randint(1, 4), bandwidth=generator.choice([0.5, 2.0, 50.0]))]
    if seed % 2:
        levels.append(Level(num_workers=generator.randint(1, 3), bandwidth=generator.choice([0.1, 1.0])))
    found = pipedream_replicated(model, levels)
    assert found.period_seconds == pytest.approx(shortest(model, 0, model.num_layers, levels), rel=1e-12)
    assert reached(model, found.stages, [level.bandwidth for level in levels]) == pytest.approx(
        found.period_seconds, rel=1e-12
    )
    assert sum(stage.num_replicas for stage in found.stages) == levels[-1].num_workers
    assert [stage.layers[0] for stage in found.stages[1:]] == [stage.layers[1] for stage in found.stages[:-1]]
    assert (found.stages[0].layers[0], found.stages[-1].layers[1]) == (0, model.num_layers)


def test_small_weights_are_replicated_and_large_ones_are_not() -> None:
    """As in the slides: small weights run on three machines, the fully connected layer on one."""
    model = chain([3, 3, 2], [6, 6, 4], weights=[1, 1, 10_000], outputs=[5, 5, 5])
    found = pipedream_replicated(model, [Level(num_workers=4, bandwidth=10.0)])
    assert [(stage.layers, stage.num_replicas) for stage in found.stages] == [((0, 2), 3), ((2, 3), 1)]
    assert found.period_seconds == 6.0
    assert found.num_in_flight == 2
    # Two tensors over the cut, and 4 / 3 of the small weights.
    assert found.bytes_per_micro_batch == pytest.approx(2 * 5 + 4 / 3 * 2)


def test_plain_data_parallelism_wins_where_weights_are_small() -> None:
    model = chain([1, 1, 1], [2, 2, 2], weights=[0, 0, 0], outputs=[100, 100, 100])
    found = pipedream_replicated(model, [Level(num_workers=4, bandwidth=1.0)])
    assert [(stage.layers, stage.num_replicas) for stage in found.stages] == [((0, 3), 4)]
    assert found.period_seconds == 9 / 4


def test_slow_machines_are_stages_and_fast_devices_replicas() -> None:
    model = chain([1] * 4, [2] * 4, weights=[40] * 4, outputs=[1] * 4)
    levels = [Level(num_workers=2, bandwidth=1e6), Level(num_workers=2, bandwidth=1.0)]
    found = pipedream_replicated(model, levels)
    assert [(stage.layers, stage.num_replicas) for stage in found.stages] == [((0, 2), 1), ((2, 4), 1)]
    assert all(inside.num_replicas == 2 for stage in found.stages for inside in stage.inside)
    assert found.period_seconds == 3.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_workers": 0, "bandwidth": 1.0}, "num_workers is 0"),
        ({"num_workers": True, "bandwidth": 1.0}, "num_workers is True"),
        ({"num_workers": 2, "bandwidth": 0.0}, "bandwidth is 0.0"),
    ],
)
def test_malformed_levels(arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Level(**arguments)


def test_no_levels() -> None:
    with pytest.raises(ValueError, match="levels is empty"):
        pipedream_replicated(chain([1], [1]), [])
