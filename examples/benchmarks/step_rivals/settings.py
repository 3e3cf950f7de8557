"""The 200 settings: chains, devices, micro-batches and memory; drawn once, with a seed, into ``settings.jsonl``.

    python examples/benchmarks/step_rivals/settings.py

Chains: those of ``examples/profiles``, the four networks of the MadPipe paper, three transformers and five
measured networks. P = 2, 4, 8; m = 4, 8, 16, 32. Memory is tight, 0.85 to 1.15 times what plain 1F1B needs on a
balanced cut, or roomy, 1.5 to 4 times that. Bandwidths are those of the paper, 12 and 24 GB/s, or of a cluster
for the transformers, 25 GB/s (InfiniBand of 200 Gbit/s per GPU) and 300 GB/s (NVLink). 200 of the 288 combinations
are drawn.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from rivals import plain_1f1b_bytes

from deepspeed_partition import Chain, Platform

PROFILES = HERE.parents[1] / "profiles"
PAPER = ("resnet-50", "resnet-101", "inception-v3", "densenet-121")
TRANSFORMERS = ("llama2-7b", "llama2-13b", "llama2-70b")
MEASURED = ("vgg16", "resnet50", "resnet101", "inception_v3", "densenet121")
DEVICES, MICRO_BATCHES, MEMORIES = (2, 4, 8), (4, 8, 16, 32), {"tight": (0.85, 1.15), "roomy": (1.5, 4.0)}
NUMBER, SEED = 200, 18
FILE = HERE / "settings.jsonl"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A chain, a platform and the micro-batches of a step."""

    number: int
    network: str
    num_devices: int
    num_micro_batches: int
    memory: str
    """``tight`` or ``roomy``."""
    memory_bytes: int
    bandwidth: float
    latency_seconds: float
    weight_copies: float
    digest: str
    """Digest of the chain that the setting was drawn for."""

    @property
    def platform(self) -> Platform:
        return Platform(
            num_devices=self.num_devices,
            memory_bytes=self.memory_bytes,
            bandwidth=self.bandwidth,
            latency_seconds=self.latency_seconds,
            weight_copies=self.weight_copies,
        )


@cache
def chain_of(network: str) -> Chain:
    if network in TRANSFORMERS:
        return Chain.load(PROFILES / "transformers" / f"{network}.json")
    if network in MEASURED:
        return Chain.load(PROFILES / "pipedream" / f"{network}.graph.txt")
    return Chain.load(PROFILES / "vision" / f"{network}.json")


def drawn() -> list[Setting]:
    """Draw the settings."""
    pick = random.Random(SEED)
    every = list(product((*PAPER, *TRANSFORMERS, *MEASURED), DEVICES, MICRO_BATCHES, MEMORIES))
    settings = []
    for number, (network, num_devices, num_micro_batches, memory) in enumerate(
        sorted(pick.sample(every, NUMBER), key=every.index)
    ):
        chain, is_transformer = chain_of(network), network in TRANSFORMERS
        bandwidth = pick.choice((25e9, 300e9) if is_transformer else (12e9, 24e9))
        # Training in bfloat16 with Adam keeps 16 bytes per parameter of 2 bytes; the paper counts 3 copies.
        latency_seconds, weight_copies = (5e-6, 8.0) if is_transformer else (0.0, 3.0)
        platform = Platform(
            num_devices=num_devices,
            memory_bytes=2**60,
            bandwidth=bandwidth,
            latency_seconds=latency_seconds,
            weight_copies=weight_copies,
        )
        needs = plain_1f1b_bytes(chain, platform, num_micro_batches)
        settings.append(
            Setting(
                number=number,
                network=network,
                num_devices=num_devices,
                num_micro_batches=num_micro_batches,
                memory=memory,
                memory_bytes=round(needs * pick.uniform(*MEMORIES[memory]) / 1e6) * 10**6,
                bandwidth=bandwidth,
                latency_seconds=latency_seconds,
                weight_copies=weight_copies,
                digest=chain.digest(),
            )
        )
    return settings


def read_settings() -> list[Setting]:
    """Read the settings that were drawn."""
    return [Setting(**json.loads(line)) for line in FILE.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    lines = [json.dumps(asdict(setting)) for setting in drawn()]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} settings in {FILE.name}")
