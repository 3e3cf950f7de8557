"""Plans that decide micro-batch by micro-batch: several per period, some recomputed, backwards in two halves.

Random patterns and steps, held against a checker that counts by the words of the format alone.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from deepspeed_partition import (
    Chain,
    ChainFormatError,
    LayerProfile,
    Plan,
    PlanFormatError,
    PlanMismatchError,
    Platform,
    replay,
)
from deepspeed_partition.planner.plan import ChainReference, MemoryUse, PlannedStage, StepPlan
from deepspeed_partition.planner.report.draw import summary
from deepspeed_partition.planner.report.draw_timelines import step_order, timeline
from deepspeed_partition.planner.report.memory_report import explain_memory
from deepspeed_partition.planner.schedule import PlacedOperation
from deepspeed_partition.planner.simulate.replay import replay_and_count
from deepspeed_partition.schedule.instructions import Compute
from deepspeed_partition.schedule.lowering import lower, lower_evaluation
from deepspeed_partition.schedule.other_runtimes import ConversionError, megatron_layout, torch_csv
from tests.exhaustive import some
from tests.planner.instances import FREE


def random_chain(pick: random.Random, num_layers: int) -> Chain:
    layers = []
    for index in range(num_layers):
        first, second = pick.randint(1, 2), pick.randint(1, 2)
        layers.append(
            LayerProfile(
                name=f"l{index}", forward_seconds=pick.randint(1, 3), backward_seconds=first + second,
                weight_bytes=pick.randint(0, 3), output_bytes=pick.randint(0, 5), stash_bytes=pick.randint(1, 20),
                transient_bytes=pick.choice([0, 0, 7]), backward_input_seconds=first,
                backward_weight_seconds=second, weight_stash_bytes=pick.choice([None, 3, 30]),
            )
        )  # fmt: skip
    return Chain(input_bytes=pick.randint(0, 6), layers=tuple(layers), name="random")


def random_kinds(pick: random.Random) -> list[str]:
    """What one stage runs on one micro-batch, in order."""
    forward = pick.choice([["F"], ["F"], ["f", "R"], ["f"]])
    return [*forward, *pick.choice([["B"], ["B"], ["I", "W"]])]


def seconds_of(chain: Chain, stage: int, kind: str, kinds: list[str]) -> int:
    layer = chain.layers[stage]
    again = layer.forward_seconds if kinds[0] == "f" and "R" not in kinds and kind in "BI" else 0
    own = {
        "B": layer.backward_seconds, "I": layer.backward_input_seconds, "W": layer.backward_weight_seconds,
    }.get(kind, layer.forward_seconds)  # fmt: skip
    return int(own + again)


Spans = dict[tuple[str, int, int], tuple[int, int]]
"""Start and end of each kind of operation, by stage and micro-batch."""


def random_pattern(pick: random.Random, chain: Chain, number: int) -> tuple[int, Spans]:
    """A period that is long enough, and the operations of ``number`` micro-batches at random free places of it."""
    period = pick.randint(1, 3) + number * max(
        2 * int(layer.forward_seconds) + int(layer.backward_seconds) for layer in chain.layers
    )
    busy = [[False] * period for _ in chain.layers]
    spans: Spans = {}

    def place(stage: int, kind: str, kinds: list[str], micro_batch: int, ready: int) -> int:
        lasts = seconds_of(chain, stage, kind, kinds)
        places = [
            start
            for start in range(ready, ready + period)
            if not any(busy[stage][time % period] for time in range(start, start + lasts))
        ]
        start = pick.choice(places[:3]) if places else -1
        if start < 0:
            raise LookupError
        for time in range(start, start + lasts):
            busy[stage][time % period] = True
        spans[kind, stage, micro_batch] = start, start + lasts
        return start + lasts

    for micro_batch in range(number):
        ran = [random_kinds(pick) for _ in chain.layers]
        ready = 0
        forwards = []
        for stage, kinds in enumerate(ran):
            start = ready
            if stage == 0:
                start = pick.randrange(period)
            ready = place(stage, kinds[0], kinds, micro_batch, start)
            if stage == 0:
                assert spans[kinds[0], 0, micro_batch][0] < 2 * period
            forwards.append(ready)
        for stage, kinds in reversed(list(enumerate(ran))):
            if "R" in kinds:
                ready = max(ready, place(stage, "R", kinds, micro_batch, forwards[stage] + pick.randint(0, 4)))
            back = "I" if "I" in kinds else "B"
            ready = place(stage, back, kinds, micro_batch, ready)
            if "W" in kinds:
                place(stage, "W", kinds, micro_batch, ready + pick.randint(0, 5))
    return period, spans


def held(chain: Chain, spans: Spans, stage: int, micro_batch: int) -> list[tuple[int, int, int]]:
    """What a stage holds of a micro-batch: from, until, bytes. The words of the format."""
    layer = chain.layers[stage]
    ran = {kind: spans[kind, stage, micro_batch] for kind in "FfRBIW" if (kind, stage, micro_batch) in spans}
    back = ran.get("B") or ran["I"]
    until = back[1] if "B" in ran else back[0]
    if "F" in ran:
        found = [(ran["F"][0], until, layer.stash_bytes)]
    else:
        begin = ran["R"][0] if "R" in ran else back[0]
        found = [(ran["f"][1], begin, chain.boundary_bytes(stage)), (begin, until, layer.stash_bytes)]
    if "W" in ran:
        stays = layer.stash_bytes if layer.weight_stash_bytes is None else layer.weight_stash_bytes
        found.append((back[0], ran["W"][1], stays))
    return found


def waiting(chain: Chain, spans: Spans, stage: int, micro_batch: int) -> list[tuple[int, int, int]]:
    """Tensors that wait on the receiver; transfers take no time."""
    found = []
    forward = spans.get(("F", stage, micro_batch)) or spans["f", stage, micro_batch]
    back = spans.get(("B", stage, micro_batch)) or spans["I", stage, micro_batch]
    if stage:
        before = spans.get(("F", stage - 1, micro_batch)) or spans["f", stage - 1, micro_batch]
        found.append((before[1], forward[0], chain.boundary_bytes(stage)))
    if stage + 1 < chain.num_layers:
        after = spans.get(("B", stage + 1, micro_batch)) or spans["I", stage + 1, micro_batch]
        found.append((after[1], back[0], chain.boundary_bytes(stage + 1)))
    return found


def peak(chain: Chain, spans: Spans, stage: int, weights: int, period: int | None) -> int:
    """The most bytes of a stage's device at any second; of a pattern, over all of its periods."""
    number = 1 + max(micro_batch for *_, micro_batch in spans)
    lasting = [each for m in range(number) for each in held(chain, spans, stage, m)]
    if period is None:  # as many buffers are reserved as there are tensors
        boundaries = [each for each in (stage, stage + 1) if 0 < each < chain.num_layers]
        weights += 2 * number * sum(map(chain.boundary_bytes, boundaries))
    else:
        lasting += [each for m in range(number) for each in waiting(chain, spans, stage, m)]
    working = [span for (_, place, _), span in spans.items() if place == stage]
    last = max(end for _, end in spans.values())
    most = 0
    for time in range(period or last):
        times = [time] if period is None else range(time, last + period, period)
        kept = sum(size for begin, until, size in lasting for now in times if begin <= now < until)
        runs = any(begin <= now < until for begin, until in working for now in times)
        most = max(most, kept + runs * chain.layers[stage].transient_bytes)
    return weights + most


def plan_of(
    chain: Chain, period: int, number: int, spans: Spans, order: tuple | None = None, num_micro_batches: int = 0
) -> Plan:
    """A plan with open memory; the transfers begin when what they carry is there."""
    rows = []

    def add(name: str, index: int, span: tuple[int, int], **place) -> None:
        rows.append(
            PlacedOperation(
                operation=name, start_seconds=span[0] % period, duration_seconds=span[1] - span[0],
                shift=span[0] // period, index=index, **place,
            )
        )  # fmt: skip

    first_shift = {m: (spans.get(("F", 0, m)) or spans["f", 0, m])[0] // period * period for m in range(number)}
    for (kind, stage, m), (begin, end) in spans.items():
        begin, end = begin - first_shift[m], end - first_shift[m]
        add(f"{kind}{stage}", m, (begin, end), device=stage)
        if kind in "Ff" and stage + 1 < chain.num_layers:
            add(f"SF{stage}", m, (end, end), link=(stage, stage + 1))
        if kind in "BI" and stage:
            add(f"SB{stage - 1}", m, (end, end), link=(stage - 1, stage))
    nothing = (MemoryUse(weights=0, stash=0, buffers=0, transient=0),) * chain.num_layers
    step = None
    if order is not None:
        step = StepPlan(
            num_micro_batches=num_micro_batches, step_seconds=1, blocking_step_seconds=None, order=order
        )
    return Plan(
        chain=ChainReference.of(chain),
        platform=Platform(
            num_devices=chain.num_layers, memory_bytes=10**6, bandwidth=FREE, comm_buffers=2 * num_micro_batches
        ),
        algorithm="by hand", period_seconds=period / number, micro_batches_per_period=number,
        lower_bound_seconds=period / number, gap=0, proved=False,
        stages=tuple(PlannedStage(layers=(i, i + 1), device=i, in_flight=1) for i in range(chain.num_layers)),
        operations=tuple(rows), memory=nothing, peak_memory_bytes=(0,) * chain.num_layers, step=step,
    )  # fmt: skip


def patterns(count: int):
    """Random chains, periods and patterns; those that do not fit into their period are left out."""
    found = seed = 0
    while found < count:
        seed += 1
        pick = random.Random(seed)
        chain, number = random_chain(pick, pick.randint(1, 3)), pick.randint(1, 4)
        try:
            period, spans = random_pattern(pick, chain, number)
        except LookupError:
            continue
        found += 1
        yield seed, chain, number, period, spans


def test_the_replay_of_a_pattern_counts_what_the_format_says():
    """Red if a forward that keeps nothing held its stash, if R or B within did not, if W ended nothing."""
    seen = set()
    for seed, chain, number, period, spans in patterns(some(160)):
        plan, found = replay_and_count(plan_of(chain, period, number, spans), chain)
        assert found.violations == (), (seed, found.violations)
        weights = [3 * layer.weight_bytes for layer in chain.layers]
        for stage in range(chain.num_layers):
            assert plan.peak_memory_bytes[stage] == peak(chain, spans, stage, weights[stage], period), (
                seed,
                stage,
            )
        assert Plan.from_dict(plan.to_dict()) == plan
        assert replay(Plan.from_dict(plan.to_dict()), chain).violations == ()
        seen |= {operation.operation[0] for operation in plan.operations}
    assert seen == set("FfRBIWS")


def random_step(pick: random.Random, chain: Chain, number: int) -> tuple[tuple, Spans]:
    """Orders of a step, and the instants at which an engine runs them that starts each as early as it can."""
    kinds = {(stage, m): random_kinds(pick) for stage in range(chain.num_layers) for m in range(number)}
    orders: list[list[tuple[str, int]]] = [[] for _ in chain.layers]
    spans: Spans = {}
    free = [0] * chain.num_layers
    last = chain.num_layers - 1

    def ready(kind: str, stage: int, m: int) -> int | None:
        """When the operation may start; None while something that it needs has not run."""
        needs = []
        if kind in "Ff":
            needs += [[("F", stage - 1, m), ("f", stage - 1, m)]] if stage else []
        elif kind == "R":
            needs += [[("f", stage, m)]]
        elif kind == "W":
            needs += [[("I", stage, m)]]
        else:
            needs += [[("B", stage + 1, m), ("I", stage + 1, m)]] if stage < last else []
            needs += [[("R", stage, m)]] if "R" in kinds[stage, m] else [[("F", stage, m), ("f", stage, m)]]
        ends = [[spans[key][1] for key in each if key in spans] for each in needs]
        return None if any(not each for each in ends) else max([0, *(end for each in ends for end in each)])

    todo = {(kind, stage, m) for (stage, m), each in kinds.items() for kind in each}
    while todo:
        startable = sorted(key for key in todo if ready(*key) is not None)
        kind, stage, m = pick.choice(startable)
        begin = max(free[stage], ready(kind, stage, m) or 0)
        free[stage] = begin + seconds_of(chain, stage, kind, kinds[stage, m])
        spans[kind, stage, m] = begin, free[stage]
        orders[stage].append((f"{kind}{stage}", m))
        todo.remove((kind, stage, m))
    return tuple(map(tuple, orders)), spans


def test_the_replay_of_a_step_runs_and_counts_what_the_format_says():
    """Red if B did not wait for R, or were as long without one; if W held nothing; if a step ended before W."""
    for seed in range(some(160)):
        pick = random.Random(seed)
        chain, m = random_chain(pick, pick.randint(1, 3)), pick.randint(1, 4)
        order, spans = random_step(pick, chain, m)
        pattern = {
            key: (start, start + lasts)
            for key, start, lasts in one_after_the_other(chain)
        }  # fmt: skip
        period = max(end for _, end in pattern.values())
        plan = plan_of(chain, period, 1, pattern, order, m)
        took = max(end for _, end in spans.values())
        plan = replace(plan, step=replace(plan.step, step_seconds=took))
        plan, found = replay_and_count(plan, chain)
        assert found.violations == (), (seed, found.violations)
        weights = [3 * layer.weight_bytes for layer in chain.layers]
        for stage in range(chain.num_layers):
            assert plan.peak_memory_bytes[stage] == peak(chain, spans, stage, weights[stage], None), (seed, stage)
        assert Plan.from_dict(plan.to_dict()) == plan
        for device, instructions in enumerate(lower(plan, m).lists):
            computed = [(each.name, each.micro_batch) for each in instructions if isinstance(each, Compute)]
            assert computed == list(order[device])


def one_after_the_other(chain: Chain):
    """The pattern in which one micro-batch runs from end to end before the next one."""
    now = 0
    for kind, stages in (("F", range(chain.num_layers)), ("B", reversed(range(chain.num_layers)))):
        for stage in stages:
            lasts = seconds_of(chain, stage, kind, ["F", "B"])
            yield (kind, stage, 0), now, lasts
            now += lasts


def two_per_period() -> tuple[Chain, Plan]:
    """One stage; of two micro-batches one is recomputed by R, with its weights' gradients apart: 5 + 6 seconds."""
    layer = LayerProfile(
        name="a", forward_seconds=1, backward_seconds=4, weight_bytes=1, output_bytes=0, stash_bytes=10,
        backward_input_seconds=1, backward_weight_seconds=3, weight_stash_bytes=4,
    )  # fmt: skip
    chain = Chain(input_bytes=2, layers=(layer,), name="one")
    spans = {
        ("f", 0, 0): (0, 1), ("F", 0, 1): (1, 2), ("B", 0, 1): (2, 6), ("R", 0, 0): (6, 7),
        ("I", 0, 0): (7, 8), ("W", 0, 0): (8, 11),
    }  # fmt: skip
    return chain, replay_and_count(plan_of(chain, 11, 2, spans), chain)[0]


def with_row(plan: Plan, name: str, **changes) -> Plan:
    rows = [replace(row, **changes) if row.operation == name else row for row in plan.operations]
    return replace(plan, operations=tuple(rows))


def test_by_hand():
    """While F and B of micro-batch 1 run, micro-batch 0 holds its input, 2 bytes; with weights 3, 15 in all."""
    chain, plan = two_per_period()
    assert replay(plan, chain).violations == ()
    assert plan.pattern_seconds == 11
    assert plan.peak_memory_bytes == (3 + 10 + 2,)
    assert plan.stages[0].in_flight == 2
    data = plan.to_dict()
    assert (data["micro_batches_per_period"], data["pattern_seconds"]) == (2, 11)
    assert [row.get("index", 0) for row in data["operations"]] == [0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("R0", {"start_seconds": 0.5}, "device 0 runs f0 of index 0 until 1 s and R0 of index 0 from 0.5 s"),
        ("I0", {"start_seconds": 6.5}, "I0 of index 0 starts at 6.5 s, before R0 has ended at 7 s"),
        ("W0", {"start_seconds": 7.5}, "W0 of index 0 starts at 7.5 s, before I0 has ended at 8 s"),
        ("B0", {"shift": 1}, "needs 25 bytes and the plan says 15"),
        ("f0", {"operation": "F0"}, "R0 of index 0 is no operation of this allocation"),
        ("f0", {"shift": 1}, "f0 of index 0 has shift 1, not 0"),
        ("W0", {"operation": "B0"}, "I0 of index 0 is no operation"),
        ("F0", {"index": 0}, "F0 of index 1 is missing"),
        ("I0", {"duration_seconds": 2}, "I0 of index 0 lasts 1 s and the plan says 2 s"),
        ("R0", None, "I0 of index 0 lasts 2 s and the plan says 1 s"),
        ("W0", {"start_seconds": 11}, "not within the period of 11 s"),
    ],
)
def test_what_breaks_is_found(name, changes, message):
    chain, plan = two_per_period()
    if changes is None:
        broken = replace(plan, operations=tuple(row for row in plan.operations if row.operation != name))
    else:
        broken = with_row(plan, name, **changes)
    violations = replay(broken, chain).violations
    assert any(re.search(message, violation) for violation in violations), violations


def test_halves_need_their_times():
    chain, plan = two_per_period()
    layer = replace(chain.layers[0], backward_input_seconds=None, backward_weight_seconds=None)
    whole = replace(chain, layers=(layer,))
    found = replay(replace(plan, chain=ChainReference.of(whole)), whole)
    assert found.violations == ("I0 is half a backward, and the chain does not say how long its halves last",)


def test_malformed_files_are_refused():
    chain, plan = two_per_period()
    for change, message in (
        (
            {"pattern_seconds": 12},
            "pattern_seconds is 12, and micro_batches_per_period times period_seconds is 11",
        ),
        (
            {"micro_batches_per_period": 1, "pattern_seconds": 5.5},
            "has index 1, and micro_batches_per_period is 1",
        ),
        ({"micro_batches_per_period": 0}, "micro_batches_per_period"),
    ):
        with pytest.raises(PlanFormatError, match=message):
            Plan.from_dict(plan.to_dict() | change)
    for change, message in (
        ({"backward_input_seconds": 2.0}, "are 5.0 together, and backward_seconds is 4"),
        ({"backward_weight_seconds": None}, "give both, or none"),
        ({"weight_stash_bytes": -1}, "weight_stash_bytes"),
    ):
        data = chain.to_dict()
        data["layers"][0] |= change
        if None in change.values():
            data["layers"][0] = {key: value for key, value in data["layers"][0].items() if value is not None}
        with pytest.raises(ChainFormatError, match=message):
            Chain.from_dict(data)
    assert Chain.from_dict(chain.to_dict()) == chain


def test_halves_change_the_digest_and_their_absence_does_not():
    chain, _ = two_per_period()
    bare = replace(
        chain.layers[0], backward_input_seconds=None, backward_weight_seconds=None, weight_stash_bytes=None
    )
    without = replace(chain, layers=(bare,))
    assert without.digest() != chain.digest()
    assert "backward_input_seconds" not in without.to_dict()["layers"][0]


def test_it_is_shown_and_refused_where_it_cannot_run():
    chain, plan = two_per_period()
    drawn = timeline(plan, 60)
    assert "one pattern of 2 micro-batches, 11 s" in drawn
    assert "+ forward again, % gradients of weights" in " ".join(drawn.split())
    assert "B0.1" in drawn
    assert "of 2 micro-batches of a pattern, each stage recomputes: 1" in summary(plan)
    (peak_of_device,) = explain_memory(plan, chain)
    assert sum(part.num_bytes for part in peak_of_device.parts) == peak_of_device.use.total == 15
    assert any("with their input alone" in part.what for part in peak_of_device.parts)
    for convert in (lambda: torch_csv(plan, 4), lambda: megatron_layout(plan)):
        with pytest.raises(ConversionError, match="plan without --recompute micro-batch"):
            convert()
    with pytest.raises(PlanMismatchError, match="which is not the planned one, runs every micro-batch alike"):
        lower(plan, 4)
    with pytest.raises(PlanMismatchError, match="give the plan's own number of micro-batches"):
        lower(plan, 4)
    order = ((("f0", 0), ("F0", 1), ("B0", 1), ("R0", 0), ("B0", 0)),)
    step = StepPlan(num_micro_batches=2, step_seconds=11, blocking_step_seconds=None, order=order)
    stepping = replace(plan, step=step)
    program = lower(stepping, 2)  # a pattern of two micro-batches, and a step of its own
    assert [str(each) for each in program.lists[0]] == ["f0.0", "F0.1", "B0.1", "R0.0", "B0.0"]
    assert [str(each) for each in lower_evaluation(stepping, 3).lists[0]] == ["F0.0", "F0.1", "F0.2"]
    assert "f0.0 F0.1 B0.1 R0.0 B0.0" in step_order(stepping)
    assert "of 2 micro-batches of a step, each stage recomputes: 1" in summary(stepping)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("F0.0 f0.0 B0.0 F0.1 B0.1", "F0 of micro-batch 0 does not stand once"),
        ("f0.0 B0.0 F0.1 B0.1 R0.0", "waits forever for B0 of micro-batch 0"),
        ("F0.0 R0.0 B0.0 F0.1 B0.1", "R0 of micro-batch 0 does not stand once"),
        ("F0.0 I0.0 F0.1 B0.1", "W0 of micro-batch 0 is missing"),
        ("F0.0 B0.0 F0.1 W0.1", "W0 of micro-batch 1 does not stand once"),
        ("f0.0 B0.0 F0.1 B0.1", "one step takes 11 s"),
    ],
)
def test_wrong_orders_are_found(order, message):
    chain, plan = two_per_period()
    entries = tuple((name, int(number)) for name, number in (each.split(".") for each in order.split()))
    step = StepPlan(num_micro_batches=2, step_seconds=10, blocking_step_seconds=None, order=(entries,))
    violations = replay(replace(plan, step=step), chain).violations
    assert any(re.search(message, violation) for violation in violations), violations
