"""The strategy on CUDA devices: fit, validate and test, in 32 bits, bf16 and fp16. Skips without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.lightning import lightning_cases as cases
from tests.lightning.cuda_multiproc import run

SCRIPT = Path(__file__).parent / "cuda_multiproc.py"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_gpus_train_like_one_process_on_a_cpu(num_devices: int, precision: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < num_devices:
        pytest.skip(f"needs {num_devices} GPUs")
    check(num_devices, precision, tmp_path)


def check(num_devices: int, precision: str, folder: Path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_devices}"]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    command = [*start, str(SCRIPT), precision, str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, *others = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_devices)]
    assert all(record == first for record in others)
    loaded = cases.Classifier.load_from_checkpoint(folder / "weights.ckpt", map_location="cpu").eval()
    x, y = cases.samples(37, seed=5).tensors
    with torch.no_grad():
        loss = float(torch.nn.functional.cross_entropy(loaded.float()(x), y))
    tolerance = 1e-3 if precision == "32-true" else 5e-2
    assert loss == pytest.approx(first["tested"], rel=tolerance)
    (folder / "reference").mkdir()
    for name, expected in run(folder / "reference", accelerator="cpu", devices=1).items():
        assert first[name] == pytest.approx(expected, rel=tolerance, abs=tolerance), name
