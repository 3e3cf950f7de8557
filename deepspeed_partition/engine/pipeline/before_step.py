"""A rank as it is before a step, so that a step that was given up has not been."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from deepspeed_partition.engine.pipeline.parts import held_modules, parts_of
from deepspeed_partition.engine.runtime.environment import warn_here
from deepspeed_partition.engine.runtime.random_state import random_state
from deepspeed_partition.kept_weights import WRITTEN, WeightPlace, places_of
from deepspeed_partition.profiling.attributes import Place
from deepspeed_partition.tensor_values import is_computed, num_bytes_of, put_back, version_of, without_repeats

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine

SMALL_BYTES = 2**20
"""A buffer up to this size is copied before each step, a larger one if a step has changed it: most are fixed."""


def is_small(value: Any) -> bool:
    """Whether a tensor or an array may be what a layer counts in, and none that it has computed."""
    num_bytes = num_bytes_of(value)
    return bool(num_bytes <= SMALL_BYTES) and not isinstance(value, nn.Parameter) and not is_computed(value)


class Buffers:
    """The buffers of a rank's layers, copied before each step in one call.

    Args:
        module: whose layers stay; another one is made when they have moved.
    """

    def __init__(self, module: nn.Module) -> None:
        # Also those without buffers, which may make some in a step.
        self._owners = list(module.named_modules())
        self._changing: set[int] = set()
        """Large buffers that a step has changed, by ``id``."""
        self._copied: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._versions: dict[int, int | None] = {}

    def before_step(self, *, all_of_them: bool) -> Callable[..., None]:
        """Copy the buffers; return a function that puts them back, but for some places.

        Args:
            all_of_them: copy also those that no step has changed so far.
        """
        if not self._owners:
            return lambda *_: None
        tables = [(name, owner._buffers, dict(owner._buffers)) for name, owner in self._owners]
        buffers = [buffer for _, _, table in tables for buffer in table.values() if buffer is not None]
        copied = [buffer for buffer in buffers if all_of_them or self._is_copied(buffer)]
        once = [without_repeats(buffer.detach()) for buffer in copied]
        are_same = len(copied) == len(self._copied) and all(
            buffer is known and values.shape == copy.shape and values.layout is torch.strided
            for buffer, values, known, copy in zip(copied, once, self._copied, self._copies, strict=True)
        )
        if not are_same:
            self._copied, self._copies = copied, [torch.empty_like(values) for values in once]
        with torch.no_grad():
            if copied:
                torch._foreach_copy_(self._copies, once)
        versions = self._versions = {id(buffer): version_of(buffer) for buffer in buffers}
        copies = dict(zip(map(id, copied), self._copies, strict=True))

        def restore(spared: Collection[Place] = ()) -> None:
            for name, table, before in tables:
                own = {key: value for key, value in table.items() if (id(table), key) in spared}
                if isinstance(table, dict):  # a scripted module's is none, and keeps its buffers
                    table.clear()
                    table.update({**before, **own})
                for key, buffer in before.items():
                    if buffer is None or key in own:
                        continue
                    if id(buffer) in copies:
                        values, once = copies[id(buffer)], without_repeats(buffer.detach())
                        put_back(once if once.shape == values.shape else buffer, values)
                    elif version_of(buffer) != versions[id(buffer)]:
                        warn_here(
                            f"the step that was given up has changed the buffer {name}.{key}, which no step had "
                            "changed before: the buffer keeps that change"
                        )

        return restore

    def _is_copied(self, buffer: torch.Tensor) -> bool:
        if buffer.numel() * buffer.element_size() <= SMALL_BYTES or id(buffer) in self._changing:
            return True
        version = version_of(buffer)
        if self._versions.get(id(buffer), version) != version:
            self._changing.add(id(buffer))
        return id(buffer) in self._changing


WrittenName: TypeAlias = tuple[str, str, str]
"""A weight in any process: its part of the pipeline, the path of its module in that, its name there."""


def written_in(module: PipelineModule) -> set[WrittenName]:
    """The weights of a pipeline's layers that forwards of this process were seen to write."""
    specs = ((part.name, part.spec) for part in parts_of(module))
    built = {name: spec if isinstance(spec, nn.Module) else getattr(spec, "module", None) for name, spec in specs}
    layers = {**built, **held_modules(module)}
    return {
        (part, path, name)
        for part, layer in layers.items()
        if isinstance(layer, nn.Module)
        for path, owner in layer.named_modules()
        for name in WRITTEN.names_in(owner)
    }


class WeightsOfForward:
    """The weights of a rank's layers that a ``forward`` writes: those that it sets in its first call, say.

    What a ``forward`` was seen to write before is copied before each step. The others are not, which are nearly
    all: a step that is given up has nearly never written them.

    Args:
        module: whose layers stay; another one is made when they have moved.
        of_all_ranks: What forwards of any rank were seen to write; see :func:`written_in`.
    """

    def __init__(self, module: PipelineModule, of_all_ranks: Collection[WrittenName]) -> None:
        # Without the memory, which may be another one at the next step.
        self._places = [place._replace(data=None) for place in places_of(module.modules())]
        self._weights = [place.weight for place in self._places if not place.weight.is_inference()]
        self._names = {id(weight): name for name, weight in module.named_parameters()}
        self._layers = {name: dict(layer.named_modules()) for name, layer in held_modules(module).items()}
        self._of_all_ranks = of_all_ranks
        self._num_seen = (0, 0)
        self._written: list[WeightPlace] = []

    def before_step(self) -> Callable[[], bool]:
        """Copy the weights; return a function that puts them back, says of which others it cannot, and if so."""
        if self._num_seen != (WRITTEN.number, len(self._of_all_ranks)):
            self._num_seen = WRITTEN.number, len(self._of_all_ranks)
            self._written = list(self._known())
        written = [place._replace(data=place.weight.data) for place in self._written]
        copies = [place.weight.detach().clone() for place in written]
        versions = [weight._version for weight in self._weights]

        def restore() -> bool:
            for place, values in zip(written, copies, strict=True):
                place.put_back(values)
            known, are_back = {id(place.weight) for place in written}, True
            for weight, version in zip(self._weights, versions, strict=True):
                if weight._version != version and id(weight) not in known:
                    are_back = False
                    warn_here(
                        f"the step that was given up has written the weight {self._names[id(weight)]}, which no "
                        "forward() was seen to write before: the weight keeps that change"
                    )
            return are_back

        return restore

    def _known(self) -> Iterator[WeightPlace]:
        """The weights that were seen to be written."""
        of_all_ranks = {
            (id(self._layers[part][path]), name)
            for part, path, name in self._of_all_ranks
            if path in self._layers.get(part, ())
        }
        for place in self._places:
            if place.name in WRITTEN.names_in(place.owner) or (id(place.owner), place.name) in of_all_ranks:
                yield place


class BeforeStep:
    """What a training step changes before its optimizer does, besides gradients.

    Args:
        engine: between two steps.
    """

    def __init__(self, engine: MadPipeEngine) -> None:
        self._engine = engine
        self._restore_buffers = engine.layer_buffers.before_step(all_of_them=engine.may_run_again)
        self._restore_weights = engine.weights_of_forward.before_step()
        self._restore_attributes = engine.attributes_of_forward.remembered()
        self._restore_random_state = random_state()
        self._restore_counts = engine.module.counts_of_forwards() if engine.runs_lists else None

    def restore(self) -> None:
        """Let the step not have begun.

        That is gradients, buffers, weights and attributes that a ``forward`` wrote, random numbers, the counts
        that seeds go by.
        """
        self._engine.let_batch_go()
        let_gradients_go(self._engine)
        self._restore_buffers()
        if self._restore_weights():  # else an attribute may tell that a weight is set already
            self._restore_attributes()
        self._restore_random_state()
        if self._restore_counts is not None:
            self._restore_counts()


def let_gradients_go(engine: Any) -> None:
    """Forget the weights' gradients, what DeepSpeed's optimizer made of them, and a backward under way."""
    optimizer = engine.optimizer
    engine.zero_grad()
    if optimizer is None:
        return
    optimizer.zero_grad()
    # ZeRO's, of DeepSpeed 0.19: not public, and not there in all versions.
    for group in getattr(optimizer, "averaged_gradients", None) or ():
        optimizer.averaged_gradients[group] = None
    while getattr(optimizer, "_backward_active_depth", 0) > 0:
        optimizer.exit_backward()
    engine._running_engine_backward = engine._force_grad_boundary = False
