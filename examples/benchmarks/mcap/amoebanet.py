"""AmoebaNet-D(L, F) as a sequence of layers, and its predicted balance over four devices.

    python examples/benchmarks/mcap/amoebanet.py [--pixels 224] [--samples 1]

The definition is that of torchgpipe's benchmarks (``amoebanetd``), which the paper of mCAP runs; (36, 544) has
1,055,832,376 parameters with 1000 classes. There ``max_pool_3x3`` is an average pooling; so it is here. Each of
the 42 layers takes and returns the outputs of the two cells before, as a tuple.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))
from deepspeed_partition import Platform, make_plan
from deepspeed_partition.engine.incremental.profiler import FIRST_STEP, Setup, train
from deepspeed_partition.engine.incremental.runs import Run
from deepspeed_partition.profiling import profile_chain

CLASSES = 1000
Pair = tuple[Tensor, Tensor]


def conv(inputs: int, outputs: int, kernel: Any = 1, stride: Any = 1, padding: Any = 0) -> list[nn.Module]:
    """Return ReLU, convolution without bias, batch normalization."""
    return [
        nn.ReLU(), nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False), nn.BatchNorm2d(outputs),
    ]  # fmt: skip


class HalvedPixels(nn.Module):
    """A quarter of the pixels by two convolutions, the second a pixel further on both ways."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.second = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        return self.norm(torch.cat([self.first(x), self.second(F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1)))], 1))


def operation(name: str, width: int, stride: int) -> nn.Module:
    """Return an operation of a cell by its name in the genotype."""
    quarter = width // 4
    if name == "none":
        return nn.Identity() if stride == 1 else HalvedPixels(width, width)
    if name == "pool 3x3":
        return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
    if name == "max 2x2":
        return nn.MaxPool2d(2, stride)
    if name == "conv 1x1":
        return nn.Sequential(*conv(width, width, 1, stride))
    if name == "conv 3x3":
        inner = conv(quarter, quarter, 3, stride, 1)
    else:
        inner = conv(quarter, quarter, (1, 7), (1, stride), (0, 3)) + conv(
            quarter, quarter, (7, 1), (stride, 1), (3, 0)
        )
    return nn.Sequential(*conv(width, quarter), *inner, *conv(quarter, width))


NORMAL = (
    ((1, "conv 1x1"), (1, "pool 3x3")), ((1, "none"), (0, "conv 7x7")), ((0, "conv 1x1"), (0, "conv 7x7")),
    ((2, "pool 3x3"), (2, "none")), ((1, "pool 3x3"), (5, "conv 1x1")),
)  # fmt: skip
REDUCTION = (
    ((0, "max 2x2"), (0, "pool 3x3")), ((2, "none"), (1, "conv 3x3")), ((2, "conv 7x7"), (2, "pool 3x3")),
    ((3, "none"), (1, "max 2x2")), ((2, "pool 3x3"), (3, "conv 1x1")),
)  # fmt: skip
"""Five sums of two operations each, and the state that each operation takes; states 0 and 1 are the inputs."""
JOINED = {False: (0, 3, 4, 6), True: (4, 5, 6)}
"""The states that a normal cell and a reduction cell return side by side."""


class Cell(nn.Module):
    """A cell: the outputs of the last cell and of the one before, to its own output and that of the last one."""

    def __init__(self, before: int, last: int, width: int, *, reduces: bool, reduced_before: bool) -> None:
        super().__init__()
        self.of_last = nn.Sequential(*conv(last, width))
        self.of_before: nn.Module = nn.Identity()
        if reduced_before:
            self.of_before = HalvedPixels(before, width)
        elif before != width:
            self.of_before = nn.Sequential(*conv(before, width))
        self.joined, genotype = JOINED[reduces], REDUCTION if reduces else NORMAL
        self.taken = [(left, right) for (left, _), (right, _) in genotype]
        self.operations = nn.ModuleList(
            operation(name, width, 2 if reduces and state < 2 else 1) for both in genotype for state, name in both
        )

    def forward(self, x: Tensor | Pair) -> Pair:
        last, before = x if isinstance(x, tuple) else (x, x)
        states = [self.of_last(last), self.of_before(before)]
        for place, (left, right) in enumerate(self.taken):
            first, second = self.operations[2 * place], self.operations[2 * place + 1]
            states.append(first(states[left]) + second(states[right]))
        return torch.cat([states[index] for index in self.joined], 1), last


class Stem(nn.Sequential):
    """The first layer; its ReLU is of the image."""

    def __init__(self, width: int) -> None:
        super().__init__(*conv(3, width, 3, 2, 1))


class Head(nn.Module):
    """Mean over an image, and its classes."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)

    def forward(self, x: Pair) -> Tensor:
        return self.linear(x[0].mean((2, 3)))


def layers(num_layers: int, num_filters: int, classes: int = CLASSES) -> list[LayerSpec]:
    """Return AmoebaNet-D(L, F): a stem, two reduction cells, three times L / 3 normal cells, a head."""
    return list(_layers(num_layers, num_filters, classes))


def _layers(num_layers: int, num_filters: int, classes: int) -> Iterator[LayerSpec]:
    width = before = last = num_filters // 4
    reduced_before = False
    normal = [False] * (num_layers // 3)
    yield LayerSpec(Stem, width)
    for reduces in (True, True, *normal, True, *normal, True, *normal):
        width *= 2 if reduces else 1
        yield LayerSpec(Cell, before, last, width, reduces=reduces, reduced_before=reduced_before)
        before, last, reduced_before = last, width * len(JOINED[reduces]), reduces
    yield LayerSpec(Head, last, classes)


def num_parameters(num_layers: int, num_filters: int, classes: int = CLASSES) -> int:
    """Return the number of trainable parameters, without data."""
    with torch.device("meta"):
        return sum(
            weight.numel()
            for spec in layers(num_layers, num_filters, classes)
            for weight in spec.build().parameters()
        )


def small(micro_batch_size: int) -> tuple[list[Any], Any, Any]:
    """Return AmoebaNet-D(6, 32) with images of 64 x 64, what ``madpipe profile`` and incremental profiling run."""
    return _sample(6, 32, micro_batch_size, 64)


def _sample(num_layers: int, num_filters: int, samples: int, pixels: int) -> tuple[list[Any], Any, Any]:
    images = torch.randn(samples, 3, pixels, pixels)
    return layers(num_layers, num_filters), (images, torch.randint(CLASSES, (samples,))), F.cross_entropy


# The predicted balance


def balance(num_pixels: int, samples: int) -> dict[str, Any]:
    """Return the peaks of four devices by the planner's memory model: mcap's cut, and the one of equal time."""
    made, sample, loss_fn = _sample(36, 544, samples, num_pixels)
    chain = profile_chain(made, sample, loss_fn=loss_fn, name="AmoebaNet-D(36, 544)", repeats=1, warm_up=1)
    platform = Platform(num_devices=4, memory_bytes=2**50, bandwidth=1e12, weight_copies=COPIES)
    found: dict[str, Any] = {"pixels": num_pixels, "samples": samples, "weight_copies": COPIES}
    for algorithm in ("mcap", "mcap-bf", "mcap-bo", "pipedream-blind"):
        started = time.process_time()
        plan = make_plan(chain, platform, algorithm, num_micro_batches=4, num_stages=4)
        peaks = plan.peak_memory_bytes
        found[algorithm] = {
            "boundaries": plan.boundaries, "peak_bytes": list(peaks),
            "standard_deviation_gb": statistics.stdev(peaks) / 1e9,
            "processor_seconds": time.process_time() - started,
        }  # fmt: skip
    mcap, equal_time = (max(found[each]["peak_bytes"]) for each in ("mcap", "pipedream-blind"))
    return found | {"peak_lower_by": 1 - mcap / equal_time}


def trained_small() -> dict[str, Any]:
    """Return the measured peaks of AmoebaNet-D(6, 32) on four processes, cut by mcap and by equal time."""
    made, sample, loss_fn = small(8)
    chain = profile_chain(made, sample, loss_fn=loss_fn, repeats=3)
    platform = Platform(num_devices=4, memory_bytes=2**40, bandwidth=1e12, weight_copies=COPIES)
    plans = [
        make_plan(chain, platform, algorithm, num_micro_batches=4, num_stages=4)
        for algorithm in ("mcap", "pipedream-blind")
    ]
    setup = Setup(
        factory=f"{HERE / 'amoebanet.py'}:small", micro_batch_size=8,
        config={"optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}},
    )  # fmt: skip
    runs = [Run(tuple(plan.boundaries), frozenset()) for plan in plans]
    peaks = train(setup, runs, [FIRST_STEP, (4, None)]).peaks
    return {
        plan.algorithm: {
            "boundaries": plan.boundaries, "planned_peak_bytes": list(plan.peak_memory_bytes),
            "measured_peak_bytes": [each[-1] for each in of_run],
        }
        for plan, of_run in zip(plans, peaks, strict=True)
    }  # fmt: skip


COPIES = 3
"""Of the weights: themselves, their gradient, the momentum of SGD."""
RESULT = HERE / "results/amoebanet_202611.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", type=int, default=224, help="of an image, in each direction")
    parser.add_argument("--samples", type=int, default=1, help="in a micro-batch; the paper has 8")
    arguments = parser.parse_args()
    print(f"{num_parameters(36, 544)} parameters, {len(layers(36, 544))} layers")
    found = balance(arguments.pixels, arguments.samples) | {"AmoebaNet-D(6, 32)": trained_small()}
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
