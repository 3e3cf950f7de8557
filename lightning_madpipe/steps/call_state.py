"""The state in which a step calls its layers: what it has set until then, and torch's modes.

In one process ``self.grl.alpha = f(self.global_step)`` before ``self(x)``, a global that layers read, or
``with torch.autocast(...): self(x)`` hold for the layers from that line on. In a pipeline most ranks run no step.
So what is another thing at the call than where the step began is found here, where the step runs up to its call:
attributes, modes and hooks of layers, names that the code of layers reads, context variables, torch's modes.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import cached_property, partial
from operator import is_
from types import FunctionType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_partition.code_names import forward_of
from deepspeed_partition.engine.pipeline.batch_attempt import BatchGivenUpError
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.generators import GENERATORS
from deepspeed_partition.module_hooks import MODULE_HOOKS
from lightning_madpipe.module import pipeline_of
from lightning_madpipe.steps.beside_module import BesideModule, CodeSearch
from lightning_madpipe.steps.ending_contexts import EndingContexts
from lightning_madpipe.steps.float32_precision import float32_precisions
from lightning_madpipe.steps.step_side_effects import PLAIN, Change, Leftovers, Place, look, restore

MOST_NUMBERS = 1000
"""Numbers of a tensor, or items of a container, up to which what a step does to one in place is undone."""
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_TABLES = ("_parameters", "_buffers", "_modules")
_MISSING = object()
_WORDS = re.compile(r"\w+")


class OtherStateError(BatchGivenUpError):
    """A step calls its layers in another state than it began with, and the ranks of a pipeline do not know it."""


class LayerAttributes:
    """The attributes of layers that a step sets, and the hooks that it hangs on them.

    Args:
        parts: The modules that the layers consist of, each with its path in the LightningModule.
    """

    def __init__(self, parts: Mapping[nn.Module, str]) -> None:
        self._parts = WeakIdKeyDictionary(dict(parts))  # a metric's own hash depends on what it has counted
        self._containers: list[tuple[nn.Module, str]] = []
        self.find_containers()

    def find_containers(self) -> None:
        """Find the attributes of layers that may change in place."""
        self._containers = [
            (part, name)
            for part in self._parts
            for name, value in vars(part).items()
            if name not in _OF_TORCH and _may_change(value)
        ]

    def held(self) -> set[int]:
        """The objects that attributes of layers name, by their identities."""
        return {
            id(value)
            for part in self._parts
            for name, value in vars(part).items()
            if name not in _OF_TORCH and type(value) not in PLAIN
        }

    @contextmanager
    def noted(self) -> Iterator[NotedAttributes]:
        """Note meanwhile what is set.

        The attributes are compared. ``nn.Module.__setattr__`` stays as it is: where one of ``nn.Module`` is
        replaced, Python looks up anew each attribute of each of its classes.
        """
        noted = NotedAttributes(self._parts, self._containers)
        thread, make_handle = threading.get_ident(), RemovableHandle.__init__

        def making(handle: Any, *arguments: Any, **keywords: Any) -> None:
            make_handle(handle, *arguments, **keywords)
            if threading.get_ident() == thread and noted.notes_hooks:
                noted.handles.append(handle)

        torch_handle: Any = RemovableHandle
        try:
            torch_handle.__init__ = making
            yield noted
        finally:
            torch_handle.__init__ = make_handle


class NotedAttributes:
    """What a run of a step has set on layers.

    Args:
        parts: The modules that the layers consist of, each with its path.
        containers: Their attributes that may change in place.
    """

    def __init__(self, parts: Mapping[nn.Module, str], containers: list[tuple[nn.Module, str]]) -> None:
        self._parts = parts
        self._before = [(part, dict(vars(part))) for part in parts]
        self._set_before: list[tuple[nn.Module, str, Any]] | None = None
        """What was set when the layers began to run; None before."""
        self.handles: list[Any] = []
        """The handles of hooks that were hung on something."""
        self.notes_hooks = True
        self._seen = [
            (part, name, look(vars(part)[name], _is_small(vars(part)[name]), {}))
            for part, name in containers
            if name in vars(part)
        ]

    def _set(self) -> Iterator[tuple[nn.Module, str, Any]]:
        """Each attribute that is another object now, with its owner, and with what it was."""
        for owner, before in self._before:
            now = vars(owner)
            if [*now] == [*before] and all(map(is_, now.values(), before.values())):
                continue
            for name in {**before, **now}:
                was, value = before.get(name, _MISSING), now.get(name, _MISSING)
                if value is was or name in _OF_TORCH or _is_cached(owner, name):
                    continue
                if not (name == "forward" and (_is_ours(value) or _is_ours(was))):
                    yield owner, name, was

    def changes(self) -> list[Change]:
        """What is another thing now than before."""
        found: dict[tuple[int, str], Change] = {}
        for owner, name, seen in self._seen:
            value = vars(owner).get(name, _MISSING)
            place = Place(self._parts[owner], "attribute", name)
            if value is seen.value and seen.difference(place, value) is not None:
                found[id(owner), name] = Change(place, "refill", value)
        for owner, name, before in self._set():
            now = vars(owner).get(name, _MISSING)
            if type(now) in PLAIN and type(before) is type(now) and before == now:
                continue
            place = Place(self._parts[owner], "attribute", name)
            if now is _MISSING:
                found[id(owner), name] = Change(place, "delete")
            elif not isinstance(now, nn.Module | nn.Parameter):
                found[id(owner), name] = Change(place, "bind", now)
        return list(found.values())

    def hooked(self) -> list[Any]:
        """The handles of hooks that hang on layers."""
        if not self.handles:
            return []
        tables = {id(vars(part).get(name)) for part in self._parts for name in MODULE_HOOKS}
        return [
            handle
            for handle in self.handles
            if id(table := handle.hooks_dict_ref()) in tables and handle.id in (table or ())
        ]

    def freeze(self) -> None:
        """Let what is changed from now on, by the layers themselves, stay."""
        self._set_before, self.notes_hooks = [*self._set()], False
        self._seen = [
            (owner, name, seen)
            for owner, name, seen in self._seen
            if seen.difference(Place("", "attribute", name), vars(owner).get(name, _MISSING)) is not None
        ]

    def undo(self) -> None:
        """Put everything back."""
        for handle in self.hooked():
            handle.remove()
        for owner, name, before in [*self._set()] if self._set_before is None else self._set_before:
            if before is _MISSING:
                vars(owner).pop(name, None)
            elif not any(name in vars(owner).get(table, ()) for table in _TABLES):  # a parameter has its name now
                vars(owner)[name] = before
        for _, _, seen in self._seen:
            restore(seen, set())


def names_in_layers(
    parts: Mapping[nn.Module, str], functions: Sequence[Any], is_programs: Callable[[str | None], bool]
) -> set[str]:
    """The names in the code of layers, and in what that calls.

    Args:
        parts: The modules that layers consist of.
        functions: The layers that are functions.
        is_programs: Whether a file, by the name of its module, is the program's.
    """
    search = CodeSearch(is_programs)
    for part in parts:
        search.read(forward_of(part), type(part))
        for name, value in vars(part).items():
            for code in value.values() if name in MODULE_HOOKS else (value,):
                search.read(code, None)
    for function in functions:
        search.read(function, None)
    return search.written | {key for _, key in search.found}


class CallStates:
    """Knows the steps that call their layers in another state than they begin with.

    Args:
        module: The LightningModule.
        error: The host's exception for a step that cannot run on a pipeline.
        beside: What steps may change beside the module.
    """

    def __init__(self, module: nn.Module, error: Callable[[str], Exception], beside: BesideModule) -> None:
        self._module, self._error, self._beside = module, error, beside
        self.runs_within = True
        """Whether the engine can run layers within a step, as its own schedules do."""
        self.rounds_apart = True
        """Whether a batch has several micro-batches, whose gradients are rounded one by one."""
        self.steps: set[str] = set()
        """The names of these steps: each rank runs them up to their call, and its layers there."""
        self._attributes: LayerAttributes | None = None
        self._names: set[str] = set()
        self._held: set[int] = set()
        self._now: _State | None = None
        self._found: list[str] = []
        self._left: dict[Place, Change] = {}

    def _look_at_layers(self) -> LayerAttributes:
        pipeline = pipeline_of(self._module)
        inside, call = pipeline.elsewhere.inside, pipeline.call_of_module
        parts = {part: path for path, part in self._module.named_modules() if part in inside}
        tied = (getattr(layer, "forward_fn", None) for layer in call.layers)
        functions = [*(layer for layer in call.layers if isinstance(layer, FunctionType)), *tied]
        self._names = names_in_layers(parts, functions, self._beside.is_programs)
        self._attributes = LayerAttributes(parts)
        self._held = self._attributes.held()
        return self._attributes

    @contextmanager
    def begun(self, before: Leftovers | None) -> Iterator[None]:
        """Let a step begin here; ``before`` is the module as it is now, None where that is not compared."""
        attributes = self._attributes or self._look_at_layers()
        self._found = []
        contexts = EndingContexts()
        try:
            with contexts:
                noted = contexts.enter_context(attributes.noted())
                self._now = _State(before, noted, self._names, self._held)
                yield
        finally:
            contexts.end()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo at the end what the step that runs has set on layers."""
        self._now = None
        try:
            yield
        finally:
            if self._now is not None:
                self._now.noted.undo()
            self._now = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Note at the end what the step that runs has set on layers, for the ranks that have these."""
        self._now = None
        yield
        if self._now is not None:
            self._left.update((change.place, change) for change in self._now.noted.changes())
        self._now = None

    def left(self) -> list[Change]:
        """What the steps of a batch have left on layers; it is forgotten here."""
        left, self._left = list(self._left.values()), {}
        return left

    @torch.compiler.disable  # in a compiled step its compiler would follow what is done here
    def note(self) -> None:
        """Note what is another thing where a step calls the layers than where it began."""
        if self._now is not None:
            self._found = self._now.differences()

    def freeze(self) -> None:
        """Let the layers run from here on, whose own changes of what they have stay."""
        if self._now is not None:
            self._now.noted.freeze()

    def settle(self, step: str, *, alike: bool) -> None:
        """Decide what follows from what was noted where a step called the layers.

        Args:
            alike: All ranks have run the step up to there, so that all know of it.

        Raises:
            OtherStateError: the other ranks do not know of it.
            Exception: the host's, where layers cannot run there.
        """
        if not self._found or step in self.steps:
            return
        if not self.runs_within:
            raise self._error(
                f"{step} {self._in_words()} before it calls the layers, and in DeepSpeed's own schedule no other "
                "rank has that: do it in a hook, such as on_train_batch_start, or within a layer"
            )
        if not alike:
            raise OtherStateError(f"{step} {self._in_words()} before it calls the layers")
        self.run_within(step, self._in_words())

    def run_within(self, step: str, change: str) -> None:
        """Let the layers run within ``step`` from now on, and say what is rounded otherwise there.

        Args:
            change: what it changes before it calls them, in words.
        """
        self.steps.add(step)
        if self.rounds_apart and "torch.autocast" in change:
            announce(
                f"{step} calls its layers under torch.autocast: each micro-batch rounds its own gradients to half "
                "precision, so that losses differ from those of one process, by about 0.1 % in bfloat16"
            )

    def refuse(self, step: str, called: str) -> None:
        """Refuse a step of several calls that makes one of them in another state than it began with.

        Raises:
            Exception: the host's, with what it has set and the way out.
        """
        self.note()
        if self._found:
            raise self._error(
                f"{step} {self._in_words()} before it calls {called}, and in a pipeline the calls of several "
                "modules run where these are, without what a step does between them: put the calls into "
                "forward(), and call self(...); or do it in a hook, such as on_train_batch_start, or in a layer"
            )

    def _in_words(self) -> str:
        found = list(dict.fromkeys(self._found))
        return f"changes {', '.join(found[:3])}{', ...' * (len(found) > 3)}"

    def look_again(self) -> None:
        """Look anew at what layers hold: hooks may have given them other containers since."""
        if self._attributes is not None:
            self._attributes.find_containers()
            self._held = self._attributes.held()


class _State:
    """The state where a step begins, to be compared with that at its call of the layers."""

    def __init__(self, before: Leftovers | None, noted: NotedAttributes, names: set[str], held: set[int]) -> None:
        self._before, self.noted, self._names, self._held = before, noted, names, held
        self._variables = _variables()
        self._modes = torch_modes()

    def differences(self) -> list[str]:
        """What is another thing now, in words."""
        found = [str(change.place) for change in self.noted.changes()]
        found += ["the hooks of layers"] * bool(self.noted.hooked())
        if self._before is not None:
            found += [str(change.place) for change in self._before.changes(self._may_be_read)]
            found += [f"a {kind}" for kind in self._before.changed_objects(self._held)]
        found += [
            f"the context variable {variable.name}"
            for variable, value in _variables().items()
            if self._variables.get(variable, _MISSING) is not value
        ]
        modes = torch_modes()
        return found + [name for name, value in modes.items() if self._modes[name] != value]

    def _may_be_read(self, place: Place, value: Any) -> bool:
        if place.kind == "object" and self._before is not None:
            # Code that reads it names it and what leads to it, unless a layer holds the object.
            held = id(self._before.objects.get(place.owner)) in self._held
            return held or (place.name in self._names and not self._names.isdisjoint(_WORDS.findall(place.owner)))
        return place.name in self._names or id(value) in self._held


def _variables() -> dict[ContextVar[Any], Any]:
    return dict(copy_context().items())


def torch_modes() -> dict[str, Any]:
    """The modes of torch that a program sets around what it runs, by what sets them."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    kinds = ("cpu", "cuda")
    return {
        "torch.autocast": [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in kinds],
        "torch.set_default_dtype": torch.get_default_dtype(),
        "torch.set_float32_matmul_precision": float32_precisions(),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "torch.nn.attention.sdpa_kernel": (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
        ),
        "a mode of torch functions": torch._C._len_torch_function_stack(),
        "a mode of torch's dispatcher": torch._C._len_torch_dispatch_stack(),
    }  # fmt: skip


def _may_change(value: Any) -> bool:
    if isinstance(value, (nn.Parameter, nn.Module, *GENERATORS)):
        return False
    return isinstance(value, Tensor | numpy.ndarray | list | dict | set | deque)


def _is_ours(value: Any) -> bool:
    """Whether this stands in the place of a module's ``forward`` while a step runs."""
    function = value.func if isinstance(value, partial) else value
    return str(getattr(function, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def _is_cached(owner: nn.Module, name: str) -> bool:
    """Whether a layer keeps there what it has computed of itself, as each rank's own does."""
    return isinstance(getattr(type(owner), name, None), cached_property)


def _is_small(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() <= MOST_NUMBERS and not value.is_meta
    return (value.size if isinstance(value, numpy.ndarray) else len(value)) <= MOST_NUMBERS
