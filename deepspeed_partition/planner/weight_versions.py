"""Versions of the weights: which one each micro-batch uses, when it is made, and how many a stage holds at once.

In asynchronous training the pipeline never drains. The micro-batches k M to (k + 1) M - 1 are *batch* k, whose
gradients are *update* k; version v of the weights is what v updates have made, and version 0 what there was at
first. The stages of a device have their update together: update k comes the moment the last of their backwards on
batch k has ended, takes no time, and makes version k + 1. On a device that is a backward of its first stage, since
gradients go up the chain. What begins at that moment finds the new version.

- ``"stashing"``: the forward of a stage on a micro-batch uses the newest version that its device has then.
- ``"2bw"``: batch k uses version max(0, k - 1) on all stages. Its first forward must not come before that is made.
- ``"vertical-sync"``: a micro-batch uses on all stages the version that stage 0 used.

In all of them the backward uses what the forward used. A stage holds a version from the update that made it until
the next one is made, and the last backward that uses it has ended. So where nobody uses the newest version any
more, an update works in place, and where somebody does, old and new are there at once. In ``"2bw"`` these are two.

A stage of a device with several may begin its backwards on batch k + 1 before the update k of the device. Then it
holds the gradients of both: ``num_gradients``.

Method: closed form for a pattern of one micro-batch, from two whole numbers per stage (``lags`` and ``leads``);
``versions_in_order`` counts in given orders. Exact, in whole numbers; O(1) for each stage.

Source: PipeDream (SOSP 2019), section 3.3, for weight stashing and vertical sync; PipeDream-2BW
(arXiv:2006.09503), section 3.1, for two versions; the MadPipe paper, section 3, counts these as three times the
weights: two versions and one gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.planner.units import one_of

FLUSH, STASHING, TWO_VERSIONS, VERTICAL_SYNC = "flush", "stashing", "2bw", "vertical-sync"
MODES = (FLUSH, STASHING, TWO_VERSIONS, VERTICAL_SYNC)
"""What a plan may do with weights: drain the pipeline at every update, or let it run on with a version for each
micro-batch, with two versions, or with one version for each micro-batch along the whole pipeline."""
Place = tuple[int, float, float]
"""Place of an operation on micro-batch 0 in time: its period, its start in that, and its duration. Of two
operations of a device the one with the smaller place comes first."""


def checked_mode(mode: object) -> str:
    """Return a value of ``weight_versions``, if it is one.

    Raises:
        ValueError: it is not.
    """
    return one_of("weight_versions", mode, MODES)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRule:
    """How a search counts the versions of the weights that a stage holds."""

    mode: str
    """``"stashing"``, ``"2bw"`` or ``"vertical-sync"``."""
    micro_batches_per_update: int
    num_versions: int
    """Versions that each stage holds; under ``"stashing"`` with one micro-batch in flight, and more with more."""

    @classmethod
    def of(cls, mode: str, micro_batches_per_update: int, num_versions: int = 1) -> VersionRule:
        """Return the rule of a mode.

        Args:
            num_versions: of ``"vertical-sync"``, where a search takes one number after the other.
        """
        number = {STASHING: 1, TWO_VERSIONS: 2}.get(mode, num_versions)
        return cls(mode=mode, micro_batches_per_update=micro_batches_per_update, num_versions=number)

    @property
    def grows(self) -> bool:
        """Return whether a stage with more micro-batches in flight holds more versions."""
        return self.mode == STASHING

    @property
    def most_in_flight(self) -> int | None:
        """Return the most micro-batches in flight with ``num_versions``; None for no limit."""
        return None if self.grows else 1 + (self.num_versions - 1) * self.micro_batches_per_update

    def num_held(self, in_flight: int) -> int:
        """Return the versions that the stage of a device holds with so many micro-batches in flight."""
        if not self.grows:
            return self.num_versions
        return versions_at_least(in_flight, self.micro_batches_per_update)


def versions_at_least(in_flight: int, micro_batches_per_update: int) -> int:
    """Return the versions that a stage holds at once under ``"stashing"``, with so many micro-batches in flight.

    It is exact where the device has one stage. A stage of a device with several may hold one more where it has
    less in flight than M times a whole number, and one.
    """
    return 1 + -(-(in_flight - 1) // micro_batches_per_update)


@dataclass(frozen=True, slots=True)
class WeightVersions:
    """Versions of the weights in a periodic pattern of one micro-batch, from its first micro-batch on.

    Stages are numbers in the order of the chain, micro-batches, updates and versions count from 0.
    """

    mode: str
    """``"stashing"``, ``"2bw"`` or ``"vertical-sync"``."""
    micro_batches_per_update: int
    """Number M of micro-batches whose gradients make one update."""
    lags: tuple[int, ...]
    """For each stage: when its forward on micro-batch b begins, the device is through with ``b - lag``
    micro-batches: their last backwards there have ended. Where the device has one stage, that is one less than its
    micro-batches in flight."""
    leads: tuple[int, ...]
    """For each stage: when its backward on a micro-batch has ended, it is ahead of the device by so many
    micro-batches more than this one. 0 where the device has one stage."""

    @classmethod
    def of(
        cls,
        mode: str,
        micro_batches_per_update: int,
        devices: Sequence[int],
        forwards: Sequence[Place],
        backwards: Sequence[Place],
    ) -> WeightVersions:
        """Return the versions of a pattern.

        Args:
            devices: the device of each stage.
            forwards: when the forward of each stage runs on micro-batch 0.
            backwards: likewise its backward.
        """
        first = [devices.index(device) for device in devices]
        ends = [backwards[stage] for stage in first]
        return cls(
            mode,
            micro_batches_per_update,
            tuple(_done_behind(forward, end) for forward, end in zip(forwards, ends, strict=True)),
            tuple(_done_behind(backward, end) for backward, end in zip(backwards, ends, strict=True)),
        )

    def version(self, stage: int, micro_batch: int) -> int:
        """Return the version that a stage uses on a micro-batch, in its forward and its backward."""
        return max(0, (micro_batch - self._lag(stage)) // self.micro_batches_per_update)

    def delay(self, stage: int, micro_batch: int) -> int:
        """Return the update delay: by how many updates a micro-batch's weights are older than what it changes."""
        return micro_batch // self.micro_batches_per_update - self.version(stage, micro_batch)

    def made_after(self, version: int) -> int:
        """Return the micro-batch whose last backward on a device makes a version there; -1 for version 0."""
        return version * self.micro_batches_per_update - 1

    def last_micro_batch(self, stage: int, version: int) -> int:
        """Return the last micro-batch that uses a version on a stage."""
        return (version + 1) * self.micro_batches_per_update + self._lag(stage) - 1

    def num_held(self, stage: int) -> int:
        """Return the most versions that a stage holds at once."""
        in_flight = self._lag(stage) - self.leads[stage] + 1
        return max(1, versions_at_least(in_flight, self.micro_batches_per_update))

    def _lag(self, stage: int) -> int:
        """Return with how many micro-batches less than came before it a micro-batch finds its version made."""
        if self.mode == TWO_VERSIONS:
            return self.micro_batches_per_update
        return self.lags[0 if self.mode == VERTICAL_SYNC else stage]

    def num_gradients(self, stage: int) -> int:
        """Return the most updates for which a stage holds gradients at once: 1 where its device has one stage."""
        return 1 + -(-self.leads[stage] // self.micro_batches_per_update)

    def why_not(self) -> str | None:
        """Return a sentence on the condition of the mode that is broken; None where it holds.

        Two versions suffice where the update before the last one is done when a batch begins.
        """
        if self.mode != TWO_VERSIONS:
            return None
        most = VersionRule.of(self.mode, self.micro_batches_per_update).most_in_flight or 0
        stage = max(range(len(self.lags)), key=self.lags.__getitem__)
        lag = self.lags[stage]
        if lag < most:
            return None
        return (
            f"stage {stage} has {lag + 1} micro-batches on their way to an update of its device, and two versions "
            f"of the weights are enough for {most}, one more than the {self.micro_batches_per_update} of an "
            f"update: plan with --weight-versions 2bw and this --micro-batches, give --micro-batches {lag} or "
            "more, or use stashing"
        )


def _done_behind(before: Place, after: Place) -> int:
    """Return the periods from one operation to a later one on the path of a micro-batch, rounded down.

    So many other micro-batches, later ones, go through the first operation before the second one comes; or as many
    as that, where the first operation begins, are not through the second one.
    """
    return max(0, after[0] - before[0] - (after[1:] <= before[1:]))


@dataclass(frozen=True, slots=True)
class CountedVersions:
    """Versions of the weights in given orders of the devices, counted one operation after the other."""

    versions: Mapping[tuple[int, int], int]
    """Version that a stage uses on a micro-batch, by both numbers."""
    updates: tuple[tuple[tuple[int, int], ...], ...]
    """For each device its updates: the number of the update, and the place in the order behind which it comes."""
    num_held: tuple[int, ...]
    """Most versions that each stage holds at once."""
    num_gradients: tuple[int, ...]
    """Most updates for which each stage holds gradients at once."""


def versions_in_order(mode: str, micro_batches_per_update: int, orders: Sequence[Order]) -> CountedVersions:
    """Count the versions of the weights in the orders of all devices, which need be no pattern.

    Args:
        mode: ``"stashing"``, ``"2bw"`` or ``"vertical-sync"``.
        micro_batches_per_update: number M of micro-batches whose gradients make one update.
        orders: operations of each device, in order, from micro-batch 0 on: forwards (``F0``, ``f0``) and backwards
            (``B0``, or ``W0`` as the end of one in halves); others change nothing. Batches whose backwards are not
            all there have no update, and what a forward without a backward uses is held to the end.

    Raises:
        ValueError: under ``"2bw"`` a batch begins before its version is made; the message says where.
    """
    made = [_updates_of(order, micro_batches_per_update) for order in orders]
    newest: dict[tuple[int, int], int] = {}
    for order, updates in zip(orders, made, strict=True):
        places = sorted(place for _, place in updates)
        done = 0
        for place, (name, micro_batch) in enumerate(order):
            while done < len(places) and places[done] < place:
                done += 1
            if name[0] in "Ff":
                newest[int(name[1:]), micro_batch] = done
    versions = {key: _used(mode, micro_batches_per_update, key, newest) for key in newest}
    for (stage, micro_batch), version in versions.items():
        if version > newest[stage, micro_batch]:
            raise ValueError(
                f"stage {stage} begins micro-batch {micro_batch} with version {newest[stage, micro_batch]} of the "
                f"weights, and {mode} wants version {version}: let fewer micro-batches be in flight"
            )
    num_stages = 1 + max((stage for stage, _ in versions), default=-1)
    held, gradients = [1] * num_stages, [1] * num_stages
    for order, updates in zip(orders, made, strict=True):
        for stage in {int(name[1:]) for name, _ in order}:
            held[stage] = _most_held(stage, order, updates, versions)
            gradients[stage] = _most_gradients(stage, order, updates, micro_batches_per_update)
    return CountedVersions(versions, tuple(map(tuple, made)), tuple(held), tuple(gradients))


def _updates_of(order: Order, per_update: int) -> list[tuple[int, int]]:
    """Return the updates of a device: their numbers, and the place of the backward behind which each comes."""
    stages = {name[1:] for name, _ in order}
    ended: dict[int, list[int]] = defaultdict(list)
    for place, (name, micro_batch) in enumerate(order):
        if name[0] in "BW":
            ended[micro_batch // per_update].append(place)
    return [
        (batch, max(places)) for batch, places in sorted(ended.items()) if len(places) == len(stages) * per_update
    ]


def _used(mode: str, per_update: int, key: tuple[int, int], newest: Mapping[tuple[int, int], int]) -> int:
    stage, micro_batch = key
    if mode == TWO_VERSIONS:
        return max(0, micro_batch // per_update - 1)
    return newest[0 if mode == VERTICAL_SYNC else stage, micro_batch]


def _most_held(
    stage: int, order: Order, updates: Sequence[tuple[int, int]], versions: Mapping[tuple[int, int], int]
) -> int:
    """Return the most versions that a stage holds at once in the order of its device."""
    end = len(order)
    last_use: dict[int, int] = defaultdict(int)
    ends = {
        micro_batch: place
        for place, (name, micro_batch) in enumerate(order)
        if name[0] in "BW" and int(name[1:]) == stage
    }
    for (other, micro_batch), version in versions.items():
        if other == stage:
            last_use[version] = max(last_use[version], ends.get(micro_batch, end))
    births = {0: -1} | {number + 1: place for number, place in updates}
    spans = [
        (birth, max(last_use.get(version, birth), births.get(version + 1, end)))
        for version, birth in births.items()
    ]
    # What ends behind a backward is gone when the update behind the same one makes the next version.
    return max(sum(1 for other in spans if other[0] <= span[0] < other[1]) for span in spans)


def _most_gradients(stage: int, order: Order, updates: Sequence[tuple[int, int]], per_update: int) -> int:
    """Return the most updates for which a stage holds gradients at once in the order of its device."""
    ends = dict(updates)
    begins: dict[int, int] = {}
    for place, (name, micro_batch) in enumerate(order):
        if name[0] in "BW" and int(name[1:]) == stage:
            begins.setdefault(micro_batch // per_update, place)
    spans = [(begin, ends.get(batch, len(order))) for batch, begin in begins.items()]
    return max((sum(1 for other in spans if other[0] <= span[0] <= other[1]) for span in spans), default=1)
