"""What a receiver must know of a part: its tensors, its attributes, its hooks; and what cannot be sent."""

from __future__ import annotations

import itertools
import pickle
import queue
import random
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy
import torch
from numpy.random import MT19937, PCG64, PCG64DXSM, SFC64, Philox
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_partition.code_names import module_of
from deepspeed_partition.engine.pipeline.parts import (
    Part,
    tensors_by_name,
)
from deepspeed_partition.engine.repartition.buffer_tables import BufferPlaces, buffers_of, take_buffers
from deepspeed_partition.engine.repartition.module_trees import (
    Tree,
    UnlikeTreeError,
    check_tree,
    new_paths,
    take_tree,
    tree_of,
)
from deepspeed_partition.engine.repartition.object_states import (
    HOSTS,
    Named,
    NotHereError,
    ObjectState,
    fill_queue,
    laid,
    loaded,
    object_state,
)
from deepspeed_partition.engine.repartition.one_memory import Found, Memory, found_in, memories_of
from deepspeed_partition.engine.repartition.plain_data import (
    HostTensor,
    checked,
    is_data,
    is_plain,
    off_the_device,
    onto_the_device,
    with_data,
)
from deepspeed_partition.engine.repartition.shared_tensors import (
    CopyOfVariable,
    StillThere,
    is_shareable,
    say_of_copy,
    take_still_there,
    told_of_sharing,
    with_present,
)
from deepspeed_partition.engine.repartition.tensor_forms import TensorForm, can_be_sent, form_of
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.generators import generator_state, generators_of, set_generator_state
from deepspeed_partition.hidden_modules import hidden_modules, hidden_tensors
from deepspeed_partition.kept_values import itself, numbers_of_count, state_of
from deepspeed_partition.module_hooks import MODULE_HOOKS
from deepspeed_partition.planner.allocation import Allocation
from deepspeed_partition.profiling.attributes import OF_DEEPSPEED_ON_TENSORS, attributes_of, mark
from deepspeed_partition.profiling.sources import users_names
from deepspeed_partition.tensor_values import has_memory, parts_of, version_of

KNOWN = ("deepspeed.", "deepspeed_partition.", "lightning_madpipe.")

OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a receiver must know about a parameter or buffer that it is sent."""

    name: str
    form: TensorForm
    type_name: str
    """Name of the tensor's class, where no other process can be sent a tensor of it; else empty."""
    requires_grad: bool
    attributes: dict[str, Any]
    """Attributes that a program has set on the tensor, such as ``no_decay``."""
    hooks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartInfo:
    """What a receiver must know about a part that it is sent."""

    tensors: list[TensorInfo]
    hooks: tuple[str, ...]
    """The hooks of the part's modules."""
    attributes: dict[str, dict[str, Any]]
    """The other attributes of the part's modules, by the path of the module and the name of the attribute."""
    hidden: dict[str, SentTensor]
    """The tensors of modules that it holds where torch does not look, by name."""
    tree: Tree
    """The modules that it is made of."""
    buffers: BufferPlaces = field(default_factory=dict)
    """Where its modules have buffers: also those that a forward has made."""
    memories: list[Memory] = field(default_factory=list)
    """The memories in which several of its tensors lie."""


def describe(part: nn.Module) -> PartInfo:
    """What this rank has of a part, in a form that can be sent."""
    tensors = [
        TensorInfo(
            name,
            form_of(tensor),
            "" if can_be_sent(tensor) else f"{type(tensor).__name__} ({tensor.dtype})",
            tensor.requires_grad,
            attributes_of_tensor(tensor),
            tuple(_hooks(tensor, OF_TENSORS)),
        )
        for name, tensor in tensors_by_name(part).items()
    ]
    hidden = hidden_in(part)
    modules = modules_of(part)
    hooks = (hook for name, module in modules.items() for hook in _hooks(module, MODULE_HOOKS, name))
    named = _named(part, hidden)
    attributes = {name: _module_attributes(module, named) for name, module in modules.items()}
    for name, module in hidden.items():  # the engine sets that of the others
        attributes[name]["training"] = module.training
    sent = {name: _sent_tensor(tensor) for name, tensor in hidden_tensors(hidden).items()}
    memories = memories_of(found_in(part, hidden))
    return PartInfo(tensors, tuple(hooks), attributes, sent, tree_of(part, hidden), buffers_of(modules), memories)


def hidden_in(part: nn.Module) -> dict[str, nn.Module]:
    """The modules that a part holds where torch does not look, by name, and that are no layers of the pipeline."""
    return hidden_modules(part, apart=_FIRST)


def modules_of(part: nn.Module) -> dict[str, nn.Module]:
    """The modules of a part by their paths, those that it hides, too."""
    return {**dict(part.named_modules()), **hidden_in(part)}


def tensors_in(part: nn.Module) -> list[Found]:
    """The tensors of a part, with where they are found in it."""
    return found_in(part, hidden_in(part))


def _named(part: nn.Module, hidden: dict[str, nn.Module]) -> Named:
    """The modules and tensors of a part, by which its objects refer to them."""
    modules = {**dict(part.named_modules()), **hidden}
    tensors = {**tensors_by_name(part), **hidden_tensors(hidden)}
    return {("module", name): module for name, module in modules.items()} | {
        ("tensor", name): tensor for name, tensor in tensors.items()
    }


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """A generator of random numbers, as another process can have it."""

    kind: str
    """The class that makes one, by a name that every process knows."""
    state: Any

    def given_to(self, generator: Any) -> Any:
        """Give this state to a generator, or to a new one where it is none of the kind; return which has it."""
        if _kind_of(generator) != self.kind:
            generator = _MAKERS[self.kind]()
        set_generator_state(generator, self.state)
        return generator


@dataclass(frozen=True, slots=True)
class IteratorState:
    """An ``itertools.count``, as another process can have it."""

    numbers: tuple[Any, ...]
    """The next number that the count gives, and its step unless that is 1."""

    @classmethod
    def of(cls, count: Any) -> IteratorState | None:
        """The state of a count of numbers; None of a count of anything else."""
        numbers = numbers_of_count(count)
        return None if numbers is None else cls(numbers)


@dataclass(frozen=True, slots=True)
class QueueState:
    """The items of a queue, as another process can have them."""

    kind: str
    items: list[Any]


_QUEUES = (queue.Queue, queue.LifoQueue, queue.PriorityQueue)


def _generator_of(kind: Callable[[], Any]) -> Any:
    return numpy.random.Generator(kind())


_BITS = {kind.__name__: kind for kind in (MT19937, PCG64, PCG64DXSM, Philox, SFC64)}
_MAKERS: dict[str, Callable[[], Any]] = {
    "torch": torch.Generator,
    "random": random.Random,
    "RandomState": numpy.random.RandomState,
    **_BITS,
    **{f"Generator of {name}": partial(_generator_of, kind) for name, kind in _BITS.items()},
}
"""What makes a generator of each kind whose state can be sent."""


def _kind_of(generator: Any) -> str | None:
    """The name in :data:`_MAKERS` of a generator's kind; None of what has none, or is no generator."""
    if isinstance(generator, torch.Generator):
        return "torch" if generator.device.type == "cpu" else None
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else "random"
    if isinstance(generator, numpy.random.RandomState):
        return "RandomState"
    if isinstance(generator, numpy.random.Generator):
        name = f"Generator of {type(generator.bit_generator).__name__}"
    else:
        name = type(generator).__name__ if isinstance(generator, numpy.random.BitGenerator) else ""
    return name if name in _MAKERS else None


MADE_OF_WEIGHTS = ("_flat_weights", "_flat_weight_refs")
"""Attributes that torch's recurrent layers make of their weights, on each rank of its own."""


EXTRA_STATE = "get_extra_state()"
"""The name among attributes of what a module gives to checkpoints beside its tensors."""


@dataclass(frozen=True, slots=True)
class ExtraState:
    """What a module's ``get_extra_state()`` returns, as it can be sent."""

    sent: Any


def _module_attributes(module: nn.Module, named: Named) -> dict[str, Any]:
    """What the class or a program has set on a module, as it can be sent; else the class of what cannot."""
    made = MADE_OF_WEIGHTS if isinstance(module, nn.RNNBase) else ()
    found = {
        name: _sent_or_object(value, named)
        for name, value in attributes_of(module).items()
        if name not in made and not _is_known(itself(value))
    }
    for name, generator in generators_of(module).items():  # also within what cannot be sent itself
        kind = _kind_of(generator)
        if kind is not None:
            found[name] = GeneratorState(kind, generator_state(generator))
    extra = _extra_state(module, named)
    if extra is not None:
        found[EXTRA_STATE] = extra
    return found


def _extra_state(module: nn.Module, named: Named) -> ExtraState | Unsendable | None:
    """What a module gives to checkpoints; None where its class gives nothing."""
    if type(module).get_extra_state is nn.Module.get_extra_state:
        return None
    sent = _sent_or_object(module.get_extra_state(), named)
    return sent if isinstance(sent, Unsendable) else ExtraState(sent)


def _sent_or_object(value: Any, named: Named) -> Any:
    """What another process can have of an attribute, also where it is an object of the program."""
    sent = _sendable(value)
    return (object_state(value, named) or sent) if isinstance(sent, Unsendable) else sent


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor that is an attribute of a parameter, such as its running average, and is sent after it."""

    form: TensorForm
    device_type: str


def _sent_tensor(tensor: torch.Tensor) -> SentTensor:
    return SentTensor(form_of(tensor), tensor.device.type)


def _sendable(value: Any) -> Any:
    kind = _kind_of(value)
    if kind is not None:
        return GeneratorState(kind, generator_state(value))
    if type(value) is itertools.count and (count := IteratorState.of(value)) is not None:
        return count
    if type(value) in _QUEUES and is_data(items := list(value.queue)):
        return QueueState(type(value).__name__, with_data(items, off_the_device))
    if is_data(value):
        return with_data(value, off_the_device)
    kind = type(itself(value)).__name__
    return Unsendable(kind, None if type(value) in _QUEUES else state_of(value))


@dataclass(frozen=True, slots=True)
class Sent:
    """A variable that is no attribute of a module, as another process can have it."""

    value: Any
    mark: Any
    """What tells it from what it is after a change, in any process if the value can be sent."""
    kind: str
    is_held: bool = False
    """Whether one layer, or the loss function, has it to itself; else it is a variable that others read, too."""

    @property
    def can_be_taken(self) -> bool:
        """Whether another process can have it."""
        return not isinstance(self.value, Unsendable if self.is_held else Unsendable | GeneratorState | QueueState)

    @property
    def leaves_a_part(self) -> bool:
        """Whether a part of it has changed that no other process can have."""
        return isinstance(self.value, ObjectState) and bool(self.value.shown)

    def since(self, before: Sent | None) -> Sent:
        """This, for a process that has what it was before where it has it at all."""
        was = None if before is None else before.value
        if isinstance(was, ObjectState) and isinstance(self.value, ObjectState):
            return replace(self, value=_since(self.value, was, self.kind))
        return self


def sendable(value: Any, *, is_held: bool = False) -> Sent:
    """What another process can have of a variable.

    Args:
        value: What it is now.
        is_held: Whether one layer, or the loss function, has it to itself: then an object of the program goes,
            too.
    """
    sent = _sent_or_object(value, {}) if is_held else _sendable(value)
    marked = mark(value) if isinstance(sent, Unsendable | IteratorState | QueueState) else _fingerprint(sent)
    marked = sent.numbers if isinstance(sent, IteratorState) else marked
    return Sent(sent, marked, type(itself(value)).__name__, is_held)


def take(table: MutableMapping[Any, Any], name: Any, sent: Sent) -> None:
    """Let a variable be what it is on another rank.

    Raises:
        NotHereError: this process lacks a part of it; nothing has changed.
    """
    value = sent.value
    if isinstance(value, IteratorState):
        table[name] = itertools.count(*value.numbers)
    elif isinstance(value, GeneratorState):
        table[name] = value.given_to(table.get(name))
    elif isinstance(value, QueueState):
        _fill(table, name, value)
    elif isinstance(value, ObjectState):
        table[name] = laid(value, table, name, {})
    elif isinstance(value, StillThere):
        take_still_there(table, name, value, with_data(value.value, onto_the_device))
    else:
        _take(table, name, with_data(value, onto_the_device))


def existing_module(spec: Any) -> nn.Module | None:
    """The module of a layer that a program has built on every rank; None where a specification builds it."""
    module = spec if isinstance(spec, nn.Module) else getattr(spec, "module", None)
    return module if isinstance(module, nn.Module) else None


def only_what_changed(part: Part, held: nn.Module, build: Callable[[], nn.Module]) -> PartInfo:
    """Describe a part without what a layer has when it is built: that may name the rank, or its device.

    Args:
        part: which ``held`` is on this rank.
        held: the module.
        build: Builds another one, where a specification builds it.
    """
    there, existing = describe(held), existing_module(part.spec)
    if existing is not None:  # a program sets what it sets on every rank; one of them runs the layer
        if existing not in _FIRST:
            return there
        new = new_paths(there.tree, _FIRST_TREES.get(existing, there.tree))
        changed_since = _changed_since(existing, there, _FIRST)
        return replace(there, attributes=changed_since | {path: there.attributes[path] for path in new})
    # The layer is looked at before: building puts modules that both have into the state that they were given in.
    present, hidden = modules_of(held), hidden_tensors(hidden_in(held))
    own = {path: dict(vars(module)) for path, module in present.items()}
    built = build()
    others = hidden_in(built)
    named, modules = _named(built, others), {**dict(built.named_modules()), **others}
    for path in new_paths(there.tree, tree_of(built, others)):
        modules.pop(path, None)
    changed = {
        path: _changed_attributes(
            present[path],
            own[path],
            found,
            modules.get(path),
            _module_attributes(modules[path], named) if path in modules else {},
        )
        for path, found in there.attributes.items()
    }
    return replace(there, attributes=changed, hidden=_changed_tensors(hidden, others, there.hidden))


def _changed_attributes(
    held: nn.Module,
    there: dict[str, Any],
    found: dict[str, Any],
    built: nn.Module | None,
    own: dict[str, Any],
) -> dict[str, Any]:
    """The attributes that differ from what a specification builds, or were changed where it is handed them.

    Args:
        held: A module of a layer.
        there: Its attributes before the other one was built.
        found: What can be sent of them.
        built: The module in the other one; None where it has none.
        own: What can be sent of its attributes.
    """
    changed: dict[str, Any] = {}
    first = _FIRST.get(held, {})
    for name, value in found.items():
        before = own.get(name)
        if _is_alike(own, name, value):
            # An object among the arguments of the specification is in both: it may have changed since it came.
            if built is None or there.get(name, held) is not vars(built).get(name) or name not in first:
                continue
            before = first[name]
            if before == _fingerprint_of(there.get(name), value):
                continue
        is_known = built is not None and name in own
        mine, others = there.get(name), None if built is None else vars(built).get(name)
        told = _told(held, name, mine, value, before) if is_known else value
        changed[name] = told_of_sharing(told, mine, _shown(held, name), is_first=mine is others)
    gone = [name for name in own if name.isidentifier() and name not in found and name not in there]
    return changed | dict.fromkeys(gone, Gone())


def _changed_tensors(
    here: dict[str, torch.Tensor], others: dict[str, nn.Module], sent: dict[str, SentTensor]
) -> dict[str, SentTensor]:
    """The tensors of hidden modules but for those that a specification builds with these values, or is handed."""
    built = hidden_tensors(others)
    return {
        name: info
        for name, info in sent.items()
        if name not in built
        or info != _sent_tensor(built[name])
        or (
            version_of(here[name]) != _FIRST_VERSIONS.get(here[name], _NEW)
            if here[name] is built[name]
            else not _is_equal(here[name], built[name])
        )
    }


def _is_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one form have the same values."""
    return all(map(torch.equal, parts_of(tensor), parts_of(other)))


_FIRST = WeakIdKeyDictionary()  # a module's own hash may depend on what it holds, as a metric's does
"""What modules of layers had when all ranks last had the same, or when they came: attributes, by fingerprints."""
_FIRST_OBJECTS = WeakIdKeyDictionary()
"""The tensors and arrays among these attributes, by weak references."""
_FIRST_TREES = WeakIdKeyDictionary()
"""What layers were made of then."""
_FIRST_VERSIONS = WeakIdKeyDictionary()
"""How often tensors of hidden modules had been written to then."""
_NEW = -1
"""In the place of that number where there was no such tensor then: a forward has made it."""


def remember_attributes(layers: Iterable[Any], *, again: bool = False) -> None:
    """Remember what layers have that this rank runs, or a program has built on every rank.

    So what they change later can be told.

    They are remembered when the pipeline is cut: from then on a script that goes through the modules of its rank
    changes those of this rank alone. What no other process can have is remembered when the engine starts.

    Args:
        layers: Those that are modules, or have one that is tied, are looked at.
        again: Also those that are remembered: all ranks have the same of them now.
    """
    found = (existing_module(layer) for layer in layers)
    for layer in (each for each in found if each is not None):  # an empty container is false, and some raise
        hidden = hidden_in(layer)
        named = _named(layer, hidden)
        if again or layer not in _FIRST_TREES:
            _FIRST_TREES[layer] = tree_of(layer, hidden)
        for module in layer.modules():
            attributes = _module_attributes(module, named)
            now = _fingerprints(module, attributes)
            if again or module not in _FIRST:
                _FIRST[module] = now
                _FIRST_OBJECTS[module] = {
                    name: weakref.ref(value) for name, value in vars(module).items() if is_shareable(value)
                }
            else:
                unsendable = [name for name, value in attributes.items() if isinstance(value, Unsendable)]
                _FIRST[module] |= {name: now[name] for name in unsendable}
        for tensor in hidden_tensors(hidden).values():
            if again or tensor not in _FIRST_VERSIONS:
                _FIRST_VERSIONS[tensor] = version_of(tensor)


Fingerprints = Mapping[nn.Module, Mapping[str, Any]]
"""What tells the attributes of modules from what they are after a change, by their names."""


def fingerprints_of(layer: nn.Module) -> Fingerprints:
    """Tell what a layer and its children have set on themselves now from what they change later."""
    modules, there = {**dict(layer.named_modules()), **hidden_in(layer)}, describe(layer)
    return WeakIdKeyDictionary(
        {modules[path]: _fingerprints(modules[path], found) for path, found in there.attributes.items()}
    )


def changed_attributes(layer: nn.Module, since: Fingerprints | None = None) -> dict[str, dict[str, Any]]:
    """What a layer has set on itself and its children, for :func:`set_attributes`.

    By the path of the module and the name of the attribute. What no other process can have is :class:`Staying`.

    Args:
        layer: The layer.
        since: How it was then; None: when it was remembered.
    """
    return _changed_since(layer, describe(layer), _FIRST if since is None else since)


def set_attributes(layer: nn.Module, changed: dict[str, dict[str, Any]]) -> None:
    """Give a layer what :func:`changed_attributes` has found on another rank."""
    take_attributes(layer, PartInfo([], (), changed, {}, {}))


def _changed_since(layer: nn.Module, there: PartInfo, fingerprints: Fingerprints) -> dict[str, dict[str, Any]]:
    """What a layer has changed since then, such as a counter: only the rank that ran it has that."""
    changed: dict[str, dict[str, Any]] = {}
    hidden = hidden_in(layer)
    modules = {**dict(layer.named_modules()), **hidden}  # scripted ones have no get_submodule()
    for path, found in there.attributes.items():
        module = modules[path]
        first = fingerprints.get(module)
        if first is not None:
            now = _fingerprints(module, found)
            objects, own = _FIRST_OBJECTS.get(module, {}), vars(module)
            changed[path] = {
                name: told_of_sharing(
                    _told(module, name, own.get(name), value, first.get(name)),
                    own.get(name),
                    _shown(module, name),
                    is_first=name in objects and objects[name]() is own.get(name),
                )
                for name, value in found.items()
                if first.get(name) != now[name] and not _is_of_hosts(vars(module).get(name))
            }
            changed[path].update({name: Gone() for name in first if name not in found and name.isidentifier()})
        elif path in hidden:
            changed[path] = found
    return changed


def _is_of_hosts(value: Any) -> bool:
    """Whether this is an object such as a Trainer, which hooks give to layers, each rank its own."""
    return module_of(type(value)).partition(".")[0] in HOSTS


def _told(module: nn.Module, name: str, present: Any, value: Any, before: Any) -> Any:
    """What has changed, with its name where not all of it goes to another process.

    Args:
        module: Has the attribute.
        name: Its name.
        present: The attribute itself.
        value: What can be sent of it.
        before: What that was before.
    """
    shown = _shown(module, name)
    if isinstance(value, Unsendable):
        return Staying(shown, value.type_name, _source_of(present, module))
    if isinstance(value, ObjectState) and isinstance(before, ObjectState):
        return _since(value, before, shown)
    return value


def _shown(module: nn.Module, name: str) -> str:
    """How an attribute of a module is called in sentences."""
    return f"{users_names.get(module, type(module).__name__)}.{name}"


def _since(value: ObjectState, before: ObjectState, shown: str) -> ObjectState:
    """An object with what it was before, under a name where not all that has changed goes to another process."""
    was, states = ([each.state for each in state.stays if each.state is not None] for state in (before, value))
    return replace(value, before=before.data, shown="" if was == states else shown)


def say_what_stays(parts: Iterable[Mapping[str, Mapping[str, Any]]]) -> None:
    """Name, once, of what objects not all goes that layers have changed, and what goes as a copy of a variable.

    Args:
        parts: Their attributes, of each by the path of the module and the name of the attribute.
    """
    for value in (value for part in parts for found in part.values() for value in found.values()):
        if isinstance(value, ObjectState) and value.shown:
            _say_that_it_stays(value.shown, value.kind)
        elif isinstance(value, CopyOfVariable):
            tensor = value.value.value if isinstance(value.value, HostTensor) else value.value
            say_of_copy(value.shown, type(tensor).__name__, value.variable)


def _say_that_it_stays(shown: str, kind: str) -> None:
    warn_once(
        f"stays/{shown}",
        f"{shown} ({kind}) has changed where its layer ran, by the layer or the script, and not all of it goes "
        "with the layer: other ranks have their own, which is the same only where a script has changed it on "
        "each. What can be pickled goes, such as numbers, tensors, containers of these and functions of a file, "
        "and an itertools.count; a generator or a lambda stays",
    )


def _fingerprints(module: nn.Module, found: dict[str, Any]) -> dict[str, Any]:
    """What tells each of a module's attributes from what it is after a change."""
    return {name: _fingerprint_of(vars(module).get(name), value) for name, value in found.items()}


def _fingerprint_of(present: Any, value: Any) -> Any:
    return mark(present) if isinstance(value, Unsendable) else _fingerprint(value)


def _fingerprint(value: Any) -> Any:
    if isinstance(value, ObjectState):
        return value
    if isinstance(value, ExtraState):
        return _fingerprint(value.sent)
    if isinstance(value, GeneratorState):
        return pickle.dumps((value.kind, value.state.numpy() if value.kind == "torch" else value.state))
    return pickle.dumps(with_data(value, checked))


def _is_alike(own: dict[str, Any], name: str, value: Any) -> bool:
    if name not in own or type(own[name]) is not type(value):
        return False
    if isinstance(value, Unsendable):
        return bool(own[name] == value)
    # Where a layer draws a tensor, it need not be what a layer of the same specification has drawn.
    return _fingerprint(own[name]) == _fingerprint(value)


def take_modules(part: Part, built: nn.Module, there: PartInfo, rank: int, present: Allocation) -> None:
    """Let a part have the modules and buffers that it has on the rank that sends it; see :func:`check_alike`."""
    try:
        take_tree(built, there.tree, tree_of(built, hidden_in(built)))
    except UnlikeTreeError as error:
        raise RuntimeError(_other_modules(part, error, rank, present)) from error
    sent = {*there.hidden, *(info.name for info in there.tensors)}
    take_buffers(
        {path: each for path, each in modules_of(built).items() if path in there.tree}, there.buffers, sent
    )


def _other_modules(part: Part, error: UnlikeTreeError, rank: int, present: Allocation) -> str:
    return (
        f"layer {part.name!r} cannot be moved: on rank {rank} {error}, and its specification builds something "
        f"else: let its __init__ build that; or {let_none_move(present)}"
    )


def take_attributes(built: nn.Module, there: PartInfo) -> None:
    """Give the modules of a part the attributes that they have on the rank that sends them."""
    hidden = hidden_in(built)
    modules, named = {**dict(built.named_modules()), **hidden}, _named(built, hidden)
    for path, found in there.attributes.items():
        module = modules[path]
        here: dict[str, Any] = module.__dict__
        generators = generators_of(module)
        for name, value in found.items():
            if isinstance(value, GeneratorState):
                given = value.given_to(generators.get(name))
                if name.isidentifier() and _kind_of(here.get(name, given)) is not None:  # and no method that draws
                    here[name] = given
            elif isinstance(value, Gone):
                here.pop(name, None)
            elif isinstance(value, IteratorState):
                here[name] = itertools.count(*value.numbers)
            elif isinstance(value, QueueState):
                _fill(here, name, value)
            elif isinstance(value, StillThere):
                take_still_there(here, name, value, with_data(value.value, onto_the_device))
            elif isinstance(value, CopyOfVariable):
                _take(here, name, with_data(value.value, onto_the_device))
            elif isinstance(value, ObjectState | ExtraState):
                try:
                    _take_object(module, name, value, named)
                except NotHereError:
                    shown = _shown(module, name)
                    _say_that_it_stays(shown, value.kind if isinstance(value, ObjectState) else "extra state")
            elif isinstance(value, Staying):
                if value.source is None or value.source != _source_of(here.get(name), module):
                    _say_that_it_stays(value.shown, value.type_name)
            elif not isinstance(value, Unsendable):
                _take(here, name, with_data(value, onto_the_device))


def _take_object(module: nn.Module, name: str, value: ObjectState | ExtraState, named: Named) -> None:
    if isinstance(value, ObjectState):
        vars(module)[name] = laid(value, vars(module), name, named)
        return
    own = _extra_state(module, named)  # its attributes may have brought it
    if own is None or _fingerprint(own) != _fingerprint(value):
        sent = value.sent
        is_object = isinstance(sent, ObjectState)
        module.set_extra_state(loaded(sent, named) if is_object else with_data(sent, onto_the_device))


def _fill(here: MutableMapping[Any, Any], name: Any, value: QueueState) -> None:
    """Give a queue the items that it has on another rank."""
    items: Any = here.get(name)
    if type(items).__name__ != value.kind:
        items = here[name] = getattr(queue, value.kind)()
    fill_queue(items, with_data(value.items, onto_the_device))


def _take(here: MutableMapping[Any, Any], name: Any, value: Any) -> None:
    """Let an attribute be ``value``: a container that others may have, too, gets its contents."""
    present: Any = here.get(name)
    value = with_present(value, present)
    if type(present) is not type(value) or (isinstance(value, deque) and present.maxlen != value.maxlen):
        here[name] = value
    elif isinstance(value, list):
        present[:] = value
    elif isinstance(value, dict | set):
        present.clear()
        present.update(value)
    elif isinstance(value, deque):
        present.clear()
        present.extend(value)
    else:
        here[name] = value


def attributes_of_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that a program, and not DeepSpeed, has set. What cannot be sent is replaced by its class."""
    found = {
        name: value
        for name, value in vars(tensor).items()
        if not name.startswith(("_", "ds_", *OF_DEEPSPEED_ON_TENSORS)) and not _is_known(value)
    }
    return {name: _of_a_tensor(value) for name, value in found.items()}


def _of_a_tensor(value: Any) -> Any:
    if type(value) is torch.Tensor and has_memory(value) and not value.is_quantized:
        return _sent_tensor(value)
    return value if is_plain(value) and _can_be_pickled(value) else Unsendable(type(value).__name__)


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # such as a dict with a function that makes its values, or a class of a function
        return False
    return True


@dataclass(frozen=True, slots=True)
class Unsendable:
    """An attribute that another process cannot have, such as a function."""

    type_name: str
    state: Any = None
    """What tells it from what it is after a change, where that is the same in every process."""


@dataclass(frozen=True, slots=True)
class Staying:
    """What a layer has changed, and no other process can have."""

    shown: str
    type_name: str
    source: Any = None
    """What a function is made of, see :func:`_source_of`: a rank whose script has made the same has it."""


def _source_of(function: Any, module: nn.Module) -> Any:
    """What tells a function of a module from those of other code or with other data; None where that is not known.

    Args:
        function: Such as the ``forward`` that a script puts in the place of its class's, on each rank.
        module: The module that has it, whose own methods it may call.
    """
    if isinstance(function, MethodType):
        inner = _source_of(function.__func__, module)
        of_module = function.__self__ is module and inner is not None
        return (type(module).__qualname__, inner) if of_module else None
    if not isinstance(function, FunctionType):
        return None
    code = function.__code__
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    try:
        held += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable that is not set yet
        return None
    parts = []
    for value in held:
        sent = None if value is module or isinstance(value, FunctionType | MethodType) else _sendable(value)
        if isinstance(sent, Unsendable):
            return None
        part = "itself" if value is module else _source_of(value, module) if sent is None else _fingerprint(sent)
        if part is None and value is not None:
            return None
        parts.append(part)
    return function.__module__, function.__qualname__, code.co_filename, code.co_firstlineno, tuple(parts)


@dataclass(frozen=True, slots=True)
class Gone:
    """What has been deleted."""


def _hooks(owner: Any, kinds: Iterable[str], name: str = "") -> Iterator[str]:
    """The hooks that a program has registered, in words that are the same in each process."""
    for kind in kinds:
        for hook in (getattr(owner, kind, None) or {}).values():
            if not _is_known(hook):
                function = getattr(hook, "__qualname__", type(hook).__qualname__)
                yield f"{hook.__module__}.{function} ({kind.strip('_')}{f' of {name}' if name else ''})"


def _is_known(function: Any) -> bool:
    """Whether DeepSpeed or this package has made it."""
    return f"{getattr(function, '__module__', '')}.".startswith(KNOWN)


def let_none_move(present: Allocation) -> str:
    """What keeps all layers where they are, in words; boundaries are those in force, which can be copied."""
    given = f"boundaries as PipelineModule(partition_method={list(present.boundaries)})"
    given = given if present.is_contiguous else "a plan as PipelineModule(plan=...)"
    return f"let no layer move: {given}, in Lightning MadPipeStrategy(plan=...)"


def _all_hooks(info: PartInfo) -> list[str]:
    """The hooks of a part's modules, and of its tensors."""
    return [*info.hooks, *(f"{hook} on {tensor.name}" for tensor in info.tensors for hook in tensor.hooks)]


def _check_what_was_added(part: Part, there: PartInfo, here: PartInfo, rank: int, present: Allocation) -> None:
    """Refuse to leave behind what no other process can have.

    Raises:
        RuntimeError: a hook that the specification does not register, or an attribute that cannot be sent.
    """
    added = Counter(_all_hooks(there)) - Counter(_all_hooks(here))
    if added:
        raise RuntimeError(
            f"layer {part.name!r} cannot be moved: on rank {rank} it has the hook {next(iter(added))}, which "
            "would stay behind: register it where the layer is built, in its __init__; or remove it, "
            f"and register it again after the move; or {let_none_move(present)}"
        )
    own = {info.name: info.attributes for info in here.tensors}
    attributes = [(info.name, info.attributes, own.get(info.name, {})) for info in there.tensors]
    new = new_paths(there.tree, here.tree)
    attributes += [
        (
            path or "module",
            {name: value for name, value in found.items() if name[0] != "_" or path in new},
            {} if path in new else here.attributes.get(path, {}),
        )
        for path, found in there.attributes.items()
    ]
    for owner_name, found, known in attributes:
        for name, value in found.items():
            needs_another = isinstance(value, ObjectState) and value.needs_another
            if (isinstance(value, Unsendable) or needs_another) and name not in known:
                kind = value.type_name if isinstance(value, Unsendable) else value.kind
                raise RuntimeError(
                    f"layer {part.name!r} cannot be moved: on rank {rank} its {owner_name} has the attribute "
                    f"{name!r}, a {kind}, which no other process can have: set it where the layer is "
                    f"built, in its __init__; or {let_none_move(present)}"
                )


def check_alike(part: Part, description: PartInfo, here: PartInfo, rank: int, present: Allocation) -> None:
    """Refuse a part that is not what its specification builds.

    Args:
        part: A part of the model.
        description: What its owner has.
        here: What this rank has built.
        rank: The owner.
        present: Where layers are now.

    Raises:
        RuntimeError: other parameters; a hook or an attribute that cannot be sent.
    """
    mine, theirs = (
        {info.name for info in each.tensors if info.name not in each.buffers} for each in (here, description)
    )
    beside = set(description.hidden) - set(here.hidden) - set(description.buffers)
    if beside or mine != theirs:
        raise RuntimeError(
            f"layer {part.name!r} cannot be moved: its specification builds {sorted((*mine, *here.hidden))} "
            f"and rank {rank} has {sorted((*theirs, *beside))}; change "
            "layers in their specification, not after they are built (weight normalization or LoRA go into the "
            f"__init__ of a layer, or of a module that wraps it); or {let_none_move(present)}"
        )
    stays = next((info for info in description.tensors if info.type_name), None)
    if stays is not None:
        raise RuntimeError(
            f"layer {part.name!r} cannot be moved: {stays.name} is a {stays.type_name}, which cannot be "
            f"sent to another process: {let_none_move(present)}"
        )
    try:
        check_tree(description.tree, here.tree)
    except UnlikeTreeError as error:
        raise RuntimeError(_other_modules(part, error, rank, present)) from error
    _check_what_was_added(part, description, here, rank, present)
