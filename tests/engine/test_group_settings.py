"""Settings of parameter groups that are tensors, on their way to another rank; here in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from deepspeed_partition.engine.repartition import parameter_groups, plain_data  # noqa: E402


class OfCard(torch.Tensor):
    """A tensor whose text has the number of its rank's device, as on several GPUs."""

    card: int

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"tensor({self.item()}, device='cuda:{self.card}')"


def _rate(value: float, card: int) -> torch.Tensor:
    rate: Any = torch.tensor(value).as_subclass(OfCard)
    rate.card = card
    return rate


def _keys(*groups: dict[str, Any]) -> list[str]:
    return parameter_groups._keys([{"params": [], **group} for group in groups])


def test_a_group_is_the_same_on_every_device() -> None:
    """The one group of each rank counted as a group of its own."""
    assert _keys({"lr": _rate(0.5, 0)}) == _keys({"lr": _rate(0.5, 1)}) == _keys({"lr": 0.5})
    assert _keys({"lr": _rate(0.5, 0)}) != _keys({"lr": _rate(0.25, 0)})
    assert _keys({"lr": 0.5, "betas": (_rate(0.5, 0), 0.9)}) == _keys({"lr": 0.5, "betas": (_rate(0.5, 1), 0.9)})


def test_a_rate_of_another_rank_lies_on_the_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(current_device_name=lambda: "meta")
    monkeypatch.setattr(plain_data, "get_accelerator", lambda: device)
    group: dict[str, Any] = {"lr": torch.tensor(0.5), "initial_lr": 0.5}
    parameter_groups._give(group, {"lr": torch.tensor(0.25), "weight_decay": torch.tensor(0.125)})
    parameter_groups._give(group, {"maximize": plain_data.HostTensor(torch.tensor(1.0))})
    places = {name: value.device.type for name, value in group.items() if torch.is_tensor(value)}
    assert places == {"lr": "cpu", "weight_decay": "meta", "maximize": "cpu"} and group["initial_lr"] == 0.5
