"""The tables of a sweep, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from claims import Verdict, against, alone, of_ours, without_plan
from evaluation import Evaluation, geometric_mean

COUNTS = {"input": "A layer keeps its input, as the paper counts", "autograd": "A layer keeps what autograd keeps"}
OURS = "madpipe"
MADPIPES = ("madpipe-paper", "madpipe")
RIVALS = ("pipedream", "pipedream-blind")


def report(table: Evaluation) -> str:
    """Write all tables, for each way of counting."""
    parts = []
    for kept, title in COUNTS.items():
        of_kept = table.where(kept=kept)
        if of_kept.rows:
            parts.append(f"## {title}\n\n{_section(of_kept)}")
    return "\n".join(parts)


def _section(table: Evaluation) -> str:
    algorithms = table.algorithms
    madpipes = [name for name in MADPIPES if name in algorithms]
    pairs = [(rival, ours) for ours in madpipes for rival in RIVALS if table.ratios(rival, ours)]
    others = [name for name in algorithms if name != OURS]
    parts = []
    if pairs:
        columns = [against(table, *pair) for pair in pairs]
        parts.append("What the paper says of PipeDream against MadPipe:\n")
        parts.append(_verdicts([f"{rival} against {ours}" for rival, ours in pairs], columns))
    parts.append("What it says of one algorithm:\n")
    parts.append(_verdicts(algorithms, [alone(table, name) for name in algorithms]))
    if OURS in algorithms:
        parts.append(f"What `{OURS}` promises:\n")
        parts.append(_verdicts(["all settings"], [of_ours(table, OURS, others)]))
        parts.append(
            f"Periods over `{OURS}`'s, geometric mean (maximum) over the settings in which both have a plan:\n"
        )
        parts.append(_ratios(table, others))
    parts.append("GB per device from which there is a plan, for each number of devices:\n")
    parts.append(_least_memory(table, algorithms))
    return "\n".join(parts)


def _verdicts(names: Sequence[str], columns: Sequence[Sequence[Verdict]]) -> str:
    """A row for each claim, a column for each of whom it is said."""
    rows = ([same[0].claim, *map(str, same)] for same in zip(*columns, strict=True))
    return _table(["claim", *names], rows)


def _ratios(table: Evaluation, others: Sequence[str]) -> str:
    rows = []
    for network in table.values("network"):
        rows.append([str(network), *_cells(table.where(network=network), others)])
    rows.append(["all", *_cells(table, others)])
    return _table(["network", *others, "plans", "not contiguous", "no contiguous plan", "no plan"], rows)


def _cells(table: Evaluation, others: Sequence[str]) -> list[str]:
    found = []
    for name in others:
        ratios = table.ratios(name, OURS)
        found.append(
            f"{geometric_mean(ratios):.3f} ({max(ratios):.2f}), {len(ratios)} plans" if ratios else "no plans"
        )
    plans = list(table.results(OURS))
    alone = sum(table.period(setting, "contiguous") is None for setting, _ in plans)
    shared = sum(not result.is_contiguous for _, result in plans)
    return [
        *found,
        f"{len(plans)} of {len(table.rows)}",
        str(shared),
        str(alone),
        str(len(without_plan(table, OURS))),
    ]


def _least_memory(table: Evaluation, algorithms: Sequence[str]) -> str:
    devices = table.values("num_devices")
    rows = []
    for network in table.values("network"):
        for algorithm in algorithms:
            memory = []
            for count in devices:
                found = table.where(network=network, num_devices=count).results(algorithm)
                memory.append(min((setting.memory_gb for setting, _ in found), default=math.inf))
            rows.append([str(network), algorithm, *(f"{gb:g}" if gb < math.inf else "-" for gb in memory)])
    return _table(["network", "algorithm", *map(str, devices)], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
