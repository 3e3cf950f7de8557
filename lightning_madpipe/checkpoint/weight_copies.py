"""Copies of the weights that a callback, the LightningModule or a global of their code keeps, such as an average.

In hooks each rank sees the weights of its own layers. A dict that a hook fills by their names, by the weights
themselves or by their ``id()``, or a list in their order, in that of ``state_dict()`` or in that of an optimizer's
groups, has the values for these alone. When layers move, their values move with them; when the whole model is put
on every rank, these are whole, too. A list of the weights themselves has those of this rank. What was made before
the layers were spread, or in ``configure_optimizers``, loses what other ranks have. Copies in another form stay as
they are, which is said. In a checkpoint the first rank of a pipeline writes copies whole, and each rank that reads
it gets those of its layers. All of this happens where layers move, and in checkpoints. Before a few of the first
steps, values tell the order of a list that shapes do not tell.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any
from weakref import ref

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_partition.engine.pipeline.own_optimizers import OF_TORCH
from deepspeed_partition.engine.pipeline.tied_copies import parameter_names
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.generators import members_of
from deepspeed_partition.tensor_values import has_memory
from lightning_madpipe.checkpoint.early_copies import EarlyCopies
from lightning_madpipe.checkpoint.held_objects import roots, walk
from lightning_madpipe.checkpoint.module_copies import complete, copies_in
from lightning_madpipe.checkpoint.watched_copies import WAY_OUT, WatchedCopies, is_copy
from lightning_madpipe.checkpoint.whole_model import TensorInfo, passed_on
from lightning_madpipe.module import PIPELINE, outside_pipeline

DEPTH = 3
"""How deep, in containers, the values are that a copy may have for a weight."""

COPIES = "madpipe_weight_copies"
"""The key in a checkpoint under which is noted of which weights it has copies, on the rank that wrote it."""

NOT_COPIES = ("state_dict", "optimizer_states", "loops", "lr_schedulers", COPIES)
DEPTH_OF_STATE = 5

STAYS = (
    "{places} of rank {rank} has copies of weights of layers that were there before layers moved. "
    "It is in a form that does not follow them, so that values may be taken for those of other layers: {way_out}"
)
"""What is said of copies that stay where they are."""
WEIGHTS_STAY = (
    "{places} of rank {rank} has weights of layers that were there before layers moved, in a form that does not "
    "follow them: those that have left are trained on another rank, have no gradient here, and those that have "
    "come are missing. Read pl_module.parameters() or named_parameters() where the weights are used; or keep them "
    "in a list, a set, or a dict by name, which follow their layers"
)
"""What is said of weights that stay where they are."""

TWO_ORDERS = (
    "The tensors of {place} may be in the order of {one} or of {other}; their shapes and values do not tell "
    "which. That of {one} is taken where layers move, and in checkpoints: {way_out}"
)
"""What is said of a list whose order is not known."""

LAST_LOOK = 8
"""The step before which values are looked at for the last time to learn the orders of lists."""

Order = tuple[Any, ...]
"""What a list is ordered by: ``("parameters", prefix, only_trained)``, as the module; ``("both", prefix)``, as its
``parameters()`` and then its ``buffers()``; ``("state", prefix)``, as its ``state_dict()``, with buffers;
``("group", place)`` and ``("groups",)``, as the optimizer; and ``("list", place)``, as a list of weights that has
an order of its own."""
Orders = tuple[tuple[Order, tuple[str, ...]], ...]
"""The orders that a list may be in, each with the names of its weights then."""


@dataclass(frozen=True, slots=True)
class Values:
    """A dict or list with a value for each of some weights: a tensor, or plain data with tensors in it."""

    container: dict[Any, Any] | list[Any] | deque[Any] | set[Any]
    names: tuple[str, ...]
    """The full names of the weights in the LightningModule, in the container's order."""
    prefix: str = ""
    """What the keys of a dict leave out of these names: those of a submodule begin there."""
    order: Order = ("parameters", "", False)
    keys: str = "name"
    """What the keys of a dict are: a ``name``, the ``weight`` itself, or its ``id``."""
    are_weights: bool = False
    """Whether the values are the weights themselves."""
    form: str = "plain"
    """What an item of a list is: ``plain``; a ``pair`` of a name and a weight; a ``reference`` to a weight."""
    fits: Orders = ()
    """All orders that a list of copies may be in; the first one is taken."""

    def by_name(self) -> dict[str, Any]:
        values = self.container.values() if isinstance(self.container, dict) else self.container
        values = [weight_in(value, self.form) for value in values]
        return dict(zip(self.names, values, strict=True))


def weight_in(item: Any, form: str) -> Any:
    """The weight of an item of a list."""
    if form == "pair":
        return item[1]
    return item() if form == "reference" else item


def _in_words(order: Order) -> str:
    kind, *rest = order
    of = f"{rest[0]}" if kind in ("parameters", "both", "state") else ""
    return {
        "parameters": f"{of}parameters()",
        "both": f"{of}parameters() and then {of}buffers()",
        "state": f"{of}state_dict()",
        "group": f"group {rest[0] if rest else 0} of the optimizer",
        "groups": "the optimizer's groups",
        "list": f"the weights in {rest[0] if rest else ''}",
    }[kind]


def _form_of(items: Sequence[Any]) -> str:
    if all(type(each) is tuple and len(each) == 2 and isinstance(each[0], str) for each in items):
        return "pair"
    return "reference" if all(isinstance(each, weakref.ReferenceType) for each in items) else "plain"


class WeightCopies:
    """Lets the copies of weights that a program keeps have the layers that the rank has.

    Args:
        module: The LightningModule.
        owners: Gives the callbacks and the module, with their names.
        ignored: Attributes of the module that its user does not set.
        pipeline: Its layers, with ``elsewhere``, which hides those of other ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        owners: Callable[[], Mapping[str, Any]],
        ignored: Collection[str],
        pipeline: Any,
    ) -> None:
        self._module, self._owners, self._ignored = module, owners, frozenset(ignored)
        self._pipeline = pipeline
        with pipeline.elsewhere.lifted():
            self._all = _weights_of(module)
        self._own = self._all
        # Modules beside the layers, which are on every rank.
        self._beside = {path for path, _ in outside_pipeline(module)}
        self._prefixes = ["", *(f"{path}." for path, _ in outside_pipeline(module) if path)]
        self._optimizer: Optimizer | None = None
        # The names in each group of the optimizer on this rank, in its order.
        self._grouped: list[tuple[str, ...]] = []
        self._all_grouped: list[tuple[str, ...]] = []
        # The names in each list of weights that has an order of its own, on all ranks.
        self._listed: dict[Order, tuple[str, ...]] = {}
        # The orders in which a list had the values of the weights, where shapes allow others, or was laid last.
        self._seen: dict[str, frozenset[Order]] = {}
        self._num_looks = 0
        self._looks_again = False
        self._names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._has_said: set[str] = set()
        self._learn_names()
        self.watched = WatchedCopies(module, pipeline, self._walk)
        """The copies of layers, which may not change."""
        self.early = EarlyCopies(self._walk)
        """Those that a resumed run makes before its checkpoint is loaded."""

    def cut_to_own(
        self,
        optimizer: Optimizer,
        given: Sequence[tuple[dict[str, Any], Sequence[Tensor]]],
        group: Any,
        *,
        flattened: bool,
    ) -> None:
        """Take what other ranks have out of the copies that ``configure_optimizers`` has made.

        It sees the weights of all ranks, and hooks see those of their own. Collective over ``group``, a pipeline.

        Args:
            optimizer: What it has made.
            given: Its groups, each with the weights of all ranks that it was made with.
            group: The ranks of the pipeline.
            flattened: Whether DeepSpeed gives the optimizer flat tensors in the place of its weights. What it
                keeps itself is left alone then.
        """
        self._optimizer = None if flattened else optimizer
        self._num_looks = 0
        self._own, own = self._all, self._own
        self._grouped = [self._names_of(weights) for _, weights in given]
        found = dict(self._found())
        self._look_at(found)
        found = self._agreed(found, group)
        self._own, self._all_grouped = own, self._grouped
        self._grouped = [tuple(name for name in names if name in own) for names in self._grouped]
        for place, values in found.items():
            self._lay(values, values.by_name())
            self._remember(place, values)

    def follow(self, group: Any) -> None:
        """Give each copy what the layers of this rank are now. Collective over ``group``, a pipeline."""
        before = self._own
        found = self._agreed(dict(self._found()), group)
        staying = {place: value for place, value in self._walk() if not _is_within(place, found)}
        forms = self._forms()
        stays = sorted(
            {(_attribute(place), kind) for place, value in staying.items() if (kind := self._kind(value, forms))}
        )
        self._own = _weights_of(self._module)
        self._learn_names()
        mine = {
            place: replace(values, container=type(values.container)(), names=tuple(before.keys() & values.names))
            for place, values in found.items()
        }
        wants = {place: set(self._own) - set(values.names) for place, values in found.items()}
        moved = before is not self._all and not self._pipeline.is_whole and before.keys() != self._own.keys()
        everyone = gather_objects((mine, wants, self._grouped, stays if moved else []), group)
        self._order_groups([grouped for _, _, grouped, _ in everyone])
        self._order_lists([theirs for theirs, *_ in everyone])
        here = self._tensors_here()
        for place, like in {place: values for theirs, *_ in everyone for place, values in theirs.items()}.items():
            owners: dict[str, int] = {}
            is_everywhere = all(place in theirs for theirs, *_ in everyone)
            for rank, (theirs, *_) in enumerate(everyone):
                for name in theirs[place].names if place in theirs else ():
                    owners.setdefault(name, rank)
            values = found.get(place)
            if values is None and staying.get(place) == like.container:  # an empty one
                values = replace(like, container=staying[place], names=())
            if like.are_weights:
                arrived = {name: here[name] for name in owners if name in self._own}
            else:
                wanted = {name for _, theirs, *_ in everyone for name in theirs.get(place, ()) if name in owners}
                wanted |= set() if is_everywhere else set(owners)  # the same on all ranks
                arrived = self._exchange(values, wanted, owners, group)
            if values is not None:
                self._lay(values, {**values.by_name(), **arrived})
                self._remember(place, values)
        self._say_what_stays([places for *_, places in everyone])

    def look_at_orders(self) -> None:
        """Read from the values of lists in which order they are. It is called before each step.

        A copy of the weights has their values until the step after which it is averaged. A look goes through all
        that the program holds: after the first one there are few, and only where shapes leave an order open.
        """
        self._num_looks += 1
        if self._num_looks > LAST_LOOK or self._num_looks & (self._num_looks - 1):
            return
        if (
            self._num_looks == 1
            or self._looks_again
            or _has_two_of_one_form(self._sequences(self._own), self._own)
        ):
            self._look_at(dict(self._found()))

    def _look_at(self, found: Mapping[str, Values]) -> None:
        here = self._tensors_here()
        self._looks_again = False
        for place, values in found.items():
            if len({names for _, names in values.fits}) > 1:
                self._looks_again = True
                equal = frozenset(
                    order for order, names in values.fits if _are_copies(values.container, names, here)
                )
                if equal:
                    self._seen[place] = equal

    def _remember(self, place: str, values: Values) -> None:
        """Know the order of a list of copies that has just been laid in it."""
        if values.fits:
            self._seen[place] = frozenset({values.order})

    def _agreed(
        self, found: Mapping[str, Values], group: Any, places: Mapping[str, str] | None = None
    ) -> dict[str, Values]:
        """Give the lists in ``found`` an order that fits on all ranks, each of which has other layers. Collective.

        Args:
            places: Where the program keeps what is found at another place.
        """
        places = places or {}
        mine = {
            place: self._likely(places.get(place, place), values) for place, values in found.items() if values.fits
        }
        everyone = gather_objects(mine, group)
        agreed = dict(found)
        for place in dict.fromkeys(place for theirs in everyone for place in theirs):
            theirs = [dict(each[place]) for each in everyone if place in each]
            common = [order for order in theirs[0] if all(order in each for each in theirs)]
            if not common:
                continue
            first = common[0]
            others = [order for order in common if self._differ(first, order, theirs)]
            if others:
                self._say_of_orders(places.get(place, place), first, others[0])
            if place in mine:
                agreed[place] = replace(found[place], names=dict(mine[place])[first], **_in_order(first))
        return agreed

    def _differ(self, one: Order, other: Order, ranks: Sequence[Mapping[Order, tuple[str, ...]]]) -> bool:
        """Whether it matters in which of two orders a list is, now or when a rank has got other layers.

        Args:
            one: An order that fits on all ranks.
            other: Another one.
            ranks: The names in each order on each rank that has such a list.
        """
        names = {name for each in ranks for order in (one, other) for name in each[order]}
        if all(name.rpartition(".")[0] in self._beside for name in names):  # they never move
            return False
        if any(each[one] != each[other] for each in ranks):
            return True
        return self._ordered(one, names, whole=True) != self._ordered(other, names, whole=True)

    def _likely(self, place: str, values: Values) -> Orders:
        """The orders that a list may be in by its shapes, and by its values where they have told it."""
        seen = self._seen.get(place, frozenset())
        return tuple(each for each in values.fits if each[0] in seen) or values.fits

    def _say_of_orders(self, place: str, one: Order, other: Order) -> None:
        if place not in self._has_said:
            self._has_said.add(place)
            said = TWO_ORDERS.format(place=place, one=_in_words(one), other=_in_words(other), way_out=WAY_OUT)
            announce(said, logging.WARNING)

    def _say_what_stays(self, places: Sequence[Sequence[tuple[str, str]]]) -> None:
        """Say once which weights, and which copies, are taken for those of other layers now.

        Args:
            places: Those of each rank of the pipeline, each with what it has.
        """
        for rank, stay in enumerate(places):
            for sentence in (WEIGHTS_STAY, STAYS):
                named = [place for place, kind in stay if kind == sentence]
                if named and sentence not in self._has_said:
                    self._has_said.add(sentence)
                    said = sentence.format(places=", ".join(named), rank=rank, way_out=WAY_OUT)
                    announce(said, logging.WARNING)

    def complete_modules(self, group: Any, place: str) -> None:
        """Let copies of layers that are modules have all layers, where the whole model is. Collective.

        Args:
            group: A pipeline.
            place: ``"every_rank"`` or ``"rank_zero"``.
        """
        of_layers = self._pipeline.elsewhere.all_that_hide
        complete(copies_in(self._module, self._walk(), of_layers), group, place)

    # Names and orders

    def _learn_names(self) -> None:
        """Know the weights of all ranks by themselves, whoever has got hold of them."""
        is_whole = self._pipeline.is_whole
        with nullcontext() if is_whole else self._pipeline.elsewhere.lifted():
            for name, tensor in _named_tensors(self._module):
                self._names.setdefault(tensor, name)

    def _tensors_here(self) -> dict[str, Tensor]:
        return dict(_named_tensors(self._module))

    def _names_of(self, weights: Sequence[Tensor]) -> tuple[str, ...]:
        return tuple(self._names[weight] for weight in weights if weight in self._names)

    def _order_groups(self, everyone: Sequence[Sequence[tuple[str, ...]]]) -> None:
        """Know the order of this rank's weights in each group, as :class:`ParameterGroups` makes it."""
        order = list(self._own)
        if not self._pipeline.is_whole:
            order = [*self._names_of(list(parameter_names(self._pipeline))), *order]
        members = [{name for names in ranks for name in names} for ranks in zip_longest(*everyone, fillvalue=())]
        self._grouped = [tuple(dict.fromkeys(name for name in order if name in group)) for group in members]

    def _order_lists(self, everyone: Sequence[Mapping[str, Values]]) -> None:
        """Know the order of lists that have one of their own: they were whole once, or each rank made a part."""
        for theirs in everyone:
            for values in theirs.values():
                if values.order[0] == "list":
                    known = self._listed.get(values.order, ())
                    new = [name for name in values.names if name not in known]
                    self._listed[values.order] = (*known, *new)

    def _sequences(self, own: Mapping[str, Weight]) -> Iterator[tuple[Order, tuple[str, ...]]]:
        """The orders in which a list may have something for each weight of ``own``, with the names."""
        for prefix in self._prefixes:
            for only_trained in (False, True):
                yield (
                    ("parameters", prefix, only_trained),
                    tuple(
                        name
                        for name, weight in own.items()
                        if name.startswith(prefix) and weight.is_listed and weight.trains >= only_trained
                    ),
                )
        for place, names in enumerate(self._grouped):
            yield ("group", place), names
        yield ("groups",), tuple(name for names in self._grouped for name in names)
        for prefix in self._prefixes:
            inside = {name: weight for name, weight in own.items() if name.startswith(prefix)}
            parameters = tuple(name for name, weight in inside.items() if weight.is_listed)
            buffers = tuple(name for name, weight in inside.items() if weight.is_buffer)
            yield ("state", prefix), tuple(name for name, weight in inside.items() if weight.is_saved)
            yield ("both", prefix), (*parameters, *buffers)

    def _forms(self) -> set[tuple[torch.Size, ...]]:
        """The forms of what a rank has of its weights, or of its buffers, in no order: a tuple has them, say."""
        own = self._own
        buffers = [name for name, weight in own.items() if not weight.is_listed]
        several = [*(names for _, names in self._sequences(own)), tuple(own)]
        forms = {tuple(sorted(own[name].shape for name in names if name in own)) for names in several}
        of_buffers = tuple(sorted(own[name].shape for name in buffers))
        return {each for each in forms if len(each) > 2} | ({of_buffers} if len(set(of_buffers)) > 1 else set())

    def _ordered(self, order: Order, names: Collection[str], *, whole: bool = False) -> list[str]:
        """Those of ``names`` that this rank has, or all, in an order."""
        own, grouped = (self._all, self._all_grouped) if whole else (self._own, self._grouped)
        kind, *rest = order
        first: tuple[str, ...] = ()
        if kind == "list":
            first = self._listed.get(order, ())
        elif kind == "group":
            first = grouped[rest[0]] if rest[0] < len(grouped) else ()
        elif kind == "groups":
            first = tuple(name for group in grouped for name in group)
        elif kind == "both":
            first = tuple(name for name, weight in own.items() if weight.is_listed)
        return list(dict.fromkeys(name for name in (*first, *own) if name in names and name in own))

    # Copies in the state of a checkpoint

    def saved(self, state: dict[str, Any], group: Any) -> dict[str, Any]:
        """``state`` of callbacks and hooks for a checkpoint: the copies in it are whole on the group's first rank.

        On the others they stay as they are. Which weights each has is noted under ``COPIES``. Collective over
        ``group``, a pipeline.
        """
        sequences = list(self._sequences(_weights_of(self._module)))
        by_path = {
            "/".join(place): (place, values)
            for place, container in _containers(state)
            if (values := self._as_values(container, sequences)) is not None
        }
        is_unsure = any(
            self._differ(values.order, order, [dict(values.fits)])
            for _, values in by_path.values()
            for order, _ in values.fits
        )
        # What has been learnt of a list is known by where the program keeps it.
        kept = {
            _members(value): place
            for place, value in (self._walk() if is_unsure else ())
            if _is_list_of_tensors(value)
        }
        places = {
            path: kept[members]
            for path, (_, values) in by_path.items()
            if values.fits and (members := _members(values.container)) in kept
        }
        agreed = self._agreed({path: values for path, (_, values) in by_path.items()}, group, places)
        found = {place: agreed[path] for path, (place, _) in by_path.items()}
        everyone = gather_objects({place: values.names for place, values in found.items()}, group)
        is_first = torch.distributed.get_rank(group) == 0
        names = {"/".join(place): list(values.names) for place, values in found.items()}
        for place in dict.fromkeys(place for theirs in everyone for place in theirs):
            owners = _owners_of(place, everyone)
            values = found.get(place)
            arrived = self._exchange(
                values, [n for n, rank in owners.items() if rank], owners, group, keeps=is_first
            )
            if is_first and values is not None:
                by_name = {**values.by_name(), **arrived}
                whole = {name: by_name[name] for name in self._ordered(values.order, by_name, whole=True)}
                cut = len(values.prefix)
                is_list = isinstance(values.container, list)
                laid = list(whole.values()) if is_list else {name[cut:]: value for name, value in whole.items()}
                state = _with(state, place, laid)
                names["/".join(place)] = list(whole)
        return {**state, COPIES: names} if names else state

    def loaded(self, state: dict[str, Any], group: Any) -> None:
        """Let the copies in the state of a checkpoint have the layers of this rank. Collective over ``group``.

        Args:
            state: What :meth:`saved` returned on this rank, or on the first one; or an older one, in which dicts
                by name are found. It is changed in place.
        """
        own = _weights_of(self._module)
        noted = state.pop(COPIES, None)
        found: dict[tuple[str, ...], Values] = {}
        for place, container in _containers(state):
            names = (noted or {}).get("/".join(place))
            if names is not None and len(names) == len(container):
                prefix = "" if isinstance(container, list) else names[0].removesuffix(next(iter(container)))
                order = ("list", "/".join(place))
                self._listed[order] = tuple(names)
                found[place] = Values(container, tuple(names), prefix, order)
            elif (
                noted is None and isinstance(container, dict) and (values := self._as_dict(container)) is not None
            ):
                found[place] = values
        everyone = gather_objects({place: values.names for place, values in found.items()}, group)
        wants = gather_objects({place: set(own) - set(values.names) for place, values in found.items()}, group)
        for place in dict.fromkeys(place for theirs in everyone for place in theirs):
            owners = _owners_of(place, everyone)
            wanted = {name for theirs in wants for name in theirs.get(place, ()) if name in owners}
            arrived = self._exchange(found.get(place), wanted, owners, group)
            if place in found:
                self._lay(found[place], {**found[place].by_name(), **arrived})

    def _exchange(
        self,
        values: Values | None,
        wanted: Collection[str],
        owners: Mapping[str, int],
        group: Any,
        *,
        keeps: bool = True,
    ) -> dict[str, Any]:
        """The values of ``wanted``, each from the rank that had its layer; on a rank that ``keeps`` them."""
        rank, arrived = torch.distributed.get_rank(group), {}
        own = {} if values is None else values.by_name()
        device = next((tensor.device for value in own.values() for tensor in _tensors_in(value)), None)
        sent = {name: own[name] for name in sorted(wanted) if owners[name] == rank}
        described = {
            name: (_with_tensors(value, iter(infos)), infos)
            for theirs in gather_objects({name: _infos(value) for name, value in sent.items()}, group)
            for name, (value, infos) in theirs.items()
        }
        for name in sorted(wanted):
            form, infos = described[name]
            source = torch.distributed.get_global_rank(group, owners[name])
            mine = list(_tensors_in(sent[name])) if name in sent else [None] * len(infos)
            tensors = [
                passed_on(tensor, info, source, group, "every_rank", arrives=True)
                for tensor, info in zip(mine, infos, strict=True)
            ]
            if name not in own and keeps:
                there = (tensor if device is None or tensor is None else tensor.to(device) for tensor in tensors)
                arrived[name] = _with_tensors(form, there)
        return arrived

    def _lay(self, values: Values, by_name: Mapping[str, Any]) -> None:
        """Let a container have what this rank has."""
        names = self._ordered(values.order, by_name)
        if isinstance(values.container, set):
            values.container.clear()
            values.container.update(by_name[name] for name in names)
            return
        if isinstance(values.container, list | deque):
            cut = len(values.prefix)
            made = {"pair": lambda name: (name[cut:], by_name[name]), "reference": lambda name: ref(by_name[name])}
            items = [made.get(values.form, by_name.__getitem__)(name) for name in names]
            values.container.clear()
            values.container.extend(items)
            return
        here = self._tensors_here() if values.keys != "name" else {}
        keys = {
            name: name[len(values.prefix) :] if values.keys == "name" else here[name]
            for name in names
            if values.keys == "name" or name in here
        }
        values.container.clear()
        for name, key in keys.items():
            values.container[id(key) if values.keys == "id" else key] = by_name[name]

    # What is found

    def modules(self) -> list[str]:
        """The copies of the module that average its weights in an order, or that hide what other ranks have."""
        return [
            f"{place} ({type(value).__name__})" for place, value in self._walk() if is_copy(value, self._module)
        ]

    def _found(self) -> Iterator[tuple[str, Values]]:
        """The containers that follow the layers, with what they have for the weights of ``self._own``.

        Those of the weights themselves come first: what goes along with one has its order.
        """
        sequences = list(self._sequences(self._own))
        later = []
        for place, value in self._walk():
            values = self._as_weights(place, value, sequences)
            if values is None:
                later.append((place, value))
                continue
            if values.order[0] == "list":
                sequences.append((values.order, values.names))
            yield place, values
        for place, value in later:
            values = self._as_keyed(value) or self._as_values(value, sequences)
            if values is not None:
                yield place, values

    def _walk(self) -> Iterator[tuple[str, Any]]:
        owners, visited = dict(self._owners()), {id(self._module), *map(id, self._pipeline.elsewhere.inside)}
        if self._optimizer is not None:
            # The engine takes these along.
            visited.update(id(vars(self._optimizer).get(name)) for name in OF_TORCH)
            owners[type(self._optimizer).__name__] = self._optimizer
        yield from walk(roots(self._module, owners, self._ignored), visited)

    def _as_weights(self, place: str, value: Any, sequences: Sequence[tuple[Order, Any]]) -> Values | None:
        """What a list or dict of the weights themselves has, each once."""
        if not isinstance(value, dict | list | deque | set) or not value:
            return None
        items = list(value.values() if isinstance(value, dict) else value)
        form = _form_of(items) if isinstance(value, list | deque) else "plain"
        members = [weight_in(each, form) for each in items]
        names = self._names_of([each for each in members if isinstance(each, Tensor)])
        if len(names) != len(members) or len(set(names)) != len(names):
            return None
        if isinstance(value, set):
            return Values(value, names, order=("parameters", "", False), are_weights=True)
        if isinstance(value, dict) or form == "pair":
            keys = list(value) if isinstance(value, dict) else [name for name, _ in value]
            for prefix in self._prefixes:
                if [prefix + str(key) for key in keys] == list(names):
                    return Values(value, names, prefix, are_weights=True, form=form)
            return None
        order = next((order for order, sequence in sequences if sequence == names), ("list", place))
        return Values(value, names, order=order, are_weights=True, form=form)

    def _as_keyed(self, value: Any) -> Values | None:
        """What a dict by the weights themselves, or by their ``id()``, has."""
        if not isinstance(value, dict) or not value or not all(map(_is_plain, value.values())):
            return None
        if all(isinstance(key, Tensor) for key in value):
            names = self._names_of(list(value))
            keys = "weight"
        elif all(type(key) is int for key in value):
            by_id = {id(weight): name for weight, name in self._names.items()}
            names, keys = tuple(by_id[key] for key in value if key in by_id), "id"
        else:
            return None
        return Values(value, names, keys=keys) if len(names) == len(value) else None

    def _as_values(self, value: Any, sequences: Sequence[tuple[Order, tuple[str, ...]]]) -> Values | None:
        if isinstance(value, dict):
            return self._as_dict(value)
        return self._as_list(value, sequences) if isinstance(value, list) else None

    def _as_dict(self, value: dict[Any, Any]) -> Values | None:
        if not value or not all(isinstance(key, str) for key in value):
            return None
        if not all(isinstance(tensor, Tensor) for tensor in value.values()):
            return self._as_notes(value)
        for prefix in self._prefixes:
            if all(self._is_weight(prefix + name, tensor) for name, tensor in value.items()):
                return Values(value, tuple(prefix + name for name in value), prefix)
        return None

    def _as_notes(self, value: dict[Any, Any]) -> Values | None:
        """What a dict has that notes something of each weight of this rank, by name, and of no other."""
        if not all(map(_is_plain, value.values())):
            return None
        for only_trained in (False, True):
            own, every = (
                {name for name, weight in weights.items() if weight.is_listed and weight.trains >= only_trained}
                for weights in (self._own, self._all)
            )
            if own == value.keys() != every:
                return Values(value, tuple(value))
        return None

    def _is_weight(self, name: str, tensor: Tensor) -> bool:
        known = self._all.get(name) or self._own.get(name)
        return name.startswith(f"{PIPELINE}.") or (known is not None and known.shape == tensor.shape)

    def _as_list(self, value: list[Any], sequences: Sequence[tuple[Order, tuple[str, ...]]]) -> Values | None:
        if not _is_list_of_tensors(value):
            return None
        shapes = [tensor.shape for tensor in value]
        fits = []
        for order, names in sequences:
            weights = [self._own.get(name) or self._all.get(name) for name in names]
            if [weight.shape for weight in weights if weight is not None] == shapes:
                fits.append((order, names))
        if not fits:
            return None
        [(order, names), *_] = fits
        return Values(value, names, **_in_order(order), fits=tuple(fits))

    def _kind(self, value: Any, whole: Collection[tuple[torch.Size, ...]]) -> str:
        """The sentence about something that stays: it has weights, or tensors of the forms of at least two.

        Args:
            value: What stays.
            whole: What :meth:`_forms` gives, some of which may be of one form, or have forms of buffers.
        """
        if isinstance(value, nn.Module):
            return ""
        if isinstance(value, Tensor):
            name = self._names.get(value)
            return WEIGHTS_STAY if name is not None and name not in self._tensors_here() else ""
        members = [*value, *value.values()] if isinstance(value, dict) else list(value)
        inside = [each[1] if type(each) is tuple and len(each) == 2 else each for each in members]
        inside = [each() if isinstance(each, weakref.ReferenceType) else each for each in inside]
        if any(isinstance(each, Tensor) and each in self._names for each in inside):
            is_copy = any(isinstance(each, Tensor) and each not in self._names for each in _tensors_in(members))
            return STAYS if is_copy else WEIGHTS_STAY
        is_by_name = isinstance(value, dict) and len(value) > 1 and all(key in self._all for key in value)
        if is_by_name and all(not _is_plain(each) and _has_values(each) for each in value.values()):
            return STAYS  # numbers by name, such as rates, are the same anywhere, and so are forms and hooks
        tensors = [each for each in members if isinstance(each, Tensor)]
        forms = {weight.shape for weight in self._all.values() if weight.is_listed and len(weight.shape)}
        shapes = {tensor.shape for tensor in tensors}
        values = list(value.values()) if isinstance(value, dict) else members
        if not all(isinstance(each, Tensor) for each in values):
            return ""
        is_of_weights = len(shapes) > 1 and shapes <= forms
        return STAYS if is_of_weights or tuple(sorted(each.shape for each in values)) in whole else ""


def _owners_of(
    place: tuple[str, ...], everyone: Sequence[Mapping[tuple[str, ...], Collection[str]]]
) -> dict[str, int]:
    """The first rank that has each weight of a copy."""
    owners: dict[str, int] = {}
    for rank, theirs in enumerate(everyone):
        for name in theirs.get(place, ()):
            owners.setdefault(name, rank)
    return owners


def _containers(state: Mapping[Any, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The dicts and lists of tensors in the state of a checkpoint, but for what is Lightning's."""
    for key, value in state.items():
        if not isinstance(key, str) or (not place and key in NOT_COPIES):
            continue
        if _is_list_of_tensors(value) or (
            isinstance(value, dict) and value and all(isinstance(each, Tensor) for each in value.values())
        ):
            yield (*place, key), value
        elif isinstance(value, dict) and len(place) < DEPTH_OF_STATE:
            yield from _containers(value, (*place, key))


def _with(state: Mapping[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """``state`` with another value at a place; the program's own dicts on the way there stay as they are."""
    key, *rest = place
    return {**state, key: _with(state[key], tuple(rest), value) if rest else value}


@dataclass(frozen=True, slots=True)
class Weight:
    """What tells a copy of a weight."""

    shape: torch.Size
    trains: bool
    is_listed: bool
    """Whether ``parameters()`` gives it, under this name; not so buffers and second names."""
    is_buffer: bool
    """Whether ``buffers()`` gives it, under this name."""
    is_saved: bool
    """Whether ``state_dict()`` gives it: all but buffers that are not persistent."""


def _weights_of(module: nn.Module) -> dict[str, Weight]:
    """The parameters and buffers that can be read, by all of their names, in the order of ``state_dict()``."""
    listed = {name for name, _ in module.named_parameters()}
    buffers = {name for name, _ in module.named_buffers()}
    unsaved = {
        f"{path}.{own}" if path else own
        for path, part in module.named_modules(remove_duplicate=False)
        for own in part._non_persistent_buffers_set
    }
    return {
        name: Weight(value.shape, value.requires_grad, name in listed, name in buffers, name not in unsaved)
        for name, value in _named_tensors(module)
    }


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, part in module.named_modules(remove_duplicate=False):
        for own, value in (*part._parameters.items(), *part._buffers.items()):
            if value is not None:
                yield f"{path}.{own}" if path else own, value


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Tensor) for each in value)


def _members(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Identities of tensors, which tell that two lists have the same ones."""
    return tuple(map(id, tensors))


def _has_two_of_one_form(sequences: Iterable[tuple[Order, tuple[str, ...]]], own: Mapping[str, Weight]) -> bool:
    """Whether shapes do not tell two orders of weights from each other."""
    orders = {names for _, names in sequences}
    return len({tuple(own[name].shape for name in names if name in own) for names in orders}) < len(orders)


def _in_order(order: Order) -> dict[str, Any]:
    """What :class:`Values` have of an order."""
    return {"order": order, "prefix": order[1] if order[0] == "parameters" else ""}


def _are_copies(copies: Iterable[Any], names: Sequence[str], here: Mapping[str, Tensor]) -> bool:
    """Whether tensors have the values of the weights of these names, and not all of them zeros, as sums may."""
    pairs = [(copy, here[name]) for copy, name in zip(copies, names, strict=True) if name in here]
    if not all(map(has_memory, itertools.chain(*pairs))):
        return False
    return any(bool(copy.any()) for copy, _ in pairs) and all(_is_copy(*pair) for pair in pairs)


def _is_copy(copy: Tensor, weight: Tensor) -> bool:
    """Whether a tensor has the values of a weight, in a type that may be another one."""
    one, other = copy.detach().cpu(), weight.detach().cpu()
    return torch.equal(one.to(other.dtype), other) or torch.equal(one, other.to(one.dtype))


# Values that hold tensors


def _is_plain(value: Any, depth: int = DEPTH) -> bool:
    """Whether a value is a tensor, a number or a text, or a dict, list or tuple of these."""
    if isinstance(value, Tensor) or value is None or isinstance(value, bool | int | float | str):
        return True
    if not depth or type(value) not in (dict, list, tuple):
        return False
    members = [*value, *value.values()] if isinstance(value, dict) else value
    return all(_is_plain(each, depth - 1) for each in members)


def _has_values(value: Any, depth: int = DEPTH) -> bool:
    """Whether a value is an array or a tensor, or an object or a container with one in it."""
    if isinstance(value, numpy.ndarray | Tensor) or not depth:
        return isinstance(value, numpy.ndarray | Tensor)
    members: Iterable[Any] = (members_of(value) or {}).values()
    if isinstance(value, list | tuple | dict):
        members = value.values() if isinstance(value, dict) else value
    return any(_has_values(each, depth - 1) for each in members)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each)


def _infos(value: Any) -> tuple[Any, list[TensorInfo]]:
    """A value with descriptions in the place of its tensors, and these in their order."""
    infos = [TensorInfo("", t.shape, t.dtype, t.requires_grad) for t in _tensors_in(value)]
    return _with_tensors(value, iter(infos)), infos


def _with_tensors(value: Any, tensors: Iterator[Any]) -> Any:
    """A value of the same form with other tensors in it."""
    if isinstance(value, Tensor | TensorInfo):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _with_tensors(each, tensors) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(each, tensors) for each in value)
    return value


def _is_within(place: str, found: Collection[str]) -> bool:
    """Whether one of ``found`` is at a place, or around it."""
    names = place.split(".")
    return any(".".join(names[:end]) in found for end in range(1, len(names) + 1))


def _attribute(place: str) -> str:
    """The attribute in which a container stands."""
    return ".".join(place.split(".")[:2])
