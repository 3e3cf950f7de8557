"""A Lightning batch in micro-batches whose step runs once, on the outputs of all of them.

What the step passes to ``forward`` for the whole batch is cut into pieces, which go through the pipeline; on the
last stage their outputs are joined again. In training the gradients of the loss by the joined outputs are cut
likewise, and the backward of each micro-batch begins with its piece. All forwards of a batch come before its
first backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_madpipe.steps.micro_batches import MicroBatch
from lightning_madpipe.steps.tensor_comparison import close, has_gradient

Tensors = tuple[Tensor, ...]
Dims = tuple[int | None, ...]
"""The dimension of each tensor that grows with the samples; None: all micro-batches share the tensor."""

WAY_OUT = (
    "MadPipeStrategy(num_micro_batches=1) cuts no batch; MadPipeStrategy(loss='mean') takes the mean of the "
    "losses of micro-batches, which is another loss where samples are compared"
)


OF_A_LOSS = (
    "; where a module computes a loss of its own, such as a center loss, let it return one value for each sample, "
    "and take their mean in the step"
)
"""What to do about an output that is a single number."""
ONE_PER_SAMPLE = (
    ". Let forward() return one for each sample (`.expand(len(x))` of a number that is the same for all)"
)


ROUNDINGS = 16
"""Roundings of the largest number by which sums may differ that a device adds in any order (``scatter_add``)."""


class SamplesSelectedError(ValueError):
    """What a step passes to ``forward`` is not in proportion to the samples."""


def as_tuple(boundary: Any) -> tuple[Any, ...]:
    return boundary if isinstance(boundary, tuple) else (boundary,)


@dataclass(eq=False, slots=True)
class BatchRun:
    """One Lightning batch on its way through the pipeline."""

    micro_batches: list[MicroBatch]
    whole: MicroBatch
    """The whole batch as one micro-batch."""
    tensors: Tensors = ()
    """The tensors of the batch, in order, also those that a step takes out of it."""
    given: Any = None
    """The batch that hooks are given after the step."""
    number: int = 0
    """Counts batches that are kept while others are drawn; 0: it is not."""
    call: Any = None
    """What captured layers run for it."""
    runs_once: bool = False
    """Whether the step runs on the whole batch; else on each micro-batch."""
    asks: Callable[[BatchRun, bool], None] | None = None
    """What to call instead of the step where the loss is tried, with this batch and whether outputs are tuples."""
    trained_as: list[MicroBatch] = field(default_factory=list)
    """Where the loss is tried, the micro-batches that the batch is trained in, which may be of other sizes."""
    inputs: list[Any] = field(default_factory=list)
    """The input of each micro-batch that has not begun, on the first stage."""
    outputs: list[Tensors] = field(default_factory=list)
    """The outputs of the micro-batches that have come through, without their graphs, on the last stage."""
    need_gradients: list[bool] = field(default_factory=list)
    leaves: Tensors = ()
    dims: Dims = ()
    lengths: list[tuple[int, ...]] = field(default_factory=list)
    """The lengths of the pieces of each joined tensor, along its dimension."""
    loss: Tensor | None = None
    """The loss of the whole batch, with its graph down to ``leaves``, until the first backward."""
    gradients: list[tuple[Tensor | None, ...]] | None = None
    """The gradients of each micro-batch's outputs."""
    scale: Tensor | None = None
    fell_apart: bool = False
    """Whether the step ran on each micro-batch after all, because outputs could not be joined."""

    @property
    def done(self) -> list[MicroBatch]:
        """What has run the step: the whole batch, or each micro-batch."""
        return [self.whole] if self.runs_once and not self.fell_apart else self.micro_batches

    @property
    def sizes(self) -> list[int]:
        """The number of samples of each micro-batch."""
        return [micro_batch.size for micro_batch in self.micro_batches]

    @property
    def labels(self) -> list[Any]:
        """What travels in the place of the labels of each micro-batch."""
        if not self.runs_once:
            return list(self.micro_batches)
        return [Piece(self, place) for place in range(len(self.micro_batches))]

    def note_progress(self, progress: Any) -> None:
        """Note how far Lightning's loop is with this batch, whose steps run later."""
        for each in (self.whole, *self.micro_batches):
            each.progress = progress

    def begin(self) -> None:
        """Forget what an earlier run of this batch left."""
        self.outputs, self.need_gradients, self.lengths = [], [], []
        self.fell_apart = False
        self.leaves, self.dims = (), ()
        self.loss = self.gradients = self.scale = None

    def collect(self, outputs: Tensors) -> None:
        """Keep what the last stage put out for one micro-batch.

        Raises:
            TypeError: that is not only tensors.
        """
        for output in outputs:
            if not isinstance(output, Tensor):
                raise TypeError(
                    f"the last layer returns {type(output).__name__}, and what a pipeline's layers return are "
                    "tensors, alone or in a tuple: return its tensors, and make the object of them in the step"
                )
        self.need_gradients = self.need_gradients or [tensor.requires_grad for tensor in outputs]
        self.outputs.append(tuple(tensor.detach() for tensor in outputs))

    def join(self, known: Dims | None, *, trains: bool) -> Tensors:
        """Join all outputs to those of one forward, in training as leaves. The pieces are let go.

        Raises:
            ValueError: they cannot be joined.
        """
        self.dims = dims_of_outputs(self.outputs, self.sizes, known)
        joined = []
        for place, dim in enumerate(self.dims):
            same = [outputs[place] for outputs in self.outputs]
            self.lengths.append(() if dim is None else tuple(tensor.shape[dim] for tensor in same))
            # What all share may lie in the memory of a weight, which the step would write to.
            whole = same[0].clone() if dim is None else torch.cat(same, dim)
            joined.append(whole.requires_grad_(trains and self.need_gradients[place]))
        self.outputs = []
        self.leaves = tuple(joined)
        return self.leaves

    def cut(self, tensors: Sequence[Tensor | None]) -> list[tuple[Tensor | None, ...]]:
        """Cut tensors of the shapes of the joined outputs into pieces; nothing of one that all share."""
        columns: list[Sequence[Tensor | None]] = []
        for tensor, dim, lengths in zip(tensors, self.dims, self.lengths, strict=True):
            none = [None] * len(self.micro_batches)
            columns.append(none if tensor is None or dim is None else tensor.split(lengths, dim))
        return list(zip(*columns, strict=True))

    def gradients_of(self, place: int, scale: Tensor) -> tuple[Tensor | None, ...] | None:
        """Return the gradients of a micro-batch's outputs, times ``scale``; None: there is no loss.

        The first one runs the backward of the loss; in half precision the scale keeps what it finds from
        vanishing."""
        if self.loss is not None:
            wanted = [leaf for leaf in self.leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(self.loss, wanted, scale.to(self.loss.dtype), allow_unused=True))
            of_leaves = [next(found) if leaf.requires_grad else None for leaf in self.leaves]
            self.gradients = self.cut(of_leaves)
            # What all micro-batches share comes from weights alone: one of them takes its gradient to these.
            self.gradients[0] = tuple(
                whole if dim is None else own
                for own, whole, dim in zip(self.gradients[0], of_leaves, self.dims, strict=True)
            )
            self.scale, self.loss, self.leaves = scale, None, ()
        if self.gradients is None:
            return None
        gradients, self.gradients[place] = self.gradients[place], ()
        return gradients


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """One micro-batch of a batch whose step runs once, in the place of its labels."""

    run: BatchRun
    place: int

    @property
    def is_last(self) -> bool:
        return self.place == len(self.run.micro_batches) - 1


class Root(torch.autograd.Function):
    """A number from which the backward of one micro-batch runs, with gradients that are asked for then."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Callable[[Tensor], Any], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.like = [(output.shape, output.dtype, output.device) for output in outputs]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients(scales[0])
        if gradients is None:  # the layers are measured, whose backwards run on zeros; or the step has raised
            gradients = tuple(
                torch.zeros(shape, dtype=dtype, device=device) if dtype.is_floating_point else None
                for shape, dtype, device in ctx.like
            )
        return None, None, *gradients


class _Writable(torch.autograd.Function):
    """A leaf as a tensor that may be changed in place: the same memory, with a count of versions of its own."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def writable(leaves: Tensors) -> Tensors:
    """Return what a step gets in the place of the outputs, which it may change in place as one process lets it."""
    return tuple(_Writable.apply(leaf) if leaf.requires_grad else leaf for leaf in leaves)


def cut_inputs(
    whole: Tensors,
    piece: Sequence[Sequence[int]],
    sizes: Sequence[int],
    known: Sequence[tuple[int, int] | None] = (),
) -> list[Tensors]:
    """What a step passes to ``forward`` for a whole batch, as inputs of its micro-batches.

    Args:
        whole: For the batch.
        piece: The shapes that the same step passes for the first micro-batch, by which the dimension of the
            samples is known.
        sizes: Samples of each micro-batch, several of them.
        known: What :func:`rows_of_inputs` has said of a batch before.

    Raises:
        ValueError: they cannot be cut.
    """
    if len(whole) != len(piece):
        raise ValueError(
            f"the step passes {len(whole)} tensors to forward() for a batch and {len(piece)} for a part of it, so "
            f"the batch cannot be cut: {WAY_OUT}"
        )
    columns: list[Sequence[Tensor]] = []
    for tensor, shape, before in itertools.zip_longest(whole, piece, known[: len(whole)]):
        dim = _only_difference([tuple(tensor.shape), tuple(shape)])
        if dim is not None and dim < 0:
            dim = _samples_beside_lengths(tuple(tensor.shape), tuple(shape), sum(sizes), sizes[0], before)
        if dim is None:
            columns.append([tensor] * len(sizes))
            continue
        length, total = tensor.shape[dim] if dim >= 0 else 1, sum(sizes)
        if dim >= 0 and (any(length * size % total for size in sizes) or shape[dim] * total != length * sizes[0]):
            raise SamplesSelectedError(
                f"the step passes {length} rows to forward() for a batch of {total} samples and {shape[dim]} for "
                f"{sizes[0]} of them, so the mean over micro-batches would be another loss than the batch's: "
                "select samples after the call, self(x)[mask] instead of self(x[mask]), or take that mean with "
                "MadPipeStrategy(loss='mean'); MadPipeStrategy(num_micro_batches=1) cuts nothing"
            )
        if dim < 0:
            raise ValueError(
                f"the step passes a tensor of shape {tuple(tensor.shape)} to forward() for a batch of {total} "
                f"samples and one of shape {tuple(shape)} for {sizes[0]} of them: no dimension counts the "
                f"samples, so the batch cannot be cut; {WAY_OUT}"
            )
        columns.append(tensor.split([length * size // total for size in sizes], dim))
    return list(zip(*columns, strict=True))


def rows_of_inputs(piece: Tensors, whole: Tensors, size: int) -> list[tuple[int, int] | None]:
    """The dimension of each input that counts the samples of a micro-batch of this size, and how often."""
    rows: list[tuple[int, int] | None] = []
    for own, all_of_them in zip(piece, whole, strict=True):
        # Pieces that were cut differ in one dimension alone.
        dim = _only_difference([tuple(own.shape), tuple(all_of_them.shape)])
        rows.append(None if dim is None else (dim, own.shape[dim] // size))
    return rows


def dims_of_outputs(outputs: Sequence[Tensors], sizes: Sequence[int], known: Dims | None) -> Dims:
    """The dimension of each output that grows with the samples: where micro-batches differ, else as known.

    Raises:
        ValueError: outputs that differ otherwise.
    """
    dims: list[int | None] = []
    if any(len(each) != len(outputs[0]) for each in outputs):
        raise ValueError(f"forward() gives different numbers of tensors for micro-batches of one batch: {WAY_OUT}")
    for place, same in enumerate(zip(*outputs, strict=True)):
        shapes = [tuple(tensor.shape) for tensor in same]
        dim = _only_difference(shapes)
        if dim is not None and dim < 0:
            raise ValueError(
                f"output {place} of forward() has the shapes {', '.join(map(str, dict.fromkeys(shapes)))} for "
                f"micro-batches of one batch, which cannot be joined: {WAY_OUT}"
            )
        if dim is None and len(sizes) > 1 and len(set(sizes)) == 1:
            dim = known[place] if known is not None and place < len(known) else _likely(place, shapes[0], sizes[0])
        if dim is None and len(sizes) == 1 and shapes[0]:
            dim = 0
        if dim is None and not all(_are_equal(same[0], tensor) for tensor in same[1:]):
            raise ValueError(_without_samples(place, shapes[0], "micro-batches"))
        dims.append(dim)
    return tuple(dims)


def dims_by_whole(whole: Sequence[Tensor], piece: Sequence[Tensor]) -> Dims | None:
    """The dimension of each output that grows with the samples, by those for a batch and for a part of it.

    None where shapes differ otherwise.

    Raises:
        ValueError: one that has no such dimension is another for the batch.
    """
    if len(whole) != len(piece):
        return None
    dims = tuple(_only_difference([one.shape, other.shape]) for one, other in zip(whole, piece, strict=True))
    if any(dim is not None and dim < 0 for dim in dims):
        return None
    for place, (dim, one, other) in enumerate(zip(dims, whole, piece, strict=True)):
        if dim is None and not _are_equal(one, other):
            raise ValueError(_without_samples(place, tuple(one.shape), "a batch and its micro-batches"))
    return dims


def _without_samples(place: int, shape: tuple[int, ...], between: str) -> str:
    return (
        f"output {place} of forward(), of shape {shape}, differs between {between} and has no dimension that "
        f"counts the samples{OF_A_LOSS * (not shape)}{ONE_PER_SAMPLE}: {WAY_OUT}"
    )


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers of two tensors are the same but for the order in which they were added; NaN is NaN."""
    # In half precision samples may differ by no more than that.
    is_full = has_gradient(one) and torch.finfo(one.dtype).bits >= 32
    return close(one, other, tolerance=ROUNDINGS * torch.finfo(one.dtype).eps if is_full else 0.0)


def _only_difference(shapes: Sequence[tuple[int, ...]]) -> int | None:
    """The dimension in which shapes differ; None: in no one; -1: in several, or in their number."""
    if len({len(shape) for shape in shapes}) > 1:
        return -1
    different = [dim for dim, lengths in enumerate(zip(*shapes, strict=True)) if len(set(lengths)) > 1]
    return None if not different else different[0] if len(different) == 1 else -1


def _samples_beside_lengths(
    whole: tuple[int, ...], piece: tuple[int, ...], total: int, size: int, known: tuple[int, int] | None
) -> int:
    """The one dimension in proportion to the samples, where others are longer for the batch; else -1.

    So are batches that a step cuts to their longest sample. Where several are, the one that is ``known``.
    """
    if len(whole) != len(piece) or any(own < part for own, part in zip(whole, piece, strict=True)):
        return -1
    found = [dim for dim, length in enumerate(whole) if length * size == piece[dim] * total]
    if known is not None and known[0] in found:
        return known[0]
    return found[0] if len(found) == 1 else -1


def _likely(place: int, shape: tuple[int, ...], size: int) -> int | None:
    """The dimension of the samples where micro-batches of one size show none: the first one that may be it.

    Raises:
        ValueError: another one may be it as well.
    """
    exact = [dim for dim, length in enumerate(shape) if length == size]
    found = exact or [dim for dim, length in enumerate(shape) if length and length % size == 0]
    if len(found) > 1 and found[0] > 0:
        raise ValueError(
            f"output {place} of forward(), of shape {shape} for {size} samples, may have them in dimension "
            f"{' or '.join(map(str, found))}, which micro-batches of one size do not show: {WAY_OUT}"
        )
    return found[0] if found else None
