"""Which weights of a rank hooks freeze, while its layers move; here in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytest.importorskip("lightning")

from torch import nn  # noqa: E402

from lightning_madpipe.steps.layer_structure import Structure  # noqa: E402


@pytest.fixture
def rank() -> Any:
    """A rank with the first two of three layers."""
    module = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    here = list(module)[:2]
    pipeline: Any = SimpleNamespace(
        call_of_module=SimpleNamespace(existing_modules=list, captured=None),
        parameters=lambda: (weight for layer in here for weight in layer.parameters()),
    )
    engine: Any = SimpleNamespace(basic_optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    structure = Structure(module, pipeline, engine, False, RuntimeError)

    def move(*layers: int) -> None:
        here[:] = [module[place] for place in layers]
        structure.follow_layers()

    return SimpleNamespace(structure=structure, module=module, move=move)


def test_layers_that_move_as_they_are_have_no_news(rank: Any) -> None:
    """A pipeline that never drains came to rest once more behind each move."""
    rank.move(1, 2)
    rank.structure.check()
    assert not rank.structure.has_turned


@pytest.mark.parametrize("layer", [1, 2], ids=["stayed", "came"])
def test_what_a_hook_freezes_behind_a_move_is_told(rank: Any, layer: int) -> None:
    rank.move(1, 2)
    rank.module[layer].requires_grad_(False)
    rank.structure.check()
    assert rank.structure.has_turned


@pytest.mark.parametrize("layer", [0, 1], ids=["left", "stayed"])
def test_what_a_hook_freezes_before_a_move_is_told(rank: Any, layer: int) -> None:
    rank.module[layer].requires_grad_(False)
    rank.move(1, 2)
    rank.structure.check()
    assert rank.structure.has_turned
