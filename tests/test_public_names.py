"""The names that users rely on, and the direction of imports."""

from __future__ import annotations

import ast
from pathlib import Path

import deepspeed_partition

ROOT = Path(deepspeed_partition.__file__).parent


def test_public_names():
    assert sorted(deepspeed_partition.__all__) == [
        "Allocation", "Chain", "ChainFormatError", "InfeasibleError", "LayerProfile", "MadPipeError", "Plan",
        "PlanFormatError", "PlanMismatchError", "Platform", "Replay", "Stage", "install", "make_plan", "replay",
    ]  # fmt: skip
    for name in deepspeed_partition.__all__:
        assert hasattr(deepspeed_partition, name)


def test_public_names_of_the_hosts():
    import deepspeed_partition.engine
    import deepspeed_partition.profiling
    import lightning_madpipe

    engine = ["MadPipeEngine", "PipelineModule", "TiedModule", "initialize", "install", "prepare_cpu"]
    assert sorted(deepspeed_partition.engine.__all__) == engine
    assert sorted(lightning_madpipe.__all__) == ["MadPipeStrategy", "TiedModule", "consolidate", "strategy_class"]
    for package in (deepspeed_partition.engine, deepspeed_partition.profiling, lightning_madpipe):
        for name in package.__all__:
            assert hasattr(package, name)


def imported_by(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_imports_point_down():
    """lightning -> engine, profiling -> planner; the planner knows neither torch nor a host."""
    hosts = ("pytorch_lightning", "lightning", "lightning_madpipe")
    forbidden = {
        "planner": (*hosts, "torch", "deepspeed", "deepspeed_partition.engine", "deepspeed_partition.profiling"),
        "profiling": (*hosts, "deepspeed_partition.engine"),
        "engine": hosts,
    }
    for folder, names in forbidden.items():
        files = list((ROOT / folder).rglob("*.py"))
        assert files
        for file in files:
            for module in imported_by(file):
                assert not (module + ".").startswith(tuple(f"{name}." for name in names)), f"{file}: {module}"
