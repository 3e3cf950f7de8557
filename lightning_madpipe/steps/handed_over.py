"""Layers that hand something over beside their outputs: a dictionary that two of them have, a list, a global.

In one process a layer finds there what an earlier one has left for it. In a pipeline that one runs on another
rank, and several micro-batches are under way. So the layers run in order on some samples, then on others, and
then each alone, the last one first, on what it was given at first. A layer that raises now, or gives something
else, has taken something from an earlier one. One that gives something else in order, too, keeps something itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed_partition.engine.runtime.random_state import preserved_random_state
from deepspeed_partition.kept_weights import weights_kept
from deepspeed_partition.profiling.attributes import attributes_kept
from lightning_madpipe.steps.tensor_comparison import close

Tensors = tuple[Tensor, ...]
Run = Callable[[int, Tensors], Tensors]

HANDED_OVER = (
    "{taker} does not compute from its input alone: it takes something that {giver} leaves beside its output, as "
    "in a dictionary, and only what a layer returns goes from rank to rank. Make one layer of both and of all "
    "between them, such as one nn.Sequential, or let the layers hand it on: `return x, skip`"
)


class HandOver(NamedTuple):
    """Two layers, by their places, of which one takes something beside its input that the other has left."""

    giver: int | None
    """None where it cannot be told."""
    taker: int

    def in_words(self, names: Sequence[str]) -> str:
        """Say what is wrong and what to do; ``names`` are the layers in words."""
        giver = "an earlier layer" if self.giver is None else names[self.giver]
        return HANDED_OVER.format(taker=names[self.taker], giver=giver)


def hand_over(
    functions: Sequence[Callable[[Any], Any] | None],
    modules: Sequence[list[nn.Module]],
    some: Tensors,
    others: Tensors,
) -> HandOver | None:
    """The last layer that takes something from an earlier one beside its input; None: none, or it cannot be told.

    Args:
        functions: What runs each, on this process; None where it cannot, and the look ends before it.
        modules: The modules of each.
        some: What the first layer is given for some samples.
        others: That for other samples.
    """
    number = next((place for place, function in enumerate(functions) if function is None), len(functions))

    def run(place: int, given: Tensors) -> Tensors:
        function = functions[place]
        assert function is not None
        copies = tuple(tensor.detach().clone() for tensor in given)
        torch.manual_seed(place)
        with ExitStack() as stack:
            for module in modules[place]:  # a function may read its weights without a call of it
                stack.enter_context(running(module))
            outputs = function(copies[0] if len(copies) == 1 else copies)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)

    everything = [module for group in modules for module in group]
    kept = attributes_kept(everything, buffers=True)
    with preserved_random_state(), torch.no_grad(), kept, weights_kept(everything) as running:
        try:
            first = _in_order(run, number, some)
            _in_order(run, number, others)
        except Exception:  # it is told where the layers run for good
            return None
        alone = next((place for place in reversed(range(1, number)) if not _repeats(run, place, first)), None)
        if alone is None:
            return None
        try:
            again = _in_order(run, number, some)
            _in_order(run, number, others)
        except Exception:
            return None
        if not _equal(first[alone + 1], again[alone + 1]):
            return None  # it keeps something of its own
        return HandOver(_giver(run, alone, first), alone)


def _in_order(run: Run, number: int, inputs: Tensors) -> list[Tensors]:
    """What stands before each layer, and behind the last one."""
    passed = [inputs]
    for place in range(number):
        passed.append(run(place, passed[-1]))
    return passed


def _repeats(run: Run, place: int, passed: Sequence[Tensors]) -> bool:
    """Whether a layer gives alone what it gave in order."""
    try:
        return _equal(run(place, passed[place]), passed[place + 1])
    except Exception:
        return False


def _giver(run: Run, taker: int, passed: Sequence[Tensors]) -> int | None:
    """The one layer behind which the other gives what it gave in order."""
    for place in reversed(range(taker)):
        with suppress(Exception):
            run(place, passed[place])
            if _repeats(run, taker, passed):
                return place
    return None


def _equal(left: Tensors, right: Tensors) -> bool:
    return len(left) == len(right) and all(map(close, left, right))
