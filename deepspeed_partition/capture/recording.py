"""What is written down of a model's calls: a tree of them, and the values between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed_partition.capture.left_behind import Left
from deepspeed_partition.capture.sizes import Condition
from deepspeed_partition.capture.structure import Structure

# What a call is given and returns


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor that was an input, or that a call returned."""

    value: int


@dataclass(frozen=True, slots=True)
class Attribute:
    """A parameter or buffer, by its name in the model."""

    name: str


@dataclass(frozen=True, slots=True)
class SizeOf:
    """A number that was made from sizes."""

    expression: Any


@dataclass(frozen=True, slots=True)
class Device:
    """The device of the model, whichever that is when a layer runs."""


@dataclass(frozen=True, slots=True)
class Cast:
    """A region of autocast around a call, where it is another than around the model."""

    kind: str | None
    """The type of device; None: that of the device on which the layer runs."""
    enabled: bool
    dtype: torch.dtype | None
    """None: the one around the model."""


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A nested value with places for tensors and sizes; all other leaves are constants."""

    structure: Structure
    leaves: tuple[Any, ...]

    def refs(self) -> list[int]:
        return [leaf.value for leaf in self.leaves if isinstance(leaf, Ref)]


@dataclass(slots=True)
class Value:
    """A tensor of the run: what is known of it without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    requires_grad: bool
    storage: int
    time: int
    """The number of the call that made it; -1 for an input."""
    scopes: tuple[int, ...]
    """The modules within which it was made, by the numbers of their calls."""
    is_dense: bool = True


@dataclass(slots=True)
class Effects:
    """What a call did besides returning something."""

    random: bool = False
    mutated: set[int] = field(default_factory=set)
    """Storages that were there before the call."""
    verifies: bool = False
    work: float = 0.0
    """Arithmetic operations, with bytes that move counted as operations."""
    kept: dict[int, int] = field(default_factory=dict)
    """The bytes of each storage that autograd keeps for the backward, parameters and buffers left out."""

    def add(self, other: Effects) -> None:
        self.random |= other.random
        self.mutated |= other.mutated
        self.work += other.work
        self.kept |= other.kept


@dataclass(slots=True, eq=False)
class Call:
    """A torch function, or a module with the calls within it."""

    time: int
    scopes: tuple[int, ...]
    target: Any
    """The function, or the name of the module."""
    given: Template
    returned: Template | None = None
    is_module: bool = False
    module_type: str = ""
    calls: list[Call] = field(default_factory=list)
    effects: Effects = field(default_factory=Effects)
    context: tuple[Any, ...] = ()
    """Whether gradients are on, and regions of autocast, where that differs from how the model was called."""
    where: str = ""
    """The line of the model's source."""
    objects: list[Any] = field(default_factory=list)
    """What a module was given besides tensors and plain values."""
    why_whole: str = ""
    """Why it cannot be opened; empty where it can."""
    why_open: str = ""
    """Why it cannot be run as one; empty where it can."""
    recomputed: bool = False
    """Whether it was called through torch's ``checkpoint``."""
    in_checkpoint: bool = False
    """Whether it is a function that code calls which is no module and that torch's ``checkpoint`` runs."""
    conditions: list[Condition] = field(default_factory=list)
    """Asked by the module's own code, between its calls."""
    end: int = 0
    hangs_hook: bool = False
    """Whether it hangs a hook on the gradient of the tensor that it is given first."""
    seeds: str | None = None
    """The function by which the module's own code sets the state of torch's generators, with the line."""
    drawn: str | None = None
    """The generator of Python's or NumPy's that the module's own code draws from, with the line."""


@dataclass(frozen=True, slots=True)
class AttributeSet:
    """An attribute that a module's code sets to a tensor of the batch, or to another number than before."""

    scope: Call
    """The module whose code does."""
    value: Any
    line: str


@dataclass(slots=True)
class InPlace:
    """A tensor of the program that code changes in place."""

    memories: set[int]
    """Numbers of the tensor's storages: that of the program, and that of the tensor without data."""
    scopes: list[Call] = field(default_factory=list)
    """The modules whose code does, once for each change."""
    calls: list[Call] = field(default_factory=list)


@dataclass(slots=True)
class Recording:
    """A model's calls for one set of arguments."""

    root: Call
    values: list[Value]
    inputs: list[int]
    """The values of the tensors among the arguments."""
    attribute_of_storage: dict[int, str]
    attributes: dict[str, Any]
    """Parameters and buffers, by their first names."""
    modules: dict[str, nn.Module]
    device: torch.device
    dtypes: dict[str, torch.dtype]
    """The types of parameters and buffers, by all of their names."""
    first_names: dict[str, str]
    """What a parameter or buffer is called here, by all of its names."""
    sets: dict[tuple[str, str], AttributeSet] = field(default_factory=dict)
    """What modules' code sets, by the name of the module that gets it and of the attribute."""
    kept: dict[str, str] = field(default_factory=dict)
    """What the model's own code sets and its next run reads, as ``self.state``, each with its line."""
    left: list[Left] = field(default_factory=list)
    """What the run has left of the batch in containers and variables."""
    begun_with: dict[int, str] = field(default_factory=dict)
    """The values that the run before has left, and what each is called."""
    filled_by: dict[str, Call] = field(default_factory=dict)
    """The modules whose code fills what the run before has filled, by what that is called."""
    in_place: dict[str, InPlace] = field(default_factory=dict)
    """What code changes of tensors that are neither weights nor buffers, by what these are called."""
    unfilled: dict[str, Call] = field(default_factory=dict)
    """What code fills, or changes, and does not read in its next run, with the module whose code does."""
    left_numbers: list[tuple[Call, str, str]] = field(default_factory=list)
    """Where modules that ran alone have set numbers and texts: the call, the owner's name, the attribute's."""


def is_within(call: Call, scope: Call) -> bool:
    """Whether a call was made within another one, or is it."""
    return call is scope or scope.time in call.scopes
