"""Coarser layers, for a model whose own code asks for the data of tensors: it cannot be followed without.

The elements of its largest ``nn.ModuleList`` or ``nn.Sequential`` that runs in order are a layer each. What the
model does before them is one layer, and what it does after them another one. Both run the model's own ``forward``:
the first one stops where it calls the first element, and the last one goes through it again, with what the last
element returned. So the last layer does again what comes before the elements, on the same random numbers, and has
a copy of the weights there, which is tied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed_partition.capture.model_layers import Layers, TiedLayer, fill, input_names_of
from deepspeed_partition.capture.program import ShapeError
from deepspeed_partition.capture.recorder import CaptureError, patched
from deepspeed_partition.capture.structure import Structure, build, flatten, names_of

WAY_OUT = (
    "put what depends on the data into a module of its own, which then runs whole, or write the model's layers as "
    "a list"
)


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
    """The leaves of what the call returned; None in the place of tensors."""
    returned_structure: Structure

    @property
    def num_passed(self) -> int:
        return sum(leaf is None for leaf in self.returned)


class _Reached(BaseException):
    """The model's code calls the first element; nothing it can handle."""

    def __init__(self, arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments


class Unknown(torch.Tensor):
    """What an element returned, in a run through the code around them: it may only be passed on."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise CaptureError("the model's code uses what an element returned other than for the next element")


class Gap(nn.Module):
    """The place of an element in the code around them."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        self.called: Callable[[int, Any, Any], Any] | None = None

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
    """None in the place of tensors, which are the first layer's input."""
    input_names: list[str]
    output_names: list[str]
    first_names: dict[str, str]
    notes: list[str]
    returned: list[Any]
    returned_structure: Structure

    def rebuilt(self, tensors: Any) -> Any:
        given = iter(tensors if isinstance(tensors, tuple | list) else (tensors,))
        return build(self.returned_structure, [next(given) if leaf is None else leaf for leaf in self.returned])

    def inputs_of(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor))

    def __deepcopy__(self, _: Any) -> Coarse:
        return self

    # What layers run

    def _arguments(self, inputs: Sequence[torch.Tensor]) -> Any:
        given = iter(inputs)
        leaves = [next(given) if leaf is None else leaf for leaf in self.argument_leaves]
        return build(self.arguments_structure, leaves)

    def before(self, outside: nn.Module, inputs: Any) -> tuple[torch.Tensor, ...]:
        """Run the model's code up to its first element; return what that is given, and what the end needs."""
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        random = _random_state(inputs)
        args, kwargs = self._arguments(inputs)

        def called(_: int, args: Any, kwargs: Any) -> Any:
            raise _Reached((args, kwargs))

        try:
            with _gaps(outside, called):
                outside(*args, **kwargs)
        except _Reached as reached:
            leaves, _ = flatten(reached.arguments)
            self._verify(0, leaves)
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
        leaves, _ = flatten(module(*args, **kwargs))
        if len(leaves) != len(element.returned):
            raise ShapeError(f"{element.name} returned {len(leaves)} values and not {len(element.returned)}")
        return (*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), *rest)

    def after(self, outside: nn.Module, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Run the model's code again, with what the last element returned, and verify how it calls them."""
        last = len(self.elements) - 1
        passed, rest = tensors[: self.elements[last].num_passed], tensors[self.elements[last].num_passed :]
        inputs, random = rest[self.num_given : -1], rest[-1]
        args, kwargs = self._arguments(inputs)
        now = _random_state(inputs)
        given: list[Any] = []
        unknown: list[Any] = []

        def called(place: int, args: Any, kwargs: Any) -> Any:
            leaves, _ = flatten((args, kwargs))
            if place == 0:
                given.extend(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            self._verify(place, leaves, given, unknown)
            unknown.clear()
            element, made = self.elements[place], iter(passed)
            leaves = []
            for leaf in element.returned:
                if leaf is None:
                    leaf = next(made) if place == last else torch.empty(0).as_subclass(Unknown)
                    unknown.append(leaf)
                leaves.append(leaf)
            if place == last:
                _set_random_state(now, inputs)
            return build(element.returned_structure, leaves)

        _set_random_state(random, inputs)
        with _gaps(outside, called):
            returned = outside(*args, **kwargs)
        tensors = tuple(leaf for leaf in flatten(returned)[0] if isinstance(leaf, torch.Tensor))
        return tensors if len(tensors) > 1 else tensors[0]

    def _verify(
        self, place: int, leaves: Sequence[Any], given: Sequence[Any] | None = None, passed: Sequence[Any] = ()
    ) -> None:
        """Refuse a batch for which an element is given something else than in the first run."""
        element = self.elements[place]
        same = len(leaves) == len(element.leaves)
        for leaf, expected in zip(leaves, element.leaves, strict=False):
            if isinstance(expected, Given):
                same &= isinstance(leaf, torch.Tensor) and (given is None or leaf is given[expected.place])
            elif isinstance(expected, Passed):
                same &= leaf is passed[expected.place]
            elif isinstance(expected, bool | int | float | str) or expected is None:
                same &= leaf is None if expected is None else type(leaf) is type(expected) and leaf == expected
        if not same:
            raise ShapeError(
                f"{type(self.model).__name__} gives {element.name} something else for this batch than when its "
                f"layers were found: {WAY_OUT}"
            )


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


class ElementLayer(nn.Module):
    """One element of the run, under its own name."""

    def __init__(self, coarse: Coarse, place: int, modules: Any) -> None:
        super().__init__()
        self._coarse, self._place = coarse, place
        self.training = coarse.model.training
        fill(self, modules, {}, [coarse.elements[place].name])

    def forward(self, tensors: Any) -> Any:
        module: Any = self
        for part in self._coarse.elements[self._place].name.split("."):
            module = module._modules[part]
        return self._coarse.element(self._place, module, tensors)


class _Around:
    """In the place of a recipe: the two layers that run the code around the elements."""

    def __init__(self, coarse: Coarse) -> None:
        self._coarse = coarse

    def program(self, number: int, _: nn.Module) -> _Around | _After:
        return self if number == 0 else _After(self._coarse)

    def run(self, module: Any, inputs: Any) -> Any:
        return self._coarse.before(module.model, inputs)


class _After:
    def __init__(self, coarse: Coarse) -> None:
        self._coarse = coarse

    def run(self, module: Any, inputs: Any) -> Any:
        return self._coarse.after(module.model, inputs)


class Outside(nn.Module):
    """The model without the elements."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.training = model.training
        self.model = model


class OutsideLayer(nn.Module):
    """The code around the elements, where it has no weights to tie."""

    def __init__(self, around: _Around, number: int, shared: Outside) -> None:
        super().__init__()
        self._around, self._number, self.shared = around, number, shared

    def forward(self, inputs: Any) -> Any:
        return self._around.program(self._number, self.shared).run(self.shared, inputs)


def coarse_layers(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], reason: CaptureError,
    wrap: Callable[[TiedLayer], Any] = lambda layer: layer,
) -> Layers:  # fmt: skip
    """The layers of a model that runs elements in order, found by running it on its arguments.

    Raises:
        CaptureError: the reason, where there are no such elements, or the code around them does more.
    """
    try:
        coarse = _found(model, tuple(args), kwargs, reason)
        modules = dict(model.named_modules())
        outside = Outside(_without(model, [element.name for element in coarse.elements]))
        around: Any = _Around(coarse)
        elements = [ElementLayer(coarse, place, modules) for place in range(len(coarse.elements))]
        plain = [OutsideLayer(around, 0, outside), *elements, OutsideLayer(around, len(elements) + 1, outside)]
        _try_out(model, coarse, plain, args, kwargs)
    except CaptureError as error:
        if error is reason:
            raise
        raise CaptureError(f"{reason}. Nor can it be cut between its elements: {error}. {WAY_OUT}") from reason
    layers = Layers(plain)
    if any(weight.requires_grad for weight in outside.parameters()):
        for place in (0, -1):
            layers[place] = wrap(TiedLayer(around, place % len(plain), "around_elements", outside))
    layers.captured = coarse
    layers.input_names, layers.output_names = coarse.input_names, coarse.output_names
    layers.boundary_bytes, layers.boundary_shapes = [], []
    return layers


def _without(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """The model with gaps in the places of modules; all other modules are the model's own objects."""
    outside = copy.copy(model)
    outside._modules = dict(model._modules)
    copied: dict[str, nn.Module] = {"": outside}
    for place, name in enumerate(names):
        *path, last = name.split(".")
        for depth in range(len(path)):
            above, here = ".".join(path[:depth]), ".".join(path[: depth + 1])
            if here not in copied:
                inner = copy.copy(copied[above]._modules[path[depth]])
                assert inner is not None
                inner._modules = dict(inner._modules)
                copied[above]._modules[path[depth]] = copied[here] = inner
        copied[".".join(path)]._modules[last] = Gap(place)
    return outside


def _found(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: CaptureError) -> Coarse:
    calls, returned = _calls_of(model, args, kwargs)
    modules = dict(model.named_modules())
    best: list[Any] = []
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            run = _run_in_order(name, module, calls)
            if len(run) > 1 and _weight(modules, run) > _weight(modules, best):
                best = run
    if not best:
        raise reason
    first = [leaf for leaf in best[0][1][0] if isinstance(leaf, torch.Tensor)]
    elements = []
    before: list[Any] = []
    for name, (leaves, structure), (outs, out_structure) in best:
        own = [_origin(leaf, first, before) for leaf in leaves]
        elements.append(
            Element(name, own, structure, [None if _is_tensor(leaf) else leaf for leaf in outs], out_structure)
        )
        before = [leaf for leaf in outs if _is_tensor(leaf)]
    argument_leaves, structure = flatten((args, kwargs))
    out_leaves, out_structure = flatten(returned)
    names = names_of(out_structure)
    return Coarse(
        model, elements, len(first), structure, [None if _is_tensor(leaf) else leaf for leaf in argument_leaves],
        input_names_of(model, args, kwargs),
        [name or "output" for name, leaf in zip(names, out_leaves, strict=True) if _is_tensor(leaf)],
        {},
        [f"{type(model).__name__} is cut between {best[0][0]} and its followers alone: {reason}"],
        [None if _is_tensor(leaf) else leaf for leaf in out_leaves], out_structure,
    )  # fmt: skip


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _weight(modules: dict[str, nn.Module], run: Sequence[Any]) -> int:
    return sum(weight.numel() for name, *_ in run for weight in modules[name].parameters())


def _calls_of(model: nn.Module, args: Any, kwargs: Any) -> tuple[dict[str, list[Any]], Any]:
    """What each module of the model is given and returns, in one run with data."""
    names = {id(module): name for name, module in model.named_modules() if module is not model}
    calls: dict[str, list[Any]] = {}
    call = nn.Module.__call__

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = flatten((args, kwargs))
        returned = call(module, *args, **kwargs)
        if id(module) in names:
            calls.setdefault(names[id(module)], []).append((names[id(module)], given, flatten(returned)))
        return returned

    with _put_back(model), patched(nn.Module, "__call__", called):
        returned = call(model, *args, **kwargs)
    return calls, returned


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Put back the random numbers and buffers that a run with data changes."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({tensor.device.index or 0 for tensor in model.parameters() if tensor.is_cuda})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        try:
            yield
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)


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


def _try_out(model: nn.Module, coarse: Coarse, layers: Sequence[nn.Module], args: Any, kwargs: Any) -> None:
    """Compare the layers with the model on its arguments, as it trains and as it is evaluated."""
    modes = [
        (module, module.training) for module in (*model.modules(), *(m for each in layers for m in each.modules()))
    ]
    try:
        for training in (False, True):
            for each in (model, *layers):
                each.train(training)
            with _put_back(model):
                torch.manual_seed(0)
                expected = coarse.inputs_of(model(*args, **kwargs))
                changed = [buffer.clone() for buffer in model.buffers()]
            with _put_back(model):
                torch.manual_seed(0)
                passed: Any = coarse.inputs_of(*args, **kwargs)
                try:
                    for layer in layers:
                        passed = layer(passed)
                except ShapeError as error:
                    raise CaptureError(str(error)) from error
                buffers = list(model.buffers())
                if any(not torch.equal(one, other) for one, other in zip(buffers, changed, strict=True)):
                    raise CaptureError("the code around its elements changes a buffer, and would change it twice")
            actual = coarse.inputs_of(passed)
            same = len(actual) == len(expected) and all(map(_close, actual, expected))
            if not same:
                raise CaptureError("its layers return something else than it does")
    finally:
        for module, mode in modes:
            module.training = mode


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    with suppress(RuntimeError):  # other shapes
        return actual.dtype == expected.dtype and torch.allclose(
            actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True
        )
    return False
