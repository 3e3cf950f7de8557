"""Every file that the project writes follows its schema, and the schemas are valid themselves."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from deepspeed_partition import Chain, InfeasibleError, Plan, Platform, cli, make_plan
from deepspeed_partition.planner.io.files import SCHEMAS
from deepspeed_partition.planner.report.comparison import COMPARED
from tests.planner.instances import random_instance
from tests.planner.test_graphs import GRAPH

RESULTS = Path(__file__).parent.parent / "examples" / "benchmarks"


def schema(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{kind}.schema.json").read_text()))


CHAIN, PLAN = schema("chain"), schema("plan")


def written(path: Path) -> dict:
    return json.loads(path.read_text())


def test_the_schemas_follow_theirs():
    files = sorted(SCHEMAS.glob("*.schema.json"))
    kinds = "chain", "machines", "plan", "timeline"
    assert [file.name for file in files] == [f"{kind}.schema.json" for kind in kinds]
    for file in files:
        jsonschema.Draft202012Validator.check_schema(json.loads(file.read_text()))


@pytest.mark.parametrize("num_micro_batches", [None, 5])
@pytest.mark.parametrize("algorithm", [*COMPARED, "type:layer", "whole"])
def test_plans_and_chains(tmp_path, algorithm, num_micro_batches):
    made = 0
    for seed in range(12):
        chain, platform = random_instance(seed)
        chain.save(tmp_path / "chain.json")
        CHAIN.validate(written(tmp_path / "chain.json"))
        name = f"0,{chain.num_layers}" if algorithm == "whole" else algorithm
        try:
            plan = make_plan(chain, platform, name, num_micro_batches=num_micro_batches)
        except InfeasibleError:
            continue
        plan.save(tmp_path / "plan.json")
        PLAN.validate(written(tmp_path / "plan.json"))
        assert Plan.load(tmp_path / "plan.json") == plan
        made += 1
    assert made


def test_converted_graphs(tmp_path):
    (tmp_path / "small.graph.txt").write_text(GRAPH)
    out = tmp_path / "chain.json"
    assert cli.run(["convert", str(tmp_path / "small.graph.txt"), "-o", str(out)]) == 0
    CHAIN.validate(written(out))


def test_profiles(tmp_path):
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\n"
        "def small(micro_batch_size):\n"
        "    print('what a factory prints is no JSON')\n"
        "    return [torch.nn.Linear(4, 3), torch.nn.ReLU()], torch.zeros(micro_batch_size, 4)\n"
    )
    out = tmp_path / "chain.json"
    profile = ["profile", f"{model}:small", "--micro-batch", "2", "--device", "cpu", "--repeats", "1"]
    assert cli.run([*profile, "-o", str(out)]) == 0
    CHAIN.validate(written(out))
    assert Chain.load(out).micro_batch_size == 2


def test_a_profile_as_json_is_nothing_else(tmp_path, capsys):
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\n"
        "def small(micro_batch_size):\n"
        "    print('what a factory prints is no JSON')\n"
        "    return [torch.nn.Linear(4, 3)], torch.zeros(micro_batch_size, 4)\n"
    )
    profile = ["profile", f"{model}:small", "--micro-batch", "2", "--device", "cpu", "--repeats", "1", "--json"]
    assert cli.run(profile) == 0
    captured = capsys.readouterr()
    CHAIN.validate(json.loads(captured.out))
    assert "no JSON" in captured.err


def test_the_cut_in_a_checkpoint(tmp_path):
    from deepspeed_partition.engine.checkpoint.saved_cut import FILE_NAME, read_cut, save_cut

    chain, platform = random_instance(1)
    plan = make_plan(chain, Platform(num_devices=2, memory_bytes=10**6, bandwidth=platform.bandwidth))
    save_cut(tmp_path, plan.boundaries, plan)
    PLAN.validate(written(tmp_path / FILE_NAME))
    saved = read_cut(tmp_path)
    assert saved is not None and saved.plan == plan


def test_committed_results():
    """Whatever says that it is a chain or a plan."""
    formats = {"madpipe-chain/1": CHAIN, "madpipe-plan/1": PLAN}
    found = 0
    for path in sorted(RESULTS.rglob("results/*.json")):
        for document in _documents(written(path)):
            formats[document["format"]].validate(document)
            found += 1
    assert found


def _documents(value):
    if isinstance(value, dict) and "format" in value:
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _documents(inner)
