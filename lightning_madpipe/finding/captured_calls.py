"""Several calls that a step makes, such as of an encoder and a decoder, as one pipeline.

The step itself is run without data, up to what its last call returns. What each call was given and returned comes
out of the layers. Where the step runs, its calls return that, one after the other, and what it gives them must be
what they were computed from.

A tensor that a call or the step changes in place (``total += each``) is written down as it was at each call, in
copies; where a call changes what it is given, so does what stands for it in the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn import functional as F
from torchmetrics import Metric

from deepspeed_partition.capture.decisions import Undecided
from deepspeed_partition.capture.graph import Graph
from deepspeed_partition.capture.recorder import CaptureError, DrawsApartError, patched
from deepspeed_partition.capture.recording import Call
from deepspeed_partition.capture.structure import flatten
from deepspeed_partition.capture.tail import leave_out
from deepspeed_partition.capture.without_data import hidden_functions
from deepspeed_partition.engine.runtime.first_failure import in_words
from lightning_madpipe.finding.captured_call import CapturedCall, OtherCallError
from lightning_madpipe.finding.changed_in_place import ChangedInPlace
from lightning_madpipe.finding.step_call import SILENT, do_nothing, line_of_users, replaced, rest_of_arguments

_SIGNATURE = inspect.signature(lambda batch: None)
WAY_OUT = "put what the step calls into forward(), and call self(...) there"

BETWEEN = (
    "{step} draws random numbers for a call of a module at {lines}, between its calls, and the layers would draw "
    "other ones. Let it draw them before, and make one call that is given what is drawn, such as "
    "self(x, torch.randn(len(x), 8)), whose forward() calls the modules; dropout can stand in forward() itself"
)


class CapturedCalls(CapturedCall):
    """The calls of modules with trained weights in a step.

    Args:
        module: The LightningModule.
        step: The name of its step.
        batch: What the step is given.
        paths: The modules with trained weights, whichever the step calls.
        first: The call that layers were made of, if these are to run these calls, too.

    Raises:
        CaptureError: they cannot be written down.
        OtherCallError: the step raises something without data.
    """

    def __init__(
        self, module: Any, step: str, batch: Any, paths: Sequence[str], first: CapturedCall | None = None
    ) -> None:
        self._step, self._paths = step, paths
        self.made: tuple[str, ...] = ()
        """The modules that are called, in order."""
        self._in_place = ChangedInPlace()
        self._drawn: tuple[str, ...] = ()
        """The lines that draw what a call is given."""
        self._around_call: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._error: Exception | None = None
        self._found: tuple[int, Exception | None] = 0, None
        self._num_made = 0
        """The most calls that the step has made, with data or without."""
        try:
            super().__init__(module, f"the modules of {step}()", (batch,), {}, first)
        except DrawsApartError as error:
            raise DrawsApartError(f"{error}. The loss may draw behind the last call") from None
        except CaptureError:
            if self.made or self._error is None:
                raise
            line, raised = line_of_users(self._error), " ".join(in_words(self._error).split()).removesuffix(".")
            raise OtherCallError(
                f"{step} raises at {line} where it is run without data, before it makes a call: {raised}"
            ) from self._error
        if not self.made:
            raise OtherCallError(f"no call of {step} can be followed") from self._error
        if self._drawn and "" not in self.made:
            raise OtherCallError(BETWEEN.format(step=step, lines=" and ".join(self._drawn)))
        self._found = len(self.made), self._error

    def _signature_of(self, model: Any) -> inspect.Signature:
        return _SIGNATURE

    def _be_first(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        with self._as_forward(self.model):
            super()._be_first(args, kwargs)
            if self._in_place.has_found():
                super()._be_first(args, kwargs)

    def _be_another(self, first: CapturedCall, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        super()._be_another(first, args, kwargs)
        if self._in_place.has_found():
            super()._be_another(first, args, kwargs)

    @contextmanager
    def _as_forward(self, module: Any) -> Iterator[None]:
        """Let a call of the module be its step, which returns what its calls were given and returned."""
        calls: list[tuple[str, Any, Any]] = []
        in_place = self._in_place
        inside = False
        raised: list[str] = []

        def called(path: str, run: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal inside
                if inside:
                    return run(*args, **kwargs)
                inside = True
                given = in_place.given(len(calls), (args, kwargs))
                try:
                    with self._around_call():
                        returned = run(*args, **kwargs)
                except Exception:
                    raised.append(path)
                    raise
                finally:
                    inside = False
                calls.append((path, given, in_place.returned(len(calls), (args, kwargs), returned)))
                return returned

            return call

        forward = called("", module.forward)
        is_running = False

        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_running
            if is_running:
                return forward(*args, **kwargs)
            is_running = True
            calls.clear()
            raised.clear()
            self._error = None
            in_place.begin()
            call = nn.Module.__call__

            def run_alone(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
                """Note what stands for a module that a capture has run alone, for want of data."""
                num_calls, num_raised = len(calls), len(raised)
                returned = call(part, *args, **kwargs)
                if len(raised) > num_raised:
                    calls[num_calls:] = [(raised.pop(), (args, kwargs), (returned, ()))]
                return returned

            try:
                # Distributions ask whether what they are made of is in their range; the step does, with data.
                without_questions = patched(Distribution, "_validate_args", False)
                with patched(nn.Module, "__call__", run_alone), without_questions:
                    getattr(module, self._step)(*args, *rest_of_arguments(module, self._step))
            except Exception as error:  # of what comes after the last call, such as a loss that asks for data
                self._error = error
            finally:
                is_running = False
            with hidden_functions():  # what it looks at is no step's
                in_place.end()
            self.made = tuple(path for path, *_ in calls)
            self._num_made = max(self._num_made, len(calls))
            return [(given, returned) for _, given, returned in calls]

        step.ends_in_a_loss = True  # type: ignore[attr-defined]  # which is computed where the step runs
        step.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
        step.__wrapped__ = getattr(module, self._step)  # type: ignore[attr-defined]  # whose lines are told
        with ExitStack() as stack:
            for path in self._paths:
                part = module.get_submodule(path)
                stack.enter_context(replaced(part, "forward", called(path, part.forward)))
            for part in module.modules():
                if isinstance(part, Metric):
                    stack.enter_context(replaced(part, "forward", _zero))
            for name in SILENT:
                stack.enter_context(replaced(module, name, do_nothing))
            stack.enter_context(replaced(module, "forward", step))
            yield

    def _cut(self, graph: Graph, training: bool) -> None:
        needed: set[int] = set()
        returned = set(graph.returned.refs())
        waiting = [graph.producer[value] for value in returned if value in graph.producer]
        of_returned = {graph.values[value].storage for value in returned}
        waiting += [node.number for node in graph.nodes if not of_returned.isdisjoint(node.mutated)]
        while waiting:
            number = waiting.pop()
            if number not in needed:
                needed.add(number)
                waiting += graph.nodes[number].after
        leave_out(graph, {node.number for node in graph.nodes} - needed)
        self._drawn = tuple(dict.fromkeys(self._lines_drawn_between(graph)))
        super()._cut(graph, training)

    def _lines_drawn_between(self, graph: Graph) -> Iterator[str]:
        """The lines of the step's own code, outside of its calls, by which numbers are drawn that a call is given.

        The code of ``forward`` is among them where the step calls the module itself.
        """
        for call in (node.call for node in graph.nodes if len(node.call.scopes) == 1):
            is_called = call.is_module and call.target in self.made
            if not is_called and _draws(call):
                yield Path(call.where).name

    def why_fewer(self) -> str:
        """Why the layers run fewer calls than the step has made since, with data; empty where they do not."""
        number, error = self._found
        if error is None or self._num_made == number:
            return ""
        found = "1 is found: behind it" if number == 1 else f"{number} are found: behind these"
        does = (
            "asks whether a tensor is true" if isinstance(error, Undecided) else f"raises {type(error).__name__}"
        )
        return (
            f"{self._step} makes {self._num_made} calls, of which {found} {self._step} {does} at "
            f"{line_of_users(error)}, where it is run without data"
        )

    @contextmanager
    def _in_reach(self) -> Iterator[None]:
        with super()._in_reach(), self._as_forward(self.model):
            yield

    def _again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CapturedCall:
        return self  # what its calls returned, and no loss

    def as_called(self) -> AbstractContextManager[None]:
        return self._as_forward(self.model)

    def each_within(self, context: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
        """Let each call that the step makes run within ``context``; what it does by itself is outside of it."""
        return replaced(self, "_around_call", context)

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        given = {name: leaf for name, leaf in self._named(args, kwargs).items() if isinstance(leaf, Tensor)}
        known = {name: leaf for name, leaf in self._arguments.items() if isinstance(leaf, Tensor)}
        self._verify(known, given)
        return tuple(given[name] for name in known)

    def answers(self, outputs: Any, batch: Any) -> Callable[[str, Any, Any], Any]:
        """What stands for the modules in a step: it returns what they did, for the outputs of the layers."""
        made = zip(self.made, self.returned(outputs, (batch,), {}), strict=True)
        calls = iter(enumerate(made))

        def answer(path: str, args: Any, kwargs: Any) -> Any:
            number, (found, (given, (returned, after))) = next(calls, (0, ("", (None, (None, ())))))
            if given is None and self._error is not None:
                raise OtherCallError(
                    f"behind the calls that its layers were found from: for a micro-batch {self._step} raises "
                    f"{type(self._error).__name__} ({self._error}) between them. Let its code take any number of "
                    f"samples, such as len(x) for a size that is kept, or {WAY_OUT}"
                )
            if given is None or found != path or not _same(given, (args, kwargs)):
                draws = f" (random numbers are drawn at {' and '.join(self._drawn)})" if self._drawn else ""
                raise OtherCallError(
                    f"with something else than when its layers were found from the calls of {self._step}{draws}, "
                    f"or in another order: {WAY_OUT}; or train with num_micro_batches=1, if what they are given "
                    "depends on other samples of the batch, as by a mean over all of them"
                )
            return self._in_place.happen(number, (args, kwargs), returned, after)

        return answer

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules that are called."""
        return {path: self.model.get_submodule(path) for path in self.made}


def _draws(call: Call) -> bool:
    """Whether a torch function draws, or a module by one; of modules that were run alone nobody knows."""
    if call.is_module:
        return any(map(_draws, call.calls))
    # Attention has a dropout of its own, which seldom draws.
    return call.effects.random and call.target is not F.scaled_dot_product_attention


def _zero(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(())


def _same(before: Any, now: Any) -> bool:
    left, right = flatten(before)[0], flatten(now)[0]
    return len(left) == len(right) and all(map(_is_same, left, right))


def _is_same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        # A batch of all micro-batches is multiplied in another order than each of them.
        same = before.shape == now.shape and before.dtype == now.dtype
        return same and torch.allclose(before.detach(), now.detach(), rtol=1e-3, atol=1e-5, equal_nan=True)
    return type(before) is type(now) and bool(before == now)
