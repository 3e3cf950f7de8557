"""What a model's code keeps in attributes from one run for the next, as for truncated backpropagation.

Written down, the code would begin each run with what was there in the capture. So the model is recorded once more,
and what it reads of the attributes that it sets is noted: what it has not yet set then comes from the run before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import nn

from deepspeed_partition.capture.element_attributes import attributes_noted, of_class, subclass_of
from deepspeed_partition.capture.left_behind import is_no_librarys
from deepspeed_partition.capture.recording import AttributeSet, Recording
from deepspeed_partition.code_names import CodeSearch, forward_of
from deepspeed_partition.names_of_forward import loads_attribute

KEEPS = "its code keeps {} for its next run"


def keep_state_that_matters(recording: Recording, again: Callable[[], Recording]) -> None:
    """Keep modules whole whose code keeps something for its next run, and note what the model's own code keeps.

    Args:
        again: Records the same once more.
    """
    for owner, name in _kept(recording, again) if recording.sets else ():
        each = recording.sets[owner, name]
        shown = written_name(owner, name)
        if each.scope is recording.root:
            recording.kept[shown] = each.line
        else:
            each.scope.why_whole = each.scope.why_whole or KEEPS.format(f"{shown} ({each.line})")


def written_name(owner: str, name: str) -> str:
    """How the model's own code calls an attribute of a module."""
    return ".".join(filter(None, ("self", owner, name)))


def _kept(recording: Recording, again: Callable[[], Recording]) -> list[tuple[str, str]]:
    """The attributes that a second run reads before it sets them; the numbers that it sets to others again.

    A number that code only counts, or notes, is none: processes may count otherwise.
    """
    numbers = {key for key, each in recording.sets.items() if type(each.value) in (int, float)}
    second: Mapping[tuple[str, str], AttributeSet] = {}
    # Where a table is missing that a number stands for, it may raise, and nothing more is known.
    with _reads_noted(recording.modules, recording.sets, numbers) as read, suppress(Exception):
        second = again().sets
    counted = {
        (owner, name)
        for owner, name in numbers & second.keys()
        if second[owner, name].value != recording.sets[owner, name].value
        and _is_read(recording.modules[owner], recording.modules[recording.sets[owner, name].scope.target], name)
    }
    return [key for key in recording.sets if key in (counted if key in numbers else read)]


def _is_read(owner: nn.Module, setting: nn.Module, name: str) -> bool:
    """Whether the code of a module, or of the one that sets its attribute, reads that."""
    search = CodeSearch(is_no_librarys)
    for part in (owner, setting):
        search.read(forward_of(part), type(part))
    return any(loads_attribute(function.__code__, name) for function in search.functions)


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
