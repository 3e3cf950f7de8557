"""Copies of an optimizer's state that a script takes by ``state_dict()`` and loads again, perhaps on another cut.

PyTorch and DeepSpeed know parameters there by their places alone. After a move the same places are those of other
layers, so that a copy from before would be taken for theirs, without a word where the shapes agree. Each copy says
of which cut and of which parameters it is.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from deepspeed_partition.engine.pipeline.shared_weights import listed
from deepspeed_partition.engine.pipeline.stages import allocation_of
from deepspeed_partition.engine.repartition.optimizer_state import trained_by
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.planner.units import counted

KEY = "madpipe_parameters"
"""The entry of an optimizer's ``state_dict()`` that says of which parameters it is."""
WAY_OUT = (
    "engine.save_checkpoint() and engine.load_checkpoint() (in Lightning trainer.save_checkpoint(path) and "
    "fit(ckpt_path=path)) find each parameter's state by its name, on any cut"
)
UNMARKED = (
    "optimizer.load_state_dict() is given a state that does not say of which parameters it is: it is taken for "
    "that of this rank's parameters in their order ({words} on rank {rank}), which is wrong where it was saved on "
    f"another cut. {WAY_OUT}"
)

_hooks: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()


def mark_copies(engine: Any) -> None:
    """Let copies of the state of the optimizers of an engine say of which parameters they are, and look at it.

    Args:
        engine: Just started, or started again after a move.
    """
    marks, base, wrapping = _Marks(engine), engine.basic_optimizer, engine.optimizer
    if isinstance(base, Optimizer) and takes_hooks(base):
        for hook in _hooks.pop(base, ()):  # of an engine before
            hook.remove()
        _hooks[base] = [
            base.register_state_dict_post_hook(marks.after_state_dict),
            base.register_load_state_dict_pre_hook(marks.before_loading),
        ]
    elif isinstance(base, Optimizer):
        marks.put_around(base)
    if wrapping is not None and wrapping is not base and hasattr(wrapping, "load_state_dict"):
        marks.put_around(wrapping)


def takes_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks can be put on the state of an optimizer: a class may leave ``Optimizer.__init__`` out."""
    return "_optimizer_state_dict_post_hooks" in vars(optimizer)


class _Marks:
    """What is done to the copies of one engine's optimizers."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def put_around(self, optimizer: Any) -> None:
        """Stand in the place of an optimizer's methods, and of those of an engine before."""
        for name, mark in (("state_dict", self.taken), ("load_state_dict", self.loaded)):
            present = getattr(optimizer, name)
            is_mark = isinstance(present, functools.partial) and isinstance(
                getattr(present.func, "__self__", None), _Marks
            )
            setattr(optimizer, name, functools.partial(mark, present.args[0] if is_mark else present))

    def taken(self, take: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.after_state_dict(None, take(*args, **kwargs))

    def after_state_dict(self, _: Any, state: Any) -> Any:
        engine = self._engine()
        if engine is not None and not engine.is_in_checkpoint and type(state) is dict:
            state[KEY] = _description(engine)
        return state

    def loaded(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state, or the list of one from each replica that optimizers of ZeRO take; DeepSpeed names it."""
        args = tuple(map(self._without_marks, args))
        return load(*args, **{name: self._without_marks(value) for name, value in kwargs.items()})

    def _without_marks(self, argument: Any) -> Any:
        if isinstance(argument, Mapping):
            return self.before_loading(None, argument)
        if isinstance(argument, list | tuple):
            return [self.before_loading(None, each) if isinstance(each, Mapping) else each for each in argument]
        return argument

    def before_loading(self, _: Any, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state without its mark.

        Raises:
            ValueError: it is that of other parameters.
        """
        engine, mark = self._engine(), state.get(KEY)
        if engine is None:
            return {key: value for key, value in state.items() if key != KEY}
        here = _description(engine)
        if mark is not None and mark != here:
            raise ValueError(_difference(mark, here))
        if mark is None and not engine.is_in_checkpoint and not engine.has_told_unmarked:
            engine.has_told_unmarked = True
            words = _layers_in_words(here)
            announce(UNMARKED.format(words=words, rank=here["rank"]), logging.WARNING)
        return {key: value for key, value in state.items() if key != KEY}


@contextmanager
def without_marks(engine: Any) -> Iterator[None]:
    """Save or load a checkpoint, whose files say by themselves of which cut they are."""
    before, engine.is_in_checkpoint = engine.is_in_checkpoint, True
    try:
        yield
    finally:
        engine.is_in_checkpoint = before


def _description(engine: Any) -> dict[str, Any]:
    """The cut, this rank's place in it, and the parameters in the optimizer's order: plain values."""
    stages = allocation_of(engine.module).stages
    try:
        trained = trained_by(engine.optimizer, engine.module)
    except RuntimeError:  # an optimizer of DeepSpeed's that cannot move either
        trained = []
    return {
        "rank": engine.stage_id,
        "stages": [[*stage.layers, stage.device] for stage in stages],
        "parameters": [share.name for one in trained for share in one.shares],
    }


def _difference(there: Any, here: dict[str, Any]) -> str:
    """Why a state does not belong to the parameters here, and what does."""
    begin = "optimizer.load_state_dict() is given a state that was taken"
    if there["stages"] != here["stages"] or there["rank"] != here["rank"]:
        of_others = (
            ", and layers of other ranks have moved since"
            if (there["rank"], _layers_in_words(there)) == (here["rank"], _layers_in_words(here))
            else ""
        )
        reason = (
            f"where rank {there['rank']} had {_layers_in_words(there)}, and rank {here['rank']} has "
            f"{_layers_in_words(here)} now{of_others}"
        )
    else:
        names = [name for name in there["parameters"] if name not in here["parameters"]]
        names += [name for name in here["parameters"] if name not in there["parameters"]]
        of_names = f" (they differ by {names[0]})" if names else " in another order"
        reason = (
            f"of {counted(len(there['parameters']), 'parameter')}, and this optimizer trains "
            f"{counted(len(here['parameters']), 'parameter')} of rank {here['rank']}{of_names}"
        )
    return f"{begin} {reason}: values would be taken for those of other parameters. {WAY_OUT}"


def _layers_in_words(mark: Mapping[str, Any]) -> str:
    """The layers of a mark's rank: ``layers 0, 1 and 5``."""
    layers = [
        layer for first, stop, device in mark["stages"] if device == mark["rank"] for layer in range(first, stop)
    ]
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {listed(layers)}"
