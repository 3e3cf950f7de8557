"""Cases: models as they are, captured by ``layers_of``, which must train as in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepspeed_partition
from tests.engine.running import NUM_MICRO_BATCHES, adam, same, start, train

WORDS, WIDTH, LENGTH, BATCH = 12, 8, 6, 4


class LanguageModel(nn.Module):
    """Embedding and head have one weight; a mask is made from the sizes, and the loss is within."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)]
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, padding: Any = None, *, labels: Any = None) -> dict[str, Any]:
        x = self.embed(tokens)
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=causal, src_key_padding_mask=padding)
        logits = self.head(self.norm(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel()


def arguments(number: int, length: int = LENGTH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, WORDS, (BATCH, length), generator=generator)
    padding = torch.zeros(BATCH, length, dtype=torch.bool)
    padding[0, length - 2 :] = True
    return {"tokens": tokens, "padding": padding, "labels": tokens.masked_fill(padding, -100)}


def data(num_steps: int) -> list[list[Any]]:
    """Micro-batches of each step, whose sequences are longer from step to step."""
    numbers = iter(range(10**6))
    return [
        [
            (tuple(arguments(next(numbers), LENGTH + step).values()), torch.zeros(BATCH))
            for _ in range(NUM_MICRO_BATCHES)
        ]
        for step in range(num_steps)
    ]


def loss_of(outputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> torch.Tensor:
    return outputs[0]


def trained_alone(batches: list[list[Any]]) -> tuple[LanguageModel, list[float]]:
    alone = model()
    optimizer, losses = adam(alone), []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for (tokens, padding, labels), _ in batch:
            loss = alone(tokens, padding, labels=labels)["loss"] / len(batch)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return alone, losses


def a_model_as_it_is(_: Path) -> None:
    """A tied language model, on sequences of other lengths than it was captured with, also in evaluation."""
    batches = data(4)
    alone, expected = trained_alone(batches)
    layers = deepspeed_partition.layers_of(model(), **arguments(0))
    assert layers.input_names == ["tokens", "padding", "labels"]
    assert layers.output_names == ["loss", "logits"]
    engine, _, _ = start(layers, [0, len(layers) // 2, len(layers)], optimizer=adam, loss_fn=loss_of,
                         seed_layers=False)  # fmt: skip
    same(train(engine, batches), expected)
    alone.eval()
    with torch.no_grad():
        tokens, padding, labels = batches[0][0][0]
        evaluated = float(alone(tokens, padding, labels=labels)["loss"])
    same([float(engine.eval_batch(iter(batches[0][:1] * NUM_MICRO_BATCHES)))], [evaluated])
    own = {name.split(".", 2)[-1] if "tied" in name else name.split(".", 1)[-1]: weight.detach()
           for name, weight in engine.module.named_parameters()}  # fmt: skip
    for name, weight in alone.named_parameters(remove_duplicate=False):
        if name in own and "in_proj_bias" not in name:  # whose gradient is noise, and Adam makes steps of it
            torch.testing.assert_close(own[name], weight.detach(), rtol=1e-4, atol=1e-5)
    assert own and own.keys() <= alone.state_dict().keys()


def a_model_as_it_is_plans_and_moves(_: Path) -> None:
    """The same, measured and planned, and moved in training."""
    batches = data(4)
    _, expected = trained_alone(batches)
    layers = deepspeed_partition.layers_of(model(), **arguments(0))
    engine, _, _ = start(copy.copy(layers), optimizer=adam, loss_fn=loss_of, seed_layers=False)
    same(train(engine, batches[:2]), expected[:2])
    other = [0, 2, len(layers)]
    engine.recut(other if engine.module.parts != other else [0, 3, len(layers)])
    same(train(engine, batches[2:]), expected[2:])


CASES = [a_model_as_it_is, a_model_as_it_is_plans_and_moves]
