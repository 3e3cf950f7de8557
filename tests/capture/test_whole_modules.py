"""What modules that run whole leave beside what they return, and what else a cut would part."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.autograd import backward  # noqa: E402

from deepspeed_partition.capture import CaptureError, ShapeError, layers_as_they_are  # noqa: E402
from tests.capture.comparing import captured_layers, run_in_order  # noqa: E402

WIDTH = 8


class Blocks(nn.Module):
    """Something within its blocks; what ``around`` does differs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


# What a module that decides by data leaves


class Router(nn.Module):
    """Gives each sample to an expert, and leaves something of that where code may read it."""

    def __init__(self, leaves: str) -> None:
        super().__init__()
        self.gate, self.leaves = nn.Linear(WIDTH, 2), leaves
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("counts", torch.zeros(2))
        self.aux: Any = None
        self.stats: dict[str, Any] = {}
        self.num_kept, self.kept, self.average = 0, [0], torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.gate(x).softmax(-1)
        chosen, given = share.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero(as_tuple=True)
            given[rows] = expert(x[rows])
        self.leave(x, share, chosen, given)
        return given + x

    def leave(self, x: torch.Tensor, share: torch.Tensor, chosen: torch.Tensor, given: torch.Tensor) -> None:
        if self.leaves == "an attribute":
            self.aux = share.mean(0).pow(2).sum()
        elif self.leaves == "an entry":
            self.stats["aux"] = share.mean(0)
        elif self.leaves == "what it returns":
            self.aux = given
        elif self.leaves == "its argument":
            self.aux = x
        elif self.leaves == "a tensor of a scale":
            self.aux = torch.tensor(x.abs().max().item() / 127)
        elif self.leaves == "a tensor of a decision":
            self.aux = torch.ones(1) if bool(share[0, 0] > 0.5) else -torch.ones(1)
        elif self.leaves == "a number with a tensor's name":
            self.max = share.max().item()
        elif self.leaves == "a tensor of a number":
            self.aux = torch.tensor(float((share > 0.5).sum()))
        elif self.leaves == "a number":
            self.num_kept = int((share > 2).sum())  # as many as before
        elif self.leaves == "a list of numbers":
            self.kept = (share > 0.5).sum(0).tolist()
        elif self.leaves == "an entry of numbers":
            self.stats["kept"] = int((share > 0.5).sum())
        elif self.leaves == "a buffer":
            self.counts = self.counts + torch.bincount(chosen, minlength=2)
        elif self.leaves == "a buffer in place":
            self.counts += torch.bincount(chosen, minlength=2)
        elif self.leaves == "a tensor in place":
            self.average.lerp_(share.detach().mean(0), 0.1)

    def read(self) -> Any:
        if self.leaves == "an entry":
            return self.stats["aux"].sum()
        if self.leaves == "a number":
            return self.num_kept
        if self.leaves == "a number with a tensor's name":
            return self.max
        if self.leaves == "a list of numbers":
            return sum(self.kept)
        if self.leaves == "an entry of numbers":
            return self.stats["kept"]
        if self.leaves.startswith("a buffer"):
            return self.counts.mean()
        return self.average.mean() if self.leaves == "a tensor in place" else self.aux.mean()


class Routed(Blocks):
    def __init__(self, leaves: str, reads: bool = True) -> None:
        super().__init__()
        self.router, self.reads, self.leaves = Router(leaves), reads, leaves if reads else ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.through(self.router(self.first(x)))
        if self.leaves == "a number with a tensor's name":
            return x * (1 + self.router.max)
        if self.leaves == "a number":
            last, router = self.last, self.router
            return x * (1 + router.num_kept + 0 * last.bias)
        return x * (1 + self.router.read()) if self.reads else x


LEFT = [
    "an attribute", "an entry", "what it returns", "its argument", "a number", "a list of numbers",
    "an entry of numbers", "a tensor of a number", "a tensor of a scale", "a tensor of a decision",
    "a number with a tensor's name",
]  # fmt: skip


@pytest.mark.parametrize("leaves", LEFT)
def test_what_a_module_that_decides_by_data_leaves_is_read_by_no_other_code(leaves):
    """The code read what one run on data of our own had left, as a constant."""
    model = Routed(leaves)
    with pytest.raises(CaptureError, match=r"^router decides by data.* leaves .* beside what it returns"):
        captured_layers(model, torch.randn(4, WIDTH))
    assert (model.router.aux, model.router.stats, model.router.num_kept, model.router.kept) == (None, {}, 0, [0])
    layers = layers_as_they_are(model, (torch.randn(4, WIDTH),), {})  # the code around the blocks stays whole
    for _ in range(2):
        x = torch.randn(4, WIDTH)
        torch.testing.assert_close(run_in_order(layers, x), model(x))


class Unread(Router):
    def keeps(self) -> int:
        raise NotImplementedError


class Leaves(Unread):
    """Leaves numbers, some by names that tensors have, too."""

    def leave(self, x: torch.Tensor, share: torch.Tensor, chosen: torch.Tensor, given: torch.Tensor) -> None:
        self.num_kept, self.max = int((share > 0.5).sum()), share.max().item()
        self.real, self.shape = share.min().item(), x.shape

    def keeps(self) -> int:
        return self.num_kept

    def mean(self) -> float:
        return self.num_kept / 2


def pick(parts: Any, number: int) -> Any:
    return parts[number]


class OfParts(Blocks):
    """Has routers; how its code reads numbers of them differs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Leaves("") for _ in range(2))
        self.num_parts, self.scale = 2, nn.Parameter(torch.ones(WIDTH))

    def part_for(self, x: torch.Tensor) -> Leaves:
        return self.parts[x.dim() % 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.through(self.first(x))
        for part in self.parts:
            x = part(x)
        return self.read(x)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class InLoop(OfParts):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x * part.max
        return x


class InNumberedLoop(OfParts):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        for number, part in enumerate(self.parts):
            x = x * part.real + number
        return x


class ByMethodOfTensorsName(OfParts):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        part = self.parts[0]
        return x * part.mean()


class ByOverridingMethod(OfParts):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.parts[0].keeps()


class OfPicked(OfParts):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        part = self.part_for(x)
        return part(x) * part.num_kept


class OfPickedByFunction(OfParts):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        part = pick(self.parts, x.dim() % 2)
        return x * part.max


class InGenerator(OfParts):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum(part.num_kept for part in self.parts)


class InList(OfParts):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x * max([part.max for part in self.parts])


class InLambda(OfParts):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x * max(self.parts, key=lambda part: part.num_kept)(x)


WAYS = [
    InLoop, InNumberedLoop, ByMethodOfTensorsName, ByOverridingMethod, OfPicked, OfPickedByFunction, InGenerator,
    InList, InLambda,
]  # fmt: skip


@pytest.mark.parametrize("build", WAYS)
def test_numbers_that_modules_leave_are_found_by_any_variable_for_them(build):
    """The numbers of one run on data of our own became constants of the layers."""
    with pytest.raises(CaptureError, match=r"^parts\.0 decides by data.* leaves the number .* beside"):
        captured_layers(build(), torch.randn(4, WIDTH))


class OfTensors(OfParts):
    """Reads of tensors what routers leave by the same names."""

    def read(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale
        for chunk in x.split(self.num_parts):
            x = x + chunk.mean() / chunk.shape[0] + scale.max() / scale.shape[0]
        hidden = self.last(x)
        return hidden.real * sum(each.max() for each in hidden)


def test_tensors_have_attributes_of_their_own():
    model, x = OfTensors(), torch.randn(4, WIDTH)
    torch.testing.assert_close(run_in_order(captured_layers(model, x), x), model(x))


def test_a_tensor_that_a_module_changes_in_place_is_read_by_no_other_code():
    model = Routed("a tensor in place")
    before = model.router.average.clone()
    with pytest.raises(CaptureError, match=r"keeps self\.router\.average for its next run"):
        layers_as_they_are(model, (torch.randn(4, WIDTH),), {})
    assert torch.equal(model.router.average, before)


@pytest.mark.parametrize("leaves", ["an attribute", "an entry", "a number", "a buffer", "a tensor in place"])
def test_what_a_module_leaves_for_itself_hinders_nothing(leaves):
    model = Routed(leaves, reads=False)
    layers = layers_as_they_are(model, (torch.randn(4, WIDTH),), {})
    assert len(layers) >= 6
    x = torch.randn(4, WIDTH)
    assert torch.equal(run_in_order(layers, x), model(x))


class Gathered(nn.Module):
    """Has a router, and returns what that leaves, too."""

    def __init__(self, leaves: str) -> None:
        super().__init__()
        self.router = Router(leaves)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return self.router(x), torch.as_tensor(self.router.read(), dtype=x.dtype)


class HasGathered(Blocks):
    def __init__(self, leaves: str) -> None:
        super().__init__()
        self.gathered = Gathered(leaves)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, aux = self.gathered(self.first(x))
        return self.through(x) * (1 + aux)


@pytest.mark.parametrize("leaves", ["an attribute", "an entry", "a number", "a tensor in place"])
def test_a_module_around_it_that_returns_what_it_leaves_stays_whole(leaves):
    model = HasGathered(leaves)
    layers = layers_as_they_are(model, (torch.randn(4, WIDTH),), {})
    assert any("gathered" in names for names in layers.recipe.names)
    for _ in range(2):
        x = torch.randn(4, WIDTH)
        average = model.gathered.router.average.clone()
        expected = model(x)
        model.gathered.router.average.copy_(average)
        torch.testing.assert_close(run_in_order(layers, x), expected)


class Direct(nn.Module):
    """Returns what its router leaves as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router("an attribute")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.router(x), self.router.aux


class HasDirect(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.direct = Direct()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, aux = self.direct(self.first(x))
        return self.through(x) * aux


def test_what_is_left_may_be_returned_as_it_is():
    model = HasDirect()
    layers = captured_layers(model, torch.randn(4, WIDTH))
    assert any("direct" in names for names in layers.recipe.names)
    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(run_in_order(layers, x), model(x))
    with pytest.raises(CaptureError, match="beside what it returns, which the model's own code reads"):
        captured_layers(Direct(), x)


class Twice(Blocks):
    """Calls a module twice that decides by data, and keeps something from its first call for the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.keeping = Keeping()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keeping.before = None
        return self.keeping(self.through(self.keeping(self.first(x))))


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.before = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if (x > 100).any():
            x = x * 2
        if self.before is not None:
            x = x + self.before
        self.before = x.detach()
        return x


class Counts(nn.Module):
    """Counts in a buffer of another module, as it decides by data."""

    def __init__(self, counts: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "of_another", counts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x > 100).any():
            x = x * 2
        self.of_another.counts += (x > 0).sum(0)
        return x


class CountsElsewhere(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.Module()
        self.statistics.register_buffer("counts", torch.zeros(WIDTH))
        self.counts = Counts(self.statistics)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(self.counts(self.first(x))) * self.statistics.counts


@pytest.mark.parametrize(
    ("build", "sentence"),
    [(Twice, "keeping decides by data"), (CountsElsewhere, r"counts decides by data.* uses statistics\.counts")],
)
def test_what_such_a_module_uses_of_another_layer_is_refused(build, sentence):
    with pytest.raises(CaptureError, match=sentence):
        captured_layers(build(), torch.randn(4, WIDTH))


class Within(nn.Module):
    """Decides by data, around a module that does so and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Router("a tensor in place")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        self.inner.num_kept += 1
        return x * 2 if (x > 100).any() else x


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.within, self.num_kept = Within(), 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.within(x)
        return x + self.within.inner.average.mean() * self.num_kept


class HasAround(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.around, self.num_kept = Around(), 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(self.around(self.first(x))) * self.num_kept


def test_what_a_module_within_leaves_is_noted_for_the_one_around_it():
    """An attribute of the same name, of another object, is none of it."""
    model = HasAround()
    layers = captured_layers(model, torch.randn(4, WIDTH))
    assert any("around" in names for names in layers.recipe.names)
    x, average = torch.randn(4, WIDTH), model.around.within.inner.average.clone()
    expected = model(x)
    model.around.within.inner.average.copy_(average)
    torch.testing.assert_close(run_in_order(layers, x), expected)


@pytest.mark.parametrize("leaves", ["a buffer", "a buffer in place"])
def test_a_buffer_that_such_a_module_changes_is_used_by_its_layer(leaves):
    """The buffer was not known to change, and the last layer had a copy that stayed what it was."""
    model = Routed(leaves)
    layers = captured_layers(model, torch.randn(4, WIDTH))
    using = [names for names in layers.recipe.names if {"router", "router.counts"} & set(names)]
    assert len(using) == 1
    x = torch.randn(4, WIDTH)
    before = model.router.counts.clone()
    expected = model(x)
    model.router.counts = before
    torch.testing.assert_close(run_in_order(layers, x), expected)


class Deciding(nn.Module):
    """Decides by data, and does more as others do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x > 100).any():
            x = torch.nan_to_num(x)
        return self.linear(x)


class Counted(nn.Module):
    """What several modules that decide by data share: an expert, with a count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num_calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.linear(x)


class SharesExpert(Deciding):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(super().forward(x))


class Configured(Deciding):
    """Has attributes of objects that no copy is made of, and that are not compared."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"mean": np.zeros(3), "lock": threading.Lock(), "object": object(), "factor": 3}
        self.shape: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shape = x.shape
        return super().forward(x).view(self.shape)


@functools.lru_cache
def mask(length: int) -> torch.Tensor:
    return torch.tril(torch.ones(length, length))


class Masked(Deciding):
    """Makes a constant after it has looked at data, and keeps it for all."""

    def __init__(self) -> None:
        super().__init__()
        self.own: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.own is None:
            self.own = torch.ones(WIDTH)
        return mask(len(x)) @ x * self.own


class Frozen(dict):
    """What is not changed once it is made."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("what is frozen is not changed")


class HasFrozen(Masked):
    def __init__(self) -> None:
        super().__init__()
        self.config = Frozen(factor=3)


class UsesSibling(Deciding):
    def __init__(self, sibling: nn.Linear) -> None:
        super().__init__()
        self.siblings = [sibling]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.siblings[0].weight


class HasSiblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sibling = nn.Linear(WIDTH, WIDTH)
        self.uses = UsesSibling(self.sibling)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.uses(self.sibling(x))


class Several(nn.Module):
    """Several modules one after the other, whose code reads something of them."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.last = nn.ModuleList(parts), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num_samples, _ = x.shape
        factor = 1
        for part in self.parts:
            x = part(x)
            factor *= part.config["factor"] if isinstance(part, Configured) else 1
        return self.last(x) * factor / num_samples


def ordinary_parts() -> dict[str, list[nn.Module]]:
    shared, again = Counted(), Masked()
    return {
        "a shared expert": [SharesExpert(shared), SharesExpert(shared)],
        "attributes of any kind": [Configured(), Configured()],
        "constants behind data": [Masked(), Masked()],
        "containers that refuse to be filled": [HasFrozen(), HasFrozen()],
        "a block that runs twice": [again, again],
        "a weight of a sibling": [HasSiblings(), HasSiblings()],
    }


@pytest.mark.parametrize("kind", ordinary_parts())
def test_what_modules_that_decide_by_data_do_ordinarily_hinders_nothing(kind):
    mask.cache_clear()
    model = Several(*ordinary_parts()[kind])
    layers = captured_layers(model, torch.randn(4, WIDTH))
    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(run_in_order(layers, x), model(x))


class Measured(nn.Module):
    """Has a metric, which looks at data, and whose hash changes with what it has counted."""

    def __init__(self, metric: nn.Module) -> None:
        super().__init__()
        self.linear, self.accuracy = nn.Linear(WIDTH, WIDTH), metric

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.accuracy(x, torch.zeros(len(x), dtype=torch.long))
        return x / self.accuracy.num_classes


def test_settings_of_a_metric_may_be_read():
    """They were taken for numbers that its run on data of our own had left."""
    accuracy = pytest.importorskip("torchmetrics").classification.MulticlassAccuracy
    model, x = Measured(accuracy(num_classes=WIDTH)), torch.randn(4, WIDTH)
    torch.testing.assert_close(run_in_order(captured_layers(model, x), x), model(x))


# A buffer that changes in one state alone


class Averages(Blocks):
    """Changes a buffer in training, behind all that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x) * self.scale
        if self.training:
            with torch.no_grad():
                self.scale.mul_(0.5).add_(x.detach().abs().mean(0))
        return self.last(x)


def test_a_buffer_that_changes_in_training_alone_is_not_parted():
    """Layers made in evaluation had a copy each, of which one changed."""
    x = torch.randn(3, WIDTH)
    layers = captured_layers(Averages().eval(), x)
    for layer in layers:
        layer.train()
    with pytest.raises(CaptureError, match=r"changes its buffer scale in training, .*model.train.. first"):
        run_in_order(layers, x)
    model = Averages()
    layers = captured_layers(model, x)
    assert sum("scale" in names for names in layers.recipe.names) == 1
    for layer in layers:
        layer.eval()
    assert torch.equal(run_in_order(layers, x), model.eval()(x))


# Gradients that code takes within


class Penalized(Blocks):
    """Its energy, and the forces that this means for what comes in."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        energy = self.through(hidden)
        if self.way == "grad":
            (forces,) = torch.autograd.grad(energy.sum(), hidden, create_graph=True)
        elif self.way == "backward for inputs":
            at = hidden.detach().requires_grad_()
            (self.through(at) ** 2).sum().backward(inputs=[at])
            forces = at.grad
        else:
            hidden.retain_grad()
            if self.way == "backward":
                energy.sum().backward(create_graph=True)
            elif self.way == "imported":
                backward([energy.sum()], create_graph=True)
            else:
                torch.autograd.backward([energy.sum()], create_graph=True)
            forces = hidden.grad
        return energy + forces


class HasPenalized(Blocks):
    def __init__(self, way: str, parts: bool = False) -> None:
        super().__init__()
        self.penalized, self.parts = Penalized(way), parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.through(self.penalized(x.detach() if self.parts else x))


class Forces(nn.Module):
    def forward(self, energy: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(energy.sum(), at, create_graph=True)[0]


class HasForces(Blocks):
    """A module of its own takes the gradients, of what others have made."""

    def __init__(self) -> None:
        super().__init__()
        self.forces, self.pair = Forces(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        energy = self.through(hidden) + self.pair(hidden) ** 2
        return energy + self.forces(energy, hidden)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("way", ["grad", "backward", "torch.autograd.backward", "imported"])
def test_code_that_takes_gradients_is_not_cut(way):
    """Across a boundary such a gradient is that of one layer's part of the graph."""
    x = torch.randn(3, WIDTH)
    for model in (Penalized(way), *([HasForces()] if way == "grad" else [HasPenalized(way)])):
        with pytest.raises(CaptureError, match="its code takes gradients by"):
            captured_layers(model, x)
    layers = captured_layers(HasPenalized(way, parts=way != "grad"), x)
    assert [names for names in layers.recipe.names if any("penalized" in name for name in names)] == [
        ["penalized"]
    ]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_for_inputs_that_a_module_has_made_are_its_own():
    model = HasPenalized("backward for inputs")
    layers = captured_layers(model, torch.randn(3, WIDTH))
    assert ["penalized"] in layers.recipe.names


# Numbers of sizes that code makes texts and numbers of


class BySize(Blocks):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.num_shown = way, 0
        self.by_length = nn.ModuleDict({"5": nn.Identity(), "7": nn.Tanh()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.through(self.first(x))
        length = x.shape[1]
        if self.way == "str":
            return self.by_length[str(length)](x)
        if self.way == "f-string":
            return getattr(self, f"of_{length}")(x)
        if self.way == "item":
            return x * torch.tensor(length).item()
        if self.way == "float":
            return x * float(torch.arange(length, device=x.device).max() + 1)
        if self.way == "numpy":
            return x * float(torch.arange(length, device=x.device).numpy().max())
        if self.way == "is_nonzero":
            return x * 2 if torch.is_nonzero(torch.tensor(length - 5)) else x
        if self.way == "print":
            print(f"{x.shape} of {length}", torch.arange(length).max().item())
        if self.way == "check":
            torch._assert(x.dim() == 3, f"{length} is too long")
        message = f"of length {length}"
        if length > 100:
            raise ValueError(message)
        assert length > 0, f"a sequence of length {length}"
        return x

    def of_5(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def of_7(self, x: torch.Tensor) -> torch.Tensor:
        return -x


@pytest.mark.parametrize("way", ["str", "f-string", "item", "float", "numpy", "is_nonzero"])
def test_what_code_makes_of_a_size_as_text_or_number_holds_for_that_size(way):
    """Another length ran the module of the captured one, or with its number."""
    model = BySize(way)
    layers = captured_layers(model, torch.randn(3, 5, WIDTH))
    x = torch.randn(2, 5, WIDTH)
    assert torch.equal(run_in_order(layers, x), model(x))
    with pytest.raises(
        ShapeError, match=r"takes another way for the sizes of this batch \(.*test_whole_modules\.py"
    ):
        run_in_order(layers, torch.randn(3, 7, WIDTH))


@pytest.mark.parametrize("way", ["print", "check", "assert"])
def test_a_size_that_code_only_shows_may_change(way):
    model = BySize(way)
    layers = captured_layers(model, torch.randn(3, 5, WIDTH))
    x = torch.randn(3, 7, WIDTH)
    assert torch.equal(run_in_order(layers, x), model(x))


# Autocast on another device than that of the capture


class NamesType(Blocks):
    """Its regions name a type that is the default of the CPU: at once, around another region, and when made."""

    def __init__(self) -> None:
        super().__init__()
        self.region = torch.autocast("cpu", dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16):
            x = self.first(x)
            with torch.autocast(x.device.type):
                x = self.blocks[0](x)
        with self.region:
            x = self.blocks[1](x)
        return self.last(x.float())


def test_a_region_that_names_its_type_keeps_it():
    layers = captured_layers(NamesType(), torch.randn(3, WIDTH))
    programs = next(iter(layers.recipe.programs.values()))
    casts = [cast for program in programs for step in program.steps if step.context for cast in step.context[1]]
    assert len(casts) >= 3 and all(cast.enabled and cast.dtype is torch.bfloat16 for cast in casts)
    model = layers.captured.model
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(run_in_order(layers, x), model(x))


class InFull(Blocks):
    """Computes a part in full precision, whatever is around it, and one in bfloat16."""

    def __init__(self, kind: str | None) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            x = self.first(x).float()
        with torch.autocast(self.kind or x.device.type, enabled=False):
            x = self.blocks[0](x.float())
        return self.last(x)


@pytest.mark.parametrize("kind", [None, "cuda"])
def test_regions_of_autocast_are_those_of_the_device_that_runs(kind):
    """A model that is captured on a CPU and trains on a GPU lost its regions without autocast."""
    from deepspeed_partition.capture.program import context_of

    model = InFull(kind)
    layers = captured_layers(model, torch.randn(3, WIDTH))
    programs = layers.recipe._captured_again(layers.captured, True, (), (True, torch.float16, "cuda"))
    regions = [step.context for program in programs for step in program.steps if step.context]
    in_full = [context for context in regions if not any(cast.enabled for cast in context[1])]
    named = [cast for context in regions for cast in context[1] if cast.enabled]
    assert in_full and named and all((cast.kind, cast.dtype) == (None, torch.bfloat16) for cast in named)
    torch.set_autocast_enabled("cuda", True)
    try:
        for context in in_full:
            with context_of(context, torch.device("cuda")):
                assert not torch.is_autocast_enabled("cuda")
            assert torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert not torch.is_autocast_enabled("cpu")
    x = torch.randn(3, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(run_in_order(layers, x), model(x))
