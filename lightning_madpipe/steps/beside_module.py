"""What steps may change beside their LightningModule: globals, variables of functions around, callbacks, data.

A step runs on the last stage of a pipeline. ``LOSSES.append(loss)`` in it, a counter that it keeps in its class,
in a callback or in the data set is to be on every rank what it is there, and a trial of the step is to leave no
trace.

Found are the names that the steps' code reads, and that of the program's functions which it calls; the attributes
of callbacks, of the data module, of the data sets and of samplers, where a program wrote their classes; those of
torch's ``WeightedRandomSampler``; what is set on the Trainer and in the environment.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextvars import Context, ContextVar, copy_context
from types import FunctionType, ModuleType
from typing import Any, Literal, cast

import numpy
from torch import Tensor, nn
from torch.utils.data import Sampler, WeightedRandomSampler
from torchmetrics import Metric, MetricCollection

from deepspeed_partition.cached_results import FILLED, OF_LAST_STAGE, OF_WRAPPERS, cache_kept, may_differ
from deepspeed_partition.code_names import (
    STEPS,
    CodeSearch,
    Name,
    forward_of,
    is_installed,
    is_librarys,
    module_of,
    name_of,
    set_by_class,
)
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.generators import GENERATORS
from deepspeed_partition.raw_states import has_raw_state, raw_size, raw_state
from deepspeed_partition.tensor_values import num_bytes_of
from lightning_madpipe.module import named_owners, outside_pipeline
from lightning_madpipe.steps.reached_objects import MOST_OBJECTS, ReachedObjects
from lightning_madpipe.steps.step_side_effects import Place

TRAINER, ENVIRONMENT = "trainer", "os.environ"
MOST_ITEMS = 1000
"""Items of a container, elements of an array or a tensor, up to which it is always looked into."""
MOST_BYTES = 16 * 2**20
"""Bytes of a larger array or tensor up to which it is looked into once in a while."""
MOST_BYTES_SUMMED = 2**30
"""Bytes of a still larger array up to which a checksum of it is taken once in a while."""
MOST_PARTS = 100
"""Parts of a module, beside the LightningModule, up to which it is looked into."""
LOOKS_BETWEEN = 128
"""How often places are looked at until they are looked at closely again."""


class BesideModule:
    """What the steps of a LightningModule may change beside it.

    Args:
        module: The LightningModule.
        more: Other code whose names count, too, with the class of each method.
    """

    def __init__(self, module: Any, more: Iterable[tuple[Any, type | None]] = ()) -> None:
        self._module = module
        self._changed: set[Place] = set()
        self._owners: dict[str, Any] = {}
        """Callbacks and data of the program, as they were when places were begun to be looked at."""
        self._num_looks, self._is_close = 0, True
        self._told: set[Place] = set()
        self._context: Context | None = None
        """The variables of the context after steps that are not undone yet, where one has no value before."""
        self.files: dict[str, Any] = {}
        """Files that are open for writing, and databases, by name, as they were reached last."""
        # Its own package is the program's even where it is installed.
        self._package = type(module).__module__.partition(".")[0]
        self._search = search = CodeSearch(self.is_programs)
        for step in STEPS:
            search.read(inspect.getattr_static(type(module), step, None), type(module))
        for _, owner in outside_pipeline(module):
            search.read(forward_of(owner), type(owner))
            for value in vars(owner).values():
                search.read(value, None)
        for code, kind in more:
            search.read(code, kind)
        self._num_results = {name: cache.cache_info().currsize for name, cache in search.caches.items()}
        """How many results each cache had when no step had run."""
        self._filled: set[str] = set()
        self._code_read: set[Any] = set()
        """Classes of objects that were reached, and functions, whose code was read."""
        self._take_names()

    @property
    def written(self) -> set[str]:
        """All names in the code of steps and in what they call."""
        return self._written

    def _take_names(self) -> None:
        """Take what the search of the code has found."""
        search, kind = self._search, cast(Any, type(getattr(self._module, "_trainer", None)))
        self._written = search.written
        self._of_trainer = search.written - set_by_class(kind)
        self._sees_environment = "environ" in search.written
        self._names = {Place(owner, "beside", key): name for (owner, key), name in search.found.items()}

    def reached(self, attributes: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        """The objects of the program that steps reach, by names that are the same on all ranks.

        Args:
            attributes: Those of the LightningModule and of its submodules, with their names.
        """
        self._owners = self._found_owners()
        while True:
            code: set[Any] = set()
            found = ReachedObjects(
                [*attributes, *self._roots()],
                apart=(id(self._module), *map(id, self._owners.values())),
                note_code=code.add,
            )
            if code <= self._code_read:
                break
            self._read(code - self._code_read)
        if found.left_out is not None:
            warn_once(
                f"left out/{type(self._module).__name__}",
                f"more than {MOST_OBJECTS:,} objects are reached from {type(self._module).__name__} and from what "
                f"its steps name, and those from {found.left_out} on are not looked at: what a step changes in "
                "them is changed on the last stage alone, for each micro-batch and in trials of the step. Keep "
                "what it changes in attributes of the module",
            )
        self.files = found.files
        return found.by_name

    def _roots(self) -> Iterator[tuple[str, Any]]:
        """What steps name beside the module, with names."""
        for place, name in self._names.items():
            value = name.table.get(place.name)
            if not isinstance(value, FunctionType):
                yield str(place), value
        for owner, of in self._owners.items():
            yield from ((f"{owner}.{key}", value) for key, value in vars(of).items())
        for function in self._search.functions:
            if vars(function):
                yield name_of(function), function
        for called, cache in self._search.caches.items():
            if not vars(cache).keys() <= OF_WRAPPERS:
                yield called, cache

    def _read(self, code: Iterable[Any]) -> None:
        """Read the methods of classes, and functions, for what they name."""
        for each in sorted(code, key=lambda each: (module_of(each), each.__qualname__)):
            self._code_read.add(each)
            if isinstance(each, FunctionType):
                self._search.read(each, None)
            else:
                for base in each.__mro__:
                    for member in () if is_librarys(base) else tuple(vars(base).values()):
                        self._search.read(member, base)
        self._take_names()

    def places(self) -> Iterator[tuple[Place, Any]]:
        """Every place with its value now, in the same order on all ranks."""
        for place, name in self._names.items():
            value = name.table.get(place.name, _MISSING)
            if value is not _MISSING and _is_data(value):
                yield place, value
        for owner, of in self._owners.items():
            for key, value in vars(of).items():
                # A function too, such as a transform: that another one is set here is found, and sent or said.
                if _is_data(value) or isinstance(value, FunctionType | type):
                    yield Place(owner, "beside", key), value

        if self._sees_environment:
            yield from ((Place(ENVIRONMENT, "beside", key), value) for key, value in sorted(os.environ.items()))
        trainer = getattr(self._module, "_trainer", None)
        attributes = vars(trainer) if self._of_trainer and trainer is not None else {}
        for key in sorted(self._of_trainer & attributes.keys()):
            if _is_data(attributes[key]):
                yield Place(TRAINER, "beside", key), attributes[key]

    @property
    def owner_ids(self) -> set[int]:
        """The identities of callbacks and data, which are looked at wherever they stand."""
        return set(map(id, self._owners.values()))

    def modules(self) -> list[nn.Module]:
        """The modules that the steps' code names and that are no part of the LightningModule, such as a loss."""
        return list({id(value): value for value in self.modules_at().values()}.values())

    def modules_at(self) -> dict[Place, nn.Module]:
        """The modules of :meth:`modules`, by where the code finds them; large ones (a teacher) are left out."""
        named = ((place, name.value) for place, name in self._names.items())
        found = {place: value for place, value in named if isinstance(value, nn.Module)}
        own = set(map(id, self._module.modules())) if found else set()
        return {
            place: value
            for place, value in found.items()
            if id(value) not in own and len(list(itertools.islice(value.modules(), MOST_PARTS + 1))) <= MOST_PARTS
        }

    def table(self, owner: str, name: str) -> MutableMapping[str, Any]:
        """Where the value of an owner stands that has this name.

        Raises:
            KeyError: no such owner is on this rank.
        """
        if owner == ENVIRONMENT:
            return os.environ
        if owner == TRAINER:
            return vars(self._module.trainer)
        own = self._names.get(Place(owner, "beside", name))
        if own is not None:
            return own.table
        return vars(self._found_owners()[owner])

    def name_at(self, place: Place) -> Name | None:
        """The name that the code has for a place; None of attributes of callbacks, data and the Trainer."""
        return self._names.get(place)

    def begin(self, *, undoable: bool) -> None:
        """Begin to look at all places before a step, more closely if that is to be undone, or once in a while."""
        self._owners = self._found_owners()
        self._num_looks += 1
        number = self._num_looks
        self._is_close = undoable or number & (number - 1) == 0 or number % LOOKS_BETWEEN == 0

    def look(self, place: Place, value: Any) -> Literal["whole", "versions", "checksum", "identity"]:
        """How closely to look at a value: a vocabulary or the data of a data set is seldom looked through."""
        if has_raw_state(value):
            return "whole" if raw_size(value) <= MOST_BYTES else "identity"
        if place in self._changed or _size_of(value) <= MOST_ITEMS:
            return "whole"
        if isinstance(value, Tensor | numpy.ndarray) and self._is_close and num_bytes_of(value) <= MOST_BYTES:
            return "whole"
        if isinstance(value, numpy.ndarray) and self._is_close and _has_checksum(value):
            return "checksum"
        if isinstance(value, numpy.ndarray) and self._is_close:
            self._say_of_unseen(place, value)
        if isinstance(value, Tensor):
            return "versions"
        # The lists of a sampler have a number for each sample.
        owner = self._owners.get(place.owner)
        is_order = isinstance(owner, Sampler) and self._written.isdisjoint((place.name, *_methods_of(type(owner))))
        return (
            "versions" if self._is_close and not is_order and not isinstance(value, numpy.ndarray) else "identity"
        )

    def _say_of_unseen(self, place: Place, array: Any) -> None:
        """Say once of an array that a step may write, and that is never looked into."""
        # Of callbacks and data all attributes are looked at, also those that no step names.
        if place in self._told or not array.flags.writeable or place.name not in self._written:
            return
        self._told.add(place)
        size = f"has {array.nbytes / 2**20:,.0f} MiB" + " of Python's objects" * array.dtype.hasobject
        why = "is in a file" if _is_in_file(array) else size
        warn_once(
            f"unseen/{place}",
            f"{place}, an array that the steps' code names, {why} and is not looked at: what a step writes into "
            "it is written on the last stage alone, for each micro-batch and in trials of the step. Where steps "
            "only read it, nothing differs, and array.flags.writeable = False says so; else write it in a hook, "
            "such as on_train_batch_end",
        )

    def note_change(self, place: Place) -> None:
        """Note that a step has changed a place: from now on all of it is looked at."""
        self._changed.add(place)

    def caches_kept(self) -> Callable[[], None]:
        """Return what takes out what functions with a cache and variables without a value have got since."""
        restoring = {name: (cache, cache_kept(cache)) for name, cache in self._search.caches.items()}
        context = None if self._context is None else self._context.copy()

        def restore() -> None:
            self._context = context
            for name, (cache, restored) in restoring.items():
                if not restored() and self._may_differ(cache):
                    warn_once(f"cache/{name}", FILLED.format(name=name))

        return restore

    def tell_of_caches(self, step: str) -> None:
        """Say once which caches a step has filled on this rank alone whose results are not the same anywhere."""
        for name, cache in self._search.caches.items():
            if name not in self._filled and cache.cache_info().currsize > self._num_results.get(name, 0):
                self._filled.add(name)
                if self._may_differ(cache):
                    warn_once(f"own cache/{name}", OF_LAST_STAGE.format(name=name, step=step))

    def _may_differ(self, cache: Any) -> bool:
        search = CodeSearch(self.is_programs)
        search.read(cache, None)
        return may_differ(search.functions, [name.value for name in search.found.values()])

    def context_apart(self, others_follow: bool) -> Context | None:
        """A context for a step whose traces are undone; None where that of this thread can be put back.

        A variable of the context that has no value cannot be made so again once a step has set it.

        Args:
            others_follow: Whether what the step sets is to be there for the next one, until it is undone.
        """
        values = itertools.chain(
            (name.value for name in self._names.values()),
            (value for _, owner in outside_pipeline(self._module) for value in vars(owner).values()),
        )
        if not any(type(value) is ContextVar and not raw_state(value) for value in values):
            return None
        if not others_follow:
            return copy_context() if self._context is None else self._context.copy()
        if self._context is None:
            self._context = copy_context()
        return self._context

    def is_of_program(self, value: Any) -> bool:
        """Whether the class of an object is the program's own, and not one of an installed package."""
        return self.is_programs(module_of(type(value)))

    def is_programs(self, module: str | None) -> bool:
        """Whether a file, by the name of its module, is the program's own, and not one of an installed package."""
        return (module or "").partition(".")[0] == self._package or not is_installed(module)

    def _found_owners(self) -> dict[str, Any]:
        trainer = getattr(self._module, "_trainer", None)
        if trainer is None:  # a step that runs by itself
            return {}
        named = {name: owner for name, owner in named_owners(self._module).items() if owner is not self._module}
        if trainer.datamodule is not None:
            named["the data module"] = trainer.datamodule
        for place, data in enumerate(filter(_is_looked_at, _data_sets_and_samplers(trainer))):
            named[f"{type(data).__name__}{f' {place}' if place else ''}"] = data
        return {name: owner for name, owner in named.items() if _is_looked_at(owner)}


_MISSING = object()


def _is_looked_at(owner: Any) -> bool:
    """Whether steps may change this owner: one of the program, or what draws by weights that a program may set."""
    is_programs = not is_librarys(type(owner)) or type(owner) is WeightedRandomSampler
    return is_programs and hasattr(owner, "__dict__")


def _methods_of(kind: type) -> set[str]:
    """The names of the functions that a program has written in a class, by which a step may change its objects."""
    own = (base for base in kind.__mro__ if not is_librarys(base))
    members = (member for base in own for member in vars(base).items())
    return {name for name, value in members if isinstance(value, FunctionType) and not name.startswith("__")}


def _data_sets_and_samplers(trainer: Any) -> Iterator[Any]:
    """What loaders read: a step may write down there how hard a sample is, by which the next epoch is drawn."""
    loaders = [trainer.train_dataloader, trainer.val_dataloaders, trainer.test_dataloaders]
    seen = set()
    while loaders:
        loader = loaders.pop(0)
        if isinstance(loader, list | tuple):
            loaders[:0] = loader
        elif isinstance(loader, dict):
            loaders[:0] = loader.values()
        else:
            of_batches = getattr(loader, "batch_sampler", None)
            samplers = [getattr(loader, "sampler", None), of_batches, getattr(of_batches, "sampler", None)]
            # Several pipelines have shares of the user's own sampler, which Lightning takes for a data set.
            samplers += [getattr(getattr(each, "dataset", None), "_sampler", None) for each in samplers]
            for data in (getattr(loader, "dataset", None), *samplers):
                if data is not None and id(data) not in seen:
                    seen.add(id(data))
                    yield data


def _size_of(value: Any) -> int:
    if isinstance(value, Tensor | numpy.ndarray):
        return value.numel() if isinstance(value, Tensor) else value.size
    return len(value) if isinstance(value, dict | list | set | tuple | deque) else 0


def _has_checksum(array: Any) -> bool:
    """Whether a checksum of an array takes a second at the most, and reads no file."""
    return array.nbytes <= MOST_BYTES_SUMMED and not array.dtype.hasobject and not _is_in_file(array)


def _is_in_file(array: Any) -> bool:
    return isinstance(array, numpy.memmap) or isinstance(array.base, numpy.memmap)


def _is_data(value: Any) -> bool:
    """Whether a value is something to be looked at, and not code, a model or what is followed elsewhere."""
    if isinstance(value, Metric | MetricCollection):
        return True  # which a step tells something
    if isinstance(
        value, ModuleType | type | FunctionType | nn.Module | Iterator | staticmethod | classmethod | property
    ):
        return False
    return not isinstance(value, GENERATORS)
