"""One run, on data of our own, of a module that cannot run without data, and what it leaves beside its result.

What such a run leaves in an attribute, a container or a buffer is made of data of our own. Layers leave it on
their rank: code elsewhere that reads it would read a constant of the capture, or what another rank has not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_partition.capture.left_behind import Held, held_by
from deepspeed_partition.capture.recording import Call
from deepspeed_partition.capture.structure import build, flatten, plain_leaves
from deepspeed_partition.capture.weights_without_data import WeightsWithoutData, storage_of
from deepspeed_partition.capture.without_data import (
    PadsNothing,
    data_like,
    hidden_modes,
    same_random_numbers,
    written_by,
)
from deepspeed_partition.tensor_values import has_memory, version_of

_OF_TORCH = frozenset(vars(nn.Module()))
_OTHER_SEED = 1
_NUMBERS_OF = (
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default,
)  # fmt: skip
"""The operations that take plain numbers out of tensors."""


class LeftTensors:
    """The tensors made of data that modules have left somewhere when they ran alone."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[weakref.ref[torch.Tensor], Call]] = {}
        self._made_anew: set[int] = set()

    def add(self, tensor: torch.Tensor, owner: Call, *, is_made_anew: bool = False) -> None:
        """Note a tensor, and whether who runs alone makes it for itself where it is missing."""
        self._owners[id(tensor)] = weakref.ref(tensor), owner
        (self._made_anew.add if is_made_anew else self._made_anew.discard)(id(tensor))

    def is_made_anew(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one that a module makes for itself where it is missing, as a mask that is kept."""
        return id(tensor) in self._made_anew

    def owner_of(self, tensor: torch.Tensor) -> Call | None:
        """The call of the module that has left a tensor; None where none has."""
        found = self._owners.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None


@dataclass(slots=True)
class AloneRun:
    """What one run of a module did."""

    given: list[Any]
    """The leaves of its arguments, with data."""
    is_changed: list[bool]
    """Which of these it has changed in place."""
    result: Any
    numbers: set[tuple[int, str]]
    """Where it has set numbers or texts: the number of the module's object, and the attribute's name."""
    buffers: set[int]
    """The storages of what stands for the buffers that it has changed."""
    in_place: list[torch.Tensor]
    """What it has changed besides, and that was there before; it is put back."""
    made_of_data: list[torch.Tensor]
    """The tensors made of data that are somewhere now."""
    made_anew: list[torch.Tensor]
    """Those made since it has looked at data that are the same for other data: such as a mask that is kept."""


class _FollowsData(TorchDispatchMode):
    """Follows what is computed of data, and puts back what was there before and is written to.

    Args:
        of_data: The tensors that the run begins with: arguments, weights.
        others: Further tensors of the run, such as copies of buffers.
        reads: Is told each tensor that an operation reads.
    """

    def __init__(
        self,
        of_data: Iterable[torch.Tensor],
        others: Iterable[torch.Tensor],
        reads: Callable[[torch.Tensor], None],
    ) -> None:
        super().__init__()
        self._reads = reads
        self._has_numbers = False
        """Whether a number was taken out of data."""
        self._suspects: dict[int, weakref.ref[torch.Tensor]] = {}
        self._of_data: dict[int, weakref.ref[torch.Tensor]] = {}
        self._own: set[int] = set()
        self._before: dict[int, tuple[torch.Tensor, Any]] = {}
        for tensor in of_data:
            self._add(tensor, is_of_data=True)
        for tensor in others:
            self._add(tensor, is_of_data=False)

    def _add(self, tensor: torch.Tensor, *, is_of_data: bool) -> None:
        if is_of_data:
            self._of_data[id(tensor)] = weakref.ref(tensor)
        if has_memory(tensor):
            self._own.add(storage_of(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        for tensor in read:
            self._reads(tensor)
        self._keep_written(func, args, kwargs)
        out = func(*args, **kwargs)
        is_of_data = torch.Tag.nondeterministic_seeded in func.tags or _has_some(self._of_data, read)
        self._has_numbers |= is_of_data and func in _NUMBERS_OF
        # What is made of no tensor behind that may be made of the number, or as that decides.
        is_suspect = not is_of_data and (
            _has_some(self._suspects, read) or (self._has_numbers and _makes(func, read))
        )
        known = {storage_of(tensor) for tensor in read if has_memory(tensor)}
        for tensor in flatten(out)[0]:
            if isinstance(tensor, torch.Tensor):
                if is_of_data:
                    self._of_data[id(tensor)] = weakref.ref(tensor)
                elif is_suspect:
                    self._suspects[id(tensor)] = weakref.ref(tensor)
                if has_memory(tensor) and storage_of(tensor) not in known:
                    self._own.add(storage_of(tensor))
        return out

    def _keep_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in filter(has_memory, written_by(func, args, kwargs)):
            storage = storage_of(tensor)
            if storage not in self._own and storage not in self._before:
                self._before[storage] = tensor, tensor.untyped_storage().clone()

    @contextmanager
    def following(self) -> Iterator[None]:
        try:
            with self:
                yield
        finally:
            for tensor, storage in self._before.values():
                tensor.untyped_storage().copy_(storage)

    def changed(self) -> list[torch.Tensor]:
        """What was there before and was written to."""
        return [tensor for tensor, _ in self._before.values()]

    def made_of_data(self) -> list[torch.Tensor]:
        return _alive(self._of_data)

    def suspects(self) -> list[torch.Tensor]:
        """What may be made of numbers of data, in the order in which it was made."""
        return _alive(self._suspects)


def _seed(seed: int, device: torch.device) -> None:
    """Seed the generators that are put back: those of the CPU and of a device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def _makes(func: Any, read: list[torch.Tensor]) -> bool:
    return not read or func is torch.ops.aten.lift_fresh.default


def _has_some(tensors: dict[int, weakref.ref[torch.Tensor]], read: list[torch.Tensor]) -> bool:
    found = ((tensors.get(id(each)), each) for each in read)
    return any(kept is not None and kept() is each for kept, each in found)


def _alive(tensors: dict[int, weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    found = (each() for each in list(tensors.values()))
    return [tensor for tensor in found if tensor is not None]


def run_alone(
    module: nn.Module, args: Any, kwargs: Any, weights: WeightsWithoutData, device: torch.device,
    reads: Callable[[torch.Tensor], None],
) -> AloneRun:  # fmt: skip
    """Run a module once on data of our own, with copies of its weights.

    Args:
        weights: What stands for the model's weights.
        device: Where it runs.
        reads: Is told each tensor that an operation of the run reads.

    Raises:
        Exception: whatever its code, or ``reads``, raises.
    """
    leaves, structure = flatten((args, kwargs))
    parts = list(module.modules())  # as long as they live, no other object has their number
    before, buffers, held = _plain_values_of(parts), set[int](), held_by(module, None, ())

    def run(seed: int | None) -> tuple[list[Any], list[int | None], Any, _FollowsData]:
        with hidden_modes(), same_random_numbers(device), torch.no_grad():
            if seed is not None:
                _seed(seed, device)
            given = [data_like(leaf, device) for leaf in leaves]
            versions = list(map(_version_of, given))
            both = zip(given, leaves, strict=True)
            made = [now for now, leaf in both if isinstance(now, torch.Tensor) and now is not leaf]
            given_args, given_kwargs = build(structure, given)
            with weights.with_data(module, buffers):
                follows = _FollowsData([*made, *module.parameters()], module.buffers(), reads)
                with follows.following(), PadsNothing():
                    result = module(*given_args, **given_kwargs)
        return given, versions, result, follows

    given, versions, result, follows = run(None)
    suspects = follows.suspects()
    is_same = bool(suspects) and _is_same_for_other_data(suspects, held, lambda: run(_OTHER_SEED)[-1].suspects())
    after = _plain_values_of(module.modules())
    return AloneRun(
        given,
        [_version_of(now) != version for now, version in zip(given, versions, strict=True)],
        result,
        {name for name, value in after.items() if name not in before or before[name] != value},
        buffers,
        follows.changed(),
        follows.made_of_data() + suspects * (not is_same),
        suspects * is_same,
    )


def _is_same_for_other_data(
    suspects: list[torch.Tensor], held: Held, run_again: Callable[[], list[torch.Tensor]]
) -> bool:
    """Whether a run on other data, from the same state, leaves the same, such as a mask that is made once."""
    put_now = held.remembered_now()
    try:
        values = [tensor.detach().clone() for tensor in suspects]
        with held.put_back():
            pass
        with held.put_back():
            others = run_again()
            return len(others) == len(values) and all(map(_is_equal, others, values))
    except Exception:
        return False  # nothing is known
    finally:
        put_now()


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _plain_values_of(parts: Iterable[nn.Module]) -> dict[tuple[int, str], Any]:
    """The numbers and texts in attributes of modules, as they are now."""
    return {
        (id(part), name): plain  # a metric of torchmetrics has another hash with each of its states
        for part in parts
        for name, value in vars(part).items()
        if name not in _OF_TORCH and (plain := plain_leaves(value))
    }


def _version_of(leaf: Any) -> int | None:
    """How often a tensor was changed in place; None of what is no tensor, too."""
    return version_of(leaf) if isinstance(leaf, torch.Tensor) else None
