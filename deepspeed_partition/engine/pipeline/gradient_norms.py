"""``torch.nn.utils.clip_grad_norm_`` in a hook, by the norm over the gradients of all ranks of a pipeline.

A rank has the gradients of its own layers. What a hook gives to ``clip_grad_norm_`` is a part of what it gives in
one process, and so would be the norm. While hooks run that see the gradients of a step, each call brings together
the norms of all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from deepspeed_partition.engine.runtime.collectives import gather_objects

NAME = "_get_total_norm"
"""The function of ``clip_grad`` (torch 2.6 to 2.13) that ``clip_grad_norm_`` takes its norm from. An older torch
has none, and there a hook that clips is told of as one that computes with several parameters."""

GROUPS = "_group_tensors_by_device_and_dtype"
"""The function of ``clip_grad`` (torch 2.1 to 2.13) that ``clip_grad_value_`` takes its gradients from. That of
torch 2.13 raises where there are none, as on a rank whose layers are all frozen."""

ONE_BY_ONE = (
    "a hook clips the norm of gradients one by one, or calls clip_grad_norm_ otherwise on each rank: a rank has "
    "the parameters of its own layers, and so makes another number of calls. Write `clip_grad_norm_(parameter, "
    "...)`, of a tensor and no list, for single parameters, `clip_grad_norm_(self.parameters(), ...)` for the "
    "norm of all, on every rank, or {clips}"
)

NOT_THERE = (
    "a hook clips gradients, and under stage=1, bf16 and fp16 they lie in flat buffers of DeepSpeed's, so that "
    "nothing would be clipped: use {clips}"
)


_Said: TypeAlias = tuple[list[float], bool] | None
"""What a rank says of a call: its norms, and whether it names all gradients; None: it makes no more."""


class GradientNorms:
    """Norms over the gradients of all ranks.

    Args:
        parameters: Gives the parameters of this rank.
        mpu: Who is who in the pipelines, as DeepSpeed's ``PipelineModule.mpu()`` says.
        flattened: Whether DeepSpeed keeps the gradients of a step in buffers of its own.
        refusal: Makes the error that says a sentence.
        is_elsewhere: Whether a tensor stands for one of another rank, where it is counted.
        clips: What clips the norm of all gradients without a hook, in words.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[Tensor]],
        mpu: Any,
        *,
        flattened: bool,
        refusal: Callable[[str], Exception],
        is_elsewhere: Callable[[Tensor], bool],
        clips: str,
    ) -> None:
        self._parameters, self._mpu = parameters, mpu
        self._is_elsewhere, self._clips = is_elsewhere, clips
        self._flattened, self._refusal = flattened, refusal
        self._have_met_for_the_last_time = True

    @contextmanager
    def over_all_ranks(self, why_not: str | None = None) -> Iterator[None]:
        """Let ``clip_grad_norm_`` count all ranks meanwhile. Collective: every rank runs the same hook.

        Args:
            why_not: Why ranks cannot meet here, for which a norm over several gradients is refused; not collective
                then.
        """
        of_one_rank = getattr(clip_grad, NAME, None)
        if of_one_rank is None:
            yield
            return
        self._have_met_for_the_last_time = self._flattened or why_not is not None

        def total_norm(
            tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
        ) -> Tensor:
            if self._flattened:
                raise self._refusal(NOT_THERE.format(clips=self._clips))
            given_to_clip = _first_argument(sys._getframe(1))
            if isinstance(given_to_clip, Tensor):
                return of_one_rank(tensors, norm_type, error_if_nonfinite, foreach)
            if why_not is not None:
                raise self._refusal(why_not)
            return self._total(tensors, float(norm_type), error_if_nonfinite, given_to_clip)

        setattr(clip_grad, NAME, total_norm)
        try:
            with self._values_of_this_rank():
                yield
        except BaseException:
            self._end()
            raise
        else:
            if self._end():
                raise self._refusal(ONE_BY_ONE.format(clips=self._clips))
        finally:
            setattr(clip_grad, NAME, of_one_rank)

    @contextmanager
    def _values_of_this_rank(self) -> Iterator[None]:
        """Let ``clip_grad_value_`` clip what this rank has, which may be nothing."""
        of_torch: Any = getattr(clip_grad, GROUPS, None)
        if of_torch is None:
            yield
            return

        def groups(lists: Any, *arguments: Any) -> Any:
            if self._flattened:
                raise self._refusal(NOT_THERE.format(clips=self._clips))
            return of_torch(lists, *arguments) if any(lists) else {}

        setattr(clip_grad, GROUPS, groups)
        try:
            yield
        finally:
            setattr(clip_grad, GROUPS, of_torch)

    def _total(self, tensors: Any, order: float, error_if_nonfinite: bool, given_to_clip: Any) -> Tensor:
        everything = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = [each for each in everything if not self._is_elsewhere(each)]  # those are counted where they are
        names_all = isinstance(given_to_clip, Iterator) or len(given) < len(everything)
        elsewhere = {id(weight.grad) for weight in self._parameters() if _is_counted_elsewhere(weight)}
        norms = [float(torch.linalg.vector_norm(each, order)) for each in given if id(each) not in elsewhere]
        of_pipelines = self._gathered((norms, names_all))
        everyone = of_pipelines[self._mpu.get_data_parallel_rank()]
        told = [theirs for theirs in everyone if theirs is not None]
        alone = sum(len(theirs) == 1 and not of_all for theirs, of_all in told)
        if len(told) < len(everyone) or alone > 1:
            self._have_met_for_the_last_time = True
            raise self._refusal(ONE_BY_ONE.format(clips=self._clips))
        totals = [
            torch.linalg.vector_norm(
                torch.tensor([norm for theirs in ranks if theirs is not None for norm in theirs[0]]), order
            )
            for ranks in of_pipelines.values()
        ]
        total = torch.stack(totals).mean()  # pipelines may have different experts, and others' weights stay alike
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the total norm of order {order} of the gradients is {float(total)}, so they cannot be clipped: "
                "error_if_nonfinite=False scales them by it nevertheless"
            )
        return total.to(given[0].device) if given else total

    def _end(self) -> bool:
        """Whether another rank waits in a call that this one has not made. Others learn that it makes no more."""
        if self._have_met_for_the_last_time:
            return False
        self._have_met_for_the_last_time = True
        number = self._mpu.get_data_parallel_rank()
        return any(theirs is not None for theirs in self._gathered(None)[number])

    def _gathered(self, mine: _Said) -> dict[int, list[_Said]]:
        """What each rank says, by pipelines."""
        of_pipelines: dict[int, list[_Said]] = {}
        for number, theirs in gather_objects((self._mpu.get_data_parallel_rank(), mine)):
            of_pipelines.setdefault(number, []).append(theirs)
        return of_pipelines


def _first_argument(frame: FrameType) -> Any:
    """What ``clip_grad_norm_`` was called with, a tensor or several, which it turns into a list.

    Args:
        frame: That of ``clip_grad_norm_``, or of a decorator of torch's around the norm.
    """
    found: Any = None
    around: FrameType | None = frame
    while around is not None and around.f_code.co_filename == clip_grad.__file__:
        arguments, keywords = around.f_locals.get("args", ()), around.f_locals.get("kwargs", {})
        found = arguments[0] if arguments else keywords.get("parameters", found)
        around = around.f_back
    return found


def _is_counted_elsewhere(weight: Tensor) -> bool:
    """Whether a tied weight is counted on another rank, by DeepSpeed's own attribute."""
    return bool(getattr(weight, "ds_pipe_replicated", False))
