"""Coarser layers, for a model whose own code asks for the data of tensors: it cannot be followed without.

The elements of its largest ``nn.ModuleList`` or ``nn.Sequential`` that runs in order are a layer each. What the
model does before them is one layer, and what it does after them another one. Both run the model's own ``forward``:
the first one stops where it calls the first element, and the last one goes through it again, with what the last
element returned. So the last layer does again what comes before the elements, on the same random numbers, and has
a copy of the weights there, which is tied.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from deepspeed_partition.capture.around_elements import AroundElements
from deepspeed_partition.capture.captured import Captured, input_names_of, without_a_cache
from deepspeed_partition.capture.decisions import Undecided
from deepspeed_partition.capture.element_attributes import ElementAttributes
from deepspeed_partition.capture.graph import Graph
from deepspeed_partition.capture.left_behind import held_by
from deepspeed_partition.capture.model_layers import FoundLayer, Layers, TiedLayer, fill
from deepspeed_partition.capture.outside_layers import refuse_hooks
from deepspeed_partition.capture.plain_tensors import PlainTensors
from deepspeed_partition.capture.program import ShapeError
from deepspeed_partition.capture.recorder import DECIDES, CaptureError, DrawsApartError, patched
from deepspeed_partition.capture.structure import (
    Structure,
    build,
    flatten,
    has_same_names,
    holds_tensors,
    names_of,
)
from deepspeed_partition.capture.weights_without_data import flags_of, put_flags_back
from deepspeed_partition.kept_weights import weights_kept
from deepspeed_partition.tensor_values import put_back

WAY_OUT = (
    "put what depends on the data into a module of its own, which then runs whole, or write the model's layers as "
    "a list"
)
_NEEDS_DATA = (Undecided, DataDependentOutputException, DynamicOutputShapeException)
"""What a model raises that asks for data where there are none."""


class _Tensor:
    """The place of a tensor among leaves."""


_TENSOR = _Tensor()
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where torch keeps the hooks on the gradient of a tensor."""
_OF_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
HALF_CALLED = "which would see the gradients of the code behind its elements alone"
_OF_A_COPY = {"_parameters", "_buffers", "_modules", "training", "forward"}
"""What a copy of a module has for itself; hosts put something in the place of ``forward``."""


class Given(NamedTuple):
    """A tensor that the first element is given, too, by its place among those."""

    place: int


class Passed(NamedTuple):
    """A tensor that the element before returned, by its place among those."""

    place: int


@dataclass(slots=True, eq=False)
class Element:
    """A call of an element: where what it is given comes from, and the structure of what it returns."""

    name: str
    leaves: list[Any]
    structure: Structure
    returned: list[Any]
    """The leaves of what the call returned, with the places of tensors."""
    returned_structure: Structure

    @property
    def num_passed(self) -> int:
        return sum(leaf is _TENSOR for leaf in self.returned)


class _Reached(BaseException):
    """The model's code calls the first element; nothing it can handle."""

    def __init__(self, arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments


class Unknown(torch.Tensor):
    """What an element returned, in a run through the code around them: it may only be passed on."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise CaptureError(
            "the model's code uses the output of an element elsewhere than as the input of the next element"
        )


class _Original:
    """Knows an element; a copy of a layer has no copy of it."""

    def __init__(self, element: nn.Module) -> None:
        self.element = element

    def __deepcopy__(self, _: Any) -> _Original:
        return self


class Gap(nn.Module):
    """The place of an element in the code around them, which may read the element's attributes."""

    def __init__(self, place: int, element: nn.Module) -> None:
        super().__init__()
        self.place, self._original = place, _Original(element)
        self.called: Callable[[int, Any, Any], Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_original":  # while it is built or copied
            raise AttributeError(name)
        return getattr(self._original.element, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.called is not None
        return self.called(self.place, args, kwargs)


@dataclass(slots=True, eq=False)
class Coarse:
    """A model's run through its elements, and the code around them."""

    model: nn.Module
    elements: list[Element]
    num_given: int
    """The tensors that the first element is given."""
    arguments_structure: Structure
    argument_leaves: list[Any]
    """The places of tensors, which are the first layer's input, and all other leaves."""
    input_names: list[str]
    output_names: list[str]
    first_names: dict[str, str]
    notes: list[str]
    output_shapes: list[tuple[int, ...]]
    copied: tuple[str, ...] = ()
    """The modules around the elements that layers have copies of, by name."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Gives a context in which the model's code runs."""
    returned: list[Any] | None = None
    """The places of tensors, and all other leaves, of what the model returns; None: not known before it runs."""
    returned_structure: Structure | None = None
    notes_on_recomputation: Sequence[str] = ()
    """What is lost where code around the elements asks for recomputation."""

    def rebuilt(self, tensors: Any) -> Any:
        """What the model itself returns, made of the last layer's tensors."""
        if self.returned is None or self.returned_structure is None:
            raise ValueError(f"what {type(self.model).__name__} returns is known where its last layer runs")
        given = iter(tensors if isinstance(tensors, tuple | list) else (tensors,))
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.returned]
        return build(self.returned_structure, leaves)

    def for_other_arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Coarse:
        """The elements of this model for a call with other arguments, whose result is not known before it runs."""
        leaves, structure = flatten((tuple(args), kwargs))
        return replace(
            self, arguments_structure=structure, argument_leaves=_without_tensors(leaves), notes=[],
            input_names=input_names_of(self.model, args, kwargs), returned=None, returned_structure=None,
        )  # fmt: skip

    def inputs_of(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor))

    def description(self) -> str:
        """What all processes must have found alike, in words."""
        leaves = [[leaf if _is_plain(leaf) else type(leaf) for leaf in each.leaves] for each in self.elements]
        return repr([(each.name, own, each.num_passed) for each, own in zip(self.elements, leaves, strict=True)])

    def __deepcopy__(self, _: Any) -> Coarse:
        return self

    # What layers run

    def arguments(self, inputs: Sequence[torch.Tensor]) -> Any:
        """What the model is called with, of the tensors among it."""
        given = iter(inputs)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.argument_leaves]
        return build(self.arguments_structure, leaves)

    def before(self, outside: nn.Module, inputs: Any) -> tuple[torch.Tensor, ...]:
        """Run the model's code up to its first element; return what that is given, and what the end needs."""
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        random = _random_state(inputs)
        args, kwargs = self.arguments(inputs)

        def called(place: int, args: Any, kwargs: Any) -> Any:
            if place:
                raise self._left_out(0)
            raise _Reached((args, kwargs))

        self._follow_attributes(outside)
        try:
            with self.context(), _gaps(outside, called):
                outside(*args, **kwargs)
        except _Reached as reached:
            leaves, structure = flatten(reached.arguments)
            self._verify(0, leaves, structure)
            return (*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), *inputs, random)
        raise ShapeError(f"{type(self.model).__name__} did not call {self.elements[0].name} for this batch")

    def element(
        self, place: int, module: nn.Module, tensors: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Run an element; what it is not given is passed on."""
        element, first = self.elements[place], place == 0
        num_passed = 0 if first else self.elements[place - 1].num_passed
        passed, rest = tensors[:num_passed], tensors[num_passed:]
        leaves = []
        for leaf in element.leaves:
            if isinstance(leaf, Given):
                leaf = rest[leaf.place]
            elif isinstance(leaf, Passed):
                leaf = passed[leaf.place]
            leaves.append(leaf)
        args, kwargs = build(element.structure, leaves)
        leaves, structure = flatten(module(*args, **kwargs))
        same = len(leaves) == len(element.returned) and has_same_names(structure, element.returned_structure)
        if not same or not all(map(_is_same, _without_tensors(leaves), element.returned)):
            raise ShapeError(
                f"{element.name} returned other values beside tensors than when the layers were found: {WAY_OUT}"
            )
        return (*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), *rest)

    def after(self, outside: nn.Module, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Run the model's code again, with what the last element returned, and verify how it calls them."""
        last = len(self.elements) - 1
        passed, rest = tensors[: self.elements[last].num_passed], tensors[self.elements[last].num_passed :]
        inputs, random = rest[self.num_given : -1], rest[-1]
        args, kwargs = self.arguments(inputs)
        now = _random_state(inputs)
        given: list[Any] = []
        unknown: list[Any] = []
        run: list[int] = []

        def called(place: int, args: Any, kwargs: Any) -> Any:
            if place != len(run):
                raise self._left_out(len(run))
            run.append(place)
            leaves, structure = flatten((args, kwargs))
            if place == 0:
                given.extend(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            self._verify(place, leaves, structure, given, unknown)
            unknown.clear()
            element, made = self.elements[place], iter(passed)
            leaves = []
            for leaf in element.returned:
                if leaf is _TENSOR:
                    leaf = next(made) if place == last else torch.empty(0).as_subclass(Unknown)
                    unknown.append(leaf)
                leaves.append(leaf)
            if place == last:
                _set_random_state(now, inputs)
            return build(element.returned_structure, leaves)

        self._follow_attributes(outside)
        _set_random_state(random, inputs)
        with self.context(), _gaps(outside, called):
            returned = outside(*args, **kwargs)
        if len(run) < len(self.elements):
            raise self._left_out(len(run))
        leaves, structure = flatten(returned)
        self._verify_returned(leaves, structure)
        tensors = tuple(filter(_is_tensor, leaves))
        return tensors if len(tensors) > 1 else tensors[0]

    def _left_out(self, place: int) -> ShapeError:
        return ShapeError(
            f"{type(self.model).__name__} does not call {self.elements[place].name} in its place for this batch, "
            f"and its layers run it: {WAY_OUT}"
        )

    def _follow_attributes(self, outside: nn.Module) -> None:
        """Let the copies of modules around the elements have the attributes that the model's own have now."""
        for name in self.copied:
            now, own = vars(self.model.get_submodule(name)), vars(outside.get_submodule(name))
            for each in own.keys() - now.keys() - _OF_A_COPY:
                del own[each]
            own.update((each, value) for each, value in now.items() if each not in _OF_A_COPY)

    def _verify_returned(self, leaves: Sequence[Any], structure: Structure) -> None:
        """Refuse a batch for which the model returns other numbers, or other kinds of things, than before."""
        found = _without_tensors(leaves)
        if self.returned is None:
            self.returned, self.returned_structure = found, structure
        elif not has_same_names(structure, self.returned_structure or structure) or not all(
            map(_is_same, found, self.returned)
        ):
            raise ShapeError(
                f"{type(self.model).__name__} returns other values beside tensors for this batch than when its "
                f"layers were found: let it return tensors, or {WAY_OUT}"
            )

    def _verify(
        self, place: int, leaves: Sequence[Any], structure: Structure, given: Sequence[Any] | None = None,
        passed: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        """Refuse a batch for which an element is given something else than in the first run."""
        element = self.elements[place]
        same = len(leaves) == len(element.leaves) and has_same_names(structure, element.structure)
        for leaf, expected in zip(leaves, element.leaves, strict=False):
            if isinstance(expected, Given):
                same &= isinstance(leaf, torch.Tensor) and (given is None or leaf is given[expected.place])
            elif isinstance(expected, Passed):
                same &= leaf is passed[expected.place]
            else:
                same &= _is_same(leaf, expected)
        if not same:
            raise ShapeError(
                f"{type(self.model).__name__} gives {element.name} something else for this batch than when its "
                f"layers were found: {WAY_OUT}"
            )


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, bool | int | float | str | Given | Passed)


def _is_same(leaf: Any, expected: Any) -> bool:
    """Whether a leaf that is no tensor is what it was; objects of other kinds are not compared."""
    if isinstance(expected, bool | int | float | str):
        return type(leaf) is type(expected) and leaf == expected
    return leaf is expected if expected is None or expected is _TENSOR else not _is_tensor(leaf)


@contextmanager
def _gaps(outside: nn.Module, called: Callable[[int, Any, Any], Any]) -> Iterator[None]:
    gaps = [module for module in outside.modules() if isinstance(module, Gap)]
    for gap in gaps:
        gap.called = called
    try:
        yield
    finally:
        for gap in gaps:
            gap.called = None


def _random_state(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    device = inputs[0].device
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device).to(device)


def _set_random_state(state: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
    device = inputs[0].device
    if device.type == "cpu":
        torch.set_rng_state(state.cpu())
    else:
        torch.get_device_module(device).set_rng_state(state.cpu(), device)


# Layers


@dataclass(slots=True, eq=False)
class CoarseRecipe:
    """What all layers need to know: the run that they are parts of, and the other one that they run now."""

    captured: Coarse
    running: Coarse | None = None
    outside: None = None
    """The model's own code runs, and reads what is there."""
    parts: dict[str, nn.Module] = field(default_factory=dict)
    """The model's modules around the elements whose code runs in copies of them."""

    @property
    def now(self) -> Coarse:
        return self.running or self.captured

    def other_call(self, *_: Any) -> Any:
        """Refuse another call of the model's modules than one of the model itself."""
        name, first = type(self.captured.model).__name__, self.captured.elements[0].name
        raise CaptureError(f"they run the code of {name} around {first}, and no other")

    def program(self, number: int, _: nn.Module) -> _Before | _After:
        """What the first layer runs, or the last one: the code around the elements."""
        refuse_hooks(self.parts, _OF_BACKWARD, HALF_CALLED)
        return _After(self) if number else _Before(self)

    def __deepcopy__(self, _: Any) -> CoarseRecipe:
        return self


@dataclass(frozen=True, slots=True)
class _Before:
    recipe: CoarseRecipe

    def run(self, outside: nn.Module, inputs: Any) -> Any:
        return self.recipe.now.before(outside, inputs)


@dataclass(frozen=True, slots=True)
class _After:
    recipe: CoarseRecipe

    def run(self, outside: nn.Module, inputs: Any) -> Any:
        return self.recipe.now.after(outside, inputs)


class ElementLayer(FoundLayer):
    """One element of the run, under its own name."""

    def __init__(self, recipe: CoarseRecipe, place: int, modules: Any) -> None:
        super().__init__()
        self._recipe, self._place = recipe, place
        self.training = recipe.captured.model.training
        fill(self, modules, {}, [self.name])

    @property
    def name(self) -> str:
        """The element's name in the model."""
        return self._recipe.captured.elements[self._place].name

    def forward(self, tensors: Any) -> Any:
        module: Any = self
        for part in self.name.split("."):
            module = module._modules[part]
        return self._recipe.now.element(self._place, module, tensors)


class OutsideLayer(FoundLayer):
    """The code around the elements, where it has no trained weights to tie."""

    def __init__(self, recipe: CoarseRecipe, number: int, shared: nn.Module) -> None:
        super().__init__()
        self._recipe, self._number, self.shared = recipe, number, shared
        self.training = shared.training

    @property
    def cut_off(self) -> list[str]:
        """All of its parameters, of which the first rank and the last one have a copy each."""
        return [name for name, _ in self.named_parameters()]

    def forward(self, inputs: Any) -> Any:
        return self._recipe.program(self._number, self.shared).run(self.shared, inputs)


def undivided(captured: Captured) -> tuple[str, CaptureError] | None:
    """The module that most weights of a captured model are in and that stays whole, and why; None: there is none.

    Its own code decides by data, or draws random numbers, so that it would be a single layer.
    """
    modules = captured.graph.recording.modules
    half = _num_weights(captured.model) / 2
    for call in (node.call for node in captured.graph.nodes):
        if call.is_module and call.why_whole and _num_weights(modules[call.target]) > half:
            kind = CaptureError if call.drawn is None else DrawsApartError
            return call.target, kind(f"{call.target} ({call.module_type}) stays whole: {call.why_whole}")
    return None


def runs_again(captured: Captured) -> str:
    """Say which module with most of the weights is one layer because it runs several times; empty: none is."""
    modules = captured.graph.recording.modules
    half = _num_weights(captured.model) / 2
    calls = [node.call for node in captured.graph.nodes if node.is_module]
    for name, number in Counter(call.target for call in calls).items():
        if number > 1 and modules[name]._modules and _num_weights(modules[name]) > half:
            return (
                f"{name} ({type(modules[name]).__name__}) runs {number} times in a step, so that it is one "
                "layer: where no call needs what another one gives, call it once, with torch.cat((a, b)) for both"
            )
    return ""


def deciding(graph: Graph) -> list[str]:
    """The modules that ask whether something holds for the numbers in their tensors, each with its line."""
    calls = [node.call for node in graph.nodes if node.is_module and node.call.why_whole.startswith(DECIDES)]
    found = {call.why_whole.partition(" at ")[2]: call.target for call in calls}
    return [f"{name} ({line})" for line, name in found.items() if line]  # torch's own has none


def coarse_layers(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], reason: CaptureError,
    wrap: Callable[[TiedLayer], Any] = lambda layer: layer, within: str = "",
) -> Layers:  # fmt: skip
    """The layers of a model that runs elements in order, found by running it on its arguments.

    Args:
        within: The module whose elements are meant, if these make smaller layers of it; else all are.

    Raises:
        CaptureError: the reason, where there are no such elements, or the code around them does more.
    """
    # Its code would draw once before the elements and once behind them, on other ranks.
    if isinstance(reason, DrawsApartError) or any(weight.is_meta for weight in model.parameters()):
        raise reason  # it has no data to be run on
    kwargs, notes = without_a_cache(model, args, kwargs)
    try:
        plain = PlainTensors(model, held_by(model, None, ()))
        coarse = _found(model, plain, tuple(args), kwargs, reason, within)
        if not any(leaf is _TENSOR for leaf in coarse.argument_leaves):
            given = (
                " and ".join(dict.fromkeys(type(leaf).__name__ for leaf in coarse.argument_leaves)) or "nothing"
            )
            raise CaptureError(
                f"{type(model).__name__} is given no tensor, but {given}: give it the tensors themselves, or in "
                "tuples, lists, dicts or data classes, which a pipeline can send from stage to stage"
            )
        coarse.notes += notes
        modules = dict(model.named_modules())
        outside, coarse.copied = _without(model, [element.name for element in coarse.elements])
        recipe = CoarseRecipe(coarse, parts={name: model.get_submodule(name) for name in coarse.copied})
        refuse_hooks(recipe.parts, _OF_BACKWARD, HALF_CALLED)
        elements = [ElementLayer(recipe, place, modules) for place in range(len(coarse.elements))]
        found = [OutsideLayer(recipe, 0, outside), *elements, OutsideLayer(recipe, len(elements) + 1, outside)]
        try:
            _try_out(model, coarse, plain, found, args, kwargs)
        except CaptureError as error:
            raise CaptureError("; ".join([str(error), *coarse.notes_on_recomputation])) from None
        coarse.notes += coarse.notes_on_recomputation
    except CaptureError as error:
        if error is reason:
            if isinstance(reason.__cause__, _NEEDS_DATA):
                raise CaptureError(f"{reason}. {WAY_OUT}") from reason.__cause__
            raise
        raise CaptureError(f"{reason}. Nor can it be cut between its elements: {error}. {WAY_OUT}") from reason
    except _OfModelError as raised:
        own = raised.error
        if str(own) in str(reason):
            raise own from own.__cause__
        raise CaptureError(f"{reason}. Nor does it run without gradients: {own}") from own
    except Exception as error:
        in_words = f"{type(error).__name__}: {error}"
        raise CaptureError(f"{reason}. Nor can it be cut between its elements: {in_words}. {WAY_OUT}") from error
    layers = Layers(found)
    if any(weight.requires_grad for weight in outside.parameters()):
        for place in (0, -1):
            layers[place] = wrap(TiedLayer(recipe, place % len(found), "around_elements", outside))
    layers.captured, layers.recipe = coarse, recipe
    layers.input_names, layers.output_names = coarse.input_names, coarse.output_names
    layers.boundary_bytes, layers.boundary_shapes = [], []
    return layers


class _OfModelError(Exception):
    """What a model's own code has raised, such as code that needs a gradient."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def _of_model() -> Iterator[None]:
    """Tell the errors of the model's own run from others, such as of what puts its values back."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        raise _OfModelError(error) from error


def _without(model: nn.Module, names: Sequence[str]) -> tuple[nn.Module, tuple[str, ...]]:
    """The model with gaps in the places of modules, and the names of the modules that are copies for that.

    All other modules are the model's own objects, and all weights are.
    """
    outside = _copy_of(model)
    copied: dict[str, nn.Module] = {"": outside}
    for place, name in enumerate(names):
        *path, last = name.split(".")
        for depth in range(len(path)):
            above, here = ".".join(path[:depth]), ".".join(path[: depth + 1])
            if here not in copied:
                inner = copied[above]._modules[path[depth]]
                assert inner is not None
                copied[above]._modules[path[depth]] = copied[here] = _copy_of(inner)
        copied[".".join(path)]._modules[last] = Gap(place, model.get_submodule(name))
    return outside, tuple(copied)


def _copy_of(module: nn.Module) -> nn.Module:
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    copied._parameters, copied._buffers = dict(module._parameters), dict(module._buffers)
    vars(copied).pop("forward", None)
    return copied


def _found(
    model: nn.Module, plain: PlainTensors, args: tuple[Any, ...], kwargs: dict[str, Any], reason: CaptureError,
    within: str,
) -> Coarse:  # fmt: skip
    calls, returned, recomputed = _calls_of(model, plain, args, kwargs)
    modules = dict(model.named_modules())
    best: list[Any] = []
    for name, module in modules.items():
        is_within = not within or f"{name}.".startswith(f"{within}.")
        if is_within and isinstance(module, nn.ModuleList | nn.Sequential):
            run = _run_in_order(name, module, calls)
            if len(run) > 1 and _weight(modules, run) > _weight(modules, best):
                best = run
    if not best or (within and not _is_worth_it(modules, best, within)):
        raise reason
    first = [leaf for leaf in best[0][1][0] if isinstance(leaf, torch.Tensor)]
    elements = []
    before: list[Any] = []
    for name, (leaves, structure), (outs, out_structure) in best:
        if any(not _is_tensor(leaf) and holds_tensors(leaf) for leaf in (*leaves, *outs)):
            raise CaptureError(f"{name} is given, or returns, an object that holds tensors (use_cache=False)")
        own = [_origin(leaf, first, before) for leaf in leaves]
        elements.append(Element(name, own, structure, _without_tensors(outs), out_structure))
        before = [leaf for leaf in outs if _is_tensor(leaf)]
    argument_leaves, structure = flatten((args, kwargs))
    out_leaves, out_structure = flatten(returned)
    names = names_of(out_structure)
    recomputation = []
    if any(element.name in recomputed for element in elements):
        recomputation.append(
            f"{type(model).__name__} runs {best[0][0]} and its followers under torch.utils.checkpoint, from code "
            "around them that is left out: their activations are kept, and nothing is recomputed; call checkpoint "
            "within their own forward instead"
        )
    return Coarse(
        model, elements, len(first), structure, _without_tensors(argument_leaves),
        input_names_of(model, args, kwargs),
        [name or "output" for name, leaf in zip(names, out_leaves, strict=True) if _is_tensor(leaf)],
        _first_names(model),
        [f"{type(model).__name__} is cut between {best[0][0]} and its followers alone: {reason}"],
        [tuple(leaf.shape) for leaf in out_leaves if _is_tensor(leaf)],
        returned=_without_tensors(out_leaves), returned_structure=out_structure,
        notes_on_recomputation=recomputation,
    )  # fmt: skip


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _first_names(model: nn.Module) -> dict[str, str]:
    """One name for each parameter and buffer, by all of its names."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _is_worth_it(modules: dict[str, nn.Module], run: Sequence[Any], within: str) -> bool:
    """Whether each layer, of an element or around them, has at most half of what a module has that stays whole."""
    elements = [_num_weights(modules[name]) for name, *_ in run]
    around = _num_weights(modules[""]) - sum(elements)
    return 2 * max(around, *elements) <= _num_weights(modules[within])


def _without_tensors(leaves: Sequence[Any]) -> list[Any]:
    return [_TENSOR if _is_tensor(leaf) else leaf for leaf in leaves]


def _weight(modules: dict[str, nn.Module], run: Sequence[Any]) -> int:
    return sum(_num_weights(modules[name]) for name, *_ in run)


def _num_weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _calls_of(
    model: nn.Module, plain: PlainTensors, args: Any, kwargs: Any
) -> tuple[dict[str, list[Any]], Any, set[str]]:
    """What each module is given and returns, in one run with data; and those that code around them recomputes."""
    names = {id(module): name for name, module in model.named_modules() if module is not model}
    calls: dict[str, list[Any]] = {}
    recomputed: set[str] = set()

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = flatten((args, kwargs))
        if type(module).__call__ is called and _is_under_checkpoint(sys._getframe(1)):
            recomputed.add(names.get(id(module), ""))
        returned = call(module, *args, **kwargs)
        if id(module) in names:
            calls.setdefault(names[id(module)], []).append((names[id(module)], given, flatten(returned)))
        return returned

    with _put_back(model, plain):
        call = nn.Module.__call__
        with patched(nn.Module, "__call__", called), _of_model():
            returned = call(model, *args, **kwargs)
    return calls, returned, recomputed


def _is_under_checkpoint(frame: FrameType | None) -> bool:
    """Whether a function is called by torch's activation checkpointing, in one of its forms."""
    while frame is not None:
        if frame.f_globals is vars(torch.utils.checkpoint):
            return True
        frame = frame.f_back
    return False


@contextmanager
def _put_back(model: nn.Module, plain: PlainTensors) -> Iterator[None]:
    """Put back the random numbers, attributes, buffers and other tensors that a run with data changes.

    So are weights that a module writes which changes a buffer or a flag of its own, as where it notes that they
    are set, and that flag; and hooks on weights.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    values = {id(buffer): value for buffer, value in buffers}
    flags = {id(module): flags_of(module) for module in model.modules()}
    tables = [(module, dict(module._buffers.items())) for module in model.modules()]

    def notes(owner: nn.Module) -> bool:
        # What a library has hung on the model since keeps its own.
        in_flags = put_flags_back(owner, flags.get(id(owner), flags_of(owner)))
        before = [(buffer, values.get(id(buffer))) for buffer in owner.buffers(recurse=False)]
        return bool(in_flags) or any(
            value is None or buffer.shape != value.shape or not torch.equal(buffer, value)
            for buffer, value in before
        )

    devices = sorted({tensor.device.index or 0 for tensor in model.parameters() if tensor.is_cuda})
    held = held_by(model, None, ())
    weights = [(weight, name) for weight in model.parameters() for name in _HOOKS]
    hooks = [(weight, name, set(_hooks_on(weight, name))) for weight, name in weights]
    with held.put_back(), torch.random.fork_rng(devices=devices), torch.no_grad():
        try:
            with weights_kept([model], notes):
                yield
        finally:
            for module, table in tables:
                for name, buffer in table.items():
                    if not isinstance(module, torch.jit.ScriptModule) and module._buffers.get(name) is not buffer:
                        module._buffers[name] = buffer
            for buffer, value in buffers:
                put_back(buffer, value)
            plain.put_back()
            for weight, name, before in hooks:
                for key in _hooks_on(weight, name).keys() - before:
                    del _hooks_on(weight, name)[key]


def _hooks_on(weight: nn.Parameter, name: str) -> dict[int, Any]:
    """The hooks on the gradient of a weight, of one kind, by their numbers."""
    return getattr(weight, name, None) or {}


def _run_in_order(name: str, container: nn.Module, calls: dict[str, list[Any]]) -> list[Any]:
    """The longest run of elements that read only what the one before returned, or what the first was given."""
    longest: list[Any] = []
    run: list[Any] = []
    for child in container._modules:
        made = calls.get(f"{name}.{child}" if name else child, [])
        if len(made) != 1:
            run = []
            continue
        if run:
            first = [leaf for leaf in run[0][1][0] if _is_tensor(leaf)]
            before = [leaf for leaf in run[-1][2][0] if _is_tensor(leaf)]
            if any(_is_tensor(leaf) and _origin(leaf, first, before) is leaf for leaf in made[0][1][0]):
                run = []
        run = [*run, made[0]]
        longest = max(longest, run, key=len)
    return longest


def _origin(leaf: Any, first: Sequence[Any], before: Sequence[Any]) -> Any:
    if _is_tensor(leaf):
        for kind, tensors in ((Passed, before), (Given, first)):
            for place, tensor in enumerate(tensors):
                if tensor is leaf:
                    return kind(place)
    return leaf


def _try_out(
    model: nn.Module, coarse: Coarse, plain: PlainTensors, layers: Sequence[nn.Module], args: Any, kwargs: Any
) -> None:
    """Compare the layers with the model on its arguments, as it trains and as it is evaluated."""
    modes = [
        (module, module.training) for module in (*model.modules(), *(m for each in layers for m in each.modules()))
    ]
    attributes = ElementAttributes({each.name: model.get_submodule(each.name) for each in coarse.elements})
    outside = next(layer.shared for layer in layers if isinstance(layer, OutsideLayer))
    around = AroundElements(model, {name: outside.get_submodule(name) for name in coarse.copied}, plain)

    def run_layers(args: Any, kwargs: Any) -> Any:
        passed: Any = coarse.inputs_of(*args, **kwargs)
        torch.manual_seed(0)
        for layer in layers:
            is_element = isinstance(layer, ElementLayer)
            watches = (
                (attributes.of_elements_noted(), around.of_elements_noted())
                if is_element
                else (attributes.refused(), around.noted())
            )
            with watches[0], watches[1]:
                passed = layer(passed)
        return coarse.inputs_of(passed)

    def run_model(args: Any, kwargs: Any) -> Any:
        torch.manual_seed(0)
        with _of_model():
            return coarse.inputs_of(model(*args, **kwargs))

    try:
        # What is kept for the next run is seen in that one, for other samples.
        once = [(args, kwargs)]
        for training, is_last in ((False, False), (True, False), (True, True)):
            if is_last and not around.changed:
                continue
            others = _other_samples(args, kwargs) if is_last else (args, kwargs)
            batches = [*once, others] if is_last else once
            for each in (model, *layers):
                each.train(training)
            with _put_back(model, plain):
                expected, numbers = [run_model(*batches[0])], around.numbers()
                with suppress(Exception):  # of other samples
                    expected += [run_model(*each) for each in batches[1:]]
                was_again = len(expected) > 1 and _is_other((args, kwargs), others)
                same_again = {name for name, now in around.numbers().items() if was_again and now == numbers[name]}
                changed = {name: buffer.clone() for name, buffer in model.named_buffers()}
            with _put_back(model, plain):
                try:
                    actual = [run_layers(*each) for each in batches[: len(expected)]]
                except CaptureError:
                    raise
                except Exception as error:
                    kind = "" if isinstance(error, ShapeError) else f"{type(error).__name__}: "
                    raise CaptureError(f"{kind}{error}") from error
                buffers = dict(model.named_buffers())
                if any(not torch.equal(changed[name], buffers[name]) for name in changed.keys() & buffers.keys()):
                    raise CaptureError("the code around its elements changes a buffer, and would change it twice")
            is_same = [
                len(one) == len(other) and all(map(_close, one, other))
                for one, other in zip(actual, expected, strict=True)
            ]
            if is_last or not is_same[0]:
                around.refuse(differs=not is_same[-1] and bool(around.changed), same_again=same_again)
            if not all(is_same):
                raise CaptureError("its layers return something else than it does")
        around.refuse(differs=False, same_again=same_again)  # where it seeds, too
        coarse.notes += around.notes(coarse.elements[0].name)
    finally:
        for module, mode in modes:
            module.training = mode


def _other_samples(args: Any, kwargs: Any) -> Any:
    """Arguments with their samples in another order, and one of them twice in the place of another.

    So what is made of them is another value, a mean over the samples, too.
    """

    def others(leaf: Any) -> Any:
        if not _is_tensor(leaf) or not leaf.dim() or len(leaf) < 2:
            return leaf
        turned = leaf.flip(0)
        return torch.cat((turned[:-1], turned[-2:-1]))

    leaves, structure = flatten((args, kwargs))
    return build(structure, list(map(others, leaves)))


def _is_other(arguments: Any, others: Any) -> bool:
    pairs = zip(flatten(arguments)[0], flatten(others)[0], strict=True)
    return any(_is_tensor(one) and one is not other and not torch.equal(one, other) for one, other in pairs)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    with suppress(RuntimeError):  # other shapes
        return actual.dtype == expected.dtype and torch.allclose(
            actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True
        )
    return False
