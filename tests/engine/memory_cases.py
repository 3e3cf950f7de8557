"""Cases: the bytes that an engine really holds, at each instruction, against those of its plan.

Tensors that wait to be sent depend on how fast the other rank is: so each of them is late once.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_partition import Chain, Plan, Platform, replay
from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine.engine import initialize_with
from deepspeed_partition.engine.pipeline.drawn_data import OwnMemory
from deepspeed_partition.engine.runtime import environment, planned_peak
from deepspeed_partition.engine.runtime.transfers import Shapes
from deepspeed_partition.planner.plan import MemoryUse
from deepspeed_partition.planner.simulate.replay_step import Timeline, run_step
from deepspeed_partition.planner.units import format_bytes
from deepspeed_partition.profiling import LiveBytes, limit_memory, profile_chain
from deepspeed_partition.schedule.instructions import Compute
from tests.engine import plans
from tests.engine.any_plan_multiproc import MAPS
from tests.engine.pipelines import loss_fn, mlp
from tests.engine.running import adam, batches, recomputes_on_a_cpu, start, train
from tests.exhaustive import is_exhaustive

NUM_MICRO_BATCHES = 6
ROWS, INPUTS = 256, 128
LATE_SECONDS = 0.01
"""Several times what a computation takes."""
SMALL_BYTES = 64
"""Losses and other single numbers, which no plan counts."""
ALLOWED_BYTES = 8192
"""For such numbers and the headers that tell shapes: less than any activation."""


class Gate(nn.Module):
    """Keeps more than its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.linear(x))


def specs() -> list[Any]:
    """Eight layers that keep different amounts; no parameters in the second one."""
    return [
        LayerSpec(nn.Linear, INPUTS, 64), LayerSpec(nn.Tanh), LayerSpec(Gate, 64), LayerSpec(nn.Linear, 64, 96),
        LayerSpec(Gate, 96), LayerSpec(nn.Linear, 96, 48), LayerSpec(Gate, 48), LayerSpec(nn.Linear, 48, 16),
    ]  # fmt: skip


def micro_batch(number: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(number))
    return inputs, inputs[:, :16].argmax(1)


class Fresh(Iterator[Any]):
    """Micro-batches that nobody else holds."""

    def __init__(self) -> None:
        self.given: list[weakref.ref] = []

    def __next__(self) -> Any:
        made = micro_batch(len(self.given))
        self.given += map(weakref.ref, made)
        return made


def measured_chain(rows: int = ROWS) -> Chain:
    """Its bytes are measured; its times are given, so that all ranks make the same plan."""
    layers = [spec.build() for spec in specs()]
    chain = profile_chain(
        layers, micro_batch(0, rows), loss_fn=loss_fn, device="cpu", repeats=1, warm_up=1, progress=False,
        halves=False,
    )  # fmt: skip
    times = {"forward_seconds": 1.0, "backward_seconds": 2.0}
    unknown = {"forward_spread_seconds": None, "backward_spread_seconds": None}
    return replace(chain, layers=tuple(replace(layer, **times, **unknown) for layer in chain.layers))


class WatchedEngine(MadPipeEngine):
    """Notes after each instruction the most bytes that it held meanwhile."""

    live: LiveBytes | None = None
    late_seconds = 0.0
    """Before each computation."""

    def _execute(self, instruction: Any) -> None:
        if self.live is None:
            super()._execute(instruction)
            return
        if isinstance(instruction, Compute):
            time.sleep(self.late_seconds)
        before = self.live.current_bytes - self.unread_bytes()
        self.live.reset_peak()
        super()._execute(instruction)
        self.held.append((instruction, before, self.live.peak_bytes - self.unread_bytes()))

    def unread_bytes(self) -> int:
        """The bytes of micro-batches that were read and are not loaded yet, which no plan counts."""
        unread = (each for each in self.batch_data.kept.values() if each[0] is not None)
        return sum(tensor.untyped_storage().nbytes() for each in unread for tensor in each)


class Expected:
    """What the memory of a plan says of one device during each computation, without what is transient."""

    def __init__(self, plan: Plan, chain: Chain, device: int) -> None:
        self.platform = plan.platform
        self.devices = [stage.device for stage in plan.stages]
        self.stash = [sum(map(chain.stash, chain.layers[slice(*stage.layers)])) for stage in plan.stages]
        for index, stage in enumerate(plan.stages):
            for first, last in stage.blocks:
                kept = sum(map(chain.stash, chain.layers[first:last]))
                self.stash[index] += chain.boundary_bytes(first) - kept
        self.across = [chain.boundary_bytes(stage.layers[1]) for stage in plan.stages[:-1]]
        cuts = [cut for cut in range(len(self.across)) if self.devices[cut] != self.devices[cut + 1]]
        self.ends = [(cut, stage) for cut in cuts for stage in (cut, cut + 1) if self.devices[stage] == device]
        timeline = run_step(plan, chain)
        assert isinstance(timeline, Timeline), timeline
        self.spans = timeline.operations
        self.num_bytes = 0

    def at_ends(self, name: str, number: int) -> int:
        """Bytes of the tensors that wait at both sides of cuts when a computation is about to end."""
        instant, total = self.spans[name, number][1], 0
        for cut, stage in self.ends:
            goes, comes = ("F", "B") if stage == cut else ("B", "F")
            waiting = 0
            for each in {number for _, number in self.spans}:
                made, used = self.spans[f"{goes}{stage}", each], self.spans[f"{comes}{stage}", each]
                leaves, arrives = self.spans[f"S{goes}{cut}", each], self.spans[f"S{comes}{cut}", each]
                waiting += (made[1] < instant <= leaves[1]) + (arrives[0] < instant <= used[0])
            total += max(self.platform.comm_buffers, waiting) * self.across[cut]
        return total

    def before(self, computation: Compute) -> int:
        """Of a forward, when its micro-batch is in flight; of a backward, when its gradient waits."""
        kind, stage = computation.kind, computation.stage
        ends = self.at_ends(f"{kind}{stage}", computation.micro_batch)
        if kind == "F":
            self.num_bytes += self.stash[stage]
            return self.num_bytes + ends
        return self.num_bytes + ends + (self.across[stage] if stage < len(self.across) else 0)

    def after(self, computation: Compute) -> None:
        """What is handed to a neighbouring stage on the same device, or taken from it, was or is kept there."""
        kind, stage = computation.kind, computation.stage
        if kind == "B":
            self.num_bytes -= self.stash[stage]
        following, preceding = (stage + 1, stage - 1) if kind == "F" else (stage - 1, stage + 1)
        for neighbour, sign in ((following, 1), (preceding, -1)):
            if 0 <= neighbour < len(self.devices) and self.devices[neighbour] == self.devices[stage]:
                self.num_bytes += sign * self.across[min(stage, neighbour)]


@contextmanager
def counting(engine: WatchedEngine, *, with_weights: bool = False) -> Iterator[LiveBytes]:
    """The bytes of a step that stands on gradients that exist; those that other threads make room for, too.

    Args:
        with_weights: whether weights and gradients count; else what is there beside them.
    """
    for parameter in () if with_weights else engine.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    live = engine.live = LiveBytes(engine.module.parameters() if with_weights else ())
    engine.held = []
    empty = Shapes.empty

    def counted(shapes: Shapes, device: torch.device) -> Any:
        with live:
            return empty(shapes, device)

    Shapes.empty = counted
    try:
        with live:
            yield live
    finally:
        Shapes.empty, engine.live = empty, None


def engine_of(plan: Plan, num_micro_batches: int = NUM_MICRO_BATCHES, **more: Any) -> WatchedEngine:
    config = {
        "gradient_accumulation_steps": num_micro_batches, "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0 if plan.is_asynchronous else 1.0,
    }  # fmt: skip
    return start(
        specs(), None, config, num_stages=plan.platform.num_devices, plan=plan,
        start_engine=lambda **arguments: initialize_with(WatchedEngine, **arguments), **more,
    )[0]  # fmt: skip


def no_more_bytes_than_planned(_: Path) -> None:
    """Whichever rank is late, and of the data nothing is left after a step but losses."""
    chain = measured_chain()
    slow, fast = (Platform(num_devices=2, memory_bytes=10**12, bandwidth=2.0**power) for power in (16, 30))
    maps = MAPS[2] if is_exhaustive() else {devices: MAPS[2][devices] for devices in ((1, 0), (0, 1, 1, 0))}
    for devices, cuts in maps.items():
        for depth in (1, 3) if len(devices) > 2 else (1, None):
            orders = (
                plans.gpipe(devices, NUM_MICRO_BATCHES)
                if depth is None
                else plans.depth_first(devices, NUM_MICRO_BATCHES, depth)
            )
            holds_what_is_planned(chain, plans.plan_of(chain, fast, cuts, devices, orders=orders), depth == 3)
        pattern = plans.packed(chain, slow, cuts, devices)
        assert max(stage.in_flight for stage in pattern.stages) > 1
        holds_what_is_planned(chain, pattern, False)
    if not recomputes_on_a_cpu():
        return
    for devices, recomputed in (((0, 1), {0: True, 1: [(4, 7)]}), ((0, 1, 1, 0), {0: [(0, 2)], 1: True, 3: True})):
        plan = plans.plan_of(
            chain, fast, MAPS[2][devices], devices, recomputed=recomputed,
            orders=plans.depth_first(devices, NUM_MICRO_BATCHES, 3),
        )  # fmt: skip
        holds_what_is_planned(chain, plan, False)


def holds_what_is_planned(chain: Chain, plan: Plan, dynamic_shape: bool) -> None:
    use = replay(plan, chain).memory
    engine = engine_of(plan, dynamic_shape=dynamic_shape)
    assert engine._train_schedule().within_room
    data = Fresh()
    engine.train_batch(data)
    for late in (None, 0, 1):
        engine.late_seconds = LATE_SECONDS if engine.stage_id == late else 0.0
        with counting(engine) as live:
            engine.train_batch(data)
            left = [storage.nbytes() for storage in live.storages()]
        case = [stage.device for stage in plan.stages], plan.step is None, late
        planned = use[engine.stage_id].total - use[engine.stage_id].weights
        over = [(str(each), peak - planned) for each, _, peak in engine.held if peak > planned + ALLOWED_BYTES]
        assert not over, (case, planned, over)
        if plan.step is not None:
            expected = Expected(plan, chain, engine.stage_id)
            for each, before, _ in engine.held:
                if isinstance(each, Compute):
                    most = expected.before(each)
                    assert before <= most + ALLOWED_BYTES, (case, str(each), before, most)
                    expected.after(each)
        assert max(peak for *_, peak in engine.held) > planned / 3, "nothing was counted"
        assert all(size <= SMALL_BYTES for size in left), left
        assert not any(reference() is not None for reference in data.given)


def no_more_bytes_than_planned_without_a_drain(_: Path) -> None:
    """Versions of the weights and gradients of all batches in flight with the rest; whichever rank is late."""
    rows = 32  # so that a version more of the weights would be seen beside what is kept of micro-batches
    chain = measured_chain(rows)
    # Two versions and a gradient: SGD keeps nothing else.
    platform = Platform(num_devices=2, memory_bytes=10**12, bandwidth=2.0**16, weight_copies=3)
    for mode, per_update, devices in (
        ("stashing", 1, (0, 1)), ("2bw", NUM_MICRO_BATCHES, (0, 1, 1, 0)), ("2bw", 4, (0, 1)),
        ("vertical-sync", 2, (1, 0)),
    ):  # fmt: skip
        plan = replace(
            plans.packed(chain, platform, MAPS[2][devices], devices),
            weight_versions=mode, micro_batches_per_update=per_update,
        )  # fmt: skip
        uses = replay(plan, chain).memory
        engine = engine_of(plan, per_update, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01))
        # No plan counts what is read and not loaded yet: here that is these, and no copies of them.
        data = OwnMemory(itertools.cycle([micro_batch(number, rows) for number in range(4)]))
        planned, peaks = uses[engine.stage_id], []
        late: list[int | None] = [None]

        def come_late(instruction: Any, engine: Any = engine, late: Any = late) -> None:
            if isinstance(instruction, Compute) and late[0] == engine.stage_id:
                time.sleep(LATE_SECONDS)

        with counting(engine, with_weights=True) as live:
            engine.live = None  # whose peak is that of a call, with its updates
            for late[0] in (None, 0, 1):
                for _ in range(3):
                    live.reset_peak()
                    engine.train_batch(data)
                    engine._endless.watcher = come_late
                    peaks.append(live.peak_bytes)
            engine.come_to_rest()
        case = mode, per_update, devices, engine.stage_id
        assert max(peaks) <= planned.total + ALLOWED_BYTES, (case, max(peaks), planned)
        assert max(peaks) > 0.7 * planned.total, (case, max(peaks), planned)


def losses_are_kept_without_the_room_of_all_elements(_: Path) -> None:
    """torch's ``mse_loss`` leaves its number in the room of all of them, a hidden activation per micro-batch."""

    def squares(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(outputs, nn.functional.one_hot(labels, outputs.shape[1]).float())
        assert loss.untyped_storage().nbytes() > loss.nbytes, "this torch needs no copy"
        return loss

    zero = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    for more in ({}, zero):  # DeepSpeed's own passes run with ZeRO
        config = {"gradient_clipping": 1.0, **more}
        engine, _, _ = start(mlp(), [0, 3, 8], config, loss_fn=squares, optimizer=adam)
        kept: list[int] = []
        engine.before_optimizer_step = lambda engine=engine, kept=kept: kept.extend(
            each.untyped_storage().nbytes() for each in engine.fwd_outputs
        )
        train(engine, batches(2))
        assert kept == [4] * (2 * engine.micro_batches if engine.is_last_stage() else 0), kept


def a_peak_above_the_plan_is_said_once(folder: Path) -> None:
    """A plan whose file promises less of a term, which is named; as it was made it is silent."""
    chain, path = measured_chain(), folder / f"{dist.get_rank()}.json"
    platform = Platform(num_devices=2, memory_bytes=10**12, bandwidth=2.0**30)
    made = plans.plan_of(
        chain, platform, MAPS[2][0, 1], (0, 1), orders=plans.gpipe((0, 1), NUM_MICRO_BATCHES)
    )  # fmt: skip
    uses = replay(made, chain).memory
    less = {
        "": [],
        "weights, with all": [MemoryUse(weights=0, stash=0, buffers=0, transient=0) for use in uses],
        "stash, with buffers": [replace(use, stash=0, buffers=0, transient=0) for use in uses],
    }
    for term, memory in less.items():
        promised = memory or list(uses)
        replace(made, memory=tuple(promised), peak_memory_bytes=tuple(use.total for use in promised)).save(path)
        with (
            limit_memory(10**12), patch.object(planned_peak, "ALLOWED_BYTES", ALLOWED_BYTES),
            patch.object(environment, "logger") as logger,
        ):  # fmt: skip
            engine = engine_of(Plan.load(path))
            data = Fresh()
            for _ in range(3):
                engine.train_batch(data)
            del engine
        said = [str(call.args[1]) for call in logger.log.call_args_list]
        said = [each for each in said if "in a step and its plan says" in each]
        assert len(said) == bool(term), (term, said)
        if term:
            rank = dist.get_rank()
            assert said[0].startswith(f"rank {rank} needed ") and f"what grew is {term}" in said[0], said
            assert f"says {format_bytes(promised[rank].total)}: it was in the micro-batches" in said[0], said
