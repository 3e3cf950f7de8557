"""Cases: data, layers and a loss draw the random numbers that they would draw if nothing were measured."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import numpy
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.dataloader import RepeatingLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset

from deepspeed_partition.engine import PipelineModule
from deepspeed_partition.engine.pipeline import both_ends, data_draws, drawing_layers, drawn_weights
from deepspeed_partition.engine.runtime import environment
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.warmup import run_plan
from tests.engine import plans
from tests.engine.pipelines import WIDTH, loss_fn, mlp, two_groups
from tests.engine.running import NUM_MICRO_BATCHES, batches, cut, planned, same, start
from tests.engine.strangers_cases import said_here

NUM_STEPS = 5
GENERATORS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": lambda: float(numpy.random.random()),
    "torch": lambda: float(torch.rand(())),
}


def _seed() -> None:
    random.seed(5)
    numpy.random.seed(5)
    torch.manual_seed(5)


def _numbers(name: str, count: int) -> list[float]:
    """The first numbers of a common generator, which is seeded again afterwards."""
    _seed()
    found = [GENERATORS[name]() for _ in range(count)]
    _seed()
    return found


def _draw_from_all() -> None:
    for draw in GENERATORS.values():
        draw()


def data_is_drawn_as_if_nothing_were_planned(_: Path) -> None:
    """Rank 0 imported a library that draws, to plan, and the data went on with other numbers, in silence."""

    def planning(*arguments: Any) -> Any:
        _draw_from_all()
        return run_plan_of_rank_0(*arguments)

    run_plan_of_rank_0 = run_plan._plan
    for name, draw in GENERATORS.items():
        for steps in (0, 3):
            drawn = []

            def items() -> Iterator[Any]:
                for batch in batches(NUM_STEPS):
                    for inputs, labels in batch:
                        drawn.append(draw())  # noqa: B023
                        yield inputs + drawn[-1], labels  # noqa: B023

            with patch.object(run_plan, "_plan", planning):
                engine, _, _ = start(
                    mlp(), "madpipe", planned(cut(), warmup_steps=steps), optimizer=two_groups, seed_layers=False
                )
                data, expected = items(), _numbers(name, 4 * NUM_STEPS + 1)
                for _ in range(NUM_STEPS):
                    engine.train_batch(data)
            found = gather_objects(([*drawn, draw()], expected))  # all ranks fail, or none
            assert all(got == wanted for got, wanted in found), (name, steps, found)


def a_generator_draws_lazily_as_if_nothing_were_measured(_: Path) -> None:
    """What a loss's generator had drawn while it was measured was given again, and the common one went without."""
    for name, draw in GENERATORS.items():
        numbers = (draw() for _ in iter(int, 1))
        drawn: list[float] = []

        def drawing(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            drawn.append(next(numbers))  # noqa: B023
            drawn.append(draw())  # noqa: B023
            return loss_fn(outputs, labels) * (1 + drawn[-1])  # noqa: B023

        with said_here() as said:
            engine, _, _ = start(
                mlp(), "madpipe", planned(cut()), optimizer=two_groups, loss_fn=drawing, seed_layers=False
            )
            expected = _numbers(name, 17)
            for batch in batches(2):
                engine.train_batch(iter(batch))
        wanted = expected if engine.is_last_stage() else expected[:1]
        for got, of_rank, lines in gather_objects(([*drawn, draw()], wanted, said)):
            assert got == of_rank, (name, got, of_rank)
            assert not any("draws from a common random generator" in line for line in lines), lines


class Noisy(nn.Module):
    """Takes from a generator that draws from the common one."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = (torch.rand(()) for _ in iter(int, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.noise)


class Chance(nn.Module):
    """Scales by a number of Python's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + random.random())


class Samples(Dataset[Any]):
    """As many as nine micro-batches."""

    def __len__(self) -> int:
        return 36

    def __getitem__(self, number: int) -> Any:
        inputs, labels = batches(1)[0][0]
        return inputs[number % 4], labels[number % 4]


def draws_that_cannot_be_the_same_are_said(_: Path) -> None:
    """An iterator, or a generator of a layer, got other numbers than in plain DeepSpeed, in silence."""
    store: set[str] = set()

    def once(key: str, message: str) -> None:
        if key not in store:
            store.add(key)
            environment.log_here(message)

    def items() -> Iterator[Any]:
        while True:
            for inputs, labels in batches(1)[0]:
                yield inputs + float(torch.rand(())), labels

    for draws_in_layer in (False, True):
        store.clear()
        layers = [*mlp()[:2], nn.Dropout(0.1), Noisy() if draws_in_layer else nn.ReLU(), *mlp()[2:]]
        data = iter(batches(2)[0] + batches(2)[1]) if draws_in_layer else items()
        with (
            said_here() as said,
            patch("deepspeed_partition.engine.pipeline.plan_engine.warn_once", once),
            patch("deepspeed_partition.kept_values.tell_once", once),
        ):
            engine, _, _ = start(layers, "madpipe", planned([0, 5, 10]), optimizer=two_groups, seed_layers=False)
            _seed()
            for _ in range(2):
                engine.train_batch(data)
        words = "noise (generator) draws from a common random" if draws_in_layer else "(torch; seed_layers sets it"
        counts = gather_objects(sum(words in line for line in said))
        assert counts == [1, 0], (draws_in_layer, counts, said)
    store.clear()
    loader = RepeatingLoader(DataLoader(Samples(), batch_size=4))  # draws once in an epoch
    with said_here() as said, patch("deepspeed_partition.engine.pipeline.plan_engine.warn_once", once):
        engine, _, _ = start(layers, [0, 5, 10], optimizer=two_groups, seed_layers=False)
        for _ in range(9):
            engine.train_batch(iter(loader))
    assert not any(sum("seed_layers sets it" in line for line in lines) for lines in gather_objects(said))


def layers_that_draw_are_said_where_a_plan_moves_them(_: Path) -> None:
    """Dropout got other numbers than on the cut of plain DeepSpeed, in silence."""
    for method, boundaries, seeds, interval, is_said in (
        ("madpipe", [0, 3, 9], False, 0, True),
        ("madpipe", [0, 3, 9], True, 0, False),
        ("madpipe", [0, 3, 9], True, 2, True),  # DeepSpeed's seeds go by places in ranges there
        ("madpipe", None, False, 0, False),  # the cut that it has without a plan
        ([0, 3, 9], None, False, 0, False),
    ):
        layers = [*mlp()[:2], nn.Dropout(0.1), *mlp()[2:6], Chance(), *mlp()[7:]]
        said: list[str] = []
        with patch.object(drawing_layers, "warn_once", lambda _, line: said.append(line)):  # noqa: B023
            module = PipelineModule(layers, num_stages=2, loss_fn=loss_fn)
            options = planned(boundaries or [*module.parts]) if method == "madpipe" else {}
            own = {"seed_layers": seeds, "activation_checkpoint_interval": interval}
            engine, _, _ = start(layers, method, options, optimizer=two_groups, **own)
            engine.eval_batch(iter(batches(1)[0]))
            for batch in batches(2):
                engine.train_batch(iter(batch))
        lines = [line for of_rank in gather_objects(said) for line in of_rank]
        assert len(lines) == 2 * is_said, (method, boundaries, seeds, lines)
        if is_said:
            first, last = (line.partition(": which")[0] for line in lines)
            assert (
                first == "layers draw from the random generators of their rank (torch), such as layer 2 (Dropout)"
            )
            assert (
                last == "layers draw from the random generators of their rank (random), such as layer 7 (Chance)"
            )
            assert all("the plan has made [0, 3, 9]" in line for line in lines), lines
            way_out = "activation_checkpoint_interval=0 gives" if seeds else "seed_layers=True of PipelineModule"
            assert all(way_out in line for line in lines), lines


class Tracked(nn.Module):
    """Drops as Megatron's attention does, by numbers of a state that DeepSpeed's tracker holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            return nn.functional.dropout(x + self.linear(x), 0.3)


def tracked_states_are_as_if_nothing_were_measured(_: Path) -> None:
    """Layers that were measured, or ran again, had drawn from them: the run had another dropout, in silence."""
    boundaries, data = [0, 4, 9], batches(4)
    layers = [*mlp()[:2], LayerSpec(Tracked), *mlp()[2:5], LayerSpec(Tracked), *mlp()[6:]]
    orders = plans.depth_first((0, 1), 4, 3)
    chain, platform, recomputed = plans.chain_of(9), plans.platform_of(2), {0: ((2, 4),), 1: ((4, 8),)}
    plan = plans.plan_of(chain, platform, boundaries, (0, 1), orders=orders, recomputed=recomputed)
    found = []
    for method, options in (
        (boundaries, {}),
        ("madpipe", planned(boundaries)),
        ("madpipe", planned(boundaries, warmup_steps=2)),
        (plan, {}),
    ):
        engine, _, _ = start(layers, method, options, optimizer=two_groups)
        tracker = checkpointing.get_cuda_rng_tracker()
        tracker.reset()
        tracker.add("model-parallel-rng", 5)
        found.append([float(engine.train_batch(iter(batch))) for batch in data])
        tracker.reset()
    for other in found[1:]:
        same(other, found[0])


def a_shuffle_that_seeds_decide_is_said(_: Path) -> None:
    """From the second epoch on samples came in another order than on another cut, in silence."""
    inputs, labels = zip(*[item for batch in batches(2) for item in batch], strict=True)
    samples = list(zip(torch.cat(inputs), torch.cat(labels), strict=True))
    for shuffle, generator in ((True, None), (True, torch.Generator().manual_seed(0)), (False, None)):
        losses = []
        for place in ([0, 3, 8], [0, 5, 8]):
            _seed()
            if generator is not None:
                generator.manual_seed(0)
            loader = DataLoader(samples, batch_size=4, shuffle=shuffle, generator=generator)  # type: ignore[arg-type]
            with said_here() as said:
                engine, _, _ = start(mlp(), place, optimizer=two_groups)
                data = iter(RepeatingLoader(loader))
                losses.append([float(engine.train_batch(data)) for _ in range(NUM_STEPS)])
            lines = [line for of_rank in gather_objects(said) for line in of_rank if "are shuffled anew" in line]
            is_said = shuffle and generator is None and place == [0, 3, 8]  # once in a job
            assert len(lines) == is_said, lines
        if not shuffle or generator is not None:
            same(*losses)


def other_data_at_both_ends_are_said(_: Path) -> None:
    """Each rank shuffled by its own numbers, inputs met the labels of other samples, and nothing was said."""
    inputs, labels = zip(*[item for batch in batches(2) for item in batch], strict=True)
    samples = list(zip(torch.cat(inputs), torch.cat(labels), strict=True))

    def shuffled(seed: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(seed)
        return iter(RepeatingLoader(DataLoader(samples, batch_size=4, shuffle=True, generator=generator)))  # type: ignore[arg-type]

    def with_zeros(rank: int) -> Iterator[Any]:
        for x, y in shuffled(rank):
            yield (x, torch.zeros_like(y)) if rank == 0 else (torch.zeros_like(x), y)

    def with_noise(rank: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(rank)
        for x, y in shuffled(0):
            yield x + torch.randn(x.shape, generator=generator), y

    def later(rank: int) -> Iterator[Any]:
        same, other = shuffled(0), shuffled(rank + 1)
        yield from (next(same) for _ in range(3 * NUM_MICRO_BATCHES))
        yield from other

    both = plans.plan_of(
        plans.chain_of(8), plans.platform_of(2), [0, 3, 6, 8], (0, 1, 0), orders=plans.depth_first((0, 1, 0), 4, 3)
    )
    for make, place, is_said in (
        (shuffled, [0, 3, 8], True), (later, [0, 3, 8], True), (lambda _: shuffled(0), [0, 3, 8], False),
        (with_zeros, [0, 3, 8], False), (with_noise, [0, 3, 8], False), (shuffled, both, False),
    ):  # fmt: skip
        said: list[str] = []
        with patch.object(both_ends, "warn_once", lambda _, line: said.append(line)):  # noqa: B023
            engine, _, _ = start(mlp(), [0, 3, 8], optimizer=two_groups)
            if place is both:
                engine.recut(both)
            data = make(engine.global_rank)
            for _ in range(NUM_STEPS):
                engine.train_batch(data)
        words = "rank 0 reads other micro-batches for the first stage than rank 1 for the last one"
        assert [sum(words in line for line in lines) for lines in gather_objects(said)] == [is_said] * 2, (
            make,
            said,
        )


def draws_between_steps_of_a_rank_that_reads_no_more_are_said(_: Path) -> None:
    """Rank 1 had read until its last stage moved, and its program drew other numbers from then on, in silence."""
    inputs, labels = zip(*[item for batch in batches(2) for item in batch], strict=True)
    samples = list(zip(torch.cat(inputs), torch.cat(labels), strict=True))
    orders = plans.depth_first((0, 1, 0), 4, 3)
    plan = plans.plan_of(plans.chain_of(8), plans.platform_of(2), [0, 3, 6, 8], (0, 1, 0), orders=orders)
    own = torch.Generator().manual_seed(0)
    for generator, draws, is_said in ((None, True, True), (None, False, False), (own, True, False)):
        said: list[str] = []
        with patch.object(data_draws, "warn_once", lambda _, line: said.append(line)):  # noqa: B023
            engine, _, _ = start(mlp(), [0, 3, 8], optimizer=two_groups, seed_layers=False)
            data = iter(RepeatingLoader(DataLoader(samples, batch_size=4, shuffle=True, generator=generator)))  # type: ignore[arg-type]
            for step in range(NUM_STEPS):
                engine.train_batch(data)
                if draws:
                    _draw_from_all()
                if step == 1:
                    engine.recut(plan)
        lines = gather_objects(said)
        assert [len(of_rank) > 0 for of_rank in lines] == [False, is_said], (generator, draws, lines)
        assert all("reads no more data" in line and "(torch)" in line for line in lines[1]), lines


def weights_that_specs_draw_are_told_where_they_may_be_others(_: Path) -> None:
    """A tied weight summed to 1.40666 in plain DeepSpeed and to 0.09380 here, from one seed, in silence."""

    def weights(
        method: Any, *, is_built: bool = False, plain: bool = False, **options: Any
    ) -> tuple[Any, list[str]]:
        torch.manual_seed(1)
        tied = TiedLayerSpec("e", nn.Linear, WIDTH, WIDTH)
        layers: list[Any] = [tied, *(LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(8)), tied]
        if is_built:
            layers = [layer.build() for layer in layers[1:-1]]
        said: list[str] = []
        module_class = deepspeed.pipe.PipelineModule if plain else PipelineModule
        with patch.object(drawn_weights, "warn_once", lambda _, line: said.append(line)):
            module = module_class(
                layers, num_stages=2, loss_fn=loss_fn, partition_method=method, base_seed=7, **options
            )
        return {name: weight.detach().tolist() for name, weight in module.named_parameters()}, said

    def of_all(*arguments: Any, **options: Any) -> tuple[dict[str, Any], list[str]]:
        found = gather_objects(weights(*arguments, **options))
        return {key: each for of_rank, _ in found for key, each in of_rank.items()}, [*found[0][1], *found[1][1]]

    by_count, none = of_all("parameters", plain=True)
    by_number, _ = of_all("uniform", plain=True)
    assert none == [] and by_count != by_number
    assert of_all("madpipe") == (by_count, [])
    assert of_all([0, 5, 10]) == (by_number, [])
    _, said = of_all([0, 3, 10])
    assert len(said) == 2 and all("on the cut [0, 3, 10] initial weights may be others" in line for line in said)
    seeded, _ = of_all("uniform", plain=True, seed_layers=True)
    for method in "madpipe", [0, 3, 10]:
        assert of_all(method, seed_layers=True) == (seeded, [])
    built, _ = of_all("uniform", plain=True, is_built=True)
    for method in "madpipe", [0, 3, 8]:
        assert of_all(method, is_built=True) == (built, [])
    for pipeline, named in (
        ({}, None), ({"partition_method": "parameters"}, None), ({"partition_method": "madpipe"}, None),
        ({"partition_method": "uniform"}, "uniform"), ({"madpipe": {"algorithm": "type:linear"}}, "type:linear"),
    ):  # fmt: skip
        said = []
        torch.manual_seed(1)
        with patch.object(drawn_weights, "warn_once", lambda _, line: said.append(line)):  # noqa: B023
            start(mlp(), "madpipe", {"pipeline": pipeline}, optimizer=two_groups, seed_layers=False)
        assert len(said) == (named is not None), (pipeline, said)
        words = (
            "(torch) while specs built them: for the same seed their initial weights are those of plain DeepSpeed"
        )
        assert all(words in line and f"others than with {named!r}, which the conf" in line for line in said), said


CASES = [
    other_data_at_both_ends_are_said,
    weights_that_specs_draw_are_told_where_they_may_be_others,
    draws_between_steps_of_a_rank_that_reads_no_more_are_said,
    a_shuffle_that_seeds_decide_is_said,
    tracked_states_are_as_if_nothing_were_measured,
    layers_that_draw_are_said_where_a_plan_moves_them,
    data_is_drawn_as_if_nothing_were_planned, a_generator_draws_lazily_as_if_nothing_were_measured,
    draws_that_cannot_be_the_same_are_said,
]  # fmt: skip
