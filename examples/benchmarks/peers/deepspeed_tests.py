"""Do DeepSpeed's own tests of its pipeline pass with MadPipe, as many as without?

    python examples/benchmarks/peers/deepspeed_tests.py FOLDER [--mode plain madpipe warm-up] [-k EXPRESSION]

FOLDER is a checkout of https://github.com/deepspeedai/DeepSpeed (Apache-2.0). Nothing is downloaded, and no test
is edited: ``hosted/sitecustomize.py`` installs MadPipe in their processes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import cpuinfo

HERE = Path(__file__).resolve().parent
TESTS = ["unit/pipe", "unit/runtime/pipe", "unit/checkpoint/test_pipeline.py"]
MODES = ["plain", "madpipe", "warm-up"]


def outcomes_of(folder: Path, mode: str, warmup_steps: int, pattern: str, limit_seconds: int) -> dict[str, str]:
    """Run the tests in ``folder``/tests. Returns each test's outcome, with the first line of why."""
    environment = os.environ | {
        "PEERS_MODE": mode,
        "PEERS_WARMUP_STEPS": str(warmup_steps),
        "PYTHONPATH": os.pathsep.join(
            [str(HERE / "hosted"), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")]
        ),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "4",  # DeepSpeed takes it for the number of its CPU devices, of which tests want four
        "OMP_NUM_THREADS": "1",
        "PEERS_PROCESSOR": cpuinfo.get_cpu_info_json(),
        "DS_UNITTEST_TIMEOUT": str(limit_seconds),
    }
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch, "results.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-q",
            "--no-header",
            f"--junitxml={results}",
        ]
        command += ["--basetemp", str(Path(scratch, "tests")), *(["-k", pattern] if pattern else []), *TESTS]
        run = subprocess.run(command, cwd=folder / "tests", env=environment, capture_output=True, text=True)
        if not results.exists():
            raise SystemExit(
                f"pytest ended with status {run.returncode} and no results:\n{run.stdout[-3000:]}{run.stderr}"
            )
        outcomes = {}
        for case in ElementTree.parse(results).iter("testcase"):
            told = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
            name = f"{case.get('classname')}::{case.get('name')}".removeprefix("unit.")
            reason = "" if told is None else (told.get("message") or told.text or "").strip().splitlines()[0]
            outcomes[name] = "passed" if told is None else f"{told.tag}: {reason}"
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of DeepSpeed")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("-k", default="", help="only these tests, as in pytest")
    parser.add_argument(
        "--limit", type=int, default=600, help="seconds for one test; one that takes longer ends the run"
    )
    arguments = parser.parse_args()
    if not (arguments.folder / "tests" / TESTS[0]).is_dir():
        raise SystemExit(f"{arguments.folder} has no tests/{TESTS[0]}: give the folder of a checkout of DeepSpeed")

    by_mode: dict[str, dict[str, str]] = {}
    for mode in arguments.mode:
        start = time.monotonic()
        by_mode[mode] = outcomes_of(arguments.folder, mode, arguments.warmup_steps, arguments.k, arguments.limit)
        counts = dict.fromkeys(("passed", "failure", "error", "skipped"), 0)
        for outcome in by_mode[mode].values():
            counts[outcome.split(":")[0]] += 1
        counted = ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)
        print(f"{mode:8}: {counted} in {time.monotonic() - start:.0f} s", flush=True)
    for name in sorted({name for outcomes in by_mode.values() for name in outcomes}):
        outcomes = {mode: of_mode.get(name, "did not run") for mode, of_mode in by_mode.items()}
        if set(outcomes.values()) != {"passed"}:
            print(name)
            for mode, outcome in outcomes.items():
                print(f"    {mode:8}: {outcome}")


if __name__ == "__main__":
    main()
