"""A captured model: its calls for arguments like those of one run, and how that run is made.

:func:`capture` is where a model comes in; ``model_layers.py`` makes layers of what it returns, and captures the
model again for another state of its modules.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from deepspeed_partition.capture.decisions import Undecided
from deepspeed_partition.capture.draws import keep_draws_that_matter
from deepspeed_partition.capture.graph import Graph, graph_of, notes_on_recomputation
from deepspeed_partition.capture.kept_state import keep_state_that_matters
from deepspeed_partition.capture.program import ShapeError
from deepspeed_partition.capture.recorder import CaptureError, record
from deepspeed_partition.capture.recording import Recording, Ref, SizeOf
from deepspeed_partition.capture.sizes import Dimension, dimensions_in, evaluate
from deepspeed_partition.capture.source_lines import line_of
from deepspeed_partition.capture.structure import build, flatten, names_of
from deepspeed_partition.capture.weights_without_data import State


@dataclass(slots=True, eq=False)
class Captured:
    """A model's calls, for arguments like those it was captured with."""

    model: nn.Module
    graph: Graph
    input_names: list[str]
    """The tensors among the arguments, in order."""
    output_names: list[str]
    """The tensors among what the model returns, in order."""
    arguments: tuple[Any, Any]
    """The arguments, their tensors without data."""
    training: bool
    autocast: tuple[Any, ...]
    """Autocast on the model's device, its type, and that of the device."""
    notes: list[str]
    """What a user should be told once."""
    call: Callable[..., Any] | None = None
    """What was run in the place of the model."""
    changed: Callable[[Graph, bool], None] = lambda graph, training: None
    """Changes the graph of another state as this one's was changed before layers were made of it."""
    reach: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Gives a context in which the model has all of its weights, to be captured in another state."""

    @property
    def first_names(self) -> dict[str, str]:
        """One name for each parameter and buffer, by all of its names."""
        return self.graph.recording.first_names

    def rebuilt(self, tensors: Any) -> Any:
        """What the model itself returns, such as a Hugging Face output, made of the last layer's tensors."""
        given = iter(tensors if isinstance(tensors, tuple | list) else (tensors,))
        known: dict[int, Any] = {}
        leaves = []
        for leaf in self.graph.returned.leaves:
            if isinstance(leaf, Ref):
                if leaf.value not in known:
                    known[leaf.value] = next(given)
                leaf = known[leaf.value]
            elif isinstance(leaf, SizeOf):
                leaf = self._number(leaf.expression, known)
            leaves.append(leaf)
        return build(self.graph.returned.structure, leaves)

    @staticmethod
    def _number(expression: Any, known: Mapping[int, Any]) -> Any:
        """A number that the model returns, of the sizes of the tensors that it returns before it."""
        sizes = {}
        for size in dimensions_in(expression):
            if not isinstance(size, Dimension) or size.value not in known:
                raise ShapeError("the model returns a number made of sizes of tensors that it does not return")
            sizes[size] = size.read(known[size.value])
        return evaluate(expression, sizes)

    def inputs_of(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """The tensors among arguments, as the first layer takes them."""
        return tuple(leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor))


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    call: Callable[..., Any] | None = None,
) -> Captured:
    """Run a model's ``forward`` once without data, and return its calls.

    Args:
        call: What is run in the place of the model: a function that calls it, or modules of it, and takes the
            arguments. A step of a training loop is one.

    Raises:
        CaptureError: it cannot be captured; the message names the line of the model's source.
    """
    args, kwargs, notes = tuple(args), dict(kwargs or {}), list[str]()
    if call is None:
        kwargs, notes = without_a_cache(model, args, kwargs)
    graph = recorded_graph(model, args, kwargs, call)
    notes = [*notes, *notes_on_recomputation(graph)]
    shells = tuple(without_data(part) for part in (args, kwargs))
    return Captured(
        model, graph, input_names_of(call or model, args, kwargs), _output_names(graph), (shells[0], shells[1]),
        model.training, autocast_on(graph.recording.device), notes, call,
    )  # fmt: skip


def without_a_cache(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Keyword arguments with which a Hugging Face model makes no cache for generation, and what to say of that."""
    if not _keeps_a_cache(model, args, kwargs):
        return kwargs, []
    said = f"{type(model).__name__} runs with use_cache=False: a pipeline has no cache of keys and values"
    return {**kwargs, "use_cache": False}, [said]


def _keeps_a_cache(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a Hugging Face model would make a cache for generation, which training does not read."""
    if not getattr(getattr(model, "config", None), "use_cache", False) or "use_cache" in kwargs:
        return False
    parameters = inspect.signature(model.forward).parameters
    return "use_cache" in parameters or (
        any(each.kind is each.VAR_KEYWORD for each in parameters.values()) and "past_key_values" in parameters
    )


def without_data(value: Any) -> Any:
    """``value`` with tensors on the meta device in the place of its own."""
    leaves, structure = flatten(value)
    return build(
        structure,
        [
            torch.empty_like(leaf, device="meta").requires_grad_(leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ],
    )


def autocast_on(device: torch.device) -> tuple[Any, ...]:
    """``(True, dtype, type of device)`` where autocast is on for a device; empty where it is not."""
    if not torch.is_autocast_enabled(device.type):
        return ()
    return True, torch.get_autocast_dtype(device.type), device.type


@contextmanager
def same_autocast(device: torch.device, autocast: tuple[Any, ...]) -> Iterator[None]:
    """The autocast that :func:`autocast_on` has told of, for another device and for its own.

    Code may open regions of its own for either: of the device that it finds, or of one that it names.
    """
    enabled, dtype, kind = autocast or (False, None, device.type)
    with ExitStack() as stack:
        for each in dict.fromkeys((device.type, kind)):
            if enabled or torch.is_autocast_enabled(each):
                stack.enter_context(_autocast(each, dtype, enabled))
        yield


@contextmanager
def _autocast(kind: str, dtype: torch.dtype | None, enabled: bool) -> Iterator[None]:
    """``torch.autocast``, which turns itself off for a kind of device that this host has not."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    with torch.autocast(kind, dtype=dtype, enabled=enabled):
        torch.set_autocast_enabled(kind, enabled)
        if dtype is not None:
            torch.set_autocast_dtype(kind, dtype)
        try:
            yield
        finally:
            torch.set_autocast_enabled(kind, before[0])
            torch.set_autocast_dtype(kind, before[1])


def recorded_graph(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    call: Callable[..., Any] | None,
    opened: frozenset[Any] | None = None,
    state: State | None = None,
) -> Graph:
    """The graph of a model's calls, for these arguments.

    Args:
        call: What is run in the place of the model.
        opened: The modules to open, from another graph of the same model; None to choose.
        state: The types and the device that the weights have; None: those that they have now.

    Raises:
        CaptureError: the model cannot be run without data; the message names the line.
    """
    try:
        return graph_of(_recorded(model, args, kwargs, state, call), opened)
    except CaptureError:
        raise
    except Exception as error:
        line = line_of(error)
        raise CaptureError(
            f"{type(model).__name__} cannot be run without data: {_reason(error)}" + (f" ({line})" if line else "")
        ) from error


def _recorded(
    model: nn.Module, args: Any, kwargs: Any, state: State | None, call: Callable[..., Any] | None
) -> Recording:
    """Record a model, with one outcome supposed of each question for which the other one raises an error."""
    decisions: list[bool] = []
    while True:
        try:
            recording = record(model, args, kwargs, state, call, decisions)
            again = functools.partial(record, model, args, kwargs, state, call, decisions)
            keep_draws_that_matter(recording, again)
            keep_state_that_matters(recording, again)
            return recording
        except Undecided:
            refused = [
                each for each in (True, False) if _refuses(model, args, kwargs, state, call, [*decisions, each])
            ]
            if len(refused) != 1:
                raise
            decisions.append(not refused[0])


def _refuses(*arguments: Any) -> bool:
    """Whether a model's code raises an error of its own if it is given these answers."""
    try:
        record(*arguments)
    except (Undecided, CaptureError, DataDependentOutputException, DynamicOutputShapeException):
        return False
    except Exception:
        return True
    return False


def _reason(error: BaseException) -> str:
    if "_pack_padded_sequence" in str(error):
        return (
            "packed sequences are as long as data say: pack, run and unpack them in the forward() of one module "
            "within the model, which takes and returns tensors, as in `self.encoder(self.embed(words), lengths)`"
        )
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def input_names_of(call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """The names of the tensors among arguments, as the call's parameters name them."""
    leaves, structure = flatten((tuple(args), kwargs))
    names = names_of(structure)
    try:
        bound = list(inspect.signature(getattr(call, "forward", call)).bind_partial(*args).arguments)
    except (TypeError, ValueError):
        bound = []
    found = []
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            continue
        kind, _, rest = name.partition(".")
        if kind == "0":
            place, dot, below = rest.partition(".")
            own = bound[int(place)] if int(place) < len(bound) else f"argument_{place}"
            rest = own + dot + below
        found.append(rest)
    return found


def _output_names(graph: Graph) -> list[str]:
    names = dict(zip(names_of(graph.returned.structure), graph.returned.leaves, strict=True))
    found: dict[int, str] = {}
    for name, leaf in names.items():
        if isinstance(leaf, Ref):
            found.setdefault(leaf.value, name or "output")
    return list(found.values())
