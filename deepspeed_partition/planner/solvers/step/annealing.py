"""Simulated annealing over boundaries and devices: allocations that follow no pattern.

Where few micro-batches are on their way, the shortest step often has a device or two that come back once, for a
small stage near either end of the chain. No regular placement is like that, and what leads there makes the step
longer at first: a boundary moves, then a stage changes its device. So a random walk goes from allocation to
allocation, to longer steps, too, and less and less so:

- a boundary moves, or two do, by a layer or by more;
- a stage goes to another device, or two stages change places;
- a stage is divided between two devices, or two stages become one.

Each is simulated in eager orders (``step_simulator.eager``) with as many micro-batches in flight as have room, and
in 1F1B where it is contiguous. Where the best order goes by groups, which suits its devices alone, a second walk
moves the boundaries of that allocation under its order. How
much longer a step may become is drawn before the simulation, which ends where that is passed; most proposals are
never simulated, for the busiest device or a bound says enough. The walk is the same in each run.

Method: S. Kirkpatrick, C. Gelatt and M. Vecchi, "Optimization by simulated annealing" (1983), with the simulation
of ``step_search.py``; not in the papers. Cost: ``MOST_OPERATIONS`` forwards and backwards for each walk, a few
seconds; fewer where steps have few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import exp, log
from random import Random

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.solvers.step.orders import GroupRule
from deepspeed_partition.planner.solvers.step.step_search import StepSearch

MOST_OPERATIONS = 1_600_000
"""Most forwards and backwards that a walk simulates."""
MOST_STEPS, FEWEST_STEPS = 12_000, 50
"""Number of steps, with two stages for each device, whose forwards and backwards suffice, and the least that are
worth a walk."""
FEWEST_LAYERS = 13
"""Number of layers from which on there are allocations that no other search meets."""
COST_OF_PROPOSAL, COST_OF_BOUND = 4, 12
"""Operations that are as much work as a proposal, and, for each stage, as a bound of its step."""
FIRST_TEMPERATURE = 0.02
"""Ticks by which a step may become longer at first, in the mean, over those of the step."""
WORTH_WALKING_FROM = 1.05
"""Factor of the best within which the eager step of an allocation is a start."""
LITTLE_IS_LEFT = 1.01
"""Factor of the lower bound within which a step is left as it is."""
MOST_STAGES_PER_DEVICE = 3
"""Mean number of stages of a device up to which eager orders are as good as those of groups."""
NUM_TAKEN = 6
"""Number of allocations that the search takes over from the walk."""
SEED = 1983


def num_operations(search: StepSearch) -> int:
    """Return the number of forwards and backwards that a walk may simulate; 0 where it is not worth it."""
    problem = search.problem
    of_step = 4 * problem.platform.num_devices * search.simulated
    if problem.chain.num_layers < FEWEST_LAYERS or of_step * FEWEST_STEPS > MOST_OPERATIONS:
        return 0
    return min(MOST_OPERATIONS, MOST_STEPS * of_step)


class Annealing:
    """Random walk among allocations; what it finds is remembered by ``search``."""

    def __init__(self, search: StepSearch) -> None:
        assert not search.problem.flushes
        self.search, self.problem = search, search.problem
        self.walk = StepSearch(search.problem)
        self.walk.deadline, self.walk.must_find = search.deadline, False
        self.rule: GroupRule | None = None
        """Order of the walk; None: it tries several, and devices change, too."""
        self.random = Random(SEED)
        self.most_operations = num_operations(search)
        self.rejected: dict[Placement, float] = {}
        """Ticks than which the step of an allocation is not shorter, as far as that is known."""
        self.compute: list[int] = self.problem.times.compute.tolist()

    def run(self, lower_bound: Callable[[], int]) -> None:
        """Walk from the best allocation so far, and refine the orders of the best that are met.

        Args:
            lower_bound: returns ticks than which no step is shorter: near to them nothing is done.
        """
        search, walk = self.search, self.walk
        if not self.most_operations or search.out_of_time() or search.best <= LITTLE_IS_LEFT * lower_bound():
            return
        for start, rule in self._starts():
            walk.operations_left = self.most_operations
            self.rule = rule
            self.rejected.clear()
            ticks = self._step(start, WORTH_WALKING_FROM * search.best)
            if ticks is not None:
                self._walk(start, ticks)
        search.start_again()
        for placement in walk.leaders()[:NUM_TAKEN]:
            if not search.ended():
                search.run(placement, walk.found[placement].rule, search.near())
        search.refine_leaders()

    def _starts(self) -> Iterator[tuple[Placement, GroupRule | None]]:
        """Yield the best allocation with few stages, and that with the best order by groups, and its rule."""
        search, most = self.search, MOST_STAGES_PER_DEVICE * self.problem.platform.num_devices
        leaders = [each for each in search.leaders() if len(each.devices) > 1 and not each.recomputed]
        few = next((each for each in leaders if len(each.devices) <= most), None)
        if few is not None:
            yield few, None
        for placement in leaders[:NUM_TAKEN]:
            rule = search.found[placement].rule
            if isinstance(rule, GroupRule):
                yield placement, rule
                return

    def _walk(self, present: Placement, ticks: float) -> None:
        walk = self.walk
        best = ticks
        while not walk.ended():
            walk.operations_left -= COST_OF_PROPOSAL
            proposal = self._proposal(present)
            if proposal is None or proposal == present:
                continue
            left = max(0, walk.operations_left) / self.most_operations
            temperature = FIRST_TEMPERATURE * best * left**2
            limit = ticks + 1 - temperature * log(1 - self.random.random())
            found = self._step(proposal, limit)
            if found is not None:
                present, ticks = proposal, found
                best = min(best, ticks)

    def _step(self, placement: Placement, shorter_than: float) -> float | None:
        """Return the ticks of the shortest step of an allocation; None where none is short enough and fits."""
        walk, m = self.walk, self.walk.num_micro_batches
        if placement not in walk.found and self.rejected.get(placement, 0) < shorter_than:
            if m * self._busiest(placement) >= shorter_than:
                return None
            walk.operations_left -= COST_OF_BOUND * len(placement.devices)
            engine = walk.engine(placement)
            if min(engine.most_in_flight) >= 1 and engine.bound(m) < shorter_than:
                self._try_orders(placement, shorter_than)
            walk.engines.clear()  # hardly any is asked for again
            self.rejected[placement] = shorter_than
        found = walk.found.get(placement)
        return None if found is None or found.estimate >= shorter_than else found.estimate

    def _try_orders(self, placement: Placement, shorter_than: float) -> None:
        walk, num_stages = self.walk, len(placement.devices)
        if self.rule is not None:
            walk.run(placement, self.rule, shorter_than)
            return
        deepest = tuple(walk.engine(placement).most_in_flight)
        orders = [("furthest", deepest), ("oldest", deepest)]
        if placement.is_contiguous:
            hidden = tuple(range(2 * num_stages - 1, 0, -2))
            orders = [("1F1B", hidden), ("1F1B", deepest), *orders[:1]]
        for name, depths in orders:
            found = walk.found.get(placement)
            walk.attempt(placement, name, depths, shorter_than if found is None else found.estimate)

    def _busiest(self, placement: Placement) -> int:
        """Return the ticks of the busiest device for one micro-batch."""
        loads = [0] * (max(placement.devices) + 1)
        for (start, stop), device in placement.stages:
            loads[device] += self.compute[stop] - self.compute[start]
        return max(loads)

    # Proposals

    def _proposal(self, placement: Placement) -> Placement | None:
        """Return an allocation that differs in one thing; None where what was drawn cannot be done."""
        draw = self.random.random()
        cuts, devices = list(placement.cuts), list(placement.devices)
        if draw < 0.55 or self.rule is not None:
            return self._with_boundary_moved(cuts, devices)
        if draw < 0.7:
            devices[self.random.randrange(len(devices))] = self._device()
        elif draw < 0.8:
            one, other = (self.random.randrange(len(devices)) for _ in range(2))
            devices[one], devices[other] = devices[other], devices[one]
        elif draw < 0.9:
            return self._with_stage_divided(cuts, devices)
        else:
            stage = self.random.randrange(len(devices) - 1)
            del cuts[stage + 1], devices[stage + self.random.randrange(2)]
        return Placement.of(cuts, devices) if len(set(devices)) > 1 else None

    def _with_boundary_moved(self, cuts: list[int], devices: Sequence[int]) -> Placement | None:
        most = max(1, cuts[-1] // (2 * len(devices)))
        distance = int(exp(self.random.random() * log(most + 1)))
        for _ in range(1 if self.random.random() < 0.7 else 2):
            cuts[self.random.randrange(1, len(devices))] += self.random.choice((-distance, distance))
        rising = all(left < right for left, right in pairwise(cuts))
        return Placement(tuple(cuts), tuple(devices)) if rising else None

    def _with_stage_divided(self, cuts: list[int], devices: list[int]) -> Placement | None:
        stage = self.random.randrange(len(devices))
        if cuts[stage + 1] - cuts[stage] < 2:
            return None
        cuts.insert(stage + 1, self.random.randrange(cuts[stage] + 1, cuts[stage + 1]))
        devices.insert(stage + self.random.randrange(2), self._device())
        return Placement.of(cuts, devices)

    def _device(self) -> int:
        return self.random.randrange(self.problem.platform.num_devices)
