"""Tensors of a layer that lie in one memory, such as a buffer and a view of it, and do so where the layer moves.

What changes one of them in place changes the others. They are sent one by one, and laid into one memory where they
come; what lies apart where they were comes apart.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import nn

from deepspeed_partition.code_names import LIBRARIES, module_of
from deepspeed_partition.engine.pipeline.parts import tensors_by_name
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.generators import OF_THREADS
from deepspeed_partition.hidden_modules import hidden_tensors, table_of
from deepspeed_partition.tensor_values import has_memory

Place: TypeAlias = tuple[Any, ...]
"""Where a tensor of a layer is found: ``(name,)`` of a parameter or buffer, else the path of a module, the name of
an attribute, and keys and names within that."""

_ALIGNMENT = 16
"""Bytes of the largest element of a tensor, of which the sizes of all others are divisors."""
_DEPTH = 3
_MOST_MEMBERS = 1000
_OF_TORCH = frozenset((*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"))


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor of a layer."""

    tensor: torch.Tensor
    places: list[Place]
    setters: list[Callable[[torch.Tensor], object] | None]
    """What puts another tensor in each of these places; None where that cannot be."""


@dataclass(frozen=True, slots=True)
class Lying:
    """How a tensor lies in a memory."""

    places: tuple[Place, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    """The byte at which it begins."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory in which several tensors of a layer lie, or one that has several names."""

    num_bytes: int
    tensors: tuple[Lying, ...]


def found_in(layer: nn.Module, hidden: Mapping[str, nn.Module]) -> list[Found]:
    """All tensors of a layer: parameters, buffers, those of modules that it hides, and those in attributes.

    Args:
        layer: The layer.
        hidden: The modules that it holds where torch does not look, by name.
    """
    found: dict[int, Found] = {}

    def note(tensor: torch.Tensor, place: Place, setter: Callable[[torch.Tensor], object] | None) -> None:
        if may_share_memory(tensor):
            each = found.setdefault(id(tensor), Found(tensor, [], []))
            each.places.append(place)
            each.setters.append(setter)

    for name, tensor in {**tensors_by_name(layer), **hidden_tensors(dict(hidden))}.items():
        note(tensor, (name,), None)
    for path, module in {**dict(layer.named_modules()), **hidden}.items():
        table = vars(module)
        for name, value in list(table.items()):
            if name not in _OF_TORCH:
                for tensor, inner, setter in _tensors_in(value, (name,), table, _DEPTH):
                    note(tensor, (path, *inner), setter)
    return list(found.values())


def _tensors_in(
    value: Any, place: Place, holder: Any, depth: int
) -> Iterator[tuple[torch.Tensor, Place, Callable[[torch.Tensor], object] | None]]:
    if type(value) in (torch.Tensor, nn.Parameter):
        is_open = not isinstance(holder, tuple)
        yield value, place, (lambda other: holder.__setitem__(place[-1], other)) if is_open else None
    elif not depth or isinstance(value, nn.Module | type | torch.Tensor):
        return
    elif isinstance(value, dict | list | tuple | deque):
        members = value.items() if isinstance(value, dict) else enumerate(value)
        for key, member in list(islice(members, _MOST_MEMBERS)):
            if isinstance(key, str | int):
                yield from _tensors_in(member, (*place, key), value, depth - 1)
    elif module_of(type(value)).partition(".")[0] not in (*LIBRARIES, *OF_THREADS, "builtins"):
        table = table_of(value)
        for key, member in list(islice(table.items(), _MOST_MEMBERS)):
            yield from _tensors_in(member, (*place, key), table, depth - 1)


def may_share_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has numbers in memory, some of which another one may have."""
    return has_memory(tensor) and not tensor.is_quantized and bool(tensor.numel())


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a memory that a tensor has, and the one after its last."""
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    last = sum(
        (length - 1) * int(stride)
        for length, stride in zip(tensor.shape, torch.Tensor.stride(tensor), strict=True)
    )
    return begin * size, (begin + last + 1) * size


def overlapping(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The places of tensors by the stretches of memory that they have together; also those of one tensor."""
    stretches: list[list[int]] = []
    memories = [tensor.untyped_storage()._cdata for tensor in tensors]
    places = [_bytes_of(tensor) for tensor in tensors]
    last, end = None, 0
    for number in sorted(range(len(tensors)), key=lambda each: (memories[each], places[each])):
        begin, after = places[number]
        if memories[number] == last and begin < end:
            stretches[-1].append(number)
            end = max(end, after)
        else:
            stretches.append([number])
            last, end = memories[number], after
    return sorted(map(sorted, stretches))


def memories_of(found: Sequence[Found]) -> list[Memory]:
    """The memories in which several tensors of a layer lie over each other, or one lies that has several names.

    Tensors that have no byte together, as parameters in a flat buffer, have nothing to keep.
    """
    memories = []
    for numbers in overlapping([each.tensor for each in found]):
        members = [found[number] for number in numbers]
        if sum(len(each.places) for each in members) == 1 or any(map(_is_turned, members)):
            continue
        ends = [_bytes_of(each.tensor) for each in members]
        first = min(begin for begin, _ in ends) // _ALIGNMENT * _ALIGNMENT
        lying = tuple(
            Lying(
                tuple(each.places),
                each.tensor.dtype,
                tuple(each.tensor.shape),
                tuple(torch.Tensor.stride(each.tensor)),
                begin - first,
            )
            for each, (begin, _) in zip(members, ends, strict=True)
        )
        memories.append(Memory(max(end for _, end in ends) - first, lying))
    return memories


def _is_turned(found: Found) -> bool:
    """Whether a tensor reads its memory with other signs."""
    return found.tensor.is_conj() or found.tensor.is_neg()


def in_memory_of_others(found: Sequence[Found]) -> list[torch.Tensor]:
    """The tensors of a layer that have bytes of memory together with others of its tensors."""
    numbers = overlapping([each.tensor for each in found])
    return [found[number].tensor for group in numbers if len(group) > 1 for number in group]


def take_apart(found: Sequence[Found], memories: Sequence[Memory]) -> None:
    """Give tensors of a layer memory of their own that lie over each other here, and not where they come from.

    One tensor under two names, under which there are two where it comes from, becomes two.
    """
    lies_in = {
        place: (number, which)
        for number, memory in enumerate(memories)
        for which, lying in enumerate(memory.tensors)
        for place in lying.places
    }
    for each in found:
        first = lies_in.get(each.places[0])
        for place, setter in zip(each.places[1:], each.setters[1:], strict=True):
            is_one = first is not None and lies_in.get(place) == first
            if not is_one and setter is not None and not isinstance(each.tensor, nn.Parameter):
                setter(each.tensor.detach().clone())
    for numbers in overlapping([each.tensor for each in found]):
        seen = set[int | None]()
        for number in numbers:
            memory_number, _ = lies_in.get(found[number].places[0], (None, None))
            if seen and (memory_number is None or memory_number not in seen):
                found[number].tensor.data = found[number].tensor.data.clone()
            seen.add(memory_number)


def leave_others(found: Sequence[Found]) -> None:
    """Give attributes of a layer that are views of what is no part of it memory of their own.

    A layer that is built anew here may look at a weight that trains here, where the rank that it comes from looked
    at one that did not: it must go on with the values that it had, and hand no gradient to that weight.
    """
    known = {id(each.tensor) for each in found}
    for each in found:
        setters = [setter for setter in each.setters if setter is not None]
        if len(setters) == len(each.setters) and _is_view_of_others(each.tensor, known):
            own = each.tensor.detach().clone()
            for setter in setters:
                setter(own)


def lay_together(found: Sequence[Found], memories: Sequence[Memory]) -> None:
    """Lay tensors of a layer, which have their values, into memories as where they come from."""
    by_place = {
        place: (each, setter) for each in found for place, setter in zip(each.places, each.setters, strict=True)
    }
    for memory in memories:
        # A tensor that this process lacks, as one in an object that stays, has nothing to be laid.
        members = [
            (lying, [by_place[place] for place in lying.places if place in by_place]) for lying in memory.tensors
        ]
        members = [(lying, here) for lying, here in members if here and _is_as(here[0][0].tensor, lying)]
        if members and not _lie_so(members):
            _lay(memory, members)


Members: TypeAlias = list[tuple[Lying, list[tuple[Found, Callable[[torch.Tensor], object] | None]]]]


def _is_as(tensor: torch.Tensor, lying: Lying) -> bool:
    return tensor.dtype == lying.dtype and tuple(tensor.shape) == lying.shape


def _lie_so(members: Members) -> bool:
    """Whether tensors lie in one memory already as they should."""
    starts = set()
    for lying, here in members:
        tensor = here[0][0].tensor
        if (
            any(each.tensor is not tensor for each, _ in here)
            or tuple(torch.Tensor.stride(tensor)) != lying.stride
        ):
            return False
        starts.add((tensor.untyped_storage()._cdata, _bytes_of(tensor)[0] - lying.begin))
    return len(starts) == 1


def _lay(memory: Memory, members: Members) -> None:
    device = members[0][1][0][0].tensor.device
    storage = torch.empty(memory.num_bytes, dtype=torch.uint8, device=device).untyped_storage()
    laid = []
    for lying, here in members:
        place = lying.begin // lying.dtype.itemsize
        view = torch.empty(0, dtype=lying.dtype, device=device).set_(storage, place, lying.shape, lying.stride)
        laid.append((view, here))
    for view, here in reversed(laid):  # the values of parameters and buffers, which come first, count
        target, values = view, here[0][0].tensor.detach()
        for dimension, (size, stride) in enumerate(zip(view.shape, torch.Tensor.stride(view), strict=True)):
            if size > 1 and not stride:  # elements that are one in memory
                target, values = (each.narrow(dimension, 0, 1) for each in (target, values))
        target.copy_(values)
    for view, here in laid:
        first = here[0][0].tensor
        _set(first, view, here[0][1])
        for each, setter in here[1:]:
            if each.tensor is first and not first.is_inference():
                continue
            if setter is not None and type(each.tensor) is type(first):
                setter(first if not first.is_inference() else view)
            else:
                _set(each.tensor, view, setter)


def _set(tensor: torch.Tensor, view: torch.Tensor, setter: Callable[[torch.Tensor], object] | None) -> None:
    if tensor.is_inference() and setter is not None:  # it cannot be given other memory
        setter(view)
    else:
        tensor.data = view


def say_what_lies_outside(layers: Mapping[str, Sequence[Found]], moving: Collection[str], way_out: str) -> None:
    """Say, once, which tensors of a layer that moves lie in one memory with what does not go with it.

    Args:
        layers: The tensors of all layers here, by the names of these in the pipeline.
        moving: The layers that move.
        way_out: How layers are kept from moving.
    """
    known: dict[int, tuple[Found, list[str]]] = {}
    for name, found in layers.items():
        for each in found:
            known.setdefault(id(each.tensor), (each, []))[1].append(name)
    everything = list(known.values())
    for numbers in overlapping([each.tensor for each, _ in everything]):
        members = [everything[number] for number in numbers]
        for name in dict.fromkeys(name for _, names in members for name in names if name in moving):
            inside = [each for each, names in members if name in names]
            around = [(names[0], each) for each, names in members if name not in names]
            other = _other_of(inside, around, known)
            if other is not None:
                _say(name, inside[0], other, way_out)


def _other_of(inside: Sequence[Found], around: Sequence[tuple[str, Found]], known: Container[int]) -> str | None:
    """What lies in one memory with tensors of a layer and does not go with them, in words; None of nothing."""
    if around:
        layer, each = around[0]
        return f"{_shown(each)} of layer {layer!r}"
    if len(inside) > 1 and any(map(_is_turned, inside)):
        return f"{_shown(inside[1])}, and one of both is a conjugate"
    return "a tensor that is not the layer's" if any(_is_view_of_others(e.tensor, known) for e in inside) else None


def _is_view_of_others(tensor: torch.Tensor, known: Container[int]) -> bool:
    """Whether a tensor is a view of one that is not known, and that somebody holds beside its views."""
    base = tensor._base
    is_others = base is not None and id(base) not in known
    del base
    return is_others and _num_holders_of_base(tensor) > _num_holders_of_base(torch.zeros(2)[:1])


def _num_holders_of_base(view: torch.Tensor) -> int:
    """How often the tensor is held of which one is a view: by the views alone as often as any other one."""
    return sys.getrefcount(view._base)


def _say(name: str, found: Found, other: str, way_out: str) -> None:
    warn_once(
        f"one memory/{name}/{_shown(found)}",
        f"{_shown(found)} of layer {name!r}, which moves to another rank, lies in one memory with {other}, as a "
        "view does: there it has memory of its own, and what changes one of them in place does not reach the "
        "other. Let the layer make both, as self.register_buffer('row', self.big[1]) does; or give it a copy "
        f"(clone()) where nothing changes them; or {way_out}",
    )


def _shown(found: Found) -> str:
    return ".".join(str(each) for each in found.places[0] if each != "")
