"""What a rank measures while it trains on the trial cut: its layers, its peak of memory, its transfers.

    step    0: what layers are     1: bytes     2, 3, 4: times and transfers     5 ... : times

Bytes are read in one micro-batch of the second step, if the layers can be watched. The times of the first two do
not count where there are others.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed_partition.engine.pipeline.batch_attempt import (
    OUT_OF_MEMORY,
    BatchGivenUpError,
    CannotBeWatchedError,
)
from deepspeed_partition.engine.runtime.autograd_boundary import Boundary, tensors_of
from deepspeed_partition.engine.runtime.tracing import DeviceTrace, Execute, moves_of, recorded
from deepspeed_partition.engine.runtime.transfers import Transfers
from deepspeed_partition.engine.warmup.run_platform import kept_tensors
from deepspeed_partition.planner.warm_up_report import LinkUse
from deepspeed_partition.profiling import LiveBytes
from deepspeed_partition.profiling.in_place import NUM_DROPPED, InPlaceClock, gradients_before
from deepspeed_partition.profiling.in_place_memory import (
    InPlaceMemory,
    LayerBytes,
    measured_in_place,
    would_notice,
)
from deepspeed_partition.profiling.measure import MeasuredLayer
from deepspeed_partition.schedule.instructions import Compute, Instruction, Message

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine

NUM_RECORDED = 3
"""The number of steps, after the first ones, in which transfers are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """What one rank saw in a warm-up, besides its layers."""

    num_steps: int
    """The number of steps whose times count."""
    optimizer_seconds: float | None
    peak_bytes: int | None
    """The peak of memory, in bytes; None where no step was watched that ran as the trial cut does."""
    num_in_flight: int
    """The number of micro-batches in flight in the step of the peak."""
    parts: list[DeviceTrace]
    """What the device saw of the steps whose transfers were recorded."""
    pipeline_seconds: float | None
    """Median seconds of a step from this rank's first forward to its last backward; None on a GPU, whose host does
    not wait for it, and where layers were recomputed."""


class Measuring:
    """What a rank measures in a warm-up; between two steps nothing is left of it but what was found.

    Args:
        engine: on a trial cut, one stage per rank.
    """

    def __init__(self, engine: MadPipeEngine) -> None:
        self._engine = engine
        self.clock = InPlaceClock(engine.device)
        self.why_no_bytes: str | None = "that takes two steps"
        """What has kept this rank from reading them."""
        self._unwatchable: str | None = None
        self._bytes: dict[int, LayerBytes] = {}
        self._peak_bytes: int | None = None
        self._num_in_flight = 0
        self._parts: list[DeviceTrace] = []
        self._pipeline_seconds: list[float | None] = []
        # Of the step that runs:
        self._computed_from: float | None = None
        self._computed_until = 0.0
        self._memory: InPlaceMemory | None = None
        self._live: LiveBytes | None = None
        self._part: DeviceTrace | None = None

    @contextmanager
    def step(self, *, recomputes: bool) -> Iterator[None]:
        """Measure a step, which counts unless it raises.

        Args:
            recomputes: some layer here runs again in its backward, for want of memory.
        """
        module = self._engine.module
        recomputes = recomputes or bool(module.activation_checkpoint_interval)
        self._part = self._computed_from = None
        if self.clock.num_steps == NUM_DROPPED - 1:
            self.why_no_bytes = self._why_not(recomputes)
            if self.why_no_bytes is None:
                loss_layer = module._num_layers - 1 if module.loss_fn is not None else None
                self._memory = InPlaceMemory(self._engine.device, module, loss_layer)
        try:
            uncompiled = nullcontext() if self._memory is None else _uncompiled()
            with uncompiled, self.clock.step(), self._watching_peak(recomputes=recomputes):
                yield
            if self._memory is not None:
                self._bytes = self._memory.found
            if self._part is not None:
                self._parts.append(self._part)
            lasted = None if self._computed_from is None else self._computed_until - self._computed_from
            self._pipeline_seconds.append(None if recomputes else lasted)
        finally:
            if self._memory is not None:
                self._memory.close()
            self._memory = None

    def layer(self, number: int, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """What to call in the place of a layer."""
        watched = (
            self._looked_at(function) if self._memory is None else self._memory.watched_layer(number, function)
        )
        return self.clock.timed_layer(number, watched)

    def loss(self, number: int, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """What to call in the place of the loss function."""
        watched = self._looked_at(loss_fn) if self._memory is None else self._memory.watched_loss(loss_fn)
        return self.clock.timed_loss(number, watched)

    def do_not_watch(self, reason: str) -> None:
        """Watch no more bytes from now on, on this rank."""
        self._unwatchable = self.why_no_bytes = reason

    def _looked_at(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``; in the first step it shows whether it may be watched in the second."""
        if self.clock.num_steps > 0:
            return function

        def run(*arguments: Any) -> Any:
            before = gradients_before(arguments[0])
            outputs = function(*arguments)
            if self._unwatchable is None and would_notice(before, outputs):
                self.do_not_watch(
                    "a layer uses a compiled function, or gives weights to an autograd function of its own"
                )
            return outputs

        return run

    def execute(self, instruction: Instruction, run: Callable[[Instruction], None]) -> None:
        """Execute an instruction with ``run``; bytes are read of the first micro-batch, which is the largest.

        Raises:
            CannotBeWatchedError: it fails while they are, perhaps for that.
        """
        memory = self._memory
        if not isinstance(instruction, Compute):
            run(instruction)
            return
        if self._computed_from is None:
            self._computed_from = time.perf_counter()
        if memory is None or instruction.micro_batch > 0:
            run(instruction)
            self._computed_until = time.perf_counter()
            return
        try:
            with memory.forward() if instruction.kind == "F" else memory.backward():
                run(instruction)
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            if isinstance(error, BatchGivenUpError):  # whoever looks on or not
                raise
            raise CannotBeWatchedError(f"a layer could not be watched: {type(error).__name__}: {error}") from error

    @contextmanager
    def recorded(self, transfers: Transfers, execute: Execute) -> Iterator[Execute]:
        """Yield what to call for each instruction of a step."""
        place = self.clock.num_steps - NUM_DROPPED
        if self._live is not None:
            transfers.watch = self._count_received
            try:
                yield execute
            finally:
                transfers.watch = None
        elif 0 <= place < NUM_RECORDED and len(transfers.ranks) > 1 and 0 in transfers.ranks:
            with recorded(transfers, self._engine.device, execute) as step:
                yield step.execute
            self._part = step.part
        else:
            yield execute

    def layers(self) -> list[MeasuredLayer] | None:
        """All layers of this rank; None where something of one was not measured."""
        module = self._engine.module
        times, device = self.clock.times(), self._engine.device
        return measured_in_place(module.forward_funcs, module._local_start, times, self._bytes, device)

    @property
    def first_input(self) -> LayerBytes:
        """The bytes of the input of this rank's first layer, where they were measured."""
        return self._bytes[self._engine.module._local_start]

    def report(self) -> TrialReport:
        optimizer = self.clock.optimizer_step()
        return TrialReport(
            num_steps=self.clock.num_counted_steps,
            optimizer_seconds=None if optimizer is None else optimizer.median_seconds,
            peak_bytes=self._peak_bytes,
            num_in_flight=self._num_in_flight,
            parts=self._parts,
            pipeline_seconds=self._median_pipeline_seconds(),
        )

    def _median_pipeline_seconds(self) -> float | None:
        """Return the seconds of a step, from those in which nothing is recorded where there are any."""
        if self._engine.device.type != "cpu":
            return None
        for num_dropped in (NUM_DROPPED + NUM_RECORDED, NUM_DROPPED):
            readings = [seconds for seconds in self._pipeline_seconds[num_dropped:] if seconds is not None]
            if readings:
                return statistics.median(readings)
        return None

    def _why_not(self, recomputes: bool) -> str | None:
        if self._unwatchable is not None:
            return self._unwatchable
        if recomputes:
            return "layers run again in their backward"
        if any(map(_is_compiled, self._engine.module.modules())):
            return "a layer is compiled, and would run otherwise where it is watched"
        return None

    @contextmanager
    def _watching_peak(self, *, recomputes: bool) -> Iterator[None]:
        """Watch the peak of memory: a GPU's allocator knows it; on a CPU tensors are counted in some steps."""
        engine, watched = self._engine, self._memory is not None
        if engine.device.type == "cpu":
            if not watched:
                yield
                return
            self._live = LiveBytes(include=kept_tensors(engine))
            try:
                with self._live:
                    yield
                peak_bytes = self._live.peak_bytes
            finally:
                self._live = None
        else:
            if watched or recomputes:
                yield
                return
            torch.cuda.reset_peak_memory_stats(engine.device)
            yield
            peak_bytes = torch.cuda.max_memory_allocated(engine.device)
        self._peak_bytes = max(peak_bytes, self._peak_bytes or 0)
        program = engine.program(engine.micro_batches, trains=True)
        self._num_in_flight = max(self._num_in_flight, program.num_slots(engine.stage_id))

    def _count_received(self, _: Message, peer: int, boundary: Boundary, works: list[Any]) -> list[Any]:
        """Count a message that is received; another thread may make room for it, where nothing is counted."""
        assert self._live is not None
        self._live.include(tensors_of(boundary))
        return works


def links_of(parts: Sequence[Sequence[DeviceTrace]], devices: Sequence[int]) -> tuple[LinkUse, ...]:
    """The links between the devices of neighboring stages.

    Args:
        parts: of each device, of the same steps.
        devices: of each stage.
    """
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    sizes: dict[tuple[int, str], list[int]] = defaultdict(list)
    for step in zip(*parts, strict=True):
        for move in moves_of(step, devices):
            channel = move.message.boundary, move.message.direction
            seconds[channel].append(move.end_seconds - move.start_seconds)
            sizes[channel].append(move.num_bytes)

    def median(cut: int, direction: str) -> tuple[int, float]:
        channel = cut, direction
        # Two clocks may differ by more than a short message takes.
        return statistics.median_low(sizes[channel]), max(statistics.median(seconds[channel]), 0.0)

    uses = []
    for cut in sorted({cut for cut, _ in seconds}):
        (forward_bytes, forward_seconds), (backward_bytes, backward_seconds) = median(cut, "F"), median(cut, "B")
        uses.append(
            LinkUse(
                link=(devices[cut], devices[cut + 1]),
                forward_bytes=forward_bytes,
                forward_seconds=forward_seconds,
                backward_bytes=backward_bytes,
                backward_seconds=backward_seconds,
            )
        )
    return tuple(uses)


def _uncompiled() -> AbstractContextManager[object]:
    """Keep ``torch.compile`` out while operators are watched: it gives up for good on what is new to it."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    return set_stance("force_eager") if set_stance and "torch._dynamo" in sys.modules else nullcontext()


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
