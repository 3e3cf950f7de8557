"""Layers that draw from the random generators of their rank: which numbers they get, the cut decides.

Each rank has generators of its own, torch's, Python's and NumPy's, and its layers draw from them one after the
other. In plain DeepSpeed it is so, too, on its own cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.utils import set_random_seed

from deepspeed_partition.engine.pipeline.beside_layers import name_of
from deepspeed_partition.engine.pipeline.stages import StagesModule, allocation_in_words
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.generators import common_states, is_tracked

DRAW = (
    "layers draw from the random generators of their rank ({names}), such as {who}: which numbers they get "
    "depends on the other layers there, and so on the cut, which the plan has made {cut}. On the cut of plain "
    "DeepSpeed, or in one process, they may be others for the same seed. {way_out}"
)
WITH_SEEDS = (
    "seed_layers=True of PipelineModule gives each layer a seed of its own, for the same numbers on every cut"
)
BY_RANGES = (
    "With activation_checkpoint_interval, DeepSpeed counts the seeds of seed_layers within each range of layers "
    "that is checkpointed: activation_checkpoint_interval=0 gives the same numbers on every cut"
)
WITHOUT_SEEDS = "seed_layers does not change these; the same boundaries, given as a list, keep them"
MOST_NAMED = 3


class _LookedAt(list[Any]):
    """Layers that run one after the other, and between which it is seen who has drawn.

    Args:
        functions: The layers.
        first: The number of the first one.
        drawn: Gets the names of generators by the numbers of layers.
        before: Has the states of generators that the next layer finds; a seed sets others.
    """

    def __init__(
        self, functions: list[Any], first: int, drawn: dict[int, set[str]], before: dict[str, Any]
    ) -> None:
        super().__init__(functions)
        self._first, self._drawn, self._before = first, drawn, before

    def __iter__(self) -> Iterator[Any]:
        for place, function in enumerate(super().__iter__(), self._first):
            self._before.update(common_states())
            yield function
            for name, state in common_states().items():
                if state != self._before.get(name):
                    self._drawn.setdefault(place, set()).add(name)

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        if not isinstance(place, slice):
            return found
        return _LookedAt(found, self._first + place.indices(len(self))[0], self._drawn, self._before)


@contextmanager
def draws_told(module: StagesModule, stage: int) -> Iterator[None]:
    """Say once which layers of a stage of this rank draw from common generators meanwhile."""
    functions, first = module._functions[stage], module.allocation.stages[stage].layers[0]
    drawn: dict[int, set[str]] = {}
    before: dict[str, Any] = {}
    seed_fn = module.seed_fn

    def seeded(seed: int) -> None:
        (seed_fn or set_random_seed)(seed)
        before.update(common_states())

    _let_run(module, stage, _LookedAt(functions, first, drawn, before))
    module.seed_fn = seeded
    try:
        yield
    finally:
        module.seed_fn = seed_fn
        _let_run(module, stage, functions)
    for tracked, way_out in (False, WITH_SEEDS), (True, WITHOUT_SEEDS):
        names = {name for found in drawn.values() for name in found if is_tracked(name) == tracked}
        if not names or (module.seed_layers and not tracked and not module.activation_checkpoint_interval):
            continue
        if module.seed_layers and not tracked:
            way_out = BY_RANGES
        places = [place for place in sorted(drawn) if drawn[place] & names]
        who = ", ".join(f"layer {place} ({name_of(functions[place - first])})" for place in places[:MOST_NAMED])
        cut = allocation_in_words(module.allocation)
        sentence = DRAW.format(names=", ".join(sorted(names)), who=who, cut=cut, way_out=way_out)
        warn_once(f"layers draw/{tracked}/{cut}", sentence)


def _let_run(module: StagesModule, stage: int, functions: list[Any]) -> None:
    if module.forward_funcs is module._functions[stage]:
        module.__dict__["forward_funcs"] = functions
    module._functions[stage] = functions
