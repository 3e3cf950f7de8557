"""Recomputation chosen with the cut: against brute force over all cuts and ranges of layers, and the replay."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, combinations_with_replacement, pairwise, product
from operator import le

import numpy as np
import pytest

from deepspeed_partition import Chain, InfeasibleError, Plan, Platform, make_plan, replay
from deepspeed_partition.planner import recomputation
from deepspeed_partition.planner.allocation import Blocks, Placement
from deepspeed_partition.planner.data_parallel import seconds_of
from deepspeed_partition.planner.plan import PlannedStage
from deepspeed_partition.planner.recomputation import Recomputation, first_backward, rematerialized, stage_cost
from deepspeed_partition.planner.report.comparison import compare
from deepspeed_partition.planner.report.frontier import frontier
from deepspeed_partition.planner.simulate.replay_memory import StageCost
from deepspeed_partition.planner.solvers.bounds import lower_bound
from deepspeed_partition.planner.solvers.contiguous import recomputing
from deepspeed_partition.planner.solvers.contiguous.recomputing import best_recomputing_partition, least_bytes
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.pattern import one_f_one_b
from deepspeed_partition.planner.solvers.step import best_step
from deepspeed_partition.planner.solvers.step.recomputing_step import MixedChoices
from deepspeed_partition.planner.solvers.step.step_search import DepthRule, step_engine
from deepspeed_partition.planner.solvers.uniform_recomputation import uniform_choices
from tests.planner.instances import chain, problem_of, random_instance

FIXED = ("pipedream", "mcap", "uniform", "parameters")


def instance(seed: int, most_layers: int = 6, most_devices: int = 4) -> tuple[Chain, Platform]:
    """A small instance with some layers that must not run twice, in memory of about what it needs."""
    made, platform = random_instance(seed, most_layers, most_devices)
    pick = random.Random(seed)
    if seed % 4 == 1:
        layers = (replace(layer, recomputable=pick.random() < 0.7) for layer in made.layers)
        made = replace(made, layers=tuple(layers))
    least = int(least_bytes(problem_of(made, platform), 1)[0, made.num_layers])
    memory = max(1, int(least * pick.choice([0.4, 0.6, 0.8, 1, 1.3])))
    return made, replace(platform, memory_bytes=memory)


def with_ways(made: Chain, platform: Platform, mode: str = "block") -> Problem:
    problem = problem_of(made, platform)
    return replace(problem, recomputation=Recomputation(problem.times, mode))


def every_choice(made: Chain, stage: tuple[int, int], mode: str = "block") -> Iterator[Blocks]:
    """All sets of ranges of layers of a stage that may run twice, each range as a block."""
    start, stop = stage
    may = [layer.recomputable for layer in made.layers]
    if mode == "stage":
        yield ()
        if all(may[start:stop]):
            yield (stage,)
        return
    if start == stop:
        yield ()
        return
    yield from every_choice(made, (start + 1, stop))
    for end in range(start + 1, stop + 1):
        if not may[end - 1]:
            return
        for rest in every_choice(made, (end, stop)):
            yield ((start, end), *rest)


@pytest.mark.parametrize("seed", range(48))
def test_a_stage_counts_as_the_replay_does(seed):
    """Bytes and times of every choice; and of all choices none is missed that some number in flight wants."""
    made, platform = instance(seed, most_layers=5)
    problem = with_ways(made, platform)
    assert problem.recomputation is not None
    for stage in combinations(range(made.num_layers + 1), 2):
        ways, plain = problem.recomputation.ways(stage), problem.times.backward_ticks(*stage)
        found = list(zip(ways.extra.tolist(), ways.stash.tolist(), ways.transient.tolist(), strict=True))
        for number, way in enumerate(found):
            cost = stage_cost(problem.times, problem.table, stage, ways.blocks(number))
            assert (cost.backward - plain, cost.stash, cost.transient) == way
        for blocks in every_choice(made, stage):
            cost = stage_cost(problem.times, problem.table, stage, blocks)
            planned = PlannedStage(
                layers=stage, layer_names=(), device=0, rematerialize=rematerialized(blocks, stage), in_flight=1
            )
            steady, step = StageCost(made, planned), StageCost(made, planned, in_step=True)
            assert cost.stash == steady.stash_bytes == step.stash_bytes
            assert cost.transient == steady.backward_transient_bytes == step.backward_transient_bytes
            assert cost.transient >= steady.forward_transient_bytes
            assert cost.forward_transient == step.forward_transient_bytes
            assert cost.backward == problem.times.clock.ticks(steady.backward_seconds)
            for in_flight in (1, 2, 5):
                needs = in_flight * cost.stash + cost.transient
                assert any(
                    extra <= cost.backward - plain and in_flight * stash + transient <= needs
                    for extra, stash, transient in found
                )


@pytest.mark.parametrize("seed", range(0, 200, 5))
def test_everything_recomputed_is_a_chain_of_its_own(seed):
    made, platform = instance(seed)
    problem = with_ways(made, platform)
    for uniform in uniform_choices(problem):
        view = uniform.problem
        for stage in combinations(range(made.num_layers + 1), 2):
            chosen = stage_cost(problem.times, problem.table, stage, uniform.blocks(stage))
            assert stage_cost(view.times, view.table, stage) == chosen


def best_period_of_all(problem: Problem, mode: str) -> int | None:
    """The shortest period over all contiguous partitions and all that their stages may recompute."""
    size, options = problem.chain.num_layers, {}
    for stage in combinations(range(size + 1), 2):
        choices = every_choice(problem.chain, stage, mode)
        costs = [stage_cost(problem.times, problem.table, stage, blocks) for blocks in choices]
        known = {(each.compute, min(each.most_in_flight, 20)) for each in costs if each.most_in_flight}
        options[stage] = [
            each for each in known if not any(a <= each[0] and b >= each[1] for a, b in known - {each})
        ]
    best = None
    for count in range(min(size, problem.platform.num_devices)):
        for inner in combinations(range(1, size), count):
            cuts = (0, *inner, size)
            for choice in product(*(options[stage] for stage in pairwise(cuts))):
                plain = [problem.times.compute_ticks(*stage) for stage in pairwise(cuts)]
                extra = [load - before for (load, _), before in zip(choice, plain, strict=True)]
                loads = one_f_one_b.pseudo_stage_loads(problem.times, cuts, extra)
                period = one_f_one_b.least_period(loads, [room for _, room in choice])
                best = period if best is None or (period is not None and period < best) else best
    return best


@pytest.mark.parametrize("mode", ["stage", "block"])
@pytest.mark.parametrize("seed", range(160))
def test_the_best_contiguous_partition_of_all_choices(seed, mode):
    made, platform = instance(seed)
    problem = with_ways(made, platform, mode)
    found, best = best_recomputing_partition(problem), best_period_of_all(problem, mode)
    assert (None if found is None else found.period) == best
    if found is not None:
        assert found.proved and lower_bound(problem) <= found.period


@pytest.mark.parametrize("num_micro_batches", [None, 4])
@pytest.mark.parametrize("seed", range(48))
def test_every_plan_keeps_its_promises(seed, num_micro_batches):
    """Replayed, saved and read; no mode is slower than one that it contains; the least memory would do."""
    made, platform = instance(seed)
    for algorithm in ("madpipe", "contiguous", *FIXED):

        def plan(mode: str, memory_bytes: int = platform.memory_bytes, algorithm: str = algorithm) -> Plan | None:
            try:
                found = make_plan(
                    made, replace(platform, memory_bytes=memory_bytes), algorithm, recompute=mode,
                    num_micro_batches=num_micro_batches,
                )  # fmt: skip
            except InfeasibleError as error:
                smallest = error.smallest_memory_bytes
                assert smallest is not None and smallest > memory_bytes
                if memory_bytes == platform.memory_bytes:
                    assert plan(mode, smallest) is not None
                return None
            assert replay(found, made).violations == ()
            assert Plan.from_dict(found.to_dict()) == found
            layers = [layer for stage in found.stages for block in stage.blocks for layer in range(*block)]
            assert all(made.layers[layer].recomputable for layer in layers)
            assert not layers or mode != "never"
            return found

        seconds = {}
        for mode in ("never", "stage", "block", "auto"):
            found = plan(mode)
            seconds[mode] = float("inf") if found is None else seconds_of(found)
        assert seconds["auto"] <= min(seconds.values())
        assert seconds["stage"] <= seconds["never"]


@pytest.mark.parametrize("seed", range(2, 120, 3))
def test_a_step_is_never_longer_than_under_a_uniform_choice(seed):
    """None, all, or one stage alone, as whole stages, of each partition under 1F1B."""
    made, platform = instance(seed, most_layers=5, most_devices=3)
    problem = replace(with_ways(made, platform), num_micro_batches=4)
    least = float("inf")
    for count in range(min(made.num_layers, platform.num_devices)):
        for inner in combinations(range(1, made.num_layers), count):
            stages = list(pairwise((0, *inner, made.num_layers)))
            whole: list[Blocks] = [
                (stage,) if all(layer.recomputable for layer in made.layers[slice(*stage)]) else ()
                for stage in stages
            ]
            alone = [
                tuple(blocks if one == other else () for other, blocks in enumerate(whole))
                for one in range(len(whole))
            ]
            for choice in ((), tuple(whole), *alone):
                engine = step_engine(problem, Placement.contiguous((0, *inner, made.num_layers), choice))
                if min(engine.most_in_flight) < 1:
                    continue
                for depths in ([1] * len(stages), range(len(stages), 0, -1), range(2 * len(stages) - 1, 0, -2)):
                    run = engine.run(4, DepthRule("1F1B", tuple(depths)).choice(engine, 4))
                    if run is not None and max(engine.peaks(run)) <= platform.memory_bytes:
                        least = min(least, problem.times.clock.seconds(run.ticks))
    if least < float("inf"):
        plan = make_plan(made, platform, num_micro_batches=4)
        assert plan.step is not None and plan.step.step_seconds <= least


def test_the_even_partition_is_tried_before_long_searches(monkeypatch):
    """A limit may end before these have found anything: here they do nothing."""
    monkeypatch.setattr(best_step, "_adopt", lambda *others: None)
    for name in ("search_contiguous", "search_shared"):
        monkeypatch.setattr(MixedChoices, name, lambda *others: None)
    made = chain([1.0] * 12, [2.0] * 12, weights=[10] * 12, stash=[100] * 12)
    platform = Platform(num_devices=4, memory_bytes=1200, bandwidth=1e9)
    contiguous, even = (
        seconds_of(make_plan(made, platform, algorithm, num_micro_batches=8, recompute="block"))
        for algorithm in ("contiguous", "uniform")
    )
    assert contiguous <= even


def saving_choices(problem: Problem, stage: tuple[int, int], mode: str) -> list[tuple[int, Blocks]]:
    """Sets of ranges of a stage that fit, each with its extra ticks, but those that others beat in all numbers."""
    training = problem.table.training
    late = training.late_gradients([stage])[0] if training.has_gradients else np.zeros(stage[1] - stage[0], int)
    known: list[tuple[tuple[int, ...], Blocks]] = []
    for blocks in every_choice(problem.chain, stage, mode):
        cost = stage_cost(problem.times, problem.table, stage, blocks)
        first = first_backward(problem.times, problem.table, stage, blocks, late)
        if cost.most_in_flight:
            known.append(((cost.backward, cost.stash, cost.transient, cost.forward_transient, first), blocks))
    least: list[tuple[tuple[int, ...], Blocks]] = []
    for numbers, blocks in sorted(known):
        if not any(all(map(le, other, numbers)) for other, _ in least):
            least.append((numbers, blocks))
    plain = problem.times.backward_ticks(*stage)
    return [(numbers[0] - plain, blocks) for numbers, blocks in least]


def shortest_step_of_all(problem: Problem, mode: str) -> int | None:
    """The shortest step of 1F1B over all contiguous partitions, all that stages may recompute, and all depths.

    Recomputation that nothing needs may shorten a step by chance, for it delays what would come too early; such a
    choice does not count: one with which the same depths fit where a stage recomputes less.
    """
    size, m = problem.chain.num_layers, problem.num_micro_batches
    assert m is not None
    options = {stage: saving_choices(problem, stage, mode) for stage in combinations(range(size + 1), 2)}
    best: int | None = None

    def ticks(cuts: tuple[int, ...], choice: tuple[Blocks, ...], depths: tuple[int, ...]) -> int | None:
        engine = step_engine(problem, Placement.contiguous(cuts, choice))
        if any(depth > room for depth, room in zip(depths, engine.most_in_flight, strict=True)):
            return None
        run = engine.run(m, DepthRule("1F1B", depths).choice(engine, m))
        assert run is not None
        return run.ticks if max(engine.peaks(run)) <= problem.platform.memory_bytes else None

    for cuts in (
        (0, *inner, size)
        for count in range(min(size, problem.platform.num_devices))
        for inner in combinations(range(1, size), count)
    ):
        for chosen in product(*(options[stage] for stage in pairwise(cuts))):
            choice = tuple(blocks for _, blocks in chosen)
            bound = step_engine(problem, Placement.contiguous(cuts, choice)).bound(m)
            for depths in combinations_with_replacement(range(m, 0, -1), len(choice)):
                found = None if best is not None and bound >= best else ticks(cuts, choice, depths)
                if found is None or (best is not None and found >= best):
                    continue
                if not any(
                    extra < chosen[stage][0] and ticks(cuts, (*choice[:stage], less, *choice[stage + 1 :]), depths)
                    for stage in range(len(choice))
                    for extra, less in options[cuts[stage], cuts[stage + 1]]
                ):
                    best = found
    return best


@pytest.mark.parametrize("mode", ["stage", "block"])
@pytest.mark.parametrize("seed", [*range(160), 2116, 2754, 2924])
def test_no_choice_has_a_shorter_step(seed, mode):
    """Of a small chain, all cuts, sets of ranges and depths are tried: beyond 1F1B the planner may do better."""
    made, platform = instance(seed, most_layers=5)
    problem = replace(with_ways(made, platform, mode), num_micro_batches=5)
    best = shortest_step_of_all(problem, mode)
    try:
        plan = make_plan(made, platform, "contiguous", num_micro_batches=5, recompute=mode)
    except InfeasibleError:
        assert best is None
    else:
        assert best is not None and plan.step is not None
        assert plan.step.step_seconds <= problem.times.clock.seconds(best)


def deep(size: int = 12) -> Chain:
    pick = random.Random(size)
    return chain(
        [1 + 0.01 * pick.random() for _ in range(size)], [2.0] * size, weights=[1] * size, outputs=[10] * size,
        stash=[90 + pick.randint(0, 20) for _ in range(size)], input_bytes=10,
    )  # fmt: skip


def test_what_it_is_worth():
    """Blocks of layers fit where nothing else does, and are faster than whole stages."""
    layers = deep()
    platform = Platform(num_devices=2, memory_bytes=700, bandwidth=1e9)
    with pytest.raises(InfeasibleError) as nothing:
        make_plan(layers, replace(platform, memory_bytes=300), recompute="never")
    plan = make_plan(layers, replace(platform, memory_bytes=300))
    assert max(plan.peak_memory_bytes) <= 300 < (nothing.value.smallest_memory_bytes or 0)
    assert any(isinstance(stage.rematerialize, tuple) for stage in plan.stages)
    seconds = {
        mode: make_plan(layers, platform, recompute=mode).period_seconds for mode in ("never", "stage", "block")
    }
    assert seconds["block"] < min(seconds["never"], seconds["stage"])


def test_sets_that_are_cut_short_prove_nothing_false():
    """In a long chain of unlike layers not all ways are remembered: what is claimed holds all the same."""
    layers = deep(20)
    platform = Platform(num_devices=2, memory_bytes=1400, bandwidth=1e9)
    problem = with_ways(layers, platform)
    found = best_recomputing_partition(problem)
    assert found is not None and problem.recomputation is not None and not problem.recomputation.is_exact
    assert lower_bound(problem) <= found.period
    for stage in [(0, 10), (3, 20)]:
        real, below = (problem.recomputation.ways(stage, optimistic=each) for each in (False, True))
        for extra, stash, transient in zip(real.extra, real.stash, real.transient, strict=True):
            for in_flight in (1, 3):
                fits = (below.extra <= extra) & (
                    in_flight * below.stash + below.transient <= in_flight * stash + transient
                )
                assert fits.any()


@pytest.mark.parametrize("seed", [155, 210, *range(40, 80)])
def test_blocks_that_may_begin_at_some_layers_alone_prove_nothing_false(seed, monkeypatch):
    """Plans of long chains were called proved, though blocks that begin elsewhere were better."""
    for name, value in {"MOST_POSITIONS": 3, "SMALL": 0, "MOST_WAYS": 3}.items():
        monkeypatch.setattr(recomputation, name, value)
    problem = with_ways(*instance(seed))
    found = best_recomputing_partition(problem)
    if found is not None:
        best = best_period_of_all(problem, "block")
        assert found.period == best if found.proved else best is not None and found.period >= best


def test_larger_sets_prove_what_small_ones_leave_open(monkeypatch):
    """And may find something shorter; a plan without a proof says why."""
    layers, platform = deep(16), Platform(num_devices=2, memory_bytes=1500, bandwidth=1e9)
    more = make_plan(layers, platform, "contiguous")
    monkeypatch.setattr(recomputing, "MORE_WAYS", recomputation.MOST_WAYS)
    fewer = make_plan(layers, platform, "contiguous")
    assert more.proved and not fewer.proved and more.period_seconds <= fewer.period_seconds
    said = " ".join(fewer.summary().split())
    assert "not proved: not all ways to recompute so many layers are compared" in said


def test_commands_take_it(tmp_path):
    layers = deep(6)
    platform = Platform(num_devices=2, memory_bytes=420, bandwidth=1e9)
    without, with_it = (
        compare(layers, platform, ("contiguous",), recompute=mode).contenders[0].plan for mode in ("never", "auto")
    )
    assert with_it is not None and (without is None or with_it.period_seconds < without.period_seconds)
    smallest = [
        frontier(layers, replace(platform, memory_bytes=10**6), "contiguous", recompute=mode).plans[-1]
        for mode in ("never", "auto")
    ]
    assert max(smallest[1].peak_memory_bytes) < max(smallest[0].peak_memory_bytes)


def test_what_is_refused():
    layers, platform = deep(4), Platform(num_devices=2, memory_bytes=10**6, bandwidth=1e9)
    with pytest.raises(ValueError, match="recompute is 'always': it must be one of auto, never, stage, block"):
        make_plan(layers, platform, recompute="always")
    with pytest.raises(ValueError, match="use activation_checkpoint_interval, or leave recompute out"):
        make_plan(layers, platform, recompute="stage", num_stages=2, num_micro_batches=4)
    assert make_plan(layers, platform, num_stages=2, num_micro_batches=4).step is not None


def test_tables_of_uniform_choices_go_with_them():
    """A choice and its table referred to each other: at 2048 layers, half a gigabyte outlived each search."""
    layers = chain([1] * 6, [2] * 6, outputs=[3] * 6, stash=[9] * 6)
    platform = Platform(num_devices=2, memory_bytes=10**6, bandwidth=1e9)
    problem = problem_of(layers, platform)
    problem = replace(problem, recomputation=Recomputation(problem.times, "auto"))
    gc.disable()
    try:
        tables = [weakref.ref(uniform.problem.table) for uniform in uniform_choices(problem)]
        assert len(tables) == 2
        assert [table() for table in tables] == [None, None]
    finally:
        gc.enable()


def test_a_partition_without_room_for_its_steady_state_is_no_answer():
    """One micro-batch at a time, its step has room; the smallest memory that is told has room for both."""
    made, platform = random_instance(1205, most_layers=5)
    with pytest.raises(InfeasibleError) as refusal:
        make_plan(made, platform, "contiguous", num_micro_batches=1)
    enough = refusal.value.smallest_memory_bytes
    assert enough is not None and enough > platform.memory_bytes
    plan = make_plan(made, replace(platform, memory_bytes=enough), "contiguous", num_micro_batches=1)
    assert not replay(plan, made).violations
