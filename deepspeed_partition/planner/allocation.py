"""The allocation: the partition of the chain into stages, and the device of each stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from deepspeed_partition.planner.problem import Chain

Rematerialize = bool | tuple[tuple[int, int], ...]
"""Recomputation of a stage: False, True (the whole stage as one block), or the ranges of layers that are
recomputed, each as one block."""


Blocks = tuple[tuple[int, int], ...]
"""Ranges of layers (half-open) of a stage that are recomputed, each as one block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive layers that run together on one device.

    Raises:
        ValueError: ``layers`` is empty, or a range to recompute is not within the stage.
    """

    layers: tuple[int, int]
    """Layers of the stage, half-open: its first layer, and the first layer of the next stage."""
    device: int
    """Number of the device, from 0."""
    rematerialize: Rematerialize = False
    """Layers that are recomputed in the backward; False: none."""

    def __post_init__(self) -> None:
        start, stop = self.layers
        if not 0 <= start < stop:
            raise ValueError(f"layers {start} to {stop} are no stage: a stage has at least one layer")
        if self.device < 0:
            raise ValueError(f"device {self.device} of layers {start} to {stop} is negative")
        end = start
        for first, last in self.blocks:
            if not end <= first < last <= stop:
                raise ValueError(
                    f"rematerialize range [{first}, {last}] is not within layers [{start}, {stop}] "
                    "in order and without overlap"
                )
            end = last

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of layers that are recomputed, each as one block; half-open."""
        if isinstance(self.rematerialize, bool):
            return (self.layers,) if self.rematerialize else ()
        return self.rematerialize


@dataclass(frozen=True, slots=True)
class Allocation:
    """Stages in the order of the chain, each on a device.

    ``stages[i]`` runs on device ``stages[i].device``; a device may have several stages (virtual stages).

    Raises:
        ValueError: the stages do not follow one another from layer 0.
    """

    stages: tuple[Stage, ...]
    """Stages in the order of the chain, at least one."""

    def __post_init__(self) -> None:
        end = 0
        for index, stage in enumerate(self.stages):
            if stage.layers[0] != end:
                raise ValueError(f"stage {index} begins at layer {stage.layers[0]}, not at {end}")
            end = stage.layers[1]
        if not self.stages:
            raise ValueError("an allocation has at least one stage")

    @classmethod
    def contiguous(cls, boundaries: Sequence[int]) -> Allocation:
        """Make one stage per device: ``[0, 3, 8]`` puts layers 0 to 3 on device 0, and 3 to 8 on device 1."""
        stages = enumerate(pairwise(boundaries))
        return cls(tuple(Stage(layers=layers, device=device) for device, layers in stages))

    @property
    def boundaries(self) -> tuple[int, ...]:
        """First layer of each stage, and the number of layers: ``parts`` of DeepSpeed."""
        return (0, *(stage.layers[1] for stage in self.stages))

    @property
    def is_contiguous(self) -> bool:
        """Return whether each device has one stage, in the order of the devices."""
        return all(stage.device == index for index, stage in enumerate(self.stages))

    def crossing(self, cut: int) -> bool:
        """Return whether the tensor between stage ``cut`` and the next one travels to another device."""
        return self.stages[cut].device != self.stages[cut + 1].device


@dataclass(frozen=True, slots=True)
class Placement:
    """Allocation as solvers compare it: two that differ in nothing but the numbers of their devices are equal.

    Stages that follow one another on a device are one stage. Devices are numbered in the order in which the chain
    first reaches them, since they are all alike.
    """

    cuts: tuple[int, ...]
    """Boundaries: the first layer of each stage, and the number of layers."""
    devices: tuple[int, ...]
    """Device of each stage; that of the next stage is another one."""
    recomputed: tuple[Blocks, ...] = ()
    """Ranges of layers that are recomputed, each as one block, for each stage; empty where none is anywhere."""

    @classmethod
    def of(cls, cuts: Sequence[int], devices: Sequence[int]) -> Placement:
        """Make a placement: stages that follow one another on a device become one; devices are renumbered."""
        number: dict[int, int] = {}
        merged_cuts, merged = [0], list[int]()
        for stop, device in zip(cuts[1:], devices, strict=True):
            device = number.setdefault(device, len(number))
            if merged and merged[-1] == device:
                merged_cuts[-1] = stop
            else:
                merged.append(device)
                merged_cuts.append(stop)
        return cls(tuple(merged_cuts), tuple(merged))

    @classmethod
    def contiguous(cls, cuts: tuple[int, ...], recomputed: tuple[Blocks, ...] = ()) -> Placement:
        return cls(cuts, tuple(range(len(cuts) - 1))).recomputing(recomputed)

    def recomputing(self, recomputed: tuple[Blocks, ...]) -> Placement:
        """Return the allocation with these layers of each stage recomputed."""
        return replace(self, recomputed=recomputed if any(recomputed) else ())

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        """Ranges of layers that are recomputed, for each stage."""
        return self.recomputed or ((),) * len(self.devices)

    @property
    def stages(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Layers (half-open) and device of each stage."""
        return zip(pairwise(self.cuts), self.devices, strict=True)

    @property
    def is_contiguous(self) -> bool:
        """Return whether each device has one stage."""
        return len(set(self.devices)) == len(self.devices)

    @property
    def num_shared(self) -> int:
        """Number of devices with several stages."""
        return sum(1 for device in set(self.devices) if self.devices.count(device) > 1)


def checked_partition(boundaries: Iterable[int], chain: Chain) -> tuple[int, ...]:
    """Check boundaries that a user wrote, and return them as a tuple.

    Raises:
        ValueError: they do not increase from 0 to the number of layers; one sentence says what is wrong.
    """
    cuts = tuple(boundaries)
    if any(isinstance(each, bool) or not isinstance(each, int) for each in cuts):
        raise ValueError(f"boundaries {list(cuts)} are not whole numbers")
    rising = all(left < right for left, right in pairwise(cuts))
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != chain.num_layers or not rising:
        raise ValueError(f"boundaries {list(cuts)} do not rise from 0 to {chain.num_layers}, the number of layers")
    return cuts
