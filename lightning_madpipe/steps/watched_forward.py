"""A watched run of ``forward``: its calls of the layers, what it hands them, and what it does in between."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_partition.capture.draws import Draws
from deepspeed_partition.capture.source_lines import model_line
from deepspeed_partition.engine.runtime.random_state import random_state, torch_state
from deepspeed_partition.tensor_values import version_of
from lightning_madpipe.steps.extreme_numbers import call_with_extremes, drawn_from_torch
from lightning_madpipe.steps.tensor_comparison import (
    are_same,
    equal,
)

PLAIN = (bool, int, float, str, type(None))
"""The types of arguments that are no tensors, and can be compared."""

READS_OF_VALUES = frozenset((
    "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "allclose", "equal", "item",
    "is_nonzero", "numpy", "tolist",
))  # fmt: skip
"""What gives numbers of a tensor, which a branch may depend on."""


@dataclass
class Passed:
    """What stands between two layers: tensors, and the same as they were then, for they may change in place."""

    tensors: list[Tensor]
    values: list[Tensor]
    is_plain: bool
    """Whether it is a tensor, or a tuple or list of tensors, which is what a layer may be given."""
    kind: str
    num_hooks: list[int] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    """How often each tensor had been changed in place; None of one that inference mode has made."""
    restore: Callable[[], None] | None = None
    """Puts the random generators back to where they were then."""

    @staticmethod
    def of(value: Any, *, same_as: Passed | None = None) -> Passed:
        tensors = [value] if isinstance(value, Tensor) else []
        is_plain = isinstance(value, Tensor)
        if type(value) in (list, tuple):
            tensors = [each for each in value if isinstance(each, Tensor)]
            is_plain = len(tensors) == len(value)
        if same_as is not None and are_same(tensors, same_as.tensors) and same_as.is_unchanged:
            values = same_as.values
        else:
            values = [tensor.detach().clone() for tensor in tensors]
        hooks = [len(tensor._backward_hooks or ()) for tensor in tensors]
        versions = list(map(version_of, tensors))
        return Passed(tensors, values, is_plain, type(value).__name__, hooks, versions, random_state())

    @property
    def is_unchanged(self) -> bool:
        return all(map(equal, self.tensors, self.values))


@dataclass
class LayerCall:
    """One call of a layer in ``forward``."""

    layer: nn.Module
    given: Passed
    keywords: list[str]
    state: tuple[Any, ...]
    """The state of gradients and autocast when the layer was called."""
    num_given: int = 1
    done_before: list[str] = field(default_factory=list)
    """What ``forward`` did since the call before."""
    drawn_before: list[str] = field(default_factory=list)
    """What ``forward`` drew from torch since the call before, with the line."""
    returned: Passed | None = None


class WatchedForward(TorchFunctionMode):
    """Runs ``forward`` and records its calls of the layers, and what else makes tensors outside of them.

    Args:
        anchors: The layers whose calls can be seen.
        given: What ``forward`` is given.
        foreign: Modules that are no layers, with their names.
        draws: The generators that ``forward`` may draw from; None where nobody asks.
        word: One of ``EXTREMES``, to let ``forward`` get such numbers from torch outside of the layers; None: let
            it get what torch draws.
    """

    def __init__(
        self,
        anchors: Mapping[nn.Module, Any],
        given: Passed,
        foreign: Mapping[nn.Module, str],
        draws: Draws | None = None,
        word: int | None = None,
    ) -> None:
        super().__init__()
        self._draws, self._word = draws, word
        self.drawn_by_torch: list[str] = []
        """What ``forward`` drew from torch since its last call of a layer, with the line."""
        self._torch_was = b""
        """Where torch's generators were when ``forward`` began, or the last layer ended."""
        self._generators: dict[torch.Generator, Tensor] = {}
        """Generators of its own that ``forward`` gives torch, and where they were."""
        self.drawn: dict[str, None] = {}
        """The generators of Python and NumPy, and iterators, that ``forward`` draws from, with the line."""
        self._anchors = anchors
        self._foreign = WeakIdKeyDictionary(dict(foreign))  # a metric has another hash after each call
        self.calls: list[LayerCall] = []
        self.done: list[str] = []
        self._depth = self._foreign_depth = 0
        self._last = given
        self.read_values: dict[str, None] = {}
        """The operations by which ``forward`` asked for the numbers in tensors."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if self._draws is None or self._depth > self._foreign_depth:
            result = function(*arguments, **(keywords or {}))
        else:
            given = (keywords or {}).get("generator")
            if isinstance(given, torch.Generator):
                self._generators.setdefault(given, given.get_state())
            result, device = call_with_extremes(function, arguments, keywords or {}, self._word)
            if device is not None:
                drawn_from = drawn_from_torch(device)
                self.drawn_by_torch.append(f"{drawn_from} ({name.strip('_')}) at {model_line()}")
        if not self._depth and name not in ("__get__", "__set__") and _has_tensor(result):
            self.done.append(name.removeprefix("__").removesuffix("__"))
        if not self._depth and name in READS_OF_VALUES:
            self.read_values[name.strip("_")] = None
        return result

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for layer in self._anchors:
                stack.callback(layer.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                handle = layer.register_forward_hook(self._leave, with_kwargs=True, always_call=False)
                stack.callback(handle.remove)
            for part in self._foreign:
                stack.callback(part.register_forward_pre_hook(self._enter_foreign).remove)
                stack.callback(part.register_forward_hook(self._leave_foreign).remove)
            self._torch_was = torch_state()
            yield

    def _enter(self, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._note_draws()
        plain, named = _without_defaults(layer, arguments, keywords)
        given = Passed.of(plain[0] if len(plain) == 1 else plain, same_as=self._last)
        call = LayerCall(layer, given, named, autograd_state(), len(plain), self.done, self.drawn_by_torch)
        self.calls.append(call)
        self.done, self.drawn_by_torch = [], []

    def _leave(self, layer: nn.Module, arguments: Any, keywords: Any, outputs: Any) -> None:
        if self._depth == 1:  # what this does to tensors itself is not to be recorded
            self._last = self.calls[-1].returned = Passed.of(outputs)
            if self._draws is not None:
                self._draws.forget()
                self._torch_was = torch_state()
        self._depth -= 1

    def end(self, code: CodeType | None) -> None:
        """Note what the code of ``forward`` has drawn behind the last layer."""
        self._note_draws(code)

    def put_generators_back(self) -> None:
        """Put the program's own generators that torch was given outside of layers back to where they were."""
        for generator, state in self._generators.items():
            generator.set_state(state)

    def _note_draws(self, ended: CodeType | None = None) -> None:
        drawn = None if self._draws is None else self._draws.since_last(ended)
        if drawn is not None:
            self.drawn[drawn] = None
        if self._draws is not None and not self.drawn_by_torch and torch_state() != self._torch_was:
            self.drawn_by_torch.append(f"torch before {model_line()}" if ended is None else "torch")

    def _enter_foreign(self, part: nn.Module, arguments: Any) -> None:
        if not self._depth:
            self.done.append(f"self.{self._foreign[part]} ({type(part).__name__})")
        self._depth += 1
        self._foreign_depth += 1

    def _leave_foreign(self, part: nn.Module, arguments: Any, outputs: Any) -> None:
        self._depth -= 1
        self._foreign_depth -= 1


def _without_defaults(
    layer: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], list[str]]:
    """The arguments of a call but for those that the layer's ``forward`` would take anyway."""
    try:
        known = inspect.signature(layer.forward).parameters
    except (TypeError, ValueError):
        return arguments, list(keywords)
    defaults = [
        parameter.default for parameter in known.values() if parameter.kind < inspect.Parameter.VAR_POSITIONAL
    ]
    while len(arguments) > 1 and len(arguments) <= len(defaults):
        value = arguments[-1]
        if not isinstance(value, PLAIN) or value != defaults[len(arguments) - 1]:
            break
        arguments = arguments[:-1]
    named = [
        name
        for name, value in keywords.items()
        if not (isinstance(value, PLAIN) and name in known and known[name].default == value)
    ]
    return arguments, named


def autograd_state() -> tuple[Any, ...]:
    kinds = ("cpu", "cuda")
    autocast = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in kinds]
    return (torch.is_grad_enabled(), *autocast)


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensor, value)))
