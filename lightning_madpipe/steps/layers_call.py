"""What stands in a step for its call of the layers: it takes their inputs, or answers with their outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_madpipe.finding.captured_call import CapturedCall, OtherCallError
from lightning_madpipe.finding.captured_calls import CapturedCalls
from lightning_madpipe.finding.step_call import replaced
from lightning_madpipe.steps.batch_runs import as_tuple
from lightning_madpipe.steps.tensor_comparison import has_gradient


class LayersCall:
    """The call of the layers that a step makes.

    Args:
        module: The LightningModule.
        attribute: The attribute whose call runs all layers, see ``PipelineCall``.
        error: The host's exception for a step that cannot run on a pipeline.
        captured: The call that the layers were found in; None: the module names them.
    """

    def __init__(
        self, module: Any, attribute: str, error: type[Exception], captured: CapturedCall | None = None
    ) -> None:
        self._module = module
        self._attribute = attribute
        self._error = error
        self._found = captured
        self.running: str | None = None
        """The name of the step that runs."""
        self._data: Any = None
        """What it is given."""

    @contextmanager
    def within(self, step: str, data: Any) -> Iterator[None]:
        """The step of that name runs on ``data``."""
        self.running, self._data = step, data
        try:
            yield
        finally:
            self.running = self._data = None

    @property
    def called(self) -> str:
        """How a step writes it, such as ``self.forward()``."""
        return f"self.{self._attribute}()" if self._captured is None else self._captured.called

    @property
    def is_of_several(self) -> bool:
        """Whether the layers are those of several modules that a step calls."""
        return isinstance(self._captured, CapturedCalls)

    @property
    def _captured(self) -> CapturedCall | None:
        """The call that the layers run now."""
        return None if self._found is None else self._found.now

    def inputs(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the first layer is given, where a step calls the layers so.

        Raises:
            Exception: the layers do not take it, or do not hold for it.
        """
        if self._captured is not None:
            try:
                return self._captured.inputs(tuple(arguments), keywords)
            except OtherCallError as error:
                raise self._error(f"{self.running} calls {self.called} {error}") from None
        if keywords:
            raise self._error(
                f"{self.running} calls {self.called} with the keyword arguments "
                f"{', '.join(keywords)}: only positional tensors can be sent to a pipeline"
            )
        return tuple(arguments)

    def inputs_for_data(self) -> tuple[Any, ...]:
        """What the first layer is given for the data of a step that calls several modules."""
        return self.inputs((self._data,), {})

    def answer(self, outputs: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What a step's call of the layers returns."""
        inputs = arguments if self._captured is None else self.inputs(arguments, keywords)
        outputs = self._cut_off(outputs, inputs)
        return outputs if self._captured is None else self._captured.returned(outputs, arguments, keywords)

    def answers(self, outputs: Any) -> Callable[..., Any]:
        """What stands for each of several modules that a step calls."""
        assert isinstance(self._captured, CapturedCalls)
        answer = self._captured.answers(self._cut_off(outputs, self.inputs_for_data()), self._data)

        def call(path: str, *arguments: Any, **keywords: Any) -> Any:
            try:
                return answer(path, arguments, keywords)
            except OtherCallError as error:
                called = f"self.{path}()" if path else "self()"
                raise self._error(f"{self.running} calls {called} {error}") from None

        return call

    def stand_ins(self, call: Callable[..., Any]) -> list[tuple[Any, str, Any]]:
        """What is replaced while a step runs, so that ``call`` runs in the place of the layers.

        Where they are of several modules, ``call()`` gives what stands for them, see :meth:`answers`.

        Returns:
            Owner, name of its attribute, value.
        """
        if isinstance(self._captured, CapturedCalls):
            return self._stand_ins_of_several(self._captured, call)
        if self._captured is not None:
            return [(self._captured.model, "forward", call)]
        if self._attribute == "forward":
            return [(self._module, "forward", call)]
        sequential = getattr(self._module, self._attribute)
        return [(self._module, self._attribute, _SequentialStandIn(sequential, call, self.called, self._error))]

    def _stand_ins_of_several(
        self, captured: CapturedCalls, call: Callable[..., Any]
    ) -> list[tuple[Any, str, Any]]:
        answer: Callable[..., Any] | None = None

        def stand_in(path: str, *arguments: Any, **keywords: Any) -> Any:
            nonlocal answer
            answer = answer or call()
            return answer(path, *arguments, **keywords)

        modules = captured.modules.items()
        return [(module, "forward", functools.partial(stand_in, path)) for path, module in modules]

    def _cut_off(self, outputs: Any, arguments: Sequence[Any]) -> Any:
        """``outputs``, whose gradients by ``arguments`` a step may not ask for: it would find none."""
        asked = [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]
        if not asked or not torch.is_grad_enabled():
            return outputs

        def refuse() -> None:
            if self.running is not None:
                raise self._error(
                    f"{self.running} asks for gradients by what it passes to {self.called}, such as for a "
                    "gradient penalty, and in a pipeline these go back through the stages only when the step has "
                    "ended: let the layers compute what needs them, or train with a strategy that has the whole "
                    "model on each device, such as 'ddp'"
                )

        cut = [
            _CutOff.apply(refuse, tensor, *asked) if has_gradient(tensor) else tensor
            for tensor in as_tuple(outputs)
        ]
        return tuple(cut) if isinstance(outputs, tuple) else cut[0]


class _CutOff(torch.autograd.Function):
    """Hands on an output of the layers, and calls ``refuse`` where a gradient is to go back to their inputs."""

    @staticmethod
    def forward(ctx: Any, refuse: Callable[[], None], output: Tensor, *inputs: Tensor) -> Tensor:
        ctx.refuse, ctx.num_inputs = refuse, len(inputs)
        return output.clone()  # and no view, which the step could not change in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.refuse()
        return None, gradient, *[None] * ctx.num_inputs


class _SequentialStandIn:
    """What ``self.net`` is while a step runs: it can be called as a whole, and nothing else."""

    def __init__(
        self, sequential: nn.Module, call: Callable[..., Any], called: str, error: type[Exception]
    ) -> None:
        self._sequential, self._call = sequential, call
        self._refusal = error(
            f"the step, or forward(), uses parts of {called.removesuffix('()')}, whose layers run on other ranks "
            "and leave there what they set on themselves: call it as a whole, let it return what is needed, or "
            "name the layers in pipeline_layers(). Set modes (eval()), buffers and weights in a hook, such as "
            "on_train_batch_start. To run layers one by one, use a strategy with the whole model on each device, "
            "such as 'ddp'"
        )

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with replaced(self._sequential, "forward", self._call):
            return self._sequential(*arguments, **keywords)  # with its hooks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal

    def __iter__(self) -> Iterator[Any]:
        raise self._refusal

    def __getitem__(self, index: Any) -> Any:
        raise self._refusal
