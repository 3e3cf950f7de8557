"""Tensors of a layer on their way to another rank; here in one process."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from deepspeed.pipe import LayerSpec  # noqa: E402
from torch import nn  # noqa: E402

from deepspeed_partition.engine.pipeline.parts import Part  # noqa: E402
from deepspeed_partition.engine.repartition import (  # noqa: E402
    layer_moves,
    optimizer_state,
    part_descriptions,
    plain_data,
    tensor_forms,
)
from deepspeed_partition.engine.repartition.part_descriptions import (  # noqa: E402
    describe,
    only_what_changed,
    remember_attributes,
    take_attributes,
    take_modules,
)
from deepspeed_partition.planner.allocation import Allocation  # noqa: E402

PRESENT = Allocation.contiguous([0, 1, 2])


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


@pytest.mark.parametrize("lay", ["host", "device"])
def test_tensors_in_attributes_lie_where_they_lay(monkeypatch: pytest.MonkeyPatch, lay: str) -> None:
    """A history on the CPU came to the device with its layer, and the next forward raised."""

    def use(name: str) -> None:
        accelerator = SimpleNamespace(current_device_name=lambda: name)
        monkeypatch.setattr(plain_data, "get_accelerator", lambda: accelerator)

    layer: Any = nn.Linear(2, 2)
    layer.history, layer.kept = torch.arange(3.0), {"all": [torch.ones(2)]}
    use("meta" if lay == "host" else "cpu")  # meta has no values to send
    there = pickle.loads(pickle.dumps(describe(layer)))
    use("meta")
    built: Any = nn.Linear(2, 2)
    take_attributes(built, there)
    assert {built.history.device.type, built.kept["all"][0].device.type} == {"cpu" if lay == "host" else "meta"}
    if lay == "host":
        assert built.history.tolist() == [0, 1, 2]
        mark = part_descriptions.sendable(layer.history).mark
        assert part_descriptions.sendable(torch.arange(3.0)).mark == mark
        layer.history[0] = 1
        assert part_descriptions.sendable(layer.history).mark != mark


class Angles(nn.Module):
    """Makes its table when it runs first; layers share it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cos is None:
            self.cos = torch.linspace(0, 1, 4)
        return x * self.cos


class Sharing(nn.Module):
    """Holds a module where torch does not look."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shared = [shared]


def _moved(held: nn.Module, shared: nn.Module, there: nn.Module) -> Any:
    """What is sent of a layer that has ``shared`` to a process where ``there`` is that module, laid there."""
    part = Part("1", (1,), LayerSpec(Sharing, shared))
    description = pickle.loads(pickle.dumps(only_what_changed(part, held, lambda: Sharing(shared))))
    take_modules(part, Sharing(there), description, 0, PRESENT)
    return description


def test_buffers_that_a_shared_module_has_made_are_sent() -> None:
    """They counted as known on all ranks: the layer ran on an empty tensor."""
    shared, there = Angles(), Angles()
    held = Sharing(shared)
    remember_attributes([held])
    shared(torch.ones(4))
    description = _moved(held, shared, there)
    assert set(description.hidden) == {"shared[0].cos"}
    assert there.cos is not None and there.cos.numel() == 0, "until its values come"


def test_buffers_that_are_not_sent_are_not_made() -> None:
    """The forward makes them there, where it finds none."""
    shared, there = Angles(), Angles()
    shared(torch.ones(4))
    held = Sharing(shared)
    remember_attributes([held], again=True)
    description = _moved(held, shared, there)
    assert not description.hidden and there.cos is None


def test_modules_that_a_layer_has_let_go_keep_their_buffers() -> None:
    """Other layers may have them: they lost their running statistics."""
    shared, there = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    held = Sharing(shared)
    held.shared = []
    _moved(held, shared, there)
    assert list(there.state_dict()) == list(shared.state_dict())
