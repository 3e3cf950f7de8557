"""The examples of the README run, and print what they say they print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def run(*command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("command", "plan"),
    [
        ([sys.executable, str(EXAMPLES / "train_lightning.py"), "--epochs", "2"], "device 1 |"),
        ([*TORCHRUN, str(EXAMPLES / "train_deepspeed.py"), "--steps", "6"], "per micro-batch, lower bound"),
    ],
    ids=["lightning", "deepspeed"],
)
def test_training_prints_plan_and_measurements(command, plan):
    output = run(*command)
    for expected in (
        plan,
        "planned against measured",
        "live tensor bytes of rank 1",
        "on DeepSpeed's default cut ('parameters')",
    ):
        assert expected in output


def test_a_hugging_face_model_is_fine_tuned():
    pytest.importorskip("transformers")
    output = run(sys.executable, str(EXAMPLES / "finetune_huggingface.py"), "--epochs", "1")
    assert "after 1 epochs" in output and "the plan (madpipe) cuts" in output


@pytest.mark.parametrize("factory", ["digits", "gpt"])
def test_factories_can_be_profiled_and_planned(tmp_path, factory):
    madpipe = [sys.executable, "-m", "deepspeed_partition"]
    chain, plan = str(tmp_path / "chain.json"), str(tmp_path / "plan.json")
    model = f"{EXAMPLES / 'factories.py'}:{factory}"
    run(*madpipe, "profile", model, "--micro-batch", "2", "-o", chain, "--threads", "1", "--repeats", "2")
    run(*madpipe, "plan", chain, "--devices", "2", "--memory", "1GB", "--bandwidth", "1GB/s", "-o", plan)
    assert "ok. Replayed" in run(*madpipe, "check", plan, chain)
