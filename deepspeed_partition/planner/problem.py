"""The problem: the layers of a model, and the devices to run them on."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

from deepspeed_partition.planner.errors import ChainFormatError
from deepspeed_partition.planner.io import files
from deepspeed_partition.planner.machines import LinkLevel, Machines
from deepspeed_partition.planner.mcap_profile import McapProfile
from deepspeed_partition.planner.units import shown
from deepspeed_partition.planner.warm_up_report import TrialRun

CHAIN_FORMAT = "madpipe-chain/1"
LONGEST_SECONDS = 1e9
"""Longest time of a layer or a transfer, in seconds (31 years): sums stay exact in the planner's integer clock."""
LARGEST_BYTES = 2**53
"""Largest single size, in bytes (9 PB): an integer that a float holds exactly."""
LARGEST_MEMORY_BYTES = 2**60
"""Largest memory of a device, in bytes (1 EB)."""
LARGEST_FLOAT = sys.float_info.max
HALVES_TOLERANCE = 1e-6
"""Relative difference between a backward and the sum of its halves that may be rounding."""
DUPLEX = ("half", "full")
"""How links may carry transfers."""
Resource = tuple[str, int] | tuple[str, int, int]
"""What one transfer at a time occupies: a link and its two devices, or one direction of the port of a host."""


def _seconds(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} is {shown(value)}, not a number of seconds")
    if not 0 <= value <= LONGEST_SECONDS:  # false for NaN, too
        raise ValueError(f"{where} is {shown(value)}: seconds are finite, from 0 to {LONGEST_SECONDS:g}")
    return float(value) + 0.0  # -0.0 is 0.0, for the digest, too


def _whole(where: str, value: object, smallest: int, largest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} is {shown(value)}, not a whole number")
    if not smallest <= value <= largest or value != int(value):
        raise ValueError(f"{where} is {shown(value)}: it must be a whole number from {smallest} to {largest}")
    return int(value)


def _bytes(where: str, value: object) -> int:
    return _whole(where, value, 0, LARGEST_BYTES)


_SIZES = (
    "weight_bytes",
    "output_bytes",
    "transient_bytes",
    "cut_stash_bytes",
    "gradient_bytes",
    "reduction_bytes",
    "optimizer_transient_bytes",
)
_OPTIONAL_SIZES = (
    "stash_bytes",
    "num_trainable_parameters",
    "running_bytes",
    "forward_running_bytes",
    "training_bytes",
    "first_backward_bytes",
    "weight_stash_bytes",
)
_LATER_FIELDS: dict[str, Any] = {
    "cut_stash_bytes": 0, "running_bytes": None, "forward_running_bytes": None, "recomputable": True,
    "training_bytes": None, "gradient_bytes": 0, "reduction_bytes": 0, "optimizer_transient_bytes": 0,
    "first_backward_bytes": None, "shared_weights": (), "backward_input_seconds": None,
    "backward_weight_seconds": None, "weight_stash_bytes": None,
}  # fmt: skip
"""Fields that chains once did not have, and the values with which they mean what they meant: a chain without them
keeps its digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """Cost of one layer for one micro-batch: times in seconds, sizes in bytes.

    Source: the MadPipe paper, section 3, whose stash is the layer's input; transient bytes are an addition.

    Raises:
        ValueError: a number is negative, not finite, or no number.
    """

    name: str
    """Name of the layer; no plan depends on it."""
    forward_seconds: float
    """Seconds of its forward."""
    backward_seconds: float
    """Seconds of its backward, recomputation not included."""
    weight_bytes: int
    """Bytes of the parameters alone; ``Platform.weight_copies`` multiplies them."""
    output_bytes: int
    """Bytes sent to the next stage if the chain is cut after this layer; a gradient of this size comes back."""
    stash_bytes: int | None = None
    """Bytes kept from the forward for the backward: once per micro-batch in flight. None: the bytes of the
    layer's input, as in the paper; a ``Chain`` fills it in."""
    transient_bytes: int = 0
    """Bytes needed only while the layer runs, on top of the rest. Nobody reads them where ``running_bytes`` is
    known."""
    cut_stash_bytes: int = 0
    """Bytes that a stage which ends with this layer keeps besides, per micro-batch in flight: the output, where
    this layer and the next one both keep it, and ``stash_bytes`` of the next one has it."""
    running_bytes: int | None = None
    """Most bytes in use while the layer runs, forward or backward, for the micro-batch that it runs on: its input,
    its own stash, its output, gradients and work spaces, but neither weights and their gradients nor what the
    layers before it keep. None: not measured, ``transient_bytes`` come on top of the whole stage."""
    forward_running_bytes: int | None = None
    """Most bytes in use while the layer runs forward, counted as ``running_bytes`` are. They count for forwards of
    a step; in a steady state ``running_bytes`` count for both. None: as ``running_bytes``."""
    recomputable: bool = True
    """Whether the forward of the layer may run twice for one micro-batch."""
    training_bytes: int | None = None
    """Bytes that training keeps for the weights, with gradients, master copies, the optimizer's states and the
    layer's buffers. None: ``Platform.weight_copies`` times ``weight_bytes``."""
    gradient_bytes: int = 0
    """Part of ``training_bytes`` that comes with the first backward of this layer in a step: the gradients."""
    first_backward_bytes: int | None = None
    """How many of ``gradient_bytes`` count on top of ``running_bytes`` while the layer runs its first backward of
    a step: gradients come one after the other, and what the layer keeps goes. None: all of them."""
    reduction_bytes: int = 0
    """Bytes needed besides when the gradients of a step are complete and are brought together: copies of the
    gradients of this layer."""
    optimizer_transient_bytes: int = 0
    """Bytes that the optimizer needs besides while it steps over the weights of this layer."""
    backward_input_seconds: float | None = None
    """Seconds of the first half of the backward, the gradient of the layer's input. None: the backward is one
    operation."""
    backward_weight_seconds: float | None = None
    """Seconds of the second half, the gradients of the weights; with the first half ``backward_seconds``."""
    weight_stash_bytes: int | None = None
    """Bytes that stay from the start of the first half of the backward to the end of the second. None: the stash
    of the layer."""
    shared_weights: tuple[tuple[str, int], ...] = ()
    """Weights that are one with those of other layers, by name, in bytes (part of ``weight_bytes``): a device that
    has several of these layers keeps them once. A mapping is taken, too."""
    type: str | None = None
    """Class of the layer, which ``type:REGEX`` matches. None: its name; a ``Chain`` fills it in."""
    num_trainable_parameters: int | None = None
    """Number that ``parameters`` balances. None: ``weight_bytes`` stands for it; a ``Chain`` fills it in."""
    forward_spread_seconds: float | None = field(default=None, compare=False)
    """Interquartile range of the measured forwards, in seconds. It says how far to trust them; no plan depends on
    it."""
    backward_spread_seconds: float | None = field(default=None, compare=False)
    """Interquartile range of the measured backwards, in seconds."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"the name of a layer is a string, not {shown(self.name)}")
        if self.type is not None and not isinstance(self.type, str):
            raise ValueError(f"layer {shown(self.name)}: type is a string, not {shown(self.type)}")
        for key in (
            "forward_seconds",
            "backward_seconds",
            "forward_spread_seconds",
            "backward_spread_seconds",
            "backward_input_seconds",
            "backward_weight_seconds",
        ):
            value = getattr(self, key)
            if value is not None or key in ("forward_seconds", "backward_seconds"):
                object.__setattr__(self, key, _seconds(f"layer {shown(self.name)}: {key}", value))
        for key in (*_SIZES, *_OPTIONAL_SIZES):
            value = getattr(self, key)
            if value is not None or key in _SIZES:
                object.__setattr__(self, key, _bytes(f"layer {shown(self.name)}: {key}", value))
        if not isinstance(self.recomputable, bool):
            raise ValueError(
                f"layer {shown(self.name)}: recomputable is {shown(self.recomputable)}, not true or false"
            )
        if self.gradient_bytes > (self.training_bytes or 0):
            raise ValueError(
                f"layer {shown(self.name)}: gradient_bytes is {self.gradient_bytes}, and training_bytes, of which "
                f"they are a part, {'is left out' if self.training_bytes is None else self.training_bytes}"
            )
        if self.forward_running_bytes is not None and self.forward_running_bytes > (self.running_bytes or 0):
            raise ValueError(
                f"layer {shown(self.name)}: forward_running_bytes is {self.forward_running_bytes}, more than "
                f"running_bytes, which {'are left out' if self.running_bytes is None else self.running_bytes}"
            )
        object.__setattr__(self, "shared_weights", self._checked_shares())
        self._check_halves()

    def _check_halves(self) -> None:
        """Refuse a backward of one half, and halves that are not the whole."""
        halves = [self.backward_input_seconds, self.backward_weight_seconds]
        known = [seconds for seconds in halves if seconds is not None]
        if len(known) == 1:
            raise ValueError(
                f"layer {shown(self.name)}: backward_input_seconds and backward_weight_seconds are the two halves "
                "of the backward: give both, or none"
            )
        if known and abs(sum(known) - self.backward_seconds) > HALVES_TOLERANCE * self.backward_seconds:
            raise ValueError(
                f"layer {shown(self.name)}: backward_input_seconds and backward_weight_seconds are {sum(known)} "
                f"together, and backward_seconds is {self.backward_seconds}"
            )

    def _checked_shares(self) -> tuple[tuple[str, int], ...]:
        where = f"layer {shown(self.name)}: shared_weights"
        pairs = self.shared_weights.items() if isinstance(self.shared_weights, Mapping) else self.shared_weights
        shares = {}
        for key, size in pairs:
            if not isinstance(key, str):
                raise ValueError(f"{where}: the name {shown(key)} is no string")
            shares[key] = _bytes(f"{where} {shown(key)}", size)
        if sum(shares.values()) > self.weight_bytes:
            raise ValueError(f"{where} are {sum(shares.values())} bytes of {self.weight_bytes}")
        return tuple(sorted(shares.items()))

    @property
    def compute_seconds(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A model as a chain of L layers; each reads only the output of the one before it.

    Two chains are equal where everything that a plan depends on is equal. Source: the MadPipe paper, section 3.

    Raises:
        ValueError: there are no layers, or a number is malformed.
    """

    input_bytes: int
    """Bytes of the input of the first layer."""
    layers: tuple[LayerProfile, ...]
    """The L layers, with every optional field filled in."""
    name: str = "chain"
    """Name of the model, for messages and tables."""
    micro_batch_size: int | None = None
    """Samples per micro-batch, for which times and sizes were measured; None where it is not known."""
    hardware: str | None = None
    """Device on which the layers were measured; None where it is not known."""
    warm_up: TrialRun | None = field(default=None, compare=False)
    """Other measurements of the warm-up, where layers were measured in training; no part of the digest."""
    mcap: McapProfile | None = None
    """What mCAP's incremental profiling found, for the algorithm ``mcap`` alone; no part of the digest."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_bytes", _bytes("input_bytes", self.input_bytes))
        if not isinstance(self.layers, Sequence) or not all(
            isinstance(each, LayerProfile) for each in self.layers
        ):
            raise ValueError(f"layers is {shown(self.layers)}, not a sequence of LayerProfile")
        if not self.layers:
            raise ValueError("layers is empty: a chain has at least one layer")
        if not isinstance(self.name, str):
            raise ValueError(f"the name of a chain is a string, not {shown(self.name)}")
        if self.micro_batch_size is not None:
            size = _whole("micro_batch_size", self.micro_batch_size, 1, LARGEST_BYTES)
            object.__setattr__(self, "micro_batch_size", size)
        if self.hardware is not None and not isinstance(self.hardware, str):
            raise ValueError(f"hardware is {shown(self.hardware)}, not a string")
        filled = []
        for index, layer in enumerate(self.layers):
            stash = layer.stash_bytes
            trainable = layer.num_trainable_parameters
            filled.append(
                replace(
                    layer,
                    stash_bytes=(self.layers[index - 1].output_bytes if index else self.input_bytes)
                    if stash is None
                    else stash,
                    type=layer.name if layer.type is None else layer.type,
                    num_trainable_parameters=layer.weight_bytes if trainable is None else trainable,
                )
            )
        object.__setattr__(self, "layers", tuple(filled))
        if self.mcap is not None and self.mcap.num_layers != len(filled):
            raise ValueError(f"mcap is of {self.mcap.num_layers} layers and the chain has {len(filled)}")
        total = self.input_bytes + sum(
            layer.weight_bytes
            + layer.output_bytes
            + self.stash(layer)
            + layer.transient_bytes
            + layer.cut_stash_bytes
            + layer.reduction_bytes
            + layer.optimizer_transient_bytes
            + (layer.running_bytes or 0)
            + (layer.training_bytes or 0)
            for layer in self.layers
        )
        if total > 2**58:
            raise ValueError(f"the sizes of the layers add up to {total} bytes, more than 2**58")

    @property
    def num_layers(self) -> int:
        """Number of layers, L."""
        return len(self.layers)

    @property
    def compute_seconds(self) -> float:
        """Seconds of forward and backward of the whole chain, for one micro-batch: U(1, L) of the paper."""
        return math.fsum(layer.compute_seconds for layer in self.layers)

    def boundary_bytes(self, boundary: int) -> int:
        """Return the bytes of the tensor over ``boundary``: a_l of the paper for l = boundary, the input for 0."""
        return self.layers[boundary - 1].output_bytes if boundary else self.input_bytes

    @staticmethod
    def stash(layer: LayerProfile) -> int:
        """Return ``stash_bytes`` of a layer of a chain, where it is always known."""
        assert layer.stash_bytes is not None
        return layer.stash_bytes

    def digest(self) -> str:
        """Return ``sha256:...`` over everything that a plan depends on; names do not count."""
        layers = []
        for layer in self.layers:
            layers.append({
                "forward_seconds": layer.forward_seconds,
                "backward_seconds": layer.backward_seconds,
                "weight_bytes": layer.weight_bytes,
                "output_bytes": layer.output_bytes,
                "stash_bytes": layer.stash_bytes,
                "transient_bytes": layer.transient_bytes,
                "type": layer.type,
                "num_trainable_parameters": layer.num_trainable_parameters,
            } | _later_fields(layer))  # fmt: skip
        text = json.dumps(
            {"input_bytes": self.input_bytes, "layers": layers}, sort_keys=True, separators=(",", ":")
        )
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, ``madpipe-chain/1``; seconds and bytes."""
        head: dict[str, Any] = {"format": CHAIN_FORMAT, "name": self.name}
        if self.micro_batch_size is not None:
            head["micro_batch_size"] = self.micro_batch_size
        if self.hardware is not None:
            head["hardware"] = self.hardware
        keys = (
            "name", "forward_seconds", "backward_seconds", "weight_bytes", "output_bytes", "stash_bytes",
            "transient_bytes", "type", "num_trainable_parameters", "forward_spread_seconds",
            "backward_spread_seconds",
        )  # fmt: skip
        layers = [
            {key: getattr(layer, key) for key in keys if getattr(layer, key) is not None} | _later_fields(layer)
            for layer in self.layers
        ]
        tail = {} if self.warm_up is None else {"warm_up": self.warm_up.to_dict()}
        if self.mcap is not None:
            tail["mcap"] = self.mcap.to_dict()
        return head | {"input_bytes": self.input_bytes, "layers": layers} | tail

    @classmethod
    def from_dict(cls, data: object, *, where: str = "chain") -> Chain:
        """Read the JSON form; ``where`` (a file's name) begins the message of an error.

        Raises:
            ChainFormatError: ``data`` does not follow the format; the message names the path of the field.
        """
        mapping = files.validated(data, schema="chain", where=where, error=ChainFormatError)
        known = LayerProfile.__dataclass_fields__
        try:
            return cls(
                name=mapping.get("name", "chain"),
                micro_batch_size=mapping.get("micro_batch_size"),
                hardware=mapping.get("hardware"),
                input_bytes=mapping["input_bytes"],
                layers=tuple(
                    LayerProfile(**{key: value for key, value in layer.items() if key in known})
                    for layer in mapping["layers"]
                ),
                warm_up=TrialRun.from_dict(mapping["warm_up"]) if "warm_up" in mapping else None,
                mcap=McapProfile.from_dict(mapping["mcap"]) if "mcap" in mapping else None,
            )
        except ValueError as error:
            raise ChainFormatError(f"{where}: {error}") from None

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Chain:
        """Read a chain file, or PipeDream's ``graph.txt``, which becomes a chain.

        Raises:
            ChainFormatError: the file is neither; the message names the file and the field or the line.
        """
        text = files.read_text(path, error=ChainFormatError)
        from deepspeed_partition.planner.graphs import pipedream_profile  # imports this module

        if pipedream_profile.is_graph(text):
            return pipedream_profile.read_chain(text, name=_stem(path), where=str(path))
        return cls.from_dict(files.parse_json(text, where=str(path), error=ChainFormatError), where=str(path))

    def save(self, path: str | PathLike[str]) -> None:
        """Write a chain file, as a whole or not at all.

        Raises:
            OSError: the folder cannot be written to.
        """
        files.write_json(path, self.to_dict())


def _later_fields(layer: LayerProfile) -> dict[str, Any]:
    """Return the fields of ``_LATER_FIELDS`` that say something, in their JSON form."""
    fields = {key: getattr(layer, key) for key, nothing in _LATER_FIELDS.items() if getattr(layer, key) != nothing}
    if layer.shared_weights:
        fields["shared_weights"] = dict(layer.shared_weights)
    return fields


def _stem(path: str | PathLike[str]) -> str:
    """Return a model's name: ``vgg16`` for ``vgg16.graph.txt`` and for ``profiles/vgg16/graph.txt``."""
    stem = Path(path).name.removesuffix(".txt").removesuffix(".graph")
    return Path(path).resolve().parent.name if stem == "graph" else stem


@lru_cache
def _decimal(number: float) -> Fraction:
    """Return the decimal number that a float prints as, exactly."""
    return Fraction(str(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The devices of one pipeline, and the links between any two of them.

    Seconds, bytes, and bytes per second. Source: the MadPipe paper, section 3, without latencies.

    Raises:
        ValueError: a number is not positive, or not finite.
    """

    num_devices: int
    """Number of devices, P."""
    memory_bytes: int
    """Memory of each device, in bytes."""
    bandwidth: float
    """Bytes per second of the link between any two devices; one transfer at a time (``duplex``)."""
    latency_seconds: float = 0.0
    """Seconds that each transfer takes beside its bytes."""
    weight_copies: float = 3
    """Factor of the parameters' bytes: two versions and one gradient in the paper; may be a fraction."""
    comm_buffers: int = 2
    """Tensors reserved at each end of a boundary: one activation and one gradient in the paper."""
    fixed_bytes: int = 0
    """Bytes that a process holds on its device whatever it runs."""
    optimizer_step: str = "largest"
    """How the optimizer steps: one weight after the other, so that a device needs the ``"largest"`` of the
    ``optimizer_transient_bytes`` of its layers, or all at once, so that it needs their ``"sum"``."""
    duplex: str = "half"
    """How a link carries transfers: ``"half"``, one at a time in either direction, or ``"full"``, one at a time in
    each direction."""
    port_bandwidth: float | None = None
    """Bytes per second that a host sends through its port, and that it receives. One transfer at a time leaves a
    port and one enters it, whatever the other ends are. None: hosts have no ports that transfers share."""
    devices_per_port: int = 1
    """Number of devices of a host, which follow one another and share its port. A transfer within a host goes
    through no port."""
    operation_seconds: float = 0.0
    """Seconds that each forward and each backward of a stage takes in a step beside those of its layers: what an
    engine does for it. Periods do not count them."""
    copy_bandwidth: float | None = None
    """Bytes per second at which a device itself moves the messages of its forwards and backwards in a step, beside
    what a link takes: a CPU copies them while it would compute. None: they move by themselves. Periods do not
    count it."""
    machines: Machines | None = None
    """Devices and links as they are; ``memory_bytes``, ``bandwidth`` and ``latency_seconds`` are then the least
    memory, the least bandwidth and the longest latency of them. None: all devices and links are alike."""
    pipelines: tuple[tuple[int, ...], ...] = ()
    """Devices of ``machines`` at the places 0 to P - 1 of each of several equal pipelines. A place is as slow as
    the slowest of its devices. Empty: one pipeline, on devices 0 to P - 1."""

    @classmethod
    def on(cls, machines: Machines, **others: Any) -> Platform:
        """Return the platform of one pipeline on all devices of ``machines``.

        Args:
            others: fields of the platform that machines do not have, such as ``weight_copies``.
        """
        return cls(
            num_devices=machines.num_devices,
            memory_bytes=min(group.memory_bytes for group in machines.devices),
            bandwidth=min(level.bandwidth for level in machines.links),
            latency_seconds=max(level.latency_seconds for level in machines.links),
            machines=machines,
            **others,
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_devices", _whole("num_devices", self.num_devices, 1, 2**20))
        memory = self.memory_bytes
        if isinstance(memory, bool) or not isinstance(memory, int | float):
            raise ValueError(f"memory_bytes is {memory!r}, not a number of bytes")
        if not 1 <= memory <= LARGEST_MEMORY_BYTES:
            raise ValueError(f"memory_bytes is {memory!r}: a device has more than 0 and at most 2**60 bytes")
        object.__setattr__(self, "memory_bytes", int(memory))
        for key in ("bandwidth", "latency_seconds", "weight_copies"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_FLOAT:
                raise ValueError(f"{key} is {shown(value)}, not a finite number")
        if self.bandwidth <= 0:
            raise ValueError(f"bandwidth is {self.bandwidth!r} bytes per second: it must be more than 0")
        if not 0 <= self.latency_seconds <= LONGEST_SECONDS:
            raise ValueError(
                f"latency_seconds is {self.latency_seconds!r}: it must be from 0 to {LONGEST_SECONDS:g}"
            )
        if not 0 <= self.weight_copies <= 1e6:
            raise ValueError(f"weight_copies is {self.weight_copies!r}: it must be from 0 to 1e6")
        if self.weight_copies == int(self.weight_copies):
            object.__setattr__(self, "weight_copies", int(self.weight_copies))
        object.__setattr__(self, "bandwidth", float(self.bandwidth))
        object.__setattr__(self, "latency_seconds", float(self.latency_seconds))
        object.__setattr__(self, "comm_buffers", _whole("comm_buffers", self.comm_buffers, 0, 1000))
        object.__setattr__(self, "fixed_bytes", _bytes("fixed_bytes", self.fixed_bytes))
        object.__setattr__(self, "operation_seconds", _seconds("operation_seconds", self.operation_seconds))
        if self.optimizer_step not in ("largest", "sum"):
            raise ValueError(f"optimizer_step is {shown(self.optimizer_step)}: it must be largest or sum")
        if self.duplex not in DUPLEX:
            raise ValueError(f"duplex is {shown(self.duplex)}: it must be {' or '.join(DUPLEX)}")
        object.__setattr__(self, "copy_bandwidth", self._bandwidth_or_none("copy_bandwidth"))
        self._check_ports()
        self._check_machines()

    def _check_machines(self) -> None:
        if self.machines is None:
            if self.pipelines:
                raise ValueError("pipelines are devices of machines, and there are none")
            return
        if self.port_bandwidth is not None:
            raise ValueError("port_bandwidth is for devices that are alike: machines say what each link is")
        places = self.pipelines or (tuple(range(self.num_devices)),)
        used = [device for pipeline in places for device in pipeline]
        if any(len(pipeline) != self.num_devices for pipeline in places):
            raise ValueError(
                f"pipelines have {', '.join(str(len(each)) for each in places)} devices, and not "
                f"num_devices, {self.num_devices}, each"
            )
        if len(set(used)) < len(used) or not all(0 <= device < self.machines.num_devices for device in used):
            raise ValueError(
                f"the pipelines are on devices {shown(used)}: each is one of {self.machines.num_devices}, and no "
                "two are the same"
            )

    def _devices_at(self, place: int) -> list[int]:
        """Return the devices of ``machines`` at a place, one for each pipeline."""
        return [pipeline[place] for pipeline in self.pipelines] or [place]

    def speed_of(self, device: int) -> float:
        """Return the number that divides the seconds of layers on a device: of pipelines, the slowest one's."""
        if self.machines is None:
            return 1.0
        groups = self.machines.devices
        return min(groups[self.machines.group_of(each)].speed for each in self._devices_at(device))

    def memory_of(self, device: int) -> int:
        """Return the memory of a device, in bytes: of pipelines, the least."""
        if self.machines is None:
            return self.memory_bytes
        groups = self.machines.devices
        return min(groups[self.machines.group_of(each)].memory_bytes for each in self._devices_at(device))

    @property
    def is_alike(self) -> bool:
        """Return whether all devices have the same memory and speed 1, and all links are alike."""
        if self.machines is None:
            return True
        devices = range(self.num_devices)
        return all(
            self.speed_of(device) == 1 and self.memory_of(device) == self.memory_bytes for device in devices
        ) and {(level.bandwidth, level.latency_seconds) for level in self._levels()} <= {
            (self.bandwidth, self.latency_seconds)
        }

    def _levels(self) -> list[LinkLevel]:
        """Return the levels of the links within each pipeline, and among the replicas of each place."""
        assert self.machines is not None
        places = self.pipelines or (tuple(range(self.num_devices)),)
        sets = [sorted(each) for each in (*places, *zip(*places, strict=True))]
        # Levels lie within one another: the link of any two is that of some two neighbours between them.
        return [self.machines.level_between(*pair) for each in sets for pair in pairwise(each)]

    def _bandwidth_or_none(self, key: str) -> float | None:
        value = getattr(self, key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_FLOAT:
            raise ValueError(f"{key} is {shown(value)}, not a finite number")
        if value <= 0:
            raise ValueError(f"{key} is {value!r} bytes per second: it must be more than 0")
        return float(value)

    def _check_ports(self) -> None:
        ports = self.port_bandwidth
        object.__setattr__(self, "devices_per_port", _whole("devices_per_port", self.devices_per_port, 1, 2**20))
        if ports is None:
            if self.devices_per_port != 1:
                raise ValueError(
                    f"devices_per_port is {self.devices_per_port} and there are no ports: give port_bandwidth, too"
                )
            return
        object.__setattr__(self, "port_bandwidth", self._bandwidth_or_none("port_bandwidth"))

    def resources(self, source: int, destination: int) -> tuple[Resource, ...]:
        """Return all that a transfer from one device to another occupies: its link first, then its ports.

        Of two transfers that have one of these in common, the second begins when the first has ended.
        """
        one, other = (source, destination) if self.duplex == "full" else sorted((source, destination))
        hosts = source // self.devices_per_port, destination // self.devices_per_port
        link = ("link", one, other)
        if self.port_bandwidth is None or hosts[0] == hosts[1]:
            return (link,)
        return link, ("out", hosts[0]), ("in", hosts[1])

    def transfer_seconds(self, num_bytes: int, source: int | None = None, destination: int | None = None) -> float:
        """Return the seconds of one tensor on its way: latency + bytes / bandwidth, the port's where that is less.

        All transfers take so long, within a host, too: a platform has one bandwidth, its slowest. On ``machines``
        a transfer between two devices takes as long as its link says, of pipelines the slowest one's.

        Args:
            source: the device that sends; left out, the link is the slowest.
            destination: the device that receives.
        """
        if self.machines is not None and source is not None and destination is not None:
            pairs = zip(self._devices_at(source), self._devices_at(destination), strict=True)
            return max(self._on_link(num_bytes, *pair) for pair in pairs)
        return self._seconds_at(num_bytes, min(self.bandwidth, self.port_bandwidth or self.bandwidth))

    def _on_link(self, num_bytes: int, one: int, other: int) -> float:
        """Return the seconds of one tensor between two devices of ``machines``."""
        assert self.machines is not None
        level = self.machines.level_between(one, other)
        return self._seconds_at(num_bytes, level.bandwidth, level.latency_seconds)

    def _seconds_at(self, num_bytes: int, bandwidth: float, latency: float | None = None) -> float:
        seconds = (self.latency_seconds if latency is None else latency) + num_bytes / bandwidth
        if not seconds <= LONGEST_SECONDS:
            raise ValueError(
                f"bandwidth is {bandwidth:g} bytes per second: a tensor of {num_bytes} bytes would "
                f"travel for {seconds:g} s, more than {LONGEST_SECONDS:g} s"
            )
        return seconds

    def copy_seconds(self, num_bytes: int) -> float:
        """Return the seconds in which a device itself moves so many bytes of messages.

        Raises:
            ValueError: they are more than ``LONGEST_SECONDS``.
        """
        seconds = 0.0 if self.copy_bandwidth is None else num_bytes / self.copy_bandwidth
        if not seconds <= LONGEST_SECONDS:
            raise ValueError(
                f"copy_bandwidth is {self.copy_bandwidth:g} bytes per second: {num_bytes} bytes would take "
                f"{seconds:g} s, more than {LONGEST_SECONDS:g} s"
            )
        return seconds

    def allreduce_seconds(self, num_bytes: int, num_copies: int, device: int | None = None) -> float:
        """Return the seconds of a ring all-reduce of gradients among ``num_copies`` devices.

        Each of 2 (D - 1) rounds sends a D-th of the bytes over every link of the ring. On ``machines`` the ring
        goes through the devices of a place in the order of their numbers, and its slowest link sets the pace.

        Args:
            device: the place of the stage; left out, links are the slowest.
        """
        if num_copies == 1:
            return 0.0
        part = -(-num_bytes // num_copies)
        if self.machines is None or device is None:
            return 2 * (num_copies - 1) * self.transfer_seconds(part)
        return 2 * (num_copies - 1) * self.ring_seconds(part, self._devices_at(device))

    def ring_seconds(self, num_bytes: int, devices: Sequence[int]) -> float:
        """Return the seconds of one round of a ring over devices of ``machines``: those of its slowest link."""
        ring = sorted(devices)
        return max(
            self._on_link(num_bytes, one, other) for one, other in zip(ring, [*ring[1:], ring[0]], strict=True)
        )

    def weights_bytes(self, num_bytes: int) -> int:
        """Return the bytes that the parameters of one device take: ``weight_copies`` times theirs, rounded up."""
        # Take the number's decimal digits as a fraction: 1.1 * 10 is 11, not 11.000000000000002.
        return math.ceil(_decimal(self.weight_copies) * num_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, a part of a plan file; seconds, bytes, bytes per second."""
        later = {  # plan files once did not have these
            "fixed_bytes": 0, "optimizer_step": "largest", "duplex": "half", "port_bandwidth": None,
            "devices_per_port": 1, "operation_seconds": 0.0, "copy_bandwidth": None,
        }  # fmt: skip
        of_machines = ("machines", "pipelines")
        fields = {key: getattr(self, key) for key in self.__dataclass_fields__ if key not in of_machines}
        known = {key: value for key, value in fields.items() if key not in later or value != later[key]}
        if self.machines is not None:
            known |= self.machines.to_dict()
        return known | ({"pipelines": [list(each) for each in self.pipelines]} if self.pipelines else {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Platform:
        """Read the JSON form, after the schema of a plan file has accepted it.

        Raises:
            ValueError: a number is not positive, or not finite.
        """
        known = {key: data[key] for key in cls.__dataclass_fields__ if key in data and key != "machines"}
        if "devices" in data and "links" in data:
            known["machines"] = Machines.of_keys(data)
        if "pipelines" in known:
            known["pipelines"] = tuple(tuple(map(int, each)) for each in known["pipelines"])
        return cls(**known)
