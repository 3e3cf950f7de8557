"""An optimizer that a program gives DeepSpeed, on the parameters that one rank of a pipeline has.

What the optimizer computes with several parameters together is that of the rank's own ones: a global norm in its
``step``, in a hook of it, or in a function that was put in its place. Plain DeepSpeed says nothing of it. A class
of the program's own is tried on small tensors. Hooks are told of once, and their ``clip_grad_norm_`` counts all
ranks, where a cut of MadPipe's runs in fp32 without ZeRO.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode

from deepspeed_partition.engine.pipeline.gradient_norms import GradientNorms
from deepspeed_partition.engine.pipeline.own_optimizers import TrialError, was_tried, why_not_in_parts
from deepspeed_partition.engine.pipeline.shared_weights import weights_of_nobody
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import announce, warn_here, warn_once
from deepspeed_partition.planner.units import counted

LIBRARIES = ("accelerate", "deepspeed", "deepspeed_partition", "lightning_madpipe", "torch", "transformers")
CLIPPING = "gradient_clipping of DeepSpeed's configuration"
DRAWN = (
    "draw for each parameter with a generator that is seeded by its name and the step, which is the same in one "
    "process and in a pipeline"
)
HOOKS_OF_A_PART = (
    "{names} of the optimizer ({kind}) runs on each rank with the parameters of its own stages: a norm, a sum or "
    "a decision over several of them covers one part only, and differs from rank to rank{norms}. What is done to "
    "each parameter by itself is as in one process. Else bring the ranks' parts together, as by "
    "torch.distributed.all_reduce"
)
NORMS_OF_ALL = "; torch.nn.utils.clip_grad_norm_ alone counts all ranks there"


SCHEDULE_OF_A_PART = (
    "the schedule of learning rates ({kind}) reads values of parameters, and each rank of the pipeline has those "
    "of its own stages: a rate that it computes from several of them covers one part only, and differs from rank "
    "to rank. Bring the ranks' parts together, as by torch.distributed.all_reduce, or let rates depend on the "
    "steps alone"
)
NUM_WATCHED = 3
"""Steps of a schedule that are watched."""


def listed_groups(given: Iterable[Any]) -> list[Any]:
    """``model_parameters`` whose generators are lists, as torch makes them: they are looked at before it does."""
    listed = list(given)
    for each in listed:
        if isinstance(each, dict) and not isinstance(each["params"], torch.Tensor):
            each["params"] = list(each["params"])
    return listed


def refuse_ranks_without_parameters(module: Any, given: Sequence[Any], optimizer: Any, config: Any) -> None:
    """Refuse ``model_parameters`` that have none of a rank, on which an optimizer could not start. Collective.

    Args:
        module: The pipeline module.
        given: The parameters, or groups of them, that the script gives on this rank.
        optimizer: What it gives as its optimizer.
        config: DeepSpeed's, as it is read.

    Raises:
        ValueError: there is such a rank, and another one has some; on every rank.
    """
    is_made = callable(optimizer) or (optimizer is None and config.optimizer_name is not None)
    number = len(weights_given(None, given))
    ranks = module._grid.get_pipe_parallel_group()
    trains = any(weight.requires_grad for weight in module.parameters())  # else the cut is refused, in other words
    mine = number, trains, module._local_start, module._local_stop
    of_ranks = gather_objects(mine, ranks) if is_made else []
    for rank, (count, wanted, first, last) in enumerate(of_ranks):
        if wanted and not count and any(other for other, *_ in of_ranks):
            raise ValueError(
                f"model_parameters has none of the parameters of stage {rank}, layers {first} to {last}, and an "
                "optimizer cannot start without: give it those of every stage, in a group with a rate of 0 where "
                "they shall stay (`{'params': [...], 'lr': 0.0}`), or freeze them before the pipeline module is "
                "built, which then cuts otherwise"
            )


def weights_given(optimizer: Any, model_parameters: Sequence[Any]) -> list[torch.nn.Parameter]:
    """The weights that a script gives to be trained on this rank, by its optimizer or as ``model_parameters``."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else model_parameters
    members = [each["params"] if isinstance(each, dict) else each for each in groups]
    given = [each for group in members for each in (group if isinstance(group, list) else [group])]
    # Pairs with names, as of named_parameters().
    return [each[1] if isinstance(each, tuple) else each for each in given]


def refuse_weights_of_nobody(engine: Any, weights: Sequence[torch.nn.Parameter]) -> None:
    """Refuse to train weights that no layer has, such as those of a loss that is a function. Collective.

    DeepSpeed sets no gradients to zero but those of its module's parameters, nor does it reduce others, and what
    it does not know does not move with the last layer. On a cut of DeepSpeed's own a warning says so.

    Args:
        weights: Those that the script gives to be trained on this rank.

    Raises:
        ValueError: some rank is given such ones; on every rank.
    """
    number, whose = weights_of_nobody(engine.module, weights)
    reason = None
    if number:
        reason = (
            f"the optimizer has {counted(number, 'weight')} {whose}, and neither a layer nor a loss_fn that is a "
            "module has them: DeepSpeed never sets their gradients to zero, and they stay behind where the last "
            "layer moves. Give the pipeline module the loss as a module, PipelineModule(..., loss_fn=criterion), "
            "whose weights go with the last layer, and the optimizer module.parameters(); or leave them out of it"
        )
    reason = next(filter(None, gather_objects(reason)), None)
    if reason is not None and engine.owns_cut:
        raise ValueError(reason)
    if reason is not None:
        announce(f"{reason}. The layers stay cut as DeepSpeed cuts them, and train so", logging.WARNING)


def refuse_what_needs_all(engine: Any) -> None:
    """Refuse an optimizer whose step of a parameter depends on the others. Collective.

    On a cut of DeepSpeed's own, which plain DeepSpeed would train alike, a warning says so.

    Raises:
        ValueError: on every rank, what a trial on any of them has found.
    """
    optimizer = engine.basic_optimizer
    if engine.num_stages == 1:
        return
    reason = None
    if isinstance(optimizer, torch.optim.Optimizer) and not _is_known(optimizer):
        returned = "the optimizer of the pipeline is {kind}, "
        try:
            reason = why_not_in_parts(
                optimizer, flattened=False, returned=returned, clipped=CLIPPING, drawn=DRAWN, with_closure=False
            )
        except TrialError as error:
            warn_here(
                f"whether the step of {type(optimizer).__name__} updates each parameter by itself could not be "
                f"tried ({error}). If it does not, each rank of the pipeline makes other steps than one process"
            )
    reason = next(filter(None, gather_objects(reason)), None)
    if reason is not None and engine.owns_cut:
        raise ValueError(reason)
    if reason is not None:
        announce(f"{reason}. The layers stay cut as DeepSpeed cuts them, and train so", logging.WARNING)


def _is_known(optimizer: Any) -> bool:
    return type(optimizer).__module__.partition(".")[0] in LIBRARIES or was_tried(optimizer)


class StepOfUser:
    """What a program lets the optimizer run beside the step of its class.

    Args:
        engine: A pipeline's.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._norms: GradientNorms | None = None
        self._has_looked = False
        self._num_watched = 0

    @contextmanager
    def over_all_ranks(self) -> Iterator[None]:
        """Let hooks clip by the norm over all ranks meanwhile, and say once what else they see. Collective."""
        self.look()
        with self._schedule_watched(), nullcontext() if self._norms is None else self._norms.over_all_ranks():
            yield

    @contextmanager
    def _schedule_watched(self) -> Iterator[None]:
        """Say once that a schedule reads the values of parameters, of which this rank has a part."""
        scheduler = self._engine.lr_scheduler
        step = getattr(scheduler, "step", None)
        own = getattr(scheduler, "__dict__", None)  # None of a class with slots alone
        if self._engine.num_stages == 1 or step is None or own is None or self._num_watched >= NUM_WATCHED:
            yield
            return
        self._num_watched += 1
        had = own.get("step")

        def watched(*arguments: Any, **keywords: Any) -> Any:
            with _Reads(self._engine.module.parameters()) as reads:
                result = step(*arguments, **keywords)
            if reads.found:
                kind = type(scheduler).__name__
                warn_once(f"schedule/{kind}", SCHEDULE_OF_A_PART.format(kind=kind))
            return result

        own["step"] = watched
        try:
            yield
        finally:
            own.pop("step")
            if had is not None:
                own["step"] = had

    @property
    def brings_norms_together(self) -> bool:
        """Whether hooks run in a step that clip by the norm over all ranks, which wait for one another for it."""
        return self._norms is not None

    def look(self) -> None:
        """Look once at what else runs in the optimizer's step, and say it. Collective."""
        if self._has_looked:
            return
        self._has_looked = True
        engine, optimizer = self._engine, self._engine.basic_optimizer
        if engine.num_stages == 1:
            return
        names = next(filter(None, gather_objects(run_by(optimizer))), None)
        if names is None:
            return
        counts_all = engine.owns_cut and engine.optimizer is optimizer
        norms = NORMS_OF_ALL if counts_all else ""
        kind = type(optimizer).__name__
        announce(HOOKS_OF_A_PART.format(names=", ".join(names), kind=kind, norms=norms), logging.WARNING)
        if counts_all:
            self._norms = GradientNorms(
                engine.module.parameters,
                engine.grid,
                flattened=False,
                refusal=RuntimeError,
                is_elsewhere=lambda _: False,
                clips=CLIPPING,
            )


class _Reads(TorchFunctionMode):
    """Notes whether code asks parameters for more than their form."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known = {id(parameter) for parameter in parameters}
        self.found = False

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(function, "__self__", None), "__name__", name)
        if name not in FORMS and not self.found:
            of_lists = (each for value in arguments if isinstance(value, list | tuple) for each in value)
            self.found = any(id(value) in self._known for value in (*arguments, *of_lists))
        return function(*arguments, **(keywords or {}))


FORMS = frozenset((
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "size", "dim", "numel",
    "element_size", "is_floating_point", "__len__", "__hash__",
))  # fmt: skip
"""What says nothing of a parameter's values."""


def run_by(optimizer: Any) -> list[str]:
    """The hooks of an optimizer's step, and what replaced the step, that no library has set, in words.

    torch (2.4 to 2.13) keeps them in these attributes.
    """
    found = []
    tables = {
        "the step pre hook": ("_global_optimizer_pre_hooks", "_optimizer_step_pre_hooks"),
        "the step post hook": ("_global_optimizer_post_hooks", "_optimizer_step_post_hooks"),
    }
    for kind, (of_all, own) in tables.items():
        for hook in (*getattr(torch_optimizer, of_all, {}).values(), *getattr(optimizer, own, {}).values()):
            if not is_of_library(hook):
                found.append(f"{kind} {name_of_function(hook)}")
    step = getattr(optimizer, "__dict__", {}).get("step")
    step = getattr(step, "__wrapped__", step)  # a schedule's counter of steps is around it
    if step is not None and step is not type(optimizer).step and not is_of_library(step):
        found.append(f"the replaced step {name_of_function(step)}")
    return found


def is_of_library(function: Any) -> bool:
    """Whether a function, or the class of an object that is called, is torch's, a host's or ours."""
    named = _inner(function)
    named = named if hasattr(named, "__qualname__") else type(named)
    return (getattr(named, "__module__", None) or "").partition(".")[0] in LIBRARIES


def name_of_function(function: Any) -> str:
    """How a program calls a function: its name without the functions around it, or its class."""
    named = _inner(function)
    return getattr(named, "__qualname__", type(named).__name__).rpartition("<locals>.")[2]


def _inner(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function
