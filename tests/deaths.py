"""Processes that kill themselves at a place that a test names, as the kernel or a scheduler would."""

from __future__ import annotations

import fnmatch
import functools
import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepspeed_partition.engine.checkpoint import atomic_folders
from tests.choice import is_chosen
from tests.ranks import before_any_fork, run_job


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before(module: Any, name: str, call: int | str) -> None:
    """Die when a function is called for the ``call``-th time from now on, or with a path like that."""
    function, num_calls = getattr(module, name), 0

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        paths = [str(arg) for arg in args if isinstance(arg, str | Path)]
        if num_calls == call or any(fnmatch.fnmatch(path, str(call)) for path in paths):
            kill()
        return function(*args, **kwargs)

    setattr(module, name, watched)


def run_deaths(
    out: Path,
    deaths: Mapping[str, Any],
    unbroken: Callable[[Path, int], None],
    script: Callable[[Path, Path, Any, bool, int], None],
) -> None:
    """Run each death, and the run that goes on after it; what became of them goes to ``out``.

    Args:
        deaths: by name; ``num_processes`` is that of the run that goes on.
        unbroken: writes to a file what is expected.
        script: a rank of a run, with the folder of its checkpoints, the file for what it ends with, the death,
            whether it is to happen, and the rank.
    """
    before_any_fork()
    atomic_folders._swap = lambda *_: False  # as on disks that cannot swap names, where a kill can come between
    expected = out.parent / "expected.json"
    run_job(functools.partial(unbroken, expected), [out.parent / "expected.log"])
    outcomes: dict[str, Any] = {"expected": json.loads(expected.read_text())}
    for name, death in deaths.items():
        if not is_chosen(name):
            continue
        folder, ended = out.parent / name, out.parent / f"{name}.json"
        folder.mkdir()
        for kills, size in ((True, 2), (False, death.num_processes)):
            logs = [out.parent / f"{name}_{kills}_{rank}.log" for rank in range(size)]
            outcome = run_job(functools.partial(script, folder, ended, death, kills), logs)
            outcomes.setdefault(name, []).append(outcome._asdict())
        after = json.loads(ended.read_text()) if ended.exists() else {}
        outcomes[name].append({**after, "left": sorted(os.listdir(folder))})
    out.write_text(json.dumps(outcomes))


def check_ends(
    death: Any, killed: Mapping[str, Any], resumed: Mapping[str, Any], after: Mapping[str, Any]
) -> None:
    """The other one of two ranks ended with the cause, the next run went through, and no folder is half there."""
    other = 1 - death.rank
    assert killed["exits"][death.rank] == -9, killed["logs"][death.rank][-3000:]
    assert killed["exits"][other] == 1, "neither left, nor aborted"
    told = killed["logs"][other]
    cause = rf"rank {death.rank} (\(process \d+\) )?has ended|Connection (closed|reset) by peer"
    assert re.search(cause, told) or (death.rank == 0 and "store" in told), told[-3000:]
    assert resumed["exits"] == [0] * death.num_processes, resumed["logs"][0][-3000:]
    assert not [left for left in after["left"] if left.startswith(".")], after["left"]
