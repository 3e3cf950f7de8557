"""Cases: what layers and a loss keep that is no list and no tensor is as it was before they were measured."""

from __future__ import annotations

import array
import ctypes
import datetime
import io
import itertools
import logging
import multiprocessing
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_partition import Plan
from deepspeed_partition.engine import PipelineModule
from deepspeed_partition.engine.runtime.collectives import gather_objects
from tests.engine import plans
from tests.engine.pipelines import WIDTH, loss_fn, mlp, train_alone, two_groups
from tests.engine.running import batches, cut, planned, same, start, train, train_on_four_cuts
from tests.engine.strangers_cases import said_here
from tests.engine.warm_up_cases import heard


def _taken_and_put_again(items: Any) -> int:
    number = int(items.get())
    items.put(number + 1)
    return number


def _raised(numbers: Any, place: int = 0) -> int:
    numbers[place] += 1
    return int(numbers[place])


class Slotted:
    """An object without a dict."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


def _raised_value(holder: Any) -> int:
    holder.value += 1
    return int(holder.value)


def _lengthened(numbers: Any) -> int:
    numbers.append(1)
    return len(numbers)


def _first_in(items: Any, first: Any) -> Any:
    items.put(first)
    return items


def _of_default() -> Any:
    def count(numbers: Any = itertools.count()) -> int:  # noqa: B008
        return next(numbers)

    return count


def _row_added(database: Any) -> int:
    database.execute("insert into calls values (1)")
    return int(database.execute("select count(*) from calls").fetchone()[0])


def _row_committed(database: Any) -> int:
    with database:
        return _row_added(database)


def _database(path: Path | str = ":memory:") -> Any:
    database = sqlite3.connect(path)
    database.execute("create table calls (number int)")
    return database


def _lines(folder: Path) -> Any:
    path = folder / f"lines of rank {dist.get_rank()}.txt"
    path.write_text("".join(f"{number}\n" for number in range(1000)))
    return path.open()


def counters(folder: Path) -> dict[str, Callable[[], float]]:
    """Ways to count calls, each with a state of its own."""
    lines, read = _lines(folder), _lines(folder)
    next(read)  # which hides its place from then on
    pair, shared, pairs = (itertools.count(), 1), itertools.count(), enumerate(range(10**6))
    return {
        "count": partial(next, itertools.count()),
        "count of floats": partial(next, itertools.count(0.5, 2.5)),
        "method of a count": itertools.count().__next__,
        "in a tuple": lambda: next(pair[0]),
        "at two places": lambda: next([shared, shared][1]),
        "generator": partial(next, (number for number in range(10**6))),
        "cycle": partial(next, itertools.cycle(range(5))),
        "enumerate": lambda: next(pairs)[0],
        "default": _of_default(),
        "list": partial(next, iter(list(range(1000)))),
        "queue": partial(_taken_and_put_again, _first_in(queue.Queue(), 1)),
        "queue by priority": partial(_taken_and_put_again, _first_in(queue.PriorityQueue(), 1)),
        "simple queue": partial(_taken_and_put_again, _first_in(queue.SimpleQueue(), 1)),
        "array": partial(_lengthened, array.array("i")),
        "bytes": partial(_lengthened, bytearray()),
        "memory": partial(_raised, memoryview(bytearray(4))),
        "number of ctypes": partial(_raised_value, ctypes.c_int()),
        "numbers of ctypes": partial(_raised, (ctypes.c_double * 3)()),
        "object with slots": partial(_raised_value, Slotted()),
        "number of several processes": partial(_raised_value, multiprocessing.Value("i", 0)),
        "buffer in memory": partial(_written, io.StringIO()),
        "file that is read": lambda: float(lines.readline()),
        "file that is read by lines": lambda: float(next(read)),
        "database": partial(_row_added, _database()),
        "database with commits": partial(_row_committed, _database()),
    }


def _written(buffer: Any) -> int:
    buffer.write("x")
    return len(buffer.getvalue())


class Keeping(nn.Module):
    """Its output goes by how often it was called, as several things know that it keeps."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.counters = counters(folder)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 0.01 * sum(float(count()) for count in self.counters.values()))


def what_layers_keep_is_as_before(folder: Path) -> None:
    """Measuring left counts, queues, arrays, files and databases where it had brought them: 1e-4 off at step 1."""
    data = batches(3)

    def layers() -> list[Any]:
        found = mlp()
        found[1], found[6] = Keeping(folder), Keeping(folder)
        return found

    expected = train_alone(layers(), data, two_groups)
    with said_here() as said:
        engine, _, _ = start(layers(), "madpipe", planned(cut()), optimizer=two_groups)
        same(train(engine, data), expected)
    assert not any("cannot be undone" in line for line in said), said


def what_a_loss_keeps_is_as_before(folder: Path) -> None:
    """Likewise, 24 % off at step 1, and by each of them alone."""
    data = batches(2)
    for name in counters(folder):

        def keeping() -> Any:
            count = counters(folder)[name]  # noqa: B023
            return lambda outputs, labels: loss_fn(outputs, labels) * (1 + 0.01 * count())

        expected = train_alone(mlp(), data, two_groups, loss_fn=keeping())
        engine, _, _ = start(mlp(), "madpipe", planned(cut()), optimizer=two_groups, loss_fn=keeping())
        losses = train(engine, data)
        difference = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
        assert difference < 1e-5, f"{name}: losses {losses} are not {expected}"


CALLS = itertools.count()
OUTPUT: Any = None


def writing(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss function that writes each loss to a file that is open."""
    loss = loss_fn(outputs, labels)
    print(f"{next(CALLS)} {float(loss):.4f}", file=OUTPUT)
    return loss


class Writing(nn.Module):
    """A layer that writes to a file that is open."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.output.write(b"x")
        return x


def what_is_written_while_layers_are_measured(folder: Path) -> None:
    """A log of the losses had the lines of measuring, too: 38 instead of 28."""
    global OUTPUT
    data = batches(2)
    for mode in ("w", "a", "w+"):
        path, of_layer = (folder / f"{kind} {mode} {dist.get_rank()}" for kind in ("losses", "layer"))
        with path.open(mode) as OUTPUT, of_layer.open(f"{mode}b") as output:
            OUTPUT.write("begin\n")
            layers = mlp()
            layers[-1] = nn.Sequential(Writing(output), layers[-1].build())
            engine, _, _ = start(layers, "madpipe", planned(cut()), optimizer=two_groups, loss_fn=writing)
            losses = train(engine, data)
        if engine.is_last_stage():
            lines = path.read_text().splitlines()
            assert lines[0] == "begin" and len(lines) == 9, lines
            written = [float(line.split()[1]) for line in lines[1:]]
            same([sum(written[:4]) / 4, sum(written[4:]) / 4], losses, 1e-3)
            assert of_layer.read_bytes() == 8 * b"x"


FOLDER = Path()
LOG = logging.getLogger("a program")
PIPE: Any = None


def opening(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss function that opens files, and counts in one of them."""
    loss = loss_fn(outputs, labels)
    with (FOLDER / "appended").open("a") as file:
        file.write(f"{float(loss):.4f}\n")
    count = FOLDER / "count"
    number = int(count.read_text()) + 1
    count.write_text(str(number))
    (FOLDER / f"new {number}").write_text("x")
    numpy.save(FOLDER / "array.npy", numpy.array([number]))
    torch.save(number, FOLDER / f"saved {number}")
    LOG.warning("called")
    os.write(DESCRIPTOR, b"x")
    PIPE.send(number)
    return loss * (1 + 0.01 * number)


DESCRIPTOR = -1


def what_is_written_to_files_that_a_loss_opens(folder: Path) -> None:
    """Files had a line for each run of measuring, and what the loss read of one was 10 further."""
    global FOLDER, PIPE, DESCRIPTOR
    data = batches(2)
    receiver, PIPE = multiprocessing.Pipe(duplex=False)

    def prepare(name: str) -> None:
        global FOLDER, DESCRIPTOR
        FOLDER = folder / name
        FOLDER.mkdir()
        (FOLDER / "count").write_text("0")
        LOG.handlers, LOG.propagate = [logging.FileHandler(FOLDER / "log")], False
        DESCRIPTOR = os.open(FOLDER / "descriptor", os.O_WRONLY | os.O_CREAT)

    prepare(f"alone {dist.get_rank()}")
    expected, alone = train_alone(mlp(), data, two_groups, loss_fn=opening), FOLDER
    prepare(f"pipeline {dist.get_rank()}")
    with said_here() as said:
        engine, _, _ = start(mlp(), "madpipe", planned(cut()), optimizer=two_groups, loss_fn=opening)
        same(train(engine, data), expected)
    if engine.is_last_stage():
        files, others = ({path.name: path.read_bytes() for path in each.iterdir()} for each in (FOLDER, alone))
        assert files.keys() == others.keys(), files.keys()
        for name, contents in files.items():
            assert len(contents.splitlines()) == len(others[name].splitlines()), name
        assert files["count"] == b"8" and files["descriptor"] == others["descriptor"]
    lines = [line for line in said if "cannot be undone" in line]
    assert len(lines) == engine.is_last_stage() and all(
        "Connection.send() was called" in each for each in lines
    ), lines
    receiver.close()


DATABASE: Any = None


def committing(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss function that commits each change."""
    _row_added(DATABASE)
    DATABASE.commit()
    return loss_fn(outputs, labels)


def what_cannot_be_undone_is_said_once(folder: Path) -> None:
    global DATABASE
    DATABASE = _database(folder / f"{dist.get_rank()}.sqlite")
    with said_here() as said:
        engine, _, _ = start(mlp(), "madpipe", planned(cut()), optimizer=two_groups, loss_fn=committing)
        train(engine, batches(2))
    lines = [line for line in said if "cannot be undone" in line]
    assert len(lines) == engine.is_last_stage() and all("DATABASE (Connection): " in line for line in lines), lines


class Counting(nn.Module):
    """Its output goes by counts that can be sent with it, and, if asked, by one that cannot."""

    def __init__(self, *, keeps_generator: bool = False) -> None:
        super().__init__()
        self.numbers, self.array, self.bytes = itertools.count(2, 3), array.array("i"), bytearray()
        self.items: queue.Queue[int] = _first_in(queue.Queue(), 1)
        self.squares = (number**2 for number in range(10**6)) if keeps_generator else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = next(self.numbers) + _lengthened(self.array) + _lengthened(self.bytes)
        numbers += _taken_and_put_again(self.items) + (next(self.squares) if self.squares else 0)
        return x * (1 + 0.01 * numbers)


class BuiltCounting(Counting):
    """The same: a line is said once of each class."""


def counts_go_with_layers_that_move(_: Path) -> None:
    """They began anew on the new rank, in silence; a generator does, and that is said."""
    data = batches(4)
    for is_built, keeps_generator in itertools.product((False, True), (False, True)):

        def layers() -> list[Any]:
            found = mlp()
            spec = LayerSpec(BuiltCounting if is_built else Counting, keeps_generator=keeps_generator)  # noqa: B023
            found[3], found[6] = (spec.build(), spec.build()) if is_built else (spec, spec)  # noqa: B023
            return found

        expected = train_alone(layers(), data, two_groups)
        with said_here() as said:
            engine, _, _ = start(layers(), [0, 3, 8], optimizer=two_groups)
            losses = train_on_four_cuts(engine, data)
        lines = [line for of_rank in gather_objects(said) for line in of_rank if "has changed where" in line]
        if keeps_generator:
            assert len(lines) == 1 and "Counting.squares (generator) has changed where" in lines[0], lines
        else:
            same(losses, expected)
            assert not lines, lines


class Meter:
    """An object of the program, with something that cannot be pickled."""

    def __init__(self) -> None:
        self.rank, self.lock, self.total, self.seen = dist.get_rank(), threading.Lock(), 0.0, [torch.zeros(())]
        self.squares: Any = None

    def add(self, value: float) -> float:
        with self.lock:
            self.total += value
            self.seen.append(torch.tensor(value))
        assert self.rank == dist.get_rank(), "what names the rank stays"
        drawn = 0 if self.squares is None else next(self.squares)
        return self.total / len(self.seen) + float(self.seen[-1]) + drawn


class Helper:
    """An object without a dict, with modules."""

    __slots__ = ("count", "norm", "numbers")

    def __init__(self) -> None:
        self.count, self.norm, self.numbers = 0, nn.BatchNorm1d(WIDTH), numpy.random.default_rng(1)


class Holding(nn.Module):
    """Keeps what no list of numbers holds, and modules where torch does not look."""

    def __init__(self, meter: Meter, *, keeps_generator: bool) -> None:
        super().__init__()

        class Local:
            def __init__(self) -> None:
                self.count = 0

        self.given, self.meter, self.local, self.helper = meter, Meter(), Local(), Helper()
        self.listed, self.newest = list[Any](), None
        self.fixed = [
            nn.Linear(WIDTH, WIDTH),
            {"more": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))},
        ]
        object.__setattr__(self, "beside", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
        self.also = self.meter.seen
        if keeps_generator:
            self.meter.squares = (number**2 for number in range(10**6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean = float(x.detach().abs().mean())
            self.factor = self.given.add(mean) + self.meter.add(mean)
            self.local.count += 1
            self.helper.count += len(self.also)
            self.listed.append(Counted(len(self.listed)))
            self.newest = datetime.timedelta(seconds=len(self.listed))
            drawn = self.helper.numbers.random()
            self.factor += drawn + self.listed[-1].number + self.newest.total_seconds() + self.local.count
        x = x + 0.1 * self.fixed[0](x) + 0.1 * self.fixed[1]["more"](x) + 0.1 * self.helper.norm(x)
        x = x + 0.1 * self.beside(x)
        return x * (1 + 0.001 * self.factor + 0.001 * self.helper.count)


class BuiltHolding(Holding):
    """The same: a line is said once of each class."""


@dataclass
class Counted:
    number: int


def objects_and_hidden_modules_go_with_layers(_: Path) -> None:
    """They were new on the new rank, with other weights, in silence."""
    data = batches(4)
    for is_built, keeps_generator, seed_layers in (
        (True, False, True), (False, False, True), (True, True, True), (True, False, False),
    ):  # fmt: skip

        def layers() -> list[Any]:
            found = mlp()
            torch.manual_seed(3)
            for place in (3, 6):
                spec = LayerSpec(BuiltHolding if is_built else Holding, Meter(), keeps_generator=keeps_generator)  # noqa: B023
                found[place] = spec if is_built else spec.build()  # noqa: B023
            return found

        stays, _, _ = start(layers(), [0, 3, 8], optimizer=two_groups, seed_layers=seed_layers)
        expected = train(stays, data)
        if seed_layers and is_built:
            same(expected, train_alone(layers(), data, two_groups))
        with said_here() as said:
            engine, _, _ = start(layers(), [0, 3, 8], optimizer=two_groups, seed_layers=seed_layers)
            losses = train_on_four_cuts(engine, data)
        lines = [line for of_rank in gather_objects(said) for line in of_rank if "has changed where" in line]
        if keeps_generator:
            assert len(lines) == 1 and "BuiltHolding.meter (Meter) has changed where" in lines[0], lines
        else:
            same(losses, expected)
            assert not lines, lines


class Extra(nn.Module):
    """Gives to checkpoints what it computes with, which is no attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        state = [1, Counted(1)]
        self.state = lambda: state

    def get_extra_state(self) -> Any:
        count, counted = self.state()
        return {"count": count, "counted": counted, "weights": torch.ones(2) * count}

    def set_extra_state(self, state: Any) -> None:
        assert float(state["weights"][0]) == state["count"]
        self.state()[:] = state["count"], state["counted"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.state() if type(self) is Extra else KEPT[self]
        if self.training:
            state[0] += 1
            state[1].number += 2
        return x * (1 + 0.01 * state[0] + 0.01 * state[1].number)


class ExtraBeside(Extra):
    """Has it in a variable of the file, which cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        KEPT[self] = self.state()

    def get_extra_state(self) -> Any:
        assert KEPT[self] is self.state()
        return super().get_extra_state()


KEPT: Any = WeakKeyDictionary()


def extra_states_go_with_layers(_: Path) -> None:
    """They stayed behind, though a checkpoint has them; a table of layers made the ranks wait for ever."""
    data = batches(4)
    for kind, is_built in itertools.product((Extra, ExtraBeside), (False, True)):

        def layers() -> list[Any]:
            found = mlp()
            found[3], found[6] = (LayerSpec(kind), LayerSpec(kind)) if is_built else (kind(), kind())  # noqa: B023
            return found

        expected = train_alone(layers(), data, two_groups)
        engine, _, _ = start(layers(), [0, 3, 8], optimizer=two_groups)
        losses = train_on_four_cuts(engine, data)
        same(losses, expected)


CALLED = {"layers": 0, "loss": 0}
SEEN: list[float] = []


class CountingBeside(nn.Module):
    """Counts in a global, and in its class."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLED["layers"] += 1
        type(self).count += 1
        return x * (1 + 0.01 * CALLED["layers"] + 0.01 * CountingBeside.count)


class CountingLoss:
    """Counts in itself, in a list of the file and in a variable around a function."""

    def __init__(self, *, keeps_generator: bool) -> None:
        self.count = itertools.count()
        self.mean = torch.ones(())
        self.numbers = (number for number in range(10**6)) if keeps_generator else None

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(outputs, labels)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        SEEN.append(float(self.mean))
        numbers = 0 if self.numbers is None else next(self.numbers)
        return loss * (1 + 0.01 * next(self.count) + 0.01 * len(SEEN) + 0.01 * numbers) / self.mean


def counts_beside_layers_go_with_them(_: Path) -> None:
    """Globals and a loss's own state stayed behind where a plan moved the layer or the loss: 12 % off, silent."""
    data = batches(3)

    def begin() -> list[Any]:
        CALLED.update(layers=0, loss=0)
        SEEN.clear()
        CountingBeside.count = 0
        return [*mlp()[:3], LayerSpec(CountingBeside), *mlp()[3:]]

    for keeps_generator in (False, True):
        expected = train_alone(begin(), data, two_groups, loss_fn=CountingLoss(keeps_generator=keeps_generator))
        with said_here() as said:
            engine, _, _ = start(
                begin(), [0, 4, 9], optimizer=two_groups, loss_fn=CountingLoss(keeps_generator=keeps_generator)
            )
            losses = train(engine, data[:1])
            engine.recut(bent())
            items = iter([item for batch in data[1:] for item in batch])
            losses += [float(engine.train_batch(items)) for _ in data[1:]]
        lines = [line for of_rank in gather_objects(said) for line in of_rank if "has changed where" in line]
        if keeps_generator:
            assert len(lines) == 1 and "its numbers (generator), which the loss function" in lines[0], lines
        else:
            same(losses, expected)
            assert not lines, lines


def bent() -> Plan:
    """Both ends of the pipeline on rank 0, and the layer that counts on rank 1."""
    platform = plans.platform_of(2, bandwidth=40.0, comm_buffers=4)
    return plans.packed(plans.chain_of(9), platform, [0, 2, 7, 9], (0, 1, 0))


class Checkpointed(nn.Module):
    """Counts in a function that runs again in the backward, or, if asked, outside of it."""

    def __init__(self, *, counts_within: bool) -> None:
        super().__init__()
        self.linear, self.number, self.counts_within = nn.Linear(WIDTH, WIDTH), 0, counts_within

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        self.number += self.counts_within
        return torch.relu(self.linear(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += not self.counts_within
        return checkpoint(self._run, x, use_reentrant=False) * (1 + 0.01 * self.number)


def what_a_program_recomputes_itself_is_named(_: Path) -> None:
    """A count differed from one process from the first step on, and nothing was said."""
    data = batches(2)
    for counts_within in (False, True):

        def layers() -> list[Any]:
            return [*mlp()[:2], *[LayerSpec(Checkpointed, counts_within=counts_within)] * 2, *mlp()[2:]]  # noqa: B023

        with heard() as said:
            engine, _, _ = start(layers(), [0, 5, 10], optimizer=two_groups)
            losses = train(engine, data)
        lines = [line for line in said if "a backward changes" in line]
        if counts_within:
            [line] = lines
            assert "number of layer 2 (Checkpointed), number of layer 3 (Checkpointed): code that torch" in line
            assert "or a backward() of the program's own" in line  # it was said to be a checkpoint in any case
        else:
            assert not lines, lines
            same(losses, train_alone(layers(), data, two_groups))


class OwnState(PipelineModule):
    """Has a layer and a loss among its methods, which count and average on the module itself."""

    def __init__(self, layers: list[Any], loss_fn: Any, **options: Any) -> None:
        layers = [*layers[:1], self.scaled, *layers[1:6], self.turned, *layers[6:]]
        super().__init__(layers=layers, loss_fn=self.loss, **options)
        self.num_scaled, self.counts, self.turn = 0, {"losses": 0}, 0.5
        self.register_buffer("centre", torch.zeros(4))
        self.latest = nn.BatchNorm1d(4, affine=False, momentum=0.5)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        self.num_scaled += 1
        return x * (1 - 0.9**self.num_scaled)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.turn

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.counts["losses"] += 1
        self.centre.lerp_(outputs.detach().mean(0), 0.1)
        self.latest(outputs.detach())
        return loss_fn(outputs - self.centre - self.latest.running_mean, labels) * (1 + self.counts["losses"] / 10)


def what_a_pipeline_module_keeps_itself(_: Path) -> None:
    """A method of it that is a layer, or the loss, had counted the runs in which it was measured."""
    data = batches(5)
    expected = train(start(mlp(), [0, 3, 10], optimizer=two_groups, module_class=OwnState)[0], data)
    for options in ({}, {"warmup_steps": 2}):
        with said_here() as said:
            engine, _, _ = start(
                mlp(), "madpipe", planned([0, 3, 10], **options), optimizer=two_groups, module_class=OwnState
            )
            losses = train(engine, data[:3])
            engine.recut([0, 1, 10])
        same(losses + train(engine, data[3:]), expected)
        lines = [line for line in said if "while it runs, which layer" in line or "has changed where" in line]
        assert not lines, lines  # DeepSpeed's own counts on the module are no layer's


def reading(box: dict[str, Any], place: Any, *, counts: bool) -> Any:
    """A layer that reads what stands around it, and may count there."""

    def scale(x: torch.Tensor) -> torch.Tensor:
        place.num_calls += counts
        return x * (1 - 0.05 * box["engine"].global_steps) * (place.factor - place.num_calls / 100)

    return scale


class Applies(nn.Module):
    """Applies a function that the script gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.function: Any = torch.sigmoid

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def functions_of_a_file_go_with_layers(_: Path) -> None:
    """That is the way out where a lambda, which stays, is told of."""
    data = batches(2)
    for function, num_lines in ((torch.tanh, 0), (halved, 0), (lambda x: x / 2, 1)):
        losses = {}
        for moves in (False, True):
            with said_here() as said:
                layers = [*mlp()[:3], LayerSpec(Applies), *mlp()[3:]]
                engine, _, _ = start(layers, [0, 5, 9], optimizer=two_groups)
                for layer in engine.module.modules():
                    if isinstance(layer, Applies):
                        layer.function = function
                if moves:
                    engine.recut([0, 2, 9])
                losses[moves] = train(engine, data)
            lines = [line for of_rank in gather_objects(said) for line in of_rank if "has changed where" in line]
            assert len(lines) == num_lines * moves, lines
        if not num_lines:
            same(losses[True], losses[False])


def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def what_a_script_changes_on_every_rank_is_no_layers(_: Path) -> None:
    """An engine in a dict, and a factor that it sets, were said to be changed by the layer that reads them."""
    data = batches(4)

    def trained(boundaries: list[int], *, counts: bool, moves: bool) -> list[float]:
        box, place = {"engine": None}, SimpleNamespace(factor=1.0, num_calls=0)
        layers = [*mlp()[:3], reading(box, place, counts=counts), *mlp()[3:]]
        engine, _, _ = start(layers, boundaries, optimizer=two_groups)
        box["engine"], losses = engine, []
        for number, step in enumerate(data):
            place.factor = 1 - number / 10
            if number == 2 and moves:
                engine.recut([0, 2, 9])
            losses += train(engine, [step])
        return losses

    expected = trained([0, 5, 9], counts=False, moves=False)
    for counts in (False, True):
        with said_here() as said:
            losses = trained([0, 5, 9], counts=counts, moves=True)
        lines = [line for of_rank in gather_objects(said) for line in of_rank if "has changed where" in line]
        if counts:
            [line] = lines
            assert "place (SimpleNamespace), which layer 3 (scale) reads, has changed where that ran" in line, line
        else:
            same(losses, expected)
            assert not lines, lines


CASES = [
    what_layers_keep_is_as_before, what_a_loss_keeps_is_as_before, what_is_written_while_layers_are_measured,
    what_is_written_to_files_that_a_loss_opens, what_cannot_be_undone_is_said_once,
    counts_go_with_layers_that_move, objects_and_hidden_modules_go_with_layers, extra_states_go_with_layers,
    counts_beside_layers_go_with_them, what_a_program_recomputes_itself_is_named,
    what_a_pipeline_module_keeps_itself, what_a_script_changes_on_every_rank_is_no_layers,
    functions_of_a_file_go_with_layers,
]  # fmt: skip
