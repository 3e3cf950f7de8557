"""A language model as GPT-NeoX and Megatron-DeepSpeed lay theirs out, and its data.

Layers hand a tuple on whose last member is the attention mask; functions between them reshape it, and the one
after the blocks drops it. The embedding is tied to the output layer, which a function of the module runs.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from tests.engine import pipelines

WORDS, WIDTH, HEADS, LENGTH = 31, 16, 2, 6
NUM_BLOCKS = 4
NUM_LAYERS = NUM_BLOCKS + 5


class EmbeddingPipe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH)
        self.position_embeddings = nn.Embedding(LENGTH, WIDTH)

    @property
    def word_embeddings_weight(self) -> Tensor:
        return self.word_embeddings.weight

    def forward(self, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, positions, mask = args
        return self.word_embeddings(tokens) + self.position_embeddings(positions), mask


class ParallelTransformerLayerPipe(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.input_layernorm, self.post_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = args  # [length, batch, width], like Megatron's
        length, batch, _ = hidden.shape
        heads = self.query_key_value(self.input_layernorm(hidden)).view(length, batch, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 1, 3, 0, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        if mask.dtype == torch.bool:
            scores.masked_fill_(mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask
        attended = (scores.softmax(-1) @ value).permute(2, 0, 1, 3).reshape(length, batch, WIDTH)
        hidden = hidden + self.scale * self.dense(attended)
        return hidden + self.mlp(self.post_layernorm(hidden)), mask


class NormPipe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        assert torch.is_tensor(hidden), "the mask was dropped before"
        return self.norm(hidden)


def _post_transformer_block(args: tuple[Tensor, Tensor]) -> Tensor:
    return args[0].transpose(0, 1).contiguous()


def cross_entropy(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    targets, loss_mask = labels
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * loss_mask.flatten()).sum() / loss_mask.sum()


def specs(logits_of: Any = lambda embedding, hidden: hidden @ embedding.word_embeddings_weight.T) -> list[Any]:
    tied = {"tied_weight_attr": "word_embeddings_weight"}
    layers: list[Any] = [TiedLayerSpec("embed", EmbeddingPipe, **tied)]
    layers.append(lambda args: (args[0].transpose(0, 1).contiguous(), *args[1:]))
    layers += [LayerSpec(ParallelTransformerLayerPipe, scale=1.0 / (1 + index)) for index in range(NUM_BLOCKS)]
    layers += [_post_transformer_block, LayerSpec(NormPipe)]
    return [*layers, TiedLayerSpec("embed", EmbeddingPipe, forward_fn=logits_of, **tied)]


class GPT2ModelPipe(deepspeed.PipelineModule, nn.Module):
    """Its name alone makes DeepSpeed expect an attention mask at the end of each boundary."""

    def __init__(self, neox_args: SimpleNamespace, topology: Any = None) -> None:
        self.neox_args = neox_args
        self.num_logits = 0

        def _logits_helper(embedding: EmbeddingPipe, hidden: Tensor) -> Tensor:
            self.num_logits += 1
            return hidden @ embedding.word_embeddings_weight.T

        self.specs = specs(_logits_helper)
        super().__init__(
            layers=self.specs,
            loss_fn=cross_entropy,
            topology=topology,
            activation_checkpoint_interval=neox_args.checkpoint_num_layers,
            partition_method=neox_args.pipe_partition_method,
            checkpointable_layers=["ParallelTransformerLayerPipe"],
            seed_layers=neox_args.seed_layers,
            base_seed=pipelines.BASE_SEED,
        )

    def to_sequential(self) -> nn.Sequential:
        """This rank's own layers, built anew as one module."""
        own = self.specs[self._local_start : self._local_stop]
        return nn.Sequential(*(spec.build() for spec in own if isinstance(spec, LayerSpec)))


def arguments(method: Any = "type:transformer", checkpoint_num_layers: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        pipe_partition_method=method, checkpoint_num_layers=checkpoint_num_layers, seed_layers=True
    )


def text(number: int, size: int = 2) -> dict[str, Tensor]:
    """What a data loader gives: token numbers only."""
    generator = torch.Generator().manual_seed(300 + number)
    return {"text": torch.randint(0, WORDS, (size, LENGTH + 1), generator=generator)}


def batch_of(text: dict[str, Tensor], mask_dtype: torch.dtype = torch.bool) -> tuple[Any, Any]:
    """A ``batch_fn``: ((tokens, positions, mask), (labels, loss_mask))."""
    tokens = text["text"]
    positions = torch.arange(LENGTH).expand(len(tokens), LENGTH)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).expand(len(tokens), 1, LENGTH, LENGTH)
    mask = (
        hidden
        if mask_dtype == torch.bool
        else torch.zeros(hidden.shape, dtype=mask_dtype).masked_fill(hidden, -1e4)
    )
    loss_mask = (tokens[:, 1:] % 5 != 0).float()
    return (tokens[:, :-1].contiguous(), positions, mask), (tokens[:, 1:].contiguous(), loss_mask)


def parameters_for_weight_decay(module: nn.Module) -> list[dict[str, Any]]:
    """Biases and norms do not decay."""
    plain = [weight for name, weight in module.named_parameters() if name.endswith("bias") or "norm" in name]
    known = {id(weight) for weight in plain}
    decaying = [weight for _, weight in module.named_parameters() if id(weight) not in known]
    return [{"params": decaying, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
