"""An order of a graph's nodes in which few bytes wait between the calls that make and those that read them."""

from __future__ import annotations

from deepspeed_partition.capture.graph import Node
from deepspeed_partition.capture.partition import Flow, need_of
from deepspeed_partition.capture.sizes import Dimension

LEAST_PASSED = 1 / 4
"""The share of the model's work that a call must pass to be moved."""


def shorten_waits(flow: Flow) -> None:
    """Move calls to where fewer bytes cross the places between: late ones from the end, then early ones.

    The model's code may compute early what it reads late, and a boundary between the two would carry it. Every
    move lowers the sum of the bytes over all places, or moves a call late at no cost, so that what it reads can
    follow. A call that would pass little of the model's work stays where it is: gradients add up in the order of
    the calls, and another order rounds otherwise. What draws random numbers keeps its order. Each call is looked
    at once in each direction: O(n d) for n calls that may move by d places.
    """
    _Ordering(flow).improve()


class _Ordering:
    def __init__(self, flow: Flow) -> None:
        self.flow, self.order = flow, list(flow.main)
        values = flow.graph.values
        self.least_work = LEAST_PASSED * sum(node.work for node in self.order)
        self.reads = {node.number: need_of(flow, [node], (), ()) for node in self.order}
        self.bytes_made = {
            node.number: sum(values[value].num_bytes for value in node.makes) for node in self.order
        }
        self.maker = {value: node.number for node in self.order for value in node.makes}
        self.before = {node.number: self._before(node) for node in self.order}
        self.users: dict[int, set[int]] = {}
        for node in self.order:
            for value in self.reads[node.number].values:
                self.users.setdefault(value, set()).add(node.number)
        self.kept = need_of(flow, (), flow.graph.returned.refs(), ()).values
        self.behind: dict[int, set[int]] = {node.number: set() for node in self.order}
        for number, earlier in self.before.items():
            for each in earlier:
                self.behind[each].add(number)

    def _before(self, node: Node) -> set[int]:
        """The nodes that must run earlier, also for what this node's layer computes for itself."""
        graph, need = self.flow.graph, self.reads[node.number]
        found = {self.maker[value] for value in need.values if value in self.maker}
        for number in (node.number, *need.repeated):
            found |= {each for each in graph.nodes[number].after if each not in self.flow.repeated}
        for size in need.sizes:
            made_by = self.maker.get(size.value) if isinstance(size, Dimension) else graph.numbers.get(size.value)
            if made_by is not None:
                found.add(made_by)
        return found - {node.number}

    def improve(self) -> None:
        for node in reversed(self.flow.main):
            self._move(node, late=True)
        for node in self.flow.main:
            self._move(node, late=False)
        self.flow.main = self.order

    def _move(self, node: Node, *, late: bool) -> None:
        at = {each.number: place for place, each in enumerate(self.order)}
        start = at[node.number]
        if late:
            limit = min((at[each] for each in self.behind[node.number]), default=start + 1) - 1
            places = range(start + 1, limit + 1)
        else:
            limit = max((at[each] for each in self.before[node.number]), default=-1) + 1
            places = range(start - 1, limit - 1, -1)
        best, gain, best_gain, work = start, 0, 0, 0.0
        for place in places:
            gain += self._gain(node, at, place, late=late)
            work += self.order[place].work
            if work > self.least_work and (gain > best_gain or (late and gain == best_gain)):
                best, best_gain = place, gain
        if best != start:
            self.order.insert(best, self.order.pop(start))

    def _gain(self, node: Node, at: dict[int, int], passed: int, *, late: bool) -> int:
        """The bytes that no longer wait while another node runs, of the node at ``passed``."""
        values = self.flow.graph.values
        only_here = 0
        for value in self.reads[node.number].values:
            if value in self.kept:
                continue
            others = [at[user] for user in self.users[value] if user != node.number]
            last = max(others, default=at.get(self.maker.get(value, -1), -1))
            if last < passed or (last == passed and late):
                only_here += values[value].num_bytes
        made = self.bytes_made[node.number]
        return made - only_here if late else only_here - made
