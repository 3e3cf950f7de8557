"""Chains of Llama 2 with 7, 13 and 70 billion parameters, computed from their published sizes.

    python examples/profiles/transformers/llama2.py

writes ``llama2-7b.json``, ``llama2-13b.json`` and ``llama2-70b.json`` beside this file. Nothing was measured.
One micro-batch is one sequence. A device of a plan is one GPU of a tensor-parallel group, with its share of each
layer.

Sources:

- Sizes: Touvron et al. 2023, "LLaMA", table 2 (7B and 13B), and "Llama 2", section 2.2 and table 1 (context,
  grouped queries). Meta's repository has the widths of the feed-forward layers (``llama/model.py``, with the
  ``params.json`` of each model) and the degrees of tensor parallelism (README: 1, 2 and 8).
- What the backward keeps: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
  models", sections 4.1 (a block, tensor by tensor), 4.2.2 (sequence parallelism divides all of it) and 4.3 (the
  ends). FlashAttention keeps its output and one number per row in the place of the scores.
- The device: NVIDIA's data sheet of the A100 80GB, 312 TFLOP/s in bfloat16 and 2039 GB/s.
- The share of the peak: a half. Narayanan et al. 2021, "Efficient large-scale language model training on GPU
  clusters", table 1, reaches 44 to 52 %, the communication of tensor parallelism included.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepspeed_partition import Chain, LayerProfile

HERE = Path(__file__).parent
FLOPS_PER_SECOND, BYTES_PER_SECOND, SHARE_OF_PEAK = 312e12, 2039e9, 0.5
SEQUENCE, VOCABULARY = 4096, 32000
NUMBER_BYTES, FLOAT_BYTES, TOKEN_BYTES = 2, 4, 8


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Published sizes of one model, and the GPUs that share each of its layers."""

    name: str
    width: int
    feed_forward: int
    blocks: int
    heads: int
    key_value_heads: int
    tensor_parallel: int

    @property
    def key_value_width(self) -> int:
        return self.width // self.heads * self.key_value_heads

    @property
    def block_matrix_parameters(self) -> int:
        """Parameters of the matrices of a block: queries, keys, values, output, and three of the feed-forward."""
        return self.width * (2 * self.width + 2 * self.key_value_width + 3 * self.feed_forward)

    @property
    def block_kept_bytes(self) -> int:
        """Bytes that the backward of one block needs: its input included, before they are shared among GPUs."""
        # Inputs and outputs of both normalizations, output of the attention; queries, keys, values; gate, up, the
        # activated gate, and their product.
        numbers = 5 * self.width + self.width + 2 * self.key_value_width + 4 * self.feed_forward
        return SEQUENCE * (NUMBER_BYTES * numbers + FLOAT_BYTES * self.heads)


MODELS = (
    Sizes(
        name="llama2-7b", width=4096, feed_forward=11008, blocks=32, heads=32, key_value_heads=32,
        tensor_parallel=1,
    ),
    Sizes(
        name="llama2-13b", width=5120, feed_forward=13824, blocks=40, heads=40, key_value_heads=40,
        tensor_parallel=2,
    ),
    Sizes(
        name="llama2-70b", width=8192, feed_forward=28672, blocks=80, heads=64, key_value_heads=8,
        tensor_parallel=8,
    ),
)  # fmt: skip


def _layer(
    sizes: Sizes, name: str, kind: str, seconds: float, parameters: int, output_bytes: int, kept_bytes: int
) -> LayerProfile:
    """Return a layer's share on one GPU; a backward takes twice as long as its forward."""
    share = sizes.tensor_parallel
    return LayerProfile(
        name=name,
        type=kind,
        # Ten decimals: what is computed on another machine is the same file.
        forward_seconds=round(seconds / share, 10),
        backward_seconds=round(2 * seconds / share, 10),
        weight_bytes=NUMBER_BYTES * parameters // share,
        num_trainable_parameters=parameters // share,
        output_bytes=output_bytes,
        stash_bytes=kept_bytes // share,
    )


def chain_of(sizes: Sizes) -> Chain:
    """Return the chain of embedding, blocks and head, for one sequence of 4096 tokens."""
    flops, share = SHARE_OF_PEAK * FLOPS_PER_SECOND, sizes.tensor_parallel
    hidden_bytes = NUMBER_BYTES * SEQUENCE * sizes.width
    # Attention under a causal mask: half of the scores, and half of their products with the values.
    attention = 2 * SEQUENCE**2 * sizes.width
    block_seconds = (2 * SEQUENCE * sizes.block_matrix_parameters + attention) / flops
    head_seconds = 2 * SEQUENCE * sizes.width * VOCABULARY / flops
    embedding_seconds = 2 * hidden_bytes / (SHARE_OF_PEAK * BYTES_PER_SECOND)
    embedding = VOCABULARY * sizes.width
    block = sizes.block_matrix_parameters + 2 * sizes.width
    logits_bytes = FLOAT_BYTES * SEQUENCE * VOCABULARY
    tokens_bytes = TOKEN_BYTES * SEQUENCE
    sent_bytes = hidden_bytes // share
    return Chain(
        name=sizes.name,
        micro_batch_size=1,
        hardware=f"computed: A100 80GB, {share} per layer, half of the peak",
        input_bytes=tokens_bytes,
        layers=(
            _layer(
                sizes, "embedding", "Embedding", embedding_seconds, embedding, sent_bytes, share * tokens_bytes
            ),
            *(
                _layer(sizes, f"block{index}", "Block", block_seconds, block, sent_bytes, sizes.block_kept_bytes)
                for index in range(sizes.blocks)
            ),
            _layer(
                sizes, "head", "Head", head_seconds, embedding + sizes.width, 4, 2 * hidden_bytes + logits_bytes
            ),
        ),
    )


def main() -> None:
    for sizes in MODELS:
        chain = chain_of(sizes)
        chain.save(HERE / f"{sizes.name}.json")
        parameters = sizes.tensor_parallel * sum(layer.num_trainable_parameters or 0 for layer in chain.layers)
        print(f"{sizes.name}: {parameters:,} parameters, {chain.compute_seconds:.3f} s per micro-batch")


if __name__ == "__main__":
    main()
