"""What layers and a loss leave in helpers, weights and tables of modules when they are measured: nothing."""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from deepspeed_partition import kept_values
from deepspeed_partition.hidden_modules import hidden_modules
from deepspeed_partition.layer_calls import unpacking
from deepspeed_partition.profiling import attributes, isolation, profile_chain, remembered_values, weights_beside
from deepspeed_partition.profiling.hidden_bytes import HiddenBytes

QUICK: dict[str, Any] = {"warm_up": 1, "repeats": 1, "device": "cpu", "halves": False}
X = torch.ones(5, 8)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sentences: list[str] = []
    monkeypatch.setattr(kept_values, "tell_once", lambda _, sentence: sentences.append(sentence))
    return sentences


def measure(layer: Any, loss_fn: Any = None) -> None:
    """Measure a layer, between two others, and a loss."""
    sample = X if loss_fn is None else (X, torch.zeros(5, 8))
    profile_chain([nn.Linear(8, 8), layer, nn.Linear(8, 8)], sample, loss_fn=loss_fn, **QUICK)


def mean_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().mean()


# Helpers that can be called.

NUM_CALLS = [0]


class Warm:
    """A scale that rises with each call."""

    total = 0

    def __init__(self) -> None:
        self.calls, self.generator, self.inner = (
            0,
            random.Random(0),
            SimpleNamespace(deep=SimpleNamespace(calls=0)),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        Warm.total += 1
        NUM_CALLS[0] += 1
        self.inner.deep.calls += 1
        return x * min(1.0, self.calls / 20) * self.generator.random()

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class Slotted:
    """A helper without a dict, that can be called."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class Helped(nn.Linear):
    """A layer whose helper is an attribute."""

    def __init__(self, helper: Any) -> None:
        super().__init__(8, 8)
        self.helper = helper

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        helper = self.helper[0] if isinstance(self.helper, list) else self.helper
        return helper(super().forward(x))


def _itself(warm: Warm) -> Any:
    return warm


def _method(warm: Warm) -> Any:
    return warm.apply


def _in_list(warm: Warm) -> Any:
    return [warm]


def _method_in_list(warm: Warm) -> Any:
    return [warm.apply]


@pytest.mark.parametrize("form", [_itself, _method, _in_list, _method_in_list])
def test_what_a_helper_that_is_called_keeps_is_put_back(form: Callable[[Warm], Any]) -> None:
    """A scale of a warm-up had risen by the runs that were made to measure, in silence."""
    warm = Warm()
    state, NUM_CALLS[0], Warm.total = warm.generator.getstate(), 0, 0
    helper = form(warm)
    layer = Helped(helper)
    measure(layer)
    assert warm.calls == 0 and warm.generator.getstate() == state
    assert layer.helper is helper
    assert (Warm.total, NUM_CALLS) == (0, [0]), "what its code names"


def test_what_objects_in_objects_of_a_helper_keep_is_put_back() -> None:
    layer = Helped(Warm())
    layer.around = SimpleNamespace(of=SimpleNamespace(it=layer.helper))
    measure(layer)
    assert layer.helper.inner.deep.calls == 0
    holder = Helped(nn.Identity())
    holder.config = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(calls=0)))

    def count(module: Any, *_: Any) -> None:
        module.config.a.b.calls += 1

    holder.register_forward_hook(count)
    measure(holder)
    assert holder.config.a.b.calls == 0


def test_what_lies_too_deep_is_said(said: list[str]) -> None:
    layer = Helped(nn.Identity())
    deep = SimpleNamespace(calls=0)
    for _ in range(5):
        deep = SimpleNamespace(inner=deep, count=0)
    layer.chain, layer.ring = deep, SimpleNamespace(calls=0)
    layer.ring.again = layer.ring

    def count(module: Any, *_: Any) -> None:
        module.chain.inner.inner.inner.inner.count += 1
        module.ring.calls += 1

    handle = layer.register_forward_hook(count)
    measure(layer)
    assert layer.ring.calls == 0
    assert [line.split(",")[0] for line in said] == [
        "chain (SimpleNamespace): what it holds was changed while layers or the loss function ran to be measured "
        "or tried"
    ]
    handle.remove()
    said.clear()
    measure(layer)
    assert not said


def test_a_helper_with_slots_that_is_called_is_put_back() -> None:
    layer = Helped(Slotted())
    measure(layer)
    assert layer.helper.calls == 0


def test_a_method_of_a_helper_that_a_loss_holds_is_put_back() -> None:
    warm = Warm()
    holder = SimpleNamespace(act=warm.apply)

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return mean_loss(holder.act(outputs), labels)

    measure(nn.Linear(8, 8), loss_fn)
    assert warm.calls == 0


# Weights and buffers of losses, and of modules where torch does not look.


def values_of(*modules: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for module in modules for value in module.state_dict().values()]


def same(before: list[torch.Tensor], *modules: nn.Module) -> bool:
    return all(map(torch.equal, before, values_of(*modules)))


class CenterLoss(nn.Module):
    """A loss whose weights follow the outputs, one that trains, and a teacher that follows that."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False).eval()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("bank", torch.zeros(4, 8))
        self.hidden = {"norms": [nn.BatchNorm1d(8)], "teachers": [nn.Linear(8, 8).requires_grad_(False)]}

    @property
    def parts(self) -> list[nn.Module]:
        return [self, *self.hidden["norms"], *self.hidden["teachers"]]

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.center.lerp_(outputs.mean(0), 0.1)
            for teacher in (self.teacher, *self.hidden["teachers"]):
                teacher.weight.lerp_(self.student.weight, 0.1)
                outputs = outputs + teacher(labels)
            self.bank += 1
        return mean_loss(self.hidden["norms"][0](self.norm(self.student(outputs))), self.center + self.bank.sum())

    def compute(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self(outputs, labels)


class Holder:
    """A loss that is an object with a module."""

    def __init__(self, loss: CenterLoss) -> None:
        self.losses = [loss]

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.losses[0](outputs, labels)


LOSSES: dict[str, CenterLoss] = {}


def _global(loss: CenterLoss) -> Any:
    LOSSES["center"] = loss
    return lambda outputs, labels: LOSSES["center"](outputs, labels)


LOSS_FORMS: dict[str, Callable[[CenterLoss], Any]] = {
    "module": lambda loss: loss,
    "method": lambda loss: loss.compute,
    "partial": lambda loss: partial(loss),
    "closure": lambda loss: lambda outputs, labels: loss(outputs, labels),
    "object": Holder,
    "global": _global,
}


@pytest.mark.parametrize("form", LOSS_FORMS)
def test_weights_of_a_loss_are_put_back(form: str) -> None:
    """A centre and a teacher that follow what trains had moved by the runs that were made to measure."""
    loss = CenterLoss()
    before, modes = values_of(*loss.parts), [part.training for part in loss.modules()]
    weights = [weight for part in loss.parts for weight in part.parameters()]
    measure(nn.Linear(8, 8), LOSS_FORMS[form](loss))
    assert same(before, *loss.parts) and [part.training for part in loss.modules()] == modes
    assert all(a is b for a, b in zip(weights, (w for part in loss.parts for w in part.parameters()), strict=True))
    assert all(weight.grad is None for weight in weights)


@pytest.mark.parametrize("form", ["module", "method", "partial"])
def test_hooks_on_weights_of_a_loss_hear_nothing(form: str) -> None:
    """DeepSpeed's own left measured gradients where the first update adds them up."""
    loss, heard = CenterLoss(), list[int]()
    loss.student.weight.register_post_accumulate_grad_hook(lambda _: heard.append(1))
    measure(nn.Linear(8, 8), LOSS_FORMS[form](loss))
    assert not heard


class Distilled(nn.Linear):
    """A layer with a teacher in a list, which follows the layer."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.teacher = [copy.deepcopy(nn.Linear(8, 8)).eval()]
        self.tools = SimpleNamespace(norm=nn.BatchNorm1d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher[0].weight.lerp_(self.weight, 0.1)
        self.teacher[0].train()
        return super().forward(x) + self.tools.norm(self.teacher[0](x))


def test_weights_of_modules_in_lists_are_put_back() -> None:
    layer = Distilled()
    parts = (layer, layer.teacher[0], layer.tools.norm)
    before, teacher = values_of(*parts), layer.teacher[0]
    weight = teacher.weight
    weight.register_post_accumulate_grad_hook(lambda _: pytest.fail("its gradient is another's"))
    measure(layer)
    assert same(before, *parts) and layer.teacher[0] is teacher and teacher.weight is weight
    assert not teacher.training and weight.grad is None


TOOLS: dict[str, Any] = {}


def _of_function(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        TOOLS["teachers"][0].weight.mul_(0.9)
    return TOOLS["norms"]["first"](TOOLS["teachers"][0](x))


def test_modules_in_containers_beside_layers_are_put_back(said: list[str]) -> None:
    """A net with normalization in a list that a function names kept its running statistics."""
    teacher, norm = nn.Linear(8, 8).requires_grad_(False), nn.BatchNorm1d(8)
    TOOLS.update(teachers=[teacher], norms={"first": norm})
    before = values_of(teacher, norm)
    measure(_of_function)
    assert same(before, teacher, norm) and not said


def test_metrics_in_a_dict_of_a_loss_are_put_back() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = {"error": torchmetrics.MeanSquaredError()}

        def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.metrics["error"].update(outputs.detach(), labels)
            return mean_loss(outputs, labels)

    loss = Loss()
    measure(nn.Linear(8, 8), loss)
    assert int(loss.metrics["error"].total) == 0 and loss.metrics["error"]._update_count == 0


def test_weights_beside_layers_that_are_not_copied_are_said(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_beside, "MOST_BYTES", 4, raising=False)
    teacher = nn.Linear(8, 8).requires_grad_(False)
    TOOLS.update(teachers=[teacher], norms={"first": nn.BatchNorm1d(8)})
    measure(_of_function)
    assert len(said) == 1 and said[0].startswith("weight of Linear (Parameter): it was written while layers")


class Taking(nn.Module):
    """A layer that takes a part of a model, whose weights it writes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.part = model.part
        with torch.no_grad():
            self.part.weight.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


def test_what_a_specification_is_given_is_no_module_beside_layers(said: list[str]) -> None:
    pipe = pytest.importorskip("deepspeed.pipe")
    model = nn.Module()
    model.part = nn.Linear(8, 8)
    before = values_of(model)
    for loss_fn in (mean_loss, lambda outputs, labels: model.part(outputs).mean()):
        measure(pipe.LayerSpec(Taking, model), loss_fn)
        assert same(before, model) and not said


# What runs before and within a first forward.


class Merging(nn.Linear):
    """Adds its update to its weight when it is evaluated, and takes it off when it trains, as loralib."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.merged = False
        self.update = nn.Parameter(torch.ones(8, 8))

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode is self.merged:
            self.weight.data += self.update.data * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (0 if self.merged else x @ self.update.T)


def test_what_train_changes_is_put_back() -> None:
    """The weight was merged, and said to be not, where a model was evaluated before it was measured."""
    layer = Merging()
    before = values_of(layer)
    layer.eval()
    merged = values_of(layer)
    measure(layer)
    assert layer.merged and not layer.training and same(merged, layer)
    layer.train()
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(before, values_of(layer), strict=True))


class Late(nn.Module):
    """Makes what it needs in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("scale", None)
        self.register_buffer("seen", None)
        self.inner = nn.Sequential(nn.Identity())

    def forward(self, x: torch.Tensor, _: Any = None) -> torch.Tensor:
        if not hasattr(self, "bn"):
            self.bn = nn.BatchNorm1d(x.shape[1], affine=False)
            self.shift = nn.Parameter(torch.zeros(x.shape[1]))
            self.scale = nn.Parameter(torch.ones(x.shape[1]))
            self.seen = x.detach().clone()
            self.register_buffer("more", torch.ones(1), persistent=False)
            self.inner[0] = nn.BatchNorm1d(x.shape[1])
            self.inner.append(nn.ReLU())
        return self.inner(self.bn(x) * self.scale + self.shift)

    @property
    def names(self) -> list[list[str]]:
        own = [list(table) for table in (self._modules, self._parameters, self._buffers)]
        return [*own, list(vars(self)), sorted(self._non_persistent_buffers_set)]


def loss_of(late: Late) -> Any:
    return lambda outputs, labels: late(outputs).square().mean()


class LateLoss(Late):
    def forward(self, x: torch.Tensor, _: Any = None) -> torch.Tensor:
        return super().forward(x).square().mean()


def test_what_a_first_forward_makes_is_made_again() -> None:
    """A normalization of a layer began with the statistics of the runs that were made to measure."""
    late, of_loss, beside, hidden = Late(), LateLoss(), Late(), Late()
    every = (late, of_loss, beside, hidden)
    before = [(each.names, each.inner[0]) for each in every]
    layer = Helped([hidden])
    measure(late, of_loss)
    measure(layer, loss_of(beside))
    for each, (names, inner) in zip(every, before, strict=True):
        assert each.names == names and each.inner[0] is inner
        assert each.scale is None and each.seen is None
    for each in every:
        with attributes.attributes_kept([each]):
            each(X)
        assert not hasattr(each, "bn") and not hasattr(each, "shift") and each.scale is None


# Layers and losses of installed packages.

PACKAGE = """
import torch
from torch import nn

SEEN = []

def noted(x):
    SEEN.append(len(SEEN))
    return x

class Layer(nn.Module):
    calls = 0
    def forward(self, x):
        type(self).calls += 1
        return noted(x) * self.calls

class Loss(Layer):
    calls = 0
    def forward(self, outputs, labels):
        return super().forward(outputs).mean()

class Helper:
    calls = 0
    def __call__(self, outputs, labels):
        Helper.calls += 1
        return noted(outputs).mean()
"""


@pytest.mark.parametrize("kind", ["layer", "loss", "object", "spec"])
def test_what_code_of_an_installed_package_names_is_put_back(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts of a class in site-packages went on, where the same class in the program's file was put back."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / f"counting_{kind}.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder)
    package = importlib.import_module(f"counting_{kind}")
    layer, loss_fn = nn.Linear(8, 8), mean_loss
    if kind == "layer":
        layer = nn.Sequential(nn.Identity(), package.Layer())
    elif kind == "spec":
        layer = pytest.importorskip("deepspeed.pipe").LayerSpec(package.Layer)
    else:
        loss_fn = package.Loss() if kind == "loss" else package.Helper()
    measure(layer, loss_fn)
    assert (package.Layer.calls, package.Loss.calls, package.Helper.calls, package.SEEN) == (0, 0, 0, [])


LARGE = (
    """
import functools
from torch import nn

@functools.lru_cache(maxsize=16)
def recipe(size):
    return 1 / size

"""
    + "".join(f"def f{n}(x):\n    return f{n + 1}(x)\n\n" for n in range(300))
    + """
def f300(x):
    return x * recipe(len(x)) * recipe(x.dim())

class Layer(nn.Module):
    def forward(self, x):
        return f150(f0(x))
"""
)


class Counted(nn.Module):
    """Counts its runs in its class."""

    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).runs += 1
        return x


def test_large_installed_packages_leave_room_for_the_code_of_a_program(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of a layer was not read behind 200 functions of a package, whose cache was said to have results."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "large_package.py").write_text(LARGE)
    monkeypatch.syspath_prepend(folder)
    package = importlib.import_module("large_package")
    monkeypatch.setattr(Counted, "runs", 0)
    package.recipe(3)
    profile_chain([nn.Sequential(package.Layer(), nn.Linear(8, 8)), Counted(), nn.Linear(8, 8)], X, **QUICK)
    assert Counted.runs == 0 and not said
    (folder / "small_package.py").write_text(LARGE.replace("f150(f0(x))", "f299(x)"))
    importlib.invalidate_caches()
    package = importlib.import_module("small_package")
    package.recipe(3)
    profile_chain([nn.Sequential(package.Layer(), nn.Linear(8, 8)), Counted(), nn.Linear(8, 8)], X, **QUICK)
    assert Counted.runs == 0 and not said


# Tensors that are too large to be copied.


class Queued(nn.Linear):
    """Keeps its last outputs in tensors: attributes, of which it writes the first two in place."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.queue, self.array = torch.zeros(100, 8), np.zeros((100, 8))
        self.read, self.replaced = torch.zeros(100, 8), torch.zeros(100, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.queue[: len(x)] = x
            self.array[50] += 1
            self.replaced = self.replaced + 1
        return super().forward(x) + self.read.mean()


def test_large_tensors_that_are_changed_are_said(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a memory bank had got from the runs that were made to measure was neither put back nor told."""
    monkeypatch.setattr(remembered_values, "MOST_BYTES", 1000)
    layer = Queued()
    measure(layer)
    assert [line.partition(":")[0] for line in said] == ["queue (Tensor)", "array (ndarray)"]
    assert all("its values, too many to be copied, were changed" in line for line in said)
    assert not layer.replaced.any()


def test_a_large_buffer_of_a_loss_is_put_back(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_values, "MOST_BYTES", 8)
    loss = CenterLoss()
    measure(nn.Linear(8, 8), loss)
    assert not loss.bank.any() and not said


# What a loss or a layer reaches through the whole model.


class Net(nn.Module):
    """A whole model, whose loss is a method."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.far, self.late = nn.Linear(8, 8, device="meta"), nn.LazyLinear(8)

    def plain_loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return mean_loss(outputs, labels)

    def head_loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.plain_loss(self.norm(self.head(outputs)), labels)

    def any_loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return mean_loss(outputs, labels) + sum(w.sum() for n, w in self.named_parameters() if "head" in n)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The tensors that are copied for the runs."""
    shapes: list[Any] = []
    make = isolation._copy

    def noted(tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        shapes.append(tensor)
        return make(tensor, *how)

    monkeypatch.setattr(isolation, "_copy", noted)
    return shapes


@pytest.mark.parametrize(("loss", "expected"), [("plain_loss", 0), ("head_loss", 7), ("any_loss", 7)])
def test_a_loss_that_is_a_method_has_copies_of_what_it_names(loss: str, expected: int, copied: list[Any]) -> None:
    """The whole model was copied while the last layer was measured, and weights without values were refused."""
    net = Net()
    before = values_of(net.head, net.norm)
    profile_chain(list(net.blocks), (X, torch.zeros(5, 8)), loss_fn=getattr(net, loss), **QUICK)
    assert same(before, net.head, net.norm) and net.head.weight.grad is None
    others = {id(weight) for block in net.blocks for weight in block.parameters()}
    assert len([each for each in copied if id(each) not in others]) == expected
    assert len(copied) == 6 + expected, "each layer's once"


def test_a_decorated_method_of_a_model_is_a_loss_with_its_weights(copied: list[Any]) -> None:
    net = Net()
    method = net.head_loss

    @wraps(method)
    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return method(outputs, labels)

    before = values_of(net.head, net.norm)
    profile_chain(list(net.blocks), (X, torch.zeros(5, 8)), loss_fn=loss_fn, **QUICK)
    assert same(before, net.head, net.norm) and len(copied) == 6 + 7
    assert net.head.weight.grad is None


class Within(nn.Module):
    """A block that knows the whole model."""

    def __init__(self, model: Net, place: int) -> None:
        super().__init__()
        self.block, self.model = model.blocks[place], [model]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class Reaching(nn.Linear):
    """A layer with two inputs that knows what it is in."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.around: list[nn.Module] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + y


def test_layers_reached_through_the_whole_model_are_not_copied(copied: list[Any]) -> None:
    net = Net()
    chain = profile_chain([Within(net, place) for place in range(3)], X, **QUICK)
    weights = {id(weight) for weight in net.blocks.parameters()}
    assert len([each for each in copied if id(each) in weights]) == 6
    copied.clear()
    assert len(chain.layers) == 3
    layer, parent = Reaching(), nn.Module()
    parent.layer, parent.other = layer, nn.Linear(8, 8)
    layer.around = [parent]
    profile_chain([lambda x: (x, x), unpacking(layer)], X, **QUICK)
    assert len(copied) == 2


def test_bytes_of_layers_reached_through_the_whole_model_are_theirs() -> None:
    net = Net()
    net.far, net.late = nn.Identity(), nn.Identity()
    net.blocks[1].table = torch.zeros(7)
    layers = [Within(net, place) for place in range(3)]
    hidden = HiddenBytes(layers[:2], torch.device("cpu"))
    others = sum(tensor.nbytes for part in (net.head, net.norm) for tensor in part.state_dict().values())
    third = sum(tensor.nbytes for tensor in net.blocks[2].state_dict().values())
    assert [hidden.of([layer]) for layer in layers[:2]] == [others + third, 28], (
        "the second one's table is its own"
    )


@pytest.mark.parametrize("size", [4, 2**30])
def test_large_frozen_modules_in_lists_are_not_copied(
    size: int, said: list[str], copied: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_beside, "MOST_BYTES", size)
    layer = Distilled()
    layer.teacher[0].requires_grad_(False)
    teacher = layer.teacher[0].weight.clone()
    measure(layer)
    names = [line.partition(":")[0] for line in said]
    assert (names == ["weight of Linear (Parameter)"], torch.equal(teacher, layer.teacher[0].weight)) == (
        (True, False) if size == 4 else (False, True)
    )
    assert len([each for each in copied if each.shape == (8, 8)]) == (3 if size == 4 else 4)
    norm = layer.tools.norm
    assert norm.num_batches_tracked == 0 and not norm.running_mean.any()


def test_lazy_modules_in_lists_do_not_stop_the_measuring(said: list[str]) -> None:
    """A layer was refused that held one, also where none used it."""
    layer = Helped([nn.LazyLinear(8)])
    layer.spare = [nn.LazyLinear(8), nn.LazyBatchNorm1d()]
    measure(layer)
    assert [line.partition(" while")[0] for line in said] == [
        "weight of Linear (Parameter): it got its shape and its first values",
        "bias of Linear (Parameter): it got its shape and its first values",
    ]


def test_large_buffers_of_copies_are_not_said(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said of a buffer that it was changed, where only its copy was."""
    monkeypatch.setattr(remembered_values, "MOST_BYTES", 8)
    layer = Helped(nn.Identity())
    layer.banks = [nn.Module()]
    layer.banks[0].register_buffer("bank", torch.zeros(4, 8))
    layer.register_forward_hook(lambda *_: layer.banks[0].bank.add_(1))
    measure(layer)
    assert not layer.banks[0].bank.any() and not said


# Values that hold themselves.


class OwnDict(dict[str, Any]):
    """Settings that are their own attributes, with a method among them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.__dict__ = self
        self["total"] = self.sum_up

    def sum_up(self) -> int:
        return int(self["a"])


class OwnList(list[Any]):
    def __init__(self) -> None:
        super().__init__([0, self.first])

    def first(self) -> Any:
        return self[0]


@pytest.mark.parametrize("make", [lambda: OwnDict(a=0), OwnList])
def test_containers_that_hold_a_method_of_their_own_are_put_back(make: Callable[[], Any]) -> None:
    """They were a raw RecursionError."""
    layer = Helped(nn.Identity())
    layer.settings = settings = make()
    method = settings["total" if isinstance(settings, dict) else 1]
    key = "a" if isinstance(settings, dict) else 0
    layer.register_forward_hook(lambda *_: settings.__setitem__(key, settings[key] + 1))
    measure(layer)
    assert layer.settings is settings and settings[key] == 0
    assert settings["total" if isinstance(settings, dict) else 1] == method
    before = remembered_values.mark(settings)
    assert before == remembered_values.mark(settings)
    settings[key] += 1
    assert before != remembered_values.mark(settings)
    loop: list[Any] = [0]
    loop.append(loop)
    layer.settings = loop
    measure(layer)
    assert layer.settings is loop and loop[1] is loop


# Code behind decorators, and of what stands in containers and objects.


class Computing:
    """An object that counts, one of whose methods is decorated."""

    def __init__(self) -> None:
        self.calls = 0

    def compute(self, x: torch.Tensor, labels: Any = None) -> torch.Tensor:
        self.calls += 1
        return x if labels is None else mean_loss(x, labels)


def _wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def function(x: torch.Tensor, labels: Any = None) -> Any:
        return method(x, labels)

    return function


def _compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(method, backend="eager")


@pytest.mark.parametrize("decorate", [_wrapped, _compiled])
def test_what_a_decorated_method_belongs_to_is_put_back(decorate: Callable[..., Any]) -> None:
    """Neither as a layer nor as a loss was its object looked at."""
    computing, of_loss = Computing(), Computing()
    measure(decorate(computing.compute), decorate(of_loss.compute))
    assert (computing.calls, of_loss.calls) == (0, 0)


TALLY = {"runs": 0}


class Tallying(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        TALLY["runs"] += 1
        return x


def tallied(x: torch.Tensor) -> torch.Tensor:
    TALLY["runs"] += 1
    return x


@pytest.mark.parametrize(
    "helper",
    [
        [Tallying()],
        [SimpleNamespace(act=tallied).act],
        [[[tallied]]],
        SimpleNamespace(inner=SimpleNamespace(act=tallied)),
        SimpleNamespace(acts=[Warm(), tallied]),
    ],
    ids=["module", "function", "lists", "objects", "list of an object"],
)
def test_what_code_in_containers_and_objects_names_is_put_back(helper: Any) -> None:
    layer = Helped(nn.Identity())
    layer.tools = helper

    def run(module: Any, _: Any, outputs: torch.Tensor) -> torch.Tensor:
        tool = module.tools
        while not callable(tool):
            tool = tool[-1] if isinstance(tool, list) else next(iter(vars(tool).values()))
        return tool(outputs)  # type: ignore[no-any-return]

    layer.register_forward_hook(run)
    TALLY["runs"], Warm.total = 0, 0
    measure(layer)
    assert TALLY["runs"] == 0


# Modules in the table of attributes itself.


class Following(nn.Linear):
    """A layer with a teacher that is not registered, and a module that knows it."""

    def __init__(self, *, by_dict: bool) -> None:
        super().__init__(8, 8)
        teacher = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.BatchNorm1d(8))
        if by_dict:
            self.__dict__["teacher"] = teacher
        else:
            object.__setattr__(self, "teacher", teacher)
        self.inner = nn.Identity()
        object.__setattr__(self.inner, "parent", self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher[0].weight.lerp_(self.weight, 0.1)
        return self.inner(super().forward(x) + self.teacher(x))


@pytest.mark.parametrize("by_dict", [True, False])
def test_modules_in_the_table_of_attributes_are_put_back(by_dict: bool, copied: list[Any]) -> None:
    """A teacher that follows the layer had moved, and its running statistics had changed."""
    layer = Following(by_dict=by_dict)
    before = values_of(layer, layer.teacher)
    assert list(hidden_modules(layer)) == ["teacher", "teacher.0", "teacher.1"]
    measure(layer)
    assert same(before, layer, layer.teacher) and len(copied) == 4 + 2 + 7
    assert HiddenBytes([layer], torch.device("cpu")).of([layer]) == sum(
        tensor.nbytes for tensor in layer.teacher.state_dict().values()
    )
