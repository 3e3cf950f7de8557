"""A process that is killed ends the others soon, they say why, and the next run goes on from a checkpoint."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.deaths import check_ends
from tests.engine.killed_multiproc import DEATHS, MOVES_AT, NUM_STEPS, PLANNED
from tests.engine.running import same
from tests.server import Process

WORKER = Path(__file__).with_name("endless_multiproc.py")
NUM_PROCESSES = 3


def environment(**more):
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **more}


def by_torchrun(folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(NUM_PROCESSES), str(WORKER), str(folder)]
    with (folder / "log").open("w") as log:
        return [subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT)]


def by_hand(folder, port):
    """Each process on its own, as a scheduler without torchrun starts them."""
    started = []
    for rank in range(NUM_PROCESSES):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_PROCESSES, "MASTER_PORT": port}
        own = {key: str(value) for key, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"}
        started.append(Process(WORKER, [str(folder)], environment(**own), folder / f"log{rank}"))
    return started


def training_pids(folder, started):
    """The process of each rank, once all of them train."""
    deadline = time.monotonic() + 120
    files = [folder / f"rank{rank}" for rank in range(NUM_PROCESSES)]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline and started[0].poll() is None, logs(folder)
        time.sleep(0.2)
    return [int(file.read_text()) for file in files]


def logs(folder):
    return "\n".join(path.read_text() for path in sorted(folder.glob("log*")))


@pytest.fixture
def ended():
    """Ends what a test started and left behind."""
    started = []
    yield started
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


def test_torchrun_ends_the_job(tmp_path, ended):
    ended += by_torchrun(tmp_path)
    os.kill(training_pids(tmp_path, ended)[1], signal.SIGKILL)
    assert ended[0].wait(60) != 0
    assert "SIGKILL" in logs(tmp_path)


def test_the_others_end_by_themselves(tmp_path, ended):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ended += by_hand(tmp_path, port)
    os.kill(training_pids(tmp_path, ended)[1], signal.SIGKILL)
    deadline = time.monotonic() + 60
    for process in ended:
        assert process.wait(max(1, deadline - time.monotonic())) not in (0, None)
    for rank in (0, 2):
        text = (tmp_path / f"log{rank}").read_text()
        assert re.search("Connection (closed|reset) by peer", text), text[-2000:]


@pytest.fixture(scope="module")
def outcomes(outcomes_of):
    return outcomes_of("killed_multiproc.py", timeout_seconds=1800)


@pytest.mark.parametrize("name", DEATHS)
def test_the_next_run_goes_on_from_the_last_complete_checkpoint(outcomes, name):
    death, (killed, resumed, after) = DEATHS[name], outcomes[name]
    check_ends(death, killed, resumed, after)
    assert list(after["losses"]) == [str(step) for step in range(death.resumes_at, NUM_STEPS)]
    if death.modes is not None:
        assert after["mode"] == death.modes[1]
        same(list(after["losses"].values()), after["expected"][death.resumes_at :])
        return
    same(list(after["losses"].values()), outcomes["expected"][death.resumes_at :])
    # A plan comes with the checkpoint to as many ranks; else the warm-up goes on, or the plan is made at once.
    saved_with_plan = death.warms_up and death.resumes_at > MOVES_AT
    assert after["had_plan"] == (saved_with_plan and death.num_processes == 2)
    assert after["has_plan"] == death.warms_up
    if death.warms_up:
        assert after["cut"] == PLANNED[death.num_processes]
