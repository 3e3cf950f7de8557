"""A model against its layers: outputs, loss and gradients, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deepspeed_partition.capture import Layers, capture, layers_from
from deepspeed_partition.capture.structure import flatten

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def captured_layers(model: nn.Module, *args: Any, **kwargs: Any) -> Layers:
    return layers_from(capture(model, args, kwargs))


def run_in_order(layers: Layers, *args: Any, **kwargs: Any) -> Any:
    """What the model returns, by its layers, each of which sees nothing but what the one before returned."""
    passed: Any = layers.captured.inputs_of(*args, **kwargs)
    passed = passed if len(passed) > 1 else passed[0]
    for layer in layers:
        passed = layer(passed)
    return layers.output(passed)


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def assert_same(
    model: nn.Module, layers: Layers, batches: Sequence[Arguments], modes: Sequence[bool] = (True, False)
):
    """The layers do what the model does, for each batch, also where they draw random numbers."""
    for training in modes:
        model.train(training)
        for layer in layers:
            layer.train(training)
        for args, kwargs in batches:
            expected = _outcome(model, lambda args=args, kwargs=kwargs: model(*args, **kwargs))
            actual = _outcome(model, lambda args=args, kwargs=kwargs: run_in_order(layers, *args, **kwargs))
            torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-5)
            assert actual[1].keys() == expected[1].keys()
            for name, gradient in expected[1].items():
                torch.testing.assert_close(actual[1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def _outcome(model: nn.Module, run: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model.zero_grad()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    outputs = tensors_in(run())
    loss = sum(tensor.double().pow(2).mean() for tensor in outputs if tensor.requires_grad)
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    with torch.no_grad():
        for name, buffer in list(model.named_buffers()):
            if name in buffers:
                outputs.append(buffer.clone())
                buffer.copy_(buffers[name])
            else:  # a table that its code has made in this run
                owner, _, own = name.rpartition(".")
                setattr(model.get_submodule(owner), own, None)
    return [tensor.detach() for tensor in outputs], gradients
