"""What do overlapped transfers gain on real links between hosts, and how far off is the predicted step?

    python examples/benchmarks/real_links/main.py [--megabits 1000 100] [--megabytes 0.1 0.5 1 4]
        [--rounds 2] [--save]

Four hosts in network namespaces, links shaped to 1 Gbit/s and to 100 Mbit/s, a job of torchrun over all of them
(``hosts.py``; Linux, as root), then 4 MB over plain loopback. Layers sleep; activations and gradients really
travel, by gloo over TCP. DeepSpeed's engine and ours, at its depth and deep, take a step in turn at the same cut
(``even_stages.py``); steps are predicted by plans with the measured bandwidth and latency.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from hosts import NUM_HOSTS, run_on_hosts, why_not

from deepspeed_partition.planner.io.files import write_json

LOOPBACK_MEGABYTES = 4.0


def measure(megabits: float | None, megabytes: Sequence[float], rounds: int) -> dict[str, Any]:
    """Steps over links of so many megabits per second; over loopback for None.

    Raises:
        subprocess.CalledProcessError: the job failed.
    """
    with tempfile.TemporaryDirectory(prefix="madpipe-links-") as folder:
        output = Path(folder) / "measured.json"
        command = [str(HERE / "worker.py"), "--megabytes", *map(str, megabytes)]
        command += ["--rounds", str(rounds), "--output", str(output)]
        if megabits is None:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_HOSTS}"]
            subprocess.run([sys.executable, *torchrun, *command], check=True)
        else:
            run_on_hosts(command, megabits * 1e6)
        return {"megabits_per_second": megabits, **json.loads(output.read_text())}


def report(jobs: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"{NUM_HOSTS} hosts: seconds of a step, and measured over predicted")
    for name in ("link", "measured MB/s", "MB per activation", "2c / (tF + tB)", "DeepSpeed", "same depth", "deep",
                 "gain at same depth", "gain, deep"):  # fmt: skip
        table.add_column(name, justify="right")
    for job in jobs:
        rate = job["megabits_per_second"]
        link = "loopback" if rate is None else f"{rate:g} Mbit/s"
        for row in job["rows"]:
            engines = row["engines"]
            steps = [f"{each['seconds']:.2f} ({each['over_predicted']:.2f})" for each in engines.values()]
            gains = [f"{engines[name]['deepspeed_takes']:.2f}" for name in ("same depth", "deep")]
            bandwidth = f"{job['link']['bandwidth'] / 1e6:.0f}"
            table.add_row(link, bandwidth, f"{row['megabytes']:g}", f"{row['ratio']:.2f}", *steps, *gains)
    Console(width=140).print(table)
    for job in jobs:
        print(job["megabits_per_second"], job["link_takes"])


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=float, nargs="*", default=[1000.0, 100.0], help="per second, of links")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.1, 0.5, 1.0, 4.0], help="of activations")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write results/ beside this file")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    reason = why_not()
    if arguments.megabits and reason is not None:
        sys.exit(f"main.py: {reason}, or give --megabits alone for loopback")
    try:
        jobs = [measure(megabits, arguments.megabytes, arguments.rounds) for megabits in arguments.megabits]
        jobs.append(measure(None, [LOOPBACK_MEGABYTES], arguments.rounds))
    except subprocess.CalledProcessError as failure:
        sys.exit(f"main.py: the job has failed, see above (exit status {failure.returncode})")
    report(jobs)
    if arguments.save:
        path = HERE / "results" / f"{NUM_HOSTS}_hosts_{date.today():%Y%m}.json"
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"rounds": arguments.rounds, "jobs": jobs})
        print(f"saved {path.name}")


if __name__ == "__main__":
    main()
