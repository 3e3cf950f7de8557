"""What a model's code does besides calling modules and torch functions is done by the layers, or refused."""

from __future__ import annotations

import copy
import functools
import importlib
import linecache
import re
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from deepspeed_partition.capture import (  # noqa: E402
    CaptureError,
    ShapeError,
    capture,
    draws,
    layers_as_they_are,
)
from deepspeed_partition.capture.draws import digest_of  # noqa: E402
from deepspeed_partition.capture.reads_in_code import ReadsInCode  # noqa: E402
from deepspeed_partition.capture.recording import Call, Template  # noqa: E402
from deepspeed_partition.capture.structure import LEAF, build, flatten  # noqa: E402
from tests.capture.comparing import assert_same, captured_layers, run_in_order  # noqa: E402


class Deciding(nn.Module):
    """Stays whole, for it decides by data what it returns."""

    def __init__(self, usual: Callable[[Any], Any], other: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.usual, self.other = nn.Linear(8, 8), usual, other

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.linear(x)
        return (self.usual if x.sum().item() < 1000 else self.other)(hidden)


class Around(nn.Module):
    """Goes by what its middle returns besides a tensor."""

    def __init__(self, middle: nn.Module, use: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.middle, self.last, self.use = nn.Linear(8, 8), middle, nn.Linear(8, 8), use

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.use(self.middle(self.first(x) * 0 + x)))


def add_second(pair: Any) -> Any:
    return pair[0] if pair[1] is None else pair[0] + pair[1]


RETURNED = {
    "None": (lambda x: (x, None), lambda x: (x, x), add_second, "returned a tensor, and None when"),
    "a tensor": (lambda x: (x, x), lambda x: (x, None), add_second, "returned None, and a tensor when"),
    "keys": (
        lambda x: {"a": x}, lambda x: {"b": x}, lambda found: found.get("a", 2 * found.get("b", 0)),
        "returned values by the names 'b', and by the names 'a' when",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", RETURNED)
def test_another_kind_of_value_that_a_module_returns_is_refused(kind):
    """The layers went on as in the capture, where the model's code would have gone another way."""
    usual, other, use, refusal = RETURNED[kind]
    model = Around(Deciding(usual, other), use)
    layers = captured_layers(model, torch.zeros(3, 8))
    x = torch.randn(3, 8)
    torch.testing.assert_close(run_in_order(layers, x), model(x))
    with pytest.raises(ShapeError, match=refusal):
        run_in_order(layers, torch.full((3, 8), 1000.0))


class Masked(nn.Module):
    """A block that looks a mask up, in one of the ways in which code keeps one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind
        self.masks: dict[Any, Any] = {}
        self.register_buffer("mask", None)
        self.cached = functools.lru_cache(causal)
        self.kept = Kept()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self._mask(x.shape[1]).sum(0)[:, None]

    def _mask(self, length: int) -> torch.Tensor:
        if self.kind == "buffer":
            if self.mask is None or self.mask.shape[0] < length:
                self.register_buffer("mask", causal(length), persistent=False)
            return self.mask[:length, :length]
        if self.kind.endswith("cache"):
            return {"cache": cached, "unbounded cache": kept_for_ever, "own cache": self.cached}[self.kind](length)
        table = {"dict": self.masks, "dict of the file": MASKS, "dict of an object": self.kept.masks}[self.kind]
        if length not in table:
            table[length] = causal(length)
        return table[length]


class Kept:
    def __init__(self) -> None:
        self.masks: dict[Any, Any] = {}


MASKS: dict[Any, Any] = {}


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length).tril()


cached, kept_for_ever = functools.lru_cache(causal), functools.cache(causal)


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize(
    "kind",
    ["buffer", "dict", "dict of the file", "dict of an object", "cache", "unbounded cache", "own cache"],
)
def test_what_code_keeps_of_a_capture_is_taken_back(kind, opened):
    """Masks without data stayed in buffers, dicts and caches: the next capture, or the model itself, met them."""
    blocks = nn.Sequential(*(Masked(kind) for _ in range(3)))
    model = nn.Sequential(nn.Linear(8, 8), blocks[0]) if opened else nn.Sequential(*blocks, *blocks)
    layers = captured_layers(model, torch.randn(3, 6, 8))
    assert_same(model, layers, [((torch.randn(2, 6, 8),), {})])  # in evaluation, too: a capture of its own
    model(torch.randn(2, 6, 8))
    again = captured_layers(model, torch.randn(3, 6, 8))
    assert_same(model, again, [((torch.randn(2, 6, 8),), {})])


class Hanging(nn.Module):
    """Hangs hooks on gradients in its own code, between its layers."""

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor], where: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.hook, self.where = hook, where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "input" and x.requires_grad:
            x.register_hook(self.hook)
        skipped = self.layers[0](x)
        if self.where == "changed":
            skipped.mul_(0.5)
        if skipped.requires_grad and self.where != "weight":
            skipped.register_hook(self.hook)
        if self.where == "weight":
            self.layers[0].weight.register_hook(self.hook)
        for layer in self.layers[1:]:
            x = layer(x).tanh() + skipped  # all of them reach back
            x.retain_grad() if x.requires_grad else None
        return x


@pytest.mark.parametrize("where", ["between", "changed", "input"])
@pytest.mark.parametrize("within", [False, True])
def test_hooks_on_gradients_between_layers_are_hung_in_each_run(where, within):
    """They were hung on the tensors of the capture alone: a gradient was not clamped, or not reversed."""
    seen: list[int] = []
    gradients: list[Any] = []
    model: nn.Module = Hanging(lambda gradient: seen.append(0) or -3 * gradient.clamp(-1e-3, 1e-3), where)
    model = nn.Sequential(nn.Linear(8, 8), model) if within else model
    x = torch.randn(3, 8, requires_grad=where == "input")
    layers = captured_layers(model, x)
    assert len(layers) > 3 and not seen
    assert_same(model, layers, [((x,), {})])
    num_hooks = len(seen)
    assert num_hooks and num_hooks % 2 == 0  # as many by the layers as by the model
    if where == "input":
        for run in (model, functools.partial(run_in_order, layers)):
            own = x.detach().requires_grad_()  # a hook stays on it
            run(own).sum().backward()
            gradients.append(own.grad)
        torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(run_in_order(layers, x), model(x))


def test_a_hook_on_a_weight_that_forward_hangs_is_refused():
    with pytest.raises(CaptureError, match=r"hook on the gradient of the weight layers\.0\.weight.*test_beside"):
        capture(Hanging(lambda gradient: gradient * 2, "weight"), (torch.randn(3, 8),))
    block = nn.Sequential(nn.Linear(8, 8), Hanging(lambda gradient: gradient * 2, "weight"))
    assert "1" in captured_layers(block, torch.randn(3, 8)).recipe.names[-1]  # as a module it stays whole


def test_a_hook_that_holds_a_tensor_of_the_capture_is_refused():
    class Weighted(Hanging):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = x.detach().mean()
            x = self.layers[0](x)
            x.register_hook(functools.partial(torch.mul, factor))
            return self.layers[1](x)

    with pytest.raises(CaptureError, match=r"a function is handed on that holds tensors \(.*test_beside"):
        capture(Weighted(torch.neg, ""), (torch.randn(3, 8),))


HOOKS: dict[str, Callable[[nn.Module, Callable[..., Any]], Any]] = {
    "forward": nn.Module.register_forward_hook,
    "forward pre": nn.Module.register_forward_pre_hook,
    "backward": nn.Module.register_full_backward_hook,
    "backward pre": nn.Module.register_full_backward_pre_hook,
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_module_with_a_hook_of_any_kind_stays_whole(kind):
    """Hooks on the backward of a module that was opened were called by nobody."""
    called = []
    block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = nn.Sequential(block, nn.Linear(8, 8))
    HOOKS[kind](block, lambda *_: called.append(kind))
    layers = layers_as_they_are(model, (torch.randn(3, 8),), {})
    called.clear()
    run_in_order(layers, torch.randn(3, 8)).sum().backward()
    assert called == [kind]


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_on_what_is_cut_into_layers_is_refused(kind):
    """It was not called, and nothing was said; nor where it was hung on later."""

    noted: list[Any] = []

    def note(*given: Any) -> None:
        noted.append(len(given))

    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8))
    layers = layers_as_they_are(model, (torch.randn(3, 8),), {})
    run_in_order(layers, torch.randn(3, 8))
    for part, place in ((model, "Sequential"), (model[0], r"0 \(Sequential\)")):
        handle = HOOKS[kind](part, note)
        with pytest.raises(CaptureError, match=rf"^{place} has a {kind} hook \(note\), which no layer calls"):
            run_in_order(layers, torch.randn(3, 8))
        handle.remove()
    run_in_order(layers, torch.randn(3, 8))
    HOOKS[kind](model, note)
    with pytest.raises(CaptureError, match=rf"Sequential has a {kind} hook \(note\)"):
        layers_as_they_are(model, (torch.randn(3, 8),), {})


FACTOR_OF_HOOK = 2.0


def test_a_hook_that_only_computes_is_part_of_the_layers():
    """It was refused, and is in what is written down; what is hung on gradients there is hung in each run."""

    for hook in (
        lambda module, given, output: output * FACTOR_OF_HOOK + torch.tanh(output) * module[1].weight.mean(),
        lambda module, given, output: output.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3)) and None,
        lambda module, given, output: F.relu(output),
    ):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 8)
        handle = model.register_forward_hook(hook)
        layers = layers_as_they_are(model, (x,), {})
        assert len(layers) == 2
        assert_same(model, layers, [((x,), {})], modes=[True])
        handle.remove()
        assert_same(model, layers, [((x,), {})], modes=[True])
    model.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    assert_same(model, layers_as_they_are(model, (x,), {}), [((x,), {})])


def test_a_number_that_a_computing_hook_reads_may_change():
    global FACTOR_OF_HOOK
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 8)
    model.register_forward_hook(lambda module, given, output: output * FACTOR_OF_HOOK)
    layers = layers_as_they_are(model, (x,), {})
    FACTOR_OF_HOOK = 3.0
    torch.testing.assert_close(run_in_order(layers, x), model(x))
    seen: list[Any] = []
    for hook in (
        lambda module, given, output: seen.append(output),
        lambda module, given, output: print(output.shape),
        lambda module, given, output: setattr(module, "seen", output),
    ):
        handle = model.register_forward_hook(hook)
        with pytest.raises(CaptureError, match=r"has a forward hook \(.*which no layer calls.*such as its blocks"):
            layers_as_they_are(model, (x,), {})
        handle.remove()


class Projecting(nn.Module):
    """Projects onto numbers that are the same in each call, for it seeds what it draws them from."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) @ self._drawn())

    def _drawn(self) -> torch.Tensor:
        if self.kind == "fork_rng()":
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return torch.randn(8, 8)
        if self.kind == "manual_seed()":
            torch.manual_seed(0)
            return torch.randn(8, 8)
        if self.kind == "self.generator":
            return torch.randn(8, 8, generator=self.generator.manual_seed(0))
        return torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["fork_rng()", "manual_seed()", "self.generator", "torch.Generator()"])
def test_code_that_seeds_is_refused_or_stays_whole(kind):
    """It seeded in the capture alone: the layers drew other numbers in each run."""
    with pytest.raises(
        CaptureError, match=rf"Projecting (sets the .* by|draws .* from) {re.escape(kind)}.*test_bes"
    ):
        layers_as_they_are(Projecting(kind), (torch.randn(3, 8),), {})
    model = nn.Sequential(Projecting(kind), nn.Linear(8, 8))
    layers = layers_as_they_are(model, (torch.randn(3, 8),), {})
    x = torch.randn(3, 8)
    for _ in range(2):
        torch.testing.assert_close(run_in_order(layers, x), model(x))


of_another_name, PackingHooks = (
    torch.autograd.graph.register_multi_grad_hook,
    torch.autograd.graph.saved_tensors_hooks,
)


class HooksGraph(nn.Module):
    """Hangs hooks on the graph, in one of the ways that torch has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind, self.heard = nn.Linear(8, 8), nn.Linear(8, 8), kind, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        graph: Any = torch.autograd.graph
        x = self.first(x)
        if "_grad_hook" in self.kind:
            register = graph.register_multi_grad_hook if self.kind.startswith("register") else of_another_name
            register((x,), lambda _: self.heard.append(1), mode="any" if "any" in self.kind else "all")
            return self.last(x)
        if "grad_fn" in self.kind or "edge" in self.kind:
            self._hook_node(graph.get_gradient_edge(x).node if "edge" in self.kind else x.grad_fn)
            return self.last(x)
        kept = PackingHooks if "another" in self.kind else graph.saved_tensors_hooks
        with graph.save_on_cpu() if self.kind == "save_on_cpu" else kept(self.pack, lambda x: x):
            return self.last(x)

    def _hook_node(self, node: Any) -> None:
        if node is None:  # in evaluation
            return
        assert isinstance(node, torch.autograd.graph.Node) and "Addmm" in type(node).__name__
        node = node.next_functions[0][0] if "next" in self.kind else node
        register = node.register_prehook if "prehook" in self.kind else node.register_hook
        register(lambda *_: self.heard.append(1))

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        self.heard.append(1)
        return x


GRAPH_HOOKS = (
    "register_multi_grad_hook any", "register_multi_grad_hook all", "another_grad_hook any",
    "another_grad_hook all", "save_on_cpu", "saved_tensors_hooks", "another saved_tensors_hooks",
    "grad_fn.register_hook", "grad_fn.register_prehook", "grad_fn.next_functions", "get_gradient_edge",
)  # fmt: skip


@pytest.mark.parametrize("kind", GRAPH_HOOKS)
def test_code_that_hangs_hooks_on_the_graph_stays_whole(kind):
    """It was taken apart, and the hooks ran in the capture alone."""
    model = nn.Sequential(HooksGraph(kind), nn.Linear(8, 8))
    layers = layers_as_they_are(model, (torch.randn(3, 8),), {})
    model[0].heard.clear()
    run_in_order(layers, torch.randn(3, 8)).sum().backward()
    assert len(layers) == 2 and bool(model[0].heard) == (kind != "save_on_cpu")
    with pytest.raises(CaptureError, match=r"registers hooks on the graph by .*such as a block, stays whole"):
        layers_as_they_are(HooksGraph(kind), (torch.randn(3, 8),), {})


def test_a_hook_on_a_weight_is_not_left_behind():
    """A look at the elements of a module that stays whole left a hook on its weight."""

    class Accumulating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.heard = nn.Linear(8, 8), nn.Linear(8, 8), []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first.weight.register_post_accumulate_grad_hook(lambda _: self.heard.append(1))
            return self.last(self.first(x))

    model = nn.Sequential(Accumulating(), nn.Linear(8, 8))
    layers = layers_as_they_are(model, (torch.randn(3, 8),), {})
    run_in_order(layers, torch.randn(3, 8)).sum().backward()
    assert model[0].heard == [1]


def test_code_that_looks_at_a_graph_is_cut():
    """A class by which code goes is of the same name; nothing is registered."""

    class Looking(HooksGraph):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            linear = x.grad_fn is not None and type(x.grad_fn).__name__ == "AddmmBackward0"
            return self.last(x * 2 if linear else x)

    model = Looking("")
    layers = layers_as_they_are(model, (torch.randn(3, 8),), {})
    assert len(layers) == 2
    assert_same(model, layers, [((torch.randn(3, 8),), {})])


class CallsGenerator:
    """Draws from a generator that it holds."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rand(x.shape, generator=self.generator)


class Noisy(nn.Module):
    """Draws from a generator that is there before, wherever it is held."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind
        self.draw = functools.partial(torch.rand, generator=torch.Generator().manual_seed(3))
        self.noise = CallsGenerator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.kind == "common":
            return self.last(x + torch.rand(x.shape, generator=torch.default_generator))
        return self.last(x + (self.draw(x.shape) if self.kind == "partial" else self.noise(x)))


@pytest.mark.parametrize("kind", ["common", "partial", "object"])
def test_generators_that_are_held_somewhere_are_not_seeded(kind):
    """They were taken for ones that the code makes, which was refused."""
    model, x = Noisy(kind), torch.randn(3, 8)
    layers = layers_as_they_are(model, (x,), {})
    assert len(layers) == 2
    torch.manual_seed(3)
    alone, found = copy.deepcopy(model), run_in_order(layers, x)
    torch.manual_seed(3)
    if kind == "common":  # a copy of a generator is another one
        torch.testing.assert_close(found, alone(x))


class Keeping(nn.Module):
    """Keeps something in an attribute, in one of the ways in which code does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind
        self.state: Any = None
        self.num_runs = self.length = 0
        self.num_seen, self.seconds = 0, 0.0
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.kind == "state":
            x = x if self.state is None else x + self.state
            self.state = x.detach().mean(0)
        elif self.kind == "buffer":
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            x = x - self.mean
        elif self.kind == "num_runs":
            self.num_runs += 1
            x = x * (2 if self.num_runs > 2 else 1)
        elif self.kind == "only counted":
            self.num_seen += 1
            self.seconds = time.perf_counter()
        elif self.kind == "mask":
            if self.state is None or self.state.shape[0] < x.shape[0]:
                self.state = x.new_full((x.shape[0], x.shape[0]), -1.0).triu(1)
                self.state = self.state + torch.zeros_like(x[:, :1]).to(x).type_as(x)
            x = self.state[: x.shape[0], : x.shape[0]] @ x
        elif self.kind == "not read":
            self.state = x.detach()
        elif self.kind == "read behind":
            self.state = x.detach()
            x = x + self.state.mean()
        elif self.kind == "table":
            if self.length < int(x.shape[0]):
                self.length, self.table = int(x.shape[0]), torch.arange(int(x.shape[0]))[:, None]
            x = x + self.table[: x.shape[0]]
        return self.last(x)


@pytest.mark.parametrize(("kind", "name"), [("state", "state"), ("buffer", "mean"), ("num_runs", "num_runs")])
def test_what_code_keeps_for_its_next_run_is_refused_or_stays_whole(kind, name):
    """The layers began each run with what was there in the capture: truncated backpropagation had no state."""
    refusal = rf"^Keeping keeps self\.{name} for its next run \(.*test_beside_calls\.py:\d+\)"
    with pytest.raises(CaptureError, match=refusal):
        layers_as_they_are(Keeping(kind), (torch.randn(3, 8),), {})
    model = nn.Sequential(Keeping(kind), nn.Linear(8, 8))
    alone, layers = copy.deepcopy(model), layers_as_they_are(model, (torch.randn(3, 8),), {})
    for _ in range(4):
        x = torch.randn(3, 8)
        torch.testing.assert_close(run_in_order(layers, x), alone(x))


@pytest.mark.parametrize(("kind", "is_told"), [
    ("not read", True), ("read behind", True), ("table", False), ("only counted", False), ("mask", False),
])  # fmt: skip
def test_what_code_sets_for_this_run_alone_hinders_nothing(kind, is_told):
    model = Keeping(kind)
    layers = layers_as_they_are(model, (torch.randn(3, 8),), {})
    told = [note for note in layers.captured.notes if "self.state is not set while layers run" in note]
    assert len(layers) == 2 and len(told) == is_told
    assert_same(model, layers, [((torch.randn(3, 8),), {})])


class Scaling(nn.Module):
    """Multiplies by numbers that a program may change, each kept in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale, self.unread = nn.Linear(8, 8), nn.Linear(8, 8), 1.0, 0
        self.options, self.kept, self.is_deep = {"scale": 1.0}, Kept(), False
        self.kept.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        kept = torch.relu(x) if self.is_deep else x
        x = self.last(x) * self.scale * self.options["scale"] * self.kept.scale
        return x + kept.detach() if self.is_deep else x


CHANGED: dict[str, Callable[[Scaling, float], None]] = {
    "self.scale": lambda model, value: setattr(model, "scale", value),
    "self.options['scale']": lambda model, value: model.options.update(scale=value),
    "self.kept.scale": lambda model, value: setattr(model.kept, "scale", value),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("within", [False, True])
def test_a_number_that_code_reads_may_change(name, within):
    """It stayed what it was in the capture, in silence: a weight of a loss that a schedule lowers."""
    inner = Scaling()
    model = nn.Sequential(nn.Linear(8, 8), inner) if within else inner
    layers, x, told = layers_as_they_are(model, (torch.randn(3, 8),), {}), torch.randn(3, 8), []
    layers.recipe.outside.tell = lambda _, line: told.append(line)
    for value in (1.0, 0.5, 0.5, 3.0):
        CHANGED[name](inner, value)
        inner.unread += 1
        torch.testing.assert_close(run_in_order(layers, x), model(x))
    written = name.replace("self", "self.1") if within else name
    assert len(told) == 2 and told[0].startswith(f"{written} is 0.5 now and was 1.0")


def test_a_number_by_which_other_tensors_cross_boundaries_is_refused():
    model = Scaling()
    layers = layers_as_they_are(model, (torch.randn(3, 8),), {})
    model.is_deep = True
    with pytest.raises(CaptureError, match=r"^self\.is_deep is True now and was False: the code that reads it"):
        run_in_order(layers, torch.randn(3, 8))


class Keeper(nn.Module):
    """Does something with what its first layer makes, and with what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.features: list[Any] = []
        self.table: dict[str, Any] = {"num_runs": 0, "other": 0}
        self.held, self.running, self.num_runs, self.factors = Kept(), torch.zeros(8), 0, [1.0, 2.0]
        self.held.seen = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.change(self.first(x)))

    def change(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


OF_FILE = {"seen": None}
SEEN: Any = torch.zeros(8)
NUM_RUNS, FACTOR = 0, 1.0


class Appends(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.features.append(x.detach())
        return x + self.features[-1].mean()


class FillsTable(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.table["seen"] = x.detach()
        return x


class SetsOfObject(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.held.seen = x.detach()
        return x


class SetsVariable(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        global SEEN
        SEEN = x.detach()
        return x


class FillsOfFile(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        OF_FILE["seen"] = x.detach()
        return x


class ChangesInPlace(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.running.mul_(0.9).add_(x.detach().mean(0))
        return x


class CountsInTable(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.table["num_runs"] += 1
        return x


REMAINING: dict[str, type[Keeper]] = {
    "features": Appends, "table": FillsTable, "held": SetsOfObject, "SEEN": SetsVariable, "OF_FILE": FillsOfFile,
    "running": ChangesInPlace, "table ": CountsInTable,
}  # fmt: skip


@pytest.mark.parametrize("name", REMAINING)
def test_what_code_changes_beside_attributes_is_told(name):
    """Lists, dicts, objects, variables and plain tensors stayed what they were in the capture, in silence."""
    for model in (REMAINING[name](), nn.Sequential(REMAINING[name](), nn.Linear(8, 8))):
        layers = layers_as_they_are(model, (torch.randn(3, 8),), {})
        own = "self." * name.islower() + "0." * (name.islower() and len(layers) == 3) + name.strip()
        [told] = [note for note in layers.captured.notes if note.startswith(own)]
        assert f"{own} stays what it is while layers run" in told
        assert_same(model, layers, [((torch.randn(3, 8),), {})])
    OF_FILE["seen"] = None


class ReadsFirst(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.features.append(x.detach().mean(0))
        return x + self.features[0]


class ReadsTable(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        before = self.table.get("seen")
        self.table["seen"] = x.detach().mean(0)
        return x if before is None else x + before


class ReadsObject(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        before, self.held.seen = self.held.seen, x.detach().mean(0)
        return x if before is None else x + before


class ReadsVariable(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        global SEEN
        before, SEEN = SEEN, x.detach().mean(0)
        return x + before


class ReadsChanged(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.running.data.mul_(0.9).add_(x.detach().mean(0))
        return x - self.running


class ReadsCount(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.table["num_runs"] += 1
        return x * 2 if self.table["num_runs"] > 2 else x


class ReadsLength(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.factors.append(1.5)
        return x * len(self.factors)


class ReadsCountOfFile(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        global NUM_RUNS
        NUM_RUNS += 1
        return x * NUM_RUNS


READING: dict[str, type[Keeper]] = {
    "self.features[0]": ReadsFirst, "self.table['seen']": ReadsTable, "self.held.seen": ReadsObject,
    "SEEN": ReadsVariable, "self.running": ReadsChanged, "self.table": ReadsCount, "self.factors": ReadsLength,
    "NUM_RUNS": ReadsCountOfFile,
}  # fmt: skip


@pytest.mark.parametrize("name", READING)
def test_what_code_keeps_beside_attributes_is_refused_or_stays_whole(name):
    """The layers read what was there in the capture: lists, dicts, objects, variables, plain tensors."""
    global SEEN, NUM_RUNS
    SEEN, NUM_RUNS = torch.zeros(8), 0
    refusal = rf"^{READING[name].__name__} keeps {re.escape(name)} for its next run.*: let a module of its own"
    with pytest.raises(CaptureError, match=refusal):
        layers_as_they_are(READING[name](), (torch.randn(3, 8),), {})
    model, batches = nn.Sequential(READING[name](), nn.Linear(8, 8)), [torch.randn(3, 8) for _ in range(4)]
    alone, layers = copy.deepcopy(model), layers_as_they_are(model, (torch.randn(3, 8),), {})
    expected = [alone(x) for x in batches]
    SEEN, NUM_RUNS = torch.zeros(8), 0
    torch.testing.assert_close([run_in_order(layers, x) for x in batches], expected)


class ReadsHeld(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.running) * self.factors[0] * FACTOR


def test_tensors_lists_and_variables_that_code_reads_may_change():
    """They stayed what they were in the capture, in silence."""
    global FACTOR
    model, told = ReadsHeld(), list[str]()
    layers, x = layers_as_they_are(model, (torch.randn(3, 8),), {}), torch.randn(3, 8)
    layers.recipe.outside.tell = lambda _, line: told.append(line)
    torch.testing.assert_close(run_in_order(layers, x), model(x))
    model.running = torch.ones(8)
    torch.testing.assert_close(run_in_order(layers, x), model(x))
    model.factors[0] = 3.0
    torch.testing.assert_close(run_in_order(layers, x), model(x))
    FACTOR = 2.0
    torch.testing.assert_close(run_in_order(layers, x), model(x))
    assert [each.partition(" when ")[0] for each in told] == [
        "self.running is another tensor now than", "self.factors is another value now than",
        "FACTOR is 2.0 now and was 1.0",
    ]  # fmt: skip


class Shows(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        if self.num_runs % 2 == 1:
            print("run", self.num_runs, f"{self.table['num_runs']:.1f}")
        return x * (1 + self.table["other"])


def test_a_number_that_code_only_shows_may_change_without_a_recording(capsys):
    """Each step recorded the model anew, where a script counted what its code only prints."""
    model, told = Shows(), list[str]()
    layers, x = layers_as_they_are(model, (torch.randn(3, 8),), {}), torch.randn(3, 8)
    layers.recipe.outside.tell = lambda _, line: told.append(line)
    programs = layers.recipe.programs
    for _ in range(3):
        model.num_runs += 1
        model.table["num_runs"] += 1
        run_in_order(layers, x)
    assert layers.recipe.programs is programs and not told
    model.table["other"] = 1
    torch.testing.assert_close(run_in_order(layers, x), model(x))
    assert len(told) == 1 and told[0].startswith("self.table['other'] is 1 now and was 0 when the code that reads")


def test_code_whose_file_has_changed_since_is_taken_to_read_all_that_it_names(tmp_path, monkeypatch):
    """By the lines that stand there now, a number would be taken for one that is only printed."""
    file = tmp_path / "changing_code.py"
    file.write_text("def run(self, x):\n    return x * self.scale\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("changing_code").run
    assert ReadsInCode([function]).has_attribute("scale")
    other = importlib.reload(sys.modules["changing_code"]).run
    file.write_text("def run(self, x):\n    print(self.scale)\n    return x\n" + "# longer\n" * 9)
    linecache.clearcache()
    assert ReadsInCode([other]).has_attribute("scale")
    monkeypatch.delitem(sys.modules, "changing_code")


class AsksLength(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.factors[0] if len(self.factors) > 1 else x
        if len(self.features) > 50:
            self.features.clear()
        return x


def test_a_list_that_is_filled_for_nothing_is_not_followed_for_ever():
    """A loop that kept its losses in a list of the model had the model recorded in each step."""
    model, told, num_recorded = AsksLength(), list[str](), 0
    layers, x = layers_as_they_are(model, (torch.randn(3, 8),), {}), torch.randn(3, 8)
    layers.recipe.outside.tell = lambda _, line: told.append(line)
    run_in_order(layers, x)
    for step in range(8):
        programs = layers.recipe.programs
        model.features.append(torch.ones(()) * step)
        torch.testing.assert_close(run_in_order(layers, x), model(x))
        num_recorded += layers.recipe.programs is not programs
    assert num_recorded == 3 and told[-1].startswith("self.features has changed 3 times, and the code that reads")
    assert len([line for line in told if "3 times" in line]) == 1
    for value in range(3, 8):  # what changes the layers is followed all the same
        model.factors[0] = float(value)
        torch.testing.assert_close(run_in_order(layers, x), model(x))


class ReadsLong(Keeper):
    """Reads a list, and a table of which it may read any entry."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.factors[-1] if len(self.factors) > 1 else x
        return x * sum(self.table.values()) if len(self.table) > 50 else x


@pytest.mark.parametrize(
    "name, length, more",
    [
        ("factors", 50, 70), ("factors", 150, 70), ("factors", 15_000, 70), ("factors", 150, 0),
        ("factors", 15_000, 0), ("table", 150, 70), ("table", 15_000, 70), ("table", 150, 0), ("table", 15_000, 0),
    ],
)  # fmt: skip
def test_a_change_of_a_list_that_is_too_long_to_be_followed_is_told(name, length, more):
    """A list that grew past 100 members was said to be followed, and was not; of longer ones nothing was said."""
    model, told = ReadsLong(), list[str]()
    table: Any = getattr(model, name)

    def fill(length: int, value: float) -> None:
        if name == "table":
            table.update({str(len(table) + place): value for place in range(length)})
        else:
            table.extend([value] * length)

    fill(length, 1.0)
    layers, x = layers_as_they_are(model, (torch.randn(3, 8),), {}), torch.randn(3, 8)
    layers.recipe.outside.tell = lambda _, line: told.append(line)
    before = run_in_order(layers, x)
    torch.testing.assert_close(before, model(x))
    assert not told
    looked_at = layers.recipe.outside.values()[f"self.{name}"]
    assert length < 100 or len(looked_at.some) <= 64, "there is a look before each run of each layer"
    if more:
        fill(more, 0.5)
    else:
        table["0" if name == "table" else 0] = 0.5
    torch.testing.assert_close(run_in_order(layers, x), before)
    [line] = told
    assert line.startswith(f"self.{name} has changed, and has {len(table)} members: layers follow changes of")
    table.clear()
    run_in_order(layers, x)
    assert told == [line]


class FillsShared(nn.Module):
    """Fills a list in its own code that it asks for its length by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.losses = Appends(), Appends(), list[Any]()
        self.first.features = self.second.features = self.losses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        if len(self.losses) > 50:
            self.losses.clear()
        return x


def test_a_list_that_code_fills_is_not_compared_by_any_of_its_names():
    model = FillsShared()
    layers = layers_as_they_are(model, (torch.randn(3, 8),), {})
    model.losses.append(torch.ones(()))
    assert not layers.recipe.outside.changes()


class Sums(Keeper):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum(self.table.values())


def test_of_a_dict_that_code_reads_as_a_whole_that_is_told():
    model, told = Sums(), list[str]()
    layers, x = layers_as_they_are(model, (torch.randn(3, 8),), {}), torch.randn(3, 8)
    layers.recipe.outside.tell = lambda _, line: told.append(line)
    model.table["other"] = 1
    torch.testing.assert_close(run_in_order(layers, x), model(x))
    assert "when the code that reads self.table was written down" in told[0]


def test_entries_of_a_dict_that_code_reads_may_come_and_go():
    """Layers knew the entries that were there when they were made, and others changed nothing, in silence."""
    model = Sums()
    layers, x = layers_as_they_are(model, (torch.randn(3, 8),), {}), torch.randn(3, 8)
    for value in (2.0, 3.0, None, 4.0):
        if value is None:
            del model.table["new"]
        else:
            model.table["new"] = value
        torch.testing.assert_close(run_in_order(layers, x), model(x))


class ReadsWithin(Keeper):
    def __init__(self) -> None:
        super().__init__()
        self.place, self.of_places, self.nested = 1, {1: 1.0}, {"inner": {"value": 1.0}}

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.of_places[self.place] + self.nested["inner"]["value"]


def test_entries_by_numbers_and_entries_of_entries_may_change():
    """They stayed what they were in the capture, in silence: only entries by names of the first dict were read."""
    model = ReadsWithin()
    layers, x = layers_as_they_are(model, (torch.randn(3, 8),), {}), torch.randn(3, 8)
    torch.testing.assert_close(run_in_order(layers, x), model(x))
    model.of_places[1] = 2.0
    torch.testing.assert_close(run_in_order(layers, x), model(x))
    model.nested["inner"]["value"] = 3.0
    torch.testing.assert_close(run_in_order(layers, x), model(x))


class ReadsEntry(Keeper):
    def __init__(self) -> None:
        super().__init__()
        self.mode = "warm"

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table.get(self.mode, 1.0)


@pytest.mark.parametrize("kind", [dict, OrderedDict, functools.partial(defaultdict, float)])
@pytest.mark.parametrize("is_new", [False, True])
def test_entries_that_each_step_sets_for_nothing_are_not_followed_for_ever(kind, is_new):
    """A loop that counted its steps in a dict, of which code reads another entry, had each step recorded."""
    model, told, num_recorded = ReadsEntry(), list[str](), 0
    model.table = kind({"num_runs": 0})
    layers, x = layers_as_they_are(model, (torch.randn(3, 8),), {}), torch.randn(3, 8)
    layers.recipe.outside.tell = lambda _, line: told.append(line)
    run_in_order(layers, x)
    for step in range(1, 9):
        programs = layers.recipe.programs
        model.table[f"step {step}" if is_new else "num_runs"] = step
        torch.testing.assert_close(run_in_order(layers, x), model(x))
        num_recorded += layers.recipe.programs is not programs
    name = "self.table" if is_new else "self.table['num_runs']"
    assert num_recorded == 3
    assert [line for line in told if "3 times" in line] == [told[-1]]
    assert told[-1].startswith(f"{name} has changed 3 times, and the code that reads self.table ran the same")
    if not is_new:  # what changes the layers is followed all the same
        for value in range(2, 8):
            model.table["warm"] = float(value)
            torch.testing.assert_close(run_in_order(layers, x), model(x))


def doubling() -> Any:
    """Another class in each call, as in each process: of the same name, at another address."""

    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    return Doubling


class CallsFunctions(Keeper):
    def __init__(self) -> None:
        super().__init__()
        self.held.function, self.held.traced = doubling(), torch.jit.trace(torch.relu, torch.zeros(3, 8))

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return self.held.traced(self.held.function.apply(x))


def test_recordings_of_other_processes_are_compared_by_names():
    """A model that calls an autograd.Function was refused in its first batch: its class has an address."""
    models = [layers_as_they_are(CallsFunctions(), (torch.randn(3, 8),), {}) for _ in range(2)]
    assert len({digest_of(each.recipe.captured.graph.recording.root) for each in models}) == 1


class GivesOn(nn.Module):
    """Gives its blocks a tensor that it holds."""

    def __init__(self, held: torch.Tensor) -> None:
        super().__init__()
        self.held, self.blocks = held, nn.ModuleList(Takes() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.held)
        return x


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + held.shape[0]


HELD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x, "expanded": lambda x: x.expand(2, 8, 8),
    "complex": lambda x: x.to(torch.complex64).conj(), "sparse": lambda x: x.to_sparse(),
    "by rows": lambda x: x.to_sparse_csr(), "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}  # fmt: skip


@pytest.mark.parametrize("kind", HELD)
def test_a_tensor_that_the_layers_are_given_is_compared_by_a_digest(kind):
    """Of a mask of 4 MiB, 12 blocks made 1.7 GiB of text; what is no array of numbers was an error."""
    recordings = [Call(0, (), "", Template(LEAF, (HELD[kind](torch.eye(8) * factor),))) for factor in (1, 1, 2)]
    one, same, other = map(digest_of, recordings)
    assert one == same != other


def test_a_tensor_that_many_layers_are_given_is_read_once(monkeypatch):
    layers, read = layers_as_they_are(GivesOn(torch.eye(8)), (torch.randn(3, 8),), {}), []
    monkeypatch.setattr(draws, "_contents_of", read.append)
    digest_of(layers.recipe.captured.graph.recording.root)
    assert len(read) == 1


class Recomputing(nn.Module):
    """Runs a method of its own, or its modules, under ``checkpoint``."""

    def __init__(self, *, modules: bool, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.modules_alone = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), modules
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer if self.modules_alone else self._gated, x, use_reentrant=self.reentrant)
        return x

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x).exp().sigmoid() * x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("modules", [False, True])
def test_recomputation_of_code_that_is_no_module_is_told(modules, reentrant):
    """It was not done, and nothing was said: more memory than the model asks for."""
    model = Recomputing(modules=modules, reentrant=reentrant)
    layers = layers_as_they_are(model, (torch.randn(3, 8, requires_grad=True),), {})
    told = [note for note in layers.captured.notes if "torch.utils.checkpoint runs code that is no module" in note]
    assert len(told) == (not modules) and all("test_beside_calls.py:" in note for note in told)
    assert_same(model, layers, [((torch.randn(3, 8, requires_grad=True),), {})])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_that_recomputes_its_modules_is_cut_between_them(reentrant):
    """It was one layer, as a part of the model, and no layer of it where it is the model."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Recomputing(modules=True, reentrant=reentrant)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    model = Around()
    layers = layers_as_they_are(model, (torch.randn(3, 8, requires_grad=True),), {})
    assert len(list(layers)) == 4
    recomputed = [node.call.target for node in layers.captured.graph.nodes if node.call.recomputed]
    assert recomputed == [f"net.layers.{place}" for place in range(4)]
    assert_same(model, layers, [((torch.randn(3, 8, requires_grad=True),), {})])


class Spreads(nn.Module):
    """Has a table that its code multiplies by, which is no weight and no buffer."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.first, self.last, self.table = nn.Linear(8, 8), nn.Linear(8, 8), table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sparse.mm(self.table, self.first(x)))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_table_that_code_reads_is_no_hindrance(layout):
    """Recording asked for its memory, which it has none of: graph networks were refused."""
    model, x = Spreads(getattr(torch.eye(8), layout)()), torch.randn(8, 8)
    layers = layers_as_they_are(model, (x,), {})
    assert len(layers) == 2
    torch.testing.assert_close(run_in_order(layers, x), model(x))


class Refusing(OrderedDict[str, Any]):
    """As ``ModelOutput`` of transformers, and what others have made of it."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("You cannot use update() here")


class Unchanging(OrderedDict[str, Any]):
    def __setitem__(self, name: str, value: Any) -> None:
        if name in self:
            raise TypeError("read only")
        super().__setitem__(name, value)


@pytest.mark.parametrize("kind", [Refusing, Unchanging])
def test_dicts_that_refuse_update_are_made_entry_by_entry(kind: Any) -> None:
    """It was said that the layers do not compute what the model does."""
    leaves, structure = flatten(kind(score=1, other=2))
    made = build(structure, [3, 4])
    assert leaves == [1, 2] and isinstance(made, kind) and dict(made) == {"score": 3, "other": 4}
