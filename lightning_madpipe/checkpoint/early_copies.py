"""Copies of weights that a resumed run makes before its checkpoint is loaded.

In one process Lightning loads the weights of a checkpoint before ``configure_optimizers`` and ``on_fit_start``.
Here both come first, as with Lightning's own DeepSpeed strategy, which reads them into the optimizer's engine: a
copy that one of them makes has the weights that the model had before. Unless something puts the checkpoint's into
it, that is said before the first step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.tensor_values import has_memory, version_of
from lightning_madpipe.steps.list_in_words import some

BEFORE_THE_CHECKPOINT = (
    "{places}: copies of weights, made by configure_optimizers or on_fit_start before the checkpoint was loaded, "
    "so they have the weights from before it; in one process they have those of the checkpoint. Make them in "
    "on_train_start, or save them in on_save_checkpoint and load them in on_load_checkpoint"
)
_FIRST = 8
"""Numbers at the beginning of a tensor, of which those of weights are rarely equal."""


class EarlyCopies:
    """Looks for copies of weights that were made in a run before its checkpoint was loaded.

    Args:
        walk: Yields what the program holds beside its layers, by place.
    """

    def __init__(self, walk: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        self._walk = walk
        self._there: frozenset[str] = frozenset()
        self._found: dict[int, tuple[Tensor, Tensor, Any]] = {}
        """Copies, each with the weight that it was made of, and what tells whether it has changed since."""

    def begin(self) -> None:
        """Begin a run: what is there now was there before a checkpoint would be loaded in one process, too."""
        there = (place for place, value in self._walk() if any(True for _ in _tensors_of(value)))
        self._there, self._found = frozenset(there), {}

    def before_loading(self, weights: Iterable[Tensor]) -> None:
        """Note the copies of weights that the run has made so far.

        Args:
            weights: Those of this rank, before the checkpoint's are loaded into them.
        """
        known: dict[Any, list[Tensor]] = defaultdict(list)
        own = [weight for weight in weights if _tells(weight)]
        for weight in own:
            known[_mark(weight)].append(weight)
        for _, tensors in self._made():
            for tensor in filter(_tells, tensors):
                for weight in known.get(_mark(tensor), ()):
                    if tensor is not weight and torch.equal(tensor.detach(), weight.detach()):
                        self._found[id(tensor)] = tensor, weight, (version_of(tensor), _mark(tensor))

    def tell(self) -> None:
        """Say once which of these copies are as they were, and their weights are not; called before each step."""
        if not self._found:
            return
        stale = {
            key
            for key, (tensor, weight, mark) in self._found.items()
            if (version_of(tensor), _mark(tensor)) == mark and not torch.equal(tensor.detach(), weight.detach())
        }
        places = [place for place, tensors in self._made() if any(id(tensor) in stale for tensor in tensors)]
        self._found = {}
        if places:
            warn_once("copies before the checkpoint", BEFORE_THE_CHECKPOINT.format(places=some(places)))

    def _made(self) -> Iterator[tuple[str, list[Tensor]]]:
        for place, value in self._walk():
            if place not in self._there:
                yield place, list(_tensors_of(value))


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, nn.Module):
        for part in value.modules():
            for table in (part._parameters, part._buffers):
                # A scripted module's are no dicts; what a copy hides is not in them past their class.
                values: Iterable[Any] = dict.values(table) if isinstance(table, dict) else table.values()
                yield from (each for each in values if isinstance(each, Tensor))
    elif isinstance(value, dict):
        yield from (tensor for tensor in dict.values(value) if isinstance(tensor, Tensor))
    elif isinstance(value, Tensor):
        yield value
    else:
        yield from (tensor for tensor in value if isinstance(tensor, Tensor))


def _tells(tensor: Tensor) -> bool:
    """Whether a tensor is one that can be told from others: not of zeros, ones or a single number."""
    if not has_memory(tensor) or tensor.numel() < 2 or not tensor.dtype.is_floating_point:
        return False
    first = tensor.detach().reshape(-1)
    return bool((first != first[0]).any())


def _mark(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tuple(tensor.detach().reshape(-1)[:_FIRST].tolist())
