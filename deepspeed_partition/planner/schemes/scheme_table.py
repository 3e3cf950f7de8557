"""Table 1 of the source beside what holds, and beside the simulation.

The table is for identical stages whose forward and backward take f and b, whose weights, outputs and stashes have
one unit each, and messages that take no time. What does not hold as printed, with the smallest case that shows it
(``tests/planner/test_schemes.py`` runs them):

- *Latency of LPP and FSLPP*, S + B/G - 1 units of f + b: below the work of a worker where R < S. For
  W, S, B, G, R = 4, 4, 8, 2, 2 it is 21 at f = 1, b = 2, and each worker computes for 24. No order is shorter than
  S B / (R G) + R - 1 units, since the last worker of a group waits for R - 1 forwards, and R - 1 backwards follow
  its last one: 27. The greedy schedule takes 28.
- *Activations kept*, min(S, B): only with a limit of micro-batches in flight. The greedy schedule of GPipe keeps 8
  at S, B = 4, 8; with at most S - s in stage s it keeps 4, in the same time.
- *Activations received*, B: a worker inside the pipeline receives B outputs and B gradients.
- *Weights received by FSDP*, S - 1: the backward needs them again, so it is 2 (S - 1); a worker that stores no
  stage (B > S) receives 2 S.
- *Weights kept by FSLPP*, 1: stages s with equal s mod G and s mod R meet on a worker, so it is S / lcm(G, R),
  rounded up: 2 at S, G, R = 4, 2, 2. It is 1 up to W stages only where G and R have no common divisor.
- *Weights received by FSLPP*, S - 1: each of the 2 S B / (G R) jobs of a worker fetches them, unless it stores the
  stage itself.
- *The theorem*, rho <= M / S (rho >= M / S at the end of its proof). GPipe at S, B = 4, 8 has rho = 8/11 and
  M / S = 2, so the second is false. The proof counts a forward and a backward as one unit each, and rho counts
  both as one unit: in one unit the theorem is rho <= 2 M / S. Three stages on two workers (0, 1, 1) with six
  micro-batches and at most two in flight per stage have rho = 9/13 and M / S = 2/3, so the first is false, too.

Source: Rahimi, "Unifying Parallelization Schemes to Train Deep Nets", table 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from deepspeed_partition.planner.schemes.scheme import Scheme, ddp, fsdp, fslpp, gpipe, lpp
from deepspeed_partition.planner.schemes.scheme_simulator import SchemeStage, simulate


@dataclass(frozen=True, slots=True)
class TableEntry:
    """Number of the table for the worker that has most of it."""

    scheme: str
    quantity: str
    """``latency`` in seconds, ``activations received``, ``weights received``, ``activations kept`` or ``weights
    kept`` in stages, for one worker."""
    printed: float
    """Number by the source's formula."""
    corrected: float
    relation: str
    """How the simulated number stands to the corrected one: ``=``, ``>=`` or ``<=``."""
    simulated: float

    @property
    def holds(self) -> bool:
        """Return whether the simulated number stands to the corrected one as ``relation`` says."""
        difference = self.simulated - self.corrected
        return {"=": difference == 0, ">=": difference >= 0, "<=": difference <= 0}[self.relation]


def scheme_table(
    num_stages: int,
    num_micro_batches: int,
    num_groups: int,
    group_size: int,
    forward_seconds: float = 1,
    backward_seconds: float = 2,
) -> list[TableEntry]:
    """Return the table for S identical stages and B micro-batches; LPP and FSLPP have G groups of R workers.

    DDP and FSDP have B workers, GPipe has S.

    Raises:
        ValueError: G does not divide B, or R does not divide S.
    """
    s, b, g, r = num_stages, num_micro_batches, num_groups, group_size
    if min(s, b, g, r) < 1 or b % g or s % r:
        raise ValueError(
            f"{g} groups of {r} workers, {b} micro-batches and {s} stages: the groups divide the micro-batches "
            "and the workers of a group divide the stages"
        )
    unit = forward_seconds + backward_seconds
    looped = s * b // (g * r) + r - 1
    per_worker = s // r * (b // g)
    received = _looped_activations(s, b // g, r)
    fewest_own = min(
        sum(stage % g == group and stage % r == place for stage in range(s))
        for group in range(g)
        for place in range(r)
    )
    fslpp_weights = 2 * (b // g) * (s // r - fewest_own)
    rows: list[tuple[Scheme, Sequence[tuple[float, float, str]]]] = [
        (ddp(b), ((s * unit, s * unit, "="), (0, 0, "="), (0, 0, "="), (s, s, "="), (s, s, "="))),
        (
            fsdp(b),
            (
                (s * unit, s * unit, "="), (0, 0, "="), (s - 1, 2 * s if b > s else 2 * (s - -(-s // b)), "="),
                (s, s, "="), (1, -(-s // b), "="),
            ),
        ),
        (
            gpipe(),
            (
                ((b + s - 1) * unit, (b + s - 1) * unit, "="), (b, _looped_activations(s, b, s), "="),
                (0, 0, "="), (min(s, b), b, "<="), (1, 1, "="),
            ),
        ),
        (
            lpp(g, r),
            (
                ((s + b // g - 1) * unit, looped * unit, ">="), (b, received, "="), (0, 0, "="),
                (s // r * min(s, b // g), per_worker, "<="), (s // r, s // r, "="),
            ),
        ),
        (
            fslpp(g, r),
            (
                ((s + b // g - 1) * unit, looped * unit, ">="), (b, received, "="), (s - 1, fslpp_weights, "="),
                (s // r * min(s, b // g), per_worker, "<="), (1, -(-s // lcm(g, r)), "="),
            ),
        ),
    ]  # fmt: skip
    stages = [SchemeStage(forward_seconds=forward_seconds, backward_seconds=backward_seconds)] * s
    entries = []
    for scheme, numbers in rows:
        run = simulate(scheme, stages, b)
        found = {
            "latency": run.latency_seconds,
            "activations received": max(run.activations_received),
            "weights received": max(run.weights_received),
            "activations kept": max(run.peak_activations),
            "weights kept": max(run.weights_stored),
        }
        for (quantity, simulated), (printed, corrected, relation) in zip(found.items(), numbers, strict=True):
            entries.append(TableEntry(scheme.name, quantity, printed, corrected, relation, simulated))
    return entries


def _looped_activations(num_stages: int, micro_batches: int, group_size: int) -> int:
    """Return the most outputs and gradients that a worker of a group receives."""
    if group_size == 1:
        return 0
    # A worker has every R-th stage. The first stage receives no output, the last one no gradient.
    return (
        max(
            sum((stage > 0) + (stage < num_stages - 1) for stage in range(first, num_stages, group_size))
            for first in range(group_size)
        )
        * micro_batches
    )
