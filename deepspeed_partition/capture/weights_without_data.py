"""The weights of a model while it is recorded: tensors without data stand in their places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_partition.tensor_values import version_of

FLAGS = (bool, int, float, str)
"""The types of attributes by which a layer may note that it has set its weights."""


def flags_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module by which it may note that it has set its weights."""
    return {name: value for name, value in vars(module).items() if type(value) in FLAGS}


def put_flags_back(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Let a module have the flags that it had; return the names of those that it had set since."""
    changed = [name for name, value in flags_of(module).items() if name not in before or before[name] != value]
    for name in changed:
        if name in before:
            setattr(module, name, before[name])
        else:
            delattr(module, name)
    return changed


@dataclass(frozen=True, slots=True)
class State:
    """What a recording depends on besides the arguments: the types of weights, and autocast."""

    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """The types of weights, by name, where weights are not to be asked, for some may have changed."""
    changed: dict[torch.dtype, torch.dtype] = field(default_factory=dict)
    """What was made of a type, for example bfloat16 of float32."""
    device: torch.device | None = None
    first_names: dict[str, str] = field(default_factory=dict)

    def dtype_of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        dtype = self.dtypes.get(name, tensor.dtype)
        return self.changed.get(dtype, dtype)


class WeightsWithoutData:
    """The parameters and buffers of a model by name, and what stands for them.

    Args:
        model: The model.
        device: The device that its tensors are said to be on.
        state: The types that they are said to have.
        fake: The mode in which tensors without data are made.
    """

    def __init__(self, model: nn.Module, device: torch.device, state: State, fake: FakeTensorMode) -> None:
        self._model, self._device, self._state, self._fake = model, device, state, fake
        self._name_of: dict[int, str] = {}
        self._stand_ins: dict[int, Any] = {}  # as long as they live, no other object has their number
        self.by_name: dict[str, Any] = {}
        """The model's own tensors."""
        self.of_storage: dict[int, str] = {}
        """The names of those whose stand-ins have a storage."""
        self.written: set[int] = set()
        """The storages that the model's code writes to."""
        self.set_once: list[tuple[str, str, str]] = []
        """The modules that write to a weight of theirs and to a plain attribute: their path, the names of both."""
        self.dtypes: dict[str, torch.dtype] = {}
        self.first_names: dict[str, str] = {}

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The first name of a parameter or buffer, or of what stands for it; None for other tensors."""
        return self._name_of.get(id(tensor))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model's modules have tensors without data, in the places of parameters and buffers."""
        places: list[tuple[dict[str, Any], str, Any]] = []
        flags = [(path, module, flags_of(module)) for path, module in self._model.named_modules()]
        # A module that stands at two places has its tensors under both names.
        for prefix, module in self._model.named_modules(remove_duplicate=False):
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        self._add(f"{prefix}.{name}" if prefix else name, tensor)
                        places.append((table, name, tensor))
        try:
            for table, name, tensor in places:
                table[name] = self._stand_ins[id(tensor)]
            yield
        finally:
            for table, name, tensor in places:
                table[name] = tensor
            for path, module, before in flags:
                self._put_flags_back(path, module, before)

    def _put_flags_back(self, path: str, module: nn.Module, before: dict[str, Any]) -> None:
        """Let a module that has written to what stands for a weight of its own have the flags that it had.

        Such as one by which it notes that it has set the weight, which itself is as it was.
        """
        weights = [
            name
            for name, weight in module._parameters.items()
            if weight is not None and storage_of(self._stand_ins[id(weight)]) in self.written
        ]
        if weights:
            self.set_once += [(path, weights[0], name) for name in put_flags_back(module, before)]

    def _add(self, full: str, tensor: torch.Tensor) -> None:
        dtype = self.dtypes[full] = self._state.dtype_of(full, tensor)
        if id(tensor) not in self._stand_ins:
            fake = self._stand_ins[id(tensor)] = self._without_data(tensor, dtype)
            first = self._state.first_names.get(full, full)
            self.by_name[first] = tensor
            self._name_of[id(tensor)] = self._name_of[id(fake)] = first
            self.of_storage[storage_of(fake)] = first
        self.first_names[full] = self._name_of[id(tensor)]

    def _without_data(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        with torch.no_grad(), self._fake:
            like = torch.empty_strided(tensor.shape, torch.Tensor.stride(tensor), dtype=dtype, device=self._device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(like, requires_grad=tensor.requires_grad)
        return like

    @contextmanager
    def with_data(self, module: nn.Module, changed: set[int]) -> Iterator[None]:
        """Let a module have copies of its own weights meanwhile, or zeros where these have no data themselves.

        Args:
            changed: Gets the storages of what stands for the buffers that the module has changed.
        """
        places: list[tuple[dict[str, Any], str, Any]] = []
        copies: list[tuple[torch.Tensor, int | None]] = []
        try:
            for part in module.modules():
                tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
                for table in tables:
                    for name, tensor in table.items():
                        if tensor is None:
                            continue
                        places.append((table, name, tensor))
                        real = self.by_name[self._name_of[id(tensor)]]
                        real = (
                            real.detach().to(tensor.dtype, copy=True)
                            if not real.is_meta
                            else torch.zeros_like(real, device=self._device)
                        )
                        table[name] = (
                            nn.Parameter(real, requires_grad=False) if isinstance(tensor, nn.Parameter) else real
                        )
                        copies.append((table[name], version_of(table[name])))
            yield
        finally:
            for (table, name, tensor), (copy, version) in zip(places, copies, strict=True):
                if self._is_written(tensor, table[name]):
                    self.written.add(storage_of(tensor))
                is_buffer = not isinstance(tensor, nn.Parameter)
                if is_buffer and (table.get(name) is not copy or version_of(copy) != version):
                    changed.add(storage_of(tensor))
                table[name] = tensor

    def _is_written(self, stand_in: torch.Tensor, copy: torch.Tensor) -> bool:
        real = self.by_name[self._name_of[id(stand_in)]]
        is_known = isinstance(stand_in, nn.Parameter) and not real.is_meta and isinstance(copy, torch.Tensor)
        return is_known and not torch.equal(real.detach().to(stand_in.dtype), copy.detach())


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors share which lie in the same memory."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata
