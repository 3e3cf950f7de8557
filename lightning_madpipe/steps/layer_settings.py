"""What hooks change in layers while training runs: buffers, containers, numbers, modes, hooks, objects.

By such a change a layer may mix samples of a batch from then on, or decide by their numbers, so the layers are
looked at again. What layers change themselves whenever they run, such as running statistics, does not count: what
they hold is noted when the layers of a step have run, and compared when the next step begins. A tensor of at most
1,000 numbers is compared by these, a larger one by the changes that torch counts, a container to some depth.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.generators import members_of
from deepspeed_partition.tensor_values import num_bytes_of
from lightning_madpipe.compat.elsewhere import Elsewhere, HiddenTensors
from lightning_madpipe.compat.unsupported import hooks_of_weight
from lightning_madpipe.steps.forward_reads import facts_of

MOST_NUMBERS = 1000
"""Numbers of a tensor up to which their values are compared."""
MOST_BYTES_SENT = 16 * 2**20
"""Bytes of a changed buffer up to which rank 0 is sent it, which looks at the layers."""
DEPTH = 3
"""Depth in containers and objects to which a value is compared."""

_NUMBERS = frozenset((bool, int, float, str))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_MISSING = object()

Name = tuple[str, str]
"""The path of a module in the LightningModule, and an attribute or a buffer of it."""


class LayerSettings:
    """The layers' attributes and buffers on this rank, to tell whether they are to be looked at again.

    That is at the 1st, 2nd, 4th, 8th ... step before which one of them has been changed, and when an epoch begins.
    It takes some ten microseconds of the processor for each module.

    Args:
        module: The LightningModule.
        elsewhere: Which of its modules are in layers, and hides those of other ranks.
        named: Attributes and buffers in words, such as ``self.net.1.calls``, that layers change themselves.
    """

    def __init__(self, module: nn.Module, elsewhere: Elsewhere, named: Collection[str]) -> None:
        self._module, self._elsewhere, self._named = module, elsewhere, named
        self._seen: dict[Name, Any] | None = None
        self._sums: dict[Name, Tensor] = {}
        self._num_times: Counter[Name] = Counter()
        self._changed: set[Name] = set()
        """What has changed since the layers were looked at."""
        self._parts: list[tuple[str, nn.Module]] = []

    def note(self) -> None:
        """Note what the layers hold now."""
        if not self._parts:  # a hook may not put other ones in their places
            inside = self._elsewhere.inside
            self._parts = [(path, part) for path, part in self._module.named_modules() if part in inside]
        self._seen, self._sums = {}, {}
        for name, value in self._values():
            if isinstance(value, Tensor) and value.numel() <= MOST_NUMBERS and value.layout is torch.strided:
                self._sums[name] = value.detach().clone()
            else:
                self._seen[name] = _facts(value)

    def is_look_due(self, *, epoch_begins: bool) -> bool:
        """Whether something has changed since :meth:`note` or the last look, by which one is due on all ranks."""
        if self._seen is None:
            self.note()
            return False
        changed = [name for name in self._changes(self._seen) if _in_words(name) not in self._named]
        self._changed.update(changed)
        self._num_times.update(changed)
        counts = (self._num_times[name] for name in changed)
        return any(count & (count - 1) == 0 for count in counts) or (epoch_begins and bool(self._changed))

    def bring(self) -> None:
        """Let rank 0, which looks at the layers, have the buffers of others that have changed. Collective."""
        mine = dict(self._changed_buffers())
        self._changed.clear()
        for theirs in gather_objects(mine):
            for (path, name), value in theirs.items():
                table = self._module.get_submodule(path)._buffers
                if isinstance(table, HiddenTensors) and name in table.hidden:
                    _put(table.whole, name, value)

    def _changed_buffers(self) -> Iterator[tuple[Name, Tensor]]:
        for path, name in self._changed:
            table = self._module.get_submodule(path)._buffers
            value = dict.get(table, name)
            if isinstance(value, Tensor) and num_bytes_of(value) <= MOST_BYTES_SENT:
                yield (path, name), value.detach().cpu()

    def _changes(self, seen: Mapping[Name, Any]) -> Iterator[Name]:
        same: list[tuple[Name, Tensor, Tensor]] = []
        for name, value in self._values():
            before = self._sums.get(name)
            if before is None:
                # A buffer that was not here has come with its layer.
                if isinstance(value, Tensor) and name not in seen:
                    continue
                if seen.get(name, _MISSING) != _facts(value):
                    yield name
            elif not isinstance(value, Tensor) or value.shape != before.shape or value.dtype != before.dtype:
                yield name
            else:
                same.append((name, before, value))
        yield from _different(same)

    def _values(self) -> Iterator[tuple[Name, Any]]:
        for path, part in self._parts:
            for name, value in vars(part).items():
                kind = type(value)
                if kind in _NUMBERS:
                    yield (path, name), value
                elif name in _OF_TORCH:
                    if value and name.endswith("_hooks"):
                        yield (path, name), tuple(value)
                elif value is not None and (_is_tensor(value) or _may_be_within(value)):
                    yield (path, name), value
            if part._buffers and not isinstance(part, _NormBase):
                for name, value in _entries(part._buffers):
                    if _is_tensor(value):
                        yield (path, name), value
            for name, weight in _entries(part._parameters):
                if weight is not None and (hooks := hooks_of_weight(weight)):
                    yield (path, f"{name} (hooks)"), tuple(hooks)


def _entries(table: Any) -> Iterable[tuple[str, Any]]:
    """The entries of a module's table as they are; that of a scripted module is no dict."""
    return dict.items(table) if isinstance(table, dict) else table.items()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta


def _may_be_within(value: Any) -> bool:
    """Whether a value has something within it that may change."""
    return isinstance(value, _CONTAINERS) or members_of(value) is not None


def _facts(value: Any) -> Any:
    if type(value) in _NUMBERS:
        return repr(value) if type(value) is float else value  # NaN is no other value than before
    return len(value) if isinstance(value, deque) else facts_of(value, DEPTH)


def _in_words(name: Name) -> str:
    return ".".join(("self", *name))


def _different(same: list[tuple[Name, Tensor, Tensor]]) -> Iterator[Name]:
    """The names of tensors whose numbers are others than before; a device is asked once for each type."""
    by_kind: dict[Any, list[tuple[Name, Tensor, Tensor]]] = {}
    for each in same:
        by_kind.setdefault((each[2].dtype, each[2].device), []).append(each)
    for group in by_kind.values():
        before = torch.cat([old.flatten() for _, old, _ in group])
        if not _are_same(before, torch.cat([new.detach().flatten() for _, _, new in group])):
            yield from (name for name, old, new in group if not _are_same(old, new))


def _are_same(before: Tensor, now: Tensor) -> bool:
    # NaN is no other value than before.
    return torch.equal(before, now) or bool(((before == now) | ((before != before) & (now != now))).all())


def _put(table: dict[str, Any], name: str, value: Tensor) -> None:
    before: Any = table.get(name)
    if isinstance(before, Tensor) and before.shape == value.shape and before.dtype == value.dtype:
        with torch.no_grad():
            before.copy_(value)
    else:
        table[name] = value if before is None else value.to(before.device)
