"""The engine on two GPUs, over NCCL and over gloo. Skips without them.

``MADPIPE_GPU_TESTS=cpu`` runs the cases on a CPU, to try them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.engine.engine_cuda_multiproc import CASES  # noqa: E402

SCRIPT = Path(__file__).with_name("engine_cuda_multiproc.py")
ON_A_CPU = os.environ.get("MADPIPE_GPU_TESTS") == "cpu"

pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() or ON_A_CPU), reason="needs a GPU")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder in which each case of a backend left a file, and what the ranks printed."""
    known = {}

    def run(backend):
        if backend not in known:
            folder = tmp_path_factory.mktemp(backend)
            environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
            if ON_A_CPU:
                environment["DS_ACCELERATOR"] = "cpu"
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
            command = [*start, str(SCRIPT), str(folder), backend]
            try:
                ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
                output = ended.stdout + ended.stderr
            except subprocess.TimeoutExpired as error:
                output = f"no end within {error.timeout} s"
            known[backend] = folder, output
        return known[backend]

    return run


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["gloo"] if ON_A_CPU else ["nccl", "gloo"])
def test_case(folder_of, backend, case):
    if not ON_A_CPU and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: the ranks of a machine take one each")
    folder, output = folder_of(backend)
    assert (folder / case).exists(), output[-5000:]
