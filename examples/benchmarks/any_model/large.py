"""Capture models of 100 blocks, which are larger than this machine: how long it takes, and how much memory.

python examples/benchmarks/any_model/large.py [--blocks 100] [--out results/large.json]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from torch import nn

from deepspeed_partition.capture import layers_as_they_are

SECONDS_BETWEEN_READINGS = 0.002


def llama(num_blocks: int) -> nn.Module:
    """Blocks of Llama 2 70B."""
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=8192, intermediate_size=28672, num_hidden_layers=num_blocks, num_attention_heads=64,
            num_key_value_heads=8, max_position_embeddings=4096,
        )
    )  # fmt: skip


def gpt(num_blocks: int) -> nn.Module:
    """Blocks of GPT-2 XL."""
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=1600, n_layer=num_blocks, n_head=25))


MODELS: dict[str, Callable[[int], nn.Module]] = {"Llama, blocks of 70B": llama, "GPT-2, blocks of XL": gpt}


class Peak:
    """The largest resident memory of this process within a context, above that at its beginning, in bytes."""

    def __enter__(self) -> Peak:
        self.before = self.most = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.most = max(self.most, self._now())

    def _watch(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_READINGS):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_bytes(self) -> int:
        return self.most - self.before


def bytes_of(module: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def measured(name: str, num_blocks: int) -> dict[str, Any]:
    with torch.device("meta"):
        model = MODELS[name](num_blocks).train()
        words = torch.zeros(1, 1024, dtype=torch.long)
    wall, processor = time.perf_counter(), time.process_time()
    with Peak() as peak:
        layers = layers_as_they_are(model, (), {"input_ids": words, "labels": words, "use_cache": False})
    return {
        "model": name, "blocks": num_blocks, "parameters": sum(weight.numel() for weight in model.parameters()),
        "model_bytes": bytes_of(model), "layers": len(layers),
        "seconds": round(time.perf_counter() - wall, 2),
        "processor_seconds": round(time.process_time() - processor, 2), "peak_bytes": peak.num_bytes,
        "largest_layer_bytes": max(map(bytes_of, layers)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print(
        "| model | parameters | GB | layers | capture, s | of the processor, s | memory, MB | largest layer, MB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for name in MODELS:
        rows.append(row := measured(name, arguments.blocks))
        print(
            f"| {name}, {row['blocks']} | {row['parameters'] / 1e9:.1f} billion | {row['model_bytes'] / 1e9:.0f} "
            f"| {row['layers']} | {row['seconds']:.1f} | {row['processor_seconds']:.1f} "
            f"| {row['peak_bytes'] / 1e6:.0f} | {row['largest_layer_bytes'] / 1e6:.0f} |",
            flush=True,
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
