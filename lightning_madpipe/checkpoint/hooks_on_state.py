"""What ``on_save_checkpoint`` and ``on_load_checkpoint`` make of ``checkpoint["state_dict"]`` of a folder.

Each rank has the values of its own layers, and stand-ins for those of the others, so that hooks see all names.
What they leave out, replace and add is written beside the layers, which DeepSpeed writes whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor, nn

from deepspeed_partition.engine.runtime.collectives import gather_objects
from lightning_madpipe.compat.absent_parameters import Absent
from lightning_madpipe.compat.state_dict_names import OneDeviceNames

IS_ELSEWHERE = (
    'a hook of checkpoints needs the values of a tensor in checkpoint["state_dict"] that another rank has: leave '
    "entries out, or change each by itself; save_checkpoint(path, weights_only=True), or "
    "ModelCheckpoint(save_weights_only=True), has them all on rank 0"
)
NO_STATE = (
    'on_save_checkpoint takes checkpoint["state_dict"] away, and a checkpoint without it is not loaded: leave '
    'out its entries, as by checkpoint["state_dict"] = {}'
)
NO_OPTIMIZER = (
    'on_save_checkpoint takes checkpoint["optimizer_states"] away, and DeepSpeed writes them nevertheless: leave '
    "them there, or write weights alone, by save_checkpoint(path, weights_only=True) or "
    "ModelCheckpoint(save_weights_only=True)"
)
LEFT_OUT = (
    'on_save_checkpoint leaves {names} out of checkpoint["state_dict"]: who loads {path} gets none of them, but '
    "files in it hold them, because DeepSpeed writes layers whole; lightning_madpipe.consolidate(folder, file) "
    "writes one file without them"
)
_KEPT, _DROPPED, _GIVEN, _ELSEWHERE = range(4)


@dataclass(frozen=True, slots=True)
class LeftByHooks:
    """What hooks have made of the state of a checkpoint, and what this rank has of it."""

    dropped: list[str]
    given: dict[str, int]
    """The names of what hooks replaced or added, with the stage that writes it."""
    own: dict[str, Any]
    """What this rank writes of that."""


def shown_state(own: Mapping[str, Any], pipeline: PipelineModule, names: OneDeviceNames) -> dict[str, Any]:
    """``own``, this rank's part of the state, with stand-ins for the tensors of other ranks. Collective."""
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    device = next((value.device for value in tensors.values()), torch.device("cpu"))
    forms = {name: (value.shape, value.dtype) for name, value in tensors.items()}
    absent = {
        name: Absent.like(torch.empty(shape, dtype=dtype, device="meta"), device, IS_ELSEWHERE)
        for theirs in gather_objects(forms, pipeline.mpu().get_pipe_parallel_group())
        for name, (shape, dtype) in theirs.items()
    }
    return names.in_order({**absent, **own})


def forms_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`shown_by_forms` takes of a state: the forms of its tensors, and its other values."""
    return {
        name: (value.shape, value.dtype) if isinstance(value, Tensor) else [value] for name, value in state.items()
    }


def shown_by_forms(shown: Mapping[str, Any], forms: Mapping[str, Any]) -> dict[str, Any]:
    """The state of rank 0 on another rank: what this has by the same name, stand-ins for other tensors."""
    device = next((value.device for value in shown.values() if isinstance(value, Tensor)), torch.device("cpu"))

    def value(name: str, form: Any) -> Any:
        if isinstance(form, list):
            return form[0]
        shape, dtype = form
        own = shown.get(name)
        is_own = isinstance(own, Tensor) and (own.shape, own.dtype) == (shape, dtype)
        form = torch.empty(shape, dtype=dtype, device="meta")
        return own if is_own else Absent.like(form, device, IS_ELSEWHERE)

    return {name: value(name, form) for name, form in forms.items()}


def left_by_hooks(shown: Mapping[str, Any], left: Any, group: Any) -> LeftByHooks:
    """Compare what hooks have ``left`` with what was ``shown``. Collective over ``group``, a pipeline.

    The first rank has the last word, as in code under ``if trainer.is_global_zero``.

    Raises:
        ValueError: there is no state any more, or nobody has the values of a tensor; on every rank.
    """
    kinds = None
    if isinstance(left, Mapping):
        kinds = {name: _kind(shown.get(name), left.get(name), name in left) for name in {**shown, **left}}
    everyone: list[Any] = gather_objects(kinds, group)
    if None in everyone:
        raise ValueError(NO_STATE)
    dropped, given = [], {}
    for name, kind in everyone[0].items():
        theirs = [each.get(name, _DROPPED) for each in everyone]
        if kind == _DROPPED:
            dropped.append(name)
        elif kind == _GIVEN or (kind == _ELSEWHERE and _GIVEN in theirs):
            given[name] = theirs.index(_GIVEN)
        elif kind == _ELSEWHERE and (name not in shown or _KEPT not in theirs):
            raise ValueError(f"{name}: {IS_ELSEWHERE}")
    stage = torch.distributed.get_rank(group)
    own = {name: _owned(left[name]) for name, writer in given.items() if writer == stage}
    return LeftByHooks(dropped, given, own)


def _kind(shown: Any, left: Any, is_there: bool) -> int:
    if not is_there:
        return _DROPPED
    if left is shown:
        return _KEPT
    if isinstance(left, Absent):
        return _ELSEWHERE
    is_same = (
        isinstance(left, Tensor)
        and isinstance(shown, Tensor)
        and not isinstance(shown, Absent)
        and (left.dtype, left.shape) == (shown.dtype, shown.shape)
        and torch.equal(left.to(shown.device), shown)
    )
    return _KEPT if is_same else _GIVEN


def _owned(value: Any) -> Any:
    """Return a copy on the CPU: a view would be written with all that it is a view of."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


class WeightsBefore:
    """The weights that a module has on this rank before a checkpoint is loaded; what hooks leave out keeps them.

    It is collective over replicas, and is made before the checkpoint is loaded.
    """

    def __init__(self, module: nn.Module, pipeline: PipelineModule, names: OneDeviceNames) -> None:
        self._module, self._pipeline, self._names = module, pipeline, names
        self._layers = {name: _owned(_value(tensor)) for name, tensor in self._tensors().items()}
        self._outside = {name: _owned(value) for name, value in self._beside().items()}
        self._shown: Mapping[str, Any] = {}

    def state(self, shown: Mapping[str, Any], dropped: list[str], given: Mapping[str, Any]) -> dict[str, Any]:
        """What hooks have left of the state, where ``shown`` is what has been loaded of the layers' own files."""
        self._shown = shown
        left = {name: value for name, value in shown.items() if name not in dropped}
        return {**left, **given}

    def load(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Let the module have ``state``, and what it had before where that lacks something.

        Raises:
            ValueError: a name is missing or too much (if ``strict``), or a shape is another one; on every rank.
        """
        tensors = {name: value for name, value in self._shown.items() if isinstance(value, Tensor)}
        missing = [name for name in tensors if name not in state]
        unexpected = [name for name in state if name not in self._shown]
        if strict and (missing or unexpected):
            raise ValueError(
                f"the checkpoint lacks {some(missing)} and has {some(unexpected)} beside what the module has, as "
                "on_save_checkpoint has left it: let on_load_checkpoint set what is missing, or set "
                "self.strict_loading = False in the module, which keeps what it has of these"
            )
        for name, value in tensors.items():
            if name in state and state[name].shape != value.shape:
                raise ValueError(
                    f"{name} is of shape {tuple(state[name].shape)} in the checkpoint and of {tuple(value.shape)} "
                    "here"
                )
        layers = {}
        for name, before in self._layers.items():
            there = [alias for alias in self._names.of(name) if alias in state]
            if not there:
                layers[name] = before
            elif state[there[-1]] is not self._shown.get(there[-1]):
                layers[name] = state[there[-1]]
        self._pipeline.load_state_dict(layers, strict=False)
        for name, tensor in self._tensors().items():
            if name in layers and hasattr(tensor, "_hp_mapping"):
                safe_set_full_fp32_param(tensor, layers[name].to(tensor.device).float())
        outside = {name: state.get(name, before) for name, before in self._outside.items()}
        with self._pipeline.elsewhere.lifted():
            nn.Module.load_state_dict(self._module, outside, strict=False)

    def _tensors(self) -> dict[str, Any]:
        state = self._pipeline.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def _beside(self) -> dict[str, Any]:
        state = nn.Module.state_dict(self._module)
        return {name: value for name, value in state.items() if self._names.is_outside(name)}


def _value(tensor: Tensor) -> Tensor:
    """The tensor itself, or the weight in fp32 that an optimizer keeps of it."""
    return safe_get_full_fp32_param(tensor) if hasattr(tensor, "_hp_mapping") else tensor


def some(names: list[str]) -> str:
    """The first three of many names."""
    return (", ".join(names[:3]) + (f", ... ({len(names)} in all)" if len(names) > 3 else "")) or "nothing"
