"""What the documents quote is what is said; the commands, options, names and links that they show exist."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import pytorch_lightning
import torch
from click.testing import CliRunner
from torch import nn

import deepspeed_partition
from deepspeed_partition import Chain, InfeasibleError, LayerProfile, Platform, make_plan
from deepspeed_partition.cli import cli
from deepspeed_partition.engine.pipeline.module import check_boundaries, check_same_model
from deepspeed_partition.options import Options
from deepspeed_partition.planner.cluster.scheme_choice import rank_schemes, strategy_of
from deepspeed_partition.planner.io.files import write_json
from deepspeed_partition.planner.machines import Machines
from deepspeed_partition.planner.solvers import interface
from lightning_madpipe.captured_layers import unknown_layers
from lightning_madpipe.finding.step_call import find_call
from lightning_madpipe.module import find_layers
from lightning_madpipe.settings import resolved_num_stages

ROOT = Path(__file__).parents[1]
PLANNER = (ROOT / "deepspeed_partition" / "planner" / "README.md").read_text()
ENGINE = (ROOT / "deepspeed_partition" / "engine" / "README.md").read_text()
LIGHTNING = (ROOT / "lightning_madpipe" / "README.md").read_text()
README = (ROOT / "README.md").read_text()
SAID = LIGHTNING + ENGINE
"""The documents with tables of what is said when something is wrong."""
FOLDERS = [ROOT / name for name in ("deepspeed_partition", "lightning_madpipe", "examples", "tests")]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in folder.rglob("*.md"))])


class Bare(pytorch_lightning.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
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


def no_call() -> None:
    try:
        find_call(Bare(), "training_step", None, nullcontext)
    except ValueError as error:
        raise unknown_layers(Bare(), error) from None


TOLD: dict[str, Callable[[], object]] = {
    "a step without a call": no_call,
    "num_stages=3": lambda: resolved_num_stages(3, 2),
    "a parameter that no layer has": lambda: find_layers(OutsideParameter()),
    "memori": lambda: Options.from_mapping({"memori": "16GB"}),
    "[0, 3, 7]": lambda: check_boundaries([0, 3, 7], 8, 2),
    "the plan of another model": another_model,
}


def test_every_row_is_checked() -> None:
    rows = re.findall(r"^\| ((?:Lightning|DeepSpeed), .*?) \| ", SAID, re.MULTILINE)
    assert len(rows) == len(TOLD)


@pytest.mark.parametrize("written", TOLD)
def test_what_is_wrong_is_told_in_these_words(written: str) -> None:
    with pytest.raises(ValueError) as told:
        TOLD[written]()
    [row] = [line for line in SAID.splitlines() if line.startswith("| ") and written in line.split(" | ")[0]]
    said, quoted = str(told.value), row.removesuffix(" |").partition(" | ")[2]
    beginning, abbreviated, _ = quoted.partition("...")
    assert said.startswith(beginning) if abbreviated else said == quoted


def test_commands_and_options_exist() -> None:
    shown = re.findall(r"(?:^\$ |`)madpipe (\w+)([^`\n]*)", README + PLANNER, re.MULTILINE)
    assert {"plan", "compare", "frontier", "convert", "profile", "check", "show"} <= {name for name, _ in shown}
    for name, arguments in shown:
        known = {option for each in cli.commands[name].params for option in each.opts}
        assert set(re.findall(r"--[\w-]+", arguments)) <= known, name


def test_every_option_of_a_run_has_a_row() -> None:
    table = ENGINE.partition("## Options")[2].partition("### ")[0]
    named = {
        name
        for cell in re.findall(r"^\| (`.*?) \| ", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    }
    assert named == {*(field.name for field in fields(Options)), "check_layers"}


def test_the_plan_in_the_picture_is_what_the_command_makes() -> None:
    [command] = re.findall(r"^\$ madpipe (plan examples/.*) -o plan.json$", README, re.MULTILINE)
    done = CliRunner().invoke(
        cli, [str(ROOT / each) if "/" in each and "GB" not in each else each for each in command.split()]
    )
    [promise] = re.findall(r"^madpipe: period .*$", README, re.MULTILINE)
    assert promise in done.output


def test_a_chain_by_hand_is_read_and_planned() -> None:
    [text] = re.findall(r"```json\n(\{\"format\": \"madpipe-chain.*?)```", PLANNER, re.DOTALL)
    chain = Chain.from_dict(json.loads(text))
    assert make_plan(chain, Platform(num_devices=2, memory_bytes=4e9, bandwidth=12e9)).proved


def test_the_machines_by_hand_are_read() -> None:
    [text] = re.findall(r"```json\n(\{\"format\": \"madpipe-machines.*?)```", PLANNER, re.DOTALL)
    assert Machines.from_dict(json.loads(text)).num_devices == 16


def test_a_strategy_is_a_deepspeed_configuration(tmp_path: Path) -> None:
    """``madpipe schemes -o`` writes one where data parallelism or ZeRO is best."""
    layer = LayerProfile(name="", forward_seconds=1, backward_seconds=2, weight_bytes=1, output_bytes=1000)
    chain = Chain(input_bytes=1000, layers=(layer,) * 4, micro_batch_size=2)
    platform = Platform(num_devices=4, memory_bytes=1e6, bandwidth=1e3)
    best = rank_schemes(chain, [platform], 8, time_limit_seconds=1).best
    assert best is not None
    path = tmp_path / "strategy.json"
    write_json(path, strategy_of(best, chain, 8))
    config = deepspeed.runtime.config.DeepSpeedConfig(str(path))
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (2, 2)
    assert config.zero_config.stage == 0
    lightning = json.loads(path.read_text())["madpipe"]["lightning"]
    assert lightning == {"strategy": "ddp", "devices": 4, "accumulate_grad_batches": 2}


def test_the_solver_that_contributors_are_shown_plans() -> None:
    [code] = re.findall(r"```python\n(@dataclass.*?)```", (ROOT / "tests" / "README.md").read_text(), re.DOTALL)
    names = {"dataclass": dataclass} | vars(interface)
    exec("from __future__ import annotations\n" + code, names)
    chain = Chain.load(ROOT / "examples/benchmarks/digits_cuts/results/digits_chain_202611.json")
    plan = make_plan(chain, Platform(num_devices=3, memory_bytes=2e9, bandwidth=1e9), names["Halves"]())
    assert plan.boundaries == [0, 4, 8, 12] and plan.algorithm == "halves"
    with pytest.raises(InfeasibleError):
        make_plan(chain, Platform(num_devices=3, memory_bytes=2e6, bandwidth=1e9), names["Halves"]())


# The glossary

TERMS = (
    "stage", "virtual stage", "boundary", "partition", "allocation", "micro-batch", "in flight", "fill",
    "steady state", "drain", "bubble", "period", "step", "activation", "stash", "peak memory", "1F1B", r"1F1B\*",
    "interleaved", "recompute", "special device",
)  # fmt: skip


def test_the_glossary_has_each_term_once_and_its_names_exist() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.*?) ?\|$", PLANNER.partition("## Glossary")[2], re.MULTILINE)
    terms = [row[0] for row in rows[1:]]
    assert set(TERMS) <= set(terms) and len(set(terms)) == len(terms)
    for term, _, name in rows[1:]:
        found: Any = deepspeed_partition
        for part in name.strip("`").split(".") if name else ():
            found = getattr(found, part, None)
            assert found is not None, f"{term}: {name}"


# Links


def anchors_of(document: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = (
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each) for each in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    )
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(document: Path) -> None:
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file), target


SOURCES = [*FOLDERS, Path(deepspeed.__file__).parent]
MODULES = [str(path) for folder in SOURCES for path in folder.rglob("*.py")]
PLACEHOLDERS = {"models.py", "my_solver.py", "test_my_solver.py", "script.py"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_that_are_named_exist(document: Path) -> None:
    """Those between backticks, of the project or of DeepSpeed; with their folder where that is written."""
    for name in set(re.findall(r"`((?:[\w-]+/)*[\w-]+\.py)\b", document.read_text())):
        if Path(name).name not in PLACEHOLDERS and not name.startswith("tests/unit/"):  # DeepSpeed's own tests
            assert any(module.endswith(f"/{name}") for module in MODULES), name
