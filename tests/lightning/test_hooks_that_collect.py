"""What hooks on layers write is found by their code, and a step that reads it is told so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_madpipe.module import PipelineCall
from lightning_madpipe.steps.hooks_that_collect import collected_by_hooks
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


HOOKS = [
    (lambda module: module.keep, "self.features"),
    (lambda module: module.saver, "self.saver.output"),
    (fills_a_list, "self.outputs"),
    (fills_a_dict, "self.features"),
    (set_on_the_layer, "self.net.1.output"),
    (partial, "self.features"),
    (changes_the_output, None),
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
    with traces.hidden("training_step"):
        assert module.settings == {"scale": 2.0}
        if shown is None:
            eval(read)
        else:
            with pytest.raises(RuntimeError, match=f"training_step reads {shown}, which the hook .* on self.net"):
                eval(read)
    eval(read)
