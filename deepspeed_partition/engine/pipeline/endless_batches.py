"""What one run without a drain keeps of its batches: whether a rank still computes, and what layers hold.

Forwards that run ahead of their call may be given up, in a rest. What they have changed of their layers, buffers,
counters and other attributes, is then put back: else a counter would count these micro-batches twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from deepspeed_partition.dropped_writing import writing_noted
from deepspeed_partition.engine.pipeline.batch_attempt import Batch, Failure
from deepspeed_partition.engine.pipeline.before_step import SMALL_BYTES, Buffers
from deepspeed_partition.engine.pipeline.beside_layers import name_of
from deepspeed_partition.engine.pipeline.unlike_recordings import set_since, values_read
from deepspeed_partition.engine.runtime.environment import warn_here, warn_once
from deepspeed_partition.generators import common_states, is_tracked, set_common_state
from deepspeed_partition.kept_values import said_of
from deepspeed_partition.profiling.attributes import HeldState, Known, Place
from deepspeed_partition.tensor_values import is_computed, num_bytes_of

SET_BETWEEN = (
    "{names} of {owner} was set between two calls of train_batch, and forwards of the "
    "next batch have run ahead with what it was before (weight_versions {mode!r}). Call engine.come_to_rest() on "
    "every rank before it is set; or leave weight_versions out"
)
STAYS = (
    "forwards that ran ahead are forgotten, and {owner} keeps tensors of more than 1 MiB that "
    "they have changed: register them as buffers"
)

WHEN_AHEAD = "by forwards that ran ahead and are forgotten"
WRITTEN_AHEAD = (
    "forwards that ran ahead are forgotten, and have written to {names}: that stays, and is written once more "
    "when they run again. Write in the program's loop"
)
MOST_NAMED = 3

DRAWN_AHEAD = (
    "forwards that ran ahead are forgotten, and others have drawn from a common random generator ({name}) since: "
    "their micro-batches get other numbers when they run again. seed_layers=True gives each its own"
)


class EndlessAttempt(Batch):
    """A run in which some rank may fail, and none then computes any more."""

    @property
    def has_failed(self) -> bool:
        return not self._computes

    @property
    def failure(self) -> Failure | None:
        return self._failure

    def told_failure(self) -> Failure | None:
        """What this rank has met, for the others."""
        return self._failure and self._portable(self._failure)

    def go_without(self) -> None:
        """Compute no more."""
        self._compute_no_more()

    def forget(self, stage: int, number: int) -> None:
        """Forget a micro-batch that has had its backward on a stage."""
        self._input_shapes.pop((stage, number), None)


class HeldByLayer:
    """What one layer, or the loss function, holds in attributes, and in variables that its code names.

    Args:
        number: of the layer; None: it is the loss function.
        function: that runs it.
    """

    def __init__(self, number: int | None, function: Any) -> None:
        self.number, self.function = number, function
        what = "the loss function" if number is None else f"layer {number}"
        self.in_words = f"{what} ({name_of(function)})"
        self.state = HeldState([function])
        self._large: dict[int, tuple[Tensor, int]] = {}
        """Tensors of more than 1 MiB, with the number of their changes then."""
        self._changing: set[int] = set()

    def remembered(self, known: Known | None = None) -> Callable[[Collection[Place]], None]:
        """Note what the layer holds beside buffers; return what puts it back, but for some places.

        Args:
            known: what layers before it have noted at this instant.
        """
        before, self._large = self._large, {}

        def copies(value: Any) -> bool:
            if isinstance(value, nn.Parameter) or is_computed(value):
                return False  # what is computed is replaced, not changed
            is_small = num_bytes_of(value) <= SMALL_BYTES
            if is_small or not isinstance(value, Tensor) or value.is_inference():
                return is_small
            if before.get(id(value), (value, value._version))[1] != value._version:
                self._changing.add(id(value))
            self._large[id(value)] = value, value._version
            return id(value) in self._changing

        restore = self.state.remembered(buffers=False, copies=copies, known=known, iterators=True)
        large = [each for key, each in self._large.items() if key not in self._changing]

        def put_back(spared: Collection[Place]) -> None:
            if any(value._version != version for value, version in large):
                warn_here(STAYS.format(owner=self.in_words))
            restore(spared)

        return put_back


class StateOfStages:
    """What the layers of each stage hold, as it was before its forwards on a batch that may be given up.

    Args:
        layers: of each stage of this rank.
        num_ahead: most batches of which forwards run before their call; 0: nothing is kept.
        mode: ``weight_versions``.
    """

    def __init__(self, layers: Mapping[int, Sequence[HeldByLayer]], num_ahead: int, mode: str) -> None:
        self._layers, self._mode = layers, mode
        self._num_kept = num_ahead + 1 if num_ahead else 0
        self._restore: dict[int, dict[int, list[Callable[[Collection[Place]], None]]]] = {
            each: {} for each in layers
        }
        self._buffers: dict[int, list[Buffers]] = {}
        self._left: dict[int, list[dict[Place, tuple[str, Any]]]] = {}
        self._read: dict[int, dict[str, Any]] = {}
        """What captured code reads, when the program got on."""
        self._set: set[Place] = set()
        """What the program has set between two calls: it stays."""
        for stage, each in layers.items():
            modules = nn.ModuleList([held.function for held in each if isinstance(held.function, nn.Module)])
            has_any = any(True for _ in modules.buffers())
            self._buffers[stage] = [Buffers(modules) for _ in range(self._num_kept + 1 if has_any else 0)]

    def begin(self, stage: int, batch: int) -> None:
        """Note what a stage's layers hold before its first forward on a batch."""
        if not self._num_kept:
            return
        kept, copies = self._restore[stage], self._buffers[stage]
        kept.pop(batch - self._num_kept - 1, None)
        known: Known = {}
        kept[batch] = [held.remembered(known) for held in self._layers[stage]]
        if copies:
            kept[batch].append(copies[batch % len(copies)].before_step(all_of_them=False))

    def leave(self) -> None:
        """Note what layers hold when the program gets on."""
        if self._num_kept:
            self._left = {stage: [held.state.look() for held in layers] for stage, layers in self._layers.items()}
            self._read = values_read()

    def come_back(self, *, rests: bool = False) -> None:
        """Say what the program has set since, which holds for a part of the next batch alone.

        Args:
            rests: Whether forwards that ran ahead are forgotten now: layers of captured code then run them again
                with what was set.
        """
        for stage, looks in self._left.items():
            for held, left in zip(self._layers[stage], looks, strict=True):
                now = held.state.look()
                places = [place for place in {**left, **now} if left.get(place) != now.get(place)]
                self._set.update(places)
                if places:
                    names = sorted({(now.get(place) or left[place])[0] for place in places})
                    words = {"names": ", ".join(names[:3]), "owner": held.in_words, "mode": self._mode}
                    warn_once(f"set between/{held.number}/{names[0]}", SET_BETWEEN.format(**words))
        for model, names in ({} if rests else set_since(self._read)).items():
            words = {"names": ", ".join(names[:3]), "owner": model, "mode": self._mode}
            warn_once(f"set between/{model}/{names[0]}", SET_BETWEEN.format(**words))
        self._left, self._read = {}, {}

    def put_back(self, batch: int) -> None:
        """Let the forwards of a batch, and of those behind it, not have been."""
        with said_of(WHEN_AHEAD):
            for kept in self._restore.values():
                for restore in kept.get(batch, ()):
                    restore(self._set)
                kept.clear()
        for layers in self._layers.values():
            for held in layers:
                held.state.let_iterators_stand_again()


class WrittenAhead:
    """What forwards have written to before the call of their batch, which nobody takes back."""

    def __init__(self) -> None:
        self._written: dict[int, list[str]] = {}
        """In words, by the numbers of batches."""

    @contextmanager
    def noted(self, batch: int) -> Iterator[None]:
        """Note what a forward writes to that runs ahead."""
        found: list[str] = []
        with writing_noted(found):
            yield
        if found:
            self._written.setdefault(batch, []).extend(found)

    def tell(self, batch: int) -> None:
        """Say once what was written for this batch and those behind it, whose forwards are forgotten."""
        names = {name: None for each, written in self._written.items() if each >= batch for name in written}
        self._written.clear()
        if names:
            told = ", ".join([*names][:MOST_NAMED])
            warn_once(f"written ahead/{told}", WRITTEN_AHEAD.format(names=told))


class _Draws(NamedTuple):
    """What a forward on a batch has drawn from the common generators."""

    batch: int
    before: dict[str, Any]
    after: dict[str, Any]


class DrawnAhead:
    """What forwards have drawn from the common generators before the call of their batch.

    Args:
        has_seeds: whether each micro-batch has seeds of its own on each layer.
    """

    def __init__(self, *, has_seeds: bool) -> None:
        self._has_seeds = has_seeds
        self._draws: list[_Draws] = []

    @contextmanager
    def noted(self, batch: int) -> Iterator[None]:
        """Note what a forward draws that runs ahead."""
        before = common_states()
        yield
        self._draws.append(_Draws(batch, before, common_states()))

    def keep_from(self, batch: int) -> None:
        """Forget about batches before this one: their call has come."""
        if self._draws:
            self._draws = [each for each in self._draws if each.batch >= batch]

    def put_back(self, batch: int) -> None:
        """Let nothing have been drawn for this batch and those behind it, where nothing else was drawn since."""
        self.keep_from(batch)
        if not self._draws:
            return
        # Each micro-batch has seeds of torch, Python and NumPy on each layer then.
        now = {name: state for name, state in common_states().items() if not self._has_seeds or is_tracked(name)}
        for name in now:
            states = [each.before.get(name) for each in self._draws[1:]] + [now[name]]
            draws = [each.after.get(name) for each in self._draws]
            first = self._draws[0].before.get(name)
            if draws == states and first is not None:
                set_common_state(name, first)
            elif any(each.before.get(name) != each.after.get(name) for each in self._draws):
                warn_once(f"drawn ahead/{name}", DRAWN_AHEAD.format(name=name))
        self._draws.clear()
