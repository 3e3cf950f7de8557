"""Files that hooks open for writing, and what they print, on each rank of a pipeline.

Hooks run on every rank, and ranks of a pipeline have the same data: what each of them appends to a file stands
there once for each. It is said where the first rank writes the same, and where code does not ask for its rank.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store, get_process_group_ranks

from deepspeed_partition.code_names import CodeSearch, is_installed, is_librarys
from deepspeed_partition.dropped_writing import asked_by_program
from deepspeed_partition.engine.runtime.environment import warn_once
from lightning_madpipe.compat.collective_calls import SUMMED_OVER_STAGES, sums_told
from lightning_madpipe.compat.hook_owners import HookOwners
from lightning_madpipe.compat.running_code import asks_for_its_rank
from lightning_madpipe.steps import written_files
from lightning_madpipe.steps.changed_on_one_rank import ChangesOfOneRank
from lightning_madpipe.steps.what_layers_set import LayerTraces

SENTENCE = (
    "{hook} {does}, and hooks run on each of the {number} ranks of a pipeline, which have the same data: each of "
    "these {verb}. {verb_to_do} on one of them, under `if self.trainer.is_global_zero:` (in a callback `if "
    "trainer.is_global_zero:`), or in a function with @rank_zero_only"
)
MOST_NOTED = 100
"""The most different things that are noted of a run: names of files may have the number of a batch in them."""


class HookWriting(written_files.WritingTold):
    """Watches the hooks of the program in a run, where a pipeline has several ranks.

    Args:
        trainer: Lightning's.
        module: The LightningModule.
        mpu: Who is who in the pipelines.
        ignored: Attributes of the module that its user does not set.
    """

    def __init__(self, trainer: Any, module: Any, mpu: Any, ignored: Collection[str]) -> None:
        super().__init__("", lambda sentence: None)
        self._changes = ChangesOfOneRank(trainer, module, mpu, ignored)
        self._owners = HookOwners(trainer, module)
        self._trainer = trainer
        self._pipeline = get_process_group_ranks(mpu.get_pipe_parallel_group())
        self._number, self._is_first = mpu.get_pipe_parallel_world_size(), mpu.get_stage_id() == 0
        self.traces: LayerTraces | None = None
        """What layers set on themselves; None until it is known."""
        self._names: dict[str, Collection[str]] = {}
        self._hooks: dict[tuple[str, int], tuple[str, Any, str] | None] = {}
        self._noted: set[str] = set()
        self._untold: dict[str, tuple[str, str]] = {}
        """What this rank did, with the hook and the sentence, as long as the first rank has not done it."""
        self._num_looks = 0
        # Lightning enters a context of its profiler around each hook, which nothing public does.
        self._profile = trainer.profiler.profile
        trainer.profiler.profile = self._profiled

    def end(self) -> None:
        """Let the Trainer's profiler go."""
        vars(self._trainer.profiler).pop("profile", None)
        self._look()
        self._changes.end()

    @contextmanager
    def _profiled(self, action: str) -> Iterator[Any]:
        owner = self._owners.of(action)
        if (action, id(owner)) not in self._hooks:
            self._hooks[action, id(owner)] = self._hook_of(owner, action.rpartition(".")[2])
        hook = self._hooks[action, id(owner)]
        with self._profile(action) as profiled:
            if hook is None:
                yield profiled
                return
            self._step = hook[0]
            summed = sums_told(partial(self._tell_of_sum, hook[0]), self._pipeline)
            with self.watching(), self._changes.watching(*hook), self._traces_told(*hook), summed:
                yield profiled
        self._num_looks += bool(self._untold)
        if self._num_looks & (self._num_looks - 1) == 0:
            self._look()

    def _tell_of_sum(self, hook: str, name: str, line: str, ranks: str) -> None:
        told = SUMMED_OVER_STAGES.format(hook=hook, name=name, line=line, ranks=ranks, number=self._number)
        warn_once(f"summed over stages/{line}", told)

    def _traces_told(self, hook: str, owner: Any, name: str) -> AbstractContextManager[None]:
        """Tell of what layers set, and a hook reads."""
        if self.traces is None:
            return nullcontext()
        if hook not in self._names:
            search = CodeSearch(lambda file: not is_installed(file))
            search.read(inspect.getattr_static(owner, name, None), type(owner))  # a LambdaCallback has its own
            self._names[hook] = search.written
        return self.traces.told_in_hook(hook, self._names[hook])

    def _hook_of(self, owner: Any, hook: str) -> tuple[str, Any, str] | None:
        """The hook of an owner in words, with both; None: it is no hook of the program."""
        function = getattr(owner, hook, None) if hook.startswith("on_") else None
        if function is None or (is_librarys(type(owner)) and is_librarys(function)):
            return None
        names = getattr(inspect.unwrap(function), "__module__", "") or ""
        if names.endswith((".core.hooks", ".core.module", ".callbacks.callback")):  # it does nothing
            return None
        return f"{hook} of {self._owners.name_of(owner)}", owner, hook

    def _find(self) -> None:
        super()._find()
        self._watch(("builtins", "print"), builtins, self._printing)

    def _printing(self, prints: Callable[..., Any], name: str) -> Callable[..., Any]:
        is_own = inspect.isbuiltin(prints)  # the program's may be silent on this rank

        def printed(*values: Any, **keywords: Any) -> Any:
            if is_own and keywords.get("file") in (None, sys.stdout, sys.stderr):
                self._tell("prints", "prints", "Print")
            return prints(*values, **keywords)

        return printed

    def _tell(self, does: str, verb: str = "writes", verb_to_do: str = "Write") -> None:
        if self._is_of_this_thread() and does not in self._noted and len(self._noted) < MOST_NOTED:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_globals.get("__name__") in (__name__, written_files.__name__):
                frame = frame.f_back
            if not asked_by_program(frame) or asks_for_its_rank(frame):
                return
            self._noted.add(does)
            if self._is_first:
                _get_default_store().set(_key(does), "")
            else:
                sentence = SENTENCE.format(
                    hook=self._step, does=does, number=self._number, verb=verb, verb_to_do=verb_to_do
                )
                self._untold[does] = f"hooks write/{self._step}/{verb}", sentence

    def _look(self) -> None:
        for does, (key, sentence) in list(self._untold.items()):
            if _get_default_store().check([_key(does)]):
                del self._untold[does]
                warn_once(key, sentence)


def _key(does: str) -> str:
    return f"madpipe/hooks write/{does}"
