"""Planning on devices and links that are not alike: from a problem on machines to a plan that has been replayed.

Two kinds of plans are compared. One is what the solver finds where every device has the least memory and the least
speed, and every link the least bandwidth, put on the devices as they are numbered, with the times that it really
has there: it may have several stages on a device, and no answer is worse. The other, for ``madpipe`` and
``contiguous``, is the best contiguous allocation that ``solvers/contiguous/unlike_devices.py`` finds, and for a
step what local search makes of it. Baselines have the first alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from deepspeed_partition.planner.allocation import Blocks, Placement
from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.errors import BrokenPlanError, InfeasibleError
from deepspeed_partition.planner.memory import StageTable, reserves_all_slots
from deepspeed_partition.planner.plan import ChainReference, MemoryUse, Plan, PlannedStage, StepPlan
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.recomputation import Recomputation, rematerialized, stage_cost
from deepspeed_partition.planner.schedule import Order, PeriodicSchedule
from deepspeed_partition.planner.simulate.replay import replay_and_count
from deepspeed_partition.planner.solvers.bounds import lower_bound
from deepspeed_partition.planner.solvers.contiguous.optimal import Contiguous
from deepspeed_partition.planner.solvers.contiguous.unlike_devices import DevicePipeline, UnlikeDevices, scaled
from deepspeed_partition.planner.solvers.interface import Cuts, Problem, Solver
from deepspeed_partition.planner.solvers.non_contiguous.madpipe import MadPipe
from deepspeed_partition.planner.solvers.pattern import one_f_one_b
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Road
from deepspeed_partition.planner.solvers.pattern.shared_links import is_plain, placed_anew
from deepspeed_partition.planner.solvers.step.orders import DepthRule
from deepspeed_partition.planner.solvers.step.step_bounds import step_lower_bound
from deepspeed_partition.planner.solvers.step.step_simulator import StepEngine, in_order
from deepspeed_partition.planner.units import exact_bytes

SLOW_SHARE = 0.25
"""Share of the time for the plan of the slowest links, which is no longer searched for when this has passed."""
MOST_OPERATIONS = 400_000
"""Forwards and backwards that the search for a step simulates at the most."""
Solve = Callable[[Problem, Solver], Plan]


@dataclass(frozen=True, slots=True)
class _Step:
    """Step of a contiguous allocation."""

    pipeline: DevicePipeline
    orders: tuple[Order, ...]
    """Orders of the stages, in their order."""
    ticks: int


def plan_on_machines(problem: Problem, solver: Solver, make_problem: Callable[..., Problem], solve: Solve) -> Plan:
    """Return the best plan of a problem on machines that are not alike.

    Args:
        make_problem: makes the problem of a chain and a platform that are alike, with all that is asked for.
        solve: plans such a problem.

    Raises:
        InfeasibleError: no plan fits in memory.
    """
    plans = []
    slow = make_problem(*_slowest(problem), deadline=problem.deadline.part(SLOW_SHARE))
    with suppress(InfeasibleError):  # devices with more memory may have room
        plans += _as_it_is(problem, solver.name, solve(slow, solver))
    if isinstance(solver, MadPipe | Contiguous):
        plans += _contiguous(problem, solver.name)
    if not plans:
        raise _nothing_fits(problem)
    bound, step_bound = _bounds(problem, make_problem, contiguous=isinstance(solver, Contiguous))
    return _with_bounds(min(plans, key=lambda plan: (_seconds(plan), not plan.proved)), bound, step_bound)


def _seconds(plan: Plan) -> float:
    return plan.period_seconds if plan.step is None else plan.step.step_seconds


def _slowest(problem: Problem) -> tuple[Chain, Platform]:
    """Return the chain and the platform where all is as slow and as small as the slowest and smallest."""
    platform = problem.platform
    speed = min(platform.speed_of(device) for device in range(platform.num_devices))
    memory = min(platform.memory_of(device) for device in range(platform.num_devices))
    return scaled(problem.chain, speed), replace(platform, machines=None, pipelines=(), memory_bytes=memory)


def _bounds(
    problem: Problem, make_problem: Callable[..., Problem], *, contiguous: bool
) -> tuple[float, float | None]:
    """Return lower bounds of the period and the step, in seconds: all is as fast and as large as the best.

    Besides, all devices together do all layers at the sum of their speeds.
    """
    platform, chain = problem.platform, problem.chain
    devices = range(platform.num_devices)
    speeds = [platform.speed_of(device) for device in devices]
    machines = platform.machines
    assert machines is not None
    fastest = replace(
        platform,
        machines=None,
        pipelines=(),
        memory_bytes=max(map(platform.memory_of, devices)),
        bandwidth=max(level.bandwidth for level in machines.links),
        latency_seconds=min(level.latency_seconds for level in machines.links),
    )
    fast = make_problem(scaled(chain, max(speeds)), fastest, deadline=problem.deadline)
    least, seconds = chain.compute_seconds / sum(speeds), fast.times.clock.seconds
    period = max(seconds(lower_bound(fast)), least)
    if problem.num_micro_batches is None:
        return period, None
    step = seconds(step_lower_bound(fast, contiguous=contiguous))
    return period, max(step, problem.num_micro_batches * least)


def _with_bounds(plan: Plan, bound: float, step_bound: float | None) -> Plan:
    """Return a plan with the lower bounds, which rounding must not put above what they bound."""
    bound = min(bound, plan.period_seconds)
    plan = replace(plan, lower_bound_seconds=bound, gap=plan.period_seconds / bound - 1)
    if plan.step is None or step_bound is None:
        return plan
    step_bound = min(step_bound, plan.step.step_seconds)
    gap = plan.step.step_seconds / step_bound - 1
    step = replace(plan.step, lower_bound_seconds=step_bound, gap=gap, proved=gap < 1e-6)
    return replace(plan, step=step)


def _nothing_fits(problem: Problem) -> InfeasibleError:
    smallest = UnlikeDevices(problem).smallest_memory()
    return InfeasibleError(
        f"no plan fits into the memory of these {problem.platform.num_devices} devices; "
        f"{exact_bytes(smallest)} on each of them would do for one micro-batch at a time: give more devices, or "
        "larger ones",
        smallest_memory_bytes=smallest,
    )


def placed_times(problem: Problem, cuts: Cuts, devices: Sequence[int]) -> TimedChain:
    """Return the times of a chain whose stages are on certain devices: at its boundaries those of their links."""
    platform, chain = problem.platform, problem.chain
    speeds = [
        platform.speed_of(device)
        for (start, stop), device in zip(pairwise(cuts), devices, strict=True)
        for _ in range(start, stop)
    ]
    times = TimedChain(scaled(chain, speeds), platform, problem.times.clock)
    for cut, (one, other) in zip(cuts[1:-1], pairwise(devices), strict=True):
        if one != other:
            times.one_way[cut] = times.clock.ticks(
                platform.transfer_seconds(chain.boundary_bytes(cut), one, other)
            )
    return times


def _extra(times: TimedChain, recomputed: Sequence[Blocks]) -> list[int]:
    return [sum(times.forward_ticks(*block) for block in blocks) for blocks in recomputed]


def _as_it_is(problem: Problem, algorithm: str, slow: Plan) -> list[Plan]:
    """Return the plan of the slowest links with the times that it really has, where it fits."""
    cuts = tuple(slow.boundaries)
    devices = [stage.device for stage in slow.stages]
    blocks = tuple(stage.blocks for stage in slow.stages)
    times = placed_times(problem, cuts, devices)
    step = None
    if problem.num_micro_batches is not None:
        step = in_given_order(problem, times, slow, cuts, devices, blocks)
    plans: list[Plan] = []
    if slow.is_contiguous:
        found = UnlikeDevices(problem).priced(cuts, devices)
        if found is not None and step is None:
            plans = _made(problem, algorithm, found, None)
            if is_plain(problem.platform):
                return plans
    shorter = _shortened(problem, slow, times, cuts, devices, blocks)
    plan = _assembled(problem, algorithm, cuts, devices, blocks, shorter, step)
    return plans if plan is None else [*plans, plan]


def in_given_order(
    problem: Problem, times: TimedChain, slow: Plan, cuts: Cuts, devices: Sequence[int], blocks: Sequence[Blocks]
) -> StepPlan:
    """Return the step in the orders of another plan of the same allocation.

    Args:
        times: of the layers where they are (``placed_times``).
        slow: the other plan. Where each device has one stage, its orders are those of the stages.
    """
    assert slow.step is not None and problem.num_micro_batches is not None
    engine = _engine(problem, times, cuts, devices, blocks)
    position = {name: index for index, name in enumerate(engine.names)}
    orders = [tuple(position[name] for name, _ in order) for order in slow.step.order]
    run = engine.run(problem.num_micro_batches, in_order(orders[: engine.num_devices]))
    assert run is not None
    return _step_plan(problem, slow.step.order, run.ticks)


def _step_plan(problem: Problem, orders: Sequence[Order], ticks: int) -> StepPlan:
    assert problem.num_micro_batches is not None
    return StepPlan(
        num_micro_batches=problem.num_micro_batches,
        step_seconds=problem.times.clock.seconds(ticks),
        blocking_step_seconds=None,
        order=tuple(orders),
    )


def _shortened(
    problem: Problem,
    slow: Plan,
    times: TimedChain,
    cuts: Cuts,
    devices: Sequence[int],
    blocks: Sequence[Blocks],
) -> PeriodicSchedule:
    """Return the pattern of the slowest links, with the times that operations really take.

    Every operation begins when it did, all times by one factor shorter: that of the operation that gained least.
    """
    seconds, extra = times.clock.seconds, _extra(times, blocks)
    really: dict[str, float] = {}
    for index, (start, stop) in enumerate(pairwise(cuts)):
        really[f"F{index}"] = seconds(times.forward_ticks(start, stop))
        really[f"B{index}"] = seconds(times.backward_ticks(start, stop) + extra[index])
        if index + 1 < len(devices) and devices[index] != devices[index + 1]:
            really[f"SF{index}"] = really[f"SB{index}"] = seconds(int(times.one_way[stop]))
    factor = max(
        (really[each.operation] / each.duration_seconds for each in slow.operations if each.duration_seconds > 0),
        default=1.0,
    )
    operations = tuple(
        replace(each, start_seconds=each.start_seconds * factor, duration_seconds=really[each.operation])
        for each in slow.operations
    )
    return PeriodicSchedule(slow.period_seconds * factor, operations)


def _contiguous(problem: Problem, algorithm: str) -> list[Plan]:
    """Return the best contiguous plan, as far as it is found; empty where none fits."""
    search = UnlikeDevices(problem)
    found = search.best()
    if found is None:
        return []
    if problem.num_micro_batches is None:
        return _made(problem, algorithm, found, None)
    step = _StepSearch(problem, search).best(found)
    return [] if step is None else _made(problem, algorithm, step.pipeline, step)


def _made(problem: Problem, algorithm: str, found: DevicePipeline, step: _Step | None) -> list[Plan]:
    """Return the plan of a contiguous allocation, where the replay says that it fits."""
    times = placed_times(problem, found.cuts, found.devices)
    extra = _extra(times, found.recomputed)
    # A step may recompute more than what the period was found for.
    stages = pairwise(found.cuts)
    loads = [times.compute_ticks(*stage) + more for stage, more in zip(stages, extra, strict=True)]
    period = max(found.period, *loads)
    schedule = _both_directions(problem, times, found, period)
    if schedule is None:
        schedule = _one_direction(times, found, period, extra)
    orders: list[Order] = [()] * problem.platform.num_devices
    if step is not None:
        for device, order in zip(found.devices, step.orders, strict=True):
            orders[device] = order
    plan = _assembled(
        problem,
        algorithm,
        found.cuts,
        found.devices,
        found.recomputed,
        schedule,
        None if step is None else _step_plan(problem, orders, step.ticks),
        # The search compared schedules of links that carry one transfer at a time, with all buffers.
        proved=found.proved
        and step is None
        and is_plain(problem.platform)
        and reserves_all_slots(problem.platform),
    )
    return [] if plan is None else [plan]


def _one_direction(
    times: TimedChain, found: DevicePipeline, period: int, extra: Sequence[int]
) -> PeriodicSchedule:
    """Return 1F1B* of a contiguous allocation on its devices."""
    schedule = one_f_one_b.schedule(times, found.cuts, period, extra)
    operations = tuple(
        replace(each, device=found.devices[each.device])
        if each.device is not None
        else replace(each, link=(found.devices[each.link[0]], found.devices[each.link[1]]) if each.link else None)
        for each in schedule.operations
    )
    return PeriodicSchedule(schedule.period_seconds, operations)


def _both_directions(
    problem: Problem, times: TimedChain, found: DevicePipeline, period: int
) -> PeriodicSchedule | None:
    """Return a shorter pattern, where directions do not wait for each other; None where none is found."""
    if is_plain(problem.platform):
        return None
    platform, placement = problem.platform, Placement(found.cuts, found.devices).recomputing(found.recomputed)
    road = Road(replace(problem, times=times), placement)
    # A path through devices that are alike counts the least memory on each of them.
    for index, device in enumerate(sorted(found.devices)):
        mine, memory = road.memory[index], platform.memory_of(device)
        road.memory[index] = replace(mine, room=memory - mine.fixed if mine.floor <= memory else -1)
    pattern = placed_anew(road, platform, period)
    return None if pattern is None else pattern.schedule(times.clock)


def _assembled(
    problem: Problem,
    algorithm: str,
    cuts: Cuts,
    devices: Sequence[int],
    blocks: Sequence[Blocks],
    schedule: PeriodicSchedule,
    step: StepPlan | None,
    *,
    proved: bool = False,
) -> Plan | None:
    """Return a plan with the memory that its replay finds; None where that is more than there is.

    Raises:
        BrokenPlanError: the replay refuses it for another reason.
    """
    chain, platform = problem.chain, problem.platform
    none = MemoryUse(weights=0, stash=0, buffers=0, transient=0)
    stages = tuple(
        PlannedStage(
            layers=stage,
            layer_names=tuple(layer.name for layer in chain.layers[slice(*stage)]),
            device=device,
            rematerialize=rematerialized(chosen, stage),
            in_flight=1,
            num_trainable_parameters=sum(
                layer.num_trainable_parameters or 0 for layer in chain.layers[slice(*stage)]
            ),
        )
        for stage, device, chosen in zip(pairwise(cuts), devices, blocks, strict=True)
    )
    allreduce: tuple[float, ...] = ()
    if problem.num_pipelines:
        allreduce = tuple(
            platform.allreduce_seconds(_weight_bytes(problem, stage), problem.num_pipelines, device)
            for stage, device in zip(pairwise(cuts), devices, strict=True)
        )
    plan = Plan(
        chain=ChainReference.of(chain),
        platform=platform,
        algorithm=algorithm,
        period_seconds=schedule.period_seconds,
        lower_bound_seconds=schedule.period_seconds,
        gap=0.0,
        proved=proved,
        proved_class="contiguous" if proved else None,
        proved_of="period" if proved else None,
        stages=stages,
        operations=schedule.operations,
        memory=(none,) * platform.num_devices,
        peak_memory_bytes=(0,) * platform.num_devices,
        step=step,
        data_parallel=problem.num_pipelines,
        zero_stage=problem.zero_stage if problem.num_pipelines else None,
        allreduce_seconds=allreduce,
    )
    plan, replayed = replay_and_count(plan, chain)
    broken = [violation for violation in replayed.violations if "bytes short" not in violation]
    if broken or not replayed.memory:
        raise BrokenPlanError(
            f"MadPipe made a plan for {chain.name!r} that its own replay refuses, which is a bug: "
            f"{'; '.join(broken)}"
        )
    return None if len(replayed.violations) > len(broken) else plan


def _weight_bytes(problem: Problem, stage: tuple[int, int]) -> int:
    return sum(layer.weight_bytes for layer in problem.chain.layers[slice(*stage)])


def _engine(
    problem: Problem, times: TimedChain, cuts: Cuts, devices: Sequence[int], blocks: Sequence[Blocks]
) -> StepEngine:
    """Return the simulator of an allocation on its devices, all-reduces included.

    Where each device has one stage, the simulator numbers devices as the stages.
    """
    allreduce: list[int] = []
    if (problem.num_pipelines or 1) > 1:
        allreduce = [
            times.clock.ticks(
                problem.platform.allreduce_seconds(
                    _weight_bytes(problem, stage), problem.num_pipelines or 1, device
                )
            )
            for stage, device in zip(pairwise(cuts), devices, strict=True)
        ]
    largest = max(problem.platform.memory_of(device) for device in devices)
    table: StageTable = problem.table.with_memory(largest)
    if len(set(devices)) == len(devices):
        devices = range(len(devices))
    return StepEngine(times, table, cuts, devices, allreduce, problem.flushes, blocks if any(blocks) else ())


class _StepSearch:
    """Search for the step of a contiguous allocation: depths, what is recomputed, boundaries and devices."""

    def __init__(self, problem: Problem, search: UnlikeDevices) -> None:
        assert problem.num_micro_batches is not None
        self.problem, self.search, self.count = problem, search, problem.num_micro_batches
        self.found: _Step | None = None
        self.left = MOST_OPERATIONS

    def best(self, first: DevicePipeline) -> _Step | None:
        """Return the best step that is found from an allocation; None where none fits."""
        self._try(first)
        for other in self._starts(first):
            self._try(other)
        improved = True
        while improved and self.found is not None and self._goes_on():
            improved = False
            before = self.found.ticks
            for pipeline in self._around(self.found.pipeline):
                if not self._goes_on():
                    break
                self._try(pipeline)
                if self.found.ticks < before:
                    improved = True
                    break
        return self.found

    def _goes_on(self) -> bool:
        return self.left > 0 and not self.problem.deadline.passed()

    def _starts(self, first: DevicePipeline) -> Iterator[DevicePipeline]:
        """Yield the best allocation of the period on fewer of the devices, which fill and drain sooner."""
        for count in range(len(first.devices) - 1, 0, -1):
            if not self._goes_on() and self.found is not None:
                return
            fewer = self.search.in_order(first.devices[-count:])
            if fewer is not None:
                yield fewer

    def _around(self, pipeline: DevicePipeline) -> Iterator[DevicePipeline]:
        """Yield allocations with one boundary moved, or two devices swapped."""
        cuts, devices = pipeline.cuts, pipeline.devices
        for index in range(1, len(cuts) - 1):
            for cut in (cuts[index] - 1, cuts[index] + 1):
                if cuts[index - 1] < cut < cuts[index + 1]:
                    yield from self._priced((*cuts[:index], cut, *cuts[index + 1 :]), devices)
        unused = [each for each in range(self.problem.platform.num_devices) if each not in devices]
        for one in range(len(devices)):
            for other in range(one + 1, len(devices)):
                swapped = list(devices)
                swapped[one], swapped[other] = swapped[other], swapped[one]
                yield from self._priced(cuts, swapped)
            for other in unused:
                yield from self._priced(cuts, [*devices[:one], other, *devices[one + 1 :]])

    def _priced(self, cuts: Cuts, devices: Sequence[int]) -> Iterator[DevicePipeline]:
        found = self.search.priced(cuts, devices)
        if found is not None:
            yield found

    def _try(self, pipeline: DevicePipeline) -> None:
        """Try depths and ways to recompute an allocation, and remember the best step that fits."""
        cuts, devices = pipeline.cuts, pipeline.devices
        times = placed_times(self.problem, cuts, devices)
        stages = list(pairwise(cuts))
        ways: dict[tuple[Blocks, ...], None] = {((),) * len(stages): None, pipeline.recomputed: None}
        costs: Recomputation | None = self.problem.recomputation
        if costs is not None:
            ways[tuple((stage,) if costs.allows(*stage) else () for stage in stages)] = None
        for blocks in ways:
            engine = _engine(self.problem, times, cuts, devices, blocks)
            self._try_depths(engine, replace(pipeline, recomputed=blocks), stages)

    def _try_depths(self, engine: StepEngine, pipeline: DevicePipeline, stages: Sequence[tuple[int, int]]) -> None:
        size = len(pipeline.devices)
        rooms = []
        for stage, device, blocks in zip(stages, pipeline.devices, pipeline.recomputed, strict=True):
            table = self.problem.table.with_memory(self.problem.platform.memory_of(device))
            rooms.append(stage_cost(self.problem.times, table, stage, blocks).most_in_flight)
        if min(rooms) < 1:
            return
        shapes = [
            [size - index for index in range(size)],
            [2 * (size - index) - 1 for index in range(size)],
            [self.count] * size,
        ]
        tried: set[tuple[int, ...]] = set()
        best: tuple[int, tuple[int, ...]] | None = None
        for shape in shapes:
            depths = tuple(min(depth, room, self.count) for depth, room in zip(shape, rooms, strict=True))
            best = self._try_one(engine, pipeline, _falling(depths), tried, best)
        while best is not None and self._goes_on():
            before = best
            for index in range(size):
                for more in (1, -1):
                    other = best[1][index] + more
                    if 1 <= other <= min(rooms[index], self.count):
                        depths = _falling((*best[1][:index], other, *best[1][index + 1 :]))
                        best = self._try_one(engine, pipeline, depths, tried, best) or best
            if best == before:
                return

    def _try_one(
        self,
        engine: StepEngine,
        pipeline: DevicePipeline,
        depths: tuple[int, ...],
        tried: set[tuple[int, ...]],
        best: tuple[int, tuple[int, ...]] | None,
    ) -> tuple[int, tuple[int, ...]] | None:
        if depths in tried:
            return best
        tried.add(depths)
        self.left -= 2 * self.count * len(depths)
        rule = DepthRule("1F1B", depths)
        run = engine.run(self.count, rule.choice(engine, self.count), None if best is None else best[0])
        if run is None:
            return best
        memory = [self.problem.platform.memory_of(device) for device in pipeline.devices]
        if any(need > room for need, room in zip(engine.peaks(run), memory, strict=True)):
            return best
        if self.found is None or run.ticks < self.found.ticks:
            self.found = _Step(pipeline, engine.named(run.orders), run.ticks)
        return (run.ticks, depths) if best is None or run.ticks < best[0] else best


def _falling(depths: tuple[int, ...]) -> tuple[int, ...]:
    """Return depths of 1F1B that never rise: no stage holds back what the one before it waits for."""
    result: list[int] = []
    for depth in depths:
        result.append(min(depth, result[-1]) if result else depth)
    return tuple(result)
