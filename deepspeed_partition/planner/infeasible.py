"""Explanation of why nothing fits, and of what would help, in one sentence."""

from __future__ import annotations

from collections.abc import Callable

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES
from deepspeed_partition.planner.solvers.interface import Cuts, Problem, Solver, bytes_needed
from deepspeed_partition.planner.solvers.non_contiguous.madpipe import MadPipe
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Road
from deepspeed_partition.planner.solvers.uniform_recomputation import uniform_choices
from deepspeed_partition.planner.units import exact_bytes, format_bytes, shown

Solve = Callable[[Problem, Solver], object]
"""Function that plans, and raises ``InfeasibleError`` where no plan fits."""


def infeasible(problem: Problem, solver: Solver, solve: Solve) -> InfeasibleError:
    """Return the error that says which stage lacks how many bytes, and what would help.

    Args:
        solve: the function that found that nothing fits; it is called again with more memory.
    """
    found = _smallest_memory(problem, solver)
    memory = problem.platform.memory_bytes
    if found is None:
        return InfeasibleError(
            f"no cut into {problem.constraints.max_stages} stages gives each stage trainable parameters: "
            "use a smaller num_stages"
        )
    cuts, smallest = found
    if isinstance(cuts, Placement):
        return _device_too_small(problem, solver, cuts, smallest)
    if problem.num_micro_batches is not None:
        smallest = _enough_for_step(problem, solver, solve, smallest)
    needs = bytes_needed(problem, cuts)
    if smallest > LARGEST_MEMORY_BYTES:
        return InfeasibleError(
            f"no plan fits into {format_bytes(memory)} per device, nor into the largest memory that a device may "
            f"have here: the cut that needs least takes {format_bytes(smallest)} or more"
        )
    if max(needs) <= memory:
        return InfeasibleError(
            f"no cut passes the memory test of {solver.name} with {format_bytes(memory)} per device, though "
            f"there is room for one; {_what_would_do(problem, solver, smallest)}: give more memory or devices, or "
            "another algorithm",
            smallest_memory_bytes=smallest,
        )
    return _stage_too_large(problem, solver, cuts, needs, smallest)


def _smallest_memory(problem: Problem, solver: Solver) -> tuple[Cuts | Placement, int] | None:
    """Return what a solver says of the least memory, or of the same problem with everything recomputed."""
    found = [solver.smallest_memory(problem)]
    for uniform in uniform_choices(problem):
        other = solver.smallest_memory(uniform.problem)
        if other is not None and isinstance(other[0], Placement):
            other = uniform.chosen(other[0]), other[1]
        found.append(other)
    return min((each for each in found if each is not None), key=lambda each: each[1], default=None)


def _what_would_do(problem: Problem, solver: Solver, smallest: int) -> str:
    """Return words for the smallest memory that is known to do.

    Beyond contiguous partitions, the search counts weights that layers share on each stage of a device: where such
    stages are on one device, less memory may do.
    """
    is_least = not (isinstance(solver, MadPipe) and problem.table.training.shares)
    if is_least or not problem.constraints.any_allocation:
        return f"the smallest memory that would do is {_exact_and_rounded(smallest)}"
    return f"{_exact_and_rounded(smallest)} would do"


def _stage_too_large(
    problem: Problem, solver: Solver, cuts: Cuts, needs: list[int], smallest: int
) -> InfeasibleError:
    """Return the error for the largest stage of the contiguous partition that needs the least memory."""
    stage = max(range(len(needs)), key=needs.__getitem__)
    start, stop = cuts[stage], cuts[stage + 1]
    names = [layer.name for layer in problem.chain.layers[start:stop]]
    which = (
        f"layer {shown(names[0])} alone"
        if len(names) == 1
        else f"layers {start} to {stop} ({shown(names[0])} to {shown(names[-1])})"
    )
    depth = ""
    if problem.in_deepspeed:
        depth = f" with {problem.depth(len(needs) - stage)} micro-batches in flight"
    short = needs[stage] - problem.platform.memory_bytes
    return _no_plan_fits(
        problem,
        f"stage {stage}, {which}, needs {format_bytes(needs[stage])}{depth}, {exact_bytes(short)} more than there "
        f"are; {_what_would_do(problem, solver, smallest)}: give more memory or devices, or use a smaller "
        "micro-batch",
        smallest,
        short,
        stage,
    )


def _device_too_small(problem: Problem, solver: Solver, placement: Placement, smallest: int) -> InfeasibleError:
    """Return the error for an allocation that needs the least memory and has several stages on a device."""
    device = max(Road(problem, placement).memory, key=lambda each: each.bytes_for_one)
    stages = [placement.cuts[stage : stage + 2] for stage in device.stages]
    short = smallest - problem.platform.memory_bytes
    return _no_plan_fits(
        problem,
        f"layers {' and '.join(f'{start} to {stop}' for start, stop in stages)} on one device need "
        f"{format_bytes(smallest)}, {exact_bytes(short)} more than there are; "
        f"{_what_would_do(problem, solver, smallest)}: give more memory or devices, or use a smaller micro-batch",
        smallest,
        short,
        device.stages[0],
    )


def _enough_for_step(problem: Problem, solver: Solver, solve: Solve, memory_bytes: int) -> int:
    """Return the bytes per device with which a step fits, with the tensors that wait for a slow link."""
    while memory_bytes <= LARGEST_MEMORY_BYTES:
        more = problem.with_memory(memory_bytes)
        try:
            solve(more, solver)
        except InfeasibleError as error:
            more_bytes = error.smallest_memory_bytes or LARGEST_MEMORY_BYTES + 1
            assert more_bytes > memory_bytes
            memory_bytes = more_bytes
        else:
            break
    return memory_bytes


def out_of_time(algorithm: str) -> InfeasibleError:
    return InfeasibleError(f"{algorithm} had no plan when its time was up: give it more time")


def piles_up(problem: Problem, smallest: int) -> InfeasibleError:
    short = smallest - problem.platform.memory_bytes
    return _no_plan_fits(
        problem,
        f"tensors pile up before a slow link and need {exact_bytes(short)} more than there are; "
        f"{_exact_and_rounded(smallest)} would do: give more memory or bandwidth, or fewer micro-batches",
        smallest,
        short,
    )


def no_room_for_flush(problem: Problem, smallest: int) -> InfeasibleError:
    """Return the error for a flush, where micro-batches stay in flight until their batch is complete."""
    return _no_plan_fits(
        problem,
        "the loss of a batch is computed on all of its outputs, so every stage keeps its "
        f"{problem.fewest_in_flight} micro-batches in flight; {_exact_and_rounded(smallest)} would do: give more "
        "memory or devices, use smaller batches, or the mean over micro-batches, if that is what the loss may be",
        smallest,
        max(smallest - problem.platform.memory_bytes, 0),
    )


def _no_plan_fits(
    problem: Problem, why: str, smallest: int, short: int, stage: int | None = None
) -> InfeasibleError:
    """Return the error with its numbers as attributes: the memory that would do, and what is short."""
    return InfeasibleError(
        f"no plan fits into {format_bytes(problem.platform.memory_bytes)} per device: {why}",
        stage=stage,
        short_bytes=short,
        smallest_memory_bytes=smallest,
    )


def _exact_and_rounded(num_bytes: int) -> str:
    return f"{exact_bytes(num_bytes)} ({format_bytes(num_bytes)})"
