"""Networks whose layers keep memory in different ways: what the stash is tested on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class HiddenKeeper(torch.autograd.Function):
    """Keeps ``num_floats`` floats for its backward where saved-tensor hooks do not see them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, num_floats: int) -> torch.Tensor:
        ctx.kept = torch.zeros(num_floats)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert ctx.kept.numel()
        return gradient, None


class Keeper(torch.autograd.Function):
    """Saves ``num_floats`` floats for its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, num_floats: int) -> torch.Tensor:
        ctx.save_for_backward(torch.zeros(num_floats))
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (kept,) = ctx.saved_tensors
        assert kept.numel()
        return gradient, None


class Cached(nn.Module):
    """Multiplies by a table that it makes once and keeps: no cost of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones(x.shape[-1])
        return x * self.table


def after_a_step(layers, x) -> None:
    """Make what layers make once and keep, as the first step of training does: measuring has put it back."""
    for layer in layers:
        if isinstance(layer, Cached):
            layer.table = torch.ones(x.shape[-1])


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Position(nn.Module):
    """Adds nothing of the input: the output is a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.expand(x.shape[0], 8)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x)[0]


class Shown(nn.Module):
    """Attention that leaves its weights in an attribute, where others look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.weights: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.project(x).chunk(3, dim=-1)
        self.weights = (queries @ keys.transpose(-2, -1)).softmax(-1)
        return self.weights @ values


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def split_in_two(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.chunk(2, dim=-1)


def product(pair: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return pair[0] * pair[1]


def first_column_everywhere(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1].expand(-1, 8)


def networks() -> dict[str, tuple[list[Any], torch.Tensor]]:
    """Layers and inputs by name."""
    torch.manual_seed(0)
    x, image = torch.randn(5, 8), torch.randn(2, 3, 8, 8)
    return {
        "relu": ([nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)], x),
        "relu in place": ([nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)], x),
        "ends with what it keeps": ([nn.Linear(8, 16), nn.Tanh(), nn.Softmax(dim=-1)], x),
        "dropout": ([nn.Linear(8, 16), nn.Dropout(0.5), nn.Sigmoid(), nn.Dropout(0.1), nn.Linear(16, 4)], x),
        "convolutions": (
            [
                nn.Conv2d(3, 4, 3, padding=1),
                nn.BatchNorm2d(4),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(64, 4),
            ],
            image,
        ),
        "the same twice": ([nn.Linear(8, 8), lambda x: x * x, lambda x: x * x.sigmoid()], x),
        "nothing kept": ([nn.Linear(8, 8), lambda x: x + 1, lambda x: -x, lambda x: x.t()], x),
        "views": ([nn.Linear(8, 8), nn.ReLU(), lambda x: x.view(40), lambda x: x[10:], torch.tanh, torch.exp], x),
        "expanded": ([nn.Linear(8, 8), first_column_everywhere, nn.Tanh(), first_column_everywhere, torch.exp], x),
        "expanded, then linear": ([nn.Linear(8, 8), first_column_everywhere, nn.Linear(8, 4)], x),
        "gaps": ([nn.Linear(8, 8), lambda x: x[:, :4], lambda x: x.reshape(-1) ** 2], x),
        "thrown away": ([nn.Linear(8, 8), lambda x: (x.tanh().exp(), x + 1)[1], torch.tanh], x),
        "tuples": (
            [nn.Linear(8, 16), nn.Tanh(), split_in_two, product, nn.Linear(8, 16), split_in_two, product],
            x,
        ),
        "passing through": (
            [
                lambda x: (x.sin(), x.sigmoid()),
                lambda pair: (pair[0].exp(), pair[1]),
                lambda pair: (pair[0] * pair[1], pair[1]),
                lambda pair: pair[0] * pair[1],
            ],
            x.clone(),
        ),
        "transformer": (
            [
                nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
                nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
                nn.LayerNorm(8),
            ],
            torch.randn(2, 5, 8),
        ),
        "attention that is shown": ([nn.Linear(8, 8), Shown(), nn.Tanh()], torch.randn(2, 50, 8)),
        "embedding": (
            [nn.Embedding(20, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 20)],
            torch.arange(10).view(2, 5),
        ),
        "recurrent": ([Recurrent(), nn.Linear(8, 8), Recurrent()], torch.randn(2, 5, 8)),
        "kept": ([nn.Linear(8, 8), lambda x: Keeper.apply(x, 100), nn.Linear(8, 8)], x),
        "kept out of sight": ([nn.Linear(8, 8), lambda x: HiddenKeeper.apply(x, 100), nn.Linear(8, 8)], x),
        "cached table": ([nn.Linear(8, 8), Cached(), nn.Linear(8, 8)], x),
        "parameter as output": ([Position(), nn.Linear(8, 8), nn.Tanh()], x),
        "checkpointed": ([nn.Linear(8, 8), Checkpointed(False), nn.Tanh(), nn.Linear(8, 4)], x),
        "checkpointed, reentrant": ([nn.Linear(8, 8), Checkpointed(True), nn.Tanh(), nn.Linear(8, 4)], x),
        "frozen beginning": (
            [frozen(nn.Linear(8, 8)), nn.Tanh(), frozen(nn.Linear(8, 8)), nn.Linear(8, 8), nn.Tanh()],
            x,
        ),
        "frozen end": ([nn.Linear(8, 8), nn.Tanh(), frozen(nn.Linear(8, 8)), nn.Tanh()], x),
        "all frozen": ([frozen(nn.Linear(8, 8)), nn.Tanh()], x),
    }
