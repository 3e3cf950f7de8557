"""A model's calls as one list of nodes: modules that are run whole, and the torch functions between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from deepspeed_partition.capture.recorder import CaptureError, DrawsApartError
from deepspeed_partition.capture.recording import Attribute, Call, Recording, Ref, SizeOf, Template, Value
from deepspeed_partition.capture.sizes import Computed, Condition, Dimension, Returned, dimensions_in
from deepspeed_partition.module_hooks import MODULE_HOOKS

CONTAINERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip
"""Torch's own modules that may be opened; the others are run whole."""
APART = (
    "draws between its layers, from {}, and the layers that were found would repeat those numbers for every "
    "batch: put the draw into the forward() of a layer, which runs for every micro-batch, such as a block that "
    "returns its input where it is to be left out"
)
SEEDS = (
    "sets the state of random generators by {}, which its layers, on several ranks, do not do: make what is drawn "
    "so once, in __init__() and as a buffer, or let a module of its own seed and draw"
)
WITHIN = "A module that the model calls, such as a block, stays whole where its own code does that"
MOST_LINES = 3
"""Lines that a sentence names."""
LARGE = 1 / 12
"""A module with more than this share of the model's work is opened, to have more places for boundaries."""


@dataclass(slots=True, eq=False)
class Node:
    """A call that a layer makes."""

    call: Call
    number: int
    reads: tuple[int, ...]
    """Values that it is given."""
    makes: tuple[int, ...]
    """Values that it returns and that were not there before."""
    sizes: tuple[Dimension | Returned, ...]
    """The sizes that the numbers that it is given are made from."""
    attributes: frozenset[str]
    """The parameters and buffers that it uses."""
    after: set[int] = field(default_factory=set)
    """The nodes that have to run before it."""
    mutated: frozenset[int] = frozenset()
    """Storages that it changes."""
    hooks: list[Call] = field(default_factory=list)
    """The calls behind it that hang hooks on the gradients of what it makes or changes."""

    @property
    def is_module(self) -> bool:
        return self.call.is_module

    @property
    def is_random(self) -> bool:
        return self.call.effects.random

    @property
    def work(self) -> float:
        return self.call.effects.work


@dataclass(slots=True)
class Graph:
    """The nodes of a model in the order in which its code calls them."""

    recording: Recording
    nodes: list[Node]
    conditions: list[Condition]
    values: list[Value]
    inputs: list[int]
    returned: Template
    producer: dict[int, int]
    """The node that makes each value; inputs have none."""
    trainable: frozenset[str]
    numbers: dict[int, int] = field(default_factory=dict)
    """The node of each number that a module returns."""
    input_hooks: list[Call] = field(default_factory=list)
    """The calls that hang hooks on the gradients of inputs."""
    opened: frozenset[Any] = frozenset()
    """The modules that were opened, each with the number of its call."""


def graph_of(recording: Recording, opened: frozenset[Any] | None = None) -> Graph:
    """Choose the modules that are run whole, and list what runs.

    Args:
        opened: The modules to open, from another graph of the same model; None to choose.

    Raises:
        CaptureError: a module can neither be run whole nor be opened.
    """
    return _Opening(recording, opened).graph()


class _Opening:
    def __init__(self, recording: Recording, opened: frozenset[Any] | None) -> None:
        self.recording = recording
        self.to_open = opened
        self.opened: set[Any] = set()
        self.names_in: dict[str, frozenset[str]] = {}
        self.num_calls: Counter[str] = Counter()
        self.values = recording.values
        self.scopes = {call.time: call for call in _scopes_in(recording.root)}
        self.leaves = list(_leaves_in(recording.root))
        self.trainable = frozenset(
            name
            for name, tensor in recording.attributes.items()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        )
        self.users: dict[str, list[Call]] = {}
        for leaf in self.leaves:
            for name in self._used_by(leaf):
                self.users.setdefault(name, []).append(leaf)
        self.total = recording.root.effects.work or 1.0
        self.nodes: list[Node] = []
        self.conditions: list[Condition] = []
        self.input_hooks: list[Call] = []
        self.returned_numbers: dict[Any, int] = {}
        self.num_numbers = 0

    def graph(self) -> Graph:
        self._find_why_open()
        root = self.recording.root
        if root.drawn is not None:
            # Its forward(), or a step of it whose calls are followed.
            raise DrawsApartError(f"{type(self.recording.modules['']).__name__} {APART.format(root.drawn)}")
        if root.seeds is not None:
            raise DrawsApartError(f"{type(self.recording.modules['']).__name__} {SEEDS.format(root.seeds)}")
        if root.why_whole:
            raise CaptureError(f"{root.why_whole}. {WITHIN}")
        if root.why_open:
            raise CaptureError(f"{root.why_open}: give it tensors, and let it return tensors (use_cache=False)")
        if any(isinstance(leaf, Attribute) for leaf in returned_by(root).leaves):
            raise CaptureError("it returns a weight of its own, which no layer returns")
        self._open(root)
        assert root.returned is not None
        returned = self._with_numbers(root.returned)
        producer = {value: node.number for node in self.nodes for value in node.makes}
        graph = Graph(
            self.recording, self.nodes, [self._condition(each) for each in self.conditions], self.values,
            self.recording.inputs, returned, producer, self.trainable,
        )  # fmt: skip
        graph.numbers = dict(self._makers)
        graph.input_hooks, graph.opened = self.input_hooks, frozenset(self.opened)
        _drop_unused(graph)
        _find_order(graph)
        return graph

    # What a module uses and what it is used for

    def _used_by(self, call: Call) -> set[str]:
        names = {leaf.name for leaf in call.given.leaves if isinstance(leaf, Attribute)}
        if call.is_module:
            names |= self._names_in(call.target)
        return names

    def _names_in(self, module: str) -> frozenset[str]:
        if module not in self.names_in:
            tensors = (*_named_in(self.recording.modules[module], "parameters"),
                       *_named_in(self.recording.modules[module], "buffers"))  # fmt: skip
            self.names_in[module] = frozenset(self.recording.first_names[f"{module}.{name}"] for name in tensors)
        return self.names_in[module]

    def _find_why_open(self) -> None:
        for leaf in self.leaves:
            inner = (*leaf.scopes, leaf.time) if leaf.is_module else leaf.scopes
            for ref in leaf.given.refs():
                self._crosses(self.values[ref].scopes, inner, Ref(ref))
            for dimension in _dimensions_of(leaf.given):
                if isinstance(dimension, Dimension):
                    self._crosses(self.values[dimension.value].scopes, inner, dimension)
            for name in self._used_by(leaf):
                self._uses(leaf, name)
        for ref in returned_by(self.recording.root).refs():
            self._crosses(self.values[ref].scopes, (self.recording.root.time,), Ref(ref))

    def _crosses(self, made: tuple[int, ...], used: tuple[int, ...], what: Ref | Dimension) -> None:
        """Note the modules that something enters or leaves other than as an argument or a result."""
        shared = 0
        while shared < min(len(made), len(used)) and made[shared] == used[shared]:
            shared += 1
        for time in made[shared:]:
            if time in self.scopes and not _passes(self.scopes[time].returned, what):
                scope = self.scopes[time]
                scope.why_open = scope.why_open or "something in it is used outside, and is no part of its result"
        for time in used[shared:]:
            if time in self.scopes and not _passes(self.scopes[time].given, what):
                scope = self.scopes[time]
                scope.why_open = scope.why_open or "it uses something that is no argument of its call"

    def _uses(self, leaf: Call, name: str) -> None:
        for time in leaf.scopes:
            scope = self.scopes[time]
            if not scope.target or any(
                isinstance(each, Attribute) and each.name == name for each in scope.given.leaves
            ):
                continue
            if name not in self._names_in(scope.target):
                scope.why_open = scope.why_open or "it uses a weight of another module"

    # The choice

    def _is_kept(self, scope: Call, key: Any) -> bool:
        if scope.why_open:
            if scope.why_whole:
                raise CaptureError(
                    f"{scope.target} can be neither opened ({scope.why_whole}) nor run as one: {scope.why_open}"
                )
            return False
        if scope.why_whole:
            return True
        if self.to_open is not None:
            return key not in self.to_open
        module = self.recording.modules[scope.target]
        if any(vars(module).get(table) for table in MODULE_HOOKS) or hasattr(module, "_orig_mod"):
            return True
        if scope.recomputed or _recomputes_its_own(scope) or _recomputes(module):
            return True
        children = [call for call in scope.calls if call.is_module]
        if self._only_prepares(scope):
            return False
        if not children or _is_built_in(module):
            return True
        elsewhere = self._used_elsewhere(scope)
        if elsewhere:
            return elsewhere == self._used_by(scope) & self.trainable
        if scope.effects.work <= LARGE * self.total:
            return True
        inside = sum(call.effects.work for call in children)
        return inside < scope.effects.work / 2

    def _only_prepares(self, scope: Call) -> bool:
        """Whether it makes masks or tables, which layers can make for themselves if they see how."""
        assert scope.returned is not None
        return (
            bool(scope.calls)
            and not scope.effects.random
            and not self._used_by(scope) & self.trainable
            and not any(self.values[ref].requires_grad for ref in scope.returned.refs())
        )

    def _used_elsewhere(self, scope: Call) -> set[str]:
        """The weights of a module that other calls use, too."""
        return {
            name
            for name in self._used_by(scope) & self.trainable
            if any(scope.time not in (*user.scopes, user.time) for user in self.users.get(name, ()))
        }

    # The list

    def _open(self, scope: Call) -> None:
        self.conditions += scope.conditions
        for call in scope.calls:
            if not call.is_module:
                self._list(call)
                continue
            self.num_calls[call.target] += 1
            key = call.target, self.num_calls[call.target]
            if self._is_kept(call, key):
                self._list(call)
            else:
                self.opened.add(key)
                self._open(call)

    def _list(self, call: Call) -> None:
        returned = call.returned
        if returned is None:  # it raised, and the module that called it went on
            return
        start = call.time
        given = self._with_numbers(call.given)
        if call.hangs_hook:
            call.given = given
            self._hooks_of(given.refs()[0]).append(call)
            return
        made = tuple(dict.fromkeys(ref for ref in returned.refs() if self.values[ref].time >= start))
        before = {value.storage for value in self.values if value.time < start} if call.effects.mutated else set()
        mutated = frozenset(call.effects.mutated & (before | self.recording.attribute_of_storage.keys()))
        silent = not made and not mutated and not call.effects.random and not call.effects.verifies
        if silent and not call.is_module:
            return
        number = len(self.nodes)
        if call.is_module:
            for leaf in returned.leaves:
                inner = isinstance(leaf, SizeOf) and any(
                    isinstance(each, Dimension)
                    and self.values[each.value].time >= start
                    and each.value not in made
                    for each in dimensions_in(leaf.expression)
                )
                if inner and leaf.expression not in self.returned_numbers:
                    self.returned_numbers[leaf.expression] = self.num_numbers
                    self._makers[self.num_numbers] = number
                    self.num_numbers += 1
        call.given, call.returned = given, self._with_numbers(returned)
        self.nodes.append(
            Node(
                call,
                number,
                tuple(dict.fromkeys(given.refs())),
                made,
                tuple(dict.fromkeys(_dimensions_of(given))),
                frozenset(self._used_by(call)),
                mutated=mutated,
            )
        )

    def _hooks_of(self, value: int) -> list[Call]:
        """The hooks behind the last node that makes or changes a value, where all of its gradient arrives."""
        storage = self.values[value].storage
        for node in reversed(self.nodes):
            if value in node.makes or (value in node.reads and storage in node.mutated):
                return node.hooks
        return self.input_hooks

    @property
    def _makers(self) -> dict[int, int]:
        if not hasattr(self, "_makers_of_numbers"):
            self._makers_of_numbers: dict[int, int] = {}
        return self._makers_of_numbers

    def _with_numbers(self, template: Template) -> Template:
        if not self.returned_numbers:
            return template
        leaves = tuple(
            SizeOf(self._substituted(leaf.expression)) if isinstance(leaf, SizeOf) else leaf
            for leaf in template.leaves
        )
        return Template(template.structure, leaves)

    def _substituted(self, expression: Any) -> Any:
        if isinstance(expression, Dimension | Returned | Computed) and expression in self.returned_numbers:
            return Returned(self.returned_numbers[expression])
        if isinstance(expression, Computed):
            return Computed(expression.operation, tuple(map(self._substituted, expression.operands)))
        return expression

    def _condition(self, condition: Condition) -> Condition:
        return Condition(self._substituted(condition.expression), condition.outcome, condition.where)


def notes_on_recomputation(graph: Graph) -> list[str]:
    """What a user should be told where code asks for recomputation that layers do not do."""
    kept = [node.call for node in graph.nodes if node.call.in_checkpoint and node.call.effects.kept]
    lines = list(dict.fromkeys(call.where for call in kept if call.where))
    if not lines:
        return []
    shown = ", ".join([*lines[:MOST_LINES], *["..."] * (len(lines) > MOST_LINES)])
    return [
        f"torch.utils.checkpoint runs code that is no module, and layers recompute modules alone ({shown}): what "
        "that code computes between them is kept for the backward. Give checkpoint a module whose forward() has it"
    ]


def returned_by(call: Call) -> Template:
    assert call.returned is not None
    return call.returned


def _named_in(module: nn.Module, kind: str) -> list[str]:
    return [name for name, _ in getattr(module, f"named_{kind}")(remove_duplicate=False)]


def _scopes_in(call: Call) -> Iterator[Call]:
    if call.is_module:
        yield call
        for inner in call.calls:
            yield from _scopes_in(inner)


def _leaves_in(call: Call) -> Iterator[Call]:
    """Functions, and modules that call nothing that could be written down."""
    if not call.calls and call.scopes:
        yield call
    for inner in call.calls:
        yield from _leaves_in(inner)


def _dimensions_of(template: Template) -> Iterator[Dimension | Returned]:
    for leaf in template.leaves:
        if isinstance(leaf, SizeOf):
            yield from dimensions_in(leaf.expression)


def _passes(template: Template | None, what: Ref | Dimension) -> bool:
    if template is None:
        return False
    if isinstance(what, Ref):
        return what in template.leaves
    return Ref(what.value) in template.leaves or what in set(_dimensions_of(template))


def _is_built_in(module: nn.Module) -> bool:
    own = type(module).__module__
    return own.startswith("torch.nn.") and not isinstance(module, CONTAINERS)


def _recomputes_its_own(scope: Call) -> bool:
    """Whether a module runs modules under ``checkpoint`` with code of its own around them, as transformers' do."""
    return any(call.recomputed for call in scope.calls) and any(call.in_checkpoint for call in scope.calls)


def _recomputes(module: nn.Module) -> bool:
    """Whether a module of the user's recomputes what it calls by an override of ``__call__``."""
    return bool(getattr(module, "gradient_checkpointing", False)) and any(
        "__call__" in vars(kind) for kind in type(module).__mro__ if kind is not nn.Module and kind is not object
    )


def _drop_unused(graph: Graph) -> None:
    """Leave out functions whose results nobody reads, and that draw and change nothing."""
    read = set(graph.returned.refs())
    sizes = {
        each.value
        for condition in graph.conditions
        for each in dimensions_in(condition.expression)
        if isinstance(each, Dimension)
    } | {each.value for each in _dimensions_of(graph.returned) if isinstance(each, Dimension)}
    read |= sizes
    kept = []
    for node in reversed(graph.nodes):
        storages = {graph.values[value].storage for value in read}
        effects = (
            node.is_random
            or node.call.effects.verifies
            or node.mutated & storages
            or (node.mutated and _mutates_attribute(graph, node))
        )
        if not node.is_module and not effects and read.isdisjoint(node.makes):
            continue
        kept.append(node)
        read.update(node.reads)
        read.update(each.value for each in node.sizes if isinstance(each, Dimension))
    renumbered = {}
    for number, node in enumerate(reversed(kept)):
        renumbered[node.number] = number
        node.number = number
    graph.nodes = kept[::-1]
    graph.producer = {value: node.number for node in graph.nodes for value in node.makes}
    graph.numbers = {number: renumbered[node] for number, node in graph.numbers.items() if node in renumbered}


def _mutates_attribute(graph: Graph, node: Node) -> bool:
    return not node.mutated.isdisjoint(graph.recording.attribute_of_storage)


def _find_order(graph: Graph) -> None:
    """Note for each node which ones must run before it.

    These are the ones that it reads from, and those that change what it reads.
    """
    changed: dict[int, int] = {}
    read_since: dict[int, set[int]] = {}
    last_random: int | None = None
    for node in graph.nodes:
        sizes = (each.value for each in node.sizes if isinstance(each, Dimension))
        for value in (*node.reads, *sizes):
            if value in graph.producer:
                node.after.add(graph.producer[value])
        for each in node.sizes:
            if isinstance(each, Returned):
                node.after.add(graph.numbers[each.value])
        touched = {graph.values[value].storage for value in node.reads} | node.mutated
        for storage in touched:
            if storage in changed:
                node.after.add(changed[storage])
            read_since.setdefault(storage, set()).add(node.number)
        for storage in node.mutated:
            node.after |= read_since.get(storage, set()) - {node.number}
            changed[storage] = node.number
            read_since[storage] = {node.number}
        if node.is_random:
            if last_random is not None:
                node.after.add(last_random)
            last_random = node.number
        node.after.discard(node.number)
