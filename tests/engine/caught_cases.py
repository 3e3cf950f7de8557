"""What must hold where a rank meets an error in a batch that the script catches: all ranks raise it, and go on.

The losses of the steps after it are those of a run in which the step never happened.
"""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine.pipeline.batch_attempt import RaisedElsewhere
from deepspeed_partition.engine.pipeline.before_step import Buffers
from deepspeed_partition.engine.pipeline.beside_layers import HandedOverError
from deepspeed_partition.engine.runtime import environment
from deepspeed_partition.engine.runtime.collectives import gather_objects
from tests.engine import pipelines, plans
from tests.engine.pipelines import Counted, loss_fn, mlp, tied, train_alone, two_groups
from tests.engine.running import NUM_MICRO_BATCHES, all_tensors, batches, cut, mine, planned, same, start, train
from tests.in_backward import in_backward
from tests.ranks import MOST_SECONDS_APART

FAULT: list[Any] = []
"""Where the next error comes: ``forward``, ``backward`` or ``loss``, and after how many calls."""
HELD: list[weakref.ref[nn.Module]] = []
"""What the frame that raised has among its variables."""


class EnoughError(ArithmeticError):
    """Of the user's own, with arguments of its own."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(what, number)


def meet(place: str) -> None:
    if FAULT and FAULT[0] == place:
        FAULT[1] -= 1
        if FAULT[1] < 0:
            FAULT.clear()
            held = nn.Identity()  # stands for what the batch has computed by now
            HELD.append(weakref.ref(held))
            raise EnoughError(place, 7)


def meets_in_backward(gradient: torch.Tensor) -> torch.Tensor:
    meet("backward")
    return gradient


class Tripping(pipelines.Block):
    """Raises where ``FAULT`` says so; its buffers are running statistics."""

    has_statistics = True

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width) if self.has_statistics else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        meet("forward")
        return in_backward(self.norm(super().forward(x)), meets_in_backward)


class TrippingInHalfPrecision(Tripping):
    has_statistics = False


def tripping_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    meet("loss")
    return loss_fn(outputs, labels)


class Unreadable(Counted):
    """Cannot read one of its items, and goes on with the next."""

    def __init__(self, items: list[Any], number: int) -> None:
        super().__init__(items)
        self.number = number

    def __next__(self) -> Any:
        item = super().__next__()
        if self.taken - 1 == self.number:
            raise OSError(5, "the disk has gone")
        return item


def specs_with(layer: int, *, ties: bool = False) -> list[Any]:
    specs = tied() if ties else mlp()
    specs[layer] = LayerSpec(TrippingInHalfPrecision if ties else Tripping, pipelines.WIDTH)
    return specs


@contextmanager
def all_raise(kind: type[Exception], rank: int, arguments: tuple[Any, ...]) -> Iterator[None]:
    """Every rank raises the error of ``rank``; the others say whose it is, and where it came from there."""
    raised: Any = None
    try:
        yield
    except Exception as error:
        raised = error
    assert type(raised) is kind and raised.args == arguments, repr(raised)
    if dist.get_rank() != rank:
        cause = raised.__cause__
        assert isinstance(cause, RaisedElsewhere) and str(cause).startswith(f"rank {rank} met this "), cause
        assert "_cases.py" in str(cause), "the traceback there"
    assert all(gather_objects(True))
    del raised  # its traceback has this frame


def check(
    make: Callable[[], MadPipeEngine],
    specs: list[Any],
    place: str,
    here: Callable[[MadPipeEngine], bool],
    *,
    tokens: bool = False,
    number: int = 1,
    expected: list[float] | None = None,
    at: int = 2,
) -> MadPipeEngine:
    """Of five steps, the third, or another one, meets an error."""
    data = batches(5, tokens=tokens)
    kept = data[:at] + data[at + 1 :]
    if expected is None:
        expected = train_alone(specs, kept, two_groups)
    engine = make()
    guilty = gather_objects(here(engine)).index(True)
    items = mine(engine, data)
    per_step = NUM_MICRO_BATCHES // engine.grid.data_parallel_size
    if place == "data" and dist.get_rank() == guilty:
        items = Unreadable(items.items, at * per_step + number)
    given = items if engine.is_first_stage() or engine.is_last_stage() else None
    losses = [float(engine.train_batch(given)) for _ in range(at)]
    before = all_tensors(engine)
    if place != "data" and dist.get_rank() == guilty:
        FAULT[:] = [place, number]
    kind, arguments = (OSError, (5, "the disk has gone")) if place == "data" else (EnoughError, (place, 7))
    gc.disable()
    began = time.monotonic()
    with all_raise(kind, guilty, arguments):
        engine.train_batch(given)
    assert time.monotonic() - began < MOST_SECONDS_APART, "they heard of it late"
    assert not FAULT
    assert all(reference() is None for reference in HELD), "the batch stays in memory"
    gc.enable()
    after = all_tensors(engine)
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert not changed, changed
    assert all(weight.grad is None or not weight.grad.any() for weight in engine.module.parameters())
    losses += [float(engine.train_batch(given)) for _ in range(4 - at)]
    same(losses, expected)
    return engine


def owns(layer: int) -> Callable[[MadPipeEngine], bool]:
    return lambda engine: engine.module.stage_owner(layer) == engine.stage_id and engine.grid.data_parallel_id == 0


def is_last(engine: MadPipeEngine) -> bool:
    return engine.is_last_stage() and engine.grid.data_parallel_id == 0


def is_first(engine: MadPipeEngine) -> bool:
    return engine.is_first_stage() and engine.grid.data_parallel_id == 0


def plan_on(devices: tuple[int, ...], cuts: list[int], depth: int | None = 3) -> Any:
    orders = (
        plans.gpipe(devices, NUM_MICRO_BATCHES)
        if depth is None
        else plans.depth_first(devices, NUM_MICRO_BATCHES, depth)
    )
    platform = plans.platform_of(max(devices) + 1)
    return plans.plan_of(plans.chain_of(cuts[-1]), platform, cuts, devices, orders=orders)


def on(
    devices: tuple[int, ...], cuts: list[int], specs: list[Any], *, told_once: bool = True, **config: Any
) -> Any:
    def make() -> MadPipeEngine:
        plan = plan_on(devices, cuts)
        engine = start(
            specs, None, config, num_stages=plan.platform.num_devices, plan=plan, optimizer=two_groups,
            loss_fn=tripping_loss,
        )[0]  # fmt: skip
        engine.dynamic_shape = not told_once
        return engine

    return make


MAPS = {
    2: [((0, 1, 0, 1), [0, 2, 4, 6, 8]), ((1, 0), [0, 4, 8])],
    3: [((0, 1, 2, 0), [0, 2, 4, 6, 8]), ((2, 0, 1), [0, 2, 5, 8])],
}
PLACES = [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 2), ("loss", 1), ("data", 0), ("data", 2)]


def a_step_that_was_caught_never_happened(_: Path) -> None:
    """In a layer, forward and backward, the loss, the data; early and late; shapes told once or each time."""
    for index, (devices, cuts) in enumerate(MAPS[dist.get_world_size()]):
        for place, number in PLACES:
            layer = 5 if number else 2
            specs = specs_with(layer)
            here = {"loss": is_last, "data": is_first if number else is_last}.get(place, owns(layer))
            zero = {"zero_optimization": {"stage": int(place == "backward")}}
            make = on(devices, cuts, specs, told_once=bool((index + number) % 2), **zero)
            check(make, specs, place, here, number=number)


def tied_layers_and_bf16_after_an_error(_: Path) -> None:
    devices, cuts = MAPS[dist.get_world_size()][0]
    specs = specs_with(3, ties=True)
    for config in ({}, {"zero_optimization": {"stage": 1}}):
        check(on(devices, cuts, specs, **config), specs, "backward", owns(3), tokens=True)
    for config in ({"bf16": {"enabled": True}}, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}):
        make = on(devices, cuts, specs, **config)
        data = batches(5, tokens=True)
        expected = train(make(), data[:2] + data[3:])
        check(make, specs, "backward", owns(3), tokens=True, expected=expected)


def replicas_give_up_together(_: Path) -> None:
    specs = specs_with(5)
    for place, here in (("forward", owns(5)), ("loss", is_last), ("data", is_first)):
        make = on((0, 1, 0), [0, 3, 4, 8], specs, zero_optimization={"stage": 1})
        data = batches(5)
        # Statistics are each replica's own.
        check(make, specs, place, here, expected=train(make(), data[:2] + data[3:]))


def an_error_in_the_warm_up(_: Path) -> None:
    """In the step in which bytes are read, and in one that is timed; the plan comes in time."""
    specs = specs_with(5)
    config = {**planned(cut(), warmup_steps=3), "zero_optimization": {"stage": 1}}

    def make() -> MadPipeEngine:
        return start(specs, "madpipe", config, optimizer=two_groups, loss_fn=tripping_loss)[0]

    for at in (1, 2):
        for place, here in (("forward", owns(5)), ("loss", is_last), ("data", is_first)):
            engine = check(make, specs, place, here, at=at)
            assert engine.module.parts == cut() and engine.plan is not None


class SetsItsWeight(pipelines.Block):
    """Halves its weight in the first call of each of the first two steps, and counts its calls in a buffer."""

    def __init__(self, width: int, sets: bool = True) -> None:
        super().__init__(width)
        self.sets = sets
        self.register_buffer("calls", torch.tensor(0))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sets and self.calls.item() in (0, NUM_MICRO_BATCHES):
            self.scale.data.mul_(0.5)  # which torch does not count
        self.calls += 1
        return super().forward(x) * self.scale


def weights_that_layers_set_in_the_step_with_the_error(_: Path) -> None:
    """They were set twice, for what notes that they are set was put back. Measured before, and not in the step.

    Before each step all weights of that name and class were copied, also of layers that set none.
    """
    specs = mlp()
    for layer in (1, 2, 6):
        specs[layer] = LayerSpec(SetsItsWeight, pipelines.WIDTH, sets=layer != 2)
    specs[5] = LayerSpec(Tripping, pipelines.WIDTH)
    config = planned(cut(), warmup_steps=0)

    def make() -> MadPipeEngine:
        return start(specs, "madpipe", config, optimizer=two_groups, loss_fn=tripping_loss)[0]

    for place, here in (("forward", owns(5)), ("loss", is_last)):
        engine = check(make, specs, place, here, at=1, number=2)
        assert engine.plan is not None
        copied = gather_objects([written.in_words for written in engine.weights_of_forward._written])
        assert sorted(itertools.chain(*copied)) == ["scale of SetsItsWeight"] * 2, copied


class Counts(pipelines.Block):
    """Counts its calls, and keeps and draws numbers, in attributes."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls, self.drawn, self.last = 0, [0.0], torch.zeros(1)
        self.large, self.outputs = torch.zeros(0), [torch.zeros(0)]
        self.generator = torch.Generator().manual_seed(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last += 1
        self.drawn.append(float(torch.rand(1, generator=self.generator)))
        self.newest = self.drawn[-1]
        self.large = torch.zeros(2**19)
        self.outputs = [self.large]
        return super().forward(x) * (1 + 0.1 * self.calls + 0.1 * self.newest + 0.1 * self.last)


def what_layers_keep_after_an_error(_: Path) -> None:
    """Counters and generators of layers stayed where each rank was when the batch was given up."""
    specs = specs_with(5)
    for layer in (2, 6):
        specs[layer] = LayerSpec(Counts, pipelines.WIDTH)
    devices, cuts = MAPS[dist.get_world_size()][0]
    for place, here in (("forward", owns(5)), ("loss", is_last)):
        engine = check(on(devices, cuts, specs), specs, place, here, at=1, number=2)
        # Large ones would be kept beside those that the next step makes.
        noted = {name for _, names in engine.attributes_of_forward._places for name in names}
        engine.attributes_of_forward.remembered()
        large = [layer for layer in engine.module.modules() if isinstance(layer, Counts)]
        held = [weakref.ref(layer.large) for layer in large]
        restore = engine.attributes_of_forward.remembered()
        for layer in large:
            layer.large, layer.outputs = torch.zeros(0), []
        assert all(reference() is None for reference in held)
        restore()
        assert not large or {"calls", "drawn", "last", "large", "outputs"} <= noted


def random_numbers_after_an_error(_: Path) -> None:
    """Those of dropout, without a seed for each layer."""
    specs = [*specs_with(5), LayerSpec(nn.Dropout, 0.5)]
    devices, cuts = MAPS[dist.get_world_size()][0]
    make = on(devices, [*cuts[:-1], 9], specs)

    def seeded() -> MadPipeEngine:
        engine = make()
        engine.module.seed_layers = False
        torch.manual_seed(3)
        return engine

    data = batches(5)
    check(seeded, specs, "loss", is_last, expected=train(seeded(), data[:2] + data[3:]))


def evaluation_after_an_error(_: Path) -> None:
    """An error in an evaluation, then training and evaluation as if it had not been."""
    specs = specs_with(5)
    devices, cuts = MAPS[dist.get_world_size()][0]
    data = batches(4)
    engine = on(devices, cuts, specs)()
    items = mine(engine, data[:2])
    given = items if engine.is_first_stage() or engine.is_last_stage() else None
    losses = [float(engine.train_batch(given))]
    guilty = gather_objects(is_last(engine)).index(True)
    if is_last(engine):
        FAULT[:] = ["loss", 1]
    before = dict(engine.module._num_forwards), engine.module.micro_offset, torch.get_rng_state().tolist()
    with all_raise(EnoughError, guilty, ("loss", 7)):
        engine.eval_batch(iter(data[2]))
    assert not FAULT
    # Stages had run different numbers of forwards, by which seeds go.
    after = dict(engine.module._num_forwards), engine.module.micro_offset, torch.get_rng_state().tolist()
    assert after == before
    losses.append(float(engine.train_batch(given)))
    same(losses, train_alone(specs, data[:2], two_groups))
    again = [float(engine.eval_batch(iter(data[3]))) for _ in range(2)]
    assert again[0] == again[1]


def ranks_that_read_nothing_count_a_batch_that_was_lost(_: Path) -> None:
    """Once they read, after a move, they were a batch behind the others."""
    specs = specs_with(5)
    engine = on((0, 1, 0), [0, 3, 4, 8], specs)()
    data = batches(3)
    reads = engine.is_first_stage() or engine.is_last_stage()
    given: Any = Counted([item for batch in data for item in batch])
    if is_first(engine):
        given = Unreadable(given.items, NUM_MICRO_BATCHES + 1)
    guilty = gather_objects(is_first(engine)).index(True)
    engine.train_batch(given)
    with all_raise(OSError, guilty, (5, "the disk has gone")):
        engine.train_batch(given)
    assert engine.batch_data._num_behind == (0 if reads else 2 * NUM_MICRO_BATCHES)


def ranks_that_begin_different_batches(_: Path) -> None:
    """One trains while the others evaluate: all hear of it, and can go on."""
    specs = specs_with(5)
    devices, cuts = MAPS[dist.get_world_size()][0]
    engine = on(devices, cuts, specs)()
    data = batches(2)
    items = mine(engine, data)
    given = items if engine.is_first_stage() or engine.is_last_stage() else None
    told = ""
    try:
        if dist.get_rank() == 1:
            engine.eval_batch(iter(data[0]))
        else:
            engine.train_batch(Counted(list(data[0])))
    except RuntimeError as error:
        told = str(error)
    assert "rank 0 a training step of 4 micro-batches, rank 1 an evaluation" in told, told
    same([float(engine.train_batch(given)) for _ in data], train_alone(specs, data, two_groups))


def shapes_that_differ_are_told_on_every_rank(_: Path) -> None:
    """Where shapes are told once per batch."""
    specs = specs_with(5)
    devices, cuts = MAPS[dist.get_world_size()][1]

    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if FAULT:
                FAULT[1] -= 1
                if FAULT[1] < 0:
                    FAULT.clear()
                    return torch.cat([x, x])
            return x

    at = cuts[1] - 1
    specs[at] = LayerSpec(Doubling)
    engine = on(devices, cuts, specs)()
    data = batches(3)
    items = mine(engine, data)
    given = items if engine.is_first_stage() or engine.is_last_stage() else None
    losses = [float(engine.train_batch(given))]
    if owns(at)(engine):
        FAULT[:] = ["double", 2]
    told = ""
    try:
        engine.train_batch(given)
    except RuntimeError as error:
        told = str(error)
    assert "dynamic_shape=True" in told, told
    losses.append(float(engine.train_batch(given)))
    same(losses, train_alone(specs, [data[0], data[2]], two_groups))


SKIPS: dict[str, torch.Tensor] = {}


class Leaving(nn.Module):
    """Leaves its input for another layer."""

    def __init__(self, store: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.store = store

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.store["skip"] = x.detach()
        return x


class Taking(Leaving):
    """Takes it, and does without if it is told to."""

    default: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.store.pop("skip") if self.default is None else self.store.get("skip", self.default))


class TakingIfThere(Taking):
    default = 0.0


def leaves_in_a_global(x: torch.Tensor) -> torch.Tensor:
    SKIPS["skip"] = x.detach()
    return x


def takes_from_a_global(x: torch.Tensor) -> torch.Tensor:
    return x + SKIPS["skip"]


def layers_that_hand_over_beside_their_outputs(_: Path) -> None:
    """A bare KeyError in a warm-up, and nothing where the layer that takes does without."""
    for kind, warmed_up in ((Taking, True), (TakingIfThere, False), (takes_from_a_global, False)):
        store: dict[str, torch.Tensor] = {}
        specs = mlp()
        is_function = kind is takes_from_a_global
        specs.insert(2, leaves_in_a_global if is_function else Leaving(store))
        specs.insert(7, kind if is_function else LayerSpec(kind, store))
        method, config = [0, 5, 10], None
        if warmed_up:
            method, config = "madpipe", planned(method, warmup_steps=2)
        lines: list[str] = []
        with patch.object(environment, "log_here", lambda line, *_, heard=lines: heard.append(line)):
            engine, _, _ = start(specs, method, config)
            told = ""
            try:
                train(engine, batches(1))
            except HandedOverError as error:
                told = str(error)
        name = kind.__name__
        said = [line for line in lines if "can reach, too, in other stages" in line]
        giver = "layer 2 (leaves_in_a_global)" if is_function else "layer 2 (Leaving)"
        if dist.get_rank() == 0:
            [line] = said
            assert line.startswith(f"{giver}, in stage 0, changes "), line
            assert f"which layer 7 ({name}) can reach, too" in line and "return x, skip" in line, line
        else:
            assert not said, said
        if kind is TakingIfThere:
            assert not told
            continue
        assert told.startswith(f"layer 7 ({name}) raises KeyError: 'skip'. It runs in stage 1 and can "), told
        assert f"as {giver} of another stage can" in told and "`return x, skip`" in told, told
        assert all(gather_objects(True))


def what_keeps_a_rank_from_a_step_is_raised_by_all(_: Path) -> None:
    """What could not be noted before a step ended one rank alone, and the others waited for it."""
    data, wanted = batches(2), batches(3)
    expected = train_alone(mlp(), [wanted[0], wanted[2]], two_groups)
    for rank in range(dist.get_world_size()):
        engine, _, _ = start(mlp(), cut(), optimizer=two_groups)
        losses = train(engine, wanted[:1])
        fails = patch.object(Buffers, "before_step", raises) if dist.get_rank() == rank else nullcontext()
        with fails, all_raise(EnoughError, rank, ("buffers", 7)):
            engine.train_batch(mine(engine, data[1:]))
        same([*losses, *train(engine, wanted[2:])], expected)


def raises(*_: Any, **__: Any) -> Any:
    raise EnoughError("buffers", 7)


OF_MAPS = [
    a_step_that_was_caught_never_happened, tied_layers_and_bf16_after_an_error, random_numbers_after_an_error,
    what_layers_keep_after_an_error,
    evaluation_after_an_error, ranks_that_read_nothing_count_a_batch_that_was_lost,
    ranks_that_begin_different_batches, shapes_that_differ_are_told_on_every_rank,
]  # fmt: skip
CASES = {
    2: [
        *OF_MAPS, an_error_in_the_warm_up, weights_that_layers_set_in_the_step_with_the_error,
        layers_that_hand_over_beside_their_outputs, what_keeps_a_rank_from_a_step_is_raised_by_all,
    ],
    3: OF_MAPS[:1],
    4: [replicas_give_up_together, an_error_in_the_warm_up],
}  # fmt: skip
