"""Code that TorchScript has compiled, which computes its gradients itself once it has run a few times."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from tests.capture.comparing import assert_same, captured_layers  # noqa: E402


def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * x * y


scripted = torch.jit.script(gated)
traced = torch.jit.trace(gated, (torch.ones(2, 8), torch.ones(2, 8)))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x

    @torch.jit.export
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2


class Compiled(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind
        if kind == "traced module":
            self.inner = torch.jit.trace(Inner(), torch.ones(2, 8))
        elif kind not in ("function", "traced function"):
            self.inner = torch.jit.script(Inner())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.first(x), self.second(x)
        if self.kind.endswith("function"):
            return (scripted if self.kind == "function" else traced)(first, second)
        return (self.inner.twice(first) if self.kind == "method" else self.inner(first)) + second


@pytest.mark.parametrize("old_executor", [False, True])
@pytest.mark.parametrize(
    ("kind", "least"),
    [("function", 8), ("traced function", 8), ("module", 8), ("traced module", 8), ("method", 4)],
)
def test_weights_before_it_get_their_gradients(kind: str, least: int, old_executor: bool) -> None:
    """They got none from the third call on, or at once in the old executor, for what runs then has cut its inputs
    off: ``layers_of`` trained without them, in silence. A method of a compiled module keeps its caller whole."""
    before = torch._C._jit_set_profiling_executor(not old_executor)
    mode = torch._C._jit_set_profiling_mode(not old_executor)
    try:
        model = nn.Sequential(*(Compiled(kind) for _ in range(4)))
        x = torch.randn(2, 8)
        for _ in range(3):
            model(x).sum().backward()
        layers = captured_layers(model, x)
        assert len(layers) >= least
        assert_same(model, layers, [((x,), {})])
    finally:
        torch._C._jit_set_profiling_executor(before)
        torch._C._jit_set_profiling_mode(mode)
