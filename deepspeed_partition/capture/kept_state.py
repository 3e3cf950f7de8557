"""What a model's code keeps in attributes from one run for the next, as for truncated backpropagation.

Written down, the code would begin each run with what was there in the capture. So the model is recorded once more,
and what it reads of the attributes that it sets is noted: what it has not yet set then comes from the run before.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from deepspeed_partition.capture.element_attributes import attributes_noted, of_class, subclass_of
from deepspeed_partition.capture.left_behind import Left, is_no_librarys
from deepspeed_partition.capture.owner_reads import reads_attribute_of
from deepspeed_partition.capture.reads_in_code import ReadsInCode
from deepspeed_partition.capture.recorder import LEFT_ALONE, CaptureError
from deepspeed_partition.capture.recording import AttributeSet, Call, InPlace, Recording, Ref, Template
from deepspeed_partition.capture.sizes import dimensions_in
from deepspeed_partition.capture.weights_without_data import storage_of
from deepspeed_partition.code_names import CodeSearch, forward_of

KEEPS = "its code keeps {} for its next run"


def keep_state_that_matters(recording: Recording, again: Callable[[Sequence[Left]], Recording]) -> None:
    """Keep modules whole whose code keeps something for its next run, and note what the model's own code keeps.

    Args:
        again: Records the same once more, which begins with what a run has left behind.
    """
    _keep_changed_in_place(recording)
    _keep_left_numbers(recording)
    if not recording.sets and not recording.left:
        return
    numbers = {key for key, each in recording.sets.items() if type(each.value) in (int, float)}
    second: Recording | None = None
    # Where a table is missing that a number stands for, it may raise, and nothing more is known.
    with _reads_noted(recording.modules, recording.sets, numbers) as read, suppress(Exception):
        second = again(recording.left)
    for owner, name in _kept(recording, numbers, read, second.sets if second is not None else {}):
        each = recording.sets[owner, name]
        _keep(recording, each.scope, written_name(owner, name), each.line)
    if second is not None:
        _keep_left(recording, second)


def _keep_left(recording: Recording, second: Recording) -> None:
    """Note what a second run reads in containers and variables of what the first one has left there."""
    scopes = {call.target: call for call in _modules_in(recording.root)}
    kept = set()
    for call, value, line in _uses_in(second.root, second.begun_with):
        kept.add(second.begun_with[value])
        _keep(recording, scopes.get(call.target, recording.root), second.begun_with[value], line)
    for each in recording.left:
        filling = second.filled_by.get(each.written)
        if filling is None:
            continue
        filling = scopes.get(filling.target, recording.root)
        if _counts(each, second, recording.modules[filling.target]):
            _keep(recording, filling, each.written, "")
        elif kept.isdisjoint(each.members):
            recording.unfilled.setdefault(each.written, filling)


def _counts(left: Left, second: Recording, setting: nn.Module) -> bool:
    """Whether numbers that code reads are others after each run."""
    later = next((each.members for each in second.left if each.is_of(left)), {})
    numbers = {shown: value for shown, value in later.items() if type(value) in (int, float)}
    changed = [shown for shown, value in numbers.items() if left.members.get(shown) != value]
    return bool(changed) and left.is_read(reads_of(setting), changed)


def reads_of(*parts: nn.Module) -> ReadsInCode:
    """What the code of modules reads."""
    search = CodeSearch(is_no_librarys)
    for part in parts:
        search.read(forward_of(part), type(part))
    return ReadsInCode(search.functions)


def _modules_in(call: Call) -> Iterator[Call]:
    yield call
    for inner in call.calls:
        if inner.is_module:
            yield from _modules_in(inner)


def _uses_in(call: Call, values: Container[int]) -> Iterator[tuple[Call, int, str]]:
    """Where code uses some values: the module whose code does, the value, and the line."""
    for inner in call.calls:
        yield from ((call, value, inner.where) for value in inner.given.refs() if value in values)
        if inner.is_module:
            yield from _uses_in(inner, values)
    dimensions = (size for each in call.conditions for size in dimensions_in(each.expression))
    yield from ((call, each.value, call.where) for each in dimensions if getattr(each, "value", None) in values)
    returned = call.returned.refs() if call.returned is not None else []
    yield from ((call, value, call.where) for value in returned if value in values)


def _keep(recording: Recording, scope: Call, shown: str, line: str) -> None:
    """Note that the code of a module keeps something."""
    if scope is recording.root:
        recording.kept.setdefault(shown, line)
    else:
        scope.why_whole = scope.why_whole or KEEPS.format(shown + f" ({line})" * bool(line))


def _keep_left_numbers(recording: Recording) -> None:
    """Let modules stay whole whose code reads numbers that a module within them has left when it ran alone.

    Raises:
        CaptureError: the model's own code reads one.
    """
    by_time = {call.time: call for call in _modules_in(recording.root)}
    for scope, path, name in recording.left_numbers:
        for around in (by_time[time] for time in reversed(scope.scopes)):
            if reads_attribute_of(recording.modules[around.target], recording.modules[path], path, name):
                if around is recording.root:
                    raise CaptureError(LEFT_ALONE.format(owner=scope.target, what=f"the number {name}", where=""))
                _keep(recording, around, written_name(path, name), "")
                break


def _keep_changed_in_place(recording: Recording) -> None:
    """Note tensors that are neither weights nor buffers, and that code changes in place and reads.

    What some modules' code does so, a module stays whole that holds them all.
    """
    by_time = {call.time: call for call in _modules_in(recording.root)}
    for shown, each in recording.in_place.items():
        if not each.calls:
            continue
        readings = list(_readings_of(recording, recording.root, each))
        if not readings:
            recording.unfilled.setdefault(shown, each.scopes[0])
            continue
        chains = [[*scope.scopes, scope.time] for scope in each.scopes] + [chain for chain, _ in readings]
        shared = [calls[0] for calls in zip(*([by_time[time] for time in chain] for chain in chains), strict=False)
                  if len({call.target for call in calls}) == 1]  # fmt: skip
        for holder in by_time.values():
            if holder.target == shared[-1].target:
                _keep(recording, holder, shown, readings[0][1])


def _readings_of(recording: Recording, call: Call, changed: InPlace) -> Iterator[tuple[list[int], str]]:
    """Where code reads a tensor for more than to change it, or to look at it: its modules, and the line."""

    def is_it(leaf: Any) -> bool:
        return _memory_of(recording, leaf) in changed.memories

    for inner in call.calls:
        if inner.is_module:
            yield from _readings_of(recording, inner, changed)
        is_read = any(map(is_it, _leaves(inner.given))) and not any(map(is_it, _leaves(inner.returned)))
        if is_read and not any(inner is each for each in changed.calls):
            yield [*call.scopes, call.time], inner.where
    if any(map(is_it, _leaves(call.returned))):
        yield [*call.scopes, call.time], call.where


def _leaves(template: Template | None) -> Sequence[Any]:
    return () if template is None else template.leaves


def _memory_of(recording: Recording, leaf: Any) -> int | None:
    if isinstance(leaf, torch.Tensor):
        return storage_of(leaf)
    return recording.values[leaf.value].storage if isinstance(leaf, Ref) else None


def written_name(owner: str, name: str) -> str:
    """How the model's own code calls an attribute of a module."""
    return ".".join(filter(None, ("self", owner, name)))


def _kept(
    recording: Recording, numbers: set[tuple[str, str]], read: Container[tuple[str, str]],
    second: Mapping[tuple[str, str], AttributeSet],
) -> list[tuple[str, str]]:  # fmt: skip
    """The attributes that a second run reads before it sets them; the numbers that it sets to others again.

    A number that code only counts, or shows, is none: processes may count otherwise.
    """
    counted = {
        (owner, name)
        for owner, name in numbers & second.keys()
        if second[owner, name].value != recording.sets[owner, name].value
        and reads_of(
            recording.modules[owner], recording.modules[recording.sets[owner, name].scope.target]
        ).has_attribute(name)
    }
    return [key for key in recording.sets if key in (counted if key in numbers else read)]


@contextmanager
def _reads_noted(
    modules: Mapping[str, nn.Module], sets: Mapping[tuple[str, str], AttributeSet], numbers: set[tuple[str, str]]
) -> Iterator[set[tuple[str, str]]]:
    """Note which attributes are read before they are set meanwhile; numbers are those of the first run."""
    read: set[tuple[str, str]] = set()
    made: set[tuple[nn.Module, str]] = set()
    members: dict[str, dict[str, Any]] = {}

    def noting(owner: str, name: str) -> property:
        def get(module: nn.Module) -> Any:
            if (module, name) not in made:
                read.add((owner, name))
            table = vars(module)
            return table[name] if name in table else nn.Module.__getattr__(module, name)

        return property(get, lambda module, value: vars(module).__setitem__(name, value))

    with ExitStack() as stack:
        for owner, name in sets:
            table = vars(modules[owner])
            if (owner, name) in numbers:
                stack.callback(table.__setitem__, name, table[name])
                table[name] = sets[owner, name].value
            else:
                members.setdefault(owner, {})[name] = noting(owner, name)
        for owner, own in members.items():
            kind = type(modules[owner])
            stack.enter_context(of_class(modules[owner], subclass_of(kind, own)))
        stack.enter_context(attributes_noted(lambda module, name: made.add((module, name))))
        yield read
