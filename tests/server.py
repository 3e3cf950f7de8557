"""A process that has imported the libraries, and forks others: a start takes it a hundredth of the usual time.

All workers of a run share one server, which the first one starts. It ends when all of them have; what is left of
the processes of a worker that has ended is killed. ``ranks.py`` is what tests start processes with.

A process that is forked here ends as any other program does: its script is the last thing that this file runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ADDRESS = "MADPIPE_TEST_SERVER"
"""The environment variable with the path of the server's socket."""
ON_THE_CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
LIBRARIES = [
    "torch", "torch._dynamo", "numpy", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer",
    "pytorch_lightning", "lightning.pytorch", "setuptools", "jsonschema", "pulp", "deepspeed_partition.profiling",
    "deepspeed_partition.capture", "deepspeed_partition.schedule.lowering",
]  # fmt: skip
"""Of ours what does nothing but define: the engine and the strategy prepare a process where they are imported.
What is not installed is left out."""
START_SECONDS = 300
"""In which the libraries are imported, also where many do so."""


def collect_seldom() -> None:
    """Let Python look for garbage a hundred times less often: engines and their tests make much of it."""
    gc.set_threshold(70_000, 20, 20)


def enter(environment: Mapping[str, str], log: Path) -> None:
    """Be a process of its own: with its environment, in the folder of its log, where all that it prints goes."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(log.parent)
    os.environ.clear()
    os.environ.update(environment)
    collect_seldom()
    _use_one_device_of_gloo()
    random.seed()  # ranks that must draw the same numbers have to see to it
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


@contextlib.contextmanager
def _threads_that_interrupt_nobody() -> Iterator[None]:
    """Threads that are made meanwhile wait for their turn, where the system knows such a policy.

    A message wakes gloo's thread, often before the sender has let go of the connection's lock: that thread then
    tries again and again until the sender is given its core back, a tenth of the time where cores are few.
    """
    policy = getattr(os, "SCHED_BATCH", None)
    if policy is None:
        yield
        return
    before = os.sched_getscheduler(0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))
    yield
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, before, os.sched_param(0))


def _use_one_device_of_gloo() -> None:
    """Let all process groups of this process have one thread that waits for messages, where torch allows it.

    Each group of gloo has one of its own, that wakes up a hundred times a second: a fifth of the time of tests
    that make many engines.
    """
    if (torch := sys.modules.get("torch")) is None:
        return
    group = torch.distributed.distributed_c10d.ProcessGroupGloo
    make, devices = group.__init__, {}
    if make.__name__ == "share" or not hasattr(group._Options(), "_devices"):
        return

    def share(self, store, rank, size, timeout):
        if (process := os.getpid()) not in devices:
            with _threads_that_interrupt_nobody():
                devices[process] = group.create_default_device()
        options = group._Options()
        options._devices, options._timeout = [devices[process]], timeout
        make(self, store, rank, size, options)

    group.__init__ = share


class Process:
    """A process that the server has forked, to run a script."""

    def __init__(self, script: Path, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.touch()
        self._server = _connection()
        request = {"script": str(script), "arguments": list(arguments), "environment": dict(environment)}
        self._server.sendall(json.dumps({**request, "log": str(log)}).encode() + b"\n")
        self._answers = self._server.makefile("r")
        told = self._answers.readline()
        assert told, f"the server of processes has ended:\n{Path(os.environ[ADDRESS] + '.log').read_text()}"
        self.pid = int(told)
        self.exitcode: int | None = None
        """Negative where a signal has ended it; None while it runs."""

    def fileno(self) -> int:
        """For ``select``: readable when it has ended."""
        return self._server.fileno()

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit status; None where the time is up before."""
        if self.exitcode is None and select.select([self], [], [], timeout)[0]:
            self.exitcode = int(self._answers.readline())
            self._answers.close()
            self._server.close()
        return self.exitcode

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self.wait(0)

    def kill(self) -> None:
        """End it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        """Send it, unless the process has ended."""
        if self.wait(0) is None:
            os.kill(self.pid, number)


_held: list[socket.socket] = []
"""The connection that this process keeps, so that the server does not end."""


def _connection() -> socket.socket:
    if not _held:
        _held.append(_reach_server())
    return _connected(os.environ[ADDRESS])


def _connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return connection


def _reach_server() -> socket.socket:
    address = os.environ[ADDRESS]
    with open(f"{address}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other workers wait here, and find it
        with contextlib.suppress(OSError):
            return _connected(address)
        with open(f"{address}.log", "w") as log:
            command = [sys.executable, "-m", "tests.server", address]
            server = subprocess.Popen(
                command, env={**os.environ, **ON_THE_CPU}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=Path(__file__).parents[1], start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and server.poll() is None:
            with contextlib.suppress(OSError):
                return _connected(address)
            time.sleep(0.05)
    raise RuntimeError(f"the server of processes does not start:\n{Path(f'{address}.log').read_text()}")


class Server:
    """Forks what its clients ask for; a client is told of the process, and how it has ended."""

    def __init__(self, address: str) -> None:
        self._address = Path(address)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(address)
        self._listening.listen(64)
        self._asking: list[socket.socket] = []
        self._running: dict[int, socket.socket] = {}

    def next_request(self) -> dict | None:
        """What a process that has been forked has to do; None in the server, when all clients have gone."""
        while True:
            everybody = [*self._asking, *self._running.values()]
            ready, _, _ = select.select([self._listening, *everybody], [], [], 0.02 if self._running else None)
            for connection in ready:
                if connection is self._listening:
                    self._asking.append(self._listening.accept()[0])
                elif request := connection.makefile("r").readline():
                    self._asking.remove(connection)
                    if (process := os.fork()) == 0:
                        self._let_go()
                        connection.close()
                        return json.loads(request)
                    self._running[process] = connection
                    connection.sendall(f"{process}\n".encode())
                else:
                    self._lose(connection)
            self._tell_who_has_ended()
            if not self._asking and not self._running:
                self._address.unlink(missing_ok=True)
                return None

    def _let_go(self) -> None:
        for connection in (self._listening, *self._asking, *self._running.values()):
            connection.close()

    def _lose(self, client: socket.socket) -> None:
        if client in self._asking:
            self._asking.remove(client)
        for process, connection in list(self._running.items()):
            if connection is client:
                del self._running[process]
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        client.close()

    def _tell_who_has_ended(self) -> None:
        for process, connection in list(self._running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                del self._running[process]
                with contextlib.suppress(OSError):
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                connection.close()


def import_libraries() -> None:
    """Import what takes long, and leave all of it alone in collections of garbage."""
    gc.disable()
    for library in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    seed_no_absent_devices()
    gc.freeze()
    gc.enable()


def seed_no_absent_devices() -> None:
    """Spare each ``torch.manual_seed`` three tracebacks: torch formats and keeps one for each absent device.

    DeepSpeed seeds before each layer. These were a quarter of what a job of checkpoints computed.
    """
    torch = sys.modules.get("torch")
    for device in (torch.cuda, torch.xpu, torch.mtia) if torch else ():
        device.manual_seed_all = _nothing_to_seed


def _nothing_to_seed(_: int) -> None:
    pass


def main() -> None:
    server = Server(sys.argv[1])
    import_libraries()
    if sys.dont_write_bytecode:  # then each process would compile all of ours
        sys.dont_write_bytecode, sys.pycache_prefix = False, f"{sys.argv[1]}.pycache"
    request = server.next_request()
    if request is not None:
        enter(request["environment"], Path(request["log"]))
        sys.argv = [request["script"], *request["arguments"]]
        runpy.run_path(request["script"], run_name="__main__")


if __name__ == "__main__":
    main()
