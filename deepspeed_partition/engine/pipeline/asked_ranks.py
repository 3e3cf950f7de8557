"""Layers and losses that ask for the rank that they run on, which a plan decides: each is said once.

In plain DeepSpeed a layer runs on the rank of DeepSpeed's own cut. The first forward of each stage is watched,
and what builds layers, call by call, for the functions by which a program asks for its rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import deepspeed.comm
import torch.distributed as dist
from deepspeed.pipe import LayerSpec

from deepspeed_partition.code_names import LIBRARIES, is_installed
from deepspeed_partition.engine.pipeline.beside_layers import modules_of, name_of
from deepspeed_partition.engine.runtime.environment import warn_once

ASKS = (
    "{who} asks for its rank ({how}) when it runs: here it runs on rank {rank}, where the plan puts it, and in "
    "plain DeepSpeed on the rank of DeepSpeed's own cut. What it computes with the rank is then other. Let it go "
    "by something of its own, such as an argument of its LayerSpec"
)
ASKS_WHEN_BUILT = (
    "{who} asks for its rank ({how}) when it is built: it is built on the rank where the plan puts it, and in "
    "plain DeepSpeed on that of DeepSpeed's own cut. What it makes of the rank is then other. Let it go by "
    "something of its own, such as an argument of its LayerSpec"
)
VARIABLES = ("RANK", "LOCAL_RANK")
_FUNCTIONS: dict[CodeType, str] = {
    dist.get_rank.__code__: "torch.distributed.get_rank()",
    dist.get_node_local_rank.__code__: "torch.distributed.get_node_local_rank()",
    deepspeed.comm.get_rank.__code__: "deepspeed.comm.get_rank()",
    deepspeed.comm.get_local_rank.__code__: "deepspeed.comm.get_local_rank()",
}
_BUILD = LayerSpec.build.__code__
_ENVIRON = type(os.environ).__getitem__.__code__
_READS = frozenset(each.__code__ for each in (os.getenv, type(os.environ).get))
"""Functions that read a variable by the one above."""


@contextmanager
def ranks_told(functions: Sequence[Any], first: int, loss_fn: Any) -> Iterator[None]:
    """Say once which layers ask for their rank meanwhile, or that the loss function does.

    Args:
        functions: The layers of a stage.
        first: The number of the first one.
        loss_fn: The loss function, if the stage is the last one.
    """
    with _asking_told(lambda frame: _who(frame, functions, first, loss_fn), ASKS):
        yield


@contextmanager
def ranks_told_in_build(specs: Sequence[Any]) -> Iterator[None]:
    """Say once which layers ask for their rank while they are built meanwhile.

    Args:
        specs: The layers of the module, of which those are known that are built of a specification.
    """
    with _asking_told(lambda frame: _built(frame, specs), ASKS_WHEN_BUILT):
        yield


@contextmanager
def _asking_told(who_asks: Callable[[FrameType | None], str | None], sentence: str) -> Iterator[None]:
    """Say once of each that it asks for the rank meanwhile."""
    if sys.getprofile() is not None:  # a profiler of the program's: one at a time
        yield
        return
    found: dict[str, list[str]] = {}

    def watched(frame: FrameType, event: str, _: Any) -> None:
        how = _asked(frame) if event == "call" else None
        if how is None:
            return
        caller = frame.f_back
        while caller is not None and caller.f_code in _READS:
            caller = caller.f_back
        if caller is None or _is_librarys(caller):
            return
        who = who_asks(caller)
        if who is not None and how not in found.setdefault(who, []):
            found[who].append(how)

    sys.setprofile(watched)
    try:
        yield
    finally:
        if sys.getprofile() is watched:
            sys.setprofile(None)
    for who, ways in found.items():
        told = sentence.format(who=who, how=", ".join(ways), rank=dist.get_rank())
        warn_once(f"asks for its rank/{who}/{sentence}", told)


def _asked(frame: FrameType) -> str | None:
    """What is called in words, if it tells the rank of this process."""
    if frame.f_code is _ENVIRON:
        name = frame.f_locals.get("key")
        return f"os.environ[{name!r}]" if name in VARIABLES else None
    how = _FUNCTIONS.get(frame.f_code)
    # A group of some ranks, such as the pipelines' copies of one stage, goes with the layer.
    return how if how is None or frame.f_locals.get("group") in (None, dist.group.WORLD) else None


def _is_librarys(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__") or "")
    return module.partition(".")[0] in LIBRARIES or is_installed(module)


def _who(frame: FrameType | None, functions: Sequence[Any], first: int, loss_fn: Any) -> str | None:
    parts = {
        id(part): place
        for place, function in enumerate(functions)
        for module in modules_of(function)
        for part in module.modules()
    }
    codes = {_code_of(function): place for place, function in enumerate(functions)}
    of_loss = None if loss_fn is None else _code_of(loss_fn)
    while frame is not None:
        own = frame.f_locals.get("self")
        place = parts.get(id(own), codes.get(frame.f_code))
        if place is not None:
            return f"layer {first + place} ({name_of(functions[place])})"
        if loss_fn is not None and (frame.f_code is of_loss or own is loss_fn):
            return f"the loss function ({name_of(loss_fn)})"
        frame = frame.f_back
    return None


def _built(frame: FrameType | None, specs: Sequence[Any]) -> str | None:
    """The layer whose specification builds it, in a frame around this one."""
    while frame is not None:
        if frame.f_code is _BUILD:
            spec = frame.f_locals["self"]
            place = next((place for place, each in enumerate(specs) if each is spec), None)
            return f"{'a layer' if place is None else f'layer {place}'} ({spec.typename.__name__})"
        frame = frame.f_back
    return None


def _code_of(function: Any) -> CodeType | None:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(getattr(function, "func", function), "__code__", None)
