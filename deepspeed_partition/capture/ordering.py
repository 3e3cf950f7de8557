"""An order of a model's calls in which a pipeline needs little memory, as the planner counts it.

Orders are proposed, and the planner judges: that of the source; one in which few bytes wait between the calls that
make and those that read them; and the one that the planner finds for any graph of layers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from deepspeed_partition.capture.graph import Node
from deepspeed_partition.capture.layout import layout_of
from deepspeed_partition.capture.partition import Flow, need_of
from deepspeed_partition.capture.planned_memory import NUM_DEVICES, PlannedMemory
from deepspeed_partition.capture.sizes import Dimension
from deepspeed_partition.planner.graphs.layer_graph import GraphError, LayerGraph
from deepspeed_partition.planner.graphs.layer_graph import Node as LayerNode

LEAST_SAVED = 1 / 100
"""The share of the memory that another order than the source's must save, or of the bytes that cross."""
MOST_CALLS = 512
"""Calls up to which the planner's own search for an order is tried: it takes up to half a second."""
LEAST_PASSED = 1 / 4
"""The share of the model's work that a call must pass to be moved."""


def choose_order(flow: Flow) -> None:
    """Put a flow's calls in the order in which pipelines need least memory; where that is equal, least crosses.

    The source's order stays where no other one saves ``LEAST_SAVED``: gradients add up in the order of the calls,
    and another order rounds otherwise.
    """
    best, judged = list(flow.main), None
    for order in _proposals(flow):
        if judged is None:
            judged = _judged(flow, best)
        other = _judged(flow, order)
        memory = sum(one / two for one, two in zip(other[0], judged[0], strict=True)) / len(NUM_DEVICES)
        if memory < 1 - LEAST_SAVED or (memory <= 1 and other[1] < judged[1] * (1 - LEAST_SAVED)):
            best, judged = order, other
    flow.main = best


def _judged(flow: Flow, order: list[Node]) -> tuple[list[int], float]:
    """The least memory of a device in pipelines of some sizes, and the bytes that cross a boundary in the mean."""
    flow.main = order
    planned = PlannedMemory(flow)
    layout = layout_of(flow, planned)
    memory = [planned.least(layout.boundaries, num_devices) for num_devices in NUM_DEVICES]
    return memory, sum(crossing.num_bytes for crossing in layout.crossings) / max(1, len(layout.crossings))


def _proposals(flow: Flow) -> Iterator[list[Node]]:
    """Orders other than the one in which the calls stand."""
    source = list(flow.main)
    shorten_waits(flow)
    shortened, flow.main = flow.main, source
    if shortened != source:
        yield shortened
    if len(source) <= MOST_CALLS:
        found = _planners_order(flow)
        if found not in (source, shortened):
            yield found


def _planners_order(flow: Flow) -> list[Node]:
    """The order that the planner finds for the graph, as near to it as the calls allow that must follow others."""
    ordering = _Ordering(flow)
    values, source = flow.graph.values, list(flow.main)
    inputs = {value: place for place, value in enumerate(flow.graph.inputs)}
    place_of = {node.number: len(inputs) + place for place, node in enumerate(source)}
    nodes = [
        LayerNode(name=str(value), type="", forward_milliseconds=0, backward_milliseconds=0, weight_bytes=0,
                  output_bytes=values[value].num_bytes, is_input=True)
        for value in inputs
    ]  # fmt: skip
    for node in source:
        needed = ordering.reads[node.number].values
        reads = {inputs[value] if value in inputs else place_of[ordering.maker[value]] for value in needed}
        nodes.append(
            LayerNode(
                name=str(node.number), type="", forward_milliseconds=node.work, backward_milliseconds=0,
                weight_bytes=0, output_bytes=ordering.bytes_made[node.number], reads=tuple(sorted(reads)),
            )
        )  # fmt: skip
    try:
        found = LayerGraph(nodes).order()
    except GraphError:
        return source
    rank = {source[place - len(inputs)].number: number for number, place in enumerate(found)}
    return _in_order(source, ordering, rank)


def _in_order(source: Sequence[Node], ordering: _Ordering, rank: dict[int, int]) -> list[Node]:
    """The calls by rank, each behind all that it must follow."""
    by_number = {node.number: node for node in source}
    waits = {number: len(ordering.before[number]) for number in by_number}
    ready = [(rank[number], number) for number, count in waits.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(by_number[number])
        for behind in ordering.behind[number]:
            waits[behind] -= 1
            if not waits[behind]:
                heapq.heappush(ready, (rank[behind], behind))
    assert len(order) == len(source)
    return order


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
