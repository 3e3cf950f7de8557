"""Is the scheme that is predicted to be fastest really the fastest, and how far off are the predicted times?

    python examples/benchmarks/schemes_measured/main.py [--cases "light weights"] [--save]
    python examples/benchmarks/schemes_measured/main.py --report

Four hosts in network namespaces with shaped links (``real_links/hosts.py``; Linux, as root). Three chains
(``chains.py``), each under torch's DDP, torch's FSDP2 and our engine, with the measured bandwidth and latency in
the predictions. Before that collectives alone, beside the model of rings.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "real_links")]
from chains import CASES
from hosts import run_on_hosts, why_not

from deepspeed_partition.planner.io.files import write_json

SAVED = HERE / "results" / "4_hosts_202611.json"


def measure(megabits: float, cases: list[str]) -> dict[str, Any]:
    """Return what a job on four hosts measured.

    Raises:
        subprocess.CalledProcessError: the job failed.
    """
    with tempfile.TemporaryDirectory(prefix="madpipe-schemes-") as folder:
        output = Path(folder) / "measured.json"
        command = [str(HERE / "worker.py"), "--output", str(output), "--cases", *cases]
        run_on_hosts(command, megabits * 1e6)
        return {"megabits_per_second": megabits, **json.loads(output.read_text())}


def order_of(case: dict[str, Any], key: str, bytes_key: str) -> list[str]:
    """Return the schemes that fit, the fastest first."""
    fitting = [row for row in case["schemes"] if row[bytes_key] <= case["memory_bytes"]]
    return [row["scheme"] for row in sorted(fitting, key=lambda row: row[key])]


def report(jobs: list[dict[str, Any]]) -> str:
    """Return tables of a run in Markdown."""
    lines = ["| Mbit/s | chain | scheme | predicted | measured | error | memory, predicted | measured |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    verdicts, rings = [], []
    for job in jobs:
        rate = f"{job['megabits_per_second']:g}"
        for case in job["cases"]:
            for row in case["schemes"]:
                error = row["seconds"] / row["predicted_seconds"] - 1
                lines.append(
                    f"| {rate} | {case['case']} | {row['scheme']} | {row['predicted_seconds']:.2f} s | "
                    f"{row['seconds']:.2f} s | {error:+.1%} | {row['predicted_bytes'] / 1e6:.0f} MB | "
                    f"{row['memory_bytes'] / 1e6:.0f} MB |"
                )
            predicted = order_of(case, "predicted_seconds", "predicted_bytes")
            found = order_of(case, "seconds", "memory_bytes")
            verdicts.append(
                f"{rate} Mbit/s, {case['case']}: predicted {' < '.join(predicted)}; measured {' < '.join(found)}: "
                + ("equal" if predicted == found else "DIFFERENT")
            )
        for each in job["collectives"]:
            ratio = each["seconds"] / each["predicted_seconds"]
            rings.append(
                f"| {rate} | {each['collective']} | {each['kilobytes']} | {each['seconds'] * 1e3:.1f} ms | "
                f"{ratio:.2f} |"
            )
    head = ["| Mbit/s | collective | kB | measured | over predicted |", "|---|---|---|---|---|"]
    return "\n".join([*lines, "", *verdicts, "", *head, *rings])


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--save", action="store_true", help="save what was measured in results/")
    parser.add_argument("--report", action="store_true", help="print what is saved")
    arguments = parser.parse_args()
    if arguments.report:
        print(report(json.loads(SAVED.read_text())["jobs"]))
        return
    if (reason := why_not()) is not None:
        sys.exit(f"main.py: {reason}")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what a tensor had goes back to the kernel, which is asked
    cases = [case for case in CASES if case.name in arguments.cases]
    jobs = [
        measure(megabits, [case.name for case in cases if case.megabits == megabits])
        for megabits in dict.fromkeys(case.megabits for case in cases)
    ]
    print(report(jobs))
    if arguments.save:
        before = json.loads(SAVED.read_text())["jobs"] if SAVED.exists() else []
        rates = [job["megabits_per_second"] for job in jobs]
        kept = [job for job in before if job["megabits_per_second"] not in rates]
        write_json(SAVED, {"jobs": [*kept, *jobs]})
        print(f"saved {SAVED}")


if __name__ == "__main__":
    main()
