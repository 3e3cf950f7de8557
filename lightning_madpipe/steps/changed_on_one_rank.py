"""What hooks change on rank 0 alone, such as under ``@rank_zero_only``, and steps and optimizers go by.

Hooks run on every rank, and the step on the last stage: what it reads has to be changed there, too. Each rank's
optimizer trains its own layers, by its own rate. Looked at are the hooks whose code asks for the rank, on rank 0
and on the last stage of the first pipeline, which hear of each other by the store of ``torch.distributed``.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

from deepspeed_partition.code_names import CodeSearch, is_installed
from deepspeed_partition.engine.runtime.environment import warn_once
from lightning_madpipe.compat.running_code import RANKS
from lightning_madpipe.module import outside_pipeline
from lightning_madpipe.steps.beside_module import BesideModule
from lightning_madpipe.steps.forward_reads import facts_of
from lightning_madpipe.steps.rank_of_step import DECORATORS

SENTENCE = (
    "{hook} changes {what} on rank 0 alone. A step runs on the last stage, here on rank {own}, and each rank's "
    "optimizer trains the layers of its own stage: they never see that, and train otherwise than in one process. "
    "Change it on every rank, without @rank_zero_only or a condition on the rank"
)
_DECORATORS = frozenset(module for module, _ in DECORATORS)
_RUNS = itertools.count()
_MISSING = object()


class ChangesOfOneRank:
    """Compares what a hook has changed on rank 0 with what it has changed on the last stage.

    Args:
        trainer: Lightning's.
        module: The LightningModule.
        mpu: Who is who in the pipelines.
        ignored: Attributes of the module that its user does not set.
    """

    def __init__(self, trainer: Any, module: Any, mpu: Any, ignored: Collection[str]) -> None:
        self._trainer, self._module, self._ignored = trainer, module, ignored
        place, last = mpu.get_stage_id(), mpu.get_pipe_parallel_world_size() - 1
        in_first = mpu.get_data_parallel_rank() == 0
        self._is_first, self._is_last = in_first and place == 0, in_first and place == last
        self._run = next(_RUNS)
        self._asks: dict[str, bool] = {}
        self._read: set[str] | None = None
        self._num_calls = Counter[str]()
        self._changed: dict[str, dict[str, int]] = {}
        """By hook, what it has changed on this rank, with the number of the call that did it first."""

    @contextmanager
    def watching(self, hook: str, owner: Any, name: str) -> Iterator[None]:
        """Look at what a hook changes meanwhile.

        Args:
            hook: The hook and whose it is, in words.
            owner: The module or the callback that has it.
            name: Its name.
        """
        if hook not in self._asks:
            self._asks[hook] = (self._is_first or self._is_last) and _asks_for_rank(owner, name, self._module)
        if not self._asks[hook]:
            yield
            return
        before = self._values()
        yield
        changed = self._changed.setdefault(hook, {})
        self._num_calls[hook] += 1
        number = self._num_calls[hook]
        now = self._values()
        new = [key for key, facts in now.items() if before.get(key, _MISSING) != facts and key not in changed]
        changed.update(dict.fromkeys(new, number))
        if self._is_first and new:
            _get_default_store().set(self._key(hook), json.dumps(changed))
        if self._is_last and number & (number - 1) == 0:
            self._compare(hook)

    def end(self) -> None:
        """Compare for the last time."""
        if self._is_last:
            for hook in self._num_calls:
                self._compare(hook)

    def _compare(self, hook: str) -> None:
        store, key = _get_default_store(), self._key(hook)
        if not store.check([key]):
            return
        on_first: dict[str, int] = json.loads(store.get(key))
        # What rank 0 has changed in a call that this rank has yet to come to says nothing.
        alone = [
            name
            for name, number in on_first.items()
            if number <= self._num_calls[hook] and name not in self._changed[hook]
        ]
        if alone:
            own = self._trainer.global_rank
            warn_once(f"rank 0/{hook}", SENTENCE.format(hook=hook, what=" and ".join(alone), own=own))

    def _key(self, hook: str) -> str:
        return f"madpipe/changed on rank 0/{self._run}/{hook}"

    def _values(self) -> dict[str, Any]:
        """What tells whether attributes that steps may read, and what optimizers go by, have changed."""
        if self._read is None:
            self._read = BesideModule(self._module).written
        found: dict[str, Any] = {}
        for path, part in outside_pipeline(self._module):
            for name, value in (*vars(part).items(), *part._buffers.items()):
                if name in self._read and not (part is self._module and name in self._ignored):
                    found[".".join(filter(None, ("self", path, name)))] = facts_of(value)
        for optimizer in self._trainer.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    if name != "params":
                        found[f"{name} of group {number} of the optimizer"] = facts_of(value)
        return found


def _asks_for_rank(owner: Any, name: str, module: Any) -> bool:
    """Whether the code of a hook, or what it calls, may do otherwise on another rank."""
    search = CodeSearch(lambda file: not is_installed(file))
    search.read(inspect.getattr_static(owner, name, None), type(owner))  # a LambdaCallback has its own
    if not RANKS.isdisjoint(search.written):
        return True
    called = {name, *search.written}
    holders = [*map(inspect.getmro, (type(owner), type(module)))]
    members = (vars(base).get(each) for bases in holders for base in bases for each in called)
    beside = (function.__globals__.get(each) for function in search.functions for each in called)
    return any(getattr(each, "__globals__", {}).get("__name__") in _DECORATORS for each in (*members, *beside))
