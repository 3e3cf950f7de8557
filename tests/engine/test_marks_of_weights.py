"""What tells whether a tensor has been written: its bits, each at its place, of any type and any layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from deepspeed_partition import kept_weights  # noqa: E402
from deepspeed_partition.kept_weights import marks_of  # noqa: E402

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.randn(37, 53),
    "half, no multiple of eight bytes": lambda: torch.randn(7).half(),
    "bfloat16": lambda: torch.randn(130, 1025).bfloat16(),
    "float64": lambda: torch.randn(300, 7, dtype=torch.float64),
    "bool": lambda: torch.rand(99, 3) > 0.5,
    "bytes": lambda: torch.randint(0, 255, (5, 5, 5), dtype=torch.uint8),
    "complex": lambda: torch.randn(9, 9, dtype=torch.cfloat),
    "transposed": lambda: torch.randn(33, 65).t(),
    "channels last": lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "a part": lambda: torch.randn(64, 64)[:, 3:20],
    "not at eight bytes": lambda: torch.randn(50_001).half()[1:],
    "one number": lambda: torch.tensor(3.0),
    "integers": lambda: torch.randint(0, 2**40, (7, 9)),
}


@pytest.fixture(params=[2**16, 0], ids=["read", "summed up"])
def _ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_weights, "_SMALL_BYTES", request.param)
    monkeypatch.setattr(kept_weights, "_PIECE", 64)
    monkeypatch.setattr(kept_weights, "_WIDTH", 8)


@pytest.mark.usefixtures("_ways")
@pytest.mark.parametrize("kind", TENSORS)
def test_a_change_of_two_places_is_told_and_no_other(kind: str) -> None:
    """A batch whose samples a step had flipped or shuffled by NumPy had the same sum of bits, and mark."""
    torch.manual_seed(0)
    tensor = TENSORS[kind]()
    before, [mark] = tensor.clone(), marks_of([tensor])
    assert marks_of([tensor]) == [mark]
    for _ in range(20):
        one, other = torch.randint(0, tensor.numel(), (2,)).tolist()
        values = before.flatten().clone()
        values[one], values[other] = before.flatten()[other], before.flatten()[one]
        tensor.data.copy_(values.view(before.shape))
        assert (marks_of([tensor]) == [mark]) == torch.equal(tensor, before)
    tensor.data.copy_(before)
    assert marks_of([tensor]) == [mark]


@pytest.mark.usefixtures("_ways")
def test_flips_shuffles_and_rolls_are_told_and_nan_is_itself() -> None:
    torch.manual_seed(0)
    images = torch.randn(6, 3, 8, 16)
    images[0, 0, 0, 0] = float("nan")
    [mark] = marks_of([images])
    assert marks_of([images]) == [mark]
    for change in (
        lambda x: x.flip(-1),
        lambda x: x.flip(0),
        lambda x: x[torch.randperm(6)],
        lambda x: x.roll(8, 3),
    ):
        images.data.copy_(change(images.data.clone()))
        [now] = marks_of([images])
        assert now != mark
        mark = now


@pytest.mark.usefixtures("_ways")
def test_what_has_no_elements_in_memory_has_a_mark() -> None:
    tensors = [
        torch.empty(0),
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.randn(3).expand(4, 3),
    ]
    assert marks_of(tensors) == marks_of(tensors)
