"""Stages whose weights are shared out among the pipelines: each rank stores some, and fetches the others for use.

The ranks that run the same stages in all pipelines share them out: of the stages of a device, in their order, the
i-th belongs to pipeline i mod G. Its owner alone keeps its weights, gradients and optimizer's states. The others
fetch its weights ahead of each forward and backward, one computation before it, and drop them after it. After a
backward they send the gradients to the owner, which adds them up in a fixed order and takes the optimizer's step.
That is FSLPP of the source with one owner per stage whatever G and the number of devices are
(``planner.schemes.scheme.fslpp_even``), and with one device per pipeline it is FSDP by stages.

All pipelines run the same lists of instructions, so every rank knows who fetches what and when, and nothing is
asked for: an owner has a thread for each other rank that sends the weights in the order in which they will be
used, and one that receives gradients. Sends wait for their receives, so weights lie nowhere twice. No rank waits
for what comes later than what it does itself in the order of the list, so there is no circle.

The weights of a stage lie in one storage, whose bytes are given back between uses. A graph that waits for its
backward refers to that storage, and finds the weights again when they are fetched for it. Between two batches
weights that are stored elsewhere read as NaN.

Source: A. Rahimi, "Unifying Parallelization Schemes to Train Deep Nets" (2025), FSLPP and its prefetching thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deepspeed_partition.engine.pipeline.parts import loss_part_of
from deepspeed_partition.engine.runtime.agreements import job_timeout
from deepspeed_partition.engine.runtime.collectives import broadcast_object
from deepspeed_partition.engine.runtime.worker_thread import Helper
from deepspeed_partition.schedule.instructions import Compute, Instruction

if TYPE_CHECKING:
    from deepspeed_partition.engine.pipeline.plan_engine import AnyPlanEngine

WAY_OUT = "with engine.whole_weights(): torch.save(engine.module.state_dict(), path)"
GIVES_GRADIENTS = ("B", "W")
"""Computations after which the gradients of a micro-batch are complete."""


@dataclass(slots=True)
class Traffic:
    """What a rank has stored, fetched and sent for stages that are shared out, since the engine was made."""

    weights_received: int = 0
    """Stages whose weights were fetched, once for each computation."""
    weight_bytes_received: int = 0
    gradients_sent: int = 0
    gradient_bytes_sent: int = 0
    peak_fetched: int = 0
    """Most fetched sets of weights at once, on top of those stored for good."""
    fetched: int = field(default=0, repr=False)

    def fetches(self) -> None:
        """Count a set of weights that is being fetched."""
        self.fetched += 1
        self.peak_fetched = max(self.peak_fetched, self.fetched)


class FlatWeights:
    """Weights of one type of a stage, in one storage.

    Args:
        weights: of the stage, all of one type, none of them in another stage.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter]) -> None:
        self.weights = list(weights)
        self.offsets = [0]
        for weight in self.weights:
            self.offsets.append(self.offsets[-1] + weight.numel())
        self.flat = torch.cat([weight.detach().reshape(-1) for weight in self.weights])
        self.num_bytes = self.flat.numel() * self.flat.element_size()
        self.note_trained()
        self._places = [
            self.flat[start : start + weight.numel()].view(weight.shape)
            for weight, start in zip(self.weights, self.offsets, strict=False)
        ]
        self.received: torch.Tensor | None = None
        """Gradients of other pipelines in this batch, added up."""
        self.show()

    def note_trained(self) -> None:
        """Note which weights train; a program may freeze some between two batches, on all ranks alike."""
        self.trained = [index for index, weight in enumerate(self.weights) if weight.requires_grad]
        self.num_trained = sum(self.weights[index].numel() for index in self.trained)

    def show(self) -> None:
        """Let the weights lie in the storage, whether its bytes are there or not."""
        for weight, place in zip(self.weights, self._places, strict=True):
            # As ``data``, so that what is written to the storage is no change of the weight to autograd.
            weight.data = place

    def take(self) -> None:
        """Take values into the storage that were assigned to the weights as ``data``, and let them lie there."""
        for weight, place in zip(self.weights, self._places, strict=True):
            if weight.data_ptr() != place.data_ptr():
                place.copy_(weight.data)
                weight.data = place

    def hide(self) -> None:
        """Let the weights read as NaN."""
        for weight in self.weights:
            of_type = float("nan") if weight.is_floating_point() else 0
            weight.data = torch.full((1,), of_type, dtype=weight.dtype).expand(weight.shape)

    @property
    def is_here(self) -> bool:
        """Return whether the bytes are there."""
        return self.flat.untyped_storage().nbytes() > 0 or not self.num_bytes

    def fill(self, incoming: torch.Tensor) -> None:
        """Put fetched weights where the layers, and graphs, look for them."""
        self.flat.untyped_storage().resize_(self.num_bytes)
        self.flat.copy_(incoming)

    def drop(self) -> None:
        """Give the bytes back."""
        self.flat.untyped_storage().resize_(0)

    def take_gradients(self) -> torch.Tensor:
        """Return the gradients of the weights that train in one tensor, and leave none; zeros where was none."""
        flat = torch.zeros(self.num_trained, dtype=self.flat.dtype)
        at = 0
        for index in self.trained:
            weight = self.weights[index]
            if weight.grad is not None:
                flat[at : at + weight.numel()].copy_(weight.grad.reshape(-1))
                weight.grad = None
            at += weight.numel()
        return flat

    def add_gradients(self, num_pipelines: int) -> None:
        """Give each weight the mean of its gradients over all pipelines."""
        received, self.received, at = self.received, None, 0
        for index in self.trained:
            weight = self.weights[index]
            if received is not None:
                others = received[at : at + weight.numel()].view(weight.shape)
                weight.grad = others if weight.grad is None else weight.grad.add_(others)
            if weight.grad is not None:
                weight.grad.div_(num_pipelines)
            at += weight.numel()


class ShardedStages:
    """The shares of one rank.

    Args:
        engine: whose module has its stages.

    Raises:
        ValueError: the engine has what does not go with it; the message says what to do. On every rank.
    """

    def __init__(self, engine: AnyPlanEngine) -> None:
        reason = why_not(engine)
        if reason is not None:
            raise ValueError(f"shard_weights: {reason}")
        self._module: Any = engine.module
        pipelines = engine._pipelines()
        device = engine.stage_id
        self.ranks = [ranks[device] for ranks in pipelines]
        self.place = self.ranks.index(dist.get_rank())
        self.traffic = Traffic()
        self._weights_group, self._gradients_group = (_own_group(pipelines, device) for _ in range(2))
        self.flats = {stage: self._flats_of(stage) for stage in self._module.own_stages}
        self.owner = {stage: index % len(self.ranks) for index, stage in enumerate(self._module.own_stages)}
        """Place among the ranks of the owner of each stage."""
        self.is_here = {stage: owner == self.place for stage, owner in self.owner.items()}
        self._senders = {rank: Helper(f"weights-{rank}") for rank in self.ranks if rank != dist.get_rank()}
        self._receiver = Helper("gradients")
        self._to_fetch: list[int] = []
        self._next = 0
        self._incoming: list[tuple[torch.Tensor, Any]] = []
        self._leaving: list[tuple[torch.Tensor, Any]] = []
        self._module.register_state_dict_pre_hook(self._refuse_state_dict)
        self._is_whole = False
        self._drop_all()

    def _flats_of(self, stage: int) -> list[FlatWeights]:
        by_type: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for weight in weights_of(self._module, stage):
            by_type.setdefault(weight.dtype, []).append(weight)
        return [FlatWeights(weights) for weights in by_type.values()]

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of weights that this rank has now."""
        return sum(flat.num_bytes for flats in self.flats.values() for flat in flats if flat.is_here)

    def _foreign(self) -> Iterator[FlatWeights]:
        for stage, flats in self.flats.items():
            if not self.is_here[stage]:
                yield from flats

    def _drop_all(self) -> None:
        for flat in self._foreign():
            flat.drop()
            flat.hide()

    # A batch

    def begin(self, instructions: Sequence[Instruction], *, trains: bool) -> None:
        """Begin a batch: from here on its weights are sent, and the first ones come."""
        jobs = [each for each in instructions if isinstance(each, Compute)]
        for flat in self._foreign():
            flat.show()
        for stage, flats in self.flats.items():
            for flat in flats:
                flat.received = None  # of a batch that was given up
                flat.note_trained()
                if self.is_here[stage]:
                    flat.take()
        self._to_fetch = [job.stage for job in jobs if not self.is_here[job.stage]]
        self._next = 0
        for place, rank in enumerate(self.ranks):
            if place == self.place:
                continue
            for job in jobs:
                if self.is_here[job.stage]:
                    for flat in self.flats[job.stage]:
                        self._senders[rank].do(self._sending(flat, rank))
        if trains:
            for job in jobs:
                if self.is_here[job.stage] and job.kind in GIVES_GRADIENTS:
                    for rank in self._senders:
                        self._receiver.do(self._receiving(self.flats[job.stage], rank))
        self._fetch()

    def _sending(self, flat: FlatWeights, rank: int) -> Callable[[], object]:
        return lambda: dist.send(flat.flat, rank, group=self._weights_group)

    def _receiving(self, flats: Sequence[FlatWeights], rank: int) -> Callable[[], object]:
        def receive() -> None:
            for flat in flats:
                if not flat.num_trained:
                    continue
                gradients = torch.empty(flat.num_trained, dtype=flat.flat.dtype)
                dist.recv(gradients, rank, group=self._gradients_group)
                flat.received = gradients if flat.received is None else flat.received.add_(gradients)

        return receive

    def _fetch(self) -> None:
        """Ask for the weights of the next computation that needs some."""
        if self._next == len(self._to_fetch):
            return
        stage = self._to_fetch[self._next]
        self._next += 1
        owner = self.ranks[self.owner[stage]]
        for flat in self.flats[stage]:
            incoming = torch.empty(flat.flat.shape, dtype=flat.flat.dtype)
            work = dist.irecv(incoming, owner, group=self._weights_group)
            self._incoming.append((incoming, work))
            self.traffic.weight_bytes_received += flat.num_bytes
        self.traffic.weights_received += 1
        self.traffic.fetches()

    def around(self, run: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
        """Return what runs an instruction with the weights that it needs."""

        def run_with_weights(instruction: Instruction) -> None:
            if not isinstance(instruction, Compute):
                run(instruction)
                return
            with self._weights_for(instruction):
                run(instruction)

        return run_with_weights

    def do_without(self, compute: Compute) -> None:
        """Take and send what the others send and wait for, where nothing is computed any more."""
        with self._weights_for(compute):
            pass

    @contextmanager
    def _weights_for(self, compute: Compute) -> Iterator[None]:
        """The weights of a stage are here meanwhile; afterwards its gradients leave, also where it has failed."""
        if self.is_here[compute.stage]:
            yield
            return
        flats = self.flats[compute.stage]
        arrived, self._incoming = self._incoming, []
        for flat, (incoming, work) in zip(flats, arrived, strict=True):
            work.wait()
            flat.fill(incoming)
        del arrived, incoming
        self._fetch()
        try:
            yield
        finally:
            if compute.kind in GIVES_GRADIENTS:
                self._send_gradients(compute.stage)
            for flat in flats:
                flat.drop()
            self.traffic.fetched -= 1

    def _send_gradients(self, stage: int) -> None:
        for _, work in self._leaving:
            work.wait()
        self._leaving = []
        for flat in self.flats[stage]:
            if not flat.num_trained:
                continue
            gradients = flat.take_gradients()
            work = dist.isend(gradients, self.ranks[self.owner[stage]], group=self._gradients_group)
            self._leaving.append((gradients, work))
            self.traffic.gradient_bytes_sent += gradients.numel() * gradients.element_size()
        self.traffic.gradients_sent += 1

    def finish(self) -> None:
        """End a batch: all that was sent has left, and all that is to come has come."""
        for _, work in self._leaving:
            work.wait()
        self._leaving = []
        for helper in (*self._senders.values(), self._receiver):
            helper.finish()
        for flat in self._foreign():
            flat.hide()

    def reduce(self) -> None:
        """Give the weights of this rank the mean of their gradients over all pipelines."""
        for stage, flats in self.flats.items():
            for flat in flats if self.is_here[stage] else ():
                flat.add_gradients(len(self.ranks))

    # All weights

    @contextmanager
    def whole(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Have all weights of this rank's stages here, between two batches; what owners have then stays.

        Collective.

        Args:
            optimizer: whose states of these weights are here, too, as in a run that shares nothing out.
        """
        for stage, flats in self.flats.items():
            for flat in flats:
                if self.is_here[stage]:
                    flat.take()
                else:
                    flat.flat.untyped_storage().resize_(flat.num_bytes)
                    flat.show()
                dist.broadcast(flat.flat, self.ranks[self.owner[stage]], group=self._weights_group)
        if optimizer is not None:
            self._bring_states(optimizer)
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            self._drop_all()
            if optimizer is not None:
                for flat in self._foreign():
                    for weight in flat.weights:
                        optimizer.state.pop(weight, None)

    def _bring_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Give each rank the states of all weights of its stages, from their owners."""
        for stage, flats in self.flats.items():
            owner, is_own = self.ranks[self.owner[stage]], self.is_here[stage]
            weights = [weight for flat in flats for weight in flat.weights]
            own = [optimizer.state.get(weight, {}) for weight in weights]
            told = [{key: _told(value) for key, value in state.items()} for state in own] if is_own else []
            for weight, state, described in zip(
                weights, own, broadcast_object(told, owner, self._weights_group), strict=True
            ):
                for key, value in described.items():
                    if isinstance(value, _Coming):
                        tensor = state[key].contiguous() if is_own else torch.empty(value.shape, dtype=value.dtype)
                        dist.broadcast(tensor, owner, group=self._weights_group)
                        value = tensor
                    if not is_own:
                        optimizer.state[weight][key] = value

    def _refuse_state_dict(self, *_: Any) -> None:
        if not self._is_whole:
            raise RuntimeError(
                f"this rank stores the weights of some of its stages only (shard_weights): {WAY_OUT}, on all ranks"
            )

    def close(self) -> None:
        """End the threads."""
        for helper in (*self._senders.values(), self._receiver):
            helper.close()


@dataclass(frozen=True, slots=True)
class _Coming:
    """A tensor of an optimizer's state, which is sent after its description."""

    shape: torch.Size
    dtype: torch.dtype


def _told(value: Any) -> Any:
    """What an entry of a state is sent as: itself, or a description where it is a tensor with dimensions."""
    return _Coming(value.shape, value.dtype) if isinstance(value, torch.Tensor) and value.ndim else value


def why_not(engine: Any) -> str | None:
    """Return why the stages of an engine cannot be shared out, with the way out; None where they can."""
    module = engine.module
    if not engine.runs_lists:
        return "DeepSpeed's own schedule runs here, which knows no shares: give the engine a plan"
    if engine.grid.data_parallel_size < 2:
        return (
            f"there is one pipeline of {engine.num_stages} ranks, and weights are shared among pipelines: use a "
            "plan made with data_parallel, or leave the option out"
        )
    if engine.zero_optimization():
        return "ZeRO shares out states of weights that every rank has: set zero_optimization.stage to 0"
    if engine.bfloat16_enabled() or engine.fp16_enabled():
        return "it runs in fp32 alone: leave bf16 and fp16 out of the configuration"
    if engine.has_experts:
        return "pipelines have different experts of MoE layers: leave the option out for this model"
    if engine.device.type != "cpu" or dist.get_backend() != "gloo":
        return "it runs on CPUs over gloo alone: leave the option out on a GPU"
    if module.tied_comms or module.tied_modules:
        return "layers that are tied would have owners of their own: leave the option out for this model"
    loss = loss_part_of(module)
    if loss is not None and any(weight.requires_grad for weight in module.loss_fn.parameters()):
        return "the loss function has weights, which belong to no stage: leave the option out for this model"
    seen: dict[int, int] = {}
    for stage in module.own_stages:
        for weight in weights_of(module, stage):
            if seen.setdefault(id(weight), stage) != stage:
                return f"stages {seen[id(weight)]} and {stage} share a weight: put its layers into one stage"
    return None


def weights_of(module: Any, stage: int) -> list[torch.nn.Parameter]:
    """Return the weights of a stage, each once."""
    found: dict[int, torch.nn.Parameter] = {}
    for layer in range(*module.allocation.stages[stage].layers):
        child = module._modules.get(str(layer))
        for weight in () if child is None else child.parameters():
            found[id(weight)] = weight
    return list(found.values())


def _own_group(pipelines: Sequence[Sequence[int]], device: int) -> Any:
    """Return a group of the ranks that run the same stages as this one. Collective over all ranks."""
    of_devices, waits = zip(*pipelines, strict=True), job_timeout()
    groups = [dist.new_group(list(ranks), timeout=waits) for ranks in of_devices]
    return groups[device]
