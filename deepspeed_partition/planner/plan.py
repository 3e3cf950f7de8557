"""The plan: what it decides, what it promises, and its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from deepspeed_partition.planner.allocation import Allocation, Stage
from deepspeed_partition.planner.errors import PlanFormatError, PlanMismatchError
from deepspeed_partition.planner.io import files
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.schedule import Order, PeriodicSchedule, PlacedOperation, is_plain_name
from deepspeed_partition.planner.weight_versions import FLUSH, WeightVersions, checked_mode

PLAN_FORMAT = "madpipe-plan/1"
STEP_BOUNDS = ("step_lower_bound_seconds", "step_gap", "step_proved")
"""Keys of a plan file that say how near a step is to the shortest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainReference:
    """Reference to the chain that a plan was made for."""

    name: str
    num_layers: int
    digest: str

    @classmethod
    def of(cls, chain: Chain) -> ChainReference:
        return cls(name=chain.name, num_layers=chain.num_layers, digest=chain.digest())

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "num_layers": self.num_layers, "digest": self.digest}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ChainReference:
        return cls(name=data["name"], num_layers=int(data["num_layers"]), digest=data["digest"])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage(Stage):
    """Stage with what the plan says about it."""

    in_flight: int
    """Most micro-batches in flight: forwarded by the stage and not yet through its backward."""
    layer_names: tuple[str, ...] = ()
    num_trainable_parameters: int | None = None
    """Trainable parameters of the stage's layers, each once; a host recognizes the model by this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one device at its peak, by term."""

    weights: int
    stash: int
    buffers: int
    transient: int
    """Bytes of what runs, or of the optimizer's step where that is the peak; nothing else is there then."""
    fixed: int = 0
    """Bytes of the process itself: ``Platform.fixed_bytes``."""

    @property
    def total(self) -> int:
        return self.weights + self.stash + self.buffers + self.transient + self.fixed

    def to_dict(self) -> dict[str, int]:
        """Return the JSON form, in bytes."""
        terms = {"weights": self.weights, "stash": self.stash, "buffers": self.buffers}
        return terms | {"transient": self.transient} | ({"fixed": self.fixed} if self.fixed else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One synchronous step of ``num_micro_batches``, after which the pipeline has drained."""

    num_micro_batches: int
    step_seconds: float
    """Seconds of the step in an engine that overlaps transfers with computation."""
    blocking_step_seconds: float | None
    """Seconds of the step in DeepSpeed's own engine; None where it cannot run the allocation."""
    order: tuple[Order, ...]
    """Forwards and backwards of each device, in order."""
    lower_bound_seconds: float | None = None
    """Seconds; no order of these micro-batches is shorter if transfers overlap, of any allocation that the
    algorithm may choose: of contiguous partitions where it makes no others. None: a plan from before there were
    bounds, or one that is made by hand."""
    gap: float | None = None
    """Relative distance to the lower bound: ``step_seconds / lower_bound_seconds - 1``."""
    proved: bool | None = None
    """True: no such order has a shorter step, to one part in a million."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Allocation and schedule of a chain on a platform, and what they promise.

    Times are in seconds and sizes in bytes. Source: the MadPipe paper, sections 3 and 4, for the period and the
    memory.
    """

    chain: ChainReference
    """Reference to the chain that the plan was made for."""
    platform: Platform
    """Platform of one pipeline."""
    algorithm: str
    """Name of the algorithm that made the plan."""
    period_seconds: float
    """Seconds per micro-batch in steady state."""
    micro_batches_per_period: int = 1
    """Number q of micro-batches in the pattern, which repeats every ``q * period_seconds``."""
    lower_bound_seconds: float
    """Seconds; no schedule of any allocation of these layers on this platform has a shorter period."""
    gap: float
    """Relative distance to the lower bound: ``period_seconds / lower_bound_seconds - 1``."""
    proved: bool
    """True: nothing better exists in ``proved_class``, no shorter period, or as ``proved_of`` says. A plan with a
    step is not proved, for its period is not what was searched; ``step_proved`` is what is proved of the step."""
    proved_class: str | None = None
    """Allocations among which the plan is proved best: ``"contiguous"``, ``"one special device"`` (only one has
    several stages), or ``"any allocation"``. Layers that follow one another on a device count as one stage in all
    of them."""
    proved_of: str | None = None
    """Quantity that is proved: ``"period"``, or ``"memory"`` where a period was asked for (no plan of this period
    takes less)."""
    class_lower_bound_seconds: float | None = None
    """Seconds; no allocation in which at most one device has several stages has a shorter period. None: not
    looked for."""
    stages: tuple[PlannedStage, ...]
    """Stages in the order of the chain."""
    operations: tuple[PlacedOperation, ...]
    """Operations of one period in steady state: forwards, backwards and transfers."""
    memory: tuple[MemoryUse, ...]
    """Peak bytes of each device, by term; those of the step where there is one."""
    peak_memory_bytes: tuple[int, ...]
    """Peak bytes of each device; of the step where there is one."""
    step: StepPlan | None = None
    """Synchronous step; None where none was planned."""
    data_parallel: int | None = None
    """Number of identical pipelines of ``platform.num_devices`` devices each; None where that was not planned."""
    zero_stage: int | None = None
    """ZeRO stage of those pipelines; None where it was not given. Under 1 they share the optimizer's states, and
    ``platform.weight_copies`` is what each of them keeps."""
    allreduce_seconds: tuple[float, ...] = ()
    """Seconds per step in which the gradients of each stage are all-reduced among those pipelines; empty without
    them."""
    planning_seconds: float = 0.0
    """Seconds that planning took, on the clock on the wall."""
    weight_versions: str = FLUSH
    """What becomes of the weights: ``"flush"``, the pipeline drains before each update; or it never drains, and a
    stage keeps ``"stashing"`` a version for each micro-batch that needs one, ``"2bw"`` two versions, or
    ``"vertical-sync"`` one for each micro-batch along the whole pipeline (``weight_versions.py``)."""
    micro_batches_per_update: int = 1
    """Number of micro-batches whose gradients make one update, where the pipeline never drains;
    ``num_micro_batches`` of the file."""
    flush_step_seconds: float | None = None
    """Seconds of a synchronous step of as many micro-batches, of the same allocation in the same memory, with
    which an update of a pipeline that never drains is compared. None: there is none, or nobody asked."""

    @property
    def is_asynchronous(self) -> bool:
        """Return whether the pipeline never drains, so that micro-batches use older versions of the weights."""
        return self.weight_versions != FLUSH

    @property
    def update_seconds(self) -> float | None:
        """Seconds from one update to the next of a pipeline that never drains; None where it does."""
        if not self.is_asynchronous:
            return None
        return max((self.micro_batches_per_update * self.period_seconds, *self.allreduce_seconds))

    @property
    def versions(self) -> WeightVersions | None:
        """Versions of the weights that the pattern uses; None where the pipeline drains before each update.

        Raises:
            PlanMismatchError: the pattern does not treat all micro-batches alike.
        """
        if not self.is_asynchronous:
            return None
        self.check_treats_all_alike(f"a pipeline with weight_versions {self.weight_versions!r}")
        places = {
            each.operation: (each.shift, each.start_seconds, each.duration_seconds) for each in self.operations
        }
        numbers = range(len(self.stages))
        return WeightVersions.of(
            self.weight_versions,
            self.micro_batches_per_update,
            [stage.device for stage in self.stages],
            [places[f"F{number}"] for number in numbers],
            [places[f"B{number}"] for number in numbers],
        )

    @property
    def allocation(self) -> Allocation:
        """Partition of the chain into stages, and the device of each."""
        return Allocation(self.stages)

    @property
    def schedule(self) -> PeriodicSchedule:
        """Pattern of operations, which repeats every ``period_seconds``."""
        return PeriodicSchedule(self.period_seconds, self.operations, self.micro_batches_per_period)

    @property
    def pattern_seconds(self) -> float:
        """Seconds with which the pattern repeats: ``micro_batches_per_period * period_seconds``."""
        return self.micro_batches_per_period * self.period_seconds

    @property
    def treats_all_alike(self) -> bool:
        """Return whether each stage runs one forward that keeps and one backward for every micro-batch.

        Otherwise stages decide micro-batch by micro-batch what to recompute, backwards are in two halves, or the
        pattern has several micro-batches.
        """
        if self.micro_batches_per_period > 1 or not all(is_plain_name(each.operation) for each in self.operations):
            return False
        orders = self.step.order if self.step is not None else ()
        return all(is_plain_name(name) for name in {name for order in orders for name, _ in order})

    def check_treats_all_alike(self, runner: str) -> None:
        """Refuse a plan that decides micro-batch by micro-batch.

        Args:
            runner: words for who cannot run it, the subject of the message.

        Raises:
            PlanMismatchError: the plan does.
        """
        if not self.treats_all_alike:
            raise PlanMismatchError(
                f"the plan decides micro-batch by micro-batch what a stage recomputes, splits backwards, or has "
                f"{self.micro_batches_per_period} micro-batches per period, and {runner} runs every micro-batch "
                "alike: give the plan's own number of micro-batches (--micro-batches), or plan without "
                "--recompute micro-batch and --split-backward"
            )

    @property
    def boundaries(self) -> list[int]:
        """First layer of each stage, and the number of layers: ``parts`` of DeepSpeed."""
        return list(self.allocation.boundaries)

    @property
    def is_contiguous(self) -> bool:
        """Return whether each device has one stage, in the order of the devices."""
        return self.allocation.is_contiguous

    @property
    def num_micro_batches(self) -> int | None:
        """Micro-batches of the planned step, or of an update where the pipeline never drains; else None."""
        if self.is_asynchronous:
            return self.micro_batches_per_update
        return self.step.num_micro_batches if self.step else None

    @property
    def step_seconds(self) -> float | None:
        """Seconds of the step with overlapped transfers; None without a step."""
        return self.step.step_seconds if self.step else None

    @property
    def blocking_step_seconds(self) -> float | None:
        """Seconds of the step in DeepSpeed's own engine; None without a step, or where it cannot run it."""
        return self.step.blocking_step_seconds if self.step else None

    @property
    def step_lower_bound_seconds(self) -> float | None:
        """Seconds that no order of any allocation that the algorithm may choose beats; None where not known."""
        return self.step.lower_bound_seconds if self.step else None

    @property
    def step_gap(self) -> float | None:
        """Relative distance of the step to its lower bound; None without one."""
        return self.step.gap if self.step else None

    @property
    def step_proved(self) -> bool | None:
        """Whether the step is proved to be the shortest; None without a step, or where it is not known."""
        return self.step.proved if self.step else None

    def check_chain(self, chain: Chain) -> None:
        """Refuse a chain that the plan was not made for.

        Raises:
            PlanMismatchError: the plan was made for a chain with other layers, times or sizes.
        """
        if self.chain.num_layers != chain.num_layers:
            raise PlanMismatchError(
                f"the plan is for {self.chain.num_layers} layers ({self.chain.name!r}) and "
                f"{chain.name!r} has {chain.num_layers}: plan again"
            )
        if self.chain.digest != chain.digest():
            raise PlanMismatchError(
                f"the plan is for another profile ({self.chain.name!r}, {self.chain.digest[:19]!r}...) than "
                f"{chain.name!r} ({chain.digest()[:19]}...): plan again"
            )

    def summary(self) -> str:
        """Return the promises and the table of stages, as text for a log."""
        from deepspeed_partition.planner.report.draw import summary  # imports rich, which only drawing needs

        return summary(self)

    def headline(self) -> str:
        """Return one line for a log: the cut, the time with its bound, and the most memory of a device."""
        from deepspeed_partition.planner.report.draw import headline  # imports rich, which only drawing needs

        return headline(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the promises, one period or the step as a picture, and the stages."""
        from deepspeed_partition.planner.report.in_notebook import plan_html  # draws, which few need

        return plan_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, ``madpipe-plan/1``; seconds and bytes."""
        data: dict[str, Any] = {
            "format": PLAN_FORMAT,
            "chain": self.chain.to_dict(),
            "platform": self.platform.to_dict(),
            "algorithm": self.algorithm,
            "period_seconds": self.period_seconds,
            "lower_bound_seconds": self.lower_bound_seconds,
            "gap": self.gap,
            "proved": self.proved,
        }  # fmt: skip
        if self.micro_batches_per_period > 1:
            data["micro_batches_per_period"] = self.micro_batches_per_period
            data["pattern_seconds"] = self.pattern_seconds
        if self.proved_class is not None:
            data["proved_class"] = self.proved_class
        if self.proved_of is not None:
            data["proved_of"] = self.proved_of
        if self.class_lower_bound_seconds is not None:
            data["class_lower_bound_seconds"] = self.class_lower_bound_seconds
        data["stages"] = [_stage_to_dict(stage) for stage in self.stages]
        data["operations"] = [operation.to_dict() for operation in self.operations]
        data["peak_memory_bytes"] = list(self.peak_memory_bytes)
        data["memory"] = [use.to_dict() for use in self.memory]
        data["planning_seconds"] = self.planning_seconds
        if self.data_parallel is not None:
            data["data_parallel"] = self.data_parallel
            data["allreduce_seconds"] = list(self.allreduce_seconds)
            if self.zero_stage is not None:
                data["zero_stage"] = self.zero_stage
        if self.is_asynchronous:
            data["weight_versions"] = self.weight_versions
            data["num_micro_batches"] = self.micro_batches_per_update
            data["update_seconds"] = self.update_seconds
            if self.flush_step_seconds is not None:
                data["flush_step_seconds"] = self.flush_step_seconds
        if self.step is not None:
            data["num_micro_batches"] = self.step.num_micro_batches
            data["step_seconds"] = self.step.step_seconds
            if self.step.blocking_step_seconds is not None:
                data["blocking_step_seconds"] = self.step.blocking_step_seconds
            for key in STEP_BOUNDS:
                value = getattr(self.step, key.removeprefix("step_"))
                if value is not None:
                    data[key] = value
            data["order"] = [[list(entry) for entry in order] for order in self.step.order]
        return data

    @classmethod
    def from_dict(cls, data: object, *, where: str = "plan") -> Plan:
        """Read the JSON form; ``where`` (a file's name) begins the message of an error.

        Raises:
            PlanFormatError: ``data`` does not follow the format; the message names the path of the field.
        """
        mapping = files.validated(data, schema="plan", where=where, error=PlanFormatError)
        _check_pattern_seconds(mapping, where)
        try:
            plan = cls(
                chain=ChainReference.from_dict(mapping["chain"]),
                platform=Platform.from_dict(mapping["platform"]),
                algorithm=mapping["algorithm"],
                period_seconds=float(mapping["period_seconds"]),
                micro_batches_per_period=int(mapping.get("micro_batches_per_period", 1)),
                lower_bound_seconds=float(mapping["lower_bound_seconds"]),
                gap=float(mapping["gap"]),
                proved=mapping["proved"],
                proved_class=mapping.get("proved_class"),
                proved_of=mapping.get("proved_of"),
                class_lower_bound_seconds=_optional_float(mapping.get("class_lower_bound_seconds")),
                stages=tuple(_stage_from_dict(stage) for stage in mapping["stages"]),
                operations=tuple(PlacedOperation.from_dict(operation) for operation in mapping["operations"]),
                memory=tuple(
                    MemoryUse(**{key: int(use[key]) for key in MemoryUse.__dataclass_fields__ if key in use})
                    for use in mapping["memory"]
                ),
                peak_memory_bytes=tuple(int(peak) for peak in mapping["peak_memory_bytes"]),
                step=_step_from_dict(mapping, where),
                data_parallel=_optional_int(mapping.get("data_parallel")),
                zero_stage=_optional_int(mapping.get("zero_stage")),
                allreduce_seconds=tuple(float(seconds) for seconds in mapping.get("allreduce_seconds", ())),
                planning_seconds=float(mapping.get("planning_seconds", 0.0)),
                **_versions_from_dict(mapping),
            )
            _check_update_seconds(mapping, plan)
            return plan
        except PlanFormatError:
            raise
        except ValueError as error:
            raise PlanFormatError(f"{where}: {error}") from None

    def __post_init__(self) -> None:
        checked_mode(self.weight_versions)
        if self.is_asynchronous and self.step is not None:
            raise ValueError(
                f"weight_versions is {self.weight_versions!r}, a pipeline that never drains, and there is an "
                "order of a step, after which it drains: leave one of them out"
            )
        boundaries = self.allocation.boundaries  # raises where the stages do not follow one another
        if boundaries[-1] != self.chain.num_layers:
            raise ValueError(f"the stages end at layer {boundaries[-1]} of {self.chain.num_layers}")
        devices = self.platform.num_devices
        for index, stage in enumerate(self.stages):
            if stage.device >= devices:
                raise ValueError(f"stages[{index}].device is {stage.device} of {devices} devices")
        for operation in self.operations:
            places = (operation.device,) if operation.link is None else operation.link
            if any(place is None or place >= devices for place in places):
                raise ValueError(f"operation {operation.operation} is on {places} of {devices} devices")
            if operation.index >= self.micro_batches_per_period:
                raise ValueError(
                    f"operation {operation.operation} has index {operation.index}, and micro_batches_per_period "
                    f"is {self.micro_batches_per_period}"
                )
        for key, values in (("peak_memory_bytes", self.peak_memory_bytes), ("memory", self.memory)):
            if len(values) != devices:
                raise ValueError(f"{key} has {len(values)} entries for {devices} devices")
        if self.step is not None and len(self.step.order) != devices:
            raise ValueError(f"order has {len(self.step.order)} entries for {devices} devices")
        if self.data_parallel is not None and len(self.allreduce_seconds) != len(self.stages):
            raise ValueError(
                f"allreduce_seconds has {len(self.allreduce_seconds)} entries for {len(self.stages)} stages"
            )

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Read a plan file.

        Raises:
            PlanFormatError: the file cannot be read, or is no plan; the message names the file and the field.
        """
        return cls.from_dict(files.read_json(path, error=PlanFormatError), where=str(path))

    def save(self, path: str | PathLike[str]) -> None:
        """Write a plan file, as a whole or not at all; ``Plan.load(path) == plan``.

        Raises:
            OSError: the folder cannot be written to.
        """
        files.write_json(path, self.to_dict())


def _check_pattern_seconds(mapping: Mapping[str, Any], where: str) -> None:
    """Refuse a pattern that does not last its periods: nobody could tell which of the numbers is meant."""
    periods = float(mapping["period_seconds"]) * int(mapping.get("micro_batches_per_period", 1))
    pattern = float(mapping.get("pattern_seconds", periods))
    if abs(pattern - periods) > 1e-9 * periods:
        raise PlanFormatError(
            f"{where}: pattern_seconds is {pattern:.9g}, and micro_batches_per_period times period_seconds is "
            f"{periods:.9g}"
        )


def _check_update_seconds(mapping: Mapping[str, Any], plan: Plan) -> None:
    """Refuse seconds from update to update that are not those of the pattern."""
    planned = plan.update_seconds
    seconds = float(mapping.get("update_seconds", planned or 0.0))
    if planned is not None and abs(seconds - planned) > 1e-9 * planned:
        raise ValueError(
            f"update_seconds is {seconds:.9g}, and {plan.micro_batches_per_update} micro-batches take "
            f"{planned:.9g}"
        )


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _stage_to_dict(stage: PlannedStage) -> dict[str, Any]:
    blocks = stage.rematerialize
    data: dict[str, Any] = {
        "layers": list(stage.layers),
        "layer_names": list(stage.layer_names),
        "device": stage.device,
        "rematerialize": blocks if isinstance(blocks, bool) else [list(block) for block in blocks],
        "in_flight": stage.in_flight,
    }
    if stage.num_trainable_parameters is not None:
        data["num_trainable_parameters"] = stage.num_trainable_parameters
    return data


def _stage_from_dict(data: Mapping[str, Any]) -> PlannedStage:
    blocks = data.get("rematerialize", False)
    trainable = data.get("num_trainable_parameters")
    return PlannedStage(
        layers=(int(data["layers"][0]), int(data["layers"][1])),
        layer_names=tuple(data.get("layer_names", ())),
        device=int(data["device"]),
        rematerialize=blocks if isinstance(blocks, bool) else tuple((int(a), int(b)) for a, b in blocks),
        in_flight=int(data["in_flight"]),
        num_trainable_parameters=_optional_int(trainable),
    )


def _versions_from_dict(mapping: Mapping[str, Any]) -> dict[str, Any]:
    mode = mapping.get("weight_versions", FLUSH)
    if mode == FLUSH:
        return {}
    return {
        "weight_versions": mode,
        "micro_batches_per_update": int(mapping.get("num_micro_batches", 1)),
        "flush_step_seconds": _optional_float(mapping.get("flush_step_seconds")),
    }


def _step_from_dict(mapping: Mapping[str, Any], where: str) -> StepPlan | None:
    if "num_micro_batches" not in mapping:
        return None
    if mapping.get("weight_versions", FLUSH) != FLUSH and "order" not in mapping:
        return None  # they are those of an update
    for key in ("step_seconds", "order"):
        if key not in mapping:
            raise PlanFormatError(f"{where}: {key} is missing, which num_micro_batches needs")
    blocking = mapping.get("blocking_step_seconds")
    return StepPlan(
        num_micro_batches=int(mapping["num_micro_batches"]),
        step_seconds=float(mapping["step_seconds"]),
        blocking_step_seconds=None if blocking is None else float(blocking),
        lower_bound_seconds=_optional_float(mapping.get("step_lower_bound_seconds")),
        gap=_optional_float(mapping.get("step_gap")),
        proved=mapping.get("step_proved"),
        order=tuple(tuple((name, int(number)) for name, number in order) for order in mapping["order"]),
    )
