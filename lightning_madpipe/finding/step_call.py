"""What a step calls: found by running it on an example batch up to its first call of a module that trains."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torchmetrics import Metric

from deepspeed_partition.engine.runtime.random_state import preserved_random_state

LIBRARIES = (
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_madpipe", "torchmetrics",
    "transformers", "diffusers", "accelerate", "peft",
)  # fmt: skip
"""What is no code of the user's."""
SILENT = ("log", "log_dict", "print")


class StepCall(NamedTuple):
    """A call that a step makes."""

    path: str
    """The module that is called; empty for the LightningModule itself."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def attribute(self) -> str:
        """What ``PipelineCall`` calls it."""
        return self.path or "forward"

    @property
    def in_words(self) -> str:
        """How a step writes it."""
        return f"self.{self.path}()" if self.path else "self()"


class SeveralCallsError(ValueError):
    """A step calls a module that does not have all trained weights."""


class _Called(BaseException):
    """Ends a step at its call of a module; no ``except Exception`` of the user's may stop it."""


def find_call(module: Any, step: str, batch: Any, undone: Callable[[], AbstractContextManager[None]]) -> StepCall:
    """The first call of a module with trained weights that a step makes for a batch.

    Args:
        undone: A context in which the step runs, and after which what it has set is undone.

    Raises:
        ValueError: it makes none, or one of a module that does not have all trained weights; or it asks for an
            attribute that is not there yet.
    """
    own, paths = trained(module)
    try:
        made = call_among(module, step, batch, undone, paths)
    except AttributeError as error:  # mostly of what a hook sets
        raise ValueError(
            f"{step} of {type(module).__name__} raises {type(error).__name__} ({error}) at {line_of_users(error)} "
            f"where it runs once to see what it calls, before {_where_it_is_set(module, error)}"
        ) from error
    if made is None:
        raise ValueError(
            f"{step} of {type(module).__name__} calls neither self() nor a module whose weights are trained, so "
            "its layers are unknown"
        )
    call, line = made
    part = module.get_submodule(call.path)
    missing = [name for name, weight in module.named_parameters() if weight in own - set(part.parameters())]
    if missing:
        raise SeveralCallsError(
            f"{step} of {type(module).__name__} calls {call.in_words} at {line}, which has not all trained "
            f"weights ({', '.join(missing[:3])}{', ...' * (len(missing) > 3)} not), and a pipeline runs one call: "
            "put what the step calls into forward(), and call self(...) there"
        )
    return call


def _where_it_is_set(module: Any, error: AttributeError) -> str:
    """Who sets what a step has read too early, and what to read instead."""
    code = getattr(type(module).configure_optimizers, "__code__", None)
    instructions = [] if code is None else dis.get_instructions(code)
    names = [each.argval for each in instructions if each.opname == "STORE_ATTR"]
    of_optimizers = [f"self.{name}" for name in names if f"'{name}'" in str(error)]
    if of_optimizers:
        return (
            f"configure_optimizers(), which sets {of_optimizers[0]}: read an optimizer in the step as "
            "self.optimizers(), a learning-rate scheduler as self.lr_schedulers(), and make anything else in "
            "__init__()"
        )
    return "any hook of an epoch or a batch: set what it reads in __init__() or setup()"


def call_among(
    module: Any, step: str, batch: Any, undone: Callable[[], AbstractContextManager[None]], paths: Sequence[str]
) -> tuple[StepCall, str] | None:
    """The first call of some modules that a step makes for a batch, and its line; None if it makes none."""
    found: list[tuple[StepCall, str]] = []
    with ExitStack() as stack:
        stack.enter_context(preserved_random_state())
        stack.enter_context(undone())
        stack.enter_context(torch.no_grad())
        for path in paths:
            stack.enter_context(replaced(module.get_submodule(path), "forward", _ending(path, found)))
        for name in SILENT:
            stack.enter_context(replaced(module, name, do_nothing))
        with suppress(_Called):
            getattr(module, step)(batch, *rest_of_arguments(module, step))
    return found[0] if found else None


def trained(module: Any) -> tuple[set[Any], list[str]]:
    """The trained weights of a module, and the paths of the modules that have some, the module itself among them.

    A metric may compute with a network of its own, which nobody trains.
    """
    own = {weight for weight in module.parameters() if weight.requires_grad}
    of_metrics = {part for metric in module.modules() if isinstance(metric, Metric) for part in metric.modules()}
    own -= {weight for part in of_metrics for weight in part.parameters(recurse=False)}
    paths = [
        path
        for path, part in module.named_modules()
        if part not in of_metrics and not own.isdisjoint(part.parameters())
    ]
    return own, paths


def rest_of_arguments(module: Any, step: str) -> tuple[int, ...]:
    """What a step is given after the batch: the batch's number, and the loader's where it asks for it.

    Others, and a loader's number that it can do without, have their defaults.
    """
    rest = list(inspect.signature(getattr(module, step)).parameters.values())[1:]
    positional = [each for each in rest if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return (0,) * len([each for each in positional if each is positional[0] or each.default is each.empty])


def _ending(path: str, found: list[tuple[StepCall, str]]) -> Callable[..., Any]:
    def end(*args: Any, **kwargs: Any) -> None:
        found.append((StepCall(path, args, kwargs), line_that_runs()))
        raise _Called

    return end


def line_that_runs() -> str:
    """The line of the user's code that runs."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def line_of_users(error: BaseException) -> str:
    """The innermost line of the user's code in a traceback."""
    found, trace = "an unknown line", error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_globals.get("__name__", "").partition(".")[0] not in (*LIBRARIES, "deepspeed_partition"):
            found = f"{Path(frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing, where a step logs."""


@contextmanager
def replaced(part: Any, name: str, value: Any) -> Iterator[None]:
    """Put ``value`` in the instance dictionary, where it is found before methods and child modules."""
    missing = object()
    table = vars(part)
    before = table.get(name, missing)
    try:
        table[name] = value
        yield
    finally:  # without a call before it is put back: a signal handler may raise behind each
        if before is missing:
            table.pop(name, None)
        else:
            table[name] = before
