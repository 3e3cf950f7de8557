"""Plans for every setting, written down one by one, so that a run can be stopped, continued and split.

Each algorithm has a file of its own: one JSON object per line, first what the run was made with, then a row for
each setting. A row is written as soon as it is known; what the file has is not planned again.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from platform import machine, python_version
from typing import Any

from tqdm import tqdm

from deepspeed_partition import Chain, InfeasibleError, Plan, Platform, make_plan
from deepspeed_partition.planner.allocation import Allocation, Placement, Stage
from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.io.files import write_text
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.non_contiguous.madpipe import MadPipe
from deepspeed_partition.planner.solvers.non_contiguous.madpipe_paper import PaperMadPipe
from deepspeed_partition.planner.solvers.pattern.one_f_one_b import pseudo_stage_loads

KEPT = ("input", "autograd")
"""What a layer keeps for its backward: its input, as the paper counts, or what its chain says."""
PACKAGES = ("madpipe", "numpy", "pulp", "highspy")


@dataclass(frozen=True, order=True, kw_only=True)
class Setting:
    """A chain and a platform."""

    network: str
    kept: str
    num_devices: int
    memory_gb: float
    bandwidth_gb: float

    @property
    def platform(self) -> Platform:
        return Platform(
            num_devices=self.num_devices,
            memory_bytes=round(self.memory_gb * 1e9),
            bandwidth=self.bandwidth_gb * 1e9,
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """What an algorithm made of a setting."""

    period_seconds: float | None = None
    """The period in seconds; None where the algorithm has no plan."""
    promised_seconds: float | None = None
    """The period in seconds that the partitioner expected; None where it promises its plan's own, or nothing."""
    lower_bound_seconds: float | None = None
    proved_class: str | None = None
    is_contiguous: bool | None = None
    boundaries: list[int] | None = None
    devices: list[int] | None = None
    """The device of each stage."""
    planning_seconds: float

    @property
    def allocation(self) -> Allocation | None:
        if self.boundaries is None or self.devices is None:
            return None
        stages = zip(pairwise(self.boundaries), self.devices, strict=True)
        return Allocation(tuple(Stage(layers=layers, device=device) for layers, device in stages))


Results = Mapping[Setting, Result]


def counted(chain: Chain, kept: str) -> Chain:
    """The chain under one of the two ways of counting."""
    if kept == "autograd":
        return chain
    return replace(chain, layers=tuple(replace(layer, stash_bytes=None) for layer in chain.layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded(PaperMadPipe):
    """``madpipe-paper``, with what its dynamic program promises."""

    promises: list[float] = field(default_factory=list)

    def promised(self, problem: Problem) -> tuple[int, Placement | None]:
        ticks, placement = PaperMadPipe.promised(self, problem)
        if placement is not None:
            self.promises.append(problem.times.clock.seconds(ticks))
        return ticks, placement


def result_of(
    chain: Chain,
    platform: Platform,
    algorithm: str,
    time_limit_seconds: float,
    start: tuple[Allocation, ...] = (),
) -> Result:
    """Plan once.

    Args:
        start: what ``madpipe`` tries first.
    """
    recorded = _Recorded()
    solver = {recorded.name: recorded, "madpipe": MadPipe(start=start)}.get(algorithm, algorithm)
    started = time.perf_counter()
    try:
        plan = make_plan(chain, platform, solver, time_limit_seconds=time_limit_seconds)
    except InfeasibleError:
        plan = None
    seconds = round(time.perf_counter() - started, 4)
    promised = next(iter(recorded.promises), None)
    if algorithm in ("pipedream", "pipedream-blind"):
        promised = promised_by_pipedream(chain, platform, algorithm, plan)
    if plan is None:
        return Result(promised_seconds=promised, planning_seconds=seconds)
    return Result(
        period_seconds=plan.period_seconds,
        promised_seconds=promised,
        lower_bound_seconds=plan.lower_bound_seconds,
        proved_class=plan.proved_class if plan.proved else None,
        is_contiguous=plan.is_contiguous,
        boundaries=plan.boundaries,
        devices=[stage.device for stage in plan.stages],
        planning_seconds=seconds,
    )


def promised_by_pipedream(chain: Chain, platform: Platform, algorithm: str, plan: Plan | None) -> float | None:
    """The slowest stage or transfer of the cut that it chose: the period in its own model."""
    if plan is None and algorithm == "pipedream-blind":
        # Its cut does not depend on the memory.
        plan = make_plan(chain, replace(platform, memory_bytes=2**50), algorithm)
    if plan is None:
        return None
    times = TimedChain(chain, platform)
    return times.clock.seconds(max(pseudo_stage_loads(times, plan.boundaries)))


def sweep(
    path: Path,
    algorithm: str,
    chains: Mapping[str, Chain],
    settings: Iterable[Setting],
    *,
    time_limit_seconds: float,
    num_jobs: int,
) -> None:
    """Plan for the settings that ``path`` does not have yet.

    Raises:
        ValueError: the file was made from other chains or with another time limit.
    """
    head = _head(algorithm, chains, time_limit_seconds)
    if path.exists():
        _cut_off_torn_line(path)
        before, done = read(path)
        for key in ("chains", "time_limit_seconds"):
            if before[key] != head[key]:
                raise ValueError(f"{path} was made with other {key} ({before[key]}): give the same, or remove it")
    else:
        done = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, _line(head))
    wanted = list(settings)
    missing = [setting for setting in wanted if setting not in done]
    smaller = _smaller({*wanted, *done}) if algorithm == "madpipe" else {}
    # spawn: whoever computed the chains has torch's threads, which a fork does not survive.
    pool = ProcessPoolExecutor(num_jobs, get_context("spawn"))
    try:
        with path.open("a", encoding="utf-8") as file:
            jobs: dict[Future[Result], Setting] = {}
            with tqdm(desc=algorithm, total=len(missing), disable=None) as bar:
                while missing or jobs:
                    ready = [each for each in missing if all(one in done for one in smaller.get(each, ()))]
                    for setting in ready:
                        before_it = (done[one].allocation for one in smaller.get(setting, ()))
                        start = tuple(allocation for allocation in before_it if allocation is not None)
                        chain = counted(chains[setting.network], setting.kept)
                        job = pool.submit(result_of, chain, setting.platform, algorithm, time_limit_seconds, start)
                        jobs[job] = setting
                        missing.remove(setting)
                    for job in wait(jobs, return_when=FIRST_COMPLETED).done:
                        setting = jobs.pop(job)
                        done[setting] = job.result()
                        file.write(_line(asdict(setting) | asdict(done[setting])))
                        file.flush()
                        bar.update()
    finally:
        pool.shutdown(cancel_futures=True)


def _smaller(settings: set[Setting]) -> dict[Setting, list[Setting]]:
    """Find for each setting those with the next smaller memory, bandwidth or devices, the rest being equal.

    A plan for one of them is a plan for the setting, too, and the search starts from it: what a search over
    allocations with several shared devices finds for less is not missed for more.
    """
    found: dict[Setting, list[Setting]] = {setting: [] for setting in settings}
    for resource in ("num_devices", "memory_gb", "bandwidth_gb"):
        alike: dict[Setting, list[Setting]] = defaultdict(list)
        for setting in settings:
            alike[replace(setting, **{resource: 0})].append(setting)
        for group in alike.values():
            group.sort(key=attrgetter(resource))
            for less, more in pairwise(group):
                found[more].append(less)
    return found


def read(path: Path) -> tuple[dict[str, Any], dict[Setting, Result]]:
    """What a file was made with, and its rows."""
    head, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return head, dict(map(_parsed, rows))


def _line(data: dict[str, Any]) -> str:
    """One line of a file; what is None is left out."""
    known = {key: value for key, value in data.items() if value is not None}
    return json.dumps(known, separators=(",", ":")) + "\n"


def _parsed(row: dict[str, Any]) -> tuple[Setting, Result]:
    def part(kind: Any) -> Any:
        return kind(**{each.name: row[each.name] for each in fields(kind) if each.name in row})

    return part(Setting), part(Result)


def _cut_off_torn_line(path: Path) -> None:
    """A run that was killed while it wrote leaves half a line at most: its setting is planned again."""
    whole = path.read_bytes()
    os.truncate(path, whole.rfind(b"\n") + 1)


def _head(algorithm: str, chains: Mapping[str, Chain], time_limit_seconds: float) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "time_limit_seconds": time_limit_seconds,
        "hardware": sorted({chain.hardware or "unknown" for chain in chains.values()}),
        "chains": {name: chain.digest() for name, chain in sorted(chains.items())},
        "sequential_seconds": {name: chain.compute_seconds for name, chain in sorted(chains.items())},
        "planned_on": f"{_processor()}, {os.cpu_count()} cores",
        "versions": {"python": python_version()} | {name: version(name) for name in PACKAGES},
        "date": f"{date.today():%Y-%m}",
    }


def _processor() -> str:
    """Name the processor as the machine does; its architecture where it has no name."""
    try:
        lines: Iterator[str] = iter(Path("/proc/cpuinfo").read_text().splitlines())
    except OSError:
        return machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, machine())
