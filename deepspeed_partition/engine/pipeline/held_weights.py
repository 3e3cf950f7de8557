"""Several versions of the weights on a rank: which one a stage runs with, and what an update does to them.

A graph that waits for its backward refers to weights in two ways: by what autograd saved of them (a view, such as
``weight.t()``, of the storage that they had), and by the parameter itself, where that was saved. So

- an update while older graphs wait writes into new storages, which the parameters and the optimizer get before it;
- before each forward and backward the parameters of its stage get the storages of the version that it uses;
- the versions that torch counts for its own check (``Tensor._version``) are left as they are in an update, since
  nothing that was saved has changed.

A storage is let go when the last micro-batch that uses its version has had its backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.autograd import grad_mode

CAN_KEEP_COUNTS = hasattr(grad_mode, "_unsafe_preserve_version_counter")


class Weights:
    """Versions of weights that are held and updated together.

    Args:
        parameters: those that train.
        new_storages: makes storages for the next version, equal to those that the parameters have, and gives them
            to the parameters and to the optimizer.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], new_storages: Callable[[], None] | None = None
    ) -> None:
        self.parameters = list(parameters)
        self._new_storages = new_storages or self._copy
        self.newest = 0
        self.most_held = 1
        """Most versions that have had storages at once."""
        self._current = 0
        self._held: dict[int, list[torch.Tensor]] = {0: self._storages()}

    @property
    def current(self) -> int:
        """Number of the version whose values the parameters have."""
        return self._current

    @property
    def num_held(self) -> int:
        """Number of versions that have storages now."""
        return len(self._held)

    def use(self, version: int) -> None:
        """Let the parameters have the values of a version."""
        if version != self._current:
            for parameter, storage in zip(self.parameters, self._held[version], strict=True):
                parameter.data = storage
            self._current = version

    def next(self, *, keeps: bool) -> None:
        """Let the parameters have storages for the next version, with the values of the newest one.

        Args:
            keeps: whether the newest one is used by a micro-batch still. Else its storages are those of the next.
        """
        self.use(self.newest)
        if keeps:
            self._new_storages()
            self._held[self.newest + 1] = self._storages()
        else:
            self._held[self.newest + 1] = self._held.pop(self.newest)
        self.newest += 1
        self._current = self.newest
        self.most_held = max(self.most_held, self.num_held)

    def updated(self) -> None:
        """Let the newest version be what the parameters have: an optimizer may have assigned ``data``."""
        if self._current == self.newest:
            self._held[self.newest] = self._storages()

    def let_go(self, before: int) -> None:
        """Let go of all versions before one, and never of the newest."""
        for version in [each for each in self._held if each < min(before, self.newest)]:
            if version == self._current:
                self.use(self.newest)
            del self._held[version]

    def _storages(self) -> list[torch.Tensor]:
        return [parameter.data for parameter in self.parameters]

    def _copy(self) -> None:
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()


class Gradients:
    """Gradients of one stage, of several batches at once, of which the parameters have one at a time.

    Args:
        parameters: of the stage, those that train.
    """

    _NAMES = "grad", "grad_accum"
    """Attributes of a parameter that have its gradient: torch's, and DeepSpeed's of ZeRO that adds up in fp32."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._batch: int | None = None
        """The batch whose gradients the parameters have; None: they have none."""
        self._aside: dict[int, list[Any]] = {}

    def use(self, batch: int) -> None:
        """Let the parameters have the gradients of a batch, which are added up there."""
        if batch == self._batch:
            return
        self.put_aside()
        found = self._aside.pop(batch, [(None, None)] * len(self._parameters))
        for parameter, gradients in zip(self._parameters, found, strict=True):
            for name, gradient in zip(self._NAMES, gradients, strict=True):
                if hasattr(parameter, name):
                    setattr(parameter, name, gradient)
        self._batch = batch

    def put_aside(self) -> None:
        """Let the parameters have no gradients until :meth:`use` gives them those of a batch."""
        if self._batch is not None:
            self._aside[self._batch] = [
                [getattr(parameter, name, None) for name in self._NAMES] for parameter in self._parameters
            ]
            self._batch = None
            self._clear()

    def _clear(self) -> None:
        for parameter in self._parameters:
            for name in self._NAMES:
                if hasattr(parameter, name):
                    setattr(parameter, name, None)

    def used(self) -> None:
        """Note that the gradients which the parameters had were used up."""
        self._batch = None

    def forget(self) -> None:
        """Forget all gradients."""
        self._batch = None
        self._aside.clear()
        self._clear()


class FlatBuffers:
    """The flat gradients of DeepSpeed's ``BF16_Optimizer``, of all stages of a rank.

    Args:
        optimizer: which has them.
    """

    def __init__(self, optimizer: BF16_Optimizer) -> None:
        self.optimizer = optimizer
        self._hidden: tuple[list[torch.Tensor], list[list[bool]]] | None = None

    def hide(self) -> None:
        """Let the optimizer's ``zero_grad()`` find nothing, which a program may call between two batches."""
        if self._hidden is None:
            has = [list(group) for group in self.optimizer.fp32_groups_has_gradients]
            self._hidden = self.optimizer.fp32_groups_gradients_flat, has
            self.optimizer.fp32_groups_gradients_flat = []

    def show(self) -> None:
        """Let the optimizer have its gradients again."""
        if self._hidden is not None:
            self.optimizer.fp32_groups_gradients_flat, has = self._hidden
            self.optimizer.fp32_groups_has_gradients[:] = has
            self._hidden = None


class FlatGradients(Gradients):
    """Gradients of one stage in flat buffers, which all batches share.

    Args:
        buffers: which hold them, and those of the rank's other stages.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], buffers: FlatBuffers) -> None:
        super().__init__(parameters)
        mine = {id(parameter) for parameter in parameters}
        self._buffers, optimizer = buffers, buffers.optimizer
        self._optimizer = optimizer
        self._places = [
            (group, place)
            for group, weights in enumerate(optimizer.bf16_groups)
            for place, weight in enumerate(weights)
            if id(weight) in mine
        ]

    def put_aside(self) -> None:
        """Leave the gradients in the buffer, where no program finds them."""
        self._buffers.hide()

    def use(self, batch: int) -> None:
        self._buffers.show()
        if batch == self._batch:
            return
        gradients, has = self._optimizer.fp32_groups_gradients, self._optimizer.fp32_groups_has_gradients
        if self._batch is not None:
            self._aside[self._batch] = [
                gradients[group][place].clone() if has[group][place] else None for group, place in self._places
            ]
        found = self._aside.pop(batch, [None] * len(self._places))
        for (group, place), gradient in zip(self._places, found, strict=True):
            has[group][place] = gradient is not None
            gradients[group][place].zero_() if gradient is None else gradients[group][place].copy_(gradient)
        self._batch = batch

    def forget(self) -> None:
        self._buffers.show()
        self._aside.clear()
        self._batch = None
        for group, place in self._places:
            self._optimizer.fp32_groups_has_gradients[group][place] = False
            self._optimizer.fp32_groups_gradients[group][place].zero_()
        super().forget()


def new_flat_buffers(optimizer: Any) -> Callable[[], None] | None:
    """Return what makes flat buffers of weights for the next version; None for an optimizer that has none."""
    if isinstance(optimizer, BF16_Optimizer):
        return functools.partial(_renew_bf16, optimizer)
    return functools.partial(_renew_zero, optimizer) if isinstance(optimizer, DeepSpeedZeroOptimizer) else None


def _renew_bf16(optimizer: BF16_Optimizer) -> None:
    for number, flat in enumerate(optimizer.bf16_groups_flat):
        flat = optimizer.bf16_groups_flat[number] = flat.clone()
        optimizer._update_storage_to_flattened_tensor(optimizer.bf16_groups[number], flat)
        parts = optimizer.bf16_partitioned_groups[number]
        optimizer.bf16_partitioned_groups[number] = list(flat.split(parts[0].numel()))


def _renew_zero(optimizer: DeepSpeedZeroOptimizer) -> None:
    for number, flat in enumerate(optimizer.bit16_groups_flat):
        flat = optimizer.bit16_groups_flat[number] = flat.clone()
        optimizer.parallel_partitioned_bit16_groups[number] = optimizer.get_data_parallel_partitions(flat, number)
        optimizer._update_model_bit16_weights(number)


@contextmanager
def norms_of_this_rank(optimizer: Any) -> Iterator[None]:
    """Let the step of a flat optimizer take the norm of this rank's gradients, without a wait for other stages.

    It takes the norm over all stages in every step, also where nothing is clipped.
    """
    name = {BF16_Optimizer: "mpu", DeepSpeedZeroOptimizer: "model_parallel_group"}.get(type(optimizer))
    if name is None:
        yield
        return
    present = getattr(optimizer, name)
    setattr(optimizer, name, None)
    try:
        yield
    finally:
        setattr(optimizer, name, present)


def squares_of_gradients(engine: Any) -> tuple[float, bool]:
    """Return the sum of squares of this rank's gradients, and whether it is of a part that pipelines share out."""
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        return sum(float(each.float().norm() ** 2) for each in optimizer.get_grads_for_norm()[0]), False
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return sum(float(each.norm() ** 2) for each in _gradients_of(engine)), False
    total = 0.0
    for number, gradients in optimizer.averaged_gradients.items():
        own = [each for each in gradients or () if not getattr(each, "_zero_padding", False)]
        total += sum(
            float(each.float().norm() ** 2)
            for each, _ in zip(own, optimizer.params_in_partition[number], strict=False)
        )
    return total, True


def scale_gradients(engine: Any, factor: float) -> None:
    """Multiply this rank's gradients, which are reduced already."""
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        for flat in optimizer.fp32_groups_gradients_flat:
            flat.mul_(factor)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        for gradients in optimizer.averaged_gradients.values():
            for each in gradients or ():
                each.mul_(factor)
    else:
        for each in _gradients_of(engine):
            each.mul_(factor)


def _gradients_of(engine: Any) -> list[torch.Tensor]:
    return [each.grad for each in engine._clipped_parameters() if each.grad is not None]


@contextmanager
def clipped_already(optimizer: Any) -> Iterator[None]:
    """Let a flat optimizer clip nothing in its step."""
    if not isinstance(optimizer, BF16_Optimizer | DeepSpeedZeroOptimizer):
        yield
        return
    present, optimizer.clip_grad = optimizer.clip_grad, 0.0
    try:
        yield
    finally:
        optimizer.clip_grad = present


class Settings:
    """Settings of an optimizer's parameter groups, as they are when a batch is trained on.

    An update that comes later has those of its own batch, so that a learning-rate schedule means what it means
    where nothing is late.

    Args:
        optimizer: torch's, whose groups have the settings.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._own: set[str] = set()
        """Settings that the optimizer changes itself in a step, such as a count: they are left to it."""

    def now(self) -> list[dict[str, Any]]:
        """Return the settings as they are."""
        defaults = getattr(self._optimizer, "defaults", {})
        return [
            {key: _copied(value) for key, value in group.items() if key in defaults and key not in self._own}
            for group in self._optimizer.param_groups
        ]

    @contextmanager
    def applied(self, settings: list[dict[str, Any]]) -> Iterator[None]:
        """Let the groups have these settings meanwhile."""
        groups = self._optimizer.param_groups
        # A script may have added groups since, behind the others: an update that comes late had none of them.
        later, groups[len(settings) :] = groups[len(settings) :], []
        present = self.now()
        for group, its in zip(groups, settings, strict=True):
            group.update({key: value for key, value in its.items() if key not in self._own})
        try:
            yield
        finally:
            groups += later
            for group, its, back in zip(groups, settings, present, strict=False):
                for key, value in back.items():
                    if key in its and not _same(group[key], its[key]):
                        self._own.add(key)
                    else:
                        group[key] = value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return bool(one == other)


@contextmanager
def counts_kept(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let changes of tensors meanwhile not count as changes of what autograd has saved of them."""
    with ExitStack() as stack:
        for tensor in tensors:  # torch 2.4 takes one at a time
            stack.enter_context(grad_mode._unsafe_preserve_version_counter(tensor))
        yield
