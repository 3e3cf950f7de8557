"""Small models as people write them: with skips, masks, loops, ties and outputs of several tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Skip(nn.Module):
    """The input is read again at the end; a weight stands in no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(F.relu(self.first(x))) * self.scale
        hidden = F.dropout(torch.tanh(self.second(hidden)), 0.2, self.training)
        return self.last(torch.cat([hidden, x], 1))


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """The way up reaches back to the way down, and asks whether the sizes agree."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deeper, self.bottom = convolutions(3, 4), convolutions(4, 8), convolutions(8, 16)
        self.up, self.after = nn.ConvTranspose2d(16, 8, 2, 2), convolutions(16, 8)
        self.upper, self.last = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 2, 1)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        high = self.down(image)
        low = self.deeper(F.max_pool2d(high, 2))
        up = self.up(self.bottom(F.max_pool2d(low, 2)))
        if up.shape[-2:] != low.shape[-2:]:
            up = F.interpolate(up, size=low.shape[-2:])
        up = self.upper(self.after(torch.cat([up, low], 1)))
        return {"mask": self.last(torch.cat([up, high], 1))}


class DenseBlock(nn.ModuleDict):
    def __init__(self, inputs: int, num_layers: int) -> None:
        super().__init__()
        for layer in range(num_layers):
            width = inputs + 4 * layer
            self[f"layer{layer}"] = nn.Sequential(
                nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4, 3, padding=1)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.dense, self.classifier = nn.Conv2d(3, 8, 3, padding=1), DenseBlock(8, 4), nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.dense(self.stem(x)), inplace=True)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(features, (1, 1)), 1))


class Output(NamedTuple):
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, torch.Tensor]


class RecurrentLanguageModel(nn.Module):
    """An LSTM; the head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.rnn = nn.LSTM(12, 12, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(12, 20)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, hidden: Any = None) -> Output:
        if hidden is None:
            zeros = self.head.weight.new_zeros(2, tokens.size(0), 12)
            hidden = zeros, zeros.clone()
        output, hidden = self.rnn(self.embed(tokens), hidden)
        return Output(self.head(output), hidden)


class MinimalGPT(nn.Module):
    """In the manner of minGPT: positions and a mask from sizes, blocks in a dictionary, the loss within."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)]
        self.transformer = nn.ModuleDict(
            {"words": nn.Embedding(20, 16), "places": nn.Embedding(32, 16), "drop": nn.Dropout(0.1),
             "blocks": nn.ModuleList(blocks), "norm": nn.LayerNorm(16)}
        )  # fmt: skip
        self.head = nn.Linear(16, 20, bias=False)
        self.transformer.words.weight = self.head.weight

    def forward(self, tokens: torch.Tensor, targets: Any = None) -> tuple[torch.Tensor, Any]:
        _, length = tokens.size()
        assert length <= 32, f"{length} words are too many"
        places = torch.arange(0, length, dtype=torch.long, device=tokens.device)
        x = self.transformer.drop(self.transformer.words(tokens) + self.transformer.places(places))
        mask = torch.full((length, length), float("-inf"), device=x.device).triu(1)
        for block in self.transformer.blocks:
            x = block(x, src_mask=mask)
        logits = self.head(self.transformer.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Checkpointed(nn.Module):
    """Both of torch's ways to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.ReLU()) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=bool(place % 2))
        return x


class Doubled(torch.autograd.Function):
    """A function with a gradient that nobody would guess."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 7


class InPlace(nn.Module):
    """Changes what it was given, views of it and a buffer, and uses a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        left = x[:, :4]
        for layer in self.layers:
            x += Doubled.apply(layer(x.clone()))
            self.count += 1
        left *= 2
        return self.last(x) * self.count


class Choosing(nn.Module):
    """One of its modules decides by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Routed() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if x.sum() > 0 else self.other(x)


class Repeated(nn.Module):
    """One block stands at several places, with a weight of its own before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = (
            nn.Linear(8, 8),
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
            nn.Linear(8, 2),
        )
        self.between = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.between:
            x = layer(self.block(x))
        return self.last(x)


class Unrolled(nn.Module):
    """A loop over the length: what is captured holds for one length."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.cell, self.after = nn.Linear(8, 8), nn.GRUCell(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        hidden = x.new_zeros(x.shape[0], 8)
        for time in range(x.shape[1]):
            hidden = self.cell(x[:, time], hidden)
        return self.after(hidden)


class Sizes(nn.Module):
    """A module returns sizes, and calls after it use them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm, self.last = Patches(), nn.LayerNorm(6), nn.Conv2d(6, 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x, height, width = self.patch(image)
        x = self.norm(x).transpose(1, 2).reshape(image.shape[0], -1, height, width)
        return self.last(x)


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, 6, 2, 2)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        x = self.project(image)
        _, _, height, width = x.shape
        return x.flatten(2).transpose(1, 2), height, width


class DataDependent(nn.Module):
    """Its own code asks for the data before and after its blocks, which run in order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.drop = nn.Dropout(0.2)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(16, 20)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        padding = tokens == 0
        x = embedded = self.drop(self.embed(tokens))
        mask = padding if padding.any() else None
        for block in self.blocks:
            x = self.run(block, x, src_key_padding_mask=mask)
        if x.mean() > 100:
            x = x / 2
        return {"logits": self.head(x + embedded)}

    def run(self, block: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return block(*args, **kwargs)


class DataDependentRecomputed(DataDependent):
    """It runs its blocks under checkpoint itself."""

    reentrant = False

    def run(self, block: nn.Module, x: torch.Tensor, src_key_padding_mask: Any) -> torch.Tensor:
        return checkpoint(block, x, None, src_key_padding_mask, use_reentrant=self.reentrant)


class DataDependentBetween(nn.Module):
    """Its own code asks for the data between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if x.sum() > 0:
                x = x * 2
        return x


class Early(nn.Module):
    """Computes at its beginning what it reads at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 64), nn.Linear(64, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(20)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(self.wide(x))
        hidden = x
        for block in self.blocks:
            hidden = torch.relu(block(hidden))
        return hidden + self.narrow(wide)


class Grid(nn.Module):
    """Returns sizes beside a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, int]:
        x = self.last(self.first(image))
        return x, x.shape[-1] * 2


class Validating(nn.Module):
    """Its own code refuses what it cannot take, and asserts what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.max() >= 20:
            raise ValueError(f"there is no word {tokens.max()}")
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.relu(block(x))
        assert torch.isfinite(x).all()
        return self.head(x)


class Positions(nn.Module):
    """Asks positions, which are made from sizes alone, whether the sequence is long; overwrites some by data."""

    def __init__(self, *, overwrites: bool = False) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(20, 8), nn.Embedding(32, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.overwrites = overwrites

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)[None].expand(tokens.shape[0], -1)
        is_long = (places > 7).any()
        if self.overwrites:
            places = places.clone()
            places += tokens % 2
        x = self.embed(tokens) + self.places(places)
        if is_long:
            x = x / 2
        for block in self.blocks:
            x = torch.relu(block(x))
        return x
