"""Shapes of what crosses a boundary: what a receiver must know, and how it knows it without being told each time.

Both ends of a boundary keep the shapes of its activations. Until a receive is posted, its receiver has taken some
activation of the batch, or none: that one's shapes, or those of the batch before, are what it expects. Its sender
knows from the lists of both which one that is. So nothing is said while shapes stay:

    batch before told each time     header F0.0 header F0.1 header F0.2     and all shapes were those expected
    this batch                             F0.0        F0.1        F0.2     F0.1 has other shapes: see below

An activation of other shapes than its receiver has made room for is sent aside, behind its shapes. What fills the
room that it does not fit bears a mark: 16 random bytes at its end, which the job draws when it starts, and which
no other data has. After a batch with such a surprise, each activation of the boundary has a header in front, which
is read while others are computed; after a batch without one, none has.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_partition.engine.runtime.autograd_boundary import Boundary, first_places, has_twice, tensors_of
from deepspeed_partition.schedule.instructions import Message, Program, Transfer

HEADER_SIZE = 256
"""Numbers in a header: 40 tensors of four dimensions fit."""
MARK_BYTES = 16
_NOT_LOOKED_FOR = -1
MOST_KEPT = 2**16
"""Most shapes of activations of a boundary that are kept, where batches follow one another without end."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What a receiver must know about a boundary."""

    is_tuple: bool
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]
    same: tuple[int, ...] = ()
    """For each tensor the first place of the same one, where a layer returns one twice; () where none is."""
    _marked_tensor: int | None = field(default=_NOT_LOOKED_FOR, compare=False, repr=False)
    _like: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """One number that looks like the only tensor: making another one like it is half as long as by its shape."""

    @classmethod
    def of(cls, boundary: Boundary) -> Shapes:
        """The shapes of an activation, with what it says of tensors that are one."""
        if isinstance(boundary, torch.Tensor):
            return _shapes(False, ((boundary.shape, boundary.dtype),))
        shapes = tuple([(each.shape, each.dtype) for each in boundary])
        return _shapes(True, shapes, first_places(boundary) if has_twice(boundary) else ())

    @classmethod
    def of_gradients(cls, boundary: Boundary) -> Shapes:
        """The shapes of the gradients of an activation: each of its tensors of floating-point numbers has one."""
        if isinstance(boundary, torch.Tensor):
            return _shapes(True, ((boundary.shape, boundary.dtype),) if boundary.is_floating_point() else ())
        return _shapes(True, tuple([(each.shape, each.dtype) for each in boundary if each.is_floating_point()]))

    def header(self) -> torch.Tensor:
        """Encode as numbers: tuple or not, how many tensors, and of each the type, the dimensions, the shape.

        Of one that is the same as another -1 less the place of that.

        Raises:
            RuntimeError: too many tensors or dimensions.
        """
        numbers = [int(self.is_tuple), len(self.tensors)]
        for place, (shape, dtype) in enumerate(self.tensors):
            if self.same and self.same[place] != place:
                numbers.append(-1 - self.same[place])
                continue
            numbers += [PipelineEngine.DTYPE_TO_ID[dtype], len(shape), *shape]
        if len(numbers) > HEADER_SIZE:
            raise RuntimeError(
                f"{len(self.tensors)} tensors cross one cut, and their shapes take {len(numbers)} numbers: at "
                f"most {HEADER_SIZE} fit, so cut the model where fewer tensors cross"
            )
        return torch.tensor(numbers + [0] * (HEADER_SIZE - len(numbers)), dtype=torch.int64)

    @classmethod
    def from_header(cls, header: torch.Tensor) -> Shapes:
        numbers = iter(header.tolist())
        is_tuple, count = bool(next(numbers)), next(numbers)
        tensors: list[tuple[torch.Size, torch.dtype]] = []
        same = []
        for place in range(count):
            kind = next(numbers)
            same.append(place if kind >= 0 else -1 - kind)
            if kind < 0:
                tensors.append(tensors[-1 - kind])
                continue
            dtype, num_dimensions = PipelineEngine.ID_TO_DTYPE[kind], next(numbers)
            tensors.append((torch.Size([next(numbers) for _ in range(num_dimensions)]), dtype))
        return _shapes(is_tuple, tuple(tensors), () if same == list(range(count)) else tuple(same))

    def empty(self, device: torch.device) -> Boundary:
        if len(self.tensors) == 1:
            like = self._like
            if like is None or like.device != device:
                [(shape, dtype)] = self.tensors
                like = torch.empty((1,) * len(shape), dtype=dtype, device=device).expand(shape)
                object.__setattr__(self, "_like", like)
            tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
            return (tensor,) if self.is_tuple else tensor
        made: list[Any] = [
            None if self.same and self.same[place] != place else torch.empty(shape, dtype=dtype, device=device)
            for place, (shape, dtype) in enumerate(self.tensors)
        ]
        return tuple([made[self.same[place]] if each is None else each for place, each in enumerate(made)])

    @property
    def marked_tensor(self) -> int | None:
        """Number of the tensor, a large one, at whose end there is room for a mark; None if there is none."""
        if self._marked_tensor == _NOT_LOOKED_FOR:
            sizes = [shape.numel() * dtype.itemsize for shape, dtype in self.tensors]
            largest = max(range(len(sizes)), key=sizes.__getitem__, default=0)
            found = largest if sizes and sizes[largest] >= MARK_BYTES else None
            object.__setattr__(self, "_marked_tensor", found)
        return self._marked_tensor

    def marked(self, mark: bytes) -> Boundary:
        """Return tensors on the CPU that say by their mark that they are not the message."""
        boundary, number = self.empty(torch.device("cpu")), self.marked_tensor
        assert number is not None
        for tensor in tensors_of(boundary):
            tensor.zero_()
        tail = tensors_of(boundary)[number].view(-1).view(torch.uint8)[-MARK_BYTES:]
        tail.copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
        return boundary

    def bears(self, mark: bytes, boundary: Boundary) -> bool:
        """Return whether tensors of these shapes on the CPU are no message, but say so by their mark."""
        number = self.marked_tensor
        if number is None:
            return False
        tensor = boundary[number] if isinstance(boundary, tuple) else boundary
        end = tensor.data_ptr() + tensor.nbytes
        # Its last byte first: 255 times in 256 that is all that is read of a message.
        return (
            _Byte.from_address(end - 1).value == mark[-1]
            and ctypes.string_at(end - MARK_BYTES, MARK_BYTES) == mark
        )


_Byte = ctypes.c_uint8


@functools.lru_cache(maxsize=1024)
def _shapes(
    is_tuple: bool, tensors: tuple[tuple[torch.Size, torch.dtype], ...], same: tuple[int, ...] = ()
) -> Shapes:
    """Return the one object of these shapes: it is asked for with each message, and rarely for new ones."""
    return Shapes(is_tuple, tensors, same)


class ShapesDifferError(RuntimeError):
    """A stage's output has other shapes than those that its receiver was told of."""

    def __init__(self, message: str, expected: Shapes) -> None:
        super().__init__(message)
        self.expected = expected

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.expected)


class Bases(Protocol):
    """Numbers of the activations by whose shapes others are received; None for those of the batch before."""

    def __getitem__(self, message: Message, /) -> int | None: ...


def bases_of(program: Program) -> dict[Message, int | None]:
    """Return, for each activation, the last one over its boundary that is taken before its receive is posted."""
    bases: dict[Message, int | None] = {}
    for instructions in program.lists:
        taken: dict[int, int] = {}
        for each in instructions:
            if isinstance(each, Transfer) and each.message.direction == "F":
                if each.kind == "W":
                    taken[each.message.boundary] = each.message.micro_batch
                elif each.kind == "R":
                    bases[each.message] = taken.get(each.message.boundary)
    return bases


@dataclass(slots=True)
class ShapesOfBoundary:
    """The shapes of the activations over one boundary, as both of its ends keep them."""

    tells_each: bool = True
    """Whether each activation of this batch has a header."""
    _before: Shapes | None = None
    _of: dict[int, Shapes] = field(default_factory=dict)
    _surprises: bool = False

    def begin(self) -> None:
        """Begin a batch."""
        if self._of:
            self.tells_each, self._before = self._surprises, self._of[max(self._of)]
        self._of.clear()
        self._surprises = False

    def begin_endless(self) -> None:
        """Begin batches that follow one another without end: who has taken none yet is told each time."""
        self.tells_each, self._before = False, None
        self._of.clear()

    def expected(self, basis: int | None) -> Shapes | None:
        """Return the shapes for which a receiver makes room; None where a header tells them."""
        if self.tells_each:
            return None
        shapes = self._before if basis is None else self._of[basis]
        return None if shapes is None or shapes.marked_tensor is None else shapes

    def note(self, number: int, basis: int | None, shapes: Shapes) -> None:
        """Note the shapes of an activation that was sent, or taken."""
        before = self._before if basis is None else self._of[basis]
        if shapes is before or shapes == before:
            shapes = before  # the one object, which knows its largest tensor
        elif before is not None or any(shapes != each for each in self._of.values()):
            self._surprises = True
        self._of[number] = shapes
        if len(self._of) > MOST_KEPT:
            for old in list(self._of)[: MOST_KEPT // 2]:
                del self._of[old]

    @property
    def first(self) -> Shapes | None:
        """Shapes of the first activation of this batch, if there was one."""
        return next(iter(self._of.values()), None)
