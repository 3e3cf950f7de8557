"""What the strategy cannot do, said before anything is built."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from deepspeed_partition.code_names import CodeSearch, is_installed, is_librarys
from deepspeed_partition.module_hooks import MODULE_HOOKS
from deepspeed_partition.planner.weight_versions import FLUSH, TWO_VERSIONS
from lightning_madpipe.compat.remote_paths import NOT_ELSEWHERE, is_elsewhere
from lightning_madpipe.compat.running_code import OTHERS
from lightning_madpipe.compat.source_lines import line_that_sets
from lightning_madpipe.module import PipelineCall, outside_pipeline

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")

ENGINE_HOOKS = ("backward", "configure_gradient_clipping", "optimizer_zero_grad")
"""Hooks of a LightningModule whose work the pipeline engine does, so that they would never be called."""

CLIPPED_BY_HOOKS = (
    ", and clip by gradient_clip_val; by a value that changes, in on_before_optimizer_step by "
    "torch.nn.utils.clip_grad_norm_"
)

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks of a LightningModule or its LightningDataModule that each batch goes through before its step."""

VALIDATION_HOOKS = (
    "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end",
    "on_validation_epoch_end", "on_validation_end",
)  # fmt: skip
"""Hooks that may read what training has logged before."""

CALLBACKS = {
    "BaseFinetuning": (
        "freezes and unfreezes layers while training runs, and the engine takes the parameters to train before "
        "its first step",
        "fit with the backbone frozen (requires_grad_(False)), unfreeze it, and fit again",
    ),
    "GradientAccumulationScheduler": (
        "ends a run with a strategy of DeepSpeed's, as this one is for Lightning",
        "set trainer.accumulate_grad_batches in on_train_epoch_start of a callback of your own, which works",
    ),
    "StochasticWeightAveraging": (
        "averages a copy of the whole model, of which each rank has one stage",
        "average the weights of several checkpoints after fit",
    ),
    "WeightAveraging": (
        "averages a copy of the whole model, of which each rank has one stage, and the fp32 weights of bf16 and "
        "ZeRO-1 lie elsewhere",
        "leave it out",
    ),
    "ModelPruning": (
        "puts masks in the place of weights after the optimizer took them, and compares weights of all stages",
        "leave it out",
    ),
}
"""Callbacks that Lightning ships, with what keeps them from working, and the way out.

Lightning refuses the first three for every DeepSpeed strategy, in words about a strategy that nobody chose."""

STEPS_OF_RUNS = {
    "fit": ("training_step", "validation_step"), "validate": ("validation_step",), "test": ("test_step",),
    "predict": ("predict_step",),
}  # fmt: skip
"""The steps that a run may make, by the Trainer's function."""


def refusals_of(trainer: Any, module: Any, base: type, callbacks: Any) -> Iterator[str]:
    """Yield every reason why ``trainer`` cannot run ``module``, one sentence each.

    Args:
        base: The LightningModule class, to tell which hooks ``module`` overrides.
        callbacks: Lightning's module of callbacks.
    """
    strategy, name = trainer.strategy, type(module).__name__
    precision = strategy.precision_plugin.precision
    if precision not in PRECISIONS:
        yield (
            f"precision={precision!r} is not available with the madpipe strategy: use one of {_list(PRECISIONS)}"
        )
    if precision.startswith("16") and not get_accelerator().is_fp16_supported():
        yield (
            f"precision={precision!r} needs a device that DeepSpeed trains on in fp16, and this "
            f"{get_accelerator().device_name()} is none: use 'bf16-mixed'"
        )
    if strategy._layer_sync is not None:
        yield (
            "sync_batchnorm is not available with the madpipe strategy, whose micro-batches pass a stage one "
            "after the other: leave it out"
        )
    for step in steps_with_iterators(trainer, module):
        yield (
            f"{step}() of {name} takes dataloader_iter, and in a pipeline the batch of a step is there before it, "
            f"to be cut into micro-batches: write {step}(self, batch, batch_idx)"
        )
    if trainer.state.fn == "fit":
        yield from _refusals_of_training(trainer, module, base, name)
        yield from refusals_of_callbacks(trainer, callbacks)


def steps_with_iterators(trainer: Any, module: Any) -> list[str]:
    """The steps of a run that take their batches from an iterator by themselves."""
    steps = list(STEPS_OF_RUNS.get(trainer.state.fn, ()))
    if trainer.state.fn == "fit" and not trainer.enable_validation:
        steps.remove("validation_step")
    return [step for step in steps if "dataloader_iter" in inspect.signature(getattr(module, step)).parameters]


def all_at_once(name: str, reasons: Sequence[str]) -> str:
    """One text of all ``reasons`` against running the module of class ``name``."""
    if len(reasons) == 1:
        return reasons[0]
    listed = "".join(f"\n  {number}. {reason}" for number, reason in enumerate(reasons, start=1))
    return f"{len(reasons)} things keep {name} from running under the madpipe strategy:{listed}"


def _refusals_of_training(trainer: Any, module: Any, base: type, name: str) -> Iterator[str]:
    if not module.automatic_optimization:
        line = line_that_sets(module, "automatic_optimization") or "set outside its methods"
        yield (
            f"{name} uses manual optimization ({line}), and with a pipeline the engine runs backward and the "
            "optimizer: leave automatic_optimization = True"
        )
    yield from _refusals_without_drain(trainer)
    if trainer.gradient_clip_val and clips_by_value(trainer) and trainer.strategy.wraps_optimizer:
        yield (
            "gradient_clip_algorithm='value' works in 32-true with stage=0 only, because DeepSpeed's ZeRO, bf16 "
            "and fp16 optimizers clip by norm: clip by 'norm'"
        )
    for hook in ENGINE_HOOKS:
        own = getattr(type(module), hook)
        if own is not getattr(base, hook) and not _only_clears_gradients(own):
            yield (
                f"{name} overrides {hook}(), whose work the pipeline engine does: leave it out"
                + CLIPPED_BY_HOOKS * (hook == "configure_gradient_clipping")
            )


def _only_clears_gradients(hook: Any) -> bool:
    """Whether a hook does what the engine does: ``optimizer.zero_grad()``, also with ``set_to_none=True``."""
    code = getattr(hook, "__code__", None)
    if code is None or code.co_names != ("zero_grad",):
        return False
    if any("JUMP" in each.opname for each in dis.get_instructions(code)):
        return False
    rest = [each for each in code.co_consts if each is not None and each is not True]
    return all(each in (hook.__doc__, ("set_to_none",)) for each in rest)


def _refusals_without_drain(trainer: Any) -> Iterator[str]:
    """Yield what a pipeline that never drains cannot do, where it is one."""
    strategy, mode = trainer.strategy, trainer.strategy.asked_weight_versions
    if mode != FLUSH and strategy.precision_plugin.precision.startswith("16"):
        yield (
            f"weight_versions {mode!r} is not available in fp16, where the scale of the loss depends on the step "
            "before: use 'bf16-mixed' or '32-true', or leave weight_versions out"
        )
    zero = strategy.config.get("zero_optimization", {}).get("stage", 0)
    if mode == TWO_VERSIONS and zero and trainer.gradient_clip_val:
        yield (
            "weight_versions '2bw' with gradient_clip_val clips by the norm of all stages, for which steps come "
            "later, and stage=1 has room for the gradients of one batch: use stage=0, or clip nothing, or use "
            "weight_versions 'stashing'"
        )


def refusals_of_callbacks(trainer: Any, callbacks: Any) -> Iterator[str]:
    """Yield why callbacks of ``trainer`` cannot run, one sentence each."""
    for callback in trainer.callbacks:
        kind = type(callback).__name__
        for name, (reason, way_out) in CALLBACKS.items():
            if isinstance(callback, getattr(callbacks, name, ())):  # some are newer than the oldest Lightning
                yield f"the callback {kind} is not available with a pipeline, because it {reason}: {way_out}"
        if isinstance(callback, callbacks.LearningRateFinder) and trainer.strategy.wraps_optimizer:
            yield (
                "the learning-rate finder works in 32-true with stage=0 only, because its schedulers do not know "
                "DeepSpeed's ZeRO, bf16 and fp16 optimizers: find the rate there, and give it to this run"
            )
        writes_folders = isinstance(callback, callbacks.Checkpoint) and not _saves_weights_only(callback)
        if writes_folders and is_elsewhere(getattr(callback, "dirpath", None) or ""):
            yield f"{kind} would write DeepSpeed's folders to {callback.dirpath}: {NOT_ELSEWHERE}"
        io = trainer.strategy.checkpoint_io_plugin
        if io is not None and isinstance(callback, callbacks.ModelCheckpoint) and writes_folders:
            yield (
                f"{kind} would write DeepSpeed's folders past the plugin {type(io).__name__}: give it "
                "save_weights_only=True, or leave the plugin out"
            )


def _saves_weights_only(callback: Any) -> bool:
    return bool(getattr(callback, "save_weights_only", False))


def clips_by_value(trainer: Any) -> bool:
    """Whether ``gradient_clip_val`` bounds each element of the gradients, and not their norm."""
    return trainer.gradient_clip_algorithm == "value"


def clipping_changed(value: Any, algorithm: Any, value_now: Any, algorithm_now: Any) -> str:
    """What is said where a hook changes how gradients are clipped, which the engine takes when fit begins."""
    was, now = f"gradient_clip_val was {value}", f"{value_now}"
    if (algorithm or "norm") != (algorithm_now or "norm"):
        was, now = f"gradient_clip_algorithm was {algorithm or 'norm'!r}", repr(algorithm_now or "norm")
    by_hand = "torch.nn.utils.clip_grad_norm_ in on_before_optimizer_step"
    if algorithm_now == "value":
        by_hand = (
            "torch.nn.utils.clip_grad_value_ in on_before_optimizer_step, with precision='32-true', stage=0 and "
            "no clipping of the Trainer's"
        )
    return (
        f"trainer.{was} when fit began and is {now} now, and the pipeline's engine clips by the first: give the "
        f"Trainer the value before fit, or call {by_hand}"
    )


def notes_on(trainer: Any, module: Any, defaults: Collection[Any]) -> Iterator[str]:
    """What runs otherwise than the user may expect, one sentence each.

    Args:
        defaults: Lightning's own ``on_before_backward``, of modules and of callbacks.
    """
    owners = (module, *trainer.callbacks)
    hooks = [(type(owner).__name__, owner.on_before_backward) for owner in owners]
    deaf = _once(name for name, hook in hooks if getattr(hook, "__func__", hook) not in defaults)
    if deaf:
        yield f"on_before_backward of {_list(deaf)} is not called: a pipeline runs many backwards in each step"
    hooks = [(type(owner).__name__, owner.on_before_zero_grad) for owner in owners]
    early = _once(name for name, hook in hooks if not is_librarys(hook))
    if early:
        yield (
            f"on_before_zero_grad of {_list(early)} is called before the batches of a step run, and in one "
            "process behind the first forward: what it reads of a step (an attribute that the step sets, a logged "
            "value) is that of the step before"
        )
    precision = trainer.strategy.precision_plugin.precision
    if precision.endswith("-mixed"):
        half = "bf16" if precision.startswith("bf16") else "fp16"
        yield (
            f"precision={precision!r} is DeepSpeed's in a pipeline: weights, batches, activations and the loss "
            f"are in {half}, with fp32 master weights in the optimizer. One process computes normalizations, "
            "softmax and losses in fp32 (torch.autocast), so that losses differ by more than rounding: write "
            "`self(x).float()` in the step for a loss in fp32, and such layers in fp32 inside their forward(); "
            "precision='32-true' gives the numbers of one process"
        )
    elif precision in ("bf16-true", "16-true"):
        half = "bf16" if precision.startswith("bf16") else "fp16"
        yield (
            f"precision={precision!r} is DeepSpeed's in a pipeline: its optimizer has fp32 master weights, which "
            f"keep small updates. One process, whose only weights are in {half}, loses them by rounding, so that "
            "losses differ by more than rounding, most at a low learning rate; precision='32-true' gives the "
            "numbers of one process"
        )
    if trainer.accumulate_grad_batches > 1:
        yield from notes_on_windows(trainer, module)
    compiled = [f"self.{path}" if path else "self" for path, part in outside_pipeline(module) if is_compiled(part)]
    if compiled:
        yield (
            f"{_list(compiled)} was compiled in place (compile()), as a whole, and a pipeline runs its layers one "
            f"by one, which are not compiled: write `for layer in layers: layer.compile()`, or, for one "
            "nn.Sequential, `self.net = torch.compile(self.net)`"
        )
    if any(vars(logger).get("_log_graph") for logger in trainer.loggers):
        yield "log_graph=True shows nothing: no rank of a pipeline has the whole graph"
    uploading = _once(type(logger).__name__ for logger in trainer.loggers if vars(logger).get("_log_model"))
    if uploading and not all(map(_saves_weights_only, trainer.checkpoint_callbacks)):
        yield (
            f"{_list(uploading)}(log_model=...) uploads no checkpoint of a pipeline, because Lightning's loggers "
            "take files, and these are folders: ModelCheckpoint(save_weights_only=True) writes files, which they "
            "upload"
        )


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def notes_on_windows(trainer: Any, module: Any) -> Iterator[str]:
    """What hooks of the user's see otherwise where all batches of an optimizer step run at its end."""
    number = trainer.accumulate_grad_batches
    at_the_end = f"with accumulate_grad_batches={number}, all batches of a window run at its end"
    after = _hooks_of_the_user(("on_after_backward",), trainer, module)
    if after:
        yield (
            f"{at_the_end}: {_list(after)} is called once there, with the gradients of all of them, and not after "
            "each batch. What is to be done to the gradients of a step belongs in on_before_optimizer_step, "
            "which one process calls once, too; to change those of each batch, use larger batches or none to "
            "accumulate"
        )
    between = _hooks_of_the_user(("on_train_batch_start", "on_train_batch_end"), trainer, module)
    between += _transfers_that_set(module, getattr(trainer, "datamodule", None))
    if between:
        yield (
            f"{at_the_end}: what {_list(between)} change between two of them, such as weights, or attributes "
            "that the step or forward reads, all of them see as the last one does, which is another training "
            "than in one process; and until then trainer.callback_metrics has what training_step logged in the "
            "window before. Change it where a window begins, and read these where it ends, or do not accumulate"
        )
    monitors = [
        f"{type(callback).__name__}(monitor={callback.monitor!r})"
        for callback in trainer.callbacks
        if _asks_within_windows(callback, trainer)
    ]
    if monitors:
        yield (
            f"{at_the_end}: {_list(monitors)} looks for its best value after each batch, and, before the end of a "
            "window, finds what training_step logged in the one before: it may keep other checkpoints than in one "
            "process. Monitor a mean of epochs (on_epoch=True) or a value of a validation; without validation, "
            "keep all (every_n_train_steps with save_top_k=-1); or do not accumulate"
        )


def _transfers_that_set(*owners: Any) -> list[str]:
    """Which hooks around the transfer of a batch set attributes, such as the share of a mixup for the step."""
    return [
        f"{hook} of {type(owner).__name__}"
        for owner in owners
        for hook in TRANSFER_HOOKS
        if owner is not None and _sets_attributes(getattr(owner, hook, None), type(owner))
    ]


def _sets_attributes(function: Any, kind: type) -> bool:
    search = CodeSearch(lambda module: not is_installed(module))
    search.read(function, kind)
    return "setattr" in search.written or any(
        instruction.opname == "STORE_ATTR"
        for each in search.functions
        for instruction in dis.get_instructions(each.__code__)
    )


def _asks_within_windows(callback: Any, trainer: Any) -> bool:
    """Whether ``callback`` is a ModelCheckpoint that may compare values after a batch that ends no window.

    After a step for which it has saved, as it always does where it keeps all, it compares no more. Where there are
    validations, it leaves some of these savings to the next one, or to the next batch.
    """
    monitor = getattr(callback, "monitor", None)
    if monitor is None or monitor.endswith("_epoch"):  # Lightning's name of a mean of epochs
        return False
    if getattr(callback, "_train_time_interval", None) is not None:  # private names of Lightning 2.5 to 2.6
        return True
    if getattr(callback, "_every_n_train_steps", 0) < 1:
        return False
    return bool(callback.save_top_k > 0 or (callback.save_top_k == -1 and trainer.enable_validation))


def note_on_validation_within_window(trainer: Any, module: Any) -> str | None:
    """What a validation sees otherwise that runs while batches wait for the end of their window, if it is read."""
    readers = _hooks_of_the_user(VALIDATION_HOOKS, trainer, module)
    for callback in trainer.callbacks:
        if getattr(callback, "monitor", None) is not None:
            readers.append(f"{type(callback).__name__}(monitor={callback.monitor!r})")
        elif getattr(callback, "filename", None) is not None:
            readers.append(f"{type(callback).__name__}(filename={callback.filename!r})")
    if not readers:
        return None
    number = trainer.accumulate_grad_batches
    return (
        f"with accumulate_grad_batches={number}, all batches of a window run at its end, and a validation has "
        "begun before that: trainer.callback_metrics has what training_step logged in the window before. "
        f"{_list(readers)} may read these. Make val_check_interval a multiple of {number} batches (where "
        "check_val_every_n_epoch=None, the batches of an epoch, too), or monitor a mean of epochs (on_epoch=True) "
        "or a value of the validation"
    )


def _hooks_of_the_user(hooks: Sequence[str], trainer: Any, module: Any) -> list[str]:
    """Which of these hooks the module and callbacks have that no library wrote."""
    return [
        f"{hook} of {type(owner).__name__}"
        for owner in (module, *trainer.callbacks)
        for hook in hooks
        if (getattr(getattr(owner, hook), "__module__", None) or "").partition(".")[0] not in OTHERS
    ]


def is_compiled(part: nn.Module) -> bool:
    """Whether ``part.compile()`` was called; an attribute of torch (2.4 to 2.13)."""
    return vars(part).get("_compiled_call_impl") is not None


def refusals_of_normalization(module: nn.Module, num_stages: int) -> Iterator[str]:
    """Yield why layers that talk to all ranks cannot run on the ranks of one stage."""
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm) and part.process_group is None and num_stages > 1:
            yield (
                f"self.{name} is a SyncBatchNorm, which waits for all ranks, and those of its stage alone run it: "
                "use nn.BatchNorm1d, 2d or 3d, or nn.GroupNorm"
            )
            return


def refusals_of_renormalized_ties(module: nn.Module, call: PipelineCall, num_stages: int) -> Iterator[str]:
    """Yield why embeddings cannot run that change their weight whenever they run, and share it with layers."""
    names = {part: f"self.{name}" for name, part in module.named_modules()}
    owners: dict[int, int] = {}
    for layer in call.layers if num_stages > 1 else ():
        held = getattr(layer, "module", layer)
        for weight in {id(weight) for weight in held.parameters()} if isinstance(held, nn.Module) else ():
            owners[weight] = owners.get(weight, 0) + 1
    found = {
        part: None
        for _, layer in call.existing_modules()
        for part in layer.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        and part.max_norm is not None
        and owners.get(id(part.weight), 0) > 1
    }
    for part in found:
        yield (
            f"{names.get(part, 'a layer')} ({type(part).__name__}) has max_norm={part.max_norm:g}, by which it "
            "changes its weight whenever it runs, and other layers have the weight, too: for them it would change "
            "between the forward and the backward of a micro-batch, or not at all on another rank. Leave max_norm "
            "out, and let on_train_batch_start renormalize all rows, "
            "`weight.data.copy_(torch.renorm(weight.data, 2, 0, max_norm))`, or do not tie"
        )


def refusals_of_hooks(module: nn.Module, call: PipelineCall) -> Iterator[str]:
    """Yield why hooks that a user hung on modules cannot run, one sentence each."""
    inside = {part for _, layer in call.existing_modules() for part in layer.modules()}
    # What is captured runs its own hooks in its layers.
    runs = {module, call.target(module)} if call.captured is None else set()
    for name, part in module.named_modules():
        kinds = hooks_of(part)
        around = part not in inside and not inside.isdisjoint(part.modules())
        refused = [kind for kind in kinds if part not in runs or "backward" in kind]
        if around and refused:
            place = f"self.{name}" if name else type(module).__name__
            yield (
                f"{place} ({type(part).__name__}) has a {refused[0]} hook ({_named(kinds[refused[0]])}), and in a "
                "pipeline, which runs its layers on several ranks, that is not called: register it on these layers"
            )


def notes_on_hooks(
    module: nn.Module, call: PipelineCall, elsewhere: Collection[str] = frozenset()
) -> Iterator[str]:
    """What hooks on layers and gradients do otherwise than the user may expect, one sentence each.

    Args:
        module: The LightningModule.
        call: Its layers.
        elsewhere: The names of parameters that have such hooks on the ranks that train them.
    """
    names = {part: f"self.{name}" for name, part in module.named_modules()}
    hung: dict[str, str] = {}
    of_gradients = False
    for owner, layer in call.existing_modules():
        for path, part in layer.named_modules():
            for kind, hooks in hooks_of(part).items():
                of_gradients |= "backward" in kind
                place = names.get(part, f"layer {owner}{'.' if path else ''}{path}")
                hung.setdefault(place, _named(hooks))
    if hung:
        shown = _some([f"{hook} on {place}" for place, hook in hung.items()])
        gradients = ", and the gradient that they are given is that of a micro-batch" if of_gradients else ""
        yield (
            f"hooks on layers ({shown}) run where the layer runs, once per micro-batch{gradients}: what they "
            "collect stays on that rank, and random numbers that they draw, or a count of their calls, make the "
            "training another one than in one process"
        )
    hooked = {*elsewhere, *weights_with_hooks(module)}
    on_weights = [f"self.{name}" for name, _ in module.named_parameters() if name in hooked]
    if on_weights:
        yield (
            f"gradient hooks ({_some(on_weights)}) run on the rank that has the parameter, once per micro-batch, "
            "whose gradient is its share of the step's: in on_before_optimizer_step, weight.grad is that of the "
            "step"
        )


def weights_with_hooks(module: nn.Module) -> list[str]:
    """The names of the parameters that have a hook on their gradient."""
    return [name for name, weight in module.named_parameters() if hooks_of_weight(weight)]


def hooks_of_weight(weight: Any) -> dict[Any, Any]:
    """The hooks on the gradient of a parameter, by numbers of torch's, but for those of libraries."""
    tables = [getattr(weight, table, None) or {} for table in OF_WEIGHTS]
    return {key: hook for table in tables for key, hook in table.items() if not is_of_library(hook)}


def hooks_of(part: nn.Module) -> dict[str, list[Any]]:
    """The hooks of a module by their kind, but for those of libraries, such as ``weight_norm``."""
    found = {}
    for table, kind in MODULE_HOOKS.items():
        hooks = [hook for hook in (vars(part).get(table) or {}).values() if not is_of_library(hook)]
        if hooks:
            found[kind] = hooks
    return found


OF_WEIGHTS = ("_backward_hooks", "_post_accumulate_grad_hooks")

LIBRARIES = (
    "accelerate", "deepspeed", "deepspeed_partition", "diffusers", "lightning", "lightning_fabric",
    "lightning_madpipe", "peft", "pytorch_lightning", "torch", "torchmetrics", "transformers",
)  # fmt: skip
"""Whose hooks are part of the models or of the runs that they are hung in: transformers 5 collects what blocks
return by hooks of its own, which it hangs on when a model is first called."""


OF_MODELS = frozenset(("accelerate", "diffusers", "peft", "transformers"))
"""Those of them whose hooks belong to models, and not to runs, also where the classes are another's."""


def is_of_library(hook: Any) -> bool:
    """Whether a library hung the hook on; Lightning's profilers, for one, hang hooks on every module."""
    return _module_of(hook).partition(".")[0] in LIBRARIES


def is_of_model(hook: Any, libraries: Collection[str]) -> bool:
    """Whether a hook is a part of what modules compute: torch's own, or of a library that has their classes.

    ``weight_norm`` computes a weight in a hook, and transformers 5 collects in hooks what its ``forward`` reads.

    Args:
        libraries: What :func:`libraries_of` gives for the modules.
    """
    library = _module_of(hook).partition(".")[0]
    return type(hook).__module__.startswith("torch.") or library in OF_MODELS or library in libraries


def libraries_of(parts: Collection[nn.Module]) -> frozenset[str]:
    """The installed packages that have the classes of modules, but for the program's and those that run steps."""
    names = {type(part).__module__ for part in parts}
    programs = {type(part).__module__.partition(".")[0] for part in parts if hasattr(part, "training_step")}
    found = {name.partition(".")[0] for name in names if is_installed(name)}
    return frozenset(found - programs - {*LIBRARIES})


def _module_of(hook: Any) -> str:
    """The name of the file's module whose function, or whose class's object, a hook is."""
    while isinstance(hook, partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return getattr(named, "__module__", None) or ""


def _named(hooks: Sequence[Any]) -> str:
    return name_of_function(hooks[0])


def name_of_function(function: Any) -> str:
    """How people call a hook: its name without the functions around it, or its class."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]


def layers_of_statistics(modules: Iterator[tuple[str, nn.Module]]) -> Iterator[str]:
    """The names of the modules that compute with statistics of the batch, in the modes that they are in."""
    return (
        f"{name} ({type(part).__name__})"
        for name, part in modules
        if uses_statistics(part, getattr(part, "running_mean", None) is not None)
    )


def uses_statistics(part: nn.Module, keeps: bool) -> bool:
    """Whether a module computes with statistics of the batch, in its mode.

    Args:
        keeps: Whether it has running statistics.
    """
    if isinstance(part, nn.modules.batchnorm._BatchNorm):
        return part.training or not keeps
    if isinstance(part, nn.modules.instancenorm._InstanceNorm):
        return False
    # Of other libraries, such as batch renormalization.
    frozen = "frozen" in type(part).__name__.lower()
    return part.training and keeps and hasattr(part, "running_var") and not frozen


def layers_of_instances(modules: Iterator[tuple[str, nn.Module]]) -> Iterator[str]:
    """The names of the modules that treat each sample by itself in training, and keep averages over samples."""
    for name, part in modules:
        if averages_instances(part, getattr(part, "running_mean", None) is not None):
            yield f"{name} ({type(part).__name__})"


def averages_instances(part: nn.Module, keeps: bool) -> bool:
    """Whether a module is such a one, in its mode; ``keeps``: whether it has running statistics."""
    return isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.training and keeps


def layers_of_observers(modules: Iterator[tuple[str, nn.Module]]) -> Iterator[str]:
    """The names of the modules that observe ranges of values for quantization, and go by them."""
    for name, part in modules:
        table = part._buffers  # a scripted module's is no dict; one of a rank without the layer raises by name
        enabled = dict.get(table, "observer_enabled") if isinstance(table, dict) else None
        if isinstance(enabled, Tensor) and part.training and not enabled.is_meta and bool(enabled.any()):
            yield f"{name} ({type(part).__name__})"


def notes_on_observers(names: Sequence[str], sizes: Sequence[int]) -> Iterator[str]:
    """Yield what layers observe that see a whole batch in one process, once, and what can be done about it.

    Args:
        names: Of the layers that observe.
        sizes: Of the micro-batches of a batch.
    """
    if names:
        yield (
            f"observers of quantization ({_most_of(names)}) see micro-batches, {max(sizes)} of the {sum(sizes)} "
            f"samples, {len(sizes)} times for a batch, and averages of what they see go on so often: another "
            "training than in one process. Way out: num_micro_batches=1"
        )


NUM_NAMED = 20
"""How many layers of a kind are named: all of most models, and of a ResNet-152 with its 155 not all."""


def _most_of(names: Sequence[str]) -> str:
    shown, num_more = names[:NUM_NAMED], len(names) - NUM_NAMED
    kinds = [name.partition(" (")[2] for name in shown]
    # The kind stands behind the last of several of it.
    listed = [
        name.partition(" (")[0] if kind == following else name
        for name, kind, following in zip(shown, kinds, [*kinds[1:], None], strict=True)
    ]
    return ", ".join(listed) + (f" and {num_more} more" if num_more > 0 else "")


def notes_on_statistics(names: Sequence[str], sizes: Sequence[int]) -> Iterator[str]:
    """Yield what layers see that compute with a whole batch in one process, and what can be done about it.

    Args:
        names: Of the layers with statistics of the batch.
        sizes: Of the micro-batches of a batch.
    """
    if names:
        yield (
            f"batch normalization ({_most_of(names)}) has the statistics of a micro-batch, {max(sizes)} of the "
            f"{sum(sizes)} samples: another training than in one process. Ways out: num_micro_batches=1, "
            "nn.GroupNorm, .eval()"
        )


def notes_on_instances(names: Sequence[str], sizes: Sequence[int]) -> Iterator[str]:
    """Yield what instance normalization keeps otherwise than in one process, and what can be done about it.

    Args:
        names: Of the layers of instance normalization with running statistics.
        sizes: Of the micro-batches of a batch.
    """
    if names:
        yield (
            f"instance normalization ({_most_of(names)}) updates its running statistics once per micro-batch, "
            f"{len(sizes)} times for a batch: evaluation has others than in one process. Ways out: "
            "num_micro_batches=1, track_running_stats=False"
        )


def needs_two_samples(error: BaseException, step: str, sizes: Sequence[int], names: Sequence[str]) -> str | None:
    """What to write where a layer cannot compute statistics of the one sample that it is given; None: it can.

    Args:
        error: What a layer has raised.
        sizes: Of the micro-batches of the batch.
        names: Of the layers with statistics of the batch.
    """
    if not isinstance(error, ValueError) or NO_STATISTICS not in str(error) or sum(sizes) < 2:
        return None
    return (
        f"{step}: batch normalization ({_most_of(names)}) cannot compute statistics of one sample, and "
        f"the batch of {sum(sizes)} samples is cut into {len(sizes)} micro-batches, of which the smallest has "
        f"{min(sizes)}: MadPipeStrategy(num_micro_batches={sum(sizes) // 2}){', or fewer' * (sum(sizes) > 3)}; "
        "drop_last=True, if the last batch is short; larger batches; .eval() on these layers before fit; or "
        "nn.GroupNorm"
    )


NO_STATISTICS = "more than 1 value per channel"
"""What torch (2.4 to 2.13) says of a batch normalization that trains on a single value."""


def notes_on_parts(
    mixing: Sequence[str],
    keeping: Sequence[str],
    mixing_gradients: Sequence[str],
    deciding: Sequence[str],
    sizes: Sequence[int],
    ended: str | None = None,
) -> Iterator[str]:
    """Yield what layers compute otherwise for a part of a batch, and what can be done about it.

    Args:
        mixing: The layers whose result for a sample depends on the others of its batch.
        keeping: What layers change whenever they run.
        mixing_gradients: The layers whose gradient for a sample depends on the others of its batch.
        deciding: The layers, with lines, whose code asks for numbers that depend on the samples.
        sizes: Of the micro-batches of a batch.
        ended: The layer from which on nobody looked, and why.
    """
    if ended is not None:
        yield (
            f"whether layers compute something else for a part of a batch was not looked at from {ended} on: "
            "where one mixes samples, or keeps something from run to run, this is another training than in one "
            "process, and MadPipeStrategy(num_micro_batches=1) is not"
        )
    if mixing:
        yield (
            f"what {_all_of(mixing, 'layers ')} gives for a sample depends on the others, and in a pipeline it "
            f"sees those of {_piece_of(sizes)}: {ANOTHER_TRAINING}; a layer that treats each sample by itself. A "
            "tensor of the batch that has as many rows as there are samples by chance, such as a table, is cut "
            "like samples: make it a buffer, or choose another batch size"
        )
    if mixing_gradients:
        yield (
            f"the gradient that {_all_of(mixing_gradients, 'layers ')} gives for a sample depends on the others, "
            f"and in a pipeline it sees those of {_piece_of(sizes)}: {ANOTHER_TRAINING}; a backward, or a hook on "
            "a tensor, that treats each sample by itself"
        )
    if deciding:
        yield (
            f"the code of {_all_of(deciding, 'layers ')} asks for numbers in tensors that depend on the samples, "
            f"and may decide by them for all that it is given, {_piece_of(sizes)} and not the batch. Where each "
            "sample is treated by itself, as by a router of experts, nothing differs; else use "
            "MadPipeStrategy(num_micro_batches=1), or decide for each sample, as by torch.where"
        )
    if keeping:
        yield (
            f"{_all_of(keeping)} changes whenever the layer runs, and it runs once per micro-batch, {len(sizes)} "
            "times per batch: what depends on that is another training than in one process; "
            "MadPipeStrategy(num_micro_batches=1) runs it once"
        )


def notes_on_draws(drawing: Sequence[str]) -> Iterator[str]:
    """Yield what layers draw otherwise than in one process.

    Args:
        drawing: Layers, or lines of the model's own code, that draw from the common random generators.
    """
    if drawing:
        yield (
            f"random numbers are drawn by {_all_of(drawing)}, and in a pipeline each stage draws its own for each "
            "micro-batch: they differ from those of one process with the same seed, as if it had another seed"
        )


ANOTHER_TRAINING = (
    "this is another training than in one process, as with accumulate_grad_batches. Ways out: fewer and larger "
    "pieces, MadPipeStrategy(num_micro_batches=...), of which 1 is the whole batch; larger batches"
)
"""What it means that a layer sees a micro-batch in the place of a batch, and what any model can do about it."""

NUM_SHOWN = 4


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NUM_SHOWN]) + (", ..." if len(names) > NUM_SHOWN else "")


def _all_of(names: Sequence[str], unit: str = "") -> str:
    return _some(names) + (f" ({len(names)} {unit}in all)" if len(names) > NUM_SHOWN else "")


def _piece_of(sizes: Sequence[int]) -> str:
    return f"a micro-batch, {max(sizes)} of the {sum(sizes)} samples of a batch"


def _list(names: Any) -> str:
    return ", ".join(names)
