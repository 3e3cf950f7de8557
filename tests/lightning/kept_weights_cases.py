"""Weights and copies of them that a program keeps, in all forms, while layers move to another rank.

Written like ``lightning_cases.py``.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from tests.lightning import lightning_cases as cases
from tests.lightning.hook_cases import LooksAhead, lines
from tests.lightning.lightning_cases import Host, seeded

MOVES_LATE = {"algorithm": [0, 2, 8], "warmup_steps": 3, "warmup_epochs": 0}


def look_ahead(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Move slow weights half of the way to the fast ones, and these there."""
    with torch.no_grad():
        for fast, slow in pairs:
            slow.lerp_(fast, 0.5)
            fast.copy_(slow)


class Kept(cases.Classifier):
    """One kind of slow weights after the other, made wherever a program may make them."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.fast_at_first = list(self.parameters())
        self.slow_at_first = [weight.detach().clone() for weight in self.fast_at_first]

    def configure_optimizers(self) -> Any:
        self.fast = list(self.parameters())
        self.slow = [weight.detach().clone() for weight in self.fast]
        self.matrices = [weight for weight in self.parameters() if weight.ndim > 1]
        self.slow_matrices = [weight.detach().clone() for weight in self.matrices]
        backwards = [*self.head.parameters(), *self.blocks.parameters(), *self.embed.parameters()]
        groups = [{"params": [w for w in backwards if (w.ndim > 1) == flat]} for flat in (True, False)]
        return torch.optim.SGD(groups, lr=0.3)

    def group(self) -> list[nn.Parameter]:
        return self.trainer.optimizers[0].param_groups[0]["params"]

    def on_train_start(self) -> None:
        self.slow_group = [weight.detach().clone() for weight in self.group()]
        self.by_weight = {weight: weight.detach().clone() for weight in self.parameters()}
        self.by_id = {id(weight): {"slow": [weight.detach().clone()], "times": 0} for weight in self.parameters()}
        self.pairs = [(weight, weight.detach().clone()) for weight in self.parameters()]
        self.arrays = {name: weight.detach().numpy().copy() for name, weight in self.named_parameters()}
        self.renamed = {f"mean.{name}": weight.detach().clone() for name, weight in self.named_parameters()}
        self.rates = {name: 0.1 for name, _ in self.named_parameters()}
        self.shapes = {name: weight.shape for name, weight in self.named_parameters()}
        self.types = {name: weight.dtype for name, weight in self.named_parameters()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        kind = self.global_step % 6
        if kind == 0:
            look_ahead(zip(self.fast, self.slow, strict=True))
        elif kind == 1:
            look_ahead(zip(self.matrices, self.slow_matrices, strict=True))
        elif kind == 2:
            look_ahead(zip(self.fast_at_first, self.slow_at_first, strict=True))
        elif kind == 3:
            look_ahead(zip(self.group(), self.slow_group, strict=True))
        elif kind == 4:
            look_ahead((weight, self.by_weight[weight]) for weight in self.parameters())
        else:
            for weight in self.parameters():
                kept = self.by_id[id(weight)]
                kept["times"] += 1
                look_ahead([(weight, kept["slow"][0] * kept["times"])])


class WithList(torch.optim.SGD):
    """Keeps its slow weights in the order of its parameters."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, lr=0.3)
        self.slow = [weight.detach().clone() for group in self.param_groups for weight in group["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        look_ahead(zip((w for group in self.param_groups for w in group["params"]), self.slow, strict=True))
        return loss


class Around(torch.optim.Optimizer):
    """Wraps an optimizer, whose states are its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.states_of_inner = inner, inner.state
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, defaultdict(dict)
        self.slow = [[weight.detach().clone() for weight in group["params"]] for group in self.param_groups]
        for name in ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre"):
            setattr(self, f"_optimizer_{name}_hooks", OrderedDict())
        self._optimizer_load_state_dict_post_hooks: Any = OrderedDict()

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            look_ahead(zip(group["params"], slow, strict=True))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class KeptByOptimizer(cases.Classifier):
    def configure_optimizers(self) -> Any:
        return WithList(self.parameters())


class KeptAround(cases.Classifier):
    def configure_optimizers(self) -> Any:
        return Around(torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9))


def kept_weights(host: Host) -> dict[str, Any]:
    """Layers move after the third step."""
    return {
        build.__name__: moved_late(host, build, ["self.arrays, self.pairs, self.renamed"] if build is Kept else [])
        for build in (Kept, KeptByOptimizer, KeptAround, LooksAhead)
    }


def moved_late(
    host: Host, build: Callable[[], pl.LightningModule], stays: list[str], path: Any = None
) -> dict[str, Any]:
    """Train a module whose layers move after the third step; rank 0 says which places do not follow."""
    recorder, module = cases.Recorder(), seeded(build)
    with lines() as said:
        trainer = host.trainer(recorder, strategy=MOVES_LATE)
        trainer.fit(module, cases.loader(96))
    if path is not None:
        trainer.save_checkpoint(path)
    if host.pipelined:
        assert list(trainer.strategy.pipeline.parts) == [0, 2, 8]
        told = [line.partition(" of rank")[0] for line in said if "in a form that does not follow" in line]
        assert told == (stays if trainer.global_rank == 0 else [])
    weights = {name: float(value.double().sum()) for name, value in module.state_dict().items()}
    return {"rows": recorder.rows, "weights": weights}


class Slotted:
    __slots__ = ("weights",)

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.weights = list(weights)


class Collects(pl.Callback):
    """Takes the weights when the fit begins, in all forms, and reads their gradients later."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.in_list = list(module.parameters())
        self.in_set = set(module.parameters())
        self.in_deque = deque(module.parameters())
        self.pairs = list(module.named_parameters())
        self.references = [weakref.ref(weight) for weight in module.parameters()]
        self.slotted = Slotted(module.parameters())
        weights = list(module.parameters())
        self.norm = lambda: [weight.grad.norm() for weight in weights]
        self.norms_by_weight = dict.fromkeys(module.parameters(), 0.0)
        self.norms_by_name = {name: [0.0] for name, _ in module.named_parameters()}
        self.in_tuple = tuple(module.parameters())
        self.one = module.blocks[1].linear.weight
        self.steps = 0

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        named = dict(module.named_parameters())
        expected = sorted(float(weight.grad.norm()) for weight in named.values())
        for weights in (
            self.in_list, self.in_set, self.in_deque, [weight for _, weight in self.pairs],
            [reference() for reference in self.references], self.slotted.weights, self.norms_by_weight,
        ):  # fmt: skip
            assert sorted(float(weight.grad.norm()) for weight in weights) == expected
        assert sorted(map(float, self.norm())) == expected and dict(self.pairs) == named
        self.steps += 1
        for name, weight in named.items():
            self.norms_by_weight[weight] += 1.0
            self.norms_by_name[name][0] += 1.0
        assert [*self.norms_by_weight.values()] == [self.steps] * len(named)
        assert self.norms_by_name == {name: [self.steps] for name in named}


def collected_weights(host: Host) -> dict[str, Any]:
    """What does not follow the layers is said."""
    callback = Collects()
    with lines() as said:
        trainer = host.trainer(callback, strategy=MOVES_LATE)
        trainer.fit(seeded(cases.Classifier), cases.loader(96))
    assert callback.steps == 12 and list(trainer.strategy.pipeline.parts) == [0, 2, 8]
    return {"said": [line for line in said if "in a form that does not" in line]}


OF_PROGRAM: dict[str, Any] = {}
"""What a program keeps in a global."""


def copies(module: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


class Shadow(nn.Module):
    """A module beside the layers, whose copies are in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.slow: dict[str, Tensor] = {}


class Nested:
    """An object of the program in one of its own."""

    def __init__(self, depth: int, slow: dict[str, Tensor]) -> None:
        self.inner: Any = Nested(depth - 1, slow) if depth else slow

    def innermost(self) -> dict[str, Tensor]:
        return self.inner if isinstance(self.inner, dict) else self.inner.innermost()


class KeptFarAway(cases.Classifier):
    """Keeps slow weights in globals, its class, deep in objects, in a module, and in a function."""

    of_class: ClassVar[dict[str, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.shadow = Shadow()

    def on_train_start(self) -> None:
        OF_PROGRAM.clear()
        OF_PROGRAM.update(fast=list(self.parameters()), slow=list(copies(self).values()), named=copies(self))
        OF_PROGRAM["tuple"] = tuple(self.parameters())
        self.of_class.clear()
        self.of_class.update(copies(self))
        self.deep, self.shadow.slow = Nested(6, copies(self)), copies(self)
        fast, slow = list(self.parameters()), list(copies(self).values())
        self.bound = functools.partial(lambda fast, slow: look_ahead(zip(fast, slow, strict=True)), fast, slow)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        kind = self.global_step % 6
        if kind == 0:
            look_ahead(zip(OF_PROGRAM["fast"], OF_PROGRAM["slow"], strict=True))
        elif kind == 1:
            self.bound()
        else:
            by_name = [OF_PROGRAM["named"], self.of_class, self.deep.innermost(), self.shadow.slow][kind - 2]
            look_ahead((weight, by_name[name]) for name, weight in self.named_parameters())


def kept_far_away(host: Host) -> dict[str, Any]:
    """Globals, and what was four attributes deep, stayed in silence."""
    return moved_late(host, KeptFarAway, ["kept_weights_cases.OF_PROGRAM"])


class KeptWithBuffers(cases.Classifier):
    """Keeps slow weights in the order of ``state_dict()``, as NVIDIA's callback of averages does."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        for block in self.blocks:
            block.register_buffer("scale", torch.ones(2))
            block.register_buffer("not_saved", torch.ones(3), persistent=False)

    def on_train_start(self) -> None:
        self.slow = [weight.clone() for weight in self.state_dict().values()]
        self.fixed, self.buffers_before = tuple(self.slow), [buffer.clone() for buffer in self.buffers()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        look_ahead(zip(self.state_dict().values(), self.slow, strict=True))
        self.load_state_dict(dict(zip(self.state_dict(), self.slow, strict=True)))


def kept_with_buffers(host: Host) -> dict[str, Any]:
    """Lists in the order of ``state_dict()`` stayed in silence: to load them was an error, or mixed up layers."""
    return moved_late(host, KeptWithBuffers, ["self.buffers_before, self.fixed"])


class Scale(nn.Module):
    """A weight and a buffer of one shape."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, cases.WIDTH) + number / 16)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, cases.WIDTH) * number)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale + self.shift.roll(1))


def widened(x: Tensor) -> Tensor:
    return x.repeat(1, cases.WIDTH)[:, : cases.WIDTH]


def classes(x: Tensor) -> Tensor:
    return x[:, : cases.NUM_CLASSES] * 4


class OneShape(cases.Steps):
    """Keeps slow weights and buffers in two orders, which shapes do not tell apart."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        del self.class_weights
        self.class_weights = torch.tensor([1.0, 2.0, 0.5, 1.5])
        self.blocks = nn.ModuleList(Scale(number) for number in range(6))

    def pipeline_layers(self) -> list[Any]:
        return [widened, *self.blocks, classes]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.pipeline_layers():
            x = layer(x)
        return x

    def configure_optimizers(self) -> Any:
        self.slow_state = [weight.clone() for weight in self.state_dict().values()]
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        if not hasattr(self, "slow"):
            self.slow = [weight.detach().clone() for weight in chain(self.parameters(), self.buffers())]
        if self.global_step:  # a pipeline loads a checkpoint after configure_optimizers
            self.slow_state = [weight.clone() for weight in self.state_dict().values()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step % 2 == 0:
            look_ahead(zip(chain(self.parameters(), self.buffers()), self.slow, strict=True))
        else:
            look_ahead(zip(self.state_dict().values(), self.slow_state, strict=True))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["slow"] = self.slow

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.slow = checkpoint["slow"]


def kept_in_one_shape(host: Host) -> dict[str, Any]:
    """A list of parameters, then buffers was taken for one in the order of ``state_dict()``, in silence."""
    recorder, path = cases.Recorder(), host.folder / "one_shape.ckpt"
    first = moved_late(host, OneShape, [], path)
    again = seeded(OneShape)
    host.trainer(recorder, strategy=MOVES_LATE, max_epochs=3).fit(again, cases.loader(96), ckpt_path=str(path))
    return {"first": first, "rows": recorder.rows, "slow": [float(value.double().sum()) for value in again.slow]}


class Sums(OneShape):
    """Keeps sums of squares, which begin at zero: nothing tells their order."""

    configure_optimizers = cases.Steps.configure_optimizers

    def on_train_start(self) -> None:
        self.sums = [torch.zeros_like(weight) for weight in chain(self.parameters(), self.buffers())]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for weight, total in zip(chain(self.parameters(), self.buffers()), self.sums, strict=True):
            total.add_(weight.detach().square())


def order_untold(host: Host) -> dict[str, Any]:
    """A list whose order neither shapes nor values tell."""
    with lines() as said:
        moved_late(host, Sums, [])
    return {"said": [line for line in said if "self.sums" in line]}


class Stretch(nn.Module):
    """A weight, and no buffer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, cases.WIDTH) - number / 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale)


class OrdersCoincide(OneShape):
    """Keeps slow values by ``state_dict()``, in which each rank has its only buffer last until layers move."""

    configure_optimizers = cases.Steps.configure_optimizers

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Scale if number in (2, 5) else Stretch)(number) for number in range(6))

    def on_train_start(self) -> None:
        self.slow_state = [weight.clone() for weight in self.state_dict().values()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        look_ahead(zip(self.state_dict().values(), self.slow_state, strict=True))


def kept_where_orders_coincide(host: Host) -> dict[str, Any]:
    """It was laid as parameters and then buffers, in silence, on the rank to which the buffers had come."""
    with lines() as said:
        record = moved_late(host, OrdersCoincide, [])
    if host.pipelined:
        told = [line for line in said if "self.slow_state may be in the order of state_dict() or of" in line]
        assert len(told) == (1 if torch.distributed.get_rank() == 0 else 0), said
    return record


class StatsBeside(cases.Classifier):
    """Keeps statistics in the form of weights beside the layers, which are on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList(nn.LayerNorm(24) for _ in range(2)).requires_grad_(False)

    def on_train_start(self) -> None:
        self.stats = [torch.zeros(24), torch.zeros(24)]


class Backwards(OneShape):
    """Runs its layers in another order than it defines them."""

    configure_optimizers = cases.Steps.configure_optimizers

    def pipeline_layers(self) -> list[Any]:
        return [widened, *reversed(self.blocks), classes]

    def on_train_start(self) -> None:
        self.slow = [weight.detach().clone() for weight in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for weight, slow in zip(self.parameters(), self.slow, strict=True):
            slow.lerp_(weight.detach(), 0.5)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["slow"] = self.slow


def orders_that_do_not_matter(host: Host) -> dict[str, Any]:
    """They were said to be untold, though nothing could go wrong."""
    with lines() as said:
        moved_late(host, StatsBeside, [])
        moved_late(host, Backwards, [], host.folder / "backwards.ckpt")
    return {"said": [line for line in said if "order" in line and ("stats" in line or "slow" in line)]}


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [kept_weights, kept_far_away, kept_with_buffers, kept_in_one_shape, kept_where_orders_coincide],
    4: [],
}
ONLY_PIPELINE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [collected_weights, order_untold, orders_that_do_not_matter],
    4: [],
}
