"""What the MadPipe paper says about its evaluation, and what this planner promises, held against the rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from evaluation import Evaluation, geometric_mean, longer
from sweep import Setting

LARGE = 1.2
"""The ratio of a period to a shorter one that is large: longer by 20 %."""
TIGHT_GB = 10
"""The memory, in GB, below which the paper says that PipeDream always loses that much."""
ROOMY_GB = (12, 16)
"""The memory, in GB, with which the paper finds that pipelines scale well."""

AXES = {"memory_gb": "memory", "num_devices": "devices", "bandwidth_gb": "bandwidth"}


@dataclass(frozen=True)
class Verdict:
    """A claim, its figure, and whether it holds."""

    claim: str
    figure: str
    holds: bool | None
    """Whether the claim holds; None: the rows do not say, or there is a figure and no claim."""

    def __str__(self) -> str:
        return f"{self.figure}{'' if self.holds is None else ': holds' if self.holds else ': does not hold'}"


def against(table: Evaluation, rival: str, ours: str) -> list[Verdict]:
    """The paper's claims about a rival."""
    return [
        _routinely(table, rival, ours),
        _times_slower(table, rival, ours),
        _consistently(table, rival, ours),
        _scalability(table, rival, ours),
    ]


def alone(table: Evaluation, algorithm: str) -> list[Verdict]:
    """The paper's claims about an algorithm."""
    return [_promises(table, algorithm), _erratic(table, algorithm), _bandwidth(table, algorithm)]


def of_ours(table: Evaluation, ours: str, others: list[str]) -> list[Verdict]:
    """What this planner promises."""
    table = replace(table, rows={setting: found for setting, found in table.rows.items() if ours in found})
    plans = list(table.results(ours))
    worse = [
        setting
        for setting, found in table.rows.items()
        for other in others
        if other in found and longer(found[ours].period_seconds, found[other].period_seconds)
    ]
    unproved = [setting for setting, result in plans if result.proved_class in (None, "contiguous")]
    gaps = [
        result.period_seconds / result.lower_bound_seconds
        for _, result in plans
        if result.period_seconds and result.lower_bound_seconds
    ]
    seconds = [found[ours].planning_seconds for found in table.rows.values()]
    return [
        Verdict(
            f"never slower than {', '.join(others)}",
            f"{len(worse)} of {len(table.rows)} settings{_first(worse)}",
            not worse if table.rows else None,
        ),
        *(_monotone(table, ours, axis, name) for axis, name in AXES.items()),
        Verdict(
            "proved over contiguous allocations and those with one special device",
            f"{len(plans) - len(unproved)} of {len(plans)} plans, in up to {max(seconds, default=math.nan):.1f} s"
            f"{_first(unproved)}",
            not unproved if plans else None,
        ),
        Verdict(
            "periods above the bound for any schedule of any allocation",
            f"{geometric_mean(gaps) - 1:.0%} in the mean, up to {max(gaps, default=math.nan) - 1:.0%}",
            None,
        ),
    ]


def without_plan(table: Evaluation, algorithm: str) -> list[Setting]:
    return [
        setting
        for setting, found in table.rows.items()
        if algorithm in found and found[algorithm].period_seconds is None
    ]


def _routinely(table: Evaluation, rival: str, ours: str) -> Verdict:
    both = table.ratios(rival, ours)
    large = sum(ratio >= LARGE for ratio in both)
    return Verdict(
        "its period is routinely 20 % larger",
        f"{large} of {len(both)} settings, {geometric_mean(both):.2f} times in the mean",
        2 * large >= len(both) if both else None,
    )


def _times_slower(table: Evaluation, rival: str, ours: str) -> Verdict:
    most = max(table.ratios(rival, ours), default=math.nan)
    return Verdict("up to two or even three times slower", f"up to {most:.2f} times", _known(most, most >= 2))


def _consistently(table: Evaluation, rival: str, ours: str) -> Verdict:
    means = [mean for memory_gb, mean in points_of_figure_7(table, rival, ours) if memory_gb < TIGHT_GB]
    large = sum(mean > LARGE for mean in means)
    return Verdict(
        f"consistently over 20 % below {TIGHT_GB} GB",
        f"{large} of {len(means)} points of figure 7, {min(means, default=math.nan):.2f} to "
        f"{max(means, default=math.nan):.2f} times, {geometric_mean(means):.2f} in the mean",
        large == len(means) if means else None,
    )


def points_of_figure_7(table: Evaluation, rival: str, ours: str) -> Iterator[tuple[float, float]]:
    """Memory, and the geometric mean of the ratios over devices and bandwidths; for each network."""
    for network in table.values("network"):
        of_network = table.where(network=network)
        for memory_gb in of_network.values("memory_gb"):
            found = of_network.where(memory_gb=memory_gb).ratios(rival, ours)
            if found:
                yield memory_gb, geometric_mean(found)


def _scalability(table: Evaluation, rival: str, ours: str) -> Verdict:
    most = max(table.values("num_devices"), default=0)
    found = []
    for memory_gb in ROOMY_GB:
        settings = table.where(num_devices=most, memory_gb=memory_gb).both(ours, rival)
        pair = [geometric_mean(settings.speedups(algorithm)) for algorithm in (ours, rival)]
        if not any(map(math.isnan, pair)):
            found.append((memory_gb, *pair))
    text = ", ".join(f"{mine:.2f} against {other:.2f} at {memory} GB" for memory, mine, other in found)
    return Verdict(
        "it scales worse with the devices",
        f"speedup on {most} devices {text}" if found else "-",
        all(mine > other for _, mine, other in found) if found else None,
    )


def _promises(table: Evaluation, algorithm: str) -> Verdict:
    broken = [
        result.period_seconds / result.promised_seconds
        for _, result in table.results(algorithm)
        if result.period_seconds and result.promised_seconds
    ]
    mean, most = geometric_mean(broken), max(broken, default=math.nan)
    return Verdict(
        "its partitioner promises a shorter period than its plan achieves",
        f"{mean:.2f} times as long in the mean, up to {most:.2f}" if broken else "promises what it achieves",
        mean > 1.001 if broken else None,
    )


def _erratic(table: Evaluation, algorithm: str) -> Verdict:
    figure, worse = _steps(table, algorithm, "memory_gb")
    return Verdict("its period is not monotonic in the memory", figure, None if worse is None else worse > 0)


def _monotone(table: Evaluation, algorithm: str, axis: str, name: str) -> Verdict:
    figure, worse = _steps(table, algorithm, axis)
    return Verdict(f"never slower with more {name}", figure, None if worse is None else worse == 0)


def _steps(table: Evaluation, algorithm: str, axis: str) -> tuple[str, int | None]:
    """Count steps along a field after which the period is longer, in words, too; None: there are no steps."""
    count = sum(
        algorithm in table.rows[less] and algorithm in table.rows[more] for less, more in table.steps(axis)
    )
    worse = [more for _, more in table.worse_with_more(algorithm, axis)]
    return f"longer after {len(worse)} of {count} steps{_first(worse)}", len(worse) if count else None


def _bandwidth(table: Evaluation, algorithm: str) -> Verdict:
    gains = [
        before / after
        for less, more in table.steps("bandwidth_gb")
        if (before := table.period(less, algorithm)) and (after := table.period(more, algorithm))
    ]
    return Verdict(
        "more bandwidth does not dramatically improve it",
        f"{geometric_mean(gains):.2f} times as fast in the mean, up to {max(gains, default=math.nan):.2f}",
        _known(geometric_mean(gains), geometric_mean(gains) < LARGE),
    )


def _known(figure: float, holds: bool) -> bool | None:
    return None if math.isnan(figure) else holds


def _first(settings: list[Setting]) -> str:
    """Name the first of these settings, to look at."""
    if not settings:
        return ""
    one = settings[0]
    platform = f"{one.num_devices} devices of {one.memory_gb:g} GB, {one.bandwidth_gb:g} GB/s"
    return f" (such as {one.network} on {platform})"
