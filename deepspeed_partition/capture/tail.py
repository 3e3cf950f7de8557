"""The end of a model after its last weight, where that makes a loss: it runs apart from the layers.

A Hugging Face model that is given labels returns a loss. As a layer's output it would be that of one micro-batch,
whose labels are not as many as another one's. So the calls between the last weights and the loss are taken out of
the graph. The layers return what they need, such as the logits; whoever has the outputs of a whole batch runs them
on these, with the batch's own labels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deepspeed_partition.capture.graph import Graph, Node
from deepspeed_partition.capture.partition import steps_of
from deepspeed_partition.capture.program import Program
from deepspeed_partition.capture.recorder import CaptureError
from deepspeed_partition.capture.recording import Attribute, Ref, SizeOf, Template
from deepspeed_partition.capture.sizes import Condition, Dimension, Returned, dimensions_in
from deepspeed_partition.capture.structure import build, flatten


@dataclass(slots=True, eq=False)
class Tail:
    """What runs on the outputs of the last layer, and what the model returns."""

    program: Program
    num_outputs: int
    """How many tensors the last layer returns."""
    returned: Template

    def run(self, model: nn.Module, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """What the model itself returns.

        Args:
            model: The model, of which the tail uses no weight.
            outputs: What the last layer returned.
            inputs: The tensors among the model's arguments.
        """
        if len(outputs) != self.num_outputs:
            raise ValueError(f"the layers returned {len(outputs)} tensors and not {self.num_outputs}")
        found = self.program.run(model, (*outputs, *inputs))
        values = dict(zip(self.program.outputs, found if isinstance(found, tuple) else (found,), strict=True))
        leaves = [values[leaf.value] if isinstance(leaf, Ref) else leaf for leaf in self.returned.leaves]
        return build(self.returned.structure, leaves)


def cut_tail(graph: Graph) -> Tail:
    """Take the calls that make a loss out of a graph, which then returns what they need.

    A graph that returns no tensor without dimensions keeps all of its calls.

    Raises:
        CaptureError: the model returns a number that was made from sizes, or a weight.
    """
    returned = graph.returned
    if any(isinstance(leaf, SizeOf | Attribute) for leaf in returned.leaves):
        raise CaptureError("the model returns a size of a tensor, or a weight: let it return what it computes")
    cut = _Cut(graph)
    outputs = cut.outputs()
    tail = Tail(cut.program(outputs), len(outputs), returned)
    leave_out(graph, cut.numbers)
    values = tuple(Ref(value) for value in outputs)
    graph.returned = Template(flatten(values)[1], values)
    return tail


class _Cut:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.followers: dict[int, set[int]] = {}
        for node in graph.nodes:
            for before in node.after:
                self.followers.setdefault(before, set()).add(node.number)
        self.numbers = self._tail()
        """The nodes that run in the tail alone."""
        self.changed = {storage for node in graph.nodes for storage in node.mutated}
        """The memory that some node changes, such as that of a sum to which layers add (``total += each``)."""
        self.again: set[int] = set()
        """The nodes that run in the tail, too: they make masks and the like from the arguments."""
        made = {value for number in self.numbers for value in graph.nodes[number].makes}
        self.conditions = [
            condition for condition in graph.conditions if not made.isdisjoint(_in_condition(condition))
        ]
        """What the model's code asked of sizes in the tail."""

    def _tail(self) -> set[int]:
        graph, outside = self.graph, set[int]()
        makers: dict[int, set[int]] = {}
        for node in graph.nodes:
            for value in node.makes:
                makers.setdefault(graph.values[value].storage, set()).add(node.number)
        others = {
            graph.values[value].storage for value in graph.inputs
        } | graph.recording.attribute_of_storage.keys()
        while True:
            found = self._leading_to_a_loss(outside)
            # ``loss += auxiliary`` changes what the tail itself has made; what changes other tensors stays.
            changing = {
                number
                for number in found
                for storage in graph.nodes[number].mutated
                if storage in others or not makers.get(storage, {-1}) <= found
            }
            if not changing:
                return found
            outside |= changing

    def _leading_to_a_loss(self, outside: Collection[int]) -> set[int]:
        values = self.graph.values
        wanted = {
            ref for ref in self.graph.returned.refs() if values[ref].shape == () and values[ref].requires_grad
        }
        found: set[int] = set()
        for node in reversed(self.graph.nodes):
            if node.number in outside or not self._is_plain(node, changes=True):
                continue
            changes_one = node.mutated and not node.mutated.isdisjoint(values[each].storage for each in wanted)
            if wanted.isdisjoint(node.makes) and not changes_one:
                continue
            if self.followers.get(node.number, set()) <= found:
                found.add(node.number)
                wanted.update(node.reads)
        return found

    def _is_plain(self, node: Node, *, changes: bool = False) -> bool:
        """Whether a node uses no weight, draws no random number and changes nothing, or only if it ``changes``."""
        attributes = self.graph.recording.attributes
        return not (
            node.is_random
            or (node.mutated and not changes)
            or any(isinstance(attributes[name], nn.Parameter) for name in node.attributes)
            or any(isinstance(size, Returned) for size in node.sizes)
        )

    def outputs(self) -> list[int]:
        """The values that the tail needs of the layers."""
        graph = self.graph
        needed: set[int] = set(graph.returned.refs())
        for number in self.numbers:
            needed |= set(_needs(graph.nodes[number]))
        needed |= {each for condition in self.conditions for each in _in_condition(condition)}
        made = {value for number in self.numbers for value in graph.nodes[number].makes}
        waiting, outputs = sorted(needed - made), set[int]()
        while waiting:
            value = waiting.pop()
            if value in graph.inputs:
                continue
            number = graph.producer[value]
            if number in self.again:
                continue
            if self._is_from_arguments(number):
                self.again.add(number)
                waiting += _needs(graph.nodes[number])
            else:
                outputs.add(value)
        return sorted(outputs)

    def _is_from_arguments(self, number: int) -> bool:
        """Whether what a node makes follows from the arguments alone, has no gradient, and stays as it is."""
        waiting, seen = [number], set[int]()
        while waiting:
            node = self.graph.nodes[waiting.pop()]
            if node.number in seen:
                continue
            seen.add(node.number)
            made = [self.graph.values[value] for value in node.makes]
            if not self._is_plain(node) or any(
                each.requires_grad or each.storage in self.changed for each in made
            ):
                return False
            waiting += [self.graph.producer[value] for value in _needs(node) if value in self.graph.producer]
        return True

    def program(self, outputs: Sequence[int]) -> Program:
        """What the tail runs."""
        graph = self.graph
        nodes = [graph.nodes[number] for number in sorted(self.numbers | self.again)]
        program = Program([*outputs, *graph.inputs], list(dict.fromkeys(graph.returned.refs())), [], is_last=True)
        program.conditions = self.conditions
        sizes = {size for node in nodes for size in node.sizes if isinstance(size, Dimension)}
        for condition in self.conditions:
            sizes |= {each for each in dimensions_in(condition.expression) if isinstance(each, Dimension)}
        for size in sizes:
            program.sizes_of.setdefault(size.value, []).append(size)
        for node in nodes:
            program.steps += steps_of(node)
        return program


def _needs(node: Node) -> Iterator[int]:
    yield from node.reads
    yield from (size.value for size in node.sizes if isinstance(size, Dimension))


def _in_condition(condition: Condition) -> Iterator[int]:
    yield from (each.value for each in dimensions_in(condition.expression) if isinstance(each, Dimension))


def leave_out(graph: Graph, numbers: Collection[int]) -> None:
    """Let a graph be without some nodes, on which no other one depends, and what was asked of their sizes."""
    kept = [node for node in graph.nodes if node.number not in numbers]
    renumbered = {node.number: place for place, node in enumerate(kept)}
    for node in kept:
        node.after = {renumbered[before] for before in node.after}
        node.number = renumbered[node.number]
    graph.nodes = kept
    graph.producer = {value: node.number for node in kept for value in node.makes}
    known = graph.producer.keys() | set(graph.inputs)
    graph.conditions = [each for each in graph.conditions if known.issuperset(_in_condition(each))]
    graph.numbers = {number: renumbered[node] for number, node in graph.numbers.items() if node in renumbered}
