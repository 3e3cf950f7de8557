"""Several hosts on one machine: network namespaces behind a switch, each with a link of a chosen rate.

    python examples/benchmarks/real_links/hosts.py --bits-per-second 1e9 -- COMMAND ...

runs COMMAND as a job of torchrun, with one process on each host (Linux, as root; ``ip`` and ``tc``).

A token bucket shapes what leaves a host and what comes to it, so the link of a host carries its rate in each
direction, whoever the other ends are. Switch, hosts and processes live in namespaces (network, mount, process) of
the job alone, which the kernel takes down with the one who started it, even if that is killed: there is nothing to
clean up, before or after, and the machine's own network is never touched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

NUM_HOSTS = 4
ADDRESS, PORT = "10.0.0.{}", 29500
BUCKET_SECONDS, SMALLEST_BUCKET_BYTES = 0.6e-3, 15_000
"""What may pass at once after a pause: enough for the kernel's timers, and ten frames at the least. At 1 Gbit/s it
is more than the 64 KiB that the kernel handles as one: else it cuts each into frames, which takes both cores."""
QUEUE_MILLISECONDS = 50
INSIDE = "--inside"


def why_not() -> str | None:
    """What this machine lacks, in a sentence."""
    missing = [name for name in ("setpriv", "unshare", "ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed: hosts are made with the programs of util-linux and iproute2"
    if os.geteuid() != 0:
        return "only root can make hosts with links of their own (network namespaces): run this as root"
    return None


def run_on_hosts(command: Sequence[str], bits_per_second: float, num_hosts: int = NUM_HOSTS) -> None:
    """Run ``command`` (of Python) under torchrun, one process on each host.

    Raises:
        subprocess.CalledProcessError: it failed on some host; the others have been ended.
    """
    arguments = ["--bits-per-second", repr(bits_per_second), "--hosts", str(num_hosts), INSIDE, "--", *command]
    # Whoever starts the job, the one that makes its namespaces and the first process in them: one kills the next.
    namespaces = ["unshare", "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
    dying = ["setpriv", "--pdeathsig", "KILL"]
    subprocess.run([*dying, *namespaces, sys.executable, __file__, *arguments], check=True)


def _make_hosts(num_hosts: int, bits_per_second: float) -> None:
    _run(
        "mount", "-t", "tmpfs", "hosts", "/run"
    )  # names of namespaces are files there: these are for this job alone
    _run("ip", "link", "add", "switch", "type", "bridge")
    _run("ip", "link", "set", "switch", "up")
    bucket = max(round(bits_per_second / 8 * BUCKET_SECONDS), SMALLEST_BUCKET_BYTES)
    shape = [
        "root",
        "tbf",
        "rate",
        f"{bits_per_second:.0f}bit",
        "burst",
        str(bucket),
        "latency",
        f"{QUEUE_MILLISECONDS}ms",
    ]
    for number in range(num_hosts):
        host, port = f"host{number}", f"port{number}"
        _run("ip", "netns", "add", host)
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
        _run("ip", "link", "set", port, "master", "switch", "up")
        _run("ip", "-n", host, "address", "add", f"{ADDRESS.format(number + 1)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", host, "link", "set", device, "up")
        _run("tc", "-n", host, "qdisc", "add", "dev", "eth0", *shape)
        _run("tc", "qdisc", "add", "dev", port, *shape)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _start(number: int, num_hosts: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_hosts}", f"--node-rank={number}",
        "--nproc-per-node=1", f"--master-addr={ADDRESS.format(1)}", f"--master-port={PORT}",
    ]  # fmt: skip
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(["ip", "netns", "exec", f"host{number}", *torchrun, *command], env=environment)


def _run_inside(num_hosts: int, bits_per_second: float, command: Sequence[str]) -> int:
    """The exit status of the job. What still runs ends with this process, the first of its namespace."""
    _make_hosts(num_hosts, bits_per_second)
    running = [_start(number, num_hosts, command) for number in range(num_hosts)]
    while running:
        for process in running:
            if process.poll():
                return 1
        running = [process for process in running if process.poll() is None]
        time.sleep(0.1)
    return 0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits-per-second", type=float, default=1e9)
    parser.add_argument("--hosts", type=int, default=NUM_HOSTS)
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="+", help="a script and its arguments")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    if arguments.inside:
        sys.exit(_run_inside(arguments.hosts, arguments.bits_per_second, arguments.command))
    reason = why_not()
    if reason is not None:
        sys.exit(f"hosts.py: {reason}")
    try:
        run_on_hosts(arguments.command, arguments.bits_per_second, arguments.hosts)
    except subprocess.CalledProcessError as failure:
        sys.exit(failure.returncode)


if __name__ == "__main__":
    main()
