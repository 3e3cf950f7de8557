"""What a program puts in the place of DeepSpeed's instructions and schedules.

DeepSpeed calls instructions through ``PipelineEngine._INSTRUCTION_MAP``, a dictionary, in the order that
``TrainSchedule.steps`` gives. Programs replace entries of the one and methods of the other. Lists of instructions
and DeepSpeed's schedule have the end of a batch in common (``AT_THE_END``): what stands in these places is called.
Where anything else is replaced, DeepSpeed's own schedule runs, with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

AT_THE_END = {
    schedule.ReduceTiedGrads: "_exec_reduce_tied_grads",
    schedule.ReduceGrads: "_exec_reduce_grads",
    schedule.OptimizerStep: "_exec_optimizer_step",
}
METHODS = {
    **AT_THE_END,
    schedule.LoadMicroBatch: "_exec_load_micro_batch",
    schedule.ForwardPass: "_exec_forward_pass",
    schedule.BackwardPass: "_exec_backward_pass",
    schedule.SendActivation: "_exec_send_activations",
    schedule.RecvActivation: "_exec_recv_activations",
    schedule.SendGrad: "_exec_send_grads",
    schedule.RecvGrad: "_exec_recv_grads",
}
"""The methods of an engine that run instructions, by the class of the instruction."""
SCHEDULES = ("TrainSchedule", "InferenceSchedule")
MADE_BY = ("_train_schedule", "_inference_schedule")
"""The methods of an engine that give a schedule."""
DEEPSPEED = "deepspeed.runtime."
KNOWN = (DEEPSPEED, "deepspeed_partition.", "lightning_madpipe.", "abc.", "builtins.")
"""Modules whose functions nobody has replaced."""
Instruction = Callable[..., Any]
_ABSENT = object()


class Replaced:
    """What a program has put in the places of instructions and schedules, looked for anew where anything changed.

    Args:
        engine: whose instructions they are.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine
        self._seen: Seen | None = None
        self._instructions: dict[type, Instruction] = {}
        self._why_not_lists: str | None = None

    @property
    def instructions(self) -> dict[type, Instruction]:
        """Return what :func:`replaced_instructions` returns."""
        self._look()
        return self._instructions

    @property
    def why_not_lists(self) -> str | None:
        """Return what :func:`why_not_lists` returns."""
        self._look()
        return self._why_not_lists

    def _look(self) -> None:
        if self._seen is None or not self._seen.is_as_it_was(self._engine):
            self._instructions = replaced_instructions(self._engine)
            self._why_not_lists = why_not_lists(self._engine)
            self._seen = Seen(self._engine)


class Seen:
    """All that the functions below look at, as it is now: where it stays so, they find the same.

    Args:
        engine: whose instructions they look at.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._orders = [each.__mro__ for each in _classes_looked_at(engine)]
        classes = [each for order in self._orders[:-1] for each in order if each is not object]
        for each in self._orders[-1]:
            classes.append(each)
            if not _is_foreign(each):
                break  # ours and what it derives from is known
        self._maps = _maps_looked_at(engine)
        tables: list[Mapping[Any, Any]] = [*map(vars, classes), *self._maps]
        self._tables = [(each, dict(each)) for each in tables]

    def is_as_it_was(self, engine: PipelineEngine) -> bool:
        """Whether nothing of it has been replaced since."""
        if any(now is not before for now, before in zip(_maps_looked_at(engine), self._maps, strict=True)):
            return False
        for each, order in zip(_classes_looked_at(engine), self._orders, strict=True):
            if each.__mro__ is not order:  # a class keeps the same tuple until it has other bases
                return False
        return all(now == before for now, before in self._tables)


def _maps_looked_at(engine: PipelineEngine) -> tuple[dict[type, Instruction], ...]:
    return PipelineEngine._INSTRUCTION_MAP, engine._INSTRUCTION_MAP


def _classes_looked_at(engine: PipelineEngine) -> list[type]:
    return [*[getattr(schedule, name) for name in SCHEDULES], type(engine)]


def replaced_instructions(engine: PipelineEngine) -> dict[type, Instruction]:
    """What stands in the places of instructions: in the engine's map, in DeepSpeed's, or as an overriding method.

    DeepSpeed does not see methods that override its own. An engine that derives from ours means them.
    """
    found: dict[type, Instruction] = {}
    for kind, name in METHODS.items():
        method = _overriding(type(engine), name)
        if method is not None:
            found[kind] = method
    for instructions in (PipelineEngine._INSTRUCTION_MAP, engine._INSTRUCTION_MAP):
        found.update({kind: function for kind, function in instructions.items() if _is_foreign(function)})
    return found


def why_not_lists(engine: PipelineEngine) -> str | None:
    """Why lists of instructions would not do what the program asks for; None where they do."""
    for name in SCHEDULES:
        for each in getattr(schedule, name).__mro__:
            if _is_foreign(each):
                return f"schedule.{name} is {_named(each)}"
            if not each.__module__.startswith(DEEPSPEED):
                continue
            for attribute, value in vars(each).items():
                function = value.fget if isinstance(value, property) else value
                if callable(function) and _is_foreign(function):
                    return f"{each.__name__}.{attribute} was replaced by {_named(function)}"
    for name in MADE_BY:
        method = _overriding(type(engine), name)
        if method is not None:
            return f"{_named(method)} makes a schedule of its own"
    for kind, function in replaced_instructions(engine).items():
        if kind not in AT_THE_END:
            return f"{kind.__name__} was replaced by {_named(function)}"
    return None


def instructions_of(engine: PipelineEngine) -> dict[type, Instruction]:
    """What DeepSpeed's own schedule is to call: ours, and what is replaced in its place."""
    ours = next(
        vars(each)["_INSTRUCTION_MAP"]
        for each in type(engine).__mro__
        if not _is_foreign(each) and "_INSTRUCTION_MAP" in vars(each)
    )
    return {**PipelineEngine._INSTRUCTION_MAP, **ours, **replaced_instructions(engine)}


@contextmanager
def shown_as(owner: object, name: str, value: object) -> Iterator[None]:
    """Let an attribute of ``owner`` have another value for a while.

    It is neither assigned nor deleted, which ``nn.Module`` does not allow, or does otherwise, with the name of one
    of its children. What an instance has itself stands before these.
    """
    own = vars(owner)
    before = own.get(name, _ABSENT)
    own[name] = value
    try:
        yield
    finally:
        if before is _ABSENT:
            del own[name]
        else:
            own[name] = before


def _overriding(engine_class: type, name: str) -> Instruction | None:
    """A method of a class that the user has derived from one of ours."""
    for each in engine_class.__mro__:
        if not _is_foreign(each):
            return None
        if name in vars(each):
            method: Instruction = vars(each)[name]
            return method
    return None


def _is_foreign(thing: Any) -> bool:
    return _is_foreign_module(getattr(thing, "__module__", "") or "")


@functools.lru_cache(maxsize=1024)
def _is_foreign_module(name: str) -> bool:
    return not f"{name}.".startswith(KNOWN)


def _named(thing: Any) -> str:
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    return f"{module}.{name}" if module and name else repr(thing)
