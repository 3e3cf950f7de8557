"""What layers change outside of themselves while they run, such as a list of the program, and steps or hooks read.

In one process a step finds there what the layers have just left. In a pipeline these run on the ranks that have
them, once per micro-batch, and the step on the last stage: it finds nothing, or what another run has left, and no
gradient comes through it. So each step runs twice before its first batch, on one micro-batch and on rank 0 alone:
once with the layers within it, as in one process, and once with their outputs alone. A step that returns something
else then, or raises, is refused. What it only logs, and what hooks read, is said; so are calls of ``self.log`` in
a layer. Who reads a place is known by the names in the code.

Hooks of the user on layers do not run meanwhile, see ``hooks_that_collect.py``. All is put back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from deepspeed_partition.code_names import STEPS, CodeSearch, forward_of, function_of
from deepspeed_partition.engine.runtime.first_failure import in_words
from deepspeed_partition.engine.runtime.random_state import random_state
from deepspeed_partition.kept_weights import Running, weights_kept
from deepspeed_partition.profiling.attributes import attributes_kept, attributes_of
from deepspeed_partition.profiling.isolation import stand_ins
from lightning_madpipe.finding.captured_calls import CapturedCalls
from lightning_madpipe.module import PipelineCall, called_as_written, outside_pipeline
from lightning_madpipe.steps.batches import map_children
from lightning_madpipe.steps.beside_module import TRAINER, BesideModule
from lightning_madpipe.steps.hooks_of_program import hooks_of_program
from lightning_madpipe.steps.hooks_that_collect import collected_by_hooks
from lightning_madpipe.steps.layers_on_parts import function_of_layer
from lightning_madpipe.steps.micro_batches import MicroBatch
from lightning_madpipe.steps.module_state import buffer_values, buffers_restored, fits, silenced
from lightning_madpipe.steps.reached_objects import attributes_of as attributes_of_object
from lightning_madpipe.steps.step_side_effects import Leftovers, Place, are_held, held_by, look
from lightning_madpipe.steps.tensor_comparison import has_gradient
from lightning_madpipe.steps.user_step import UserSteps

REFUSED = (
    "{layer} changes {place} while it runs, and {step} {depends}: in a pipeline a layer runs on its rank, once "
    "per micro-batch, and {step} on the last stage, where neither the value nor its gradient comes. Let the layer "
    "return it with its output, one number or row for each sample (`return x, value.expand(len(x))`), let the "
    "layers behind it hand it on, and use it in {step}, which gets it from its call of the layers"
)
READ = (
    "{layer} changes {place} while it runs, and {readers} it: in a pipeline a layer runs on its rank, once per "
    "micro-batch and in trials, so that each rank finds other values than one process, or none{logged}. Let the "
    "layer return it with its output, one number or row for each sample (`return x, value.expand(len(x))`), let "
    "the layers behind it hand it on, and keep or log it in the step"
)
OF_MODULE = (
    "{layer} changes {place} while it runs, which is no part of that layer: in a pipeline each rank has its own, "
    "which gets what the layers there do, once per micro-batch, so that it is another one than in one process and "
    "on each rank another one. Let it be an attribute or a buffer of the layer"
)
OF_PART = (
    "{layer} keeps {names} while it runs in the layers: in a pipeline the rank that runs it has what it keeps, "
    "once per micro-batch, and other ranks and hooks find other numbers than in one process. Call it in the step, "
    "on what the layers return"
)
LOGS = (
    "{layers} self.log({names}) while {run}: in a pipeline a layer runs on the rank that has it, once per "
    "micro-batch and in trials, and what it logs there is another number than in one process, or missing. Let it "
    "return the value with its output, with one number for each sample, as in `return x, value.expand(len(x))`, "
    "let the layers behind it hand that on, and log it in the step"
)


class Found(NamedTuple):
    """What is found of a step."""

    refusal: str | None = None
    """Why the step cannot run in a pipeline, and what to do."""
    notes: tuple[tuple[str, str], ...] = ()
    """What is to be said, with the place or the layer of which it is said once, whichever step is looked at."""


class LayerWrites:
    """Finds what layers change outside of themselves, and steps and hooks read.

    Args:
        module: The LightningModule.
        call: Its layers, all of which this process can run.
        steps: Runs its steps.
        ignored: Attributes of the module that are not the user's.
        is_known: Whether a step is refused already that reads an attribute, given its owner and its name.
        layers_see_all: A context in which layers read what they set on themselves, and steps may not read.
    """

    def __init__(
        self,
        module: Any,
        call: PipelineCall,
        steps: UserSteps,
        ignored: Collection[str],
        is_known: Callable[[Any, str], bool],
        layers_see_all: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._module, self._call, self._steps, self._ignored = module, call, steps, ignored
        self._is_known, self._layers_see_all = is_known, layers_see_all
        self._layers = [layer for _, layer in call.existing_modules()]
        # By identity: the hash of a metric changes with what it keeps.
        self._names = {id(part): f"self.{name}" for name, part in module.named_modules() if name}
        self._functions = [function_of_layer(layer) for layer in call.layers]
        self._running: Running = lambda _: nullcontext()
        """Gives the context in which a module's ``forward`` is run without a call of the module."""

    def found(self, micro_batch: MicroBatch, *, device: torch.device, dtype: torch.dtype | None) -> Found:
        """Look at the step of a micro-batch, within a rehearsal.

        Args:
            dtype: What the engine trains in; None for the parameters' own type.
        """
        code = list(self._code_of_layers())
        own = CodeSearch(BesideModule(self._module).is_programs)
        for each in code:
            own.read(*each)
        if not own.functions or (self._call.captured is None and None in self._functions):
            return Found()
        hooks = [(function, type(owner)) for _, owner, function in hooks_of_program(self._module)]
        beside = BesideModule(self._module, more=[*code, *hooks])
        with ExitStack() as stack:
            collecting = [each.function for each in collected_by_hooks(self._module, self._call)]
            stack.enter_context(silenced([self._module, *self._layers], but=collecting))
            if device.type != "cpu" or dtype is not None:
                if not fits(self._layers, device, dtype):
                    return Found()
                stack.enter_context(stand_ins(self._layers, device, dtype=dtype, trains=False))
            else:
                stack.enter_context(attributes_kept(self._layers, buffers=True))
                self._running = stack.enter_context(weights_kept([self._module, *self._layers]))
            stack.enter_context(buffers_restored(buffer_values(self._layers)))
            return self._looked_at(micro_batch, beside, own)

    def _looked_at(self, micro_batch: MicroBatch, beside: BesideModule, own: CodeSearch) -> Found:
        run = _Run(self, micro_batch, beside)
        with run.undone():
            whole = run.with_layers()
        notes = dict(_notes_on_logs(run.logging))
        places = [place for place in run.changed if not self._is_hidden(place)]
        readers = self._readers(beside, own)
        reading = {place: [name for name, reads in readers if reads(place)] for place in places}
        is_said = [place for place in places if reading[place] or place.kind in ("attribute", "buffer")]
        is_said += [place for place in places if place.owner == TRAINER and place not in is_said]
        if not is_said:
            return Found(notes=tuple(notes.items()))
        with run.undone():
            writers = run.writers(is_said)
        step = micro_batch.step
        read_here = [place for place in is_said if step in reading[place]]
        logged: Sequence[str] = ()
        if read_here and whole is not None:
            with run.undone():
                depends, logged = run.compared(whole)
            if depends is not None:
                place = read_here[0]
                return Found(
                    REFUSED.format(
                        layer=self._shown_writer(writers, place), place=place, step=step, depends=depends
                    )
                )
        kept: dict[str, list[str]] = {}
        for place in is_said:
            layer = self._shown_writer(writers, place)
            if place not in read_here and self._is_left_out(writers.get(place)):
                continue
            if not reading[place] and place in writers and self._is_own(place, writers[place]):
                kept.setdefault(layer, []).append(place.name)  # such as a metric, with all of its counts
                continue
            if not reading[place]:
                notes[str(place)] = OF_MODULE.format(layer=layer, place=place)
                continue
            names = ", ".join(map(repr, logged)) if place in read_here else ""
            words = f"; what {step} logs as {names} is another number" if names else ""
            verb = "reads" if len(reading[place]) == 1 else "read"
            readers_in_words = f"{_in_words(reading[place])} {verb}"
            notes[str(place)] = READ.format(layer=layer, place=place, readers=readers_in_words, logged=words)
        for layer, names_kept in kept.items():
            notes[f"keeps {layer}"] = OF_PART.format(layer=layer, names=_in_words(names_kept))
        return Found(notes=tuple(notes.items()))

    def _is_hidden(self, place: Place) -> bool:
        if place.kind != "attribute":
            return False
        return self._is_known(self._module.get_submodule(place.owner), place.name)

    def _code_of_layers(self) -> Iterator[tuple[Any, type | None]]:
        """What runs where layers do, and the class of each method."""
        for layer in (*self._layers, *([self._target] if self._call.captured is not None else [])):
            for part in layer.modules():
                yield forward_of(part), type(part)
                for value in attributes_of(part).values():
                    if function_of(value) is not None:
                        owner = getattr(value, "__self__", None)
                        yield value, None if owner is None else type(owner)
        for layer in self._call.layers:
            if not isinstance(layer, nn.Module) and function_of(layer) is not None:
                yield layer, None

    @property
    def _target(self) -> Any:
        return self._call.target(self._module)

    def _readers(self, beside: BesideModule, own: CodeSearch) -> list[tuple[str, Callable[[Place], bool]]]:
        """Steps and hooks, in words, each with what tells whether its code names a place."""
        run_in_layers = set(map(id, own.functions))
        found = []
        for words, owner, function in hooks_of_program(self._module):
            search = CodeSearch(beside.is_programs)
            search.read(function, type(owner))
            if owner is self._module and function.__name__ in STEPS:
                for _, part in outside_pipeline(self._module):
                    if part is not owner:
                        search.read(forward_of(part), type(part))
            if id(function) not in run_in_layers:
                found.append((words, _reads(search, beside)))
        return found

    def call_of(self, path: str | None, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Run layers where a step calls them.

        Args:
            path: The module that is called, where the layers are of several.
        """
        captured = self._call.captured
        if captured is None:
            passed: Any = arguments[0] if len(arguments) == 1 else tuple(arguments)
            for function in self._functions:
                assert function is not None, "else nothing is looked at"
                passed = function(passed)
            return passed
        target = self._target
        if path is not None:
            assert isinstance(captured.now, CapturedCalls)
            target = captured.now.modules[path]
        with called_as_written(target), self._running(target):
            return target.forward(*arguments, **keywords)

    def shown(self, part: nn.Module) -> str:
        """A part of a layer, as the user writes it."""
        return f"{self._names.get(id(part), 'a layer')} ({type(part).__name__})"

    def _shown_writer(self, writers: Mapping[Place, nn.Module], place: Place) -> str:
        return self.shown(writers[place]) if place in writers else "a layer"

    def _is_left_out(self, writer: nn.Module | None) -> bool:
        """Whether layers do not run the code that writes, which is said where they are compared with forward."""
        captured = self._call.captured
        return captured is not None and writer is not None and captured.is_opened(writer)

    def _is_own(self, place: Place, part: nn.Module) -> bool:
        """Whether a place is a part's own attribute or buffer."""
        return place.kind in ("attribute", "buffer") and self._module.get_submodule(place.owner) is part


class _Run:
    """Runs of a step on one micro-batch, as in one process and as in a pipeline."""

    def __init__(self, writes: LayerWrites, micro_batch: MicroBatch, beside: BesideModule) -> None:
        self._writes, self._micro_batch, self._beside = writes, micro_batch, beside
        self.changed: list[Place] = []
        """What the layers have changed."""
        self.logging: dict[str, list[str]] = {}
        """What parts of layers log, by the part in words."""
        self._objects: Mapping[str, Any] = {}
        """What is reached from the module and from what code names, by name."""
        self._outputs: list[Any] = []
        """What each call of the layers returned."""
        self._ends: list[Callable[[], None]] = []
        """Puts the common generators where each call of the layers left them."""

    @contextmanager
    def undone(self) -> Iterator[None]:
        before = self._look()
        self._objects = before.objects
        try:
            yield
        finally:
            before.undo()

    def _look(self) -> Leftovers:
        writes = self._writes
        return Leftovers(writes._module, writes._ignored, undoable=True, beside=self._beside)

    def with_layers(self) -> _Outcome | None:
        """Run the step with the layers within it; None where it raises, which is told where it runs for good."""
        changed: dict[Place, None] = {}
        inside: list[nn.Module] = []
        running = False

        def run(path: str | None, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
            nonlocal running
            before, running = self._look(), True
            modules = {place: (part, held_by(part)) for place, part in self._beside.modules_at().items()}
            try:
                with self._writes._layers_see_all(), _followed(inside, lambda: None):
                    outputs = self._writes.call_of(path, arguments, keywords)
            finally:
                running = False
                changed.update((change.place, None) for change in before.changes())
                for place, (part, held) in modules.items():  # such as a metric of the file
                    if not are_held(held, held_by(part)):
                        changed[place] = None
            self._outputs.append(_copied(outputs))
            self._ends.append(random_state())
            return outputs

        def note(name: str) -> bool:
            if running:
                part = self._writes.shown(inside[-1]) if inside else "a layer"
                names = self.logging.setdefault(part, [])
                names += [name] if name not in names else []
            return running

        try:
            return self._of_step(run, note)
        except Exception:
            return None
        finally:
            self.changed = list(changed)

    def writers(self, places: Sequence[Place]) -> dict[Place, nn.Module]:
        """The innermost parts of layers that change places."""
        found: dict[Place, nn.Module] = {}
        inside: list[nn.Module] = []
        seen: dict[Place, Callable[[Any], bool]] = {}

        def check() -> None:
            for place in places:
                value = self._value(place)
                has_changed = place in seen and seen[place](value)
                if has_changed and inside and place not in found:
                    found[place] = inside[-1]
                if has_changed or place not in seen:
                    seen[place] = _differs_from(value, place)

        def run(path: str | None, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
            check()
            with self._writes._layers_see_all(), _followed(inside, check):
                return self._writes.call_of(path, arguments, keywords)

        try:
            self._of_step(run, lambda _: False)
        except Exception:
            return found
        return found

    def _value(self, place: Place) -> Any:
        module = self._writes._module
        if place.kind == "object":
            return (attributes_of_object(self._objects.get(place.owner)) or {}).get(place.name, _MISSING)
        if place.kind == "beside":
            try:
                return self._beside.table(place.owner, place.name).get(place.name, _MISSING)
            except KeyError:
                return _MISSING
        owner = module.get_submodule(place.owner)
        return (owner._buffers if place.kind == "buffer" else vars(owner)).get(place.name, _MISSING)

    def compared(self, whole: _Outcome) -> tuple[str | None, list[str]]:
        """Run the step with the outputs of the layers alone.

        Returns:
            What of the step depends on what layers have changed, in words, and what it logs of that.
        """
        try:
            alone = self._alone()
        except Exception as error:
            return f"raises {in_words(error)} without that", []
        logged = [name for name, value in whole.logged.items() if not _are_same(value, alone.logged.get(name))]
        if _are_same(whole.returned, alone.returned):
            return None, logged
        again = self._alone()
        if not _are_same(alone.returned, again.returned):
            return None, []  # it is another one each time
        what = "has a loss that depends on it" if self._micro_batch.step == "training_step" else "returns it"
        return what, logged

    def _alone(self) -> _Outcome:
        left = list(zip(self._outputs, self._ends, strict=True))

        def answer(*_: Any) -> Any:
            outputs, end = left.pop(0)
            end()
            return _copied(outputs)

        return self._of_step(answer, lambda _: False)

    def _of_step(
        self,
        run: Callable[[str | None, Sequence[Any], dict[str, Any]], Any],
        is_of_layer: Callable[[str], bool],
    ) -> _Outcome:
        logged: dict[str, Any] = {}

        def log(*arguments: Any, **keywords: Any) -> None:
            name, value = [*arguments, *(keywords[key] for key in ("name", "value") if key in keywords)][:2]
            if not is_of_layer(name):
                logged[name] = value

        returned = self._writes._steps.run_apart(dataclasses.replace(self._micro_batch), run, log)
        return _Outcome(returned, logged)


class _Outcome(NamedTuple):
    """What a step returns and logs."""

    returned: Any
    logged: dict[str, Any]


_MISSING = object()


def _reads(search: CodeSearch, beside: BesideModule) -> Callable[[Place], bool]:
    """What tells whether code names a place."""

    def reads(place: Place) -> bool:
        if place.kind == "object":
            of_module = place.owner.removeprefix("self.").partition(".")[0].partition("[")[0]
            if place.owner.startswith("self.") and of_module in search.written:
                return True
            roots = (str(Place(owner, "beside", key)) for owner, key in search.found)
            return any(place.owner == root or place.owner.startswith((f"{root}.", f"{root}[")) for root in roots)
        own = beside.name_at(place)
        if own is None:
            return place.name in search.written
        return any(key == own.key and each.is_at(own) for (_, key), each in search.found.items())

    return reads


def _notes_on_logs(logging: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """What is said of parts of layers that log, each with the names, with what it is known by."""
    if not logging:
        return
    names = list(dict.fromkeys(name for each in logging.values() for name in each))
    shown = ", ".join([*map(repr, names[:3]), *["..."] * (len(names) > 3)])
    layers = f"{_in_words(list(logging))} call{'s' if len(logging) == 1 else ''}"
    run = "it runs" if len(logging) == 1 else "they run"
    yield f"logs {names}", LOGS.format(layers=layers, names=shown, run=run)


def _differs_from(value: Any, place: Place) -> Callable[[Any], bool]:
    """Return what tells whether what stands at a place is another thing than this is now."""
    if isinstance(value, nn.Module):
        held = held_by(value)
        return lambda now: now is not value or not are_held(held, held_by(now))
    if value is _MISSING:
        return lambda now: now is not _MISSING
    seen = look(value, False, {})
    return lambda now: now is _MISSING or seen.difference(place, now) is not None


@contextmanager
def _followed(inside: list[nn.Module], check: Callable[[], None]) -> Iterator[None]:
    """Keep in a list meanwhile which modules run, and look before and behind each."""

    def enter(part: nn.Module, _: Any) -> None:
        check()
        inside.append(part)

    def leave(part: nn.Module, _: Any, __: Any) -> None:
        check()
        if inside:
            inside.pop()

    handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        inside.clear()


def _copied(outputs: Any) -> Any:
    if not isinstance(outputs, Tensor):
        return map_children(outputs, _copied)
    copy = outputs.detach().clone()
    # No leaf, which a step could not change in place.
    return copy.requires_grad_().clone() if outputs.requires_grad and has_gradient(copy) else copy


def _are_same(left: Any, right: Any) -> bool:
    """Whether two values are the same in their numbers; of objects that is taken to be so."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        if not left.is_floating_point():
            return torch.equal(left, right)
        return torch.allclose(left, right, rtol=1e-5, atol=1e-7, equal_nan=True)
    if isinstance(left, Tensor | float | int) and isinstance(right, Tensor | float | int):
        values = [
            float(each.detach()) if isinstance(each, Tensor) and each.numel() == 1 else each
            for each in (left, right)
        ]
        if any(isinstance(each, Tensor) for each in values):
            return False
        return all(map(math.isnan, values)) or math.isclose(*values, rel_tol=1e-5, abs_tol=1e-7)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_are_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_are_same, left, right))
    return type(left) is type(right)


def _in_words(names: Sequence[str]) -> str:
    shown = [*names[:3], *["others"] * (len(names) > 3)]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
