"""Where a flow of calls is cut into layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from deepspeed_partition.capture.graph import LARGE
from deepspeed_partition.capture.partition import Crossing, Flow
from deepspeed_partition.capture.planned_memory import NUM_DEVICES, PlannedMemory
from deepspeed_partition.capture.recorder import CaptureError

SMALLEST_LAYER = 1 / 256
"""A layer with less than this share of the model's work joins one beside it."""
FEWEST_LAYERS = 4
"""Where fewer would be left, a layer is small beside the work of trained weights, and not beside all of it."""
NEARBY = 1 / 12
"""Calls that share a weight stay in one layer where they are no further apart than this share of the work."""


@dataclass(slots=True)
class Layout:
    """The layer of each node that runs once, by its number."""

    layer_of: dict[int, int]
    num_layers: int
    ties: dict[int, str]
    """The key of the layers whose weights are used by others, too."""
    boundaries: list[int]
    """The place of the last call before each boundary."""
    crossings: list[Crossing]
    """What crosses each boundary, sizes left out."""


def layout_of(flow: Flow, planned: PlannedMemory | None = None) -> Layout:
    """Cut everywhere where that makes layers that are worth measuring and what crosses can be sent."""
    nodes = flow.main
    if not nodes:
        raise CaptureError("the model calls nothing that depends on its arguments")
    planned = planned or PlannedMemory(flow)
    places, total = planned.places, sum(node.work for node in nodes) or 1.0
    group = _groups(flow, places, total)
    boundaries = _between_trained(flow, places, group)
    needed = _between_groups(group, boundaries)
    joined = set(boundaries)
    _join_small(flow, places, joined, needed, total)
    if len(joined) + 1 < FEWEST_LAYERS:  # most of the work may be that of frozen weights
        trained = sum(node.work for node, own in zip(nodes, group, strict=True) if own is not None)
        joined = set(boundaries)
        _join_small(flow, places, joined, needed, trained or total)
    boundaries = joined
    for num_devices in NUM_DEVICES:
        needed.update(*planned.boundaries_used(sorted(boundaries), num_devices))
    _join_costly(flow, places, boundaries, needed, total)
    layer_of: dict[int, int] = {}
    ties: dict[int, str] = {}
    layer = 0
    for place, node in enumerate(nodes):
        layer_of[node.number] = layer
        if group[place] is not None and group[place] != _OWN:
            ties[layer] = group[place]
        layer += place in boundaries
    ordered = sorted(boundaries)
    return Layout(layer_of, len(boundaries) + 1, ties, ordered, [places[place] for place in ordered])


_OWN = "own"


def _groups(flow: Flow, places: Sequence[Crossing], total: float) -> list[Any]:
    """For each node: None without weights that train, a key where they are used elsewhere, too, else ``own``."""
    graph = flow.graph
    users: dict[str, list[int]] = {}
    for place, node in enumerate(flow.main):
        for name in sorted(node.attributes & graph.trainable):
            users.setdefault(name, []).append(place)
    far: dict[str, list[int]] = {}
    for name, used in users.items():
        if len(used) < 2:
            continue
        between = sum(node.work for node in flow.main[used[0] + 1 : used[-1]])
        if between <= NEARBY * total:
            for place in range(used[0], used[-1]):
                places[place].why_not = places[place].why_not or "calls beside it share a weight"
        else:
            far[name] = used
    group: list[Any] = [_OWN if node.attributes & graph.trainable else None for node in flow.main]
    for name, used in far.items():
        old = {group[place] for place in used} - {_OWN, None}
        key = min(old) if old else name.replace(".", "_")
        for place in range(len(group)):
            if place in used or group[place] in old:
                group[place] = key
    changed = True
    while changed:  # where no boundary can be, both sides are of one group
        changed = False
        previous: int | None = None
        for place, own in enumerate(group):
            if own is None:
                continue
            apart = previous is None or group[previous] == own
            if not apart and all(places[between].why_not for between in range(previous or 0, place)):
                keys = {group[previous or 0], own} - {_OWN}
                key = min(keys)
                for each in range(len(group)):
                    if group[each] in keys or each in (previous, place):
                        group[each] = key
                changed = True
            previous = place
    return group


def _between_trained(flow: Flow, places: Sequence[Crossing], group: Sequence[Any]) -> set[int]:
    """The cheapest boundary between each two nodes with weights, one after the other, that can be told apart."""
    chosen: set[int] = set()
    previous: int | None = None
    for place, own in enumerate(group):
        if own is None:
            continue
        if previous is not None:
            legal = [between for between in range(previous, place) if not places[between].why_not]
            if legal:
                chosen.add(min(legal, key=lambda between: (places[between].num_bytes, -between)))
        previous = place
    return chosen


def _between_groups(group: Sequence[Any], boundaries: set[int]) -> set[int]:
    """The boundaries between layers that share weights with others, and layers that do not."""
    ordered = sorted(boundaries)
    kinds = _kinds(group, ordered)
    return {
        place
        for place, before, after in zip(ordered, kinds, kinds[1:], strict=False)
        if before != after or before != _OWN
    }


def _works(flow: Flow, edges: Sequence[int]) -> list[float]:
    return [sum(node.work for node in flow.main[start + 1 : stop + 1]) for start, stop in pairwise(edges)]


def _join_small(
    flow: Flow, places: Sequence[Crossing], boundaries: set[int], needed: set[int], total: float
) -> None:
    """Take away boundaries, but those that are needed, until each layer is worth one.

    What is small beside a layer that shares weights, such as the positions behind the embedding or the norm before
    the head, may then stand on either side of a cut, as where both are written as one layer.
    """
    while True:
        edges = [-1, *sorted(boundaries), len(flow.main) - 1]
        works = _works(flow, edges)
        small = sorted((work, layer) for layer, work in enumerate(works) if work < SMALLEST_LAYER * total)
        for _, layer in small:
            own = [place for place in (edges[layer], edges[layer + 1]) if place in boundaries]
            sides = [place for place in own if place not in needed]
            least = min((places[place].num_bytes for place in own if place in needed), default=-1)
            sides = [place for place in sides if places[place].num_bytes > least]
            if sides:
                boundaries.remove(max(sides, key=lambda place: (places[place].num_bytes, place)))
                break
        else:
            return


def _join_costly(
    flow: Flow, places: Sequence[Crossing], boundaries: set[int], needed: set[int], total: float
) -> None:
    """Take away boundaries that more crosses than both beside them, where the layer that they leave is not large.

    Those stay that the planner would use.
    """
    while True:
        edges = [-1, *sorted(boundaries), len(flow.main) - 1]
        works = _works(flow, edges)
        sizes = [0, *(places[place].num_bytes for place in edges[1:-1]), 0]
        costly = [
            (sizes[edge], edges[edge])
            for edge in range(1, len(edges) - 1)
            if edges[edge] not in needed
            and sizes[edge] > max(sizes[edge - 1], sizes[edge + 1])
            and works[edge - 1] + works[edge] <= LARGE * total
        ]
        if not costly:
            return
        boundaries.remove(max(costly)[1])


def _kinds(group: Sequence[Any], ordered: Sequence[int]) -> list[Any]:
    edges = [-1, *ordered, len(group) - 1]
    kinds = []
    for start, stop in pairwise(edges):
        found = {each for each in group[start + 1 : stop + 1] if each is not None}
        kinds.append(next(iter(found - {_OWN}), _OWN if found else None))
    return kinds
