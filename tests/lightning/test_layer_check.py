"""``pipeline_layers()`` is compared with ``forward``: what differs is refused by its place, and nothing else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import pytorch_lightning as pl
import torch
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from deepspeed_partition.engine.runtime import random_state as generator_states
from deepspeed_partition.generators import generator_state
from lightning_madpipe.compat.elsewhere import Elsewhere
from lightning_madpipe.module import HOLDER, PipelineCall, PipelineHolder, TiedModule
from lightning_madpipe.steps.captured_check import CapturedCheck
from lightning_madpipe.steps.forward_reads import Read
from lightning_madpipe.steps.layer_check import LayerCheck, Verdict
from lightning_madpipe.steps.step_side_effects import Leftovers
from lightning_madpipe.steps.what_layers_set import LayerTraces, Left, left_by_code
from tests.lightning.test_lightning_parts import HalfAPipeline
from tests.other_device import OtherDevice, rand_on_device

GENERATOR = torch.Generator().manual_seed(0)


class Net(pl.LightningModule):
    """Each case gives it a ``forward`` and a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.act, self.drop, self.norm = nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(6)
        self.spectral = nn.utils.spectral_norm(nn.Linear(6, 6))
        self.old = nn.utils.weight_norm(nn.Linear(6, 6))
        self.new = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.counts, self.seen = 0, []
        self.own, self.mean = Noise(), MeanMetric()
        self.mean.note = "of a program"  # type: ignore[assignment]
        self.mean.register_buffer("number", torch.zeros(()))
        self.counter, self.sum = Counter(), Sum()
        self.turns, self.rng = itertools.cycle([1, 0]), random.Random(0)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any, mask: Any = None, scale: float = 1.0) -> Any:
        if isinstance(x, tuple):
            x, mask = x
        x = self.linear(x) * scale
        return x if mask is None else (x * mask, mask)


class Sum(nn.Module):
    def forward(self, x: Any, other: Any = None) -> torch.Tensor:
        x, other = x if isinstance(x, tuple) else (x, other)
        return x + other


class Counter(nn.Module):
    """Counts its runs, and goes by that."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x * self.runs


class Noise(nn.Module):
    """Draws from generators of its own, of torch and of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.tools = torch.Generator().manual_seed(0), {"first": random.Random(0)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(6, generator=self.numbers) * self.tools["first"].random()


def reverse(x: torch.Tensor) -> torch.Tensor:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return -gradient

    return Reverse.apply(x)


def without_gradients(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x = m.a(x)
    return m.c(m.b(x))


def in_inference_mode(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        x = m.a(x)
    return m.c(m.b(x.clone()))


def features(x: torch.Tensor) -> torch.Tensor:
    """What a teacher says, whose tensors have no version."""
    with torch.inference_mode():
        return x.cos()


def looped(m: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = m.b(m.a(x))
    return m.c(x)


def watched(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    h.register_hook(lambda gradient: gradient * 0.1)
    return m.c(m.b(h))


def traced(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.counts += 1
    m.seen.append(x)
    h = m.a(x)
    m.log("size", h.mean())
    return m.c(m.b(h))


def in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.c(m.b(F.relu_(m.a(x))))


def noisy(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.randn(3)  # nobody uses it
    return m.c(m.drop(m.b(m.drop(m.a(x)))))


def rarely_doubled(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    if random.random() < 1e-3:
        h = h * 2
    return m.c(m.b(h))


def rarely_left_out(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    if torch.rand(()) > 1e-3:
        h = m.b(h)
    return m.c(h)


def doubled_by_length(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Asks for no number, but for how many there are; by a generator of its own."""
    chosen = torch.rand(4, generator=GENERATOR) > 1 - 1e-6
    h = m.a(x)
    return m.c(m.b(h * 2 if len(chosen.nonzero()) else h))


def reseeded(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return m.c(m.b(m.a(x)))


def in_turn(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.c(m.b(m.a(x))) if next(m.turns) else m.b(m.a(x))


def drawing_in_vain(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    if numpy.random.rand() > 2:  # never
        h = h * 2
    random.random()
    return m.c(m.b(h))


def straight_through(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.c(m.b(m.a(x))) + (m.a.weight - m.a.weight.detach()).sum()


def plain(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.c(m.b(m.a(x)))


def forgets(metric: MeanMetric) -> None:
    """Without an attribute that it had, and with a buffer that counts."""
    vars(metric).pop("note")
    metric.get_buffer("number").add_(1)


def names(text: str) -> Callable[[Any], list[Any]]:
    return lambda m: [getattr(m, name) for name in text.split()]


DIFFERENT: dict[str, tuple[Callable[..., Any], Callable[[Any], list[Any]], str]] = {
    "functional relu": (
        lambda m, x: m.c(m.b(F.relu(m.a(x)))),
        names("a b c"),
        "forward() calls relu between layer 0 (Linear) and layer 1 (Linear): list nn.ReLU() there",
    ),
    "what changes nothing yet": (
        lambda m, x: m.c(m.b(m.a(x).clamp(-1e6, 1e6))),
        names("a b c"),
        "calls clamp between layer 0 (Linear) and layer 1 (Linear), which changes nothing in the first",
    ),
    "what changes nothing yet, in place": (
        lambda m, x: m.c(m.b(m.a(x).masked_fill_(x[..., :1] == 1e6, 0.0))),
        names("a b c"),
        "masked_fill_ between layer 0 (Linear) and layer 1 (Linear), which changes nothing",
    ),
    "what changes no input yet": (
        lambda m, x: plain(m, torch.nan_to_num(x)),
        names("a b c"),
        "calls nan_to_num before layer 0 (Linear), which",
    ),
    "relu in place": (in_place, names("a b c"), "relu_ between layer 0 (Linear) and layer 1 (Linear)"),
    "module left out": (
        lambda m, x: m.c(m.b(m.act(m.a(x)))),
        names("a b c"),
        "forward() calls self.act (ReLU) between layer 0 (Linear) and layer 1 (Linear): list self.act there",
    ),
    "what is done by rare numbers": (rarely_doubled, names("a b c"), "forward() draws from random at "),
    "what is done by rare numbers of torch": (
        rarely_left_out,
        names("a b c"),
        "forward() draws from torch (rand) at ",
    ),
    "what is done by how many numbers of torch are large": (
        doubled_by_length,
        names("a b c"),
        "and by another number it calls ",
    ),
    "what is done by a number at the end": (
        lambda m, x: plain(m, x) * (2 if numpy.random.rand() < 1e-3 else 1.0) if m.training else plain(m, x),
        names("a b c"),
        "calls mul after layer 2 (Linear)",
    ),
    "what is done by an own generator": (
        lambda m, x: plain(m, x) if m.rng.random() < 2 else x,
        names("a b c"),
        "forward() draws from self.rng at ",
    ),
    "what is done in turn": (in_turn, names("a b c"), "forward() draws from self.turns at "),
    "before the first": (lambda m, x: plain(m, x * 2), names("a b c"), "calls mul before layer 0 (Linear)"),
    "after the last": (
        lambda m, x: plain(m, x).softmax(-1),
        names("a b c"),
        "calls softmax after layer 2 (Linear)",
    ),
    "a view": (
        lambda m, x: m.c(m.b(m.a(x).view(2, -1, 6))),
        names("a b c"),
        "calls view between layer 0 (Linear) and layer 1 (Linear)",
    ),
    "a layer that forward skips": (
        lambda m, x: m.c(m.a(x)),
        names("a b c"),
        "where the list has layer 1 (Linear), which computes something else",
    ),
    "called twice": (looped, names("a b c"), "calls layer 0 (Linear) after layer 1 (Linear)"),
    "the same twice": (
        lambda m, x: m.c(m.b(m.a(m.a(x)))),
        names("a b c"),
        "calls layer 0 (Linear) a second time, and it stands in the list once",
    ),
    "another order": (
        lambda m, x: m.b(m.c(m.a(x))),
        names("a b c"),
        "calls self.c (Linear) between layer 0 (Linear) and layer 1 (Linear)",
    ),
    "a skip connection": (
        lambda m, x: m.c(m.b(m.a(x)) + x),
        names("a b c"),
        "calls add between layer 1 (Linear) and layer 2 (Linear)",
    ),
    "dropout": (
        lambda m, x: m.c(m.b(F.dropout(m.a(x), 0.3, m.training))),
        names("a b c"),
        "calls dropout between layer 0 (Linear) and layer 1 (Linear)",
    ),
    "other dropout": (
        lambda m, x: m.c(m.b(F.dropout(m.a(x), 0.3, m.training))),
        names("a drop b c"),
        "where the list has layer 1 (Dropout), which computes something else",
    ),
    "another activation": (
        lambda m, x: m.c(m.b(F.gelu(m.a(x)))),
        lambda m: [m.a, F.relu, m.b, m.c],
        "calls gelu between layer 0 (Linear) and layer 2 (Linear), where the list has layer 1 (relu)",
    ),
    "cut gradients": (
        lambda m, x: m.c(m.b(m.a(x).detach())),
        names("a b c"),
        "calls detach between layer 0 (Linear) and layer 1 (Linear), which changes gradients",
    ),
    "reversed gradients": (lambda m, x: m.c(reverse(m.b(m.a(x)))), names("a b c"), "which changes gradients"),
    "a hook on the way": (watched, names("a b c"), "registers a hook on the gradient between layer 0"),
    "no gradients": (without_gradients, names("a b c"), "calls layer 0 (Linear) without gradients"),
    "inference mode": (in_inference_mode, names("a b c"), "calls layer 0 (Linear) without gradients"),
    "gradients of a weight": (
        straight_through,
        names("a b c"),
        "after layer 2 (Linear), which changes nothing in the first",
    ),
    "keywords": (
        lambda m, x: m.c(m.two(m.a(x), scale=0.5)),
        lambda m: [m.a, m.two, m.c],
        "calls layer 1 (Two) with scale, and in a pipeline it gets only what the layer before",
    ),
    "a dict": (lambda m, x: {"logits": plain(m, x)}, names("a b c"), "forward() returns a dict"),
    "two outputs": (lambda m, x: (plain(m, x), x), names("a b c"), "is not what forward() computes"),
    "a list that cannot run": (
        lambda m, x: m.c(F.relu(m.a(x))),
        lambda m: [m.a, nn.Linear(3, 3), m.c],
        "which cannot run on what it gets (RuntimeError",
    ),
    "in evaluation": (
        lambda m, x: plain(m, x) if m.training else plain(m, x).softmax(-1),
        names("a b c"),
        "calls softmax after layer 2 (Linear)",
    ),
}

SAME: dict[str, tuple[Callable[..., Any], Callable[[Any], list[Any]]]] = {
    "modules": (plain, names("a b c")),
    "functional": (
        lambda m, x: m.c(F.relu(m.b(torch.tanh(m.a(x))))),
        lambda m: [m.a, torch.tanh, m.b, nn.ReLU(), m.c],
    ),
    "an activation that is used twice": (lambda m, x: m.c(m.act(m.b(m.act(m.a(x))))), names("a act b act c")),
    "dropout layers": (lambda m, x: m.c(m.drop(m.b(m.drop(m.a(x))))), names("a drop b drop c")),
    "functional dropout": (
        lambda m, x: m.c(F.dropout(m.b(m.a(x)), 0.5, m.training)),
        lambda m: [m.a, m.b, nn.Dropout(0.5), m.c],
    ),
    "Python's numbers that nobody uses": (drawing_in_vain, names("a b c")),
    "random numbers that nobody uses": (noisy, names("a drop b drop c")),
    "numbers of torch that nobody asks for": (
        lambda m, x: m.c(m.b(m.a(x))) if torch.randint(9, ()) is not None else x,
        names("a b c"),
    ),
    "a seed": (reseeded, names("a b c")),
    "a counter of a layer": (lambda m, x: m.c(m.counter(m.a(x))), names("a counter c")),
    "generators of layers": (lambda m, x: m.c(m.own(m.a(x))), names("a own c")),
    "an own generator that nobody needs": (
        lambda m, x: m.c(m.b(m.a(x))) if len(torch.rand(3, generator=GENERATOR)) else x,
        names("a b c"),
    ),
    "draws of functions": (
        lambda m, x: m.c(F.dropout(m.b(m.a(x) + 0.1 * torch.rand(6)), 0.5, m.training)),
        lambda m: [m.a, lambda h: h + 0.1 * torch.rand(6), m.b, nn.Dropout(0.5), m.c],
    ),
    "batch normalization": (lambda m, x: m.c(m.norm(m.a(x))), names("a norm c")),
    "spectral norm": (lambda m, x: m.c(m.spectral(m.a(x))), names("a spectral c")),
    "weight norm": (lambda m, x: m.new(m.old(m.a(x))), names("a old new")),
    "checkpoints": (
        lambda m, x: m.c(checkpoint(m.b, m.a(x), use_reentrant=True)),
        names("a b c"),
    ),
    "other checkpoints": (lambda m, x: m.c(checkpoint(m.b, m.a(x), use_reentrant=False)), names("a b c")),
    "no change": (lambda m, x: m.c(m.b(m.a(x).contiguous().clone()).float()), names("a b c")),
    "a Sequential around them": (plain, lambda m: [nn.Sequential(m.a, m.b), m.c]),
    "a tie": (
        lambda m, x: F.linear(m.b(m.a(x)), m.a.weight),
        lambda m: [TiedModule("a", m.a), m.b, TiedModule("a", m.a, lambda a, x: F.linear(x, a.weight))],
    ),
    "a mask": (
        lambda m, x: m.c(m.two(m.a(x), x > 0)[0]),
        lambda m: [lambda x: (m.a(x), x > 0), m.two, lambda x: m.c(x[0])],
    ),
    "features made in inference mode": (
        lambda m, x: m.c(m.sum(m.a(x), features(x))),
        lambda m: [lambda x: (m.a(x), features(x)), m.sum, m.c],
    ),
    "defaults": (lambda m, x: m.c(m.two(m.a(x), None, scale=1.0)), lambda m: [m.a, m.two, m.c]),
    "traces": (traced, names("a b c")),
    "a metric that counts": (
        lambda m, x: (m.mean(x.detach().mean()), m.mean(1.0), m.c(m.b(m.a(x))))[2],
        names("a b c"),
    ),
    "a metric that forgets, and a buffer of it": (
        lambda m, x: (forgets(m.mean), m.c(m.b(m.a(x))))[1],
        names("a b c"),
    ),
    "how a metric computes": (
        lambda m, x: (setattr(m.mean, "kind", "abs"), m.c(m.b(m.a(x))))[1],
        names("a b c"),
    ),
}

SAID = {
    "Python's numbers that nobody uses": "draws from random at ",
    "random numbers that nobody uses": "draws from torch (randn) at ",
    "numbers of torch that nobody asks for": "draws from torch (randint) at ",
    "a seed": "draws from torch before ",
    "an own generator that nobody needs": "draws from torch (rand) at ",
    "traces": "calls self.log(), sets self.",
    "a metric that counts": "also updates self.mean (MeanMetric), and is not run in a pipeline",
    "a metric that forgets, and a buffer of it": "also updates self.mean (MeanMetric), and is not run",
    "how a metric computes": "sets self.mean.kind = 'abs', and is not run in a pipeline, which runs the layers",
}
"""What is said although nothing differs."""


def state_in_words(generator: Any) -> str:
    state = generator_state(generator)
    return str(state.tolist() if isinstance(state, torch.Tensor) else state)


def module_of(forward: Callable[..., Any], layers: Callable[[Any], list[Any]]) -> Any:
    torch.manual_seed(0)

    class Case(Net):
        def __init__(self) -> None:
            super().__init__()
            self.two = Two()

        def forward(self, x: torch.Tensor) -> Any:
            return forward(self, x)

        def pipeline_layers(self) -> list[Any]:
            return layers(self)

    return Case()


def compare(module: Any, *inputs: torch.Tensor) -> Verdict:
    call = PipelineCall(layers=tuple(module.pipeline_layers()), attribute="forward")
    pipeline = HalfAPipeline(call.layers, held=())
    pipeline.elsewhere = Elsewhere(module, pipeline)
    object.__setattr__(module, HOLDER, PipelineHolder(pipeline))
    return LayerCheck(
        module,
        call,
        inputs or (torch.randn(4, 6),),
        device=torch.device("cpu"),
        dtype=None,
        context=nullcontext,
        traces=lambda: Leftovers(module, vars(pl.LightningModule()), undoable=True),
    ).verdict()


@pytest.fixture(params=["whole", "layer by layer"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(LayerCheck, "_fits", lambda self: request.param == "whole")
    return request.param


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_differs_is_refused_by_its_place(case: str, kind: str) -> None:
    forward, layers, words = DIFFERENT[case]
    module = module_of(forward, layers)
    module.train(case != "in evaluation")
    found = compare(module)
    if kind != "whole" and case in ("no gradients", "inference mode"):
        assert found.difference is None and "the gradients of its weights were not" in found.notes[-1]
        return
    assert found.difference is not None, found
    assert words in found.difference
    assert "check_layers=False" in found.difference


def rarely_left_out_by_device(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    if rand_on_device(x) > 1e-3:
        h = m.b(h)
    return m.c(h)


def noisy_on_device(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.c(m.b(m.a(x) + rand_on_device(x)))


def test_what_is_done_by_rare_numbers_of_a_device_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said that no number changes what it does, and extreme ones were those of the CPU alone."""
    monkeypatch.setattr(generator_states, "get_accelerator", OtherDevice)
    found = compare(module_of(rarely_left_out_by_device, names("a b c"))).difference
    assert found is not None and "draws from torch on cuda (rand_on_device) at " in found
    assert "which no rank does in a pipeline: put the draw" in found
    # What a layer of the list does in the place of forward() is compared by the same numbers.
    of_layers = lambda m: [m.a, lambda h: h + rand_on_device(h), m.b, m.c]  # noqa: E731
    assert compare(module_of(noisy_on_device, of_layers)).difference is None


def test_a_layer_that_is_built_where_it_runs_is_told_of() -> None:
    """No process has all layers then, and nothing compares them with forward()."""
    module = module_of(lambda m, x: m.c(m.a(x)), lambda m: [m.a, LayerSpec(nn.Tanh), m.c])
    [note] = compare(module).notes
    assert note.startswith("pipeline_layers() has a LayerSpec, which is built where it runs: it is not compared")


def test_found_layers_that_fit_nowhere_whole_are_told_of() -> None:
    check = object.__new__(CapturedCheck)
    vars(check).update(_notes=[], _name="Net")
    check._compare(whole=False)
    assert check._notes == ["the layers of Net are trained as they were found, without a comparison"]


def test_a_state_that_forward_carries_is_told(kind: str) -> None:
    """Losses were 1 % off, and it was said that a pipeline does not run what sets it."""

    def carries(m: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(m.a(x))
        m.state = (m.state * 0.5 + hidden.mean(0)).detach()
        m.counts += 1
        return m.c(hidden)

    module = module_of(carries, lambda m: [m.a, torch.tanh, m.c])
    module.state = torch.zeros(6)
    notes = [note for note in compare(module).notes if note.startswith("forward()")]
    assert notes[0].startswith("forward() of Case sets self.state and reads it in its next call")
    assert notes[1].startswith("forward() of Case also sets self.counts, and")


@pytest.mark.parametrize("case", SAME)
def test_what_is_the_same_passes_and_leaves_no_trace(case: str, kind: str) -> None:
    forward, layers = SAME[case]
    module = module_of(forward, layers)
    called: list[str] = []
    for name, weight in module.named_parameters():
        weight.register_hook(lambda gradient, name=name: called.append(name))
    module.b.register_forward_hook(lambda *_: called.append("forward"))
    before = {name: (value, value.clone()) for name, value in module.state_dict(keep_vars=True).items()}
    object.__setattr__(module, HOLDER, PipelineHolder())
    modules, inputs = [(part, dict(vars(part))) for part in module.modules()], torch.randn(4, 6)
    generators = torch.default_generator, GENERATOR, module.own.numbers, module.own.tools["first"]
    numbers = list(map(state_in_words, generators))
    found = compare(module, inputs)
    assert found.difference is None
    assert not called
    assert numbers == list(map(state_in_words, generators))
    for name, value in module.state_dict(keep_vars=True).items():
        assert value is before[name][0] and torch.equal(value, before[name][1]) and value.grad is None
    for part, was in modules:
        assert vars(part).keys() == was.keys()
    assert module.counts == 0 and module.seen == []
    told = [note for note in found.notes if "does not fit" not in note]
    if case.startswith("random") and kind == "whole":
        assert "compared layer by layer" in told.pop(0)
    if case in SAID:
        assert len(told) == 1 and SAID[case] in told[0]
    else:
        assert not told


def test_evaluation_is_compared_too() -> None:
    module = module_of(*SAME["functional dropout"]).eval()
    with torch.no_grad():
        assert compare(module) == Verdict()


def test_several_inputs_come_as_a_tuple() -> None:
    class Case(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.c(self.a(x) + self.b(y))

        def pipeline_layers(self) -> list[Any]:
            return [lambda pair: self.a(pair[0]) + self.b(pair[1]), self.c]

    assert compare(Case(), torch.randn(3, 6), torch.randn(3, 6)) == Verdict()


def test_a_forward_that_cannot_run_is_said_and_not_refused() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not here")

    found = compare(module_of(forward, names("a b c")))
    assert found.difference is None and "raises RuntimeError here: not here" in found.notes[0]


def test_what_a_layer_sets_outside_of_itself_is_not_said_of_forward() -> None:
    """It was said that a pipeline does not run what sets it, and in another line which layer does."""

    class Counting(nn.Module):
        def __init__(self, owner: Any) -> None:
            super().__init__()
            self.owner = [owner]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.owner[0].counts += 1
            self.owner[0].mean(x.detach().mean())
            return x

    class Case(Net):
        def __init__(self) -> None:
            super().__init__()
            self.counting, self.num_calls = Counting(self), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            return self.c(self.counting(self.a(x)))

        def pipeline_layers(self) -> list[Any]:
            return [self.a, self.counting, self.c]

    [note] = compare(Case()).notes
    assert note.startswith("forward() of Case also sets self.num_calls, and is not run in a pipeline")


def test_what_forward_reads_and_what_layers_set_is_found() -> None:
    """Also in a module around the layers, in a property, and in a method that a layer calls."""

    class Inner(nn.Module):
        limit = 100.0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x if self.limit < 0 else self.linear(x)

    class Leaving(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.keep(x)
            return x

        def keep(self, x: torch.Tensor) -> None:
            self.kept = x.mean()

    class Case(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.leaving, self.unread, self.factor = Inner(), Leaving(), 1, 1.0

        @property
        def is_late(self) -> bool:
            return self.factor > 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_late or LIMIT < 0:
                x = x * 2
            return self.leaving(self.inner(x))

        def pipeline_layers(self) -> list[Any]:
            return [self.inner.linear, self.leaving]

    module = Case()
    found = compare(module)
    assert found.difference is None and not found.notes
    assert set(found.reads) == {Read("", "factor"), Read("", "LIMIT", True), Read("inner", "limit")}
    assert found.left == (Left(1, "", "kept"),)
    call = PipelineCall(layers=tuple(module.pipeline_layers()), attribute="forward")
    assert left_by_code(call) == [Left(1, "", "kept")]
    assert type(module) is Case and type(module.inner) is Inner
    traces = LayerTraces(module, call, ValueError)
    traces.add(found.left)
    with traces.hidden("training_step"), pytest.raises(ValueError, match=r"training_step reads self.leaving.kept"):
        module.leaving.kept  # noqa: B018
    assert type(module.leaving) is Leaving


LIMIT = 1
