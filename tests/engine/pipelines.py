"""Small models, their data, and single-process training to compare pipelines with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.utils import set_random_seed
from torch import nn

WIDTH = 16
WORDS = 12
BASE_SEED = 1234
MICRO_BATCH_SIZE = 4


class Block(nn.Module):
    """A layer with a buffer that counts its forwards."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x + torch.tanh(self.linear(x))


class Embedding(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(words, width) * 0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight).mean(1)


def head(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ embedding.weight.t()


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0


def mlp() -> list[Any]:
    """Eight layers; the second is a function."""
    blocks = [LayerSpec(Block, WIDTH) for _ in range(5)]
    return [LayerSpec(nn.Linear, 8, WIDTH), doubled, *blocks, LayerSpec(nn.Linear, WIDTH, 4)]


def tied() -> list[Any]:
    """Eight layers; the first and the last share their weight."""
    blocks = [LayerSpec(Block, WIDTH) for _ in range(6)]
    first = TiedLayerSpec("embed", Embedding, WORDS, WIDTH)
    return [first, *blocks, TiedLayerSpec("embed", Embedding, WORDS, WIDTH, forward_fn=head)]


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.float(), labels)


def micro_batch(number: int, *, tokens: bool = False, size: int = MICRO_BATCH_SIZE, dtype=torch.float32):
    """The ``number``-th micro-batch of the data."""
    generator = torch.Generator().manual_seed(1000 + number)
    if tokens:
        words = torch.randint(0, WORDS, (size, 5), generator=generator)
        return words, words.sum(1) % WORDS
    inputs = torch.randn(size, 8, generator=generator)
    return inputs.to(dtype), inputs[:, :4].argmax(1)


def build(spec: Any, index: int, shared: dict[str, nn.Module]) -> Callable[[Any], Any]:
    """A layer as DeepSpeed builds it with ``seed_layers=True``."""
    if not isinstance(spec, LayerSpec):
        return spec
    first = shared.get(spec.key) if isinstance(spec, TiedLayerSpec) else None
    if first is not None and (spec.forward_fn or first.built_by == (spec.typename, spec.module_kwargs)):
        module = first
    else:
        set_random_seed(BASE_SEED + index)
        module = spec.build()
        if first is not None:
            for name in spec.tied_weight_attr:
                _replace(module, getattr(module, name), getattr(first, name))
        elif isinstance(spec, TiedLayerSpec):
            shared[spec.key] = module
            module.built_by = spec.typename, spec.module_kwargs
    forward = getattr(spec, "forward_fn", None)
    return functools.partial(forward, module) if forward else module


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if weight is old:
                setattr(part, name, new)


class Whole(nn.Module):
    """All layers in one process, parameters named as in a pipeline."""

    def __init__(self, specs: list[Any]) -> None:
        super().__init__()
        shared: dict[str, nn.Module] = {}
        self.functions = [build(spec, index, shared) for index, spec in enumerate(specs)]
        self.tied_modules = nn.ModuleDict(shared)
        for index, function in enumerate(self.functions):
            if isinstance(function, nn.Module) and function not in shared.values():
                self.add_module(str(index), function)

    def forward(self, x: Any) -> torch.Tensor:
        for function in self.functions:
            x = function(x)
        return x


def train_alone(
    specs: list[Any],
    batches: list[list[Any]],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    clip: float = 1.0,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] = loss_fn,
    before_step: Callable[[nn.Module], object] = lambda model: None,
) -> list[float]:
    """The losses of plain PyTorch training, one per step; a batch is a list of micro-batches.

    Args:
        before_step: called with the model when its gradients are there, before they are clipped.
    """
    state = torch.get_rng_state()
    model = Whole(specs)
    torch.set_rng_state(state)
    if isinstance(loss_fn, nn.Module):
        model.loss_fn = loss_fn
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for inputs, labels in batch:
            loss = loss_fn(model(inputs), labels) / len(batch)
            loss.backward()
            total += loss.item()
        before_step(model)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
    return losses


def weights_and_biases(model: nn.Module) -> list[dict[str, Any]]:
    """The two groups that users make: matrices decay, vectors do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": 0.1},
        {
            "params": [parameter for parameter in parameters if parameter.ndim <= 1],
            "weight_decay": 0.0,
            "lr": 3e-3,
        },
    ]


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """The user's optimizer, with decay on weights alone."""
    return torch.optim.AdamW(weights_and_biases(model), lr=1e-2)


class Assigning(torch.optim.SGD):
    """Gives each weight a new tensor, as optimizers do that somebody wrote by hand."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.data = weight.data - group["lr"] * weight.grad


def halving(optimizer: torch.optim.Optimizer) -> Any:
    """The user's schedule."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


class Counted(Iterator):
    """An iterator that knows what was taken from it."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.taken = items, 0

    def __next__(self) -> Any:
        if self.taken == len(self.items):
            raise StopIteration
        self.taken += 1
        return self.items[self.taken - 1]
