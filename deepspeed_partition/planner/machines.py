"""Machines as they are: unlike devices, links in levels, prices (``madpipe-machines/1``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from os import PathLike
from typing import Any

from deepspeed_partition.planner.errors import MachinesFormatError
from deepspeed_partition.planner.io import files

MACHINES_FORMAT = "madpipe-machines/1"
MOST_DEVICES = 4096
"""Largest number of devices of a machines file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Devices that are alike and follow one another."""

    count: int
    memory_bytes: int
    """Memory of each of them, in bytes."""
    speed: float = 1.0
    """Number that divides the seconds of each layer, as the chain has them."""
    name: str = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLevel:
    """Links between devices of the same group, of so many consecutive devices."""

    bandwidth: float
    """Bytes per second between any two devices whose first common level this is."""
    latency_seconds: float = 0.0
    group: int | None = None
    """Number of devices of a group, which follow one another. None: all devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Devices, numbered in the order of the list, the links between them, and what they cost.

    Raises:
        ValueError: a number is out of its range, or levels do not lie within one another.
    """

    devices: tuple[DeviceGroup, ...]
    links: tuple[LinkLevel, ...]
    """Levels from the inside out."""
    price_per_device_hour: tuple[float, ...] = ()
    """Price of one device of each entry of ``devices`` for an hour; empty where it is not known."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("devices is empty: give at least one")
        for index, group in enumerate(self.devices):
            _check_number(f"devices[{index}].count", group.count, 1, MOST_DEVICES)
            _check_number(f"devices[{index}].memory_bytes", group.memory_bytes, 1, 2**60)
            _check_number(f"devices[{index}].speed", group.speed, 1e-3, 1e3)
        if self.num_devices > MOST_DEVICES:
            raise ValueError(f"devices are {self.num_devices} together: at most {MOST_DEVICES}")
        if not self.links:
            raise ValueError("links is empty: give at least one level")
        for index, level in enumerate(self.links):
            _check_number(f"links[{index}].bandwidth", level.bandwidth, 1e-300, 1e300)
            _check_number(f"links[{index}].latency_seconds", level.latency_seconds, 0, 1e9)
            if level.group is not None:
                _check_number(f"links[{index}].group", level.group, 1, MOST_DEVICES)
        self._check_levels()
        if self.price_per_device_hour and len(self.price_per_device_hour) != len(self.devices):
            raise ValueError(
                f"price_per_device_hour has {len(self.price_per_device_hour)} entries and devices has "
                f"{len(self.devices)}: it must have one for each, or none"
            )
        for index, price in enumerate(self.price_per_device_hour):
            _check_number(f"price_per_device_hour[{index}]", price, 0, 1e9)

    def _check_levels(self) -> None:
        sizes = [level.group for level in self.links]
        if None in sizes[:-1]:
            index = sizes.index(None)
            raise ValueError(
                f"links[{index}].group is left out, so this level joins all devices, and {len(sizes) - index - 1} "
                "more come after it: the level without a group is the last one"
            )
        known = [size for size in sizes if size is not None]
        for index, (inner, outer) in enumerate(pairwise(known), 1):
            if outer % inner or outer == inner:
                raise ValueError(
                    f"links[{index}].group is {outer}: it must be a larger multiple of the group before it, "
                    f"{inner}"
                )
        if sizes[-1] is not None and sizes[-1] < self.num_devices:
            raise ValueError(
                f"links[{len(sizes) - 1}].group is {sizes[-1]} and there are {self.num_devices} devices: leave "
                "group out of the last level, which joins all"
            )

    @property
    def num_devices(self) -> int:
        """Return the number of all devices."""
        return sum(group.count for group in self.devices)

    def group_of(self, device: int) -> int:
        """Return the entry of ``devices`` that a device belongs to."""
        ends = accumulate(group.count for group in self.devices)
        return next(index for index, end in enumerate(ends) if device < end)

    def level_between(self, one: int, other: int) -> LinkLevel:
        """Return the first level whose group has both devices."""
        return next(
            level for level in self.links if level.group is None or one // level.group == other // level.group
        )

    def price_per_hour(self, devices: Sequence[int]) -> float | None:
        """Return what these devices cost for an hour; None where prices are not known."""
        if not self.price_per_device_hour:
            return None
        return sum(self.price_per_device_hour[self.group_of(device)] for device in devices)

    def first(self, num_devices: int) -> Machines:
        """Return the first ``num_devices`` of these machines, linked and priced as they are.

        Raises:
            ValueError: there are not so many.
        """
        if not 1 <= num_devices <= self.num_devices:
            raise ValueError(f"{num_devices} devices of {self.num_devices}: take 1 to {self.num_devices}")
        groups: list[DeviceGroup] = []
        prices: list[float] = []
        left = num_devices
        for index, group in enumerate(self.devices):
            if left > 0:
                groups.append(
                    DeviceGroup(
                        count=min(left, group.count),
                        memory_bytes=group.memory_bytes,
                        speed=group.speed,
                        name=group.name,
                    )
                )
                prices += self.price_per_device_hour[index : index + 1]
                left -= group.count
        return Machines(devices=tuple(groups), links=self.links, price_per_device_hour=tuple(prices))

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of a machines file, without its format; a part of a plan's platform, too."""
        data: dict[str, Any] = {
            "devices": [{key.name: getattr(group, key.name) for key in fields(group)} for group in self.devices],
            "links": [
                {
                    key.name: getattr(level, key.name)
                    for key in fields(level)
                    if getattr(level, key.name) is not None
                }
                for level in self.links
            ],
        }
        if self.price_per_device_hour:
            data["price_per_device_hour"] = list(self.price_per_device_hour)
        return data

    @classmethod
    def of_keys(cls, data: Mapping[str, Any]) -> Machines:
        """Return the machines of a mapping that a schema has accepted.

        Raises:
            ValueError: a number is out of its range, or levels do not lie within one another.
        """
        return cls(
            devices=tuple(
                DeviceGroup(
                    count=int(each["count"]),
                    memory_bytes=int(each["memory_bytes"]),
                    speed=float(each.get("speed", 1.0)),
                    name=each.get("name", "device"),
                )
                for each in data["devices"]
            ),
            links=tuple(
                LinkLevel(
                    bandwidth=float(each["bandwidth"]),
                    latency_seconds=float(each.get("latency_seconds", 0.0)),
                    group=None if each.get("group") is None else int(each["group"]),
                )
                for each in data["links"]
            ),
            price_per_device_hour=tuple(map(float, data.get("price_per_device_hour", ()))),
        )

    @classmethod
    def from_dict(cls, data: object, *, where: str = "machines") -> Machines:
        """Read the JSON form, ``madpipe-machines/1``; ``where`` (a file's name) begins the message of an error.

        Raises:
            MachinesFormatError: ``data`` does not follow the format; the message names the path of the field.
        """
        mapping = files.validated(data, schema="machines", where=where, error=MachinesFormatError)
        try:
            return cls.of_keys(mapping)
        except ValueError as error:
            raise MachinesFormatError(f"{where}: {error}") from None

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Machines:
        """Read a machines file.

        Raises:
            MachinesFormatError: the file cannot be read, or is none; the message names the file and the field.
        """
        return cls.from_dict(files.read_json(path, error=MachinesFormatError), where=str(path))

    def save(self, path: str | PathLike[str]) -> None:
        """Write a machines file, as a whole or not at all.

        Raises:
            OSError: the folder cannot be written to.
        """
        files.write_json(path, {"format": MACHINES_FORMAT} | self.to_dict())


def pipelines_of(num_devices: int, num_pipelines: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield the ways to divide devices into pipelines: for each pipeline the device of each of its places.

    First that of DeepSpeed's grid, where the replicas of a stage follow one another; then that in which the
    devices of a pipeline do.
    """
    length = num_devices // num_pipelines
    yield tuple(
        tuple(place * num_pipelines + replica for place in range(length)) for replica in range(num_pipelines)
    )
    if num_pipelines > 1 and length > 1:
        yield tuple(tuple(replica * length + place for place in range(length)) for replica in range(num_pipelines))


def _check_number(where: str, value: object, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} is {value!r}, not a number")
    if not least <= value <= most:
        raise ValueError(f"{where} is {value:g}: it must be from {least:g} to {most:g}")
