"""What one layer runs: a list of calls, what they need from the layer before, and what they leave for the next."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_partition.capture.recording import Attribute, Device, Ref, SizeOf, Template
from deepspeed_partition.capture.sizes import Condition, Dimension, Returned, ShapeError, dimensions_in, evaluate
from deepspeed_partition.capture.structure import build, flatten, has_same_names, names_of


@dataclass(slots=True, eq=False)
class Step:
    """One call of a layer."""

    target: Any
    """A function, or the name of a module."""
    is_module: bool
    given: Template
    returned: Template
    context: tuple[Any, ...] = ()
    recomputed: bool = False
    dropped: tuple[int, ...] = ()
    """The values that nothing needs after it."""
    conditions: list[Condition] = field(default_factory=list)
    """What is verified before it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A size of a tensor that does not cross a boundary, read from a tensor that does: the sender verifies it."""

    size: Dimension
    value: int
    place: int


@dataclass(slots=True, eq=False)
class Program:
    """The calls of one layer, as data: it holds no module, and any module with the right names can run it."""

    inputs: list[int]
    outputs: list[int]
    steps: list[Step]
    without_gradient: frozenset[int] = frozenset()
    """The floating inputs that have no gradient in the model."""
    sizes_of: dict[int, list[Dimension]] = field(default_factory=dict)
    """The sizes to read of each value."""
    numbers_in: list[Dimension | Returned] = field(default_factory=list)
    numbers_out: list[Dimension | Returned] = field(default_factory=list)
    claims_in: list[Claim] = field(default_factory=list)
    claims_out: list[Claim] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)
    """What is verified at the end."""
    input_names: list[str] = field(default_factory=list)
    is_last: bool = False

    def __deepcopy__(self, _: Any) -> Program:
        return self  # nothing changes it

    def run(self, module: nn.Module, inputs: Any) -> Any:
        """Run the layer's calls with the modules and weights of ``module``."""
        return _Run(self, module, inputs).outputs()


class _Run:
    def __init__(self, program: Program, module: nn.Module, inputs: Any) -> None:
        self.program, self.module = program, module
        self.values: dict[int, Any] = {}
        self.known: dict[Any, Any] = {}
        given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        expected = len(program.inputs) + bool(program.numbers_in)
        if len(given) != expected:
            names = f": {', '.join(program.input_names)}" if program.input_names else ""
            raise ValueError(f"a captured layer was given {len(given)} tensors and takes {expected}{names}")
        if program.numbers_in:
            self.known.update(zip(program.numbers_in, given[-1].tolist(), strict=True))
        self.device = _device_of(module, given)
        for value, tensor in zip(program.inputs, given, strict=False):
            if value in program.without_gradient and tensor.requires_grad:
                tensor = tensor.detach()
            self._set(value, tensor)
        for claim in program.claims_in:
            self.known[claim.size] = self.values[claim.value].shape[claim.place]

    def _set(self, value: int, tensor: Any) -> None:
        self.values[value] = tensor
        for size in self.program.sizes_of.get(value, ()):
            self.known[size] = size.read(tensor)

    def outputs(self) -> Any:
        for step in self.program.steps:
            self._verify(step.conditions)
            self._run(step)
        program = self.program
        self._verify(program.conditions)
        for claim in program.claims_out:
            size = self.values[claim.value].shape[claim.place]
            if size != self.known[claim.size]:
                raise ShapeError(
                    f"a size of {self.known[claim.size]} was the same as another one when the model was captured, "
                    f"which is {size} now: capture it with arguments whose sizes differ as those of this batch do"
                )
        sent = [self.values[value] for value in program.outputs]
        if program.numbers_out:
            numbers = [self.known[number] for number in program.numbers_out]
            sent.append(torch.tensor(numbers, dtype=torch.int64, device=self.device))
        return sent[0] if len(sent) == 1 else tuple(sent)

    def _verify(self, conditions: Sequence[Condition]) -> None:
        for condition in conditions:
            outcome = evaluate(condition.expression, self.known)
            if outcome != condition.outcome:
                raise ShapeError(
                    f"the model's code takes another way for the sizes of this batch ({condition.where}, "
                    f"{outcome} and not {condition.outcome}): capture it with arguments of such sizes, pad the "
                    "batch, or leave it out"
                )

    def _run(self, step: Step) -> None:
        args, kwargs = self._filled(step.given)
        target = self._module(step.target) if step.is_module else step.target
        if step.recomputed and torch.is_grad_enabled():
            target = functools.partial(checkpoint, target, use_reentrant=False)
        if step.context:
            with context_of(step.context, self.device):
                returned = target(*args, **kwargs)
        else:
            returned = target(*args, **kwargs)
        leaves, structure = flatten(returned)
        if not has_same_names(structure, step.returned.structure):
            now, before = (", ".join(map(repr, names_of(each))) for each in (structure, step.returned.structure))
            raise _returns_otherwise(step, f"values by the names {now}", f"by the names {before}")
        for leaf, expected in zip(leaves, step.returned.leaves, strict=True):
            if _kind_of(leaf) != (kind := _kind_of(expected)):
                raise _returns_otherwise(step, _kind_of(leaf), kind)
            if isinstance(expected, Ref):
                self._set(expected.value, leaf)
            elif isinstance(expected, SizeOf) and isinstance(expected.expression, Returned):
                self.known[expected.expression] = leaf
            elif isinstance(expected, bool | int | float | str) and leaf != expected:
                raise _returns_otherwise(step, repr(leaf), repr(expected))
        for value in step.dropped:
            self.values.pop(value, None)

    def _filled(self, template: Template) -> Any:
        return build(template.structure, map(self._leaf, template.leaves))

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return self.values[leaf.value]
        if isinstance(leaf, Attribute):
            owner, _, name = leaf.name.rpartition(".")
            return getattr(self._module(owner), name)
        if isinstance(leaf, SizeOf):
            return evaluate(leaf.expression, self.known)
        if isinstance(leaf, Device):
            return self.device
        return leaf

    def _module(self, name: str) -> nn.Module:
        found: Any = self.module
        for part in name.split(".") if name else ():
            found = found._modules[part]
        return found


def _name_of(step: Step) -> str:
    return step.target if step.is_module else getattr(step.target, "__name__", repr(step.target))


def _kind_of(leaf: Any) -> str:
    """What a leaf is, or what stands for it in a template."""
    if leaf is None:
        return "None"
    return "a tensor" if isinstance(leaf, torch.Tensor | Ref | Attribute) else "no tensor"


def _returns_otherwise(step: Step, now: str, before: str) -> ShapeError:
    return ShapeError(
        f"{_name_of(step)} returned {now}, and {before} when the model was captured: what follows may depend on "
        "it. Let it return the same kind of value for each batch, such as zeros in the place of None"
    )


@contextmanager
def context_of(context: tuple[Any, ...], device: torch.device) -> Iterator[None]:
    """That of a call, on a device that may be another than that of the capture."""
    gradients, casts = context
    with ExitStack() as stack:
        if not gradients:
            stack.enter_context(torch.no_grad())
        for cast in casts:
            kind = cast.kind or (device.type if torch.amp.is_autocast_available(device.type) else "cpu")
            stack.enter_context(torch.autocast(kind, dtype=cast.dtype, enabled=cast.enabled))
        yield


def _device_of(module: nn.Module, given: Sequence[Any]) -> torch.device:
    for tensor in chain(module.parameters(), given):  # all parameters of a large layer would take a while to list
        return tensor.device
    return torch.device("cpu")


def numbers_needed(conditions: Sequence[Condition]) -> Iterator[Dimension | Returned]:
    for condition in conditions:
        yield from dimensions_in(condition.expression)
