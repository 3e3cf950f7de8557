"""Hooks that compute with several parameters: each rank of a pipeline has those of its own layers only.

A norm over ``self.parameters()``, a learning rate that is made from it, noise for all weights from one generator:
in a pipeline each is of a part, another one on each rank, and nothing fails. While a hook of the user's runs,
every function of torch that it calls is looked at, and values are followed from the parameters that they come
from. What mixes those of several is told once, with the place. ``clip_grad_norm_`` is answered for all ranks, see
``gradient_norms``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_partition.engine.runtime.environment import warn_once
from lightning_madpipe.compat.gradient_norms import GradientNorms

WITH_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")
"""Hooks in which the gradients of a step are there."""

AFTER_A_STEP = ("on_train_batch_end", "on_train_epoch_end", "on_before_zero_grad")
"""Hooks in which one process still has the gradients of the last step."""

NOT_WATCHED = ("on_save_checkpoint", "on_load_checkpoint", "on_exception")

OTHERS = (
    "deepspeed", "deepspeed_partition", "lightning", "lightning_fabric", "lightning_madpipe", "pytorch_lightning",
)  # fmt: skip
"""Packages whose own work in a hook is none of its user's, such as saving a checkpoint."""

SEVERAL = (
    "{place} computes with several parameters or gradients together ({names}, ...), and a rank of a pipeline has "
    "those of its own layers only: a norm, a sum or a decision over all of them is that of a part, another one "
    "on each rank. For the norm of all gradients: torch.nn.utils.clip_grad_norm_ in on_before_optimizer_step "
    "counts all ranks, as does Trainer(gradient_clip_val=...). Else bring the ranks' parts together, as by "
    "torch.distributed.all_reduce"
)
NUMBERS_OF_SEVERAL = (
    "{place} takes numbers out of several parameters or gradients ({names}, ...), and a rank of a pipeline has "
    "those of its own layers only: what is computed or decided from all of them is that of a part, another one "
    "on each rank; where each is treated by itself, nothing differs. For the norm of all gradients: "
    "torch.nn.utils.clip_grad_norm_ in on_before_optimizer_step counts all ranks, as does "
    "Trainer(gradient_clip_val=...). Else bring the ranks' parts together, as by torch.distributed.all_reduce"
)
ELEMENTS_OF_SEVERAL = (
    "{place} counts the elements of several parameters ({names}, ...), and a rank of a pipeline has those of its "
    "own layers only: a number of all is that of a part, another one on each rank; where each is treated by "
    "itself, nothing differs. Count them before fit, or in a step, which is shown all, or bring the ranks' parts "
    "together, as by torch.distributed.all_reduce"
)
LOGGED = (
    "{place} logs values of single parameters ({names}, ...): each rank logs those of its own layers, and the "
    "loggers, which are rank 0's, get those of rank 0's layers alone. Bring them together first, as by "
    "torch.distributed.all_gather_object, and log the same on each rank"
)
RANDOM = (
    "{place} draws random numbers for parameters ({names}, ...), and each rank of a pipeline draws them for its "
    "own layers only: weights, and what is drawn later, become other ones than in one process. Draw from a "
    "generator for each parameter, `torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)`"
)
WHOLE_STATE = (
    "{place} asks for state_dict(), which has the layers of this rank only: a file that rank 0 writes of it has "
    "its layers alone. trainer.strategy.lightning_module_state_dict(), called on every rank, gives the whole to "
    "rank 0, and trainer.save_checkpoint(path, weights_only=True) writes it"
)
CLEARED = (
    "{place} looks at gradients ({names}, ...), which the pipeline's engine has cleared with the optimizer's "
    "step: they are None there. on_before_optimizer_step has them"
)
IN_BUFFERS = (
    "{place} looks at gradients ({names}, ...), and under stage=1, bf16 and fp16 those of a step lie in flat "
    "buffers of DeepSpeed's: what is there is None or a part. Trainer(gradient_clip_val=...) clips them; "
    "precision='32-true' and stage=0 show them"
)
AFTER_THE_CLOSURE = (
    "{place} looks at gradients after the closure ({names}, ...), which has made the optimizer's step already, "
    "so that nothing that is done to them counts: clip by Trainer(gradient_clip_val=...), and do what else is to "
    "be done in on_before_optimizer_step"
)

RANDOM_FACTORIES = frozenset(("rand", "randn", "randint", "randperm", "normal"))
RANDOM_OF_TENSORS = frozenset((
    "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "poisson", "dropout", "normal_",
    "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_", "geometric_", "log_normal_",
))  # fmt: skip
NUMBERS = frozenset((
    "item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__float__", "__int__", "__bool__", "__index__",
    "__complex__", "__array__",
))  # fmt: skip
"""Functions by which a value leaves torch."""

FORMS = frozenset((
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "requires_grad_", "is_leaf", "size", "dim",
    "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_contiguous", "stride", "data_ptr",
    "__len__", "grad_fn", "is_cuda", "is_sparse", "is_meta", "is_quantized", "retains_grad", "names", "type",
    "get_device",
    "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full",
    "untyped_storage", "storage_offset", "register_hook", "_version", "_base", "name", "__hash__", "__repr__",
    "__format__", "_is_view", "is_inference", "is_pinned", "is_signed", "output_nr", "itemsize", "nbytes",
))  # fmt: skip
"""What can be asked of a tensor without its values; the text of one is for people."""

GRADIENT, NO_GRADIENT = "a gradient", "no gradient"
"""What is found where a gradient is looked at; what it means depends on the hook."""

NOISE = "random numbers"
"""Stands among the sources of a value for a draw of no parameter."""


class HookWatch:
    """Watches the hooks of a run, of the module and of callbacks that are not Lightning's.

    Args:
        trainer: Lightning's.
        module: The LightningModule.
        mpu: Who is who in the pipelines.
        optimizers: Gives the optimizers of the run, as the user's hooks see them.
        flattened: Whether DeepSpeed keeps gradients and weights of a step in flat buffers.
        refusal: Makes the error that says a sentence.
        leaves_loop: Called when a rank has left the loop over the batches of an epoch, before any hook.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        mpu: Any,
        *,
        optimizers: Callable[[], Iterable[Any]],
        flattened: bool,
        refusal: Callable[[str], Exception],
        leaves_loop: Callable[[], None],
    ) -> None:
        self._trainer, self._module, self._optimizers = trainer, module, optimizers
        self._leaves_loop = leaves_loop
        self._flattened, self._refusal = flattened, refusal
        self._norms = GradientNorms(module, mpu, flattened=flattened, refusal=refusal)
        self._mode: FollowedValues | None = None
        self._told: set[str] = set()
        self._values = WeakIdKeyDictionary()
        self._step_is_made = False
        # Lightning enters a context of its profiler around each hook, which nothing public does.
        self._profile = trainer.profiler.profile
        trainer.profiler.profile = self._watched

    def end(self) -> None:
        """Let the Trainer's profiler go."""
        vars(self._trainer.profiler).pop("profile", None)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch nothing while an optimizer's closure makes a step."""
        with self._instead(None):
            yield
        self._step_is_made = True

    @contextmanager
    def _watched(self, action: str) -> Iterator[Any]:
        with self._profile(action) as profiled:
            owner, hook = self._hook_of(action)
            if owner is None:
                yield profiled
                if action == "run_training_epoch":
                    self._leaves_loop()
                return
            self._step_is_made = False
            mode = FollowedValues(self._names, self._values, lambda *found: self._tell(owner, hook, *found))
            counted = self._norms.over_all_ranks() if hook in WITH_GRADIENTS else nullcontext()
            with counted, self._instead(mode):
                yield profiled

    @contextmanager
    def _instead(self, mode: FollowedValues | None) -> Iterator[None]:
        """Follow values by ``mode`` meanwhile, and by nothing else."""
        before = self._mode
        if before is not None:
            before.__exit__(None, None, None)
        self._mode = mode
        try:
            with mode if mode is not None else nullcontext():
                yield
        finally:
            self._mode = before
            if before is not None:
                before.__enter__()

    def _hook_of(self, action: str) -> tuple[str | None, str]:
        """Whose hook a context of the profiler is around, and its name; None: nobody's that is watched."""
        place, _, hook = action.rpartition(".")
        owner: Any = None
        if place.startswith("[LightningModule]"):
            owner = self._module
        elif place.startswith("[Callback]"):
            key = place.removeprefix("[Callback]")
            owner = next((each for each in self._trainer.callbacks if each.state_key == key), None)
        is_hook = (hook.startswith("on_") and hook not in NOT_WATCHED) or hook in (
            "optimizer_step",
            "lr_scheduler_step",
        )
        if owner is None or not is_hook:
            return None, hook
        of = getattr(getattr(owner, hook), "__module__", None) or ""
        return (None if of.partition(".")[0] in OTHERS else type(owner).__name__), hook

    def _names(self) -> dict[int, str]:
        names = {id(weight): name for name, weight in self._module.named_parameters()}
        for optimizer in self._optimizers():
            for place, group in enumerate(getattr(optimizer, "param_groups", ())):
                for weight in group["params"]:
                    names.setdefault(id(weight), f"{FLAT}{place}")
        return names

    def _tell(self, owner: str, hook: str, found: str, names: Iterable[str]) -> None:
        kind: str | None = found
        if found in (SEVERAL, NUMBERS_OF_SEVERAL, ELEMENTS_OF_SEVERAL, WHOLE_STATE):
            kind = found if _is_of_the_user(sys._getframe()) else None
        elif found in (GRADIENT, NO_GRADIENT):
            kind = self._kind_of_gradient(hook, is_there=found == GRADIENT)
        if kind is None:
            return
        shown = sorted(set(names))
        place = f"{hook} of {owner}"
        sentence = kind.format(place=place, names=", ".join(shown[:3]))
        if kind == AFTER_THE_CLOSURE:
            raise self._refusal(sentence)
        key = f"{place}: {(SEVERAL if kind == NUMBERS_OF_SEVERAL else kind)[:30]}"
        if key not in self._told:
            self._told.add(key)
            warn_once(f"hook/{key}", sentence)

    def _kind_of_gradient(self, hook: str, *, is_there: bool) -> str | None:
        """What is told of a look at a gradient in ``hook``."""
        if hook in WITH_GRADIENTS:
            return IN_BUFFERS if self._flattened else None
        if is_there or _clears_gradients(sys._getframe()):
            return None
        if hook == "optimizer_step":
            return AFTER_THE_CLOSURE if self._step_is_made else None
        return CLEARED if hook in AFTER_A_STEP and self._trainer.global_step else None


class FollowedValues(TorchFunctionMode):
    """Follows values from the parameters that they come from, and tells what mixes several.

    Args:
        names: Gives the name of each parameter of this rank by its ``id``; asked for at the first use of one.
        sources: What values that live on after a hook come from, by tensor.
        tell: Called with a kind of sentence and the names of parameters.
    """

    def __init__(
        self,
        names: Callable[[], Mapping[int, str]],
        sources: WeakIdKeyDictionary,
        tell: Callable[[str, Iterable[str]], None],
    ) -> None:
        super().__init__()
        self._read_names, self._sources, self._tell = names, sources, tell
        self._known: Mapping[int, str] | None = None
        self._read: list[str] = []
        self._counted: frozenset[str] = frozenset()

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        name = _name_of(function)
        if name in ("numel", "nelement"):
            self._note_count(*_tensors(arguments[:1]))
        elif name not in FORMS:
            if name == "__deepcopy__":  # whose second argument holds all that was copied before
                self._follow(name, arguments[:1], result)
            elif name.startswith("_foreach_"):
                for each in _one_by_one(arguments, result):
                    self._follow(name, *each)
            else:
                self._follow(name, (*arguments, *keywords.values()), result)
        return result

    def _follow(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        given = list(_tensors(arguments))
        sources = frozenset[str]().union(*(self._sources_of(tensor) for tensor in given))
        is_drawn = name in RANDOM_FACTORIES or name in RANDOM_OF_TENSORS
        weights = sources - {NOISE}
        if name == "grad" and not any(weight.startswith(FLAT) for weight in weights) and weights:
            self._tell(NO_GRADIENT if result is None else GRADIENT, weights)
        if not sources and not is_drawn:
            return
        if weights and (is_drawn or NOISE in sources):
            self._tell(RANDOM, weights)
        if len(weights) > 1 or (weights and self._is_all_of_a_rank(weights) and _is_one_of_many(given, result)):
            self._tell(SEVERAL, weights)
        written = name.endswith("_") and not name.endswith("__")
        written = written or name in ("__setitem__", "__set__") or (name.startswith("__i") and name != "__index__")
        if name in NUMBERS:
            self._note_number(weights)
        elif name == "clone" and weights and _is_logged(sys._getframe()):
            self._tell(LOGGED, weights)
        elif name == "detach" and weights and _is_saved(sys._getframe()):
            self._tell(WHOLE_STATE, weights)
        elif written and given:
            self._read = [weight for weight in self._read if weight not in self._sources_of(given[0])]
        made_of = sources | {NOISE} if is_drawn else sources
        for tensor in _tensors((result,)):
            if id(tensor) not in (self._known or ()) and self._sources_of(tensor) != made_of:
                self._sources[tensor] = made_of

    def _note_number(self, weights: frozenset[str]) -> None:
        """Note that numbers leave torch: those of several parameters may meet where nobody sees it.

        A number that is read of a parameter before it is written, such as whether to scale it, counts no more.
        """
        self._read += [weight for weight in weights if weight not in self._read]
        if len(self._read) > 1 or (self._read and self._is_all_of_a_rank(weights)):
            self._tell(NUMBERS_OF_SEVERAL, self._read)

    def _note_count(self, tensor: Tensor) -> None:
        """Note that elements are counted: those of several parameters are that of a part of them."""
        sources = self._sources_of(tensor)
        self._counted |= sources
        if len(self._counted) > 1 or (sources and self._is_all_of_a_rank(sources)):
            self._tell(ELEMENTS_OF_SEVERAL, self._counted)

    def _sources_of(self, tensor: Tensor) -> frozenset[str]:
        found = self._sources.get(tensor)
        if found is not None:
            return found
        if self._known is None:
            self._known = self._read_names()
        name = self._known.get(id(tensor))
        return frozenset() if name is None else frozenset((name,))

    def _is_all_of_a_rank(self, weights: frozenset[str]) -> bool:
        """Whether a single tensor holds all that this rank has, as a flat one does."""
        return len(self._known or ()) == 1 or any(name.startswith(FLAT) for name in weights)


FLAT = "the flat weights of group "
"""How tensors are named that DeepSpeed gives an optimizer in the place of parameters."""


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):  # of a property
        of = getattr(getattr(function, "__self__", None), "__name__", name)
        return of if name == "__get__" else name
    return name


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _one_by_one(arguments: tuple[Any, ...], result: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The calls that one of a function on lists of tensors stands for."""
    lists = [
        value for value in arguments if isinstance(value, list | tuple) and any(True for _ in _tensors(value))
    ]
    common = tuple(value for value in arguments if not any(value is each for each in lists))
    results = result if isinstance(result, list | tuple) else [None] * len(lists[0] if lists else ())
    for each, made in zip(zip(*lists, strict=True), results, strict=True):
        yield (*each, *common), made


def _is_one_of_many(given: list[Tensor], result: Any) -> bool:
    """Whether a call has made one number of a tensor."""
    return isinstance(result, Tensor) and result.numel() == 1 and any(tensor.numel() > 1 for tensor in given)


def _is_of_the_user(frame: FrameType | None) -> bool:
    """Whether the code at ``frame`` computes for a hook's user, and not a library for itself."""
    for caller in _callers(frame):
        package = (caller.f_globals.get("__name__") or "").partition(".")[0]
        if package != "torch" and not _is_of_this_file(caller):
            return package not in OTHERS or caller.f_code.co_filename.endswith(LIGHTNING_NORMS)
    return True


def _is_logged(frame: FrameType | None) -> bool:
    """Whether the code at ``frame`` is on the way of ``self.log()``, which copies a value first."""
    return any(
        caller.f_code.co_name == "log" and caller.f_code.co_filename.endswith(LIGHTNING_MODULE)
        for caller in _callers(frame)
    )


def _is_saved(frame: FrameType | None) -> bool:
    """Whether the code at ``frame`` is on the way of ``state_dict()``."""
    return any(caller.f_code.co_name == "_save_to_state_dict" for caller in _callers(frame))


LIGHTNING_NORMS = os.path.join("utilities", "grads.py")
"""The file of Lightning's ``grad_norm``, which a hook calls for its user."""

LIGHTNING_MODULE = os.path.join("core", "module.py")
"""The file of Lightning's ``LightningModule.log``."""


def _clears_gradients(frame: FrameType | None) -> bool:
    """Whether the code at ``frame`` is on the way of ``zero_grad()``, which looks whether there is anything."""
    return any(caller.f_code.co_name == "zero_grad" for caller in _callers(frame))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_of_this_file(frame: FrameType) -> bool:
    return frame.f_code.co_filename == __file__
