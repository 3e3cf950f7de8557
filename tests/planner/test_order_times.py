"""One pass over given orders tells what the simulation of their events finds, or no more than that."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from math import inf

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.solvers.step.order_times import look_at
from deepspeed_partition.planner.solvers.step.step_search import step_engine
from deepspeed_partition.planner.solvers.step.step_simulator import WaitInCircleError, eager, in_order
from tests.planner.instances import problem_of, random_instance


def drawn(seed: int):
    """Return a simulator, a number of micro-batches and orders, some of which wait in a circle."""
    pick = random.Random(seed)
    made, platform = random_instance(seed)
    platform = replace(
        platform,
        bandwidth=pick.choice([1, 8, 100]),
        duplex=pick.choice(["half", "full"]),
        port_bandwidth=pick.choice([None, None, 4.0]),
    )
    problem = replace(problem_of(made, platform), num_micro_batches=pick.randint(1, 5))
    num_stages = pick.randint(1, made.num_layers)
    cuts = (0, *sorted(pick.sample(range(1, made.num_layers), num_stages - 1)), made.num_layers)
    engine = step_engine(problem, Placement.of(cuts, [pick.randrange(3) for _ in range(num_stages)]))
    m = problem.num_micro_batches
    most = [pick.randint(1, m)] * num_stages
    run = engine.run(m, eager(engine, most, oldest_first=pick.random() < 0.5))
    orders = [list(order) for order in run.orders]
    if pick.random() < 0.3:
        for order in orders:
            pick.shuffle(order)
    return engine, m, [tuple(order) for order in orders]


def test_it_is_the_simulation_or_a_bound_of_it():
    seen: Counter[str] = Counter()
    for seed in range(400):
        engine, m, orders = drawn(seed)
        look = look_at(engine, orders, m)
        try:
            run = engine.run(m, in_order(orders))
        except WaitInCircleError:
            assert look.least == inf and look.run is None, seed
            seen["in a circle"] += 1
            continue
        assert look.least <= run.ticks, seed
        if look.run is None:
            seen["a bound"] += 1
            seen["below the step"] += look.least < run.ticks
        else:
            assert look.run == run, seed
            seen["a run"] += 1
            seen["with transfers"] += any(run.sends)
    assert min(seen[each] for each in ("in a circle", "a bound", "below the step", "a run", "with transfers")) > 10


def test_what_takes_too_long_has_no_run():
    for seed in range(60):
        engine, m, orders = drawn(seed)
        look = look_at(engine, orders, m)
        if look.run is not None and look.least > 0:
            assert look_at(engine, orders, m, look.least - 1).run is None
            assert look_at(engine, orders, m, look.least).run == look.run
