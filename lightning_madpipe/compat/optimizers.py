"""The user's optimizer and scheduler, on the parameters that one rank of a pipeline has."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_partition.code_names import is_installed
from deepspeed_partition.engine.pipeline.own_optimizers import TrialError, why_not_in_parts
from deepspeed_partition.engine.runtime.environment import announce, warn_once
from deepspeed_partition.profiling.attributes import PLAIN
from lightning_madpipe.compat.source_lines import line_of_method

ENDED_WITH_FIT = (
    "trainer.optimizers has none: that of fit ended when this evaluation began, for a pipeline has one engine at "
    "a time. Keep what is to be read of it, such as a rate, in an attribute in on_train_end"
)
"""What is said to whoever asks for an optimizer after fit."""
OWN_PACKAGES = ("lightning_madpipe", "deepspeed_partition")
ONE_OF_EACH = "a pipeline works with one optimizer and at most one scheduler"
MOST_NAMED = 3
ONE_OF_SEVERAL = (
    "of torch.optim.lr_scheduler, ChainedScheduler makes one of schedulers that step together, SequentialLR one "
    "of those that follow each other, and LambdaLR takes any function of the step"
)
NEED_SHAPES = ("Adafactor", "Muon")
"""Optimizers of torch whose update of a matrix is not that of its elements."""


class EndedOptimizers(list[Any]):
    """No optimizers, where a fit of the same Trainer has had some: whoever takes one is told why there is none.

    It stands for ``trainer.optimizers`` and for ``self.optimizers()``, which is the one itself where there is one.
    """

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return []
        raise IndexError(ENDED_WITH_FIT)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # which Python and libraries ask anything for
            raise AttributeError(name)
        raise AttributeError(f"no {name}: {ENDED_WITH_FIT}")

    def __iter__(self) -> Iterator[Any]:
        asking = sys._getframe(1).f_globals.get("__name__") or ""
        if asking.partition(".")[0] not in OWN_PACKAGES and not is_installed(asking):
            warn_once("optimizers ended", ENDED_WITH_FIT)
        return super().__iter__()


def configured_optimizer(
    configure: Callable[[Any], tuple[list[Any], list[Any]]],
    module: Any,
    local: set[nn.Parameter],
    *,
    flattened: bool,
) -> tuple[torch.optim.Optimizer, Any, list[tuple[dict[str, Any], list[Any]]]]:
    """The optimizer of ``module.configure_optimizers()``, with this rank's parameters in its groups.

    Args:
        configure: Lightning's reader of all that ``configure_optimizers()`` may return.
        local: The parameters of this rank's stage.
        flattened: Whether DeepSpeed will give the optimizer one flat tensor per group.

    Returns:
        The optimizer, the configuration of its scheduler or None, and its groups, each with the parameters of all
        ranks that it was given.

    Raises:
        ValueError: several optimizers or schedulers, or an optimizer that a pipeline cannot drive.
    """
    line = line_of_method(module, "configure_optimizers")
    where = f" ({line})" if line else ""
    try:
        optimizers, schedulers = configure(module)
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        # Lightning's advice, manual optimization, would be refused here.
        raise ValueError(f"configure_optimizers returns several optimizers{where}: {ONE_OF_EACH}") from None
    if len(optimizers) > 1:  # with manual optimization
        raise ValueError(f"configure_optimizers returns {len(optimizers)} optimizers{where}: {ONE_OF_EACH}")
    if len(schedulers) > 1:
        raise ValueError(
            f"configure_optimizers returns {len(schedulers)} schedulers{where}: {ONE_OF_EACH}; {ONE_OF_SEVERAL}"
        )
    optimizer = optimizers[0]
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError("configure_optimizers returns no optimizer with parameters: return one, to train")
    if flattened and type(optimizer).__name__ in NEED_SHAPES:
        raise ValueError(
            f"configure_optimizers returns {type(optimizer).__name__}, which looks at the shape of each "
            "parameter, and DeepSpeed's ZeRO, bf16 and fp16 optimizers flatten them: use precision='32-true' and "
            "stage=0, or another optimizer"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"configure_optimizers returns {type(optimizer).__name__}: a pipeline works with a torch "
            "optimizer whose step needs no closure"
        )
    _refuse_what_needs_all(optimizer, local, flattened)
    given = [(group, list(group["params"])) for group in optimizer.param_groups]
    # Groups may name layers that run elsewhere, such as self.head.parameters().
    for group in optimizer.param_groups:
        kept = [weight in local for weight in group["params"]]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [value for value, is_here in zip(group[key], kept, strict=True) if is_here]
    for weight in [weight for weight in optimizer.state if weight not in local]:
        del optimizer.state[weight]  # such as Adagrad's, which are there from the beginning
    return optimizer, schedulers[0] if schedulers else None, given


def refuse_weights_of_nobody(
    given: Sequence[tuple[dict[str, Any], Sequence[Tensor]]], known: Collection[Tensor]
) -> None:
    """Refuse what no rank would train: tensors in an optimizer's groups that no module of this run has.

    Args:
        given: The groups, each with all that ``configure_optimizers()`` has put into it.
        known: The parameters of the LightningModule and of the layers of all ranks.

    Raises:
        ValueError: there is one that one process would train.
    """
    for number, (_, weights) in enumerate(given):
        lost = [weight for weight in weights if weight.requires_grad and weight not in known]
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise ValueError(
                f"configure_optimizers puts a tensor of shape {tuple(lost[0].shape)}{more} into group {number} "
                "that is a parameter neither of a layer nor of the LightningModule, and a pipeline would not "
                "train it: let a layer have it as an nn.Parameter, and return what the loss needs"
            )


def _refuse_what_needs_all(optimizer: torch.optim.Optimizer, local: set[nn.Parameter], flattened: bool) -> None:
    is_cut = any(weight not in local for group in optimizer.param_groups for weight in group["params"])
    if not is_cut and not flattened:
        return
    try:
        reason = why_not_in_parts(optimizer, flattened=flattened)
    except TrialError as error:
        announce(
            f"configure_optimizers returns {type(optimizer).__name__}, and whether it updates each parameter by "
            f"itself could not be tried before the first step: {error}. If it does not, each rank makes other "
            "steps than one process",
            logging.WARNING,
        )
        return
    if reason is not None:
        raise ValueError(reason)


def tell_of_zeros(module: Any, weights: Sequence[nn.Parameter]) -> None:
    """Say once that weights without a gradient are not left as they are.

    Args:
        module: The LightningModule.
        weights: This rank's that a step has computed no gradient of.
    """
    wanted = {id(weight) for weight in weights}
    names = [name for name, weight in module.named_parameters() if id(weight) in wanted]
    if names:
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        warn_once(
            "zeros for none",
            f"a step has computed no gradient of {', '.join(names[:MOST_NAMED])}{more}. One process leaves such "
            "weights as they are; under stage=1, bf16 and fp16 DeepSpeed's optimizers take zeros for it, so that "
            "weight decay shrinks them, and momentum moves them on: freeze weights that nothing uses, or use "
            "precision='32-true' with stage=0, which leaves them",
        )


def settings_of(optimizers: Iterable[Any]) -> dict[tuple[int, str], Any]:
    """The settings of all parameter groups that are plain values, by the number of the group and their names."""
    found: dict[tuple[int, str], Any] = {}
    for number, group in enumerate(group for optimizer in optimizers for group in optimizer.param_groups):
        for name, value in group.items():
            if name == "params":
                continue
            if type(value) in PLAIN or _is_of_plain(value):
                found[number, name] = value
            elif isinstance(value, Tensor) and value.numel() == 1:  # the rate of a capturable optimizer
                found[number, name] = value.item()
    return found


def _is_of_plain(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(type(each) in PLAIN for each in value)
