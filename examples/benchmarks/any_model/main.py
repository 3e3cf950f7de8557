"""Capture models as they are, cut them into stages, and compare what they learn with one process.

Each stage sees what the stage before it sends, and gets the gradients of that back, as in a pipeline; the stages
run one after the other in this process, so that dropout draws the same numbers.

    python examples/benchmarks/any_model/main.py [MODEL ...] [--out results/any_model.json]
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from models import Made, models
from torch import nn

from deepspeed_partition.capture import CaptureError, Layers, layers_as_they_are
from deepspeed_partition.capture.structure import flatten

STEPS = 3
STAGES = (2, 4)


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def loss_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The model's own loss, a number, where there is one; else the squares of all outputs less 1."""
    numbers = [tensor for tensor in tensors if tensor.dim() == 0 and tensor.requires_grad]
    if numbers:
        return numbers[0]
    return torch.stack([(tensor.float() - 1).pow(2).mean() for tensor in tensors if tensor.requires_grad]).sum()


def stages_of(layers: Layers, num_stages: int) -> list[list[nn.Module]]:
    weights = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    ends, total = [0], sum(weights)
    for stage in range(1, num_stages):
        behind = next(
            place for place in range(len(weights) + 1) if sum(weights[:place]) * num_stages >= total * stage
        )
        ends.append(min(max(behind, ends[-1] + 1), len(layers) - num_stages + stage))
    ends.append(len(layers))
    return [layers[start:stop] for start, stop in pairwise(ends)]


def run_stages(stages: list[list[nn.Module]], inputs: tuple[torch.Tensor, ...]) -> float:
    """The loss of a micro-batch, whose gradients are then in the weights."""
    passed: Any = inputs if len(inputs) > 1 else inputs[0]
    boundaries = []
    for number, stage in enumerate(stages):
        if number:
            received = [
                tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors_in(passed)
            ]
            boundaries.append((tensors_in(passed), received))
            passed = (
                tuple(tensor.view_as(tensor) for tensor in received) if isinstance(passed, tuple) else received[0]
            )
        for layer in stage:
            passed = layer(passed)
    loss = loss_of(tensors_in(passed))
    loss.backward()
    for sent, received in reversed(boundaries):
        both = [
            (tensor, arrived.grad)
            for tensor, arrived in zip(sent, received, strict=True)
            if tensor.requires_grad and arrived.grad is not None
        ]
        torch.autograd.backward([tensor for tensor, _ in both], [gradient for _, gradient in both])
    return float(loss)


def trained(model: nn.Module, run: Callable[[], float]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of some steps, and the gradients of the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        losses.append(run())
        if step < STEPS - 1:
            optimizer.step()
    return losses, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def compared(make: Callable[[bool], Made], with_dropout: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, arguments = make(with_dropout)
    state = copy.deepcopy(model.state_dict())

    def whole() -> float:
        loss = loss_of(tensors_in(model(**arguments)))
        loss.backward()
        return float(loss)

    expected, gradients = trained(model, whole)
    gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    model.load_state_dict(state)
    began = time.perf_counter()
    layers = layers_as_they_are(model, (), arguments)
    seconds = time.perf_counter() - began
    found: dict[str, Any] = {
        "layers": len(layers), "capture_seconds": round(seconds, 2),
        "largest_boundary_bytes": max(layers.boundary_bytes, default=None),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "how": "graph" if layers.boundary_bytes else "elements in order",
    }  # fmt: skip
    inputs = layers.captured.inputs_of(**arguments)
    for num_stages in STAGES:
        model.load_state_dict(state)
        stages = stages_of(layers, min(num_stages, len(layers)))
        losses, own = trained(model, lambda stages=stages: run_stages(stages, inputs))
        assert own.keys() == gradients.keys()
        worst = max(
            float((own[name] - gradient).norm() / max(float(gradient.norm()), 1e-6))
            for name, gradient in gradients.items()
        )
        losses_differ = max(abs(one - other) / abs(other) for one, other in zip(losses, expected, strict=True))
        found[f"{num_stages}_stages"] = {"losses_differ": losses_differ, "gradients_differ": worst}
    return found


def measured(name: str, make: Callable[[bool], Made]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "lines_edited": 0}
    for with_dropout in (True, False):
        try:
            found = compared(make, with_dropout)
        except (CaptureError, ImportError) as error:
            return {**row, "refused": str(error)}
        row |= {key: value for key, value in found.items() if not key.endswith("_stages")}
        row["with_dropout" if with_dropout else "without_dropout"] = {
            key: value for key, value in found.items() if key.endswith("_stages")
        }
    return row


def line_of(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"| {row['model']} | refused: {row['refused']} |"
    differences = [
        max(each["losses_differ"] for each in row[kind].values()) for kind in ("with_dropout", "without_dropout")
    ]
    gradients = max(
        each["gradients_differ"] for kind in ("with_dropout", "without_dropout") for each in row[kind].values()
    )
    largest = row["largest_boundary_bytes"]
    boundary = "" if largest is None else f"{largest / 1000:.0f}"
    return (
        f"| {row['model']} | {row['how']} | {row['layers']} | {boundary} | {row['capture_seconds']:.1f} "
        f"| {differences[0]:.0e} | {differences[1]:.0e} | {gradients:.0e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print("| model | how | layers | largest boundary, kB | capture, s | losses, dropout | losses | gradients |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for name, make in models():
        if not arguments.models or name in arguments.models:
            rows.append(measured(name, make))
            print(line_of(rows[-1]), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
