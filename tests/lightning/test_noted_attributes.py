"""What a step sets on layers is found by comparing, without touching torch's classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from deepspeed_partition.engine.pipeline.drawn_data import Originals
from lightning_madpipe.compat.elsewhere import HiddenTensors
from lightning_madpipe.steps.call_state import LayerAttributes
from lightning_madpipe.steps.forward_reads import noted_reads
from lightning_madpipe.steps.runner import BatchRunner
from lightning_madpipe.steps.serialization import pickled
from lightning_madpipe.steps.step_side_effects import Leftovers


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.name, self.inner = 1.0, "layer", nn.Linear(2, 2)

    @cached_property
    def width(self) -> int:
        return self.inner.in_features


def replace_key(layer: Layer) -> None:
    """The values stay the same, one after the other."""
    del layer.name
    layer.title = "layer"


STEPS: dict[str, tuple[Callable[[Layer], Any], dict[str, str]]] = {
    "nothing": (lambda layer: None, {}),
    "set": (lambda layer: setattr(layer, "factor", 2.0), {"layer.factor": "bind"}),
    "set to an equal number": (lambda layer: setattr(layer, "factor", float("1.0")), {}),
    "set to an equal one of another type": (lambda layer: setattr(layer, "factor", 1), {"layer.factor": "bind"}),
    "new": (lambda layer: setattr(layer, "own", 1), {"layer.own": "bind"}),
    "deleted": (lambda layer: delattr(layer, "name"), {"layer.name": "delete"}),
    "another key": (replace_key, {"layer.name": "delete", "layer.title": "bind"}),
    "past setattr": (lambda layer: vars(layer).update(factor=3.0), {"layer.factor": "bind"}),
    "mode of an inner one": (lambda layer: layer.inner.eval(), {"layer.inner.training": "bind"}),
    "computed once": (lambda layer: layer.width, {}),
    "a parameter": (lambda layer: setattr(layer, "weight", nn.Parameter(layer.inner.weight)), {}),
    "a parameter in its place": (
        lambda layer: setattr(layer, "factor", nn.Parameter(layer.inner.weight)), {"layer.factor": "delete"},
    ),
}  # fmt: skip


def test_what_layers_set_themselves_stays_where_what_the_step_set_is_undone() -> None:
    """A counter of a layer that ran within the step was put back after each micro-batch, without a word."""
    layer = Layer()
    with LayerAttributes({layer: "layer"}).noted() as noted:
        layer.factor, layer.step = 2.0, 1
        noted.freeze()
        layer.name, layer.num_runs = "has run", 1
        layer.register_forward_hook(print)
        noted.undo()
    assert (layer.factor, layer.name, layer.num_runs) == (1.0, "has run", 1)
    assert not hasattr(layer, "step") and len(layer._forward_hooks) == 1


@pytest.mark.parametrize("step", STEPS)
def test_what_a_step_sets_is_found_and_undone(step: str) -> None:
    """Red where a comparison takes equal for same, leaves out the names, or puts a number beside a parameter."""
    layer = Layer()
    before = dict(vars(layer))
    act, expected = STEPS[step]
    with LayerAttributes(
        {part: f"layer.{path}".rstrip(".") for path, part in layer.named_modules()}
    ).noted() as noted:
        act(layer)
        found = {".".join((change.place.owner, change.place.name)): change.kind for change in noted.changes()}
        assert found == expected
        noted.undo()
    kept = {**before, "width": 2} if step == "computed once" else before
    if step == "a parameter in its place":
        assert isinstance(layer.factor, nn.Parameter)
    else:
        assert vars(layer).keys() == kept.keys() and all(vars(layer)[name] == kept[name] for name in kept)


def test_a_metric_in_a_layer_is_the_same_after_it_has_counted() -> None:
    """Its hash is another one then: a bare KeyError."""
    layer = Layer()
    layer.metric = MeanMetric()
    with LayerAttributes({part: path for path, part in layer.named_modules()}).noted() as noted:
        before, kept = hash(layer.metric), []
        while hash(layer.metric) == before:  # it is of where its tensors are, which may come to the same place
            layer.metric(1.0)
            kept.append(layer.metric.weight)
        assert {change.place.owner for change in noted.changes()} == {"metric"}
        noted.undo()
    assert layer.metric.weight == 0


def test_a_walk_over_modules_reads_no_metric() -> None:
    """A metric's hash reads its states: each epoch said that ``forward()`` reads ``self.train_acc.tp``."""
    module = nn.Module()
    module.layer, module.metric = Layer(), MeanMetric()
    owners = {"": module, "metric": module.metric}
    with noted_reads(owners, ()) as reads:
        assert module.metric in set(module.modules())
    assert not {str(read) for read in reads if read.owner == "metric" and read.name in module.metric._defaults}
    with noted_reads(owners, ()) as reads:
        assert module.metric.mean_value == 0
    assert "self.metric.mean_value" in {str(read) for read in reads}


def test_what_stands_for_forward_is_no_change_of_the_step() -> None:
    """Red where it is: each step that calls several modules was told that their ``forward`` cannot be sent."""
    layer = Layer()
    layers = LayerAttributes({layer: "layer"})
    for forward, is_change in ((partial(pickled, 1), False), (pickled, False), (partial(len, "1"), True)):
        with layers.noted() as noted:
            vars(layer)["forward"] = forward
            assert bool(noted.changes()) is is_change
            noted.undo()
        assert (vars(layer).pop("forward", None) is forward) is not is_change
    vars(layer)["forward"] = partial(pickled, 1)
    with layers.noted() as noted:
        del vars(layer)["forward"]
        assert not noted.changes()


def test_torchs_classes_stay_as_they_are_while_a_step_is_noted() -> None:
    """Each step replaced ``nn.Module.__setattr__``, and back: Python forgot what it knew of 800 classes.

    Red where anything in ``nn.Module`` is another object while a step runs.
    """
    before = dict(vars(nn.Module))
    with LayerAttributes({nn.Linear(1, 1): "layer"}).noted():
        assert dict(vars(nn.Module)) == before


def test_layers_are_looked_at_anew_when_an_epoch_begins() -> None:
    """A hook between two epochs may have given a layer another container, whose changes would go unseen."""
    runner: Any = object.__new__(BatchRunner)
    runner._window, looks = [], list[int]()
    runner._reading, runner._originals = SimpleNamespace(begins=False), Originals()
    runner.steps = SimpleNamespace(call_states=SimpleNamespace(look_again=lambda: looks.append(1)))
    runner.begin_training_epoch()
    runner.begin_epoch()
    assert len(looks) == 2 and runner._reading.begins


@pytest.mark.parametrize("comes", [True, False])
def test_buffers_of_layers_that_move_are_not_taken_for_what_a_step_does(comes: bool) -> None:
    # A batch that was given up after layers had moved lost the buffers that came with them, and the module's state
    # after fit lacked them on one rank.
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(2))
    module.register_buffer("own", torch.ones(2))
    shown = module._buffers
    hidden = HiddenTensors(shown, {"scale": "another rank has it"})
    module._buffers = hidden if comes else shown
    before = Leftovers(module, vars(nn.Module()), undoable=False, may_be_undone=True)
    module._buffers = shown if comes else hidden
    module.own = torch.zeros(2)
    assert [(change.place.name, change.kind) for change in before.changes()] == [("own", "bind")]
    before.undo()
    assert list(shown) == ["scale", "own"] and module.own.tolist() == [1.0, 1.0]
