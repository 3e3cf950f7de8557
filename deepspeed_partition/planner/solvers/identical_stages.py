"""A lower bound of a step of identical stages whose devices keep or recompute each micro-batch, as published.

N devices have one stage each, of the same forward and backward time. A device has room for K micro-batches. Of
each micro-batch a device decides whether it keeps what its forward made, or runs the forward again in its
backward.

    C_i = min over a of max( m (2 tF + tB) - a tF,  (m (tF + tB) + a tau_i) / K )       tau_i = (N - i) (tF + tB)

are the least ticks from the first operation of device i (from 1) to its last one if it keeps a of m micro-batches:
by its work, and by its memory, since a micro-batch that is kept waits ``tau_i`` for the devices behind, and every
one takes room while it runs. The step is at least the largest ``C_i + (i - 1) (tF + tB)``.

Source: A. Aguila-Multner, O. Beaumont, L. Eyraud-Dubois, J. Gusak, "Optimal Steady-State Schedules for
Memory-Efficient Pipeline Parallelism" (slides), "How to obtain a lower bound on makespan". ``step_bounds.py`` has
the same argument for unequal layers, bytes, transfers and any allocation. Cost: O(N).
"""

from __future__ import annotations

from fractions import Fraction

from deepspeed_partition.planner.solvers.bounds import with_savings


def identical_stages_bound(
    num_stages: int,
    num_slots: int,
    num_micro_batches: int,
    forward: int | Fraction,
    backward: int | Fraction,
) -> Fraction:
    """Return the time than which no step of identical stages is shorter, exactly; in the unit of the times.

    Each stage is on a device of its own, and transfers take no time. A part of a micro-batch may be kept, so the
    shortest step can be longer. Source: the slides named above this function.

    Args:
        num_stages: N, stages and devices.
        num_slots: K, micro-batches that a device has room for. One that is recomputed takes room only while its
            second forward and its backward run.
        num_micro_batches: m, micro-batches of the step.
        forward: tF, time of the forward of a stage on one micro-batch.
        backward: tB, time of its backward.

    Raises:
        ValueError: a count is less than 1, or a time is negative.
    """
    for name, count in (("stages", num_stages), ("slots", num_slots), ("micro-batches", num_micro_batches)):
        if count < 1:
            raise ValueError(f"the number of {name} is {count}: it must be at least 1")
    for name, ticks in (("forward", forward), ("backward", backward)):
        if ticks < 0:
            raise ValueError(f"the {name} takes {ticks}: it must take 0 or more")
    m, turn = num_micro_batches, Fraction(forward) + Fraction(backward)
    bounds = []
    for before in range(num_stages):
        waits = m * (num_stages - 1 - before) * turn
        # All are kept; each that is not saves its wait, and costs a forward.
        least = with_savings(m * turn, m * turn + waits, [(waits, m * Fraction(forward))], num_slots, 1)
        bounds.append(least + before * turn)
    return max(bounds)
