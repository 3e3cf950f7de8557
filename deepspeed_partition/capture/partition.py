"""What crosses each place between a graph's calls, and what the layers between boundaries run.

What needs no gradient, draws no random numbers and is smaller before it is computed (masks, positions, rotary
tables) is computed by each layer that needs it. Everything else is computed once, and sent on as long as a later
layer needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_partition.capture.graph import Graph, Node, returned_by
from deepspeed_partition.capture.program import Claim, Program, Step, numbers_needed
from deepspeed_partition.capture.recording import Call, Recording, Ref, SizeOf
from deepspeed_partition.capture.sizes import Condition, Dimension, Returned, dimensions_in

MOST_REPEATED = 1 / 64
"""A call with more than this share of the model's work is never run by several layers."""
SENT = (
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float16, torch.bfloat16, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
"""The types of tensors that DeepSpeed's engine sends."""


@dataclass(slots=True)
class Flow:
    """A graph's nodes, told apart: those that run once, and those that any layer may run for itself."""

    graph: Graph
    repeated: set[int] = field(default_factory=set)
    """Nodes that each layer runs that needs what they make."""
    main: list[Node] = field(default_factory=list)
    _sources: dict[int, frozenset[int]] = field(default_factory=dict)

    def producer(self, value: int) -> int | None:
        return self.graph.producer.get(value)

    def is_repeated(self, value: int) -> bool:
        return self.graph.producer.get(value) in self.repeated

    def sources(self, value: int) -> frozenset[int]:
        """The inputs and the values that are made once, from which a value is made; itself where it is one."""
        if not self.is_repeated(value):
            return frozenset((value,))
        if value not in self._sources:
            self._sources[value] = frozenset()
            node = self.graph.nodes[self.graph.producer[value]]
            self._sources[value] = frozenset().union(*(self.sources(read) for read in self._reads(node)))
        return self._sources[value]

    def _reads(self, node: Node) -> Iterable[int]:
        """What a node reads, with what those nodes read that have changed it before."""
        for number in (node.number, *self.chain(node.number)):
            yield from self.graph.nodes[number].reads

    def chain(self, number: int) -> list[int]:
        """The repeated nodes that must run before a node."""
        found: set[int] = set()
        waiting = [number]
        while waiting:
            for before in self.graph.nodes[waiting.pop()].after:
                if before in self.repeated and before not in found:
                    found.add(before)
                    waiting.append(before)
        return sorted(found)


def flow_of(graph: Graph, decided: Mapping[int, bool] | None = None) -> Flow:
    """Find the nodes that layers may run for themselves.

    Args:
        decided: For some nodes, whether they are cheap enough, as was found in another state of the same model.
    """
    decided = decided or {}
    flow = Flow(graph)
    total = sum(node.work for node in graph.nodes) or 1.0
    values = graph.values
    changed = changed_attributes(graph.nodes, graph)
    flow.repeated = {
        node.number
        for node in graph.nodes
        if not node.is_module
        and not node.is_random
        and not node.call.effects.verifies
        and not node.attributes & (graph.trainable | changed)
        and not any(values[value].requires_grad for value in (*node.makes, *node.reads))
        and not node.mutated & graph.recording.attribute_of_storage.keys()
        and decided.get(node.number, node.work <= total * MOST_REPEATED)
    }
    makers: dict[int, set[int]] = {}
    changers: dict[int, set[int]] = {}
    readers: dict[int, set[int]] = {}
    for node in graph.nodes:
        for value in node.makes:
            makers.setdefault(values[value].storage, set()).add(node.number)
        for value in node.reads:
            readers.setdefault(values[value].storage, set()).add(node.number)
        for storage in node.mutated:
            changers.setdefault(storage, set()).add(node.number)
    inputs = {values[value].storage for value in graph.inputs}
    while True:
        before = len(flow.repeated)
        for storage, nodes in changers.items():
            if storage in inputs or nodes - flow.repeated or makers.get(storage, set()) - flow.repeated:
                flow.repeated -= nodes | makers.get(storage, set()) | readers.get(storage, set())
        flow._sources.clear()
        for node in graph.nodes:
            if node.number not in flow.repeated or changers.keys() & {values[v].storage for v in node.makes}:
                continue
            for value in node.makes:
                sources = flow.sources(value)
                reads_data = {source for source in sources if source not in graph.inputs}
                own = values[value].num_bytes
                if (reads_data or sources) and own < sum(values[source].num_bytes for source in sources):
                    flow.repeated.discard(node.number)
                    flow._sources.clear()
        if len(flow.repeated) == before:
            break
    flow.main = [node for node in graph.nodes if node.number not in flow.repeated]
    return flow


@dataclass(slots=True)
class Need:
    """What a set of nodes needs of others: values that are made once, and repeated nodes to run."""

    values: set[int]
    repeated: set[int]
    sizes: set[Dimension | Returned]


def need_of(
    flow: Flow, nodes: Iterable[Node], extra: Iterable[int], sizes: Iterable[Dimension | Returned]
) -> Need:
    """Everything that is needed to run nodes, and to have some values and sizes besides."""
    graph, need = flow.graph, Need(set(), set(), set())
    waiting: list[Node] = list(nodes)
    main = {node.number for node in waiting}

    def take(value: int) -> None:
        if flow.is_repeated(value):
            number = graph.producer[value]
            for each in (*flow.chain(number), number):
                if each not in need.repeated:
                    need.repeated.add(each)
                    waiting.append(graph.nodes[each])
        else:
            need.values.add(value)

    def take_size(size: Dimension | Returned) -> None:
        if isinstance(size, Dimension) and flow.is_repeated(size.value):
            take(size.value)
        need.sizes.add(size)

    for value in extra:
        take(value)
    for size in sizes:
        take_size(size)
    while waiting:
        node = waiting.pop()
        for value in node.reads:
            take(value)
        for size in node.sizes:
            take_size(size)
        for before in node.after:
            if before in flow.repeated and before not in need.repeated and before not in main:
                changed = graph.nodes[before].mutated
                touched = {graph.values[value].storage for value in node.reads}
                if changed & touched:
                    need.repeated.add(before)
                    waiting.append(graph.nodes[before])
    return need


# Boundaries


@dataclass(slots=True)
class Crossing:
    """The tensors that cross a place in the order of the nodes that run once."""

    values: tuple[int, ...]
    num_bytes: int
    why_not: str = ""
    """Why no boundary can be there; empty where one can."""


def crossings(flow: Flow) -> list[Crossing]:
    """What crosses each place between two nodes that run once."""
    graph = flow.graph
    last_use: dict[int, int] = {}
    end = len(flow.main)
    for place, node in enumerate(flow.main):
        for value in need_of(flow, [node], (), ()).values:
            last_use[value] = place
    for value in need_of(flow, (), graph.returned.refs(), ()).values:
        last_use[value] = end
    made = {value: place for place, node in enumerate(flow.main) for value in node.makes}
    made.update(dict.fromkeys(graph.inputs, -1))
    changes: dict[int, int] = {}
    for place, node in enumerate(flow.main):
        for storage in node.mutated:
            changes[storage] = place
    together = _same_layer(flow)
    found = []
    for place in range(len(flow.main) - 1):
        values = tuple(sorted(value for value, use in last_use.items() if made[value] <= place < use))
        why_not = _why_not(graph, values, {storage for storage, last in changes.items() if last > place})
        if not why_not and any(first <= place < last for first, last in together):
            why_not = "a buffer is changed on one side and used on the other"
        found.append(Crossing(values, sum(graph.values[value].num_bytes for value in values), why_not))
    return found


def _why_not(graph: Graph, crossing: Sequence[int], changed_later: set[int]) -> str:
    storages: set[int] = set()
    for value in crossing:
        each = graph.values[value]
        if not each.is_dense or each.dtype not in SENT:
            return f"a tensor of {each.dtype} cannot be sent"
        if each.dtype.is_complex and each.requires_grad:
            return "no gradient of a complex tensor is sent"
        if each.storage in changed_later and each.storage in storages:
            return "two tensors that cross it share memory, which is changed later"
        storages.add(each.storage)
    return ""


def _same_layer(flow: Flow) -> list[tuple[int, int]]:
    """Ranges of nodes that stay together, since one changes a buffer that another uses."""
    places: dict[str, list[int]] = {}
    changed = changed_attributes(flow.main, flow.graph)
    for place, node in enumerate(flow.main):
        for name in sorted(node.attributes):
            places.setdefault(name, []).append(place)
    return [(used[0], used[-1]) for name, used in places.items() if name in changed and len(used) > 1]


def changed_attributes(nodes: Iterable[Node], graph: Graph) -> set[str]:
    """The names of the buffers that nodes change."""
    names = graph.recording.attribute_of_storage
    return {names[storage] for node in nodes for storage in node.mutated if storage in names}


# Programs


_TAKE_SIZES = frozenset((
    "arange", "chunk", "empty", "expand", "full", "narrow", "new_empty", "new_full", "new_ones", "new_zeros",
    "ones", "rand", "randn", "repeat", "reshape", "split", "split_with_sizes", "tensor_split", "unflatten",
    "unfold", "view", "zeros",
))  # fmt: skip
"""Functions that are given sizes; numbers that others are given are dimensions, mostly."""


def _sizes_of_model(recording: Recording) -> set[int]:
    """The numbers that a model has whatever it is given: sizes of its tensors, and those that its code writes.

    A size of the data that is one of them says little of another size that is, such as the width of a head.
    """
    found = {size for tensor in recording.attributes.values() for size in tensor.shape}
    calls = [recording.root]
    for call in calls:  # grows by those within modules
        if getattr(call.target, "__name__", "") in _TAKE_SIZES:
            found.update(leaf for leaf in call.given.leaves if type(leaf) is int)
        calls += call.calls
    return found


def programs_of(
    flow: Flow, layer_of: dict[int, int], num_layers: int, input_names: Sequence[str]
) -> list[Program]:
    """What each layer runs, and what it receives and sends."""
    return _Programs(flow, layer_of, num_layers, input_names).made()


def steps_of(node: Node, conditions: Sequence[Condition] = ()) -> list[Step]:
    """The call of a node, and those that hang hooks on what it makes.

    Args:
        conditions: What is verified before it.
    """
    first = _step_of(node.call)
    first.conditions = list(conditions)
    return [first, *map(_step_of, node.hooks)]


def _step_of(call: Call) -> Step:
    return Step(call.target, call.is_module, call.given, returned_by(call), call.context, call.recomputed)


class _Programs:
    def __init__(self, flow: Flow, layer_of: dict[int, int], num_layers: int, input_names: Sequence[str]) -> None:
        self.flow, self.graph = flow, flow.graph
        self.layer_of, self.num_layers, self.input_names = layer_of, num_layers, input_names
        self.made_in = {value: layer_of[node.number] for node in flow.main for value in node.makes}
        self.made_in.update(dict.fromkeys(self.graph.inputs, 0))
        self.nodes: list[list[Node]] = [[] for _ in range(num_layers)]
        self._first_known: dict[Dimension, int] = {}
        self._of_model = _sizes_of_model(self.graph.recording)
        for node in flow.main:
            self.nodes[layer_of[node.number]].append(node)

    def made(self) -> list[Program]:
        graph, last = self.graph, self.num_layers - 1
        outputs = graph.returned.refs()
        conditions = self._conditions_by_layer()
        needs = [
            need_of(
                self.flow, self.nodes[layer], outputs if layer == last else (), numbers_needed(conditions[layer])
            )
            for layer in range(self.num_layers)
        ]
        entering = self._entering(needs)
        present = [
            {value for value, layer in self.made_in.items() if layer == at} | set(entering[at])
            for at in range(self.num_layers)
        ]
        numbers: list[set[Any]] = [set(need.sizes) for need in needs]
        programs = [
            Program(list(entering[layer]), list(outputs) if layer == last else [], [], is_last=layer == last)
            for layer in range(self.num_layers)
        ]
        programs[0].input_names = list(self.input_names)
        for layer in range(last, 0, -1):
            for number in sorted(numbers[layer], key=repr):
                if self._is_here(number, layer, present, needs[layer]):
                    continue
                numbers[layer - 1].add(number)
                claim = self._claim(number, entering[layer])
                if claim is not None:
                    programs[layer].claims_in.append(claim)
                    programs[layer - 1].claims_out.append(claim)
                else:
                    programs[layer].numbers_in.append(number)
                    programs[layer - 1].numbers_out.append(number)
        for layer, program in enumerate(programs):
            if layer < last:
                program.outputs = list(entering[layer + 1])
            self._fill(program, layer, needs[layer], conditions[layer], numbers[layer])
        return programs

    def _entering(self, needs: Sequence[Need]) -> list[list[int]]:
        entering: list[list[int]] = [list(self.graph.inputs)]
        for layer in range(1, self.num_layers):
            later = {value for need in needs[layer:] for value in need.values}
            entering.append(sorted(value for value in later if self.made_in[value] < layer))
        return entering

    def _is_here(self, number: Any, layer: int, present: Sequence[set[int]], need: Need) -> bool:
        if isinstance(number, Returned):
            return self.layer_of.get(self.graph.numbers[number.value]) == layer
        if self.flow.is_repeated(number.value):
            return self.graph.producer[number.value] in need.repeated
        return number.value in present[layer]

    def _claim(self, number: Any, entering: Sequence[int]) -> Claim | None:
        """A size of an entering tensor that is the same number; None where none is certain enough to be tried."""
        if not isinstance(number, Dimension) or number.kind != "shape":
            return None
        values = self.graph.values
        wanted = values[number.value].shape[number.place]
        same = [
            (value, place)
            for value in entering
            for place, size in enumerate(values[value].shape)
            if size == wanted
        ]
        alike = [each for each in same if each[1] == number.place]
        if not alike and len(same) == 1 and wanted not in self._of_model:
            alike = same
        return Claim(number, *alike[0]) if alike else None

    def _conditions_by_layer(self) -> list[list[Condition]]:
        found: list[list[Condition]] = [[] for _ in range(self.num_layers)]
        seen = set()
        for condition in self.graph.conditions:
            key = condition.expression, condition.outcome
            if key in seen:
                continue
            seen.add(key)
            layer = max((self._earliest(number) for number in dimensions_in(condition.expression)), default=0)
            found[layer].append(condition)
        return found

    def _earliest(self, number: Dimension | Returned) -> int:
        """The first layer that can know a number."""
        if isinstance(number, Returned):
            return self.layer_of[self.graph.numbers[number.value]]
        if number not in self._first_known:
            self._first_known[number] = 0
            if not self.flow.is_repeated(number.value):
                self._first_known[number] = self.made_in[number.value]
            else:
                need = need_of(self.flow, (), [number.value], ())
                values = (self.made_in[value] for value in need.values)
                sizes = (
                    self._earliest(size)
                    for size in need.sizes
                    if isinstance(size, Returned) or not self.flow.is_repeated(size.value)
                )
                self._first_known[number] = max((*values, *sizes), default=0)
        return self._first_known[number]

    def _fill(
        self, program: Program, layer: int, need: Need, conditions: Sequence[Condition], numbers: set[Any]
    ) -> None:
        graph = self.graph
        nodes = sorted(
            [*self.nodes[layer], *(graph.nodes[number] for number in need.repeated)], key=lambda node: node.number
        )
        for number in numbers:
            if isinstance(number, Dimension):
                program.sizes_of.setdefault(number.value, []).append(number)
        program.without_gradient = frozenset(
            value
            for value in program.inputs
            if layer and not graph.values[value].requires_grad and graph.values[value].dtype.is_floating_point
        )
        known: set[Any] = set(program.numbers_in) | {claim.size for claim in program.claims_in}
        available = set(program.inputs)
        waiting = list(conditions)
        if not layer:
            program.steps += map(_step_of, graph.input_hooks)
        for node in nodes:
            call = node.call
            ready, waiting = self._ready(waiting, available, known)
            program.steps += steps_of(node, ready)
            available.update(node.makes)
            known.update(
                leaf.expression
                for leaf in returned_by(call).leaves
                if isinstance(leaf, SizeOf) and isinstance(leaf.expression, Returned)
            )
        program.conditions = waiting
        self._drop_early(program)

    @staticmethod
    def _ready(
        conditions: Sequence[Condition], available: set[int], known: set[Any]
    ) -> tuple[list[Condition], list[Condition]]:
        def is_ready(condition: Condition) -> bool:
            return all(
                number in known or (isinstance(number, Dimension) and number.value in available)
                for number in dimensions_in(condition.expression)
            )

        return [each for each in conditions if is_ready(each)], [each for each in conditions if not is_ready(each)]

    @staticmethod
    def _drop_early(program: Program) -> None:
        kept = {*program.outputs, *(claim.value for claim in program.claims_out)}
        for step in reversed(program.steps):
            used = {*step.given.refs(), *(leaf.value for leaf in step.returned.leaves if isinstance(leaf, Ref))}
            step.dropped = tuple(sorted(used - kept))
            kept |= used
        never = set(program.inputs) - kept
        if never and program.steps:
            program.steps[0].dropped = (*program.steps[0].dropped, *never)
