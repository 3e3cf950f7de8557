"""The precision of float32 on a GPU, which is full where losses are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_madpipe.steps.call_state import torch_modes
from lightning_madpipe.steps.float32_precision import float32_precisions, full_precision

BACKENDS: Any = torch.backends
HAS_NEW = hasattr(BACKENDS, "fp32_precision")
NEW = pytest.mark.skipif(not HAS_NEW, reason="torch 2.9 has them")


def libraries() -> list[Any]:
    cudnn, mkldnn = BACKENDS.cudnn, BACKENDS.mkldnn
    every = [cudnn.conv, cudnn.rnn, BACKENDS.cuda.matmul, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]
    return [*every, cudnn, mkldnn, BACKENDS]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Sets all back that a test sets."""
    yield
    torch.set_float32_matmul_precision("highest")
    for each in libraries() if HAS_NEW else ():
        each.fp32_precision = "none"
    BACKENDS.cudnn.allow_tf32 = True


def asked() -> list[Any]:
    """What each setting answers, and whether it raises."""

    def answer(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError:
            return "it raises"

    old: list[Callable[[], Any]] = [
        torch.get_float32_matmul_precision,
        lambda: BACKENDS.cuda.matmul.allow_tf32,
        lambda: BACKENDS.cudnn.allow_tf32,
    ]
    new = [each.fp32_precision for each in libraries()] if HAS_NEW else []
    return [*map(answer, old), *new]


def set_new(path: str, precision: str) -> None:
    place = BACKENDS
    for name in path.split(".") if path else ():
        place = getattr(place, name)
    place.fp32_precision = precision


SET: list[Any] = [
    pytest.param(lambda: None, id="nothing"),
    *(
        pytest.param(lambda precision=precision: torch.set_float32_matmul_precision(precision), id=precision)
        for precision in ("high", "medium")
    ),
    pytest.param(lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True), id="allow_tf32 of products"),
    pytest.param(lambda: setattr(BACKENDS.cudnn, "allow_tf32", False), id="allow_tf32 of convolutions"),
    pytest.param(
        lambda: (torch.set_float32_matmul_precision("highest"), set_new("", "tf32")), id="both", marks=NEW
    ),
    *(
        pytest.param(
            lambda path=path, precision=precision: set_new(path, precision), id=f"{path} {precision}", marks=NEW
        )
        for path, precision in (
            ("", "tf32"), ("", "ieee"), ("cuda.matmul", "tf32"), ("cudnn", "tf32"), ("cudnn.conv", "ieee"),
            ("cudnn.conv", "tf32"), ("cudnn.rnn", "tf32"), ("mkldnn.matmul", "bf16"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("sets", SET)
def test_float32_is_full_within_whatever_a_program_has_set(sets: Callable[[], None]) -> None:
    """Torch raises where the old settings are asked and the new ones say something else."""
    sets()
    before = asked()
    with pytest.raises(KeyError), full_precision():
        within, precisions = asked(), float32_precisions()
        torch_modes()  # as a step does
        raise KeyError
    assert asked() == before
    assert "tf32" not in precisions[:3] and True not in precisions
    # Compiled code asks whether products may be in TF32: it goes on where it did.
    assert "it raises" in before[:2] or "it raises" not in within[:2]


@NEW
def test_what_follows_its_library_still_does() -> None:
    """Set back by itself, products would have stayed in TF32 where the program asked for IEEE later."""
    set_new("", "tf32")
    with full_precision():
        pass
    set_new("", "ieee")
    assert BACKENDS.cuda.matmul.fp32_precision == "ieee"


def test_a_precision_that_a_step_sets_is_seen() -> None:
    before = float32_precisions()
    torch.set_float32_matmul_precision("highest")
    assert float32_precisions() == before
    torch.set_float32_matmul_precision("high")
    assert float32_precisions() != before
