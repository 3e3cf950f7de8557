"""What layers and the loss function change beside their modules: it goes with them where they move.

That is: variables around their code, of their file and of their classes, such as a global counter, and what layers
and a loss function hold that are objects, methods, functions or partials (``state_held.py``). A process has such a
variable of its own, in which only the rank that ran the layer has counted. What is no data, as a generator, stays
behind, and that is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from deepspeed_partition.code_names import Name
from deepspeed_partition.engine.pipeline.beside_layers import differing_caches, name_of, names_beside
from deepspeed_partition.engine.pipeline.stages import allocation_of, owner
from deepspeed_partition.engine.repartition.object_states import ObjectState, object_state
from deepspeed_partition.engine.repartition.part_descriptions import Sent, sendable, take
from deepspeed_partition.engine.repartition.state_held import STAYS_HELD, Place, StateHeld, take_held
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.planner.allocation import Allocation

STAYS = (
    "{written} ({kind}), which {who} reads, has changed where that ran, and is another one on rank {rank}, which "
    "runs it now: numbers, tensors, arrays and containers of these go with a layer or a loss, and other objects "
    "only where they are attributes of it (self.meter = ...)"
)


CACHE_STAYS = (
    "{written} keeps results (lru_cache), and those that {who} has got stay on rank {rank}, which no longer runs "
    "it. It seems to read what changes, or to draw random numbers, so that results may be others: keep "
    "them in a dict of the layer (self.results = {{}}), which goes with it"
)


class Changed(NamedTuple):
    """A variable that a layer, or the loss function, has changed on the rank that ran it."""

    who: str
    written: str
    sent: Sent
    place: Place | None = None
    """Where it stands in what the layer holds itself; None of a variable that others read, too."""
    whole: ObjectState | None = None
    """What it is, to be compared, where it does not go."""

    def is_as(self, value: Any) -> bool:
        """Whether it does not go, and is the same as one here."""
        return self.whole is not None and self.whole.is_as(object_state(value, {}))


class StateBeside:
    """The variables beside the layers of a rank and beside the loss function.

    Args:
        module: of the pipeline.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._first: dict[tuple[int, str], Any] = {}
        """What tells each from what it is after a change, by the layer that reads it, when it came here."""
        self._held = StateHeld()

    def remember(self) -> None:
        """Note what is here of the layers that have come, and of the loss function."""
        for place, name in self._names():
            self._first.setdefault((place, name.written), sendable(name.value).mark)
        self._held.remember(self._functions())

    def leaving(self, allocation: Allocation) -> dict[int, list[Changed]]:
        """Gather what was changed of layers that go to another rank; by their number. Collective."""
        module = self._module
        rank, present, last = module.mpu().get_stage_id(), allocation_of(module), module._num_layers - 1
        found: dict[int, list[Changed]] = {}
        for place, name in self._names():
            layer = min(place, last)
            if owner(present, layer) != rank or owner(allocation, layer) == rank:
                continue
            sent = sendable(name.value)
            if self._first.get((place, name.written), sent.mark) != sent.mark:
                whole = None
                if not sent.can_be_taken:
                    whole = object_state(name.value, {})
                    sent = replace(sent, mark=None)  # which may have keys that cannot be pickled
                found.setdefault(place, []).append(Changed(self._who(place), name.written, sent, whole=whole))
        for layer, function in self._functions():
            at = min(layer, last)
            if owner(present, at) == rank and owner(allocation, at) != rank:
                self._tell_of_caches(layer, function, rank)
                held = self._held.changed(layer, function)
                found.setdefault(layer, []).extend(Changed(self._who(layer), *each) for each in held)
        everything: dict[int, list[Changed]] = {}
        for of_rank in gather_objects(found, module.mpu().get_pipe_parallel_group()):
            everything.update(of_rank)
        return everything

    def arrive(self, changed: dict[int, list[Changed]]) -> None:
        """Give the variables of layers that have come what they have got on the ranks that ran them."""
        module = self._module
        rank, present, last = module.mpu().get_stage_id(), allocation_of(module), module._num_layers - 1
        here = {(place, name.written): name for place, name in self._names()}
        functions = dict(self._functions())
        self._held.begin_arrival(functions)
        for place, names in changed.items():
            for each in names if owner(present, min(place, last)) == rank else ():
                if each.place is not None:
                    if not take_held(functions[place], each.place, each.sent):
                        words = STAYS_HELD.format(
                            written=each.written, kind=each.sent.kind, who=each.who, rank=rank
                        )
                        warn_once(f"stays beside/{each.who}/{each.written}", words)
                    continue
                name = here.get((place, each.written))
                if name is not None and each.is_as(name.value):  # the script has changed it on all ranks
                    continue
                if name is None or not each.sent.can_be_taken:
                    words = STAYS.format(written=each.written, kind=each.sent.kind, who=each.who, rank=rank)
                    warn_once(f"stays beside/{each.who}/{each.written}", words)
                elif sendable(name.value).mark != each.sent.mark:
                    take(name.table, name.key, each.sent)

    def _names(self) -> Iterator[tuple[int, Name]]:
        """Yield the variables with the number of the layer; that of the loss is the next one behind them."""
        for place, function in self._functions():
            for name in names_beside(function):
                yield place, name

    def _functions(self) -> Iterator[tuple[int, Any]]:
        """Yield the layers that are here, and the loss function as the next one behind them, by their numbers."""
        module = self._module
        for stage in module.own_stages:
            first = module.allocation.stages[stage].layers[0]
            yield from enumerate(module._functions[stage], first)
        if module.loss_fn is not None and not isinstance(module.loss_fn, nn.Module):  # which goes as layers do
            yield module._num_layers, module.loss_fn

    def _tell_of_caches(self, layer: int, function: Any, rank: int) -> None:
        """Say once which results in caches do not go with a layer, or with the loss function."""
        for written, cached in differing_caches(function).items():
            if cached.cache_info().currsize:
                words = CACHE_STAYS.format(written=written, who=self._who(layer), rank=rank)
                warn_once(f"cache stays/{written}/{layer}", words)

    def _who(self, place: int) -> str:
        module = self._module
        if place == module._num_layers:
            return f"the loss function ({name_of(module.loss_fn)})"
        stage = next(
            stage for stage in module.own_stages if place in range(*module.allocation.stages[stage].layers)
        )
        function = module._functions[stage][place - module.allocation.stages[stage].layers[0]]
        return f"layer {place} ({name_of(function)})"
