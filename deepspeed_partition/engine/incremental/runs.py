"""The cuts that incremental profiling trains, and the statistics that follow from their peaks.

For each layer l, mCAP (section 3.1) takes the peak of a device (a) with l alone, (b) with layers n to l - 1, (c)
with layers n to l, for a small n. On G devices the k-th run has layers 0 to k - 1 on the first one, layer k on the
second, and the layers behind it on the others::

    | 0 ... k-1 | k | k+1 k+2 | k+3 ... L-1 |       G = 4, k = 1, ..., L - G + 1

The first device gives (b) and (c) with n = 0, the second one (a), and of the last layers the last run. The devices
behind have pairs of layers, as far as there are layers: (b) and (c) with n = l - 1. For the last G - 1 layers, of
which no run has (c) on its first device, there is nothing else. So L - G + 1 runs do, with the model as it is; the
paper extends it by dummy layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from deepspeed_partition.planner.mcap_profile import McapProfile

Layers = tuple[int, int]
"""The layers of a device: the first one, and the one behind the last."""
FEWEST_DEVICES = 4
"""Two devices have no cut with a middle layer alone on one; three have none in which the others show pairs."""


@dataclass(frozen=True, slots=True)
class Run:
    """A short training run."""

    boundaries: tuple[int, ...]
    wanted: frozenset[Layers]
    """The stages that it is about."""
    others_stand_in: bool = False
    """Whether all other stages are stand-ins, which take no memory but that of the tensors at their ends."""

    @property
    def stages(self) -> list[Layers]:
        """The layers of each device."""
        return list(pairwise(self.boundaries))

    @property
    def replaced(self) -> list[int]:
        """The devices whose stages are stand-ins."""
        return [
            index for index, each in enumerate(self.stages) if self.others_stand_in and each not in self.wanted
        ]


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak of a device with one micro-batch in flight, and what each further one adds; bytes."""

    one: int
    per_more: int
    in_flight: int
    """The most micro-batches in flight with which it was measured."""

    @classmethod
    def of(cls, one: int, many: int, in_flight: int) -> Peak:
        """Return it from the peaks with one and with ``in_flight`` micro-batches; rounded up."""
        return cls(one, -((one - many) // (in_flight - 1)) if in_flight > 1 else 0, in_flight)

    def at(self, in_flight: int) -> int:
        """Return the peak with so many micro-batches in flight."""
        return self.one + (in_flight - 1) * self.per_more


class ShortageError(Exception):
    """A run does not fit into memory, and no smaller one would tell what it is to tell."""


def runs_of(num_layers: int, num_devices: int) -> list[Run]:
    """Return the runs for L layers on G devices: L - G + 1, and some more where L is hardly larger than G.

    Raises:
        ValueError: fewer than four devices, or no more layers than devices.
    """
    if num_devices < FEWEST_DEVICES:
        raise ValueError(
            f"incremental profiling on {num_devices} devices: it takes {FEWEST_DEVICES} at least, and its result "
            "is good for any number"
        )
    if num_layers <= num_devices:
        raise ValueError(
            f"the model has {num_layers} layers and the pipeline {num_devices} devices: there is nothing to "
            "choose for mcap; split the layers more finely, or use fewer devices"
        )
    last = num_layers - num_devices + 1
    pairs = {(layer - 1, layer + 1) for layer in range(last, num_layers)}
    tails = {last: tuple(range(last + 1, num_layers + 1))}  # each layer alone
    for first in range(last - 1, 0, -1):
        tails[first] = _tail(first + 1, num_layers, num_devices - 2, pairs)
        pairs -= {*pairwise(tails[first])}
    runs = [_run((0, first, *tails[first])) for first in range(1, last + 1)]
    return runs + [Run(_around(pair, num_layers, num_devices), frozenset({pair})) for pair in sorted(pairs)]


def _run(boundaries: tuple[int, ...]) -> Run:
    """Return a run with all that may be wanted of it: the first device, layers alone, and pairs."""
    stages = pairwise(boundaries)
    return Run(boundaries, frozenset((start, stop) for start, stop in stages if start == 0 or stop - start <= 2))


def _tail(start: int, stop: int, num_stages: int, pairs: set[Layers]) -> tuple[int, ...]:
    """Return boundaries from ``start`` to ``stop`` whose stages are pairs, as many of ``pairs`` as may be."""
    if stop - start >= 2 * num_stages:
        return (*range(start, start + 2 * num_stages - 1, 2), stop)

    def value(cuts: tuple[int, ...]) -> tuple[int, list[int]]:
        found = sorted(pairs & {*pairwise(cuts)})
        return len(found), [-first for first, _ in found]

    every = ((start, *inner, stop) for inner in combinations(range(start + 1, stop), num_stages - 1))
    return max(every, key=value)


def _around(stage: Layers, num_layers: int, num_devices: int) -> tuple[int, ...]:
    """Return boundaries with this stage among them, and single layers at the front as far as they are needed."""
    start, stop = stage
    needed = num_devices + 1
    fixed = {0, start, stop, num_layers}
    others = [each for each in range(1, num_layers) if each not in fixed and not start < each < stop]
    return tuple(sorted(fixed | set(others[: needed - len(fixed)])))


def smaller(run: Run, failed: Layers, waiting: Sequence[Run]) -> list[Run]:
    """Return what is to be run in the place of ``run``, and of those after it, if a stage did not fit.

    First the other stages become stand-ins. Where a stage does not fit by itself, it grows from a later layer on.

    Raises:
        ShortageError: one layer, or two neighbours, need more than a device has.
    """
    start, stop = failed
    if not run.others_stand_in:
        return [replace(run, others_stand_in=True), *waiting]
    if failed not in run.wanted:
        raise ShortageError(f"the tensors between layers {start} and {stop} alone do not fit")
    if stop - start == 1:
        raise ShortageError(f"layer {start} alone does not fit")
    if stop - start == 2:
        raise ShortageError(f"layers {start} and {stop - 1} do not fit together")
    return [each for old in (run, *waiting) for each in _grown_from(old, stop - 2)]


def _grown_from(run: Run, first: int) -> Iterator[Run]:
    """Yield runs for what ``run`` is about, in which the stage that grows begins at layer ``first``."""
    growing = max(run.wanted, key=lambda stage: stage[1] - stage[0])
    start, stop = growing
    if stop - start < 3:
        yield run
    elif start > 0:
        boundaries = tuple(first if each == start else each for each in run.boundaries)
        yield Run(boundaries, (run.wanted - {growing}) | {(first, stop)}, others_stand_in=True)
    else:
        # One device less for the layers behind: the first one has a stand-in for the layers before.
        behind = run.boundaries[2:]
        boundaries = (0, first, stop, *behind[: len(run.boundaries) - 4], run.boundaries[-1])
        wanted = frozenset({(first, stop), (stop, behind[0])})
        yield Run(boundaries, wanted, others_stand_in=True)
        if left := run.wanted - wanted - {growing}:
            yield replace(run, wanted=left, others_stand_in=True)


def statistics(peaks: Mapping[Layers, Peak], num_layers: int, num_runs: int) -> McapProfile:
    """Return the statistics of each layer from the peaks of devices: section 3.1.

    ``mem_added`` of a layer is the difference of two stages with the same first layer n. The paper has the
    smallest n. There a layer may hide behind what a layer before it needs for an instant, and be counted too low
    where that one is on another device: so it is the largest difference of all n that were measured.
    """
    isolated, added = [peaks[layer, layer + 1] for layer in range(num_layers)], [Peak(0, 0, 0)]
    for layer in range(1, num_layers):
        firsts = [n for n, stop in peaks if stop == layer and (n, layer + 1) in peaks]
        # The last stage of a pipeline never has more than one micro-batch in flight.
        many = max(peaks[n, layer].in_flight for n in firsts) if layer < num_layers - 1 else 1
        one, most = (
            max(peaks[n, layer + 1].at(count) - peaks[n, layer].at(count) for n in firsts) for count in (1, many)
        )
        added.append(Peak.of(one, most, many))
    return McapProfile(
        isolated_bytes=tuple(each.one for each in isolated),
        isolated_bytes_per_more=tuple(each.per_more for each in isolated),
        added_bytes=tuple(each.one for each in added),
        added_bytes_per_more=tuple(each.per_more for each in added),
        num_runs=num_runs,
    )
