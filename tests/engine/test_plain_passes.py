"""What a batch that is run past DeepSpeed's functions tells and keeps: a loss as bits, an input of few bytes."""

from __future__ import annotations

import math

import pytest
import torch

from deepspeed_partition.engine.pipeline.plain_passes import IS_LOSS, bits_of_loss, loss_of_bits
from deepspeed_partition.engine.runtime.autograd_boundary import FEW_BYTES, Arrived, ArrivedLeaf, arrived_of


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -2.75, 1e-7, -1e38, 1e300, math.inf, -math.inf, math.nan])
def test_a_loss_arrives_as_deepspeed_sends_it(value: float, dtype: torch.dtype) -> None:
    """DeepSpeed sends ``loss.float()``. Red where a sign, or the flag beside the number, is lost."""
    loss = torch.tensor(value, dtype=torch.float64).to(dtype)
    bits = bits_of_loss(loss)
    assert IS_LOSS <= bits < 2 * IS_LOSS
    found = loss_of_bits(bits)
    assert found.dtype is torch.float32 and found.shape == loss.shape
    assert found.view(torch.int32) == loss.float().view(torch.int32)


def test_a_floating_input_of_few_bytes_is_a_leaf() -> None:
    """Red where a tensor that a stage on this rank has, too, or integers or many bytes would be one."""
    few, many = torch.zeros(4), torch.zeros(FEW_BYTES // 4 + 1)
    assert isinstance(arrived_of(few, is_ours=True), ArrivedLeaf)
    for boundary, is_ours in ((few, False), (many, True), (few.long(), True), ((few,), True)):
        assert isinstance(arrived_of(boundary, is_ours=is_ours), Arrived)


def test_a_layer_may_change_such_an_input_in_place() -> None:
    """Red where the leaf itself is handed out: autograd refuses it. The gradient is that of the input."""
    arrived = arrived_of(torch.tensor([-1.0, 2.0]), is_ours=True)
    (torch.relu_(arrived.clone()) * 3).sum().backward()
    [gradient] = arrived.gradients()
    assert gradient.tolist() == [0.0, 3.0]
    unused = arrived_of(torch.ones(2), is_ours=True)
    unused.clone()
    assert [each.tolist() for each in unused.gradients()] == [[0.0, 0.0]]
    with torch.no_grad():
        assert not arrived_of(torch.ones(2), is_ours=True).clone().requires_grad
