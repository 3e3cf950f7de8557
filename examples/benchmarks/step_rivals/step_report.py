"""The tables: the planner's step beside the best published schedule, the contiguous step and the lower bound."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
ROUNDING = 1e-9
"""Relative difference of two steps that is none: instants are whole ticks of 15 digits."""


@dataclass(frozen=True)
class Compared:
    """One setting: what the planner finds, and the rivals."""

    setting: Row
    rivals: Mapping[str, Row]
    plan: Row | None
    contiguous: Row | None

    @property
    def best_rival(self) -> tuple[str, Row] | None:
        if not self.rivals:
            return None
        return min(self.rivals.items(), key=lambda each: each[1]["step_seconds"])

    @property
    def ratio(self) -> float | None:
        """The planner's step over the best rival's; infinite where only a rival fits, None where no rival does."""
        if self.best_rival is None:
            return None
        found = _seconds(self.plan)
        return math.inf if found is None else found / self.best_rival[1]["step_seconds"]

    @property
    def gain(self) -> float | None:
        """The contiguous step over the planner's."""
        found, contiguous = _seconds(self.plan), _seconds(self.contiguous)
        return None if found is None or contiguous is None else contiguous / found

    @property
    def gap(self) -> float | None:
        """The planner's step over its lower bound, less 1."""
        found = _seconds(self.plan)
        bound = None if self.plan is None else self.plan.get("step_lower_bound_seconds")
        return None if found is None or not bound else found / bound - 1

    @property
    def is_beaten(self) -> bool:
        return self.ratio is not None and self.ratio > 1 + ROUNDING


def _seconds(row: Row | None) -> float | None:
    return None if row is None else row.get("step_seconds")


def compared(settings: Iterable[Row], rivals: Iterable[Row], plans: Iterable[Row]) -> list[Compared]:
    """Bring the rows of each setting together; settings that were not run are left out."""
    of_rivals = {row["number"]: row["rivals"] for row in rivals}
    of_plans = {(row["number"], row["algorithm"]): row for row in plans}
    return [
        Compared(
            setting,
            of_rivals[setting["number"]],
            of_plans.get((setting["number"], "madpipe")),
            of_plans.get((setting["number"], "contiguous")),
        )
        for setting in settings
        if setting["number"] in of_rivals and (setting["number"], "madpipe") in of_plans
    ]


def report(settings: Sequence[Row], rivals: Sequence[Row], plans: Sequence[Row]) -> str:
    """Return the report in Markdown."""
    rows = compared(settings, rivals, plans)
    return "\n".join([
        "# The planner's step beside published schedules",
        "",
        *_summary(rows, len(settings)),
        "",
        "## By network",
        "",
        *_groups(rows, "network", lambda row: row.setting["network"]),
        "",
        "## By devices, micro-batches and memory",
        "",
        *_groups(rows, "devices", lambda row: row.setting["num_devices"]),
        "",
        *_groups(rows, "micro-batches", lambda row: row.setting["num_micro_batches"]),
        "",
        *_groups(rows, "memory", lambda row: row.setting["memory"]),
        "",
        "## By the schedule that comes nearest",
        "",
        *_groups(rows, "best rival", lambda row: "none fits" if row.best_rival is None else row.best_rival[0]),
        "",
        "## Where a rival is faster",
        "",
        *_beaten(rows),
        "",
    ])  # fmt: skip


def gaps(settings: Sequence[Row], plans: Sequence[Row], bounds: Sequence[Row]) -> str:
    """Return in Markdown how far the steps of plans are above their own lower bounds, and above other ones."""
    of_plans = {row["number"]: row for row in plans if row["algorithm"] == "madpipe" and "step_seconds" in row}
    others = {row["number"]: row["step_lower_bound_seconds"] for row in bounds}
    rows = [
        (setting, plan, plan["step_seconds"] / bound - 1, plan["step_seconds"] / others[number] - 1)
        for setting in settings
        for number in [setting["number"]]
        if number in others and (plan := of_plans.get(number)) and (bound := plan["step_lower_bound_seconds"])
    ]
    lines = [
        "# The planner's step above its lower bound",
        "",
        "Bounds as they were when the plans were made, and as they are now; the steps are the same.",
        "",
        "| settings | number | gap, median | now | least | most | below 5 % | now |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for setting, plan, before, now in rows:
        recomputes = "with recomputation" if plan["recomputes"] else "without recomputation"
        for name in ("all", setting["memory"], recomputes, f"{setting['num_devices']} devices"):
            groups[name].append((before, now))
    for name in sorted(groups, key=lambda name: (name != "all", name)):
        before, now = zip(*groups[name], strict=True)
        cells = [
            name, len(now), f"{statistics.median(before):.1%}", f"{statistics.median(now):.1%}", f"{min(now):.2%}",
            f"{max(now):.1%}", sum(gap < 0.05 for gap in before), sum(gap < 0.05 for gap in now),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "## Settings with the largest gaps",
        "",
        "| setting | network | devices | micro-batches | memory | gap | now | stages | recomputes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for setting, plan, before, now in sorted(rows, key=lambda row: -row[3])[:40]:
        cells = [
            setting["number"], setting["network"], setting["num_devices"], setting["num_micro_batches"],
            setting["memory"], f"{before:.1%}", f"{now:.1%}", len(plan["devices"]),
            "yes" if plan["recomputes"] else "no",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


def _summary(rows: Sequence[Compared], num_settings: int) -> list[str]:
    ratios = [row.ratio for row in rows if row.ratio is not None]
    beaten = sum(row.is_beaten for row in rows)
    lines = [f"- {len(rows)} of {num_settings} settings; in {len(ratios)} some rival fits into memory."]
    if ratios:
        lines.append(
            f"- A rival is faster in {beaten}. The planner's step over the best rival's: at most "
            f"{max(ratios):.4f}, {_mean(ratios):.4f} in the geometric mean, {min(ratios):.4f} at the least."
        )
    unplanned = [row.setting["number"] for row in rows if _seconds(row.plan) is None]
    lines.append(f"- No plan fits in {len(unplanned)} settings{_listed(unplanned)}.")
    gains = [row.gain for row in rows if row.gain is not None]
    if gains:
        lines.append(
            f"- The best contiguous step takes {_mean(gains):.3f} times as long in the geometric mean, up to "
            f"{max(gains):.3f} times, and at least {min(gains):.4f} times ({len(gains)} settings)."
        )
    gaps = [row.gap for row in rows if row.gap is not None]
    if gaps:
        lines.append(
            f"- Gap to the lower bound: {statistics.median(gaps):.2%} in the median, {min(gaps):.2%} to "
            f"{max(gaps):.2%} ({len(gaps)} settings)."
        )
    lines += _labels(rows)
    plans = [row.plan for row in rows if row.plan is not None]
    if plans:
        seconds = [plan["processor_seconds"] for plan in plans]
        limits = sorted({plan["time_limit_seconds"] for plan in plans})
        lines.append(
            f"- Planning: {statistics.median(seconds):.1f} s of the processor in the median, {max(seconds):.1f} s "
            f"at most (limit {', '.join(f'{each:g}' for each in limits)} s)."
        )
        most = [plan["most_bytes"] for plan in plans if plan.get("most_bytes")]
        if most:
            lines.append(f"- Memory of the planning process: at most {max(most) / 1e6:.0f} MB.")
    return lines


def _labels(rows: Sequence[Compared]) -> list[str]:
    """Return where the plans come from, if they come from several runs."""
    found = [
        (name, Counter(plan["label"] for plan in plans if plan is not None and "label" in plan))
        for name, plans in (
            ("The planner's steps", [row.plan for row in rows]),
            ("The contiguous steps", [row.contiguous for row in rows]),
        )
    ]
    if len({label for _, counts in found for label in counts}) < 2:
        return []
    return [
        f"- {name} are {', '.join(f'{count} of {label!r}' for label, count in counts.most_common())}."
        for name, counts in found
        if counts
    ]


def _groups(rows: Sequence[Compared], title: str, key: Callable[[Compared], Any]) -> list[str]:
    groups: dict[Any, list[Compared]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    lines = [
        f"| {title} | settings | a rival is faster | step / best rival, mean | most | contiguous / step, mean "
        "| most | gap, median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, group in groups.items():
        ratios = [row.ratio for row in group if row.ratio is not None]
        gains = [row.gain for row in group if row.gain is not None]
        gaps = [row.gap for row in group if row.gap is not None]
        cells = [
            name,
            len(group),
            sum(row.is_beaten for row in group),
            *((f"{_mean(ratios):.3f}", f"{max(ratios):.4f}") if ratios else ("-", "-")),
            *((f"{_mean(gains):.3f}", f"{max(gains):.3f}") if gains else ("-", "-")),
            f"{statistics.median(gaps):.1%}" if gaps else "-",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _beaten(rows: Sequence[Compared]) -> list[str]:
    beaten = sorted((row for row in rows if row.is_beaten), key=lambda row: -(row.ratio or 0))
    if not beaten:
        return ["Nowhere."]
    lines = [
        "| setting | network | devices | micro-batches | memory | ratio | schedule | chunks | alive | recomputes "
        "| the planner's stages |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in beaten:
        assert row.best_rival is not None
        family, rival = row.best_rival
        stages = "no plan" if row.plan is None or "devices" not in row.plan else len(row.plan["devices"])
        memory = f"{row.setting['memory_bytes'] / 1e9:g} GB, {row.setting['memory']}"
        cells = [
            row.setting["number"], row.setting["network"], row.setting["num_devices"],
            row.setting["num_micro_batches"], memory, f"{row.ratio:.4f}", family, rival["chunks"],
            rival["most_alive"] or "-", "yes" if rival["recomputes"] else "no", stages,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean; infinite where one of them is."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


def _listed(numbers: Sequence[int]) -> str:
    return f" ({', '.join(map(str, numbers))})" if numbers else ""
