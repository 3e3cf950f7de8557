"""On a GPU: what the CPU tests say, with the layers elsewhere than where they are measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed_partition.profiling import profile_chain

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_layers_on_the_cpu_are_measured_on_the_gpu_and_stay_where_they_are():
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Tanh()]
    x, labels = torch.randn(5, 8), torch.zeros(5, 4)
    chain = profile_chain(layers, (x, labels), loss_fn=nn.functional.mse_loss)
    on_cpu = profile_chain(layers, (x, labels), loss_fn=nn.functional.mse_loss, device="cpu")
    assert chain.hardware == torch.cuda.get_device_name()
    for there, here in zip(chain.layers, on_cpu.layers, strict=True):
        for key in ("weight_bytes", "output_bytes", "stash_bytes", "num_trainable_parameters"):
            assert getattr(there, key) == getattr(here, key)
        assert there.forward_seconds > 0
    assert all(p.device.type == "cpu" and p.grad is None for p in nn.Sequential(*layers).parameters())


def test_random_numbers_of_the_gpu_are_as_before():
    before = torch.cuda.get_rng_state()
    profile_chain([nn.Linear(8, 8), nn.Dropout(0.5)], torch.randn(5, 8))
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_layer_too_large_for_the_device_is_named():
    def greedy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.empty(2**50, dtype=torch.uint8, device=x.device)[:1]

    with pytest.raises(MemoryError, match=r"'0\.greedy' with its input \(5, 8\) float32 does not fit on cuda"):
        profile_chain([greedy], torch.randn(5, 8))
