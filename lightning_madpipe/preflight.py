"""What keeps a run from beginning, told in one error, and what it does otherwise than its user may expect."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.nn.parameter import is_lazy

from deepspeed_partition.planner.units import counted
from lightning_madpipe.checkpoint.watched_copies import refusals_of_averages
from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.compat.number_types import refusals_of_types
from lightning_madpipe.compat.optimizers import configured_optimizer
from lightning_madpipe.compat.unsupported import (
    all_at_once,
    notes_on,
    notes_on_hooks,
    refusals_of,
    refusals_of_callbacks,
    refusals_of_hooks,
    refusals_of_normalization,
    refusals_of_renormalized_ties,
    steps_with_iterators,
)
from lightning_madpipe.module import PipelineCall, named_owners, pipeline_of
from lightning_madpipe.settings import fewer_stages
from lightning_madpipe.spread_model import layers_of
from lightning_madpipe.steps.unlike_ranks import layers_that_ask


def refuse_programs_without_file(lightning: Lightning, num_processes: int) -> None:
    """Refuse to start the other processes of a program that has no file, or is not found by its name any more.

    Lightning starts each with the command of the first one: they would end at once, or begin another program.

    Raises:
        MisconfigurationException: there are several processes, and no file where the command is run.
    """
    if num_processes < 2:
        return
    main = sys.modules["__main__"]
    of_module = getattr(main, "__spec__", None) is not None  # python -m
    if of_module or Path(sys.argv[0]).is_file() or _hydra_finds_file():
        return
    otherwise = f"or start it with torchrun --nproc_per_node={num_processes}"
    file = getattr(main, "__file__", None)
    if file is not None and Path(file).name == Path(sys.argv[0]).name:
        raise lightning.refusal(
            f"this program was started as {sys.argv[0]}, which is no file in {Path.cwd()}, and the other "
            "processes of a pipeline are started by that name, from there: start it by its absolute path where it "
            f"changes its folder (os.chdir), {otherwise}"
        )
    raise lightning.refusal(
        "this program has no file (it came with python -c, or from standard input), and the other processes "
        f"of a pipeline are started with it: write it to a file, {otherwise}"
    )


def _hydra_finds_file() -> bool:
    """Whether Hydra runs the program: Lightning then starts the others in the folder where the first one began."""
    config = sys.modules.get("hydra.core.hydra_config")
    return config is not None and config.HydraConfig.initialized()


def refuse_notebooks(lightning: Lightning, num_nodes: int) -> None:
    """Refuse a notebook whose ranks cannot be forked from it.

    Raises:
        MisconfigurationException: the system forks no processes, or there are several machines.
    """
    if "fork" in multiprocessing.get_all_start_methods() and num_nodes == 1:
        return
    why = "on several machines" if num_nodes > 1 else "where no processes can be forked"
    raise lightning.refusal(
        f"a notebook cannot start the other processes of a pipeline {why}: write the cell to a file (%%writefile "
        "train.py) and run it (!python train.py)"
    )


def refuse_callbacks(trainer: Any, module: Any, lightning: Lightning) -> None:
    """Refuse a fit with callbacks that cannot run, before their own setup hooks speak of a DeepSpeed strategy.

    Raises:
        MisconfigurationException: all reasons against the fit that are known so early.
    """
    callbacks = lightning.module("callbacks")
    if trainer.state.fn == "fit" and any(True for _ in refusals_of_callbacks(trainer, callbacks)):
        reasons = list(refusals_of(trainer, module, lightning.module_class, callbacks))
        raise lightning.refusal(all_at_once(type(module).__name__, reasons))


def refuse_what_cannot_run(
    trainer: Any,
    module: Any,
    lightning: Lightning,
    *,
    num_stages: Callable[[], int],
    num_processes: int,
    flattened: bool,
    captured: Callable[[], PipelineCall],
) -> None:
    """Give all reasons against a run at once, before anything is built.

    Args:
        num_stages: Returns the stages of the pipeline, asked for when layers are looked at.
        num_processes: All processes of the run.
        flattened: Whether DeepSpeed puts an optimizer of its own around the user's.
        captured: Finds the layers of a module that does not name them.

    Raises:
        MisconfigurationException: the reasons.
    """
    fitting = trainer.state.fn == "fit"
    refuse_weights_without_shapes(module, lightning)
    reasons = list(refusals_of(trainer, module, lightning.module_class, lightning.module("callbacks")))
    if fitting:
        replicated = num_processes > num_stages()
        precision = trainer.strategy.precision_plugin.precision
        reasons += refusals_of_types(module, precision, flattened=flattened, replicated=replicated)
    averages = list(refusals_of_averages(module, named_owners(module))) if fitting else []
    # A step that steps its optimizers, or reads its batch, cannot be run to find what it calls.
    runs = module.automatic_optimization and not steps_with_iterators(trainer, module)
    is_found = runs or hasattr(module, "pipeline_layers")
    reasons += averages or (_refusals_of_layers(module, num_stages(), num_processes, captured) if is_found else [])
    if reasons and fitting:
        reasons += _refusals_of_optimizer(module, lightning, flattened)
    if reasons:
        raise lightning.refusal(all_at_once(type(module).__name__, reasons))


def refuse_weights_without_shapes(module: Any, lightning: Lightning) -> None:
    """Refuse weights that the first batch is to make, as those of ``nn.LazyLinear``: layers are spread before it.

    Raises:
        MisconfigurationException: there are some.
    """
    lazy = [f"self.{name}" for name, weight in module.named_parameters() if is_lazy(weight)]
    lazy += [f"self.{name}" for name, buffer in module.named_buffers() if is_lazy(buffer)]
    if lazy:
        others = f" and {len(lazy) - 1} more" if len(lazy) > 1 else ""
        raise lightning.refusal(
            f"{lazy[0]}{others} of {type(module).__name__} has no shape before a first batch, and a pipeline "
            "spreads layers before that: run the module on one batch before fit, from the same random numbers in "
            "all processes, as by `with torch.no_grad(): module(x)`, or name sizes (nn.Linear for nn.LazyLinear)"
        )


def _refusals_of_layers(
    module: Any, num_stages: int, num_processes: int, captured: Callable[[], PipelineCall]
) -> list[str]:
    try:
        call = layers_of(module, captured)
    except ValueError as error:
        return list(error.args)
    num_layers = len(call.layers)
    reasons = [
        *refusals_of_normalization(module, num_stages),
        *refusals_of_renormalized_ties(module, call, num_stages),
        *refusals_of_hooks(module, call),
    ]
    if num_layers < num_stages:
        why = call.captured.why_few if call.captured is not None else ""
        reasons.append(
            f"{type(module).__name__} has {counted(num_layers, 'pipeline layer')} for {num_stages} stages"
            f"{f' ({why})' * bool(why)}: "
            f"{fewer_stages(num_layers, num_processes)}; or name finer layers in pipeline_layers()"
        )
    return reasons


def _refusals_of_optimizer(module: Any, lightning: Lightning, flattened: bool) -> list[str]:
    """What else would be refused, where the run is refused anyway."""
    configure = lightning.module("core.optimizer")._init_optimizers_and_lr_schedulers
    try:
        configured_optimizer(configure, module, set(module.parameters()), flattened=flattened)
    except ValueError as error:
        return [str(error)]
    except Exception as error:  # the user's code, in a run that does not begin
        return [f"configure_optimizers raises {type(error).__name__}: {error}"]
    return []


def notes_on_fit(trainer: Any, module: Any, lightning: Lightning) -> list[str]:
    """What a fit does otherwise than its user may expect, one sentence each."""
    pipeline, classes = pipeline_of(module), (lightning.module_class, lightning.module("callbacks").Callback)
    defaults = [each.on_before_backward for each in classes]
    with pipeline.elsewhere.lifted():
        hooks = list(notes_on_hooks(module, pipeline.call_of_module))
        hooks += layers_that_ask(module, pipeline.elsewhere.inside) if pipeline.num_stages > 1 else ()
    return [*notes_on(trainer, module, defaults), *hooks]
