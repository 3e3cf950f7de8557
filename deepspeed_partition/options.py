"""Options: the ``madpipe`` keys of a DeepSpeed configuration, and arguments of ``MadPipeStrategy``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from deepspeed_partition.planner.planning.algorithms import solver_of
from deepspeed_partition.planner.problem import DUPLEX
from deepspeed_partition.planner.recomputation import checked_mode
from deepspeed_partition.planner.units import parse_bandwidth, parse_seconds, parse_size, printable, shown
from deepspeed_partition.planner.weight_versions import FLUSH
from deepspeed_partition.planner.weight_versions import checked_mode as checked_weight_versions

PATIENCE_SECONDS = 20.0
WHEN_SLOW = "when_slow"
REPLAN = ("never", WHEN_SLOW)
FOR_UNLIKE_DEVICES = ("madpipe", "contiguous")
"""Algorithms that plan for devices of different speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of planning that a user may set; everything has a default.

    Raises:
        ValueError: a value is not what its key needs.
    """

    memory: int | None = None
    """Bytes of each device; also ``"16GB"``. None: the device's own; on a CPU the machine's memory
    divided by its local ranks."""
    bandwidth: float | None = None
    """Bytes per second between neighbours; also ``"12GB/s"``. None: measured."""
    latency_seconds: float | None = None
    """Seconds that a transfer takes beside its bytes. None: measured."""
    duplex: str | None = None
    """``"full"`` where links carry transfers both ways at once, else ``"half"``. None: measured, where bandwidth
    or latency are; else ``"half"``."""
    port_bandwidth: float | None = None
    """Bytes per second of a port that all links of a host share; also ``"12GB/s"``. None: measured likewise; else
    there is none."""
    devices_per_port: int | None = None
    """Number of devices of a host, which share its port. None: measured likewise; else 1."""
    operation_seconds: float | None = None
    """Seconds that the engine takes for each forward and each backward of a stage beside those of its layers.
    None: measured on CPUs; else 0, for a GPU is given work before it has come to it."""
    copy_bandwidth: float | None = None
    """Bytes per second at which a device itself moves messages, beside what a link takes; also ``"12GB/s"``. None:
    measured on CPUs; else they move by themselves."""
    weight_copies: float | None = None
    """Bytes that training keeps per byte of weights. None: from the optimizer and the precision, (weights +
    gradients + master copy + states) / weights."""
    algorithm: str | tuple[int, ...] = "madpipe"
    warmup_steps: int = 0
    """Steps on a trial partition, in which layers are measured while they train, before the plan is made. 0: they
    are measured one by one on the first micro-batch, and the plan is made before the first optimizer step."""
    plan: str | None = None
    """Path of a saved plan, which is run as it is, without measuring. None: the run makes a plan."""
    save_plan: str | None = None
    """Path where rank 0 saves the plan it makes. None: beside the logs of the run, if it writes any."""
    recompute: str = "auto"
    """What may run its forward again in the backward, to keep less: ``"never"``: nothing; ``"stage"``: each stage
    as a whole; ``"block"``: ranges of layers within a stage; ``"auto"``: whatever is fastest within memory;
    ``"micro-batch"``: each stage decides for each micro-batch besides."""
    split_backward: bool = False
    """True: a plan that the run makes may have backwards in two halves: the gradient of the input, sent on at
    once, and those of the weights later. To measure them, layers then run one by one before it is made."""
    weight_versions: str | None = None
    """What becomes of the weights: ``"flush"``, the pipeline drains before each update. Otherwise it never drains,
    and a stage keeps versions of its weights: ``"stashing"`` for each micro-batch that needs one, ``"2bw"`` two,
    ``"vertical-sync"`` one for each micro-batch along the whole pipeline. None: as a plan says that is given, else
    ``"flush"``."""
    shard_weights: bool = False
    """True: of the stages of a device each of several pipelines stores its share: weights, gradients and states of
    the optimizer. The other ones are fetched ahead of use and dropped (FSLPP). With a plan that is given, in fp32,
    without ZeRO, on CPUs."""
    replan: str = "never"
    """``"when_slow"``: where a rank becomes slow, by another job on its device or by heat, the plan is made again
    for the speeds that ranks have then, and layers move. It is made from the layers that this run has measured."""
    time_limit_seconds: float | None = None
    patience_seconds: float | None = PATIENCE_SECONDS
    """Seconds without progress after which the log says which rank waits for which. 0 or None: it does not."""
    save_timeline: str | None = None
    """Path where rank 0 saves when each operation of the first steps ran (``planner/report/timeline.py``). None:
    nowhere."""
    checkpoint_checksums: bool = True
    """True: a checkpoint gets a checksum of each file, and these are verified before it is loaded."""
    unpickle: bool | None = None
    """Files of a checkpoint that may be unpickled, which can run any code. True: all, as DeepSpeed does. False:
    none. None: only ``mp_rank_*``, and only where the script put objects of its own into it; that is said."""

    def __post_init__(self) -> None:
        readers = {
            "memory": parse_size, "bandwidth": parse_bandwidth, "latency_seconds": parse_seconds,
            "operation_seconds": parse_seconds, "copy_bandwidth": parse_bandwidth,
            "port_bandwidth": parse_bandwidth, "devices_per_port": _count, "weight_copies": _positive,
            "time_limit_seconds": _positive, "warmup_steps": _count, "patience_seconds": _seconds,
        }  # fmt: skip
        for key, read in readers.items():
            value = getattr(self, key)
            if value is None:
                continue
            try:
                object.__setattr__(self, key, read(value))
            except (TypeError, ValueError) as error:
                raise ValueError(f"madpipe option {key!r}: {error}") from None
        for key in ("memory", "devices_per_port"):
            if getattr(self, key) == 0:
                raise ValueError(f"madpipe option {key!r}: it must be more than 0")
        if self.duplex not in (None, *DUPLEX):
            raise ValueError(f"madpipe option 'duplex' is {shown(self.duplex)}: it must be {' or '.join(DUPLEX)}")
        for key in ("plan", "save_plan", "save_timeline"):
            value = getattr(self, key)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(f"madpipe option {key!r} is {shown(value)}, not a path")
        yes_or_no = ("split_backward", "shard_weights", "checkpoint_checksums")
        for key, is_optional in (*((name, False) for name in yes_or_no), ("unpickle", True)):
            value = getattr(self, key)
            if not isinstance(value, bool) and not (is_optional and value is None):
                raise ValueError(f"madpipe option {key!r} is {shown(value)}: it must be true or false")
        for key, check in (("recompute", checked_mode), ("weight_versions", checked_weight_versions)):
            try:
                if key != "weight_versions" or self.weight_versions is not None:
                    check(getattr(self, key))
            except ValueError as error:
                raise ValueError(f"madpipe option {key!r}: {error}") from None
        if self.replan not in REPLAN:
            known = " or ".join(map(repr, REPLAN))
            raise ValueError(f"madpipe option 'replan' is {shown(self.replan)}: it must be {known}")
        if self.replan == WHEN_SLOW and self.plan is not None:
            raise ValueError(
                "madpipe option 'replan' needs layers that this run has measured, and with the option 'plan' it "
                "measures none: leave one of the two out"
            )
        if self.replan == WHEN_SLOW and self.weight_versions not in (None, FLUSH):
            raise ValueError(
                "madpipe option 'replan' is for plans that drain, and weight_versions is "
                f"{self.weight_versions!r}: leave one of the two out"
            )
        if self.replan == WHEN_SLOW and self.algorithm not in FOR_UNLIKE_DEVICES:
            raise ValueError(
                "madpipe option 'replan' is for the algorithms madpipe and contiguous, and "
                f"{shown(self.algorithm)} knows no slow devices: leave one of the two out"
            )
        if isinstance(self.algorithm, list | tuple):
            if not all(isinstance(each, int) and not isinstance(each, bool) for each in self.algorithm):
                raise ValueError(f"madpipe option 'algorithm' is {shown(self.algorithm)}: boundaries are integers")
            object.__setattr__(self, "algorithm", tuple(self.algorithm))
        try:
            solver_of(self.algorithm)
        except ValueError as error:
            raise ValueError(f"madpipe option 'algorithm': {error}") from None

    @property
    def ask_for_plan_of_one_stage(self) -> bool:
        """Whether a run of one stage, in which there is nothing to cut, is to make a plan all the same."""
        asking = (
            "memory",
            "algorithm",
            "warmup_steps",
            "save_plan",
            "recompute",
            "split_backward",
            "save_timeline",
        )
        default = Options()
        return any(getattr(self, key) != getattr(default, key) for key in asking)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Options:
        """Read the ``madpipe`` object of a configuration.

        Raises:
            ValueError: a key is unknown, and the message lists the known ones; or a value is malformed.
        """
        if not isinstance(mapping, Mapping):
            raise ValueError(f"the madpipe options are {shown(mapping)}, not a mapping of names to values")
        known = [field.name for field in fields(cls)]
        unknown = [printable(str(key))[:60] for key in mapping if key not in known]
        if unknown:
            raise ValueError(f"unknown madpipe option {', '.join(unknown)}: known are {', '.join(known)}")
        return cls(**mapping)


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise ValueError(f"{shown(value)} is not a number more than 0")
    return float(value)


def _seconds(value: Any) -> float | None:
    return None if value == 0 and not isinstance(value, bool) else _positive(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{shown(value)} is not a whole number of at least 0")
    return value
