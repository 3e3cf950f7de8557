"""Weights that layers draw from the common random generators while specs build them.

DeepSpeed's method ``parameters`` builds all layers once to count them, and then each rank its own. What a layer
draws thus depends on the method and on the layers that are built before it. Where that is not plain DeepSpeed's,
the same seed gives other weights.
"""

from __future__ import annotations

import deepspeed.pipe
from deepspeed.runtime.utils import partition_uniform

from deepspeed_partition.engine.pipeline.stages import allocation_in_words, allocation_of
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.generators import common_states, is_tracked

DRAWN = "layers have drawn from the random generators of their rank ({names}) while specs built them: {which}. "
AS_PARAMETERS = (
    "for the same seed their initial weights are those of plain DeepSpeed with its default "
    "partition_method='parameters', and others than with {method!r}, which the configuration names"
)
ON_ANOTHER_CUT = (
    "what each gets depends on those that were built before it on the same rank, so on the cut {cut} initial "
    "weights may be others than plain DeepSpeed's on its own, for the same seed"
)
WITH_SEEDS = "seed_layers=True of PipelineModule, or modules in the place of specs, give the same on every cut"
WITHOUT_SEEDS = "Modules in the place of specs give the same on every cut; seed_layers does not change these"


def watch_draws(module: deepspeed.pipe.PipelineModule) -> None:
    """Note where the generators are before the first layer of ``module`` is built."""
    module.__dict__["_states_before_build"] = common_states()


def tell_of_drawn_weights(module: deepspeed.pipe.PipelineModule) -> None:
    """Say once that layers which are built have drawn, where that gives other weights than plain DeepSpeed may.

    With a plan they are those of plain DeepSpeed as long as nobody names another method of its own, see
    :func:`tell_of_another_method`.
    """
    before = module.__dict__.pop("_states_before_build", None)
    if before is None:
        return
    for tracked, way_out in (False, WITH_SEEDS), (True, WITHOUT_SEEDS):
        names = [
            name
            for name, state in common_states().items()
            if state != before.get(name) and is_tracked(name) == tracked
        ]
        if not names or (module.seed_layers and not tracked):
            continue
        cut = allocation_in_words(allocation_of(module))
        counted = module.__dict__.get("is_counted_as_by_deepspeed", False)
        uniform = [int(boundary) for boundary in partition_uniform(module._num_layers, module.num_stages)]
        if not counted and cut == str(uniform):
            continue
        if counted:
            module.__dict__.setdefault("_drawn_as_by_parameters", []).append((", ".join(names), way_out))
            continue
        which = ON_ANOTHER_CUT.format(cut=cut)
        warn_once(f"drawn weights/{cut}/{names}", DRAWN.format(names=", ".join(names), which=which) + way_out)


def tell_of_another_method(module: deepspeed.pipe.PipelineModule, *methods: object) -> None:
    """Say once that layers have drawn as DeepSpeed's default method builds them, where another one is named.

    Args:
        module: The pipeline, whose layers are built.
        methods: What the configuration names: a method, an algorithm.
    """
    drawn = module.__dict__.pop("_drawn_as_by_parameters", [])
    others = [each for each in methods if isinstance(each, str) and each.lower().startswith(("uniform", "type:"))]
    for method in others[:1]:
        for names, way_out in drawn:
            which = AS_PARAMETERS.format(method=method)
            warn_once(f"drawn weights/{method}/{names}", DRAWN.format(names=names, which=which) + way_out)
