"""What is said where weights are read of which some are old, or elsewhere.

They are old while a pipeline goes on that never drains. One rank alone may read them, so the pipeline cannot be
brought to rest for it, which all ranks do together.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from deepspeed_partition.code_names import LIBRARIES, is_installed
from deepspeed_partition.engine.runtime.environment import warn_here, warn_once

OLD_WEIGHTS = (
    "{what} is read while the pipeline runs on between the calls of train_batch (weight_versions {mode!r}): the "
    "updates of the last batches are not all done, and stages have weights of different updates. Call "
    "engine.come_to_rest() on every rank before; this is said once"
)


PART_OF_WEIGHTS = (
    "{where} reads the parameters of the pipeline module while a stage runs: they are those of this rank's layers "
    "alone, so what is made of them depends on the cut, in plain DeepSpeed, too. A factor times the squares of "
    "all weights, in a loss, is weight_decay=2*factor of torch's Adam or SGD, with gradient_clipping=0"
)


def tell_of_a_part(frame: FrameType | None) -> bool:
    """Say once, and return, whether it is the program that reads the parameters of a module.

    Args:
        frame: That of the caller, which may be torch's ``parameters()``.
    """
    while frame is not None and frame.f_globals is vars(torch.nn.modules.module):
        frame = frame.f_back
    module = "" if frame is None else str(frame.f_globals.get("__name__"))
    if frame is None or is_installed(module) or module.partition(".")[0] in LIBRARIES:
        return False
    where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})"
    warn_once(f"reads a part/{where}", PART_OF_WEIGHTS.format(where=where))
    return True


def tell_reads_of_optimizer(engine: Any) -> None:
    """Let torch's optimizer say where its state is read and updates are not done; once for an engine."""
    optimizer, module = engine.basic_optimizer, engine.module
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    if hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):  # not where a class leaves Optimizer.__init__ out
        optimizer.register_state_dict_pre_hook(functools.partial(_tell_of_optimizer, module))


def watch_state(engine: Any) -> None:
    """Let the optimizer's ``state`` say where it is read; again where it has a new one, such as that of a file."""
    optimizer = engine.basic_optimizer
    if isinstance(optimizer, torch.optim.Optimizer) and type(optimizer.state) is defaultdict:
        state = _State(optimizer.state.default_factory, optimizer.state)
        state.tell = functools.partial(_tell_of_optimizer, engine.module, None)
        optimizer.state = state


class _State(defaultdict[Any, Any]):
    """The state of an optimizer, which says it where it is read; in copies and files it is an ordinary one."""

    tell: Callable[[], object]

    def __getitem__(self, key: Any) -> Any:
        self.tell()
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.tell()
        return super().get(key, default)

    def items(self) -> Any:
        self.tell()
        return super().items()

    def values(self) -> Any:
        self.tell()
        return super().values()

    def copy(self) -> Any:
        return defaultdict(self.default_factory, self)

    __copy__ = copy

    def __reduce__(self) -> Any:
        return defaultdict, (self.default_factory, dict(self))


class _Parameters(dict[str, Any]):
    """The parameters of one layer between two calls, which says it where one is read."""

    def __init__(self, plain: dict[str, Any], tell: Callable[[], object]) -> None:
        super().__init__(plain)
        self.plain, self._tell = plain, tell

    def __getitem__(self, name: str) -> Any:
        self._tell()
        return super().__getitem__(name)

    def items(self) -> Any:
        self._tell()
        return super().items()

    def values(self) -> Any:
        self._tell()
        return super().values()

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.plain[name] = value

    def pop(self, name: str, *default: Any) -> Any:
        self.plain.pop(name, *default)
        return super().pop(name, *default)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self.plain[name]

    def __reduce__(self) -> Any:
        return type(self.plain), (dict(self.plain),)


class WatchedLayers:
    """The layers of a rank, whose parameters say between two calls where they are read one by one.

    In a call, layers are as they were: what is compiled of them never meets anything else.

    Args:
        module: of the pipeline.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._watched: list[tuple[nn.Module, _Parameters]] = []

    def begin(self) -> None:
        """Watch from now on."""
        for part in nn.Module.modules(self._module):
            plain = part.__dict__["_parameters"]
            if plain and not isinstance(plain, _Parameters):
                watched = _Parameters(plain, self._tell)
                part.__dict__["_parameters"] = watched
                self._watched.append((part, watched))

    def end(self) -> None:
        """Watch no more."""
        for part, watched in self._watched:
            part.__dict__["_parameters"] = watched.plain
        self._watched.clear()

    def _tell(self) -> None:
        if self._module.has_old_weights is not None:
            self.end()
            tell_old_weights(self._module, "a parameter")


def _tell_of_optimizer(module: Any, _: Any) -> None:
    tell_old_weights(module, "the state of the optimizer")


def tell_old_weights(module: Any, what: str) -> None:
    """Say that something is read whose updates are not all done, if it is so and was not said.

    Args:
        what: subject of the sentence.
    """
    mode, module.has_old_weights = module.has_old_weights, None
    if mode is not None:
        module.has_told_old_weights = True
        warn_here(OLD_WEIGHTS.format(what=what, mode=mode))
