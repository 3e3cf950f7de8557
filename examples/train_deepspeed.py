"""A small GPT on the source text of Python's standard library, as a pipeline of two CPU processes.

    torchrun --nproc_per_node=2 examples/train_deepspeed.py

An ordinary DeepSpeed pipeline script, plus ``deepspeed_partition.install()`` and the word ``madpipe``. It prints
the plan and what it promised against what the run did, then runs a few steps on DeepSpeed's default cut.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from report import Measured, gathered, print_report, tensors_that_stay
from torch import Tensor, nn

import deepspeed_partition
from deepspeed_partition.planner.units import format_seconds
from deepspeed_partition.profiling import LiveBytes

VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS = 4096, 64, 128, 4, 6
MICRO_BATCH, MICRO_BATCHES = 8, 8


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        nn.init.normal_(self.tokens.weight, std=0.02)

    @property
    def weight(self) -> Tensor:
        return self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        return self.tokens(text) + self.positions


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        x = x + self.out(attended.reshape(batch, length, WIDTH))
        return x + self.mlp(self.norms[1](x))


def unembed(embedding: Embedding, x: Tensor) -> Tensor:
    """The output layer shares the weights of the input layer."""
    return x @ embedding.weight.T


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def layers() -> list[LayerSpec]:
    return [
        TiedLayerSpec("embedding", Embedding),
        *(LayerSpec(Block) for _ in range(BLOCKS)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embedding", Embedding, forward_fn=unembed),
    ]


def tokens_of_the_standard_library() -> Tensor:
    """Read the library's source text as numbers of words, names and signs: the most common, 0 for all others."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.py")))
    words = re.findall(r"\w+|[^\w\s]|\s+", text)
    common = [word for word, _ in Counter(words).most_common(VOCABULARY - 1)]
    number = {word: index for index, word in enumerate(common, start=1)}
    return torch.tensor([number.get(word, 0) for word in words])


def micro_batches(data: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows, and the same windows one token later."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - CONTEXT - 1, (MICRO_BATCH,), generator=generator)
        windows = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])
        yield windows[:, :-1], windows[:, 1:]


def train(partition_method: str, steps: int, tokens: Tensor) -> tuple[deepspeed.PipelineEngine, Measured]:
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(
        model=PipelineModule(
            layers=layers(),
            num_stages=torch.distributed.get_world_size(),
            loss_fn=loss_of,
            partition_method=partition_method,
            seed_layers=True,
        ),
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "steps_per_print": 20,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "gradient_clipping": 1.0,
        },
    )
    if partition_method == "madpipe":
        engine.watch_steps()
    data = micro_batches(tokens, seed=1)
    seconds, in_pipeline, peak_bytes = [], [], 0
    for step in range(steps):
        started = time.perf_counter()
        if step == 2:
            with LiveBytes(include=tensors_that_stay(engine.optimizer, engine.module)) as live:
                engine.train_batch(data)
            peak_bytes = live.peak_bytes
            continue
        engine.train_batch(data)
        seconds.append(time.perf_counter() - started)
        if partition_method == "madpipe":
            in_pipeline.append(engine.figures_of_steps().step_seconds)
    # The first step plans, the second one warms up.
    return engine, Measured(tuple(seconds[2:]), peak_bytes, tuple(in_pipeline[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # two processes, each with one core
    deepspeed_partition.install()  # the one line
    deepspeed.init_distributed()

    tokens = tokens_of_the_standard_library()
    engine, measured = train("madpipe", steps, tokens)
    ranks = gathered(measured)
    if engine.global_rank == 0:
        print(engine.plan.summary())
        print_report(engine.plan, ranks, statistics.median(measured.pipeline_seconds))
    _, default = train("parameters", 10, tokens)
    others = gathered(default)
    if engine.global_rank == 0:
        planned, uncut = (max(rank.median_seconds for rank in each) for each in (ranks, others))
        print(
            f"a step takes {format_seconds(planned)} on MadPipe's cut and {format_seconds(uncut)} on DeepSpeed's "
            f"default cut ('parameters'): {uncut / planned:.2f} times as long "
            "(one run after the other: an idle machine shows it)"
        )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
