"""Layers of a captured model: modules that hold the user's own modules under the user's own names."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed_partition.capture.captured import (
    Captured,
    autocast_on,
    input_names_of,
    recorded_graph,
    same_autocast,
    without_data,
)
from deepspeed_partition.capture.draws import digest_of
from deepspeed_partition.capture.graph import Graph, Node
from deepspeed_partition.capture.layout import Layout, layout_of
from deepspeed_partition.capture.ordering import choose_order
from deepspeed_partition.capture.outside_layers import OutsideLayers
from deepspeed_partition.capture.partition import Flow, changed_attributes, flow_of, need_of, programs_of
from deepspeed_partition.capture.program import Program
from deepspeed_partition.capture.recorder import CaptureError
from deepspeed_partition.capture.recording import Attribute, Recording
from deepspeed_partition.capture.sizes import Dimension
from deepspeed_partition.capture.weights_without_data import State

MOST_NAMED = 3
"""Modules and lines of a layer that a sentence names."""


class Branch(nn.Module):
    """The place of a module of the user's within a layer: it has the children that the layer needs.

    Args:
        path: The module's name in the model.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, *_: Any) -> None:
        raise RuntimeError("this part of a captured model is run by its layer")


class FoundLayer(nn.Module):
    """A layer of a model that was not written as a list of layers."""

    @property
    def cut_off(self) -> list[str]:
        """The parameters that were frozen when layers were made, and would not be trained as in one process."""
        return []


class CapturedLayer(FoundLayer):
    """Consecutive calls of a captured model.

    Its children are the user's own modules under their own names, so ``state_dict()`` has the user's names. It
    takes and returns a tensor, or a tuple of tensors.
    """

    def __init__(self, recipe: Recipe, number: int) -> None:
        super().__init__()
        self._recipe, self._number = recipe, number
        self.training = recipe.captured.training
        recording = recipe.captured.graph.recording
        fill(self, recording.modules, recording.attributes, recipe.names[number])
        programs = [made[number] for made in recipe.programs.values()]
        given = [leaf for program in programs for step in program.steps for leaf in step.given.leaves]
        self.generators = [leaf for leaf in given if isinstance(leaf, torch.Generator)]
        """The generators that its calls are given, whose states go with the layer to other ranks."""

    def forward(self, inputs: Any) -> Any:
        return self._recipe.program(self._number, self).run(self, inputs)

    def extra_repr(self) -> str:
        return ", ".join(self._recipe.names[self._number])

    @property
    def cut_off(self) -> list[str]:
        """The parameters that were frozen when the model was captured, and that no gradient reaches since."""
        frozen = set(self._recipe.frozen)
        own = (name for name, _ in self.named_parameters() if name in frozen)
        return [name for name in own if self._recipe.is_cut_off(name)]

    @property
    def recipe(self) -> Recipe:
        """What all layers of the model run."""
        return self._recipe

    @property
    def contents(self) -> Contents:
        """What the layer runs."""
        return self._recipe.contents(self._number)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a layer of a captured model runs, for sentences."""

    modules: dict[str, nn.Module]
    """The user's modules, by their names in the model, in order."""
    lines: list[str]
    """The lines of the model's code that run between modules, such as ``net.py:33``."""

    def in_words(self, names: Mapping[nn.Module, str] | None = None) -> str:
        """Modules and lines: ``self.head, and the code at net.py:33``.

        Args:
            names: The names of modules for the user; those in the model where there are none.
        """
        called = [(names or {}).get(module, name) for name, module in self.modules.items()]
        shown = ", ".join([*called[:MOST_NAMED], *["..."] * (len(called) > MOST_NAMED)])
        lines = ", ".join([*self.lines[:MOST_NAMED], *["..."] * (len(self.lines) > MOST_NAMED)])
        code = f"the code at {lines}" if lines else ""
        return f"{shown}, and {code}" if shown and code else shown or code


class TiedWeights(nn.Module):
    """The modules of a captured model that use a weight together, in whichever layers these stand."""

    def __init__(self, captured: Captured, names: Iterable[str]) -> None:
        super().__init__()
        self.training = captured.training
        recording = captured.graph.recording
        fill(self, recording.modules, recording.attributes, names)

    def forward(self, *_: Any) -> None:
        raise RuntimeError("modules with a weight in common are run by the layers that use them")


class TiedLayer(nn.Module):
    """A layer whose weights other layers use, too; ``shared`` is one object for all of them."""

    def __init__(self, recipe: Any, number: int, key: str, shared: nn.Module) -> None:
        super().__init__()
        self.recipe, self.number, self.key = recipe, number, key
        self.shared = shared

    def run(self, shared: nn.Module, inputs: Any) -> Any:
        """Run the layer with a copy of the modules."""
        return self.recipe.program(self.number, shared).run(shared, inputs)

    def forward(self, inputs: Any) -> Any:
        return self.run(self.shared, inputs)


def contents_of(layer: Any) -> Contents | None:
    """What a layer runs that was found in a model, also where it is given as the function of a tied one."""
    if isinstance(layer, CapturedLayer):
        return layer.contents
    recipe, number, *_ = (*layer.args, None, None) if isinstance(layer, functools.partial) else (None, None)
    if isinstance(layer, TiedLayer):
        recipe, number = layer.recipe, layer.number
    return recipe.contents(number) if isinstance(recipe, Recipe) and isinstance(number, int) else None


def fill(
    root: nn.Module, modules: Mapping[str, nn.Module], attributes: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Give a module the user's modules and weights of these names, in the same tree."""
    for name in sorted(names):
        *path, last = name.split(".")
        at: Any = root
        for depth, part in enumerate(path):
            inner = at._modules.get(part)
            if inner is None:
                inner = Branch(".".join(path[: depth + 1]))
                inner.training = modules[inner.path].training
                at.add_module(part, inner)
            at = inner
        if name in modules:
            if at._modules.get(last) is None or isinstance(at._modules[last], Branch):
                at.add_module(last, modules[name])
        elif isinstance(attributes[name], nn.Parameter):
            if last not in at._parameters:
                at.register_parameter(last, attributes[name])
        elif last not in at._buffers:
            owner = modules[".".join(path)]
            at.register_buffer(last, attributes[name], persistent=last not in owner._non_persistent_buffers_set)


@dataclass(slots=True, eq=False)
class OtherCall:
    """A call of a captured model's modules other than the one that its layers were made of."""

    captured: Captured
    """The model with the graph of its first call, whose names and layers are meant."""
    programs: dict[Any, list[Program]] = field(default_factory=dict)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Recipe:
    """What all layers of a model need to know: the programs for each state in which they may be run."""

    captured: Captured
    layout: Layout
    names: list[list[str]]
    """The modules and weights of each layer, by the user's names."""
    programs: dict[Any, list[Program]] = field(default_factory=dict)
    dtypes: dict[int, torch.dtype | None] = field(default_factory=dict)
    running: OtherCall | None = None
    """What the layers run; None: the call that they were made of."""
    outside: OutsideLayers | None = None
    """What is verified before a layer runs; None where a host does that."""
    recorded: dict[Any, Recording] = field(default_factory=dict)
    """What the layers have run since something changed that code reads, for each state."""
    _recordings: dict[Any, Recording] = field(default_factory=dict)
    """What was recorded since the layers were made, for each state."""
    _stale: tuple[dict[Any, list[Program]], str] = field(default_factory=lambda: ({}, ""))
    """The programs before the last change of what code reads, and that change in words."""
    _digests: dict[Any, str] = field(default_factory=dict)
    """Digests of the calls that were recorded before something changed that code reads, for each state."""

    def __deepcopy__(self, _: Any) -> Recipe:
        return self

    def other_call(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        call: Callable[..., Any] | None,
        changed: Callable[[Graph, bool], None],
        reach: Callable[[], AbstractContextManager[Any]],
    ) -> OtherCall:
        """Another call of the model's modules, which the same layers can run.

        Args:
            call: What is run in the place of the model.
            changed: Changes the graph before layers run it.
            reach: In which the model is captured, with all of its weights.

        Raises:
            CaptureError: it cannot be captured, or runs modules in another order.
        """
        model = self.captured.model
        shells = tuple(without_data(part) for part in (tuple(args), kwargs))
        names = input_names_of(call or model, args, kwargs)
        other = OtherCall(
            replace(
                self.captured, arguments=(shells[0], shells[1]), input_names=names, call=call, changed=changed,
                reach=reach,
            )
        )  # fmt: skip
        state = model.training, (), autocast_on(self.captured.graph.recording.device)
        other.programs[state] = self._captured_again(other.captured, *state)
        return other

    def contents(self, number: int) -> Contents:
        """The modules and the lines that a layer runs."""
        graph = self.captured.graph
        calls = [node.call for node in graph.nodes if self.layout.layer_of.get(node.number) == number]
        modules = {call.target: graph.recording.modules[call.target] for call in calls if call.is_module}
        own = [Path(call.where).name for call in calls if not call.is_module and call.where]
        return Contents(modules, list(dict.fromkeys(own)))

    @property
    def frozen(self) -> list[str]:
        """The parameters that were frozen when the model was captured, by the user's names."""
        graph = self.captured.graph
        parameters = [name for name, each in graph.recording.attributes.items() if isinstance(each, nn.Parameter)]
        return [name for name in parameters if name not in graph.trainable]

    def is_cut_off(self, weight: str) -> bool:
        """Whether a weight of :attr:`frozen` would get no gradient if it were trained now, or would be several.

        What was computed of frozen weights alone crosses boundaries without a gradient, and layers that use one
        have each its own. What has no gradient for another reason, such as ``detach()``, has none in one process.
        """
        graph = self.captured.graph
        values = graph.values

        def is_used_by(name: str) -> bool:
            return weight == name or weight.startswith(f"{name}.")

        reached: set[int] = set()
        for node in graph.nodes:
            without = bool(node.call.context) and not node.call.context[0]
            if without or any(values[value].requires_grad for value in node.reads):
                continue
            if not reached.isdisjoint(node.reads) or any(map(is_used_by, _names_of(node))):
                reached.update(node.makes)
        crossing = {value for each in self.layout.crossings for value in each.values}
        users = [number for number, names in enumerate(self.names) if any(map(is_used_by, names))]
        is_several = sum(number not in self.layout.ties for number in users) > 1
        return is_several or any(
            values[each].dtype.is_floating_point and not values[each].requires_grad for each in reached & crossing
        )

    def program(self, number: int, module: nn.Module) -> Program:
        """What a layer runs, in the state in which its modules are."""
        if self.outside is not None:
            self.outside.verify()
            if change := self.outside.changes():
                self._digests |= {state: digest_of(each.root) for state, each in self.recorded.items()}
                self._stale, self.programs = (self.programs, change), {}
                self._recordings, self.recorded = {}, {}
        running = self.running or self
        state = self._state(number, module)
        if state not in running.programs:
            running.programs[state] = self._captured_again(running.captured, *state)
            self._verify_ends(state)
            if self.outside is not None and self._digests.get(state) != digest_of(self._recordings[state].root):
                self.outside.runs_other_calls()
        self.recorded[state] = self._recordings.get(state, self.captured.graph.recording)
        return running.programs[state][number]

    def _verify_ends(self, state: tuple[Any, ...]) -> None:
        """Refuse programs that pass on something else than those before a change of what code reads.

        Raises:
            CaptureError: they do.
        """
        stale, change = self._stale
        if state in stale and _ends(stale[state]) != _ends(self.programs[state]):
            raise CaptureError(
                f"{change}: the code that reads it, which was cut into layers, goes another way then, and other "
                "tensors cross their boundaries: let a module of its own read it"
            )

    def _state(self, number: int, module: nn.Module) -> tuple[Any, ...]:
        """Training or evaluation, what weights were changed to, and autocast."""
        now = None
        device = self.captured.graph.recording.device
        for parameter in module.parameters():
            device = parameter.device
            if parameter.is_floating_point():
                now = parameter.dtype
                break
        before = self._dtype(number)
        changed = (before, now) if now is not None and before is not None and now != before else ()
        return module.training, changed, autocast_on(device)

    def _dtype(self, number: int) -> torch.dtype | None:
        """The type of a layer's first floating weight when the model was captured."""
        if number not in self.dtypes:
            recording = self.captured.graph.recording
            found = (
                dtype
                for own in self.names[number]
                for name, dtype in recording.dtypes.items()
                if (name == own or name.startswith(f"{own}.")) and dtype.is_floating_point
            )
            self.dtypes[number] = next(found, None)
        return self.dtypes[number]

    def _captured_again(
        self, captured: Captured, training: bool, changed: tuple[Any, ...], autocast: tuple[Any, ...]
    ) -> list[Program]:
        """The programs for another state than the one in which the model was captured, or for another call."""
        model, recording = self.captured.model, self.captured.graph.recording
        modes = [(module, module.training) for module in model.modules()]
        state = State(
            recording.dtypes, dict([changed]) if changed else {}, recording.device, recording.first_names
        )
        try:
            if training != model.training:
                model.train(training)
            with captured.reach(), same_autocast(recording.device, autocast):
                graph = recorded_graph(model, *captured.arguments, captured.call, captured.graph.opened, state)
        finally:
            for module, mode in modes:
                module.training = mode
        captured.changed(graph, training)
        self._recordings[training, changed, autocast] = graph.recording
        return programs_like(self, graph, captured.input_names)


def cut_off_weights(layers: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """The weights of layers of a model that were frozen when it was captured, and that no gradient reaches since.

    Args:
        layers: by their names, any layers.
    """
    return {
        f"{name}.{own}": layer.get_parameter(own)
        for name, layer in layers.items()
        if isinstance(layer, FoundLayer)
        for own in layer.cut_off
    }


def _ends(programs: Sequence[Program]) -> list[Any]:
    """How many tensors each layer takes and returns, and whether numbers are among them."""
    return [
        (len(each.inputs), len(each.outputs), bool(each.numbers_in), bool(each.numbers_out)) for each in programs
    ]


def programs_like(recipe: Recipe, graph: Graph, input_names: list[str]) -> list[Program]:
    """The programs of another graph of the same model, each of whose weights stays in its layer."""
    before = recipe.captured.graph
    number_before = {key: node.number for key, node in zip(_keys(before), before.nodes, strict=True)}
    layer_of_call = {
        key: recipe.layout.layer_of[number]
        for key, number in number_before.items()
        if number in recipe.layout.layer_of
    }
    decided = {
        node.number: number_before[key] not in recipe.layout.layer_of
        for key, node in zip(_keys(graph), graph.nodes, strict=True)
        if key in number_before
    }
    flow = flow_of(graph, decided)
    layers_of_name: dict[str, set[int]] = {}
    for layer, names in enumerate(recipe.names):
        for name in names:
            layers_of_name.setdefault(name, set()).add(layer)
    layer_of: dict[int, int] = {}
    keys = dict(zip((node.number for node in graph.nodes), _keys(graph), strict=True))
    made_in: dict[int, int] = {}
    for node in flow.main:
        earliest = max((layer_of[each] for each in node.after if each in layer_of), default=0)
        for read in need_sources(flow, node):
            earliest = max(earliest, made_in.get(read, 0))
        need = need_of(flow, [node], (), ())
        earliest = max([earliest, *(made_in.get(value, 0) for value in need.values)])
        for size in need.sizes:
            made_by = size.value if isinstance(size, Dimension) else graph.numbers.get(size.value, -1)
            found = made_in if isinstance(size, Dimension) else layer_of
            earliest = max(earliest, found.get(made_by, 0))
        layer = max(earliest, layer_of_call.get(keys[node.number], 0))
        names = _names_of(node)
        if any(layer not in layers_of_name.get(name, {layer}) for name in names):
            raise CaptureError(
                f"{recipe.captured.model.__class__.__name__} runs its modules in another order in "
                f"{'training' if not recipe.captured.training else 'evaluation'}, near {node.call.where}: give "
                "pipeline layers by hand, or run both in one mode"
            )
        if any(name not in layers_of_name for name in names):
            raise CaptureError(
                f"a module runs in only one mode or only one step, near {node.call.where}: {', '.join(names)}. "
                "Run the same modules in both, or give pipeline layers by hand"
            )
        layer_of[node.number] = layer
        made_in.update(dict.fromkeys(node.makes, layer))
    _refuse_buffers_apart(recipe, flow, layer_of)
    return programs_of(flow, layer_of, recipe.layout.num_layers, input_names)


def _refuse_buffers_apart(recipe: Recipe, flow: Flow, layer_of: Mapping[int, int]) -> None:
    """Refuse a buffer that code changes in this state alone, where layers were cut between its uses.

    Raises:
        CaptureError: layers on several ranks would have a copy each, of which one changes.
    """
    changed = changed_attributes(flow.main, flow.graph)
    for name in sorted(changed):
        users = {layer_of[node.number] for node in flow.main if name in node.attributes}
        if len(users) > 1:
            before, now = ("training", "evaluation") if recipe.captured.training else ("evaluation", "training")
            raise CaptureError(
                f"{type(recipe.captured.model).__name__} changes its buffer {name} in {now}, and several of the "
                f"layers that it was cut into in {before} use it: make the layers in {now} (model."
                f"{'eval' if now == 'evaluation' else 'train'}() first), which keeps its uses together"
            )


def need_sources(flow: Any, node: Any) -> list[int]:
    return [source for read in node.reads for source in flow.sources(read)]


def _keys(graph: Graph) -> list[tuple[Any, ...]]:
    """A name for each node that is the same in training and in evaluation."""
    seen: dict[Any, int] = {}
    keys = []
    scopes: dict[int, str] = {}
    _name_scopes(graph.recording.root, scopes)
    for node in graph.nodes:
        path = tuple(scopes.get(time, "") for time in node.call.scopes)
        key = path, node.call.target if node.is_module else getattr(node.call.target, "__name__", "")
        seen[key] = seen.get(key, 0) + 1
        keys.append((*key, seen[key]))
    return keys


def _name_scopes(call: Any, names: dict[int, str]) -> None:
    if call.is_module:
        names[call.time] = call.target
        for inner in call.calls:
            _name_scopes(inner, names)


def _names_of(node: Any) -> list[str]:
    if node.is_module:
        return [node.call.target]
    return sorted(node.attributes)


# Lists of layers


class Layers(list[Any]):
    """The layers of a model, in order: a list for ``PipelineModule(layers=...)``."""

    captured: Any
    recipe: Any
    """What all of the layers run, in each state: a ``Recipe``, or that of elements that run in order."""
    input_names: list[str]
    """The names of the tensors that the first layer takes, in order."""
    output_names: list[str]
    """The names of the tensors that the last layer returns, in order."""
    boundary_bytes: list[int]
    """The bytes that cross each boundary, for the arguments that the model was captured with."""
    boundary_shapes: list[list[tuple[int, ...]]]
    """The shapes of the tensors that cross each boundary, for these arguments."""

    def output(self, tensors: Any) -> Any:
        """What the model itself returns, made of what the last layer returns."""
        return self.captured.rebuilt(tensors)

    def model_name(self, name: str) -> str:
        """The model's own name of what a pipeline module calls ``3.NAME`` or ``tied_modules.KEY.NAME``."""
        return name.split(".", 2 if name.startswith("tied_modules.") else 1)[-1]

    def model_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The model's own ``state_dict``, made of the whole pipeline's.

        A tied weight has all of its names; a weight that no layer uses is as it was.
        """
        own = {self.model_name(name): tensor for name, tensor in state.items()}
        first_names = self.captured.first_names
        by_first_name = {first_names.get(name, name): tensor for name, tensor in own.items()}
        before = self.captured.model.state_dict()
        return {name: by_first_name.get(first_names.get(name, name), before[name]) for name in before}


def layers_from(captured: Captured, wrap: Callable[[TiedLayer], Any] = lambda layer: layer) -> Layers:
    """The layers of a captured model.

    Args:
        wrap: Makes of a layer that shares weights what stands in the list.
    """
    flow = flow_of(captured.graph)
    choose_order(flow)
    layout = layout_of(flow)
    programs = programs_of(flow, layout.layer_of, layout.num_layers, captured.input_names)
    names = [
        sorted({name for step in program.steps for name in _names_in(captured, step)}) for program in programs
    ]
    state = captured.training, (), captured.autocast
    recipe = Recipe(captured, layout, names, {state: programs})
    shared: dict[str, TiedWeights] = {}
    names_by_key: dict[str, set[str]] = {}
    for key in dict.fromkeys(layout.ties.values()):
        places = [layer for layer, own in layout.ties.items() if own == key]
        names_by_key[key] = {name for place in places for name in names[place]}
        shared[key] = TiedWeights(captured, names_by_key[key])
    _refuse_statistics_in_shared_layers(captured, names_by_key)
    layers = Layers()
    for number in range(layout.num_layers):
        if number in layout.ties:
            key = layout.ties[number]
            layers.append(wrap(TiedLayer(recipe, number, key, shared[key])))
        else:
            layers.append(_named_after(_heaviest(flow.main, layout, number))(recipe, number))
    layers.captured, layers.recipe = captured, recipe
    layers.input_names, layers.output_names = captured.input_names, captured.output_names
    layers.boundary_bytes = [crossing.num_bytes for crossing in layout.crossings]
    values = captured.graph.values
    layers.boundary_shapes = [[values[each].shape for each in crossing.values] for crossing in layout.crossings]
    return layers


def _refuse_statistics_in_shared_layers(captured: Captured, shared: Mapping[str, Iterable[str]]) -> None:
    """Refuse running statistics in layers that share weights: each rank has a copy, and one of them runs."""
    modules = captured.graph.recording.modules
    for names in shared.values():
        for name in sorted(set(names) & modules.keys()):
            for path, part in modules[name].named_modules():
                if getattr(part, "running_mean", None) is not None:
                    place = ".".join(filter(None, (name, path)))
                    raise CaptureError(
                        f"{place} ({type(part).__name__}) keeps running statistics, and stands in layers that "
                        f"share "
                        "weights, of which several ranks may have a copy: their statistics would differ. Call "
                        "what the layers share once, on the joined inputs (torch.cat), or use nn.GroupNorm or "
                        "nn.LayerNorm there"
                    )


@functools.cache
def _named_after(name: str) -> type[CapturedLayer]:
    """A class with the name of the module that most of a layer's work is in, for plans and ``type:REGEX``."""
    made: Any = types.new_class(name or CapturedLayer.__name__, (CapturedLayer,))
    made.__doc__ = CapturedLayer.__doc__
    return made


def _heaviest(nodes: Iterable[Node], layout: Layout, number: int) -> str:
    own = [node for node in nodes if layout.layer_of[node.number] == number and node.is_module]
    if not own:
        return ""
    return max(own, key=lambda node: node.work).call.module_type


def _names_in(captured: Captured, step: Any) -> list[str]:
    own = [step.target] if step.is_module else []
    return own + [leaf.name for leaf in step.given.leaves if isinstance(leaf, Attribute)]
