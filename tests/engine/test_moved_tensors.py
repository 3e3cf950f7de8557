"""Tensors of a layer on their way to another rank; here in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from torch import nn  # noqa: E402

from deepspeed_partition.engine.repartition import layer_moves, optimizer_state, tensor_forms  # noqa: E402
from deepspeed_partition.engine.repartition.part_descriptions import describe  # noqa: E402


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of elements that are sent, from a rank with another device than the CPU."""
    numbers: list[int] = []
    chosen = SimpleNamespace(current_device_name=lambda: "meta")
    for module in (layer_moves, optimizer_state):
        monkeypatch.setattr(module, "get_accelerator", lambda: chosen)
    monkeypatch.setattr(tensor_forms, "send_bytes", lambda tensor, _: numbers.append(tensor.numel()))
    return numbers


def _expanded() -> torch.Tensor:
    return torch.ones(1).expand(8, 8)


def test_expanded_tensors_of_the_host_are_sent_as_they_are_received(sent: list[int]) -> None:
    """On its way over the device, such a tensor got all its elements, and the receiver waited for one of them."""
    layer: Any = nn.Linear(2, 2, bias=False)
    layer.weight.mask = _expanded()
    layer.teacher = [nn.Identity()]
    layer.teacher[0].register_buffer("mask", _expanded())
    layer_moves._send_part(layer, describe(layer), 1)
    assert sent == [4, 1, 1]


def test_expanded_states_of_the_host_are_sent_as_they_are_received(sent: list[int]) -> None:
    weight = nn.Parameter(torch.ones(2))
    share = optimizer_state.Share("0.weight", 0, 2, 0)
    trained = optimizer_state.Trained(weight, [weight], [share], is_flat=False)
    tensors, values = {"mask": _expanded()}, {"more": [_expanded()]}
    state = object.__new__(optimizer_state.TrainingState)
    state._pipe_rank, state._states = 0, {share.name: optimizer_state.ParameterState(share, tensors, values)}
    state._infos = [dict(optimizer_state._describe(trained, {**tensors, **values}))]
    state.send("0", 1)
    assert sent == [1, 1]
