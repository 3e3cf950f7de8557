"""What ``madpipe schemes -o`` writes trains: plans, and configurations of DDP and ZeRO, with the same losses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("pytorch_lightning")

import pytorch_lightning as pl
import torch
from torch import nn

from deepspeed_partition import Platform
from deepspeed_partition.cli import run
from deepspeed_partition.planner.cluster.scheme_choice import SchemeRanking, rank_schemes, strategy_of
from tests.ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_scheme.py"
MICRO_BATCHES, STEPS = 4, 3
NAMES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "DDP, recomputing", "MadPipe 1 x 2")


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_scheme", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ranking(example: Any) -> SchemeRanking:
    platform = Platform(num_devices=2, memory_bytes=10**9, bandwidth=1e9, weight_copies=4)
    return rank_schemes(example.chain_of(), [platform], MICRO_BATCHES, time_limit_seconds=2)


def written(ranking: SchemeRanking, folder: Path) -> list[str]:
    """Write a file for each of the schemes, as the command writes the best one."""
    choices = {choice.scheme: choice for choice in ranking.choices}
    for number, name in enumerate(NAMES):
        choice, path = choices[name], folder / f"{number}.json"
        if choice.plan is not None:
            choice.plan.save(path)
        else:
            path.write_text(json.dumps(strategy_of(choice, ranking.chain, MICRO_BATCHES)))
    return [str(folder / f"{number}.json") for number in range(len(NAMES))]


def alone(example: Any) -> list[float]:
    model = nn.Sequential(*example.layers())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = example.Batches(MICRO_BATCHES, STEPS).micro_batches(0, 1)
    losses = []
    for _ in range(STEPS):
        parts = [nn.functional.cross_entropy(model(x), y) for x, y in (next(data) for _ in range(MICRO_BATCHES))]
        loss = sum(parts) / MICRO_BATCHES
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def losses_in(log: Path, files: list[str]) -> list[list[float]]:
    lines = [line for line in log.read_text().splitlines() if ".json: losses " in line]
    assert len(lines) == len(files), log.read_text()[-3000:]
    return [[float(each) for each in line.partition("losses ")[2].split()] for line in lines]


def test_every_file_trains(tmp_path: Path, example: Any, ranking: SchemeRanking) -> None:
    """Under DeepSpeed all of them, under Lightning those that run on CPUs."""
    expected = alone(example)
    files = written(ranking, tmp_path)
    for host, some in (("deepspeed", files), ("lightning", [files[0], files[4], files[5]])):
        log = tmp_path / f"{host}.log"
        assert run_ranks(EXAMPLE, [*some, "--host", host], 2, log, timeout_seconds=200) == 0, log.read_text()[
            -5000:
        ]
        for path, losses in zip(some, losses_in(log, some), strict=True):
            assert losses == pytest.approx(expected, rel=1e-5), (host, path)


def test_names_of_lightning_exist(example: Any, ranking: SchemeRanking) -> None:
    known = {*pl.strategies.StrategyRegistry, "auto"}
    for choice in ranking.choices:
        if choice.sharded is not None:
            assert strategy_of(choice, ranking.chain, MICRO_BATCHES)["madpipe"]["lightning"]["strategy"] in known


def test_the_command_writes_such_a_file(tmp_path: Path, example: Any, ranking: SchemeRanking) -> None:
    chain, out = tmp_path / "chain.json", tmp_path / "scheme.json"
    example.chain_of().save(chain)
    how = ["--devices", "2", "--memory", "1GB", "--bandwidth", "1GB/s", "--weight-copies", "4"]
    assert run(["schemes", str(chain), *how, "--micro-batches", "4", "--time-limit", "2", "-o", str(out)]) == 0
    best = ranking.best
    assert best is not None and best.sharded is not None
    assert json.loads(out.read_text()) == json.loads(json.dumps(strategy_of(best, ranking.chain, MICRO_BATCHES)))
