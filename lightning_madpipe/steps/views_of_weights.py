"""Tensors of a program that lie in the memory of a layer's weights: ``self.rows = self.head.weight.detach()``.

In one process such a tensor has what training has made of the weight. In a pipeline one rank trains the weight, in
memory that is another one where the layer has moved: what looks at it on the other ranks, or from before, does not
follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from deepspeed_partition.engine.repartition.one_memory import Place, found_in, memories_of
from lightning_madpipe.steps.list_in_words import some

VIEWS = (
    "{views} in the memory of weights ({weights}), as weight.detach() does: one rank of a pipeline trains a "
    "weight, and on others, and where its layer moves, what was taken of it before has the values of that time. "
    "Take it of the weight where it is used"
)


def told_views(module: nn.Module, layers: Iterable[nn.Module]) -> str | None:
    """The sentence about attributes and buffers outside of layers that are views of weights of layers.

    Args:
        module: The LightningModule, whose tensors are all here.
        layers: The layers of its pipeline.

    Returns:
        None where there are none.
    """
    layers = list(layers)
    within = {id(part) for layer in layers for part in layer.modules()} - {id(module)}
    parts = dict(module.named_modules(remove_duplicate=False))
    inside = {id(weight) for layer in layers for weight in layer.parameters()}  # also those beside modules
    of_layers = {id(weight): name for name, weight in module.named_parameters() if id(weight) in inside} | {
        id(weight): f"{path}.{name}"
        for path, part in parts.items()
        if id(part) in within
        for name, weight in part._parameters.items()
    }
    found = found_in(module, {})
    weight_at = {place: of_layers.get(id(each.tensor), "") for each in found for place in each.places}
    views: dict[str, None] = {}
    weights: dict[str, None] = {}
    for memory in memories_of(found):
        places = [place for lying in memory.tensors for place in lying.places]
        looked_at = next(filter(None, map(weight_at.__getitem__, places)), "")
        looking = [
            _in_words(place)
            for place in places
            if not weight_at[place] and id(_owner_of(place, parts)) not in within
        ]
        if looking and looked_at:
            views.update(dict.fromkeys(looking))
            weights[looked_at] = None
    if not views:
        return None
    return VIEWS.format(views=f"{some(list(views))} lie{'s' * (len(views) == 1)}", weights=some(list(weights)))


def _owner_of(place: Place, parts: dict[str, nn.Module]) -> nn.Module | None:
    return parts.get(place[0].rpartition(".")[0] if len(place) == 1 else place[0])


def _in_words(place: Place) -> str:
    if len(place) == 1:
        return f"self.{place[0]}"
    return ".".join(_written(place))


def _written(place: Place) -> Iterator[str]:
    path, name, *keys = place
    yield "self"
    if path:
        yield path
    yield name + "".join(f"[{key!r}]" for key in keys)
