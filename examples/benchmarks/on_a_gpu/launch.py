"""Start ranks that share the GPUs of this machine, each as if it were alone on a host of its own.

    python examples/benchmarks/on_a_gpu/launch.py NUM_RANKS BACKEND SCRIPT [ARGUMENTS]

NCCL refuses two ranks on one GPU, unless each says that it has another host (``NCCL_HOSTID``). Then messages go
through sockets: slow, but kernels, streams and communicators are the real ones, with their rules. BACKEND is
``nccl``, ``gloo`` (through pinned memory of the host), or ``cpu``, to try the scripts without a GPU.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
GRACE_SECONDS = 30.0
"""How long the other ranks may go on when one has failed."""
SETTINGS = {
    "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "2",
    "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0",
    "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
}  # fmt: skip


def started(rank: int, num_ranks: int, backend: str, port: int, command: list[str]) -> subprocess.Popen[bytes]:
    own = {"RANK": str(rank), "NODE_RANK": str(rank), "GROUP_RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"}
    device = "cpu" if backend == "cpu" else "cuda"
    of_job = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_PORT": str(port),
        "BACKEND": backend,
        "DS_ACCELERATOR": device,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    return subprocess.Popen([sys.executable, *command], env={**os.environ, **SETTINGS, **own, **of_job})


def main() -> int:
    if len(sys.argv) < 4:
        print(__doc__)
        return 2
    num_ranks, backend, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [started(rank, num_ranks, backend, port, command) for rank in range(num_ranks)]
    until: float | None = None
    while any(rank.poll() is None for rank in ranks):
        if until is None and any(rank.poll() not in (None, 0) for rank in ranks):
            until = time.monotonic() + GRACE_SECONDS
        if until is not None and time.monotonic() > until:
            for rank in ranks:
                rank.kill()
        time.sleep(0.2)
    return next((rank.returncode for rank in ranks if rank.returncode), 0)


if __name__ == "__main__":
    sys.exit(main())
