"""What a step may not change: the optimizer's settings, the weights, and which of them are trained.

A step runs on the last stage, once for each micro-batch, and up to its call of ``forward`` on the first one. A
rate that it sets reaches that rank's optimizer alone, and one that it multiplies is multiplied for each
micro-batch; weights that it clamps are those of the last stage, and averages that it puts in their place for the
call never leave those of the first one. Layers that it unfreezes train on its rank alone, from the next
micro-batch on, and of weights that layers share one copy. A hook does these once, on every rank.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from deepspeed_partition.kept_weights import marks_of
from lightning_madpipe.module import pipeline_of

FIRST_LOOKS, MANY_LOOKS = 4, 512
STRIDE, STRIDE_LATER = 17, 127
"""The values of the weights are compared in the first steps of an epoch or an evaluation, in each 17th then,
and in each 127th behind many: torch counts no change of ``weight.data``, and an average is the weights at first.
These are odd, for of the micro-batches of a batch one alone may differ."""


class InputTaken(BaseException):
    """Ends a step at the pipeline's call; no ``except Exception`` of the user's may stop it."""


class LeftUntouched:
    """Refuses steps that change the settings of an optimizer or weights of this rank.

    Args:
        module: The LightningModule.
        error: The host's exception for what cannot run on a pipeline.
    """

    def __init__(self, module: Any, error: Callable[[str], Exception]) -> None:
        self._module, self._error = module, error
        self._looks: dict[str, tuple[Any, int]] = {}
        """For each step, what runs, and how often it has been looked at in that."""
        self._written: set[str] = set()
        """The weights that steps have written in a later micro-batch: their values are compared from then on."""

    @contextmanager
    def by(self, step: str) -> Iterator[None]:
        """Look at them around a step.

        Raises:
            Exception: the host's: it changes them; the sentence names the setting or the weight, and the way out.
        """
        optimizers = self._module.trainer.optimizers
        settings = list(_settings(optimizers))
        is_close = self._looks_closely(step)
        weights = dict(self._module.named_parameters())
        before = marks_of(list(weights.values()), values=is_close)
        has_ended = False
        try:
            with self.frozen_for_the_batch(step):
                yield
            has_ended = True
        except InputTaken:
            has_ended = True
            raise
        finally:
            # Also where the step ends at its call of the layers, and where a trial comes before the step itself.
            changed = [old for old, new in zip(settings, _settings(optimizers), strict=False) if old != new]
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            for number, name, value in changed:
                if not isinstance(groups[number][name], Tensor):
                    groups[number][name] = value
            if has_ended:
                self._refuse_weights(step, weights, before, is_close)
        if changed:
            number, name, value = changed[0]
            raise self._error(
                f"{step} changes {name!r} of parameter group {number} of the optimizer (it was {value}), and in a "
                "pipeline a step runs on some ranks, once per micro-batch: change it in a hook, such as "
                "on_train_batch_start, or by a schedule that configure_optimizers returns"
            )

    @contextmanager
    def frozen_for_the_batch(self, step: str, *, is_cut: bool = True) -> Iterator[None]:
        """Look at which weights are trained around a step.

        Args:
            is_cut: Whether other ranks have some of the layers; else one stage trains the batch in parts.

        Raises:
            Exception: the host's: it freezes or unfreezes one.
        """
        optimizers = self._module.trainer.optimizers
        # Those of layers, and those that are given to the optimizer; nobody trains the rest.
        given = {id(weight) for each in optimizers for group in each.param_groups for weight in group["params"]}
        pipeline = pipeline_of(self._module)
        given.update(map(id, () if pipeline is None else pipeline.parameters()))
        weights = {name: weight for name, weight in self._module.named_parameters() if id(weight) in given}
        trained = {name: weight.requires_grad for name, weight in weights.items()}
        has_ended = False
        try:
            yield
            has_ended = True
        except InputTaken:
            has_ended = True
            raise
        finally:
            # Also where the step ends at its call of the layers, and where a trial comes before the step itself.
            turned = [name for name, was in trained.items() if weights[name].requires_grad != was]
            for name in turned:
                weights[name].requires_grad_(trained[name])
            if has_ended and turned:
                name = turned[0]
                raise self._error(
                    f"{step} sets requires_grad of {name} to {not trained[name]}, and in a pipeline a step runs "
                    + ("on some ranks, behind the layers of its micro-batch" if is_cut else "once per micro-batch")
                    + ": freeze and unfreeze in a hook, which runs on every rank, such as on_train_epoch_start or "
                    + ("on_train_batch_start" if is_cut else "on_train_batch_start, or use num_micro_batches=1")
                    + (", or use a strategy that has the whole model on each device, such as 'ddp'" * is_cut)
                )

    @contextmanager
    def changed_once(self, step: str, *, is_first: bool) -> Iterator[None]:
        """Look at what one stage's step, which runs for each micro-batch, changes again behind the first one.

        Raises:
            Exception: the host's: it does, where one process changes it once for the batch.
        """
        with self.frozen_for_the_batch(step, is_cut=False):
            if is_first:
                yield
                return
            optimizers = self._module.trainer.optimizers
            settings = list(_settings(optimizers))
            weights = dict(self._module.named_parameters())
            is_close = self._looks_closely(step)
            looked_at = {name: each for name, each in weights.items() if is_close or name in self._written}
            before = marks_of(list(weights.values()), values=False)
            values = [mark[-1] for mark in marks_of(list(looked_at.values()))]
            yield
        changed = [old for old, new in zip(settings, _settings(optimizers), strict=False) if old != new]
        names = [f"{name!r} of parameter group {number} of the optimizer" for number, name, _ in changed]
        after = marks_of(list(weights.values()), values=False)
        self._written.update(name for name, was, now in zip(weights, before, after, strict=True) if was != now)
        # Those whose values are others now: the same ones may be set again.
        values_now = (mark[-1] for mark in marks_of(list(looked_at.values())))
        names += [name for name, was, now in zip(looked_at, values, values_now, strict=True) if was != now]
        if names:
            raise self._error(
                f"{step} changes {names[0]} again in the second micro-batch of a batch, and in one process once: "
                "change it in a hook, such as on_train_batch_start or on_train_batch_end, or set what all "
                "micro-batches of a batch set alike; or use num_micro_batches=1"
            )

    def _looks_closely(self, step: str) -> bool:
        """Whether the values of weights are compared in this step of an epoch, or of an evaluation."""
        trainer = self._module.trainer
        runs = trainer.current_epoch if step == "training_step" else (trainer.state.stage, trainer.global_step)
        before, number = self._looks.get(step, (None, 0))
        self._looks[step] = runs, number + 1 if runs == before else 1
        number = self._looks[step][1]
        return number <= FIRST_LOOKS or number % (STRIDE if number < MANY_LOOKS else STRIDE_LATER) == 0

    def _refuse_weights(
        self, step: str, weights: dict[str, nn.Parameter], before: list[Any], is_close: bool
    ) -> None:
        for name, was, mark in zip(
            weights, before, marks_of(list(weights.values()), values=is_close), strict=True
        ):
            if mark != was:
                raise self._error(
                    f"{step} changes {name}, and in a pipeline it has the weights of one stage only, once per "
                    f"micro-batch, and on the first stage it ends at its call of the layers: {_way_out(step)}"
                )


def _way_out(step: str) -> str:
    if step == "training_step":
        return "change them in a hook, such as on_train_batch_end, over self.parameters()"
    kind = step.removesuffix("_step")
    return f"change them in on_{kind}_epoch_start and back in on_{kind}_epoch_end, over self.parameters()"


def _settings(optimizers: Any) -> Iterator[tuple[int, str, Any]]:
    for number, group in enumerate(each for optimizer in optimizers for each in optimizer.param_groups):
        for name, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                yield number, name, float(value)
            elif isinstance(value, numbers.Number | str | tuple):
                yield number, name, value
