"""What a program puts on the modules that no layer holds, since their own code was written down.

Such are the model itself and the modules that were opened. A hook on one of them is called by no layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from deepspeed_partition.capture.captured import Captured
from deepspeed_partition.capture.kept_state import written_name
from deepspeed_partition.capture.recorder import CaptureError
from deepspeed_partition.code_names import LIBRARIES
from deepspeed_partition.module_hooks import MODULE_HOOKS

_LIBRARIES = frozenset((*LIBRARIES, "accelerate", "diffusers", "peft", "torchmetrics", "transformers"))
"""Whose hooks are part of what is written down, or of a host."""


class OutsideLayers:
    """The modules of a captured model whose code was written down.

    Args:
        captured: The model with the graph of which layers are made.
    """

    def __init__(self, captured: Captured) -> None:
        modules = captured.graph.recording.modules
        names = dict.fromkeys(("", *sorted(name for name, _ in captured.graph.opened)))
        self._opened = {name: modules[name] for name in names}
        self._hooks = [vars(part)[table] for part in self._opened.values() for table in MODULE_HOOKS]

    def verify(self) -> None:
        """Refuse hooks that no layer calls.

        Raises:
            CaptureError: a program has hung one on.
        """
        if not any(self._hooks):
            return
        for name, part in self._opened.items():
            for kind, hook in _hooks_of(part):
                place = f"{name} ({type(part).__name__})" if name else type(part).__name__
                raise CaptureError(
                    f"{place} has a {kind} hook ({_name_of(hook)}), which no layer calls, for the code of "
                    f"{name or 'the model'} is cut into layers: hang it on modules that it calls, such as its "
                    "blocks, before layers are made"
                )


def refuse_kept_state(captured: Captured) -> None:
    """Refuse a model whose own code keeps something in an attribute for its next run.

    Raises:
        CaptureError: it does; the message names the line.
    """
    for name, line in captured.graph.recording.kept.items():
        raise CaptureError(
            f"{type(captured.model).__name__} keeps {name} for its next run ({line}), and the layers that its "
            "code is cut into begin each run with what that was in the capture: let a module of its own keep and "
            "read it, or take it as an argument and return it"
        )


def notes_on_attributes(captured: Captured) -> Iterator[str]:
    """What is lost of attributes that code sets which is cut into layers, one sentence for each."""
    graph = captured.graph
    opened = {"", *(name for name, _ in graph.opened)}
    for (owner, name), each in graph.recording.sets.items():
        if each.scope.target in opened and type(each.value) not in (int, float):
            yield (
                f"{written_name(owner, name)} is not set while layers run, into which the code that does is cut "
                f"({each.line}): let it return the value where something reads it"
            )


def _hooks_of(part: nn.Module) -> Iterator[tuple[str, Any]]:
    for table, kind in MODULE_HOOKS.items():
        for hook in vars(part)[table].values():
            if _named(hook).__module__.partition(".")[0] not in _LIBRARIES:
                yield kind, hook


def _named(hook: Any) -> Any:
    """The function, or the class of the object, that a hook is."""
    while isinstance(hook, partial):
        hook = hook.func
    return hook if hasattr(hook, "__qualname__") and hasattr(hook, "__module__") else type(hook)


def _name_of(hook: Any) -> str:
    return str(_named(hook).__qualname__).rpartition("<locals>.")[2]
