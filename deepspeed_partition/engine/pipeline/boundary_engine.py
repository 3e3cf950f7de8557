"""What DeepSpeed's engine does with one micro-batch, for boundaries between any layers.

DeepSpeed's own transfers take it for granted where a model is cut: that each floating tensor between two stages
gets a gradient, that a mask of booleans is the last of several, that data never ends. The overrides here hold for
cuts that MadPipe makes or is given; other cuts are run by DeepSpeed's code as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_partition.engine.runtime.autograd_boundary import tensors_of

NO_BOUNDARY: tuple[torch.Tensor, ...] = ()
"""The empty boundary that is sent in the place of a step's first activations: there is no data for another
step."""


class AnyBoundaryEngine(PipelineEngine):
    """DeepSpeed's ``PipelineEngine``, with boundaries of any tensors.

    - A floating tensor that gets no gradient, such as a mask of zeros and ``-inf``, sends zeros back, for the
      other side waits for as many gradients as there are floating tensors.
    - An output that needs no gradient takes no part in the backward.
    - Booleans are sent as they are, wherever they stand, so that ``has_attention_mask`` and ``has_bool_tensors``
      change nothing: DeepSpeed then rounds the last tensor of each boundary to booleans, and cannot take a
      boundary of one tensor.
    - Data that ends between two steps ends them on every rank.
    """

    _divides_no_more = False
    """Whether a backward runs whose gradient of the loss is divided by the number of micro-batches already."""

    # DeepSpeed's, without types there.
    dynamic_shape: bool
    grad_layer: Any
    has_attention_mask: bool
    has_bool_tensors: bool
    module: Any
    pipe_buffers: dict[str, list[Any]]

    def __init__(self, **kwargs: Any) -> None:
        self._step_shapes: list[torch.Size] | None = None
        self._num_loaded = self._num_received = 0
        super().__init__(**kwargs)

    @property
    def owns_cut(self) -> bool:
        """Whether the cut is this engine's business; otherwise it is DeepSpeed's own."""
        return getattr(self.module, "madpipe_cut", None) is not None

    def reset_activation_shape(self) -> None:
        """Forget the shapes of activations: every batch tells them again, so each may have its own."""
        super().reset_activation_shape()
        self._step_shapes = None
        self._num_loaded = self._num_received = 0

    def _allocate_or_extend_buffers(self, idx, shape, dtype):
        if self.owns_cut:
            # DeepSpeed's method would give a buffer of another type, if one of that place is large enough.
            return self._allocate_zeros(shape, dtype=dtype)
        return super()._allocate_or_extend_buffers(idx, shape, dtype)

    @contextmanager
    def _booleans_as_they_are(self) -> Iterator[None]:
        flags = self.has_attention_mask, self.has_bool_tensors
        if self.owns_cut:
            self.has_attention_mask = self.has_bool_tensors = False
        try:
            yield
        finally:
            self.has_attention_mask, self.has_bool_tensors = flags

    # Data

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        try:
            super()._exec_load_micro_batch(buffer_id)
        except StopIteration:
            if not self.owns_cut:
                raise
            if self._num_loaded == 0:
                if self.is_first_stage() and not self.is_last_stage():
                    self._send_tensor_meta(NO_BOUNDARY, self.next_stage)
                elif not self.is_first_stage() and self._num_received == 0:
                    type(self)._exec_recv_activations(
                        self, buffer_id
                    )  # what the stage before says must not wait here
            raise self._data_ended() from None
        self._num_loaded += 1
        if self.is_first_stage() and self.owns_cut and not self.dynamic_shape:
            self._check_shapes(self.pipe_buffers["inputs"][buffer_id])

    def _data_ended(self) -> StopIteration:
        return StopIteration(
            f"the data iterator ended after {self._num_loaded} micro-batches of a batch that needs more: wrap its "
            "loader in deepspeed.utils.RepeatingLoader, or end the loop before"
        )

    def _check_shapes(self, inputs: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        """Refuse what would corrupt the transfers of DeepSpeed: they keep the shapes of a batch's first one."""
        shapes = [tensor.shape for tensor in tensors_of(inputs)]
        if self._step_shapes is None:
            self._step_shapes = shapes
        elif shapes != self._step_shapes:
            raise RuntimeError(
                f"a micro-batch has the shapes {[tuple(shape) for shape in shapes]} and the first one of its "
                f"batch {[tuple(shape) for shape in self._step_shapes]}: build the module with "
                "dynamic_shape=True, or drop the short last micro-batch"
            )

    # Compute. DeepSpeed keeps inputs, outputs and labels until their slot is used again. At the two ends of the
    # pipeline that is long after their use, and with a vocabulary for its output most of what the last one needs.

    def _exec_forward_pass(self, buffer_id: int) -> None:
        super()._exec_forward_pass(buffer_id)
        if self.is_last_stage() and self._compute_loss and self.module.loss_fn is not None:
            self.pipe_buffers["outputs"][buffer_id] = self.pipe_buffers["labels"][buffer_id] = None

    def _exec_backward_pass(self, buffer_id: int) -> None:
        received = self.grad_layer
        if self.owns_cut and not self.is_last_stage():
            self._drop_what_needs_no_gradient(buffer_id)
        super()._exec_backward_pass(buffer_id)
        self._stop_backward_timers()
        self.grad_layer = received  # the next gradients arrive in the same buffers
        if self.is_first_stage():
            self.pipe_buffers["inputs"][buffer_id] = None

    def _stop_backward_timers(self) -> None:
        names = (*self.engine_timers.backward_inner_timers, *self.engine_timers.backward_timers)
        self._stop_timers(name for name in names if self.timers(name).started_)

    def _backward_prologue_per_tensor(self, grad):
        # The last stage divides by the number of micro-batches, before it sends gradients back. DeepSpeed 0.19.0
        # divides on every other stage once more; 0.19.8 does not. It does where it has not begun the backward
        # itself, as in the first half of one.
        if self._divides_no_more:
            return grad
        return super()._backward_prologue_per_tensor(grad) if self.is_last_stage() or not self.owns_cut else grad

    def _start_timers(self, timer_names):
        # Those of the backward are started by DeepSpeed's pipeline, and once more by the engine below it, which
        # stops them only where there is a loss.
        super()._start_timers([name for name in timer_names if not self.timers(name).started_])

    def _drop_what_needs_no_gradient(self, buffer_id: int) -> None:
        """Leave to the backward the outputs that have a graph, each with its gradient."""
        outputs = self.pipe_buffers["outputs"][buffer_id]
        if isinstance(outputs, torch.Tensor):
            if not outputs.requires_grad:
                self.pipe_buffers["outputs"][buffer_id], self.grad_layer = NO_BOUNDARY, []
            return
        # With tensor parallelism the first output travels as a description and a slice, and has a graph: the
        # backward puts it together from these two, or RecvGrad did so from the outputs.
        first = 2 if self.is_grad_partitioned else int(self.is_pipe_partitioned)
        floating = [tensor for tensor in outputs[first:] if tensor.is_floating_point()]
        both = zip(floating, self.grad_layer[first:], strict=True)
        wanted = [(tensor, gradient) for tensor, gradient in both if tensor.requires_grad]
        self.pipe_buffers["outputs"][buffer_id] = (*outputs[:first], *(tensor for tensor, _ in wanted))
        self.grad_layer = [*self.grad_layer[:first], *(gradient for _, gradient in wanted)]

    # Transfers

    def _exec_send_activations(self, buffer_id: int) -> None:
        with self._booleans_as_they_are():
            super()._exec_send_activations(buffer_id)

    def _exec_recv_activations(self, buffer_id: int) -> None:
        with self._booleans_as_they_are():
            super()._exec_recv_activations(buffer_id)
        received = self.pipe_buffers["inputs"][buffer_id]
        if not self.owns_cut:
            return
        if isinstance(received, tuple) and not received:
            self.pipe_recv_buf = None
            if not self.is_last_stage():
                self._send_tensor_meta(NO_BOUNDARY, self.next_stage)
            raise self._data_ended()
        self._num_received += 1
        if self.is_pipe_partitioned:  # DeepSpeed then passes gradients of the first tensor alone
            for tensor in received[2:]:
                tensor.requires_grad_(False)

    def _exec_send_grads(self, buffer_id: int) -> None:
        if not self.owns_cut:
            super()._exec_send_grads(buffer_id)
            return
        # In a tuple, DeepSpeed passes over what is not floating.
        inputs = self.pipe_buffers["inputs"][buffer_id] = tensors_of(self.pipe_buffers["inputs"][buffer_id])
        for tensor in inputs:
            if tensor.is_floating_point() and tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        with self._booleans_as_they_are():
            super()._exec_send_grads(buffer_id)
        if self.is_grad_partitioned:  # DeepSpeed waits for these and does not send them
            for tensor in inputs[1:]:
                if tensor.is_floating_point():
                    p2p.send(tensor.grad, self.prev_stage)

    def _exec_recv_grads(self, buffer_id: int) -> None:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        if self.owns_cut and isinstance(outputs, torch.Tensor) and not outputs.is_floating_point():
            return
        super()._exec_recv_grads(buffer_id)

    # DeepSpeed calls instructions through this map, which does not see overriding methods.
    _INSTRUCTION_MAP: ClassVar = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.LoadMicroBatch: _exec_load_micro_batch,
        schedule.ForwardPass: _exec_forward_pass,
        schedule.BackwardPass: _exec_backward_pass,
        schedule.SendActivation: _exec_send_activations,
        schedule.RecvActivation: _exec_recv_activations,
        schedule.SendGrad: _exec_send_grads,
        schedule.RecvGrad: _exec_recv_grads,
    }
