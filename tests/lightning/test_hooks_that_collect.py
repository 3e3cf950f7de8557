"""What hooks on layers write is found by their code, and a step that reads it is told so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_madpipe.module import PipelineCall
from lightning_madpipe.steps.hook_values import refuse_in_loss, value_of, why_not_logged
from lightning_madpipe.steps.hooks_that_collect import collected_by_hooks, read_around
from lightning_madpipe.steps.loss_mode import LossOfBatches
from lightning_madpipe.steps.losses import Finding, Unknown
from lightning_madpipe.steps.step_side_effects import Leftovers
from lightning_madpipe.steps.what_layers_set import LayerTraces


class Module(nn.Module):
    def __init__(self, hook: Callable[[Any], Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        self.features: Any = {}
        self.outputs: list[Any] = []
        self.settings = {"scale": 2.0}
        self.saver = Saver()
        self.net[1].register_forward_hook(hook(self))

    def keep(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self.features = output * self.settings["scale"]


class Reader(Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) + self.features["block"]


class Saver:
    def __call__(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self.output = output


def fills_a_list(module: Module) -> Any:
    outputs = module.outputs

    def hook(layer: Any, inputs: Any, output: Any) -> None:
        outputs.append(output)

    return hook


def fills_a_dict(module: Module) -> Any:
    def named(name: str) -> Any:
        def hook(layer: Any, inputs: Any, output: Any) -> None:
            module.features[name] = output.detach()

        return hook

    return named("block")


def by_a_local_name(module: Module) -> Any:
    """As torchdistill's manager of hooks does: its dict is that of an object which the module has."""
    held: dict[str, Any] = {"block": {}}
    module.saver.held = held  # type: ignore[attr-defined]

    def hook(layer: Any, inputs: Any, output: Any) -> None:
        own = held["block"]
        own["output"] = output

    return hook


def set_on_the_layer(module: Module) -> Any:
    def hook(layer: Any, inputs: Any, output: Any) -> None:
        layer.output = output

    return hook


def partial(module: Module) -> Any:
    def hook(owner: Any, name: str, layer: Any, inputs: Any, output: Any) -> None:
        owner.features.setdefault(name, []).append(output)

    return functools.partial(hook, module, "block")


def changes_the_output(module: Module) -> Any:
    return lambda layer, inputs, output: output * module.settings["scale"]


def within_a_line_that_sets_something(module: Module) -> Any:
    return [lambda layer, inputs, output: output / 2, module.outputs.append(None)][0]


def fills_by_a_lambda(module: Module) -> Any:
    return lambda layer, inputs, output: module.outputs.append(output)


HOOKS = [
    (lambda module: module.keep, "self.features"),
    (lambda module: module.saver, "self.saver.output"),
    (fills_a_list, "self.outputs"),
    (fills_a_dict, "self.features"),
    (by_a_local_name, "self.saver.held"),
    (set_on_the_layer, "self.net.1.output"),
    (partial, "self.features"),
    (changes_the_output, None),
    (within_a_line_that_sets_something, None),
    (fills_by_a_lambda, "self.outputs"),
]


@pytest.mark.parametrize("hook, shown", HOOKS)
def test_a_step_that_reads_what_a_hook_writes_is_told_which(hook: Any, shown: str | None) -> None:
    """KeyError and AttributeError on the last stage, or in silence a list that is empty there."""
    module = Module(hook)
    call = PipelineCall(layers=list(module.net), attribute="forward")
    found = list(collected_by_hooks(module, call))
    assert {each.shown for each in found} == ({shown} - {None})
    traces = LayerTraces(module, call, RuntimeError)
    traces.add_of_hooks(found)
    read = f"module{shown.removeprefix('self').replace('.net.1', '.net[1]')}" if shown else "module.features"
    module.net(torch.zeros(1, 2))
    eval(read)  # before and after a step it can be read
    with traces.hidden("training_step", is_behind=True):
        assert module.settings == {"scale": 2.0}
        value = eval(read)
        if shown is not None:
            with pytest.raises(RuntimeError, match=f"training_step reads {shown}, which the hook .* on self.net"):
                float(value)
    eval(read)


@pytest.mark.parametrize("is_here", [True, False])
def test_a_step_may_log_what_a_hook_writes_and_no_more(is_here: bool) -> None:
    """To log it was refused, also on the last stage, where it was there and had been logged before."""
    module = Module(fills_a_dict)
    call = PipelineCall(layers=list(module.net), attribute="forward")
    traces = LayerTraces(module, call, RuntimeError, is_in_last_stage=lambda layer: is_here and layer == 1)
    traces.add_of_hooks(collected_by_hooks(module, call))
    module.net(torch.zeros(3, 2))
    feature = module.features["block"]
    with traces.hidden("training_step", is_behind=True):
        logged = 2 * module.features["block"].square().mean() + torch.ones(())
        why = why_not_logged(logged, "training_step", "norm")
        with pytest.raises(RuntimeError, match=r"reads self\.features"):
            refuse_in_loss({"loss": torch.zeros(()) + module.features["block"].sum()})
        if is_here:
            assert why is None and torch.equal(value_of(logged), 2 * feature.square().mean() + 1)
            assert len(module.features) == 1 and float(logged) == float(value_of(logged))
        else:
            assert why is not None and why.startswith("training_step logs 'norm', which is made of self.features")
            for needs_it in (len, float, bool, list):
                with pytest.raises(RuntimeError, match=r"reads self\.features"):
                    needs_it(module.features)
            with pytest.raises(RuntimeError, match=r"reads self\.features"):
                module.features.clear()
    with traces.hidden("validation_step"):  # on a whole batch, whose last micro-batch the hook has seen
        assert why_not_logged(module.features["block"].mean(), "validation_step", "norm") is not None


def test_what_a_capture_has_left_without_data_is_left_out_of_comparisons() -> None:
    """The trial of a loss raised DataDependentOutputException, and its first batch was trained as a plain mean."""
    module = Module(fills_a_dict)
    with FakeTensorMode():
        module.features["block"] = torch.zeros(2)
    before = Leftovers(module, frozenset(vars(nn.Module())), undoable=True)
    module.outputs.append(1.0)
    before.undo()
    assert module.outputs == []


@pytest.mark.parametrize("is_last", [True, False])
def test_a_trial_that_failed_is_made_again_where_the_step_does_not_fail(is_last: bool) -> None:
    """The step's operations were taken for tried, so that nothing gave the batch up."""
    calls: list[str] = []
    steps = SimpleNamespace(forget_trials=lambda: calls.append("forgotten"))
    losses: Any = SimpleNamespace(_fitting=None, steps=steps, refusal=RuntimeError)
    failed = Finding(unknown=Unknown.MEETS_AGAIN, why_unknown="it raises")
    if is_last:
        with pytest.raises(RuntimeError, match="it raises"):
            LossOfBatches._go_on_without(losses, (), failed, is_last)
    else:
        LossOfBatches._go_on_without(losses, (), failed, is_last)
    assert calls == ([] if is_last else ["forgotten"])


def test_code_around_layers_that_reads_what_a_hook_in_them_writes_is_told() -> None:
    model = nn.Module()
    model.inner = Reader(fills_a_dict)
    elements = list(model.inner.net)
    found = read_around(model, elements)
    assert found is not None and found[0].shown == "self.inner.features" and found[1] == "Reader"
    assert read_around(model, [model.inner]) is None
