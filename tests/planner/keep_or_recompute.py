"""The shortest step of stages that keep or recompute each micro-batch, by a constraint program."""

from __future__ import annotations

from collections.abc import Sequence

from ortools.sat.python import cp_model


def shortest_step(
    forward: Sequence[int],
    backward: Sequence[int],
    num_slots: int,
    num_micro_batches: int,
    *,
    keeps: Sequence[bool] | None = None,
    seconds: float = 60,
) -> tuple[int, bool]:
    """Return the ticks of the shortest step found, and whether it is proved the shortest.

    Each stage has a device of its own, transfers take no time. A micro-batch takes a slot from its forward to the
    end of its backward where it is kept, else from a second forward, at any time before its backward, on.

    Args:
        keeps: whether each stage keeps all micro-batches, or recomputes all of them, each as a part of its
            backward, which begins when its gradient has come. Left out, it decides one by one, and recomputes
            whenever that suits.
        seconds: most seconds of the search, of its own deterministic clock.
    """
    model, m = cp_model.CpModel(), num_micro_batches
    horizon = m * (2 * sum(forward) + sum(backward))
    ends = []
    first: list[list[cp_model.IntVar]] = []
    last: list[list[cp_model.IntVar]] = []
    twice: list[list[tuple[cp_model.IntVar, cp_model.IntVar]]] = []
    for stage, (f, b) in enumerate(zip(forward, backward, strict=True)):
        machine, slots = [], []
        starts, backs, agains = [], [], []
        for k in range(m):
            go, back, again = (model.new_int_var(0, horizon, f"{name}{stage}.{k}") for name in "FBR")
            kept = model.new_bool_var(f"kept{stage}.{k}")
            if keeps is not None:
                model.add(kept == int(keeps[stage]))
                model.add(back == again + f).only_enforce_if(~kept)
            held, end = model.new_int_var(0, horizon, ""), model.new_int_var(0, horizon, "")
            machine += [
                model.new_fixed_size_interval_var(go, f, ""),
                model.new_fixed_size_interval_var(back, b, ""),
                model.new_optional_fixed_size_interval_var(again, f, ~kept, ""),
            ]
            model.add(again >= go + f)
            model.add(back >= again + f).only_enforce_if(~kept)
            model.add(back >= go + f)
            model.add(held == go).only_enforce_if(kept)
            model.add(held == again).only_enforce_if(~kept)
            model.add(end == back + b)
            size = model.new_int_var(0, horizon, "")
            slots.append(model.new_interval_var(held, size, end, ""))
            starts.append(go)
            backs.append(back)
            agains.append((again, kept))
            ends.append(end)
            if stage:
                model.add(go >= first[-1][k] + forward[stage - 1])
                model.add(last[-1][k] >= end)
                if keeps is not None:
                    before, is_kept = twice[-1][k]
                    model.add(before >= end).only_enforce_if(~is_kept)
        model.add_no_overlap(machine)
        model.add_cumulative(slots, [1] * m, num_slots)
        first.append(starts)
        last.append(backs)
        twice.append(agains)
    for k in range(1, m):  # micro-batches are alike
        model.add(first[0][k] >= first[0][k - 1])
    step = model.new_int_var(0, horizon, "step")
    model.add_max_equality(step, ends)
    model.minimize(step)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = seconds
    status = solver.solve(model)
    return int(solver.objective_value), status == cp_model.OPTIMAL
