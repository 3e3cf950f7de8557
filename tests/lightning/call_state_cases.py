"""Steps that call their layers in another state than they begin with: attributes, globals, modes, hooks.

Written like ``lightning_cases.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F

from tests.choice import run_chosen
from tests.lightning import lightning_cases as cases
from tests.lightning.lightning_cases import Host, seeded, trained
from tests.lightning.loop_cases import plain, refused

HEAT = 1.0
SCALE: ContextVar[float] = ContextVar("scale", default=1.0)


@contextlib.contextmanager
def scaled(factor: float) -> Iterator[None]:
    token = SCALE.set(factor)
    try:
        yield
    finally:
        SCALE.reset(token)


class Gate(nn.Module):
    """Reads what a step may set, in each way in which it may."""

    strength = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.settings = 1.0, {"shift": 0.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = x * self.factor * HEAT * Gate.strength * SCALE.get() + self.settings["shift"]
        return turned if self.training else turned.sin()


class Call(nn.Module):
    """A layer whose function the module has."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Gated(cases.Steps):
    """A gate at either end."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.share = 1.0
        self.gates = [Gate(), Gate()]
        self.net = nn.Sequential(
            nn.Linear(cases.NUM_FEATURES, cases.WIDTH), self.gates[0], nn.Tanh(), cases.Block(),
            Call(lambda x: x * self.share), nn.Linear(cases.WIDTH, cases.NUM_CLASSES), self.gates[1],
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    @property
    def seen(self) -> list[Any]:
        return [
            self.share,
            HEAT,
            Gate.strength,
            *([gate.factor, gate.settings, gate.training] for gate in self.gates),
        ]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


class SetsAttributes(Gated):
    """As for a gradient that is reversed ever more, by an alias, and from the third step on by another name."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for gate in self.gates:
            gate.factor = 1.0 + 0.1 * self.global_step
        loss = super().training_step(batch, batch_idx)
        self.gates[0].settings["calls"] = self.global_step  # behind the call, which no layer reads
        return loss


class SetsAndSetsBack(Gated):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for gate in self.gates:
            gate.factor, gate.settings["shift"] = 2.0, 0.5
        out = self(batch[0])
        for gate in self.gates:
            gate.factor, gate.settings["shift"] = 1.0, 0.0
        return out

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self.predict_step(batch, batch_idx), batch[1]))


class SetsLate(Gated):
    """No step sets anything but the last ones, so that no rehearsal shows it."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step > 1:
            self.gates[1].factor = 0.5
        return super().training_step(batch, batch_idx)


class SetsNames(Gated):
    """A global, an attribute of a class, a variable that a layer's function reads, and one of the context."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        global HEAT
        HEAT, Gate.strength = 1.0 + 0.1 * self.global_step, 1.0 - 0.1 * self.global_step
        self.share = 1.0 + 0.2 * self.global_step
        with scaled(2.0):
            return super().training_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with scaled(0.5):
            return self(batch[0])


class HangsHooks(Gated):
    """A hook, and a mode, that hold for one call."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        handles = [gate.register_forward_hook(lambda *values: 1.5 * values[2]) for gate in self.gates]
        self.gates[0].eval()
        try:
            return super().training_step(batch, batch_idx)
        finally:
            self.gates[0].train()
            for handle in handles:
                handle.remove()


class CastsItself(Gated):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self(batch[0]).float()


def in_another_state(host: Host) -> dict[str, Any]:
    """Validation and predictions besides, which have states of their own."""

    def fit(build: Callable[[], Gated], **strategy: Any) -> dict[str, Any]:
        global HEAT
        HEAT = Gate.strength = 1.0
        recorder, module = cases.Recorder(), seeded(build)
        arguments = {"algorithm": [0, 3, 7], **strategy}
        trainer = trained(
            host, module, recorder, max_epochs=1, validation=cases.loader(21, seed=3), strategy=arguments
        )
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        seen = plain(module.seen)
        predicted = trainer.predict(module, cases.loader(21, seed=3))
        return {"rows": recorder.rows, "metrics": metrics, "seen": seen, "predicted": plain(predicted)}

    whole = {"num_micro_batches": 1}  # in bf16 the gradients of micro-batches are rounded one by one
    recomputed = {"config": {"pipeline": {"activation_checkpoint_interval": 1}}}
    return run_chosen({
        "attributes": lambda: fit(SetsAttributes),
        "attributes, recomputed": lambda: fit(SetsAttributes, **recomputed),
        "attributes, once per batch": lambda: fit(SetsAttributes, loss="batch"),
        "set back": lambda: fit(SetsAndSetsBack),
        "late": lambda: fit(SetsLate),
        "names": lambda: fit(SetsNames),
        "hooks and modes": lambda: fit(HangsHooks),
        "autocast": lambda: fit(CastsItself, **whole),
    })  # fmt: skip


class CallsParts(cases.Steps):
    """Calls two modules, one of them in a mode of torch."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.encoder = nn.Sequential(nn.Linear(cases.NUM_FEATURES, cases.WIDTH), nn.Tanh(), cases.Block())
        self.decoder = nn.Sequential(cases.Block(), nn.Linear(cases.WIDTH, cases.NUM_CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inner = self.encoder(batch[0])
        return F.cross_entropy(self.decoder(inner.float()), batch[1])


def refused_states(host: Host) -> dict[str, Any]:
    return {"parts": refused(lambda: trained(host, seeded(CallsParts), strategy={"algorithm": "madpipe"}))}


def told_of_rounding(host: Host) -> dict[str, Any]:
    """What is said of a step under autocast, by its number of micro-batches."""
    found = {}
    for number in (1, 4):
        with patch("lightning_madpipe.steps.call_state.announce") as said:
            strategy = {"algorithm": [0, 3, 7], "num_micro_batches": number}
            trained(host, seeded(CastsItself), max_epochs=1, strategy=strategy)
        found[str(number)] = [call.args[0] for call in said.call_args_list]
    return found


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {2: [in_another_state], 4: []}
ONLY_PIPELINE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {2: [refused_states, told_of_rounding], 4: []}
