"""Cases: what a script replaces, deletes or adds within layers that are built is so where they move, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.utils._pytree import tree_leaves

from deepspeed_partition.engine.repartition import optimizer_state
from deepspeed_partition.engine.runtime.collectives import gather_objects
from tests.engine.pipelines import WIDTH, mlp, two_groups
from tests.engine.running import batches, planned, raised, same, start, train
from tests.engine.strangers_cases import looped, note, said_here, seeded

Change = Callable[[Any], None]


class Cell(nn.Module):
    """A layer of several parts, most of them without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Tanh()
        self.again = self.act
        self.behind = nn.Sequential(nn.Identity(), nn.Hardtanh())
        self.extra = None
        self.in_list = [nn.Tanh()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.again(self.behind(self.act(self.in_list[0](self.linear(x)))))
        return x if self.extra is None else self.extra(x)


class Turned(Cell):
    """What the class of a layer is changed to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(-x)


class Steep(nn.Module):
    """An activation with attributes and a part of its own."""

    def __init__(self, slope: float, *inner: nn.Module) -> None:
        super().__init__()
        self.slope, self.inner = slope, inner[0] if inner else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.slope * (x if self.inner is None else self.inner(x))


def _defined_in_a_function() -> type:
    class OnlyHere(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x)

    return OnlyHere


OnlyHere = _defined_in_a_function()


def _replaced(cell: Cell) -> None:
    cell.act = nn.LeakyReLU(0.3)


def _wrapped(cell: Cell) -> None:
    cell.act = Steep(0.7, Steep(1.5, cell.act))


def _of_a_local_class(cell: Cell) -> None:
    cell.act = cell.again = OnlyHere()


def _deleted(cell: Cell) -> None:
    del cell.behind[1]


def _appended(cell: Cell) -> None:
    cell.behind.append(nn.Hardshrink())


def _set(cell: Cell) -> None:
    cell.extra = Steep(0.5, cell.linear)


def _swapped(cell: Cell) -> None:
    cell.__class__ = Turned
    cell.behind.__class__ = OfTwo


class OfTwo(nn.Sequential):
    """What the class of a part is changed to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


def cells(*, built: bool) -> list[Any]:
    cell = (lambda: seeded(Cell)) if built else (lambda: LayerSpec(Cell))
    ends = [(8, WIDTH), (WIDTH, 4)]
    first, last = (seeded(nn.Linear, *each) if built else LayerSpec(nn.Linear, *each) for each in ends)
    return [first, *[cell() for _ in range(6)], last]


def _change(module: nn.Module, *changes: Change) -> None:
    """Change the cells by their numbers in the model."""
    for name, layer in module.named_modules():
        if isinstance(layer, Cell):
            changes[(int(name) - 1) % len(changes)](layer)


def _all_of_them(cell: Cell) -> None:
    for change in (_wrapped, _deleted, _set, _swapped):
        change(cell)


def parts_that_a_script_changes(_: Path) -> None:
    """A layer that moved had them as they were built, or an error without a sentence ended the run."""
    data = batches(3)
    changes = (_replaced, _all_of_them, _of_a_local_class, _appended, _set, _swapped)
    for built, is_before in ((True, False), (False, True), (True, True)):

        def optimizer(module: Any, *, is_changed: bool = is_before) -> Any:
            _change(module, *changes) if is_changed else None
            return two_groups(module)

        def trained(engine: Any, *cuts: Any, is_changed: bool = is_before) -> list[float]:
            losses = train(engine, data[:1])
            _change(engine.module, *changes) if not is_changed else None
            losses += train(engine, data[1:2])
            for place in cuts:
                engine.recut(place)
            return losses + train(engine, data[2:])

        expected = trained(start(cells(built=built), [0, 4, 8], optimizer=optimizer)[0])
        config = planned([0, 1, 8], warmup_steps=2)
        engine, _, _ = start(cells(built=built), "madpipe", config, optimizer=optimizer)
        assert engine.module.parts == [0, 4, 8]
        same(trained(engine, looped(), [0, 7, 8], [0, 1, 8]), expected)


def _scaled(cell: Cell, factor: float) -> None:
    run = cell.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        return factor * run(x)

    cell.forward = forward  # type: ignore[method-assign]


def functions_that_a_script_puts_into_layers_on_each_rank(_: Path) -> None:
    """A line said of each that other ranks have their own, where the script had given all the same."""
    data = batches(2)

    def trained(cut: Any, factor: float) -> tuple[list[float], list[str]]:
        layers = cells(built=True)
        engine, _, _ = start(layers, [0, 4, 8], optimizer=two_groups)
        losses = train(engine, data[:1])
        for layer in layers:
            if isinstance(layer, Cell):
                _scaled(layer, factor)
        with said_here() as sentences:
            engine.recut(cut)
        losses += train(engine, data[1:])
        return losses, [each for of_rank in gather_objects(sentences) for each in of_rank if "forward" in each]

    expected, _ = trained([0, 4, 8], 0.5)
    losses, said = trained([0, 1, 8], 0.5)
    same(losses, expected)
    assert said == []
    _, said = trained([0, 1, 8], 0.5 + dist.get_rank())
    assert len(said) == 1 and ".forward (function) has changed where its layer ran" in said[0], said


def parts_that_a_script_changes_and_that_stay_are_refused(_: Path) -> None:
    def in_a_list(cell: Cell) -> None:
        cell.in_list = [nn.ReLU()]

    def of_an_unknown_class(cell: Cell) -> None:
        cell.act = _defined_in_a_function()()

    def with_a_function(cell: Cell) -> None:
        cell.act = Steep(0.5)
        cell.act._chosen = lambda x: x

    def with_a_hook(cell: Cell) -> None:
        cell.act = Steep(0.5)
        cell.act.register_forward_hook(note)

    def with_a_weight_of_another(cell: Cell) -> None:
        cell.extra = Steep(0.5)
        cell.extra.weight = cell.linear.weight

    for number, (change, words) in enumerate(
        {
            in_a_list: "its in_list[0], in a list or an object, is a ReLU",
            of_an_unknown_class: "OnlyHere, a class that is not found by its name",
            with_a_function: "its act has the attribute '_chosen', a function",
            with_a_hook: "strangers_cases.note (forward_hooks of act), which would stay behind",
            with_a_weight_of_another: "its extra is a Steep, which has buffers or shares weights",
        }.items()
    ):
        engine, _, _ = start(cells(built=number % 2 == 0), [0, 4, 8], optimizer=two_groups)
        losses = train(engine, batches(1))
        _change(engine.module, change)
        with raised(RuntimeError, "cannot be moved", words, "__init__", "let no layer move"):
            engine.recut(looped())
        assert len(losses + train(engine, batches(1))) == 2


class Gate(nn.Module):
    """A layer without parameters, with a number that a script sets."""

    def __init__(self) -> None:
        super().__init__()
        self.opening = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.opening


def lists_of_layers_without_parameters_are_told(_: Path) -> None:
    """They do not follow: only how many layers moved was said. Made again of the module, they are right."""
    specs = [LayerSpec(nn.Linear, 8, WIDTH), LayerSpec(Gate), LayerSpec(Gate), LayerSpec(nn.Linear, WIDTH, 4)]
    data = batches(3)

    def trained(engine: Any, place: Any) -> list[float]:
        losses = []
        for number, step in enumerate(data):
            if number == 1:
                engine.recut(place)
            for gate in engine.module.modules():
                if isinstance(gate, Gate):
                    gate.opening = 1 - 0.2 * number
            losses += train(engine, [step])
        return losses

    expected = trained(start(specs, [0, 3, 4], optimizer=two_groups)[0], [0, 3, 4])
    with said_here() as sentences:
        same(trained(start(specs, [0, 3, 4], optimizer=two_groups)[0], [0, 1, 4]), expected)
    [told] = [each for each in sentences if "(no parameters)" in each]
    words = f"rank {dist.get_rank()} {('no longer has', 'has')[dist.get_rank()]} layers 1 and 2 (no parameters)"
    assert told.startswith(words) and "does not follow: make it again of engine.module" in told, told


class Weighed(nn.Module):
    """A layer that is given a tensor and an array, a list of one and an object with one."""

    def __init__(self, weight: Any, mask: Any, *inner: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight, self.mask = weight, mask
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        listed, named = self.inner
        masked = torch.tanh(self.linear(x)) * torch.from_numpy(self.mask.copy())
        return x + masked * self.weight * listed[0] * named.weight


def _weigh(x: torch.Tensor, *, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


def tensors_that_a_script_changes_in_place(_: Path) -> None:
    """A layer that moved had copies; it has those of its new process that it has had from the start."""
    data = batches(5)

    def trained(places: Any, *, built: bool, sets_later: bool = False, sets_again: bool = False) -> list[float]:
        weight, mask = torch.ones(WIDTH), numpy.ones(WIDTH, dtype=numpy.float32)
        inside = torch.ones(WIDTH)
        given = torch.ones(WIDTH) if sets_later else weight, mask, [inside], SimpleNamespace(weight=inside)
        inner = [seeded(Weighed, *given) if built else LayerSpec(Weighed, *given) for _ in range(5)]
        ends = [(8, WIDTH), (WIDTH, 4)]
        first, last = (seeded(nn.Linear, *each) if built else LayerSpec(nn.Linear, *each) for each in ends)
        engine, _, _ = start(
            [first, *inner, partial(_weigh, weight=weight), last], [0, 4, 8], optimizer=two_groups
        )
        losses = []
        for number, step in enumerate(data):
            if number:
                engine.recut(places[number - 1])
            weight[: 2 * number] *= 0.5
            mask[number] = 0
            inside[number:] *= 0.8
            if sets_again or (sets_later and not number):
                for layer in engine.module.modules():
                    if isinstance(layer, Weighed):
                        layer.weight = weight
            losses += train(engine, [step])
        return losses

    stays, moves = [[0, 4, 8]] * 4, ([0, 1, 8], looped(), [0, 7, 8], [0, 4, 8])
    for built in (True, False):
        expected = trained(stays, built=built)
        with said_here() as sentences:
            same(trained(moves, built=built), expected)
            same(trained(moves, built=built, sets_again=True), expected)
        assert not [each for each in sentences if "as a copy" in each], sentences
    with said_here() as sentences:
        trained(moves, built=False, sets_later=True)
    [told] = [each for of_rank in gather_objects(sentences) for each in of_rank if "as a copy" in each]
    assert told.startswith("Weighed.weight (Tensor), which is weight in the script, goes with its layer"), told
    same(trained(moves, built=False, sets_later=True, sets_again=True), expected)


class Masked(nn.Module):
    """Makes its buffers in its first forward, and lets go of one that it begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Identity()
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("start", torch.ones(3))
        self.register_buffer("old", torch.ones(2))
        self.in_list = [nn.Identity()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.register_buffer("mask", x.detach()[0].sign(), persistent=False)
            self.inner.register_buffer("mask", self.mask, persistent=False)
            self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64))
            self.in_list[0].register_buffer("scale", x.detach().abs().mean() + 1)
            self.start = None
            del self.old
        self.seen += 1
        assert self.start is None and not hasattr(self, "old") and self.inner.mask is self.mask
        assert list(self.state_dict()) == ["seen", "linear.weight", "linear.bias"]
        return x + self.mask * torch.tanh(self.linear(x)) / self.in_list[0].scale + (self.seen / 100).float()


def _trains_alike_where_it_moves(layer: type[nn.Module]) -> None:
    """Six layers of a class move behind a warm-up and twice more, built by the program and by specifications."""
    data = batches(4)

    def layers(*, built: bool) -> list[Any]:
        middle = [seeded(layer) if built else LayerSpec(layer) for _ in range(6)]
        ends = [(8, WIDTH), (WIDTH, 4)]
        first, last = (seeded(nn.Linear, *each) if built else LayerSpec(nn.Linear, *each) for each in ends)
        return [first, *middle, last]

    for built in (False, True):
        expected = train(start(layers(built=built), [0, 4, 8], optimizer=two_groups)[0], data)
        config = planned([0, 1, 8], warmup_steps=1)
        engine, _, _ = start(layers(built=built), "madpipe", config, optimizer=two_groups)
        losses = train(engine, data[:2])
        for place, step in zip(([0, 7, 8], [0, 1, 8]), data[2:], strict=True):
            engine.recut(place)
            losses += train(engine, [step])
        same(losses, expected)


def buffers_that_a_forward_makes_go_with_layers(_: Path) -> None:
    """The run ended when the warm-up was over: the specification builds them not yet."""
    _trains_alike_where_it_moves(Masked)


class Graph(nn.Module):
    """Neighbours in a graph, and tensors whose elements do not lie one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        near = torch.eye(WIDTH) + torch.eye(WIDTH).roll(1, 0)
        self.register_buffer("near", near.to_sparse())
        self.register_buffer("rows", near.to_sparse_csr())
        self.register_buffer("later", torch.eye(WIDTH))
        self.register_buffer("made", None)
        self.register_buffer("mask", torch.ones(1, WIDTH).expand(2**20, WIDTH))
        self.register_buffer("turned", torch.ones(WIDTH, 8).t())
        self.fixed = near.to_sparse_csc()
        self.teacher = [nn.Identity()]
        self.teacher[0].register_buffer("near", near.to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.made is None:
            self.made, self.later = (
                (self.near * x.detach().abs().mean()).coalesce(),
                self.later.to_sparse_bsr((2, 2)),
            )
            self.teacher[0].near = self.teacher[0].near * 2
        assert self.mask.untyped_storage().nbytes() == 4 * WIDTH, "one row"
        assert self.turned.stride() == (1, 8)
        near = self.near + self.made + self.teacher[0].near
        rest = self.rows.to_dense() + self.later.to_dense() + self.fixed.to_dense()
        return x + 0.1 * torch.sparse.mm(near, torch.tanh(self.linear(x)).t()).t() @ rest * self.mask[0]


def tensors_go_as_they_lie_in_memory(_: Path) -> None:
    """Sparse buffers ended the run behind its warm-up; an expanded mask was held with each of its elements."""
    _trains_alike_where_it_moves(Graph)


class Quantized(nn.Module):
    """Has a table that another process cannot be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.quantize_per_tensor(torch.ones(WIDTH), 0.1, 0, torch.qint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table.dequantize()


def tensors_that_cannot_be_sent_are_refused_before_the_warm_up(_: Path) -> None:
    layers = [
        LayerSpec(nn.Linear, 8, WIDTH),
        *(LayerSpec(Quantized) for _ in range(6)),
        LayerSpec(nn.Linear, WIDTH, 4),
    ]
    engine, _, _ = start(layers, "madpipe", planned([0, 1, 8], warmup_steps=1), optimizer=two_groups)
    with raised(RuntimeError, "layer '1' cannot be moved: table is a Tensor (torch.qint8)", "let no layer move"):
        train(engine, batches(1))
    assert engine.global_steps == 0


class Whitened(torch.optim.Optimizer):
    """Keeps, as SOAP does, a matrix for each dimension of a weight in a list, and more of them in a dict."""

    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in (each for each in group["params"] if each.grad is not None):
                state = self.state[weight]
                if not state:
                    state["factors"] = [torch.eye(length) for length in weight.shape]
                    state["more"] = {"mean": torch.zeros_like(weight), "names": ("a", 1)}
                state["factors"][0].mul_(0.9).diagonal().add_(0.1 * weight.grad.square().mean())
                state["more"]["mean"].mul_(0.9).add_(weight.grad)
                change = torch.tensordot(state["factors"][0], state["more"]["mean"], 1)
                weight.sub_(change, alpha=group["lr"])


def states_in_lists_go_to_the_rank_that_gets_the_layer(_: Path) -> None:
    """They went to every rank, as what is no tensor, and kept the device of the one that they came from."""
    data, gathered = batches(4), []

    def noted(value: Any, group: Any = None) -> list[Any]:
        found = gather_objects(value, group)
        gathered.append(found)
        return found

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Whitened(model.parameters(), lr=0.05)

    expected = train(start(mlp(), [0, 3, 8], optimizer=make)[0], data)
    engine, _, _ = start(mlp(), [0, 3, 8], optimizer=make)
    losses = train(engine, data[:2])
    with patch.object(optimizer_state, "gather_objects", noted):
        engine.recut([0, 6, 8])
    same(losses + train(engine, data[2:]), expected)
    of_states = [each[0] for found in gathered for each in found if isinstance(each, tuple)]
    values = [value for infos in of_states for info in infos.values() for value, _ in info.values.values()]
    assert values and not any(map(torch.is_tensor, tree_leaves(values))), values


class Convolved(nn.Module):
    """Has a weight whose elements lie in memory in the order of channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 2, padding="same").to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x.view(len(x), 4, -1, 2)
        return x + torch.tanh(self.conv(images)).reshape(x.shape)


def fused_optimizers_go_on_with_weights_in_channels_last(_: Path) -> None:
    """Fused ones pair elements by their order in memory: weights kept theirs, and states came contiguous."""
    data = batches(4)
    layers = [
        LayerSpec(nn.Linear, 8, WIDTH),
        *(LayerSpec(Convolved) for _ in range(6)),
        LayerSpec(nn.Linear, WIDTH, 4),
    ]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.05, fused=True)

    expected = train(start(layers, [0, 3, 8], optimizer=make)[0], data)
    engine, _, _ = start(layers, [0, 3, 8], optimizer=make)
    losses = train(engine, data[:2])
    engine.recut([0, 6, 8])
    same(losses + train(engine, data[2:]), expected)
    for weight in (each.conv.weight for each in engine.module.modules() if isinstance(each, Convolved)):
        strides = {weight.stride(), engine.optimizer.state[weight]["exp_avg"].stride()}
        assert strides == {(16, 1, 8, 4)}, strides


class Angles(nn.Module):
    """Makes its table when it runs first; layers share it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1, WIDTH)
        return x * self.table


class Turning(nn.Module):
    """Holds a module where torch does not look, and one that it lets go of."""

    def __init__(self, angles: nn.Module | None, teacher: nn.Module, *, lets_go: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.angles = [] if angles is None else [angles]
        self.teachers, self.lets_go = [teacher], lets_go

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in (*self.angles, *self.teachers):
            x = x + torch.tanh(self.linear(each(x)))
        if self.lets_go:
            self.teachers = []
        return x


def buffers_of_modules_that_layers_share(_: Path) -> None:
    """One that a forward had made came empty, and those of a module that a layer let go of left other layers."""
    data = batches(4)

    def layers() -> list[Any]:
        angles, teacher = Angles(), nn.BatchNorm1d(WIDTH).requires_grad_(False).eval()
        middle = [LayerSpec(Turning, angles if each > 2 else None, teacher, lets_go=each > 2) for each in range(6)]
        return [LayerSpec(nn.Linear, 8, WIDTH), *middle, LayerSpec(nn.Linear, WIDTH, 4)]

    expected = train(start(layers(), [0, 4, 8], optimizer=two_groups)[0], data)
    engine, _, _ = start(layers(), [0, 4, 8], optimizer=two_groups)
    losses = train(engine, data[:2])
    engine.recut([0, 7, 8])
    same(losses + train(engine, data[2:]), expected)


CASES = [
    functions_that_a_script_puts_into_layers_on_each_rank,
    tensors_that_a_script_changes_in_place,
    lists_of_layers_without_parameters_are_told,
    parts_that_a_script_changes,
    parts_that_a_script_changes_and_that_stay_are_refused,
    buffers_that_a_forward_makes_go_with_layers,
    tensors_go_as_they_lie_in_memory,
    tensors_that_cannot_be_sent_are_refused_before_the_warm_up,
    states_in_lists_go_to_the_rank_that_gets_the_layer,
    fused_optimizers_go_on_with_weights_in_channels_last,
    buffers_of_modules_that_layers_share,
]
