"""The graph of a tensor, where code that is written down asks for it: hooks that it registers there are noted.

A node belongs to the graph of the capture. A hook on it is called by no layer, each of which makes a graph anew.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import Node

REGISTERING = frozenset(("register_hook", "register_prehook"))


class NotedNode:
    """A node of a graph that tells where a hook is registered on it, or on one that it leads to."""

    def __init__(self, node: Any, note: Callable[[str], None]) -> None:
        self._node, self._note = node, note

    def __getattr__(self, name: str) -> Any:
        if name in REGISTERING:
            self._note(f"grad_fn.{name}()")
        return getattr(self._node, name)

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """The nodes that follow in the backward."""
        return tuple((noted(node, self._note), number) for node, number in self._node.next_functions)

    def __eq__(self, other: object) -> bool:
        return self._node is (other._node if isinstance(other, NotedNode) else other)

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return repr(self._node)


Node.register(NotedNode)


def noted(node: Any, note: Callable[[str], None]) -> Any:
    """A node with a class of the same name, by which code may go; None for none.

    Args:
        note: Is given how a hook is registered.
    """
    return None if node is None else type(type(node).__name__, (NotedNode,), {})(node, note)


def asked_by_torch() -> str | None:
    """The function of ``torch.autograd.graph`` that runs now, under whichever name code has it.

    It is empty where other code of torch's asks, and None where the program's own does.
    """
    outside = itertools.dropwhile(lambda frame: _module_of(frame).startswith(_BETWEEN), _frames())
    name = None
    for frame in outside:
        if frame.f_globals is not vars(torch.autograd.graph):
            return "" if name is None and _module_of(frame).startswith("torch.") else name
        name = frame.f_code.co_name
    return name


_BETWEEN = (__name__.rpartition(".")[0], "torch.overrides", "torch._tensor")
"""Modules through which a function of torch's gets here."""


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
