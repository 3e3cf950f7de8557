"""Whether captured layers compute what the module's own code does, found out on one micro-batch.

The model is called as the step calls it, and the layers run one after the other, on copies of all weights. What
both return and the gradients of all weights and inputs are compared. Where the model does not fit three times, it
is not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_partition.capture.structure import flatten
from lightning_madpipe.module import PipelineCall, called_as_written
from lightning_madpipe.steps.code_names import is_librarys
from lightning_madpipe.steps.layer_check import LayerCheck, LayersDifferError, Verdict


class CapturedCheck(LayerCheck):
    """A comparison of all captured layers at once with the model's own code, as the step calls it."""

    def __init__(self, module: Any, call: PipelineCall, arguments: Sequence[Tensor], **settings: Any) -> None:
        super().__init__(module, call, arguments, **settings)
        self._target = call.target(module)
        assert call.captured is not None
        self._call = call.captured.now
        self._mode = self._call.root.training
        self._with_gradients = self._mode and torch.is_grad_enabled()

        def forward(_: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            return _tensors_of(self._call.run(inputs))

        self._forward = forward

    def _why_not(self) -> None:
        """Compare always: the code that is run is the model's."""

    def _found(self) -> Verdict:
        with called_as_written(self._target):
            return super()._found()

    def _run_layers(self, first: int, last: int, passed: Any) -> Any:
        inputs = passed if isinstance(passed, tuple) else (passed,)
        outputs = super()._run_layers(first, last, passed)
        return _tensors_of(self._call.returned_for(outputs, inputs))

    def _compare(self, *, whole: bool) -> None:
        if whole:
            super()._compare(whole=True)
        else:
            self._notes.append(f"the layers of {self._name} are trained as they were found, without a comparison")

    def _compare_calls(self, *_: Any, **__: Any) -> None:
        """Compare nothing in between, where both call the same modules."""

    def _all_gradients(self, end: Any, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """What a backward leaves in the weights; inputs get no gradient from layers that are captured."""
        found, num_inputs = super()._all_gradients(end, leaves), len(self._arguments)
        without: list[Tensor | None] = [None] * num_inputs
        return without + found[num_inputs:] if found else found

    def _note_reads(self, of_values: Sequence[str]) -> None:
        asked = [str(read) for read in self._reads if read.is_of_the_trainer]
        if asked:
            self._notes.append(
                f"{self._call.called} of {self._name} reads {', '.join(asked[:3])}, which its layers have as "
                "it was when they were found: they are compared with it again at the start of each epoch"
            )

    def _outside(self) -> dict[str, nn.Module]:
        """All modules of libraries, too: a number that a program has given one stands in the layers as it was."""
        of_libraries = {path: part for path, part in self._module.named_modules() if is_librarys(type(part))}
        return {**of_libraries, **super()._outside()}

    def _anchors(self) -> dict[nn.Module, None]:
        return {}

    def _foreign(self) -> dict[nn.Module, str]:
        return {}

    def _differs(self, what: str, advice: str) -> LayersDifferError:
        return LayersDifferError(
            f"the layers that were found of {self._call.called} of {self._name} do not compute what it does, "
            f"which {what}: write pipeline_layers(), or train what was found with "
            "MadPipeStrategy(check_layers=False)"
        )


def _tensors_of(returned: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in flatten(returned)[0] if isinstance(leaf, Tensor))
