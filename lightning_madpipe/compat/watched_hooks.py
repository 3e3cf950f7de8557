"""Hooks that compute with several parameters: each rank of a pipeline has those of its own layers only.

A norm over ``self.parameters()``, a learning rate that is made from it, noise for all weights from one generator:
in a pipeline each is of a part, another one on each rank, and nothing fails. While a hook of the user's runs,
every function of torch that it calls is looked at, and values are followed from the parameters that they come
from. What mixes those of several is told once, with the place. ``clip_grad_norm_`` is answered for all ranks, see
``gradient_norms``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_partition.code_names import is_librarys
from deepspeed_partition.engine.pipeline.gradient_norms import GradientNorms
from deepspeed_partition.engine.runtime.environment import warn_once
from lightning_madpipe.compat.absent_parameters import Absent, reached_in_hooks
from lightning_madpipe.compat.followed_values import FLAT, GRADIENT, NO_GRADIENT, FollowedValues
from lightning_madpipe.compat.hook_owners import HookOwners
from lightning_madpipe.compat.hook_sentences import (
    AFTER_THE_CLOSURE,
    CLEARED,
    CLEARED_BEFORE,
    COPY_OF_A_PART,
    ELEMENTS_OF_SEVERAL,
    IN_BUFFERS,
    NUMBERS_OF_SEVERAL,
    RANDOM,
    SEVERAL,
    WHOLE_STATE,
)
from lightning_madpipe.compat.optimizer_counts import Tell, counts_told, states_of
from lightning_madpipe.compat.running_code import OTHERS, clears_gradients, goes_by_names, is_of_the_user
from lightning_madpipe.compat.weights_in_flight import WeightsInFlight
from lightning_madpipe.compat.written_weights import written_into_masters
from lightning_madpipe.module import outside_pipeline, pipeline_of

WITH_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")
"""Hooks in which the gradients of a step are there."""

AFTER_A_STEP = ("on_train_batch_end", "on_train_epoch_end", "on_before_zero_grad")
"""Hooks in which one process still has the gradients of the last step."""

PRE_HOOK, POST_HOOK = "the step pre hook", "the step post hook"
"""How the names begin of what an optimizer runs before its closure, with the gradients of the step before, and
behind its step."""

NOT_WATCHED = ("on_load_checkpoint", "on_exception")

SUMS = (SEVERAL, NUMBERS_OF_SEVERAL, ELEMENTS_OF_SEVERAL)
"""What is told of numbers that are made of several parameters.

In ``on_save_checkpoint`` nothing else is: it is there to ask for the state, of which ``hooks_on_state`` knows.
"""


class HookWatch:
    """Watches the hooks of a run, of the module and of callbacks that are not Lightning's.

    Args:
        trainer: Lightning's.
        module: The LightningModule.
        mpu: Who is who in the pipelines.
        optimizers: Gives the optimizers of the run, as the user's hooks see them.
        is_cut: Whether other ranks have other layers.
        flattened: Whether DeepSpeed keeps gradients and weights of a step in flat buffers.
        refusal: Makes the error that says a sentence.
        states: Gives what tells, for a hook of an object, whether generators were drawn from.
        leaves_loop: Called when a rank has left the loop over the batches of an epoch, before any hook.
        in_flight: Knows of weights whose updates are under way, where the pipeline never drains.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        mpu: Any,
        *,
        optimizers: Callable[[], Iterable[Any]],
        is_cut: bool,
        flattened: bool,
        refusal: Callable[[str], Exception],
        states: Callable[[Any, str], Callable[[], list[int]]],
        leaves_loop: Callable[[], None],
        in_flight: WeightsInFlight,
    ) -> None:
        self._trainer, self._module, self._optimizers = trainer, module, optimizers
        self._leaves_loop, self._in_flight = leaves_loop, in_flight
        self._is_cut, self._flattened, self._refusal = is_cut, flattened, refusal
        self._owners = HookOwners(trainer, module)
        self._norms = GradientNorms(
            module.parameters,
            mpu,
            flattened=flattened,
            refusal=refusal,
            is_elsewhere=lambda tensor: isinstance(tensor, Absent),
            clips="Trainer(gradient_clip_val=...)",
        )
        self._mode: FollowedValues | None = None
        self._states_for_hook = states
        self._states: dict[str, Callable[[], list[int]]] = {}
        self._told: set[str] = set()
        self._untold: dict[str, str] = {}
        """What this rank has to tell if rank 0, whose log is read first, has not met it in the same hook."""
        self._values = WeakIdKeyDictionary()
        self._step_is_made = False
        # Lightning enters a context of its profiler around each hook, which nothing public does.
        self._profile = trainer.profiler.profile
        trainer.profiler.profile = self._watched

    def end(self) -> None:
        """Let the Trainer's profiler go."""
        vars(self._trainer.profiler).pop("profile", None)
        self._tell_untold(self._untold)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch nothing while an optimizer's closure makes a step."""
        before = dict(self._untold)
        with self._instead(None):
            yield
        self._tell_untold(before)  # rank 0 has been through the hooks before a step that is made
        self._step_is_made = True

    def unwatched(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is watched, though a hook runs."""
        return self._instead(None)

    @contextmanager
    def _watched(self, action: str) -> Iterator[Any]:
        with self._profile(action) as profiled:
            host, hook = self._hook_of(action)
            if hook == "lr_scheduler_step" and host is None:
                with self._of_schedule():
                    yield profiled
                return
            if host is None:
                yield profiled
                if action == "run_training_epoch" and self._is_cut:
                    self._leaves_loop()
                return
            owner = self._owners.name_of(host)
            if hook == "on_save_checkpoint":
                with self._sums_told(owner, hook):
                    yield profiled
                return
            self._step_is_made = False
            place = f"{hook} of {owner}"
            mode = FollowedValues(
                self._names,
                self._values,
                lambda *found: self._tell(owner, hook, *found),
                lambda: self._states_of(host, hook, place)(),
                lambda *found: self._refuse_write(place, *found),
                self._buffers_beside,
                self._in_flight.of_hook(place, sees_gradients=hook in WITH_GRADIENTS),
            )
            alone: AbstractContextManager[None] = nullcontext()
            norms: AbstractContextManager[None] = nullcontext()
            settings: AbstractContextManager[None] = nullcontext()
            if hook in WITH_GRADIENTS:
                alone = self._in_flight.without_others(place)
                settings = self._in_flight.with_settings(place)
                norms = self._norms.over_all_ranks(self._in_flight.why_no_norm(place))
            told = self._instead(mode, lambda *found: self._tell_of_count(owner, hook, *found))
            masters = written_into_masters(self._module, mode.written) if self._flattened else nullcontext()
            with alone, norms, settings, masters, told, reached_in_hooks(self._module, place):
                yield profiled

    @contextmanager
    def of_optimizer(self, name: str, owner: str) -> Iterator[None]:
        """Watch code that an optimizer runs for its user, such as a hook of its step, as a hook is watched.

        Args:
            name: Of the code, such as ``the step post hook shrink``.
            owner: The class of the optimizer.
        """
        mode = FollowedValues(
            self._names,
            self._values,
            lambda *found: self._tell(owner, name, *found),
            list,
            lambda *found: self._refuse_write(f"{name} of {owner}", *found),
            self._buffers_beside,
        )
        told = self._instead(mode, lambda *found: self._tell_of_count(owner, name, *found))
        masters = written_into_masters(self._module, mode.written) if self._flattened else nullcontext()
        alone = (
            nullcontext() if name.startswith(PRE_HOOK) else self._in_flight.without_others(f"{name} of {owner}")
        )
        is_behind = name.startswith(POST_HOOK)
        settings = self._in_flight.with_settings(f"{name} of {owner}") if is_behind else nullcontext()
        with alone, settings, masters, told, reached_in_hooks(self._module, f"{name} of {owner}"):
            yield

    def of_progress_bar(self, bar: Any) -> Callable[[], AbstractContextManager[None]]:
        """Return what watches ``get_metrics`` of a progress bar each time, where the program wrote it."""
        if bar is None or is_librarys(bar.get_metrics):
            return nullcontext
        return lambda: self._sums_told(type(bar).__name__, "get_metrics")

    @contextmanager
    def _sums_told(self, owner: str, hook: str) -> Iterator[None]:
        """Tell of numbers that are made of several parameters meanwhile, and of nothing else."""

        def tell(found: str, names: Iterable[str]) -> None:
            if found in SUMS:
                self._tell(owner, hook, found, names)

        with self._instead(FollowedValues(self._names, self._values, tell, list)):
            yield

    @contextmanager
    def _instead(self, mode: FollowedValues | None, tell: Tell | None = None) -> Iterator[None]:
        """Follow values by ``mode`` meanwhile, and by nothing else; tell of numbers by ``tell``."""
        before = self._mode
        if before is not None:
            before.__exit__(None, None, None)
        self._mode = mode
        try:
            with counts_told(self._optimizers(), tell), mode if mode is not None else nullcontext():
                yield
        finally:
            self._mode = before
            if before is not None:
                before.__enter__()

    def _of_schedule(self) -> AbstractContextManager[None]:
        """Watch a schedule's step, which may compute rates from weights or gradients."""
        configs = self._trainer.lr_scheduler_configs
        kind = type(configs[0].scheduler).__name__ if configs else "schedule"
        return self.of_optimizer("step", kind)

    def _hook_of(self, action: str) -> tuple[Any, str]:
        """Whose hook a context of the profiler is around, and its name; None: nobody's that is watched."""
        owner, hook = self._owners.of(action), action.rpartition(".")[2]
        is_hook = (hook.startswith("on_") and hook not in NOT_WATCHED) or hook in (
            "optimizer_step",
            "lr_scheduler_step",
        )
        if owner is None or not is_hook:
            return None, hook
        of = getattr(getattr(owner, hook), "__module__", None) or ""
        return (None if of.partition(".")[0] in OTHERS else owner), hook

    def _states_of(self, owner: Any, hook: str, place: str) -> Callable[[], list[int]]:
        if place not in self._states:
            self._states[place] = self._states_for_hook(owner, hook)
        return self._states[place]

    def _names(self) -> dict[int, str]:
        names = {id(weight): name for name, weight in self._module.named_parameters()}
        for optimizer in self._optimizers():
            for place, group in enumerate(getattr(optimizer, "param_groups", ())):
                for weight in group["params"]:
                    names.setdefault(id(weight), f"{FLAT}{place}")
            # What an optimizer keeps of a weight is as good as the weight: each rank has that of its own layers.
            for weight, kept in states_of(optimizer):
                if (name := names.get(id(weight))) is not None:
                    for value in kept.values():
                        if isinstance(value, Tensor) and (value.numel() > 1 or weight.numel() == 1):  # no count
                            self._values[value] = frozenset((name,))
        return names

    def _buffers_beside(self) -> dict[int, str]:
        """The names of the buffers that are in no layer, by ``id``."""
        return {
            id(buffer): f"{path}.{name}" if path else name
            for path, part in outside_pipeline(self._module)
            for name, buffer in part._buffers.items()
            if buffer is not None
        }

    def _tell(self, owner: str, hook: str, found: str, names: Iterable[str]) -> None:
        kind: str | None = found
        if found in (*SUMS, WHOLE_STATE):
            kind = found if is_of_the_user(sys._getframe()) else None
        elif found in (GRADIENT, NO_GRADIENT):
            kind = self._kind_of_gradient(hook, is_there=found == GRADIENT)
        elif found == RANDOM:
            kind = None if goes_by_names(sys._getframe(), names) else found
        if kind is None or not (self._is_cut or found in (GRADIENT, NO_GRADIENT)):
            return
        shown = sorted(set(names))
        place = f"{hook} of {owner}"
        sentence = kind.format(place=place, names=", ".join(shown[:3]))
        if kind == AFTER_THE_CLOSURE:
            raise self._refusal(sentence)
        known_by = owner if kind == WHOLE_STATE else place  # one line for all hooks of an average
        self._tell_once(f"{known_by}: {(SEVERAL if kind == NUMBERS_OF_SEVERAL else kind)[:30]}", sentence)

    def _refuse_write(self, place: str, written: frozenset[str], by: frozenset[str]) -> None:
        """Refuse what would make a teacher, or another copy of the model, of a part of the model on each rank.

        Raises:
            Exception: a weight beside the layers is changed by a weight of the layers.
        """
        pipeline = pipeline_of(self._module)
        if pipeline is None or not self._is_cut or not is_of_the_user(sys._getframe()):
            return
        of_layers = {id(weight) for weight in pipeline.parameters()}
        named = dict(self._module.named_parameters())
        beside = {name for name, weight in named.items() if id(weight) not in of_layers}
        target = sorted(written & (beside | set(self._buffers_beside().values())))
        source = sorted(name for name in by if name in named and id(named[name]) in of_layers)
        if target and source:
            raise self._refusal(COPY_OF_A_PART.format(place=place, target=target[0], source=source[0]))

    def _tell_of_count(self, owner: str, hook: str, kind: str, number: int) -> None:
        place = f"{hook} of {owner}"
        self._tell_once(f"{place}: {kind[:60]}", kind.format(place=place, number=number))

    def _tell_once(self, key: str, sentence: str) -> None:
        if key not in self._told:
            self._told.add(key)
            if self._trainer.global_rank == 0:
                warn_once(f"hook/{key}", sentence)
            else:
                self._untold[key] = sentence

    def _tell_untold(self, sentences: Mapping[str, str]) -> None:
        for key, sentence in list(sentences.items()):
            if self._untold.pop(key, None) is not None:
                warn_once(f"hook/{key}", sentence)

    def _kind_of_gradient(self, hook: str, *, is_there: bool) -> str | None:
        """What is told of a look at a gradient in ``hook``."""
        if hook in WITH_GRADIENTS:
            return IN_BUFFERS if self._flattened else None
        if is_there or clears_gradients(sys._getframe()):
            return None
        if hook == "optimizer_step":
            return AFTER_THE_CLOSURE if self._step_is_made else None
        if not self._trainer.global_step:
            return None
        if hook.startswith(PRE_HOOK):
            return CLEARED_BEFORE
        return CLEARED if hook in AFTER_A_STEP else None
