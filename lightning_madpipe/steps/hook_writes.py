"""Attributes that hooks write: what of these ``forward`` reads, layers that were found have as it was.

Hooks are read, and not run. Where there is no source, nothing is found.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from deepspeed_partition.code_names import function_of

IN_TRAINING = (
    "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end",
    "on_before_zero_grad", "on_after_backward", "on_before_optimizer_step", "optimizer_step", "lr_scheduler_step",
    "on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end",
    "on_validation_batch_start", "on_validation_batch_end",
)  # fmt: skip
"""Hooks that are called between the first step and the last one."""


class Write(NamedTuple):
    """A line of a hook that sets an attribute of the LightningModule or of a part of it."""

    path: str
    """The attribute, such as ``encoder.alpha``."""
    hook: str
    """The hook and whose it is, in words."""
    line: str


def writes_in_hooks(module: Any, callbacks: Iterable[Any]) -> Iterator[Write]:
    """What the hooks of a module and of callbacks set of the module, and what methods that they call set."""
    for hook in IN_TRAINING:
        words = f"{hook} of {type(module).__name__}"
        yield from _Reader(type(module), words).read(type(module), hook, 0)
        for callback in callbacks:
            words = f"{hook} of {type(callback).__name__}"
            yield from _Reader(type(module), words).read(type(callback), hook, 2)  # after self and trainer


class _Reader:
    def __init__(self, kind: type, words: str) -> None:
        self._kind, self._words = kind, words
        self._seen: set[FunctionType] = set()

    def read(self, kind: type, name: str, place: int) -> Iterator[Write]:
        """Read a method of ``kind``, and those of its base classes that it calls by ``super()``.

        Args:
            place: The place of the LightningModule among its arguments.
        """
        for base in kind.__mro__:
            function = function_of(vars(base).get(name))
            if function is None:
                if name in vars(base):  # a library's
                    return
                continue
            if function in self._seen:
                return
            self._seen.add(function)
            yield from self._read(function, place)
            if "super" not in function.__code__.co_names:
                return

    def _read(self, function: FunctionType, place: int) -> Iterator[Write]:
        code = function.__code__
        if code.co_argcount <= place:
            return
        root = code.co_varnames[place]
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, SyntaxError):  # typed into a shell, or a part of a line
            return
        for node in ast.walk(tree):
            path = _path_written(node, root)
            if path:
                line = code.co_firstlineno + getattr(node, "lineno", 1) - 1
                yield Write(path, self._words, f"{Path(code.co_filename).name}:{line}")
            elif isinstance(node, ast.Call) and (path := _path(node.func, root)) and "." not in path:
                yield from self.read(self._kind, path, 0)


def _path_written(node: ast.AST, root: str) -> str:
    """The attribute of the variable ``root`` that a piece of code sets; empty: none."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return _path(node, root)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
        match node.args:
            case [ast.Name(id=owner), ast.Constant(value=str(name)), _] if owner == root:
                return name
    return ""


def _path(node: ast.AST, root: str) -> str:
    """``a.b`` for the code ``root.a.b``; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed(names)) if isinstance(node, ast.Name) and node.id == root else ""
