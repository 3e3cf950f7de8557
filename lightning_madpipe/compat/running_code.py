"""Whose code is running, told by the frames on the way to it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

OTHERS = (
    "deepspeed", "deepspeed_partition", "lightning", "lightning_fabric", "lightning_madpipe", "pytorch_lightning",
)  # fmt: skip
"""Packages whose own work in a hook is none of its user's, such as saving a checkpoint."""


def is_of_the_user(frame: FrameType | None) -> bool:
    """Whether the code at ``frame`` computes for a hook's user, and not a library for itself."""
    for caller in _callers(frame):
        name = caller.f_globals.get("__name__") or ""
        package = name.partition(".")[0]
        if name.startswith(OPTIMIZERS):  # what they compute for each parameter, called by whomever
            return False
        if package != "torch" and not caller.f_code.co_filename.endswith(WATCHING):
            return package not in OTHERS or caller.f_code.co_filename.endswith(LIGHTNING_NORMS)
    return True


def is_logged(frame: FrameType | None) -> bool:
    """Whether the code at ``frame`` is on the way of ``self.log()``, which copies a value first."""
    return any(
        caller.f_code.co_name == "log" and caller.f_code.co_filename.endswith(LIGHTNING_MODULE)
        for caller in _callers(frame)
    )


def is_saved(frame: FrameType | None) -> bool:
    """Whether the code at ``frame`` is on the way of ``state_dict()``."""
    return any(caller.f_code.co_name == "_save_to_state_dict" for caller in _callers(frame))


def line_of_the_user(frame: FrameType | None) -> str | None:
    """The line from which a property of the Trainer, at ``frame``, is asked for; None: a library asks."""
    caller = None if frame is None or frame.f_code.co_filename.partition("trainer.py")[1] == "" else frame.f_back
    if caller is None or (caller.f_globals.get("__name__") or "").partition(".")[0] in (*OTHERS, "torchmetrics"):
        return None
    return f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"


def asks_for_its_rank(frame: FrameType | None) -> bool:
    """Whether the user's code at ``frame``, or what called it in the hook, may do otherwise on another rank."""
    for caller in _callers(frame):
        name = caller.f_globals.get("__name__") or ""
        if name.partition(".")[0] in OTHERS:
            return False
        if name == RANK_ZERO_ONLY or not RANKS.isdisjoint(caller.f_code.co_names):
            return True
    return False


def goes_by_names(frame: FrameType | None, names: Iterable[str]) -> bool:
    """Whether the user's code at ``frame`` comes to parameters by their names, such as ``self.head.weight``.

    Every rank runs that alike. Code that lists parameters goes through those of its rank.
    """
    known: set[str] = set()
    for caller in _callers(frame):
        package = (caller.f_globals.get("__name__") or "").partition(".")[0]
        if package not in OTHERS:
            known.update(caller.f_code.co_names)
        elif known:
            break
    return known.isdisjoint(LISTS) and known.issuperset(name.rpartition(".")[2] for name in names)


RANK_ZERO_ONLY = "lightning_utilities.core.rank_zero"
"""The module of Lightning's decorator."""

RANKS = frozenset((
    "global_rank", "local_rank", "node_rank", "is_global_zero", "rank_zero_only", "get_rank", "rank", "environ",
    "getenv",
))  # fmt: skip
"""Names by which code asks for the rank that it runs on."""

LISTS = frozenset(("parameters", "named_parameters", "param_groups", "_parameters"))
"""Names by which code goes through the parameters of its rank."""

WATCHING = tuple(
    os.path.join("lightning_madpipe", "compat", file) for file in ("watched_hooks.py", "followed_values.py")
)
"""The files that watch a hook, whose frames are between it and the function of torch that it calls."""

OPTIMIZERS = "torch.optim."
"""Modules of torch whose own arithmetic is an optimizer's step."""

LIGHTNING_NORMS = os.path.join("utilities", "grads.py")
"""The file of Lightning's ``grad_norm``, which a hook calls for its user."""

LIGHTNING_MODULE = os.path.join("core", "module.py")
"""The file of Lightning's ``LightningModule.log``."""


def clears_gradients(frame: FrameType | None) -> bool:
    """Whether the code at ``frame`` is on the way of ``zero_grad()``, which looks whether there is anything."""
    return any(caller.f_code.co_name == "zero_grad" for caller in _callers(frame))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
