"""Conversion of a graph of layers to a chain: an order of its nodes, and boundaries that few tensors cross.

Across a boundary goes every tensor that is made before it and read after it, whether the layers at the boundary
use it or not, and every result of the network, which the loss reads at the end. Two things are decided:

- *The order.* Of all orders that follow the edges, one where little crosses: the least sum, over all positions,
  of the bytes that cross. With c(S) the bytes alive after the set S of nodes, a set that holds whatever its
  nodes read::

      A(S) = c(S) + min over the last node v of A(S - v)

  The sets grow node by node. Where many are possible only the cheapest of each size grow on (``MOST_STEPS``),
  so the order is exact for small graphs and for graphs that narrow often, such as residual and inception
  networks, and a good one elsewhere.
- *The boundaries.* Every position that at most ``FEW_TENSORS`` tensors cross. Positions that more tensors cross
  are added where otherwise one layer would hold a sixteenth of the whole time. Between nodes that cost nothing
  (views, sizes) only the cheapest position counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

from deepspeed_partition.planner.problem import Chain, LayerProfile
from deepspeed_partition.planner.units import shown

FEW_TENSORS = 3
"""Most tensors that cross an ordinary boundary; more cross one only where a layer would be too long without it."""
LONGEST_SHARE = Fraction(1, 16)
"""Share of the whole time from which on a layer is cut further, where the graph allows it."""
MOST_STEPS = 200_000
"""Nodes tried in the search for an order, besides the first ``MOST_CHOICES`` of each set: half a second."""
MOST_CHOICES = 32
"""Nodes tried of those that may come next in an order, the first ones."""
MOST_NODES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation of a network, for one micro-batch. An input of the network is a node with ``is_input``."""

    name: str
    type: str
    forward_milliseconds: float
    backward_milliseconds: float
    weight_bytes: int
    output_bytes: int
    reads: tuple[int, ...] = ()
    """Nodes whose outputs this one reads, as indices; each counts once."""
    is_input: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", tuple(dict.fromkeys(self.reads)))

    @property
    def milliseconds(self) -> Fraction:
        return _exact(self.forward_milliseconds) + _exact(self.backward_milliseconds)

    @property
    def costs_nothing(self) -> bool:
        return not (self.forward_milliseconds or self.backward_milliseconds or self.weight_bytes)


class Crossing(NamedTuple):
    """Tensors that cross one boundary."""

    num_tensors: int
    """Number of tensors that have bytes."""
    num_bytes: int


class GraphError(ValueError):
    """Raised for a graph that is no network of layers."""

    def __init__(self, message: str, node: int | None = None) -> None:
        super().__init__(message)
        self.node = node
        """Index of a node to which the message applies; None: to none."""


class LayerGraph:
    """Graph of a network: its nodes, and edges for the tensors that they read.

    Raises:
        GraphError: it has no nodes besides inputs, or too many, nodes that wait for each other in a circle, or a
            part that is connected to nothing else.
    """

    def __init__(self, nodes: Sequence[Node], name: str = "graph") -> None:
        self.name = name
        self.nodes = tuple(nodes)
        self.layers = [index for index, node in enumerate(self.nodes) if not node.is_input]
        if not self.layers:
            raise GraphError("the graph has no nodes besides inputs")
        if len(self.nodes) > MOST_NODES:
            raise GraphError(
                f"the graph has {len(self.nodes)} nodes and at most {MOST_NODES} are read: group them"
            )
        self.readers: list[list[int]] = [[] for _ in self.nodes]
        """Indices, for each node, of the nodes that read its output."""
        for index in self.layers:
            for tensor in self.nodes[index].reads:
                self.readers[tensor].append(index)
        order = self._any_order()
        self._refuse_parts()
        self.results = self._results(order)
        """Nodes whose outputs the loss reads, at the end."""

    def _any_order(self) -> list[int]:
        waits_for = [len(self._made_reads(index)) for index in range(len(self.nodes))]
        ready = [index for index in self.layers if not waits_for[index]]
        for index in ready:  # the list grows meanwhile
            for reader in self.readers[index]:
                waits_for[reader] -= 1
                if not waits_for[reader]:
                    ready.append(reader)
        if len(ready) == len(self.layers):
            return ready
        node, seen = next(index for index in self.layers if waits_for[index]), set[int]()
        while node not in seen:  # follow the waits until a node comes again: it is on a circle
            seen.add(node)
            node = next(tensor for tensor in self._made_reads(node) if waits_for[tensor])
        raise GraphError(f"node {shown(self.nodes[node].name)} waits for itself: the graph has a circle", node)

    def _refuse_parts(self) -> None:
        found, todo = {self.layers[0]}, [self.layers[0]]
        while todo:
            index = todo.pop()
            near = {*self.nodes[index].reads, *self.readers[index]} - found
            found |= near
            todo.extend(near)
        apart = next((index for index in self.layers if index not in found), None)
        if apart is not None:
            names = [shown(self.nodes[index].name) for index in (apart, self.layers[0])]
            raise GraphError(f"node {names[0]} is not connected with {names[1]}: the graph has parts", apart)

    def _made_reads(self, index: int) -> list[int]:
        """Return the nodes that a node reads, without inputs, which are there from the start."""
        return [tensor for tensor in self.nodes[index].reads if not self.nodes[tensor].is_input]

    def _results(self, order: Sequence[int]) -> set[int]:
        """Return the results: nodes whose outputs nobody reads, without lengths and items left aside.

        A result is a node that computes something, or that hands on what no other node computes with.
        """
        leads_on: set[int] = set()
        for index in reversed(order):
            if any(reader in leads_on or not self.nodes[reader].costs_nothing for reader in self.readers[index]):
                leads_on.add(index)
        unused: set[int] = set()
        for index in order:
            if self.nodes[index].costs_nothing:
                made = self._made_reads(index)
                is_unused = bool(made) and unused.issuperset(made)
            else:
                is_unused = index not in leads_on
            if is_unused:
                unused.add(index)
        return {index for index in unused if not self.readers[index]}

    def to_chain(self) -> Chain:
        """Return the chain of the graph; the times and weights of its layers add up to those of the nodes."""
        order = self.order()
        crossing = self.crossing(order)
        layers = [
            self._layer([self.nodes[index] for index in order[start:stop]], crossing[stop].num_bytes)
            for start, stop in pairwise(self.boundaries(order))
        ]
        inputs = sum(node.output_bytes for node in self.nodes if node.is_input)
        return Chain(input_bytes=inputs, layers=tuple(layers), name=self.name)

    def _layer(self, nodes: list[Node], output_bytes: int) -> LayerProfile:
        read = {tensor for node in nodes for tensor in node.reads}
        first, last = nodes[0].name, nodes[-1].name
        return LayerProfile(
            name=first if len(nodes) == 1 else f"{first}..{last}",
            type="+".join(dict.fromkeys(node.type for node in nodes)),
            forward_seconds=float(sum(_exact(node.forward_milliseconds) for node in nodes) / 1000),
            backward_seconds=float(sum(_exact(node.backward_milliseconds) for node in nodes) / 1000),
            weight_bytes=sum(node.weight_bytes for node in nodes),
            output_bytes=output_bytes,
            stash_bytes=sum(self.nodes[tensor].output_bytes for tensor in read),
        )

    def crossing(self, order: Sequence[int]) -> list[Crossing]:
        """Return, as entry p, what crosses a boundary before position p of the order; at its end, the results."""
        position = {index: place for place, index in enumerate(order)}
        change = [[0, 0] for _ in range(len(order) + 2)]
        for index, node in enumerate(self.nodes):
            made = position.get(index, -1)  # inputs are there from the start
            read = max((position[reader] for reader in self.readers[index]), default=made)
            if index in self.results:
                read = len(order)
            # A tensor without bytes, such as a length, is nothing to send.
            for place, sign in ((made + 1, 1), (read + 1, -1)):
                change[place][0] += sign * (node.output_bytes > 0)
                change[place][1] += sign * node.output_bytes
        tensors, num_bytes = (list(accumulate(each)) for each in zip(*change[:-1], strict=True))
        return [Crossing(*each) for each in zip(tensors, num_bytes, strict=True)]

    def order(self) -> list[int]:
        """Return the nodes besides inputs, each after what it reads."""
        before = {index: _mask(self._made_reads(index)) for index in self.layers}
        after = [_mask(readers) for readers in self.readers]
        size = [node.output_bytes for node in self.nodes]
        kept_size = {index: size[index] if after[index] or index in self.results else 0 for index in self.layers}
        most_steps = max(MOST_CHOICES, MOST_STEPS // len(self.layers))
        read_inputs = sum(size[index] for index, node in enumerate(self.nodes) if node.is_input and after[index])
        # Each set has the cost so far, the bytes alive, and the nodes that may come next.
        sets = {0: (0, read_inputs, _mask([index for index in self.layers if not before[index]]))}
        choices: list[dict[int, int]] = []
        for _ in self.layers:
            grown: dict[int, tuple[int, int]] = {}
            choice: dict[int, int] = {}
            steps = 0
            for done, (cost, alive, ready) in sorted(sets.items(), key=lambda each: (each[1][0], each[0])):
                for index in islice(_bits(ready), MOST_CHOICES):
                    now = done | 1 << index
                    alive_now = alive + kept_size[index]
                    for tensor in self.nodes[index].reads:
                        if not after[tensor] & ~now:
                            alive_now -= size[tensor]
                    if now not in grown or cost + alive_now < grown[now][0]:
                        grown[now] = cost + alive_now, alive_now
                        choice[now] = index
                    steps += 1
                if steps >= most_steps:
                    break
            known, sets = sets, {}
            for now, (cost, alive) in grown.items():
                index = choice[now]
                opened = [reader for reader in self.readers[index] if not before[reader] & ~now]
                sets[now] = cost, alive, known[now ^ 1 << index][2] ^ 1 << index | _mask(opened)
            choices.append(choice)
        (done,) = sets
        order = []
        for choice in reversed(choices):
            order.append(choice[done])
            done ^= 1 << order[-1]
        return order[::-1]

    def boundaries(self, order: Sequence[int]) -> list[int]:
        """Return the positions in the order where layers begin, and its length."""
        nodes = [self.nodes[index] for index in order]
        crossing = self.crossing(order)
        until = list(accumulate((node.milliseconds for node in nodes), initial=Fraction(0)))
        candidates = _cheapest_of_equals(
            nodes, [(max(0, each.num_tensors - FEW_TENSORS), each.num_bytes) for each in crossing]
        )
        found = {0, len(nodes)} | {place for place in candidates if crossing[place].num_tensors <= FEW_TENSORS}
        for limit in sorted({crossing[place].num_tensors for place in candidates}):
            for start, stop in list(pairwise(sorted(found))):
                if limit > FEW_TENSORS and until[stop] - until[start] >= LONGEST_SHARE * until[-1]:
                    within = [place for place in candidates if start < place < stop]
                    found |= {place for place in within if crossing[place].num_tensors <= limit}
        return sorted(found)


def _cheapest_of_equals(nodes: Sequence[Node], price: Sequence[tuple[int, int]]) -> list[int]:
    """Return inner positions between nodes; where nothing is computed between several, only the cheapest."""
    groups = [[0]]
    for position, node in enumerate(nodes, start=1):
        if node.costs_nothing:
            groups[-1].append(position)
        else:
            groups.append([position])
    return [min(group, key=price.__getitem__) for group in groups[1:-1]]


def _exact(milliseconds: float) -> Fraction:
    """Return the decimal number that was written, exactly."""
    return Fraction(repr(milliseconds))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _mask(indices: Sequence[int]) -> int:
    mask = 0
    for index in indices:
        mask |= 1 << index
    return mask
