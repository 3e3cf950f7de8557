"""The call that a step makes of a model that is written down and cut into layers: what goes in and what comes out.

The user's step calls its model with whatever the model takes, and gets what the model returns, while a pipeline
takes and returns tensors. A loss that the model makes itself is computed from the outputs of the layers where the
step runs (see ``capture/tail.py``).
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from deepspeed_partition.capture import CaptureError, capture
from deepspeed_partition.capture.coarse import deciding, runs_again, undivided
from deepspeed_partition.capture.graph import Graph
from deepspeed_partition.capture.model_layers import OtherCall
from deepspeed_partition.capture.structure import build, flatten, written_names_of
from deepspeed_partition.capture.tail import Tail, cut_tail
from deepspeed_partition.engine.captured_model import layers_of_captured
from deepspeed_partition.engine.pipeline.shared_weights import TiedModule
from deepspeed_partition.profiling.attributes import attributes_kept
from lightning_madpipe.finding.batch_states import FROM_THE_FIRST

NO_CACHE = "a pipeline has no cache of keys and values"
DECIDES_APART = (
    "code there decides by the numbers in tensors, of each micro-batch and not of the batch as in one process; "
    "with num_micro_batches=1 it does as there"
)


CHOICE = (
    ". Where this chooses a part of the model, such as the head of a task, let forward run all of them for each "
    "batch, and choose among their results by torch functions, such as torch.where"
)
"""What to do where arguments that are no tensors change from batch to batch."""


TEXT = (
    ". Text of the samples is made into tensors before forward(), in a collate_fn or in the step; where forward() "
    "does not read it, leave it out of what it is given"
)
"""What to do where a text within an argument does."""

NUMBER = ". A number that is only computed with is handed as a tensor: {name}=torch.tensor(...)"
"""What to do where a number changes from batch to batch."""

NUMBERS = (
    ". Let {name} be a tensor, as a collate_fn makes it by torch.tensor(...), or leave it out of what is handed "
    "to forward() where that does not read it"
)
"""What to do where a number within an argument does."""


class OtherCallError(ValueError):
    """A call for which the layers do not hold; the message says what is different."""


class CapturedCall:
    """A call of a module in a step.

    Args:
        model: The module that is called: the LightningModule or a part of it.
        called: How the step calls it, such as ``self.model()``.
        args: What it is called with.
        kwargs: What it is called with by name.
        first: The call that layers were made of, if these are to run this one, too.

    Raises:
        CaptureError: its calls cannot be written down.
    """

    def __init__(
        self,
        model: nn.Module,
        called: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        first: CapturedCall | None = None,
    ) -> None:
        self.model, self.called = model, called
        self._signature = self._signature_of(model)
        args, kwargs = self._in_order(args, kwargs)
        self._arguments = self._named(args, kwargs)
        self._kind = kind_of_sizes(leaf for leaf in self._arguments.values() if isinstance(leaf, Tensor))
        self._first = first or self
        self._tails: dict[bool, Tail] = {}
        self._tails_of_kinds: dict[Hashable, Tail] = {}
        self.now: CapturedCall = self
        """The call that the layers run."""
        self._of_steps: dict[Hashable, CapturedCall] = {}
        """What steps call, by their names and the kind of sizes that they are given."""
        self._other: OtherCall | None = None
        self.why_few = ""
        """Why most of the model is one layer; empty where it is not."""
        self.root: nn.Module = model if first is None else first.root
        """The module whose layers these are."""
        self._reach: Callable[[], AbstractContextManager[Any]] = nullcontext
        if first is None:
            self._be_first(args, kwargs)
        else:
            self._be_another(first, args, kwargs)

    def _signature_of(self, model: Any) -> inspect.Signature:
        return inspect.signature(model.forward)

    def _be_first(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        model = self.model
        with without_caches(model) as kinds, _metrics_kept(model):
            captured = capture(model, args, kwargs)
        self.why_few = runs_again(captured)
        self.notes = [*captured.notes, *notes_on_caches(kinds), *filter(None, [self.why_few])]
        """What a user should be told once."""
        self._cut(captured.graph, captured.training)
        captured.changed = self._cut
        layers = layers_of_captured(captured)
        self._captured, self._recipe = captured, layers.recipe
        self.layers = tuple(layers)
        whole = {part for layer in self.layers for part in _module_of(layer).modules()}
        self._opened = [part for part in model.modules() if part not in whole]
        self._modes: dict[bool, list[bool]] = {}
        self._weights = list(map(id, model.parameters()))
        self._forms = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in _tensors(model)}
        self.follow_modes()

    def _be_another(self, first: CapturedCall, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.notes, self.layers, self._recipe = [], first.layers, first._recipe
        self._opened, self._modes, self._weights, self._forms = first._opened, {}, first._weights, first._forms
        self._reach = first._reach
        # Not the root itself: a captured model is told by that from what is called in its place.
        called = None if self.model is self.root else self.model
        self._other = self._recipe.other_call(args, kwargs, called, self._cut, self._in_reach)
        self._captured = self._other.captured

    def follow(self, step: Hashable) -> bool:
        """Let the layers run what a step calls; return whether that is known."""
        if step not in self._of_steps:
            return False
        self.let_run(self._of_steps[step])
        return True

    def let_run(self, call: CapturedCall) -> None:
        """Let the layers run a call of theirs."""
        self.now, self._recipe.running = call, call._other

    def is_opened(self, part: nn.Module) -> bool:
        """Whether the layers have what a module does without running its code, which is written down."""
        return any(each is part for each in self._opened)

    def undivided(self) -> tuple[str, CaptureError] | None:
        """The module that most of the work is in and that stays whole, and why."""
        return undivided(self._captured)

    def notes_on_decisions(self) -> list[str]:
        """What a user should be told once where a batch is cut into micro-batches."""
        found = deciding(self._captured.graph)
        return [f"{', '.join(found[:3])}{', ...' * (len(found) > 3)}: {DECIDES_APART}"] if found else []

    def lines_that_draw(self) -> list[str]:
        """The lines of the model's own code, outside of its modules, by which torch draws random numbers."""
        drawing = [node.call for node in self._captured.graph.nodes if node.is_random and not node.is_module]
        # Attention has a dropout of its own, which seldom draws.
        lines = [call.where for call in drawing if call.target is not F.scaled_dot_product_attention]
        return list(dict.fromkeys(f"{self.called} at {Path(line).name}" for line in lines))

    def is_told(self, decision: str) -> bool:
        """Whether :meth:`notes_on_decisions` tells of all that a layer decides, given with its lines."""
        _, *lines = decision.split(", ")
        known = [each.replace("\\", "/") for each in deciding(self._captured.graph)]
        return all(any(f"/{line}:" in each.replace("(", "/") for each in known) for line in lines)

    def another(
        self, model: nn.Module, called: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CapturedCall:
        """Another call, which these layers are to run.

        Raises:
            CaptureError: they cannot.
        """
        return CapturedCall(model, called, args, kwargs, self)

    def know(self, step: Hashable, call: CapturedCall) -> None:
        """Know what a step calls: this call, or another one of the same layers."""
        self._of_steps[step] = call

    def _cut(self, graph: Graph, training: bool) -> None:
        self._tails[training] = cut_tail(graph)

    def let_reach(self, reach: Callable[[], AbstractContextManager[Any]]) -> None:
        """Capture the model in another mode or type within ``reach``, in which all of its weights are there."""
        for call in set(self._calls()):
            call._reach = reach
            call._captured.reach = call._in_reach

    @contextmanager
    def _in_reach(self) -> Iterator[None]:
        root = self.root
        with self._reach(), _metrics_kept(root), without_caches(root), _in_form(root, self._forms):
            yield

    def holds_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the layers are those of another call, later."""
        has_same = self._weights == list(map(id, self.model.parameters()))
        return has_same and self._takes(args, kwargs) and not self.is_cut_off()

    def _takes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether another call has arguments of the same kind."""
        try:
            return kind_of_sizes(self.inputs(args, kwargs)) == self._kind
        except OtherCallError:
            return False

    def _calls(self) -> Iterator[CapturedCall]:
        """All calls that these layers are known to run."""
        yield self
        yield from self._of_steps.values()

    def is_cut_off(self) -> bool:
        """Whether a weight that was frozen when layers were found is trained now, and would get no gradient."""
        weights = dict(self.root.named_parameters(remove_duplicate=False))
        frozen = [name for name in self._recipe.frozen if name in weights]
        return any(weights[name].requires_grad and self._recipe.is_cut_off(name) for name in frozen)

    def follow_modes(self) -> None:
        """Capture the model again, when it runs, where parts of it are in other modes than before."""
        training, modes = self.root.training, [part.training for part in self._opened]
        if self._modes.setdefault(training, modes) != modes:
            others = [call._other for call in self._of_steps.values() if call._other is not None]
            for programs in (self._recipe.programs, *(other.programs for other in others)):
                for state in [state for state in programs if state[0] == training]:
                    del programs[state]
            self._modes[training] = modes

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The tensors that the first layer takes.

        Raises:
            OtherCallError: the layers hold for other arguments.
        """
        given, known = self._named(args, kwargs), self._arguments
        self._verify(known, given)
        return tuple(given[name] for name in known if isinstance(known[name], Tensor))

    def _verify(self, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        for name in dict.fromkeys((*known, *given)):
            before, now = known.get(name), given.get(name)
            if not _alike(before, now):
                begins = f"; {FROM_THE_FIRST}" if isinstance(now, Tensor) and before is None else ""
                within = not name.isidentifier()
                given_now = f"without {name}" if within and now is None else f"with {name}={_shown(now)}"
                found_for = "without it" if within and before is None else f"for {name}={_shown(before)}"
                raise OtherCallError(
                    f"{given_now}, and its layers were found {found_for}: call it alike in all steps, in whose "
                    f"tensors alone batches differ{begins}{_what_to_do(name, before, now) * (not begins)}"
                )

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that a call is given, by name; what is None is as if it were left out."""
        args, kwargs = self._in_order(args, kwargs)
        found: dict[str, Any] = {}
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            leaves, structure = flatten(value)
            found.update(zip(written_names_of(structure, name), leaves, strict=True))
        return {name: leaf for name, leaf in found.items() if leaf is not None}

    def as_called(self) -> AbstractContextManager[None]:
        """A context in which a call of the model is what the step calls."""
        return nullcontext()

    def returned(self, outputs: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the model returns, made of what the last layer returns and of its arguments."""
        inputs = self.inputs(args, kwargs)
        tail = self._tail_for(inputs, args, kwargs)
        return tail.run(self.root, outputs if isinstance(outputs, tuple) else (outputs,), inputs)

    def _tail_for(self, inputs: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tail:
        """The end of the model for a whole batch, where its micro-batches have one sample each."""
        own, kind = self._tails[self.root.training], kind_of_sizes(inputs)
        if kind == self._kind:
            return own
        key = kind, self.root.training
        if key not in self._tails_of_kinds:
            # Known already where the runner has followed the step for the whole batch.
            calls = (call for call in self._first._calls() if call.model is self.model)
            known = next((call for call in calls if call._takes(args, kwargs)), None)
            if known is None or self.root.training not in known._tails:
                known = self._again(args, kwargs)
            self._tails_of_kinds[key] = known._tails[self.root.training]
        found = self._tails_of_kinds[key]
        return found if found.num_outputs == own.num_outputs else own

    def _again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CapturedCall:
        """Capture the call anew for arguments in which other sizes are 1, such as a batch of a single sample."""
        return CapturedCall(self.model, self.called, args, kwargs, self._first)

    def returned_for(self, outputs: Any, inputs: Sequence[Tensor]) -> Any:
        """What the model returns, made of what the last layer returns and of the tensors among its arguments."""
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        return self._tails[self.root.training].run(self.root, tensors, inputs)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """Run the model's own code with other tensors among its arguments."""
        leaves, structure = flatten(self._captured.arguments)
        given = iter(inputs)
        args, kwargs = build(structure, [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        with self.as_called(), without_caches(self.root):
            return self.model(*args, **kwargs)

    def _in_order(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments in the order of the model's signature, however they are given."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise OtherCallError(f"so that Python says: {error}") from None
        return bound.args, bound.kwargs


def verb(called: str, singular: str) -> str:
    """A verb behind ``called``, of which some are several."""
    plural = "are" if singular == "is" else singular.removesuffix("s")
    return plural if called.startswith("the modules of ") else singular


def kind_of_sizes(tensors: Iterable[Tensor]) -> Hashable:
    """Which sizes are 1: for one sample, or one word, a model's code often goes another way."""
    return tuple(tuple(size == 1 for size in tensor.shape) for tensor in tensors)


def _alike(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return (before.ndim, before.is_floating_point()) == (now.ndim, now.is_floating_point())
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        return False
    try:
        return before is now or (type(before) is type(now) and bool(before == now))
    except (TypeError, ValueError, RuntimeError):  # arrays, which have no single answer
        return False


def _what_to_do(name: str, before: Any, now: Any) -> str:
    """What to do where arguments that are no tensors change from batch to batch."""
    if not name.isidentifier() and (_is_number(before) or _is_number(now)):
        owner = name.rpartition("[")[0] if name.endswith("]") else name
        return NUMBERS.format(name=owner)
    if not name.isidentifier() and (isinstance(before, str) or isinstance(now, str)):
        return TEXT + CHOICE
    return NUMBER.format(name=name) * (_is_number(before) and _is_number(now)) + CHOICE


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = "floating" if value.is_floating_point() else "integer"
        return f"<{kind} tensor of {value.ndim} dimensions>"
    return repr(value)


def _module_of(layer: Any) -> nn.Module:
    found = layer.module if isinstance(layer, TiedModule) else layer
    assert isinstance(found, nn.Module)
    return found


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _metrics_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Put back what metrics count meanwhile. Of other modules a flag may tell of hooks that are hung and stay."""
    return attributes_kept(part for part in model.modules() if isinstance(part, Metric))


@contextmanager
def _in_form(model: nn.Module, forms: Mapping[int, Tensor]) -> Iterator[None]:
    """Let weights that are on other ranks, of which nothing may be left here, have the sizes that they had."""
    stand_ins: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for part in model.modules():
            tables: tuple[Any, Any] = (part._parameters, part._buffers)
            for table in tables:
                for name, tensor in table.items():
                    form = None if tensor is None else forms.get(id(tensor))
                    if tensor is None or form is None or form.shape == tensor.shape:
                        continue
                    if id(tensor) not in stand_ins:
                        trained = isinstance(tensor, nn.Parameter)
                        stand_ins[id(tensor)] = nn.Parameter(form, tensor.requires_grad) if trained else form
                    stack.callback(table.__setitem__, name, tensor)
                    table[name] = stand_ins[id(tensor)]
        yield


def notes_on_caches(kinds: Iterable[str]) -> list[str]:
    return [f"{kind} runs with use_cache=False: {NO_CACHE}" for kind in kinds]


@contextmanager
def without_caches(model: nn.Module) -> Iterator[list[str]]:
    """Let Hugging Face models make no cache for generation, and give the classes of those that would."""
    kinds = []
    with ExitStack() as stack:
        for part in model.modules():
            config = getattr(part, "config", None)
            if config is not None and getattr(config, "use_cache", None) is True:
                config.use_cache = False
                stack.callback(setattr, config, "use_cache", True)
                kinds.append(type(part).__name__)
        yield kinds
