"""What the README quotes is what is said, and the commands that it shows exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning
import torch
from torch import nn

from deepspeed_partition import Chain, LayerProfile, Platform, make_plan
from deepspeed_partition.cli import cli
from deepspeed_partition.engine.pipeline.module import check_boundaries, check_same_model
from deepspeed_partition.options import Options
from lightning_madpipe.module import find_layers
from lightning_madpipe.strategy import PipelineStrategy

README = (Path(__file__).parents[1] / "README.md").read_text()


class Bare(pytorch_lightning.LightningModule):
    pass


class OutsideParameter(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def pipeline_layers(self) -> list[Any]:
        return [self.body]


def another_model() -> None:
    layers = [
        LayerProfile(
            name=f"{index}.Linear",
            forward_seconds=1.0,
            backward_seconds=2.0,
            weight_bytes=0,
            output_bytes=0,
            num_trainable_parameters=2464,
        )
        for index in range(8)
    ]
    chain = Chain(name="GPT", input_bytes=0, layers=tuple(layers))
    plan = make_plan(chain, Platform(num_devices=2, memory_bytes=1, bandwidth=1.0))
    check_same_model(plan, [1232] * 8)


TOLD: dict[str, Callable[[], object]] = {
    "a module without": lambda: find_layers(Bare()),
    "num_stages=3": lambda: PipelineStrategy._resolved_num_stages(
        SimpleNamespace(num_stages=3, world_size=2, _refusal=ValueError)  # type: ignore[arg-type]
    ),
    "a parameter that no layer has": lambda: find_layers(OutsideParameter()),
    "memori": lambda: Options.from_mapping({"memori": "16GB"}),
    "[0, 3, 7]": lambda: check_boundaries([0, 3, 7], 8, 2),
    "the plan of another model": another_model,
}


def test_every_row_is_checked() -> None:
    rows = re.findall(r"^\| ((?:Lightning|DeepSpeed), .*?) \| ", README, re.MULTILINE)
    assert len(rows) == len(TOLD)


@pytest.mark.parametrize("written", TOLD)
def test_what_is_wrong_is_told_in_these_words(written: str) -> None:
    with pytest.raises(ValueError) as told:
        TOLD[written]()
    [row] = [line for line in README.splitlines() if line.startswith("| ") and written in line.split(" | ")[0]]
    said, quoted = str(told.value), row.removesuffix(" |").partition(" | ")[2]
    beginning, abbreviated, _ = quoted.partition("...")
    assert said.startswith(beginning) if abbreviated else said == quoted


def test_commands_and_options_exist() -> None:
    shown = re.findall(r"(?:^\$ |`)madpipe (\w+)([^`\n]*)", README, re.MULTILINE)
    assert {"plan", "compare", "frontier", "convert", "profile", "check", "show"} <= {name for name, _ in shown}
    for name, arguments in shown:
        known = {option for each in cli.commands[name].params for option in each.opts}
        assert set(re.findall(r"--[\w-]+", arguments)) <= known, name
