"""What the ranks of a pipeline have built otherwise than each other: models, attributes, globals.

Each rank runs the program, and ``if int(os.environ["RANK"]) == 0:`` in ``__init__`` gives one of them another flag
or layer. A step then goes by what the rank of the last stage has, and a layer by what the rank has that runs it,
where one process has what rank 0 has.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
from collections.abc import Container, Iterator, Mapping
from itertools import takewhile
from types import CodeType, FunctionType, NoneType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric, MetricCollection

from deepspeed_partition.code_names import CodeSearch, forward_of, function_of, is_installed, names_in
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import warn_once
from lightning_madpipe.steps.beside_module import ENVIRONMENT, BesideModule
from lightning_madpipe.steps.rank_of_step import VARIABLES

MODEL = (
    "{name} is {first} on rank 0 and {other} on rank {rank}{more}: the ranks of a pipeline train one model, of "
    "which each runs a part, and a step runs on the last stage. Build the same on all of them, without asking for "
    "the rank"
)
ATTRIBUTES = (
    "{named}{more}: a step runs on the last stage of a pipeline, a layer on the rank that has it, and each goes "
    "by what that rank has, where one process has what rank 0 has. Set the same on all ranks; where something is "
    "for rank 0 alone, ask self.trainer.is_global_zero for it, which is as in one process in steps, too"
)
LAYER = (
    "{name} ({kind}) asks for {what} where it computes: a layer runs on the rank that has it, which the plan "
    "chooses, so that what depends on the rank is another thing than in one process: give it what it needs in "
    "__init__() or as an input, the same on all ranks"
)
MOST_NAMED = 3
MOST_ITEMS = 100
MOST_LETTERS, LETTERS_BEFORE = 60, 20
"""How many letters of a long value are shown, and how many of them stand before the first that differs."""
_FUNCTIONS = frozenset(("get_rank", "get_world_size", "global_rank", "is_global_zero", "local_rank"))
_PLAIN = (bool, bytes, complex, float, int, str, NoneType, torch.dtype)
_OF_TORCH = frozenset(vars(nn.Module()))
_MISSING = object()

Description = dict[str, str]
"""Values in words, by names that are the same on all ranks."""


def compare_ranks(
    module: Any, ignored: Mapping[str, Any], rank: int, num_pipelines: int, *, is_new: bool
) -> str | None:
    """Compare what the ranks have built, say which attributes differ, and return why they cannot train.

    Collective.

    Args:
        module: The LightningModule.
        ignored: Attributes that its user does not set.
        rank: The number of this process.
        num_pipelines: The number of pipelines, of which each may have attributes of its own.
        is_new: Whether no run was before, so that all layers can be read.
    """
    model, attributes = _model_of(module) if is_new else {}, _attributes_of(module, ignored)
    digest = hashlib.sha256(repr((sorted(model.items()), sorted(attributes.items()))).encode()).digest()
    if len(set(gather_objects(digest))) == 1:
        return None
    models, everyones = zip(*gather_objects((model, attributes)), strict=True)
    for other_rank, other in enumerate(models):
        if names := _differing(models[0], other):
            first, own = (each.get(names[0], "missing") for each in (models[0], other))
            more = _more(len(names) - 1)
            first, own = where_unlike(first, own)
            return MODEL.format(name=names[0], first=first, other=own, rank=other_rank, more=more)
    first_rank = rank % num_pipelines
    for other_rank in range(first_rank, len(everyones), num_pipelines):
        first, other = everyones[first_rank], everyones[other_rank]
        if names := _differing(first, other):
            pairs = [
                (name, where_unlike(first.get(name, "missing"), other.get(name, "missing")))
                for name in names[:MOST_NAMED]
            ]
            named = [
                f"{name} is {here} on rank {first_rank} and {there} on rank {other_rank}"
                for name, (here, there) in pairs
            ]
            more = _more(len(names) - MOST_NAMED)
            warn_once(f"unlike/{names}", ATTRIBUTES.format(named="; ".join(named), more=more))
            break
    return None


def where_unlike(first: str, other: str) -> tuple[str, str]:
    """Two values in words; of long ones what is there where they begin to differ."""
    if max(len(first), len(other)) <= MOST_LETTERS:
        return first, other
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, other, strict=False)))
    begin = max(0, alike - LETTERS_BEFORE)

    def part(text: str) -> str:
        end = begin + MOST_LETTERS
        return f"{'...' * (begin > 0)}{text[begin:end]}{'...' * (end < len(text))}"

    return part(first), part(other)


def in_words(value: Any) -> str | None:
    """A value that all ranks write alike if it is the same; None of one that is not compared."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, FunctionType | type):
        return value.__qualname__
    if isinstance(value, list | tuple | set | frozenset | dict) and len(value) <= MOST_ITEMS:
        items = _items_of(value) if isinstance(value, dict) else [*value]
        words = [in_words(item) for item in items]
        if all(each is not None for each in words):
            # The order of texts in a set is each process's own.
            joined = ", ".join(map(str, sorted(words, key=str) if isinstance(value, set | frozenset) else words))
            return f"{type(value).__name__}({joined})"
    return None


def layers_that_ask(module: nn.Module, layers: Container[nn.Module]) -> Iterator[str]:
    """A sentence for each class of layers whose code asks for the rank that it runs on.

    Args:
        module: The LightningModule.
        layers: The modules that layers consist of.
    """
    seen: set[type] = set()
    for name, part in module.named_modules():
        if part in layers and type(part) not in seen:
            seen.add(type(part))
            search = CodeSearch(lambda file: not is_installed(file))
            search.read(forward_of(part), type(part))
            if asked := _asked_in(search):
                yield LAYER.format(name=f"self.{name}", kind=type(part).__name__, what=asked)


def _asked_in(search: CodeSearch) -> str | None:
    if asked := sorted(_FUNCTIONS & search.written):
        return asked[0]
    texts = {text for each in search.functions for text in _texts_in(each.__code__)}
    variables = sorted(VARIABLES & texts) if {"environ", "getenv"} & search.written else []
    return f"{variables[0]} of the environment" if variables else None


def _texts_in(code: CodeType) -> Iterator[str]:
    for each in code.co_consts:
        if isinstance(each, str):
            yield each
        elif isinstance(each, CodeType):
            yield from _texts_in(each)


def _differing(first: Description, other: Description) -> list[str]:
    return [name for name in {**first, **other} if first.get(name) != other.get(name)]


def _more(number: int) -> str:
    return f", and {number} more differ" if number > 0 else ""


def _model_of(module: nn.Module) -> Description:
    """The classes of all parts, what torch's own have been given, and the shapes of weights."""
    found: Description = {}
    for name, part in module.named_modules():
        if name:
            found[f"self.{name}"] = type(part).__name__
        if type(part).__module__.startswith("torch.nn."):
            for key, value in _set_on(part):
                if key != "training" and not key.startswith("_") and (words := in_words(value)) is not None:
                    found[f"self.{name}.{key}"] = words
    for name, weight in module.named_parameters():
        if not is_lazy(weight):
            trains = "" if weight.requires_grad else ", frozen"
            found[f"self.{name}"] = f"{tuple(weight.shape)} of {str(weight.dtype).removeprefix('torch.')}{trains}"
    return found


def _attributes_of(module: Any, ignored: Mapping[str, Any]) -> Description:
    """What the code of steps and layers names: attributes, hyperparameters, globals."""
    beside = BesideModule(module)
    found: Description = {}
    for name, part in module.named_modules():
        if isinstance(part, Metric | MetricCollection) or type(part).__module__.startswith("torch.nn."):
            continue
        kind: Any = type(part)
        names = beside.written | _names_of(kind)
        for key, value in _set_on(part):
            if key in names and not (part is module and key in ignored):
                _describe(found, ".".join(filter(None, ("self", name, key))), value)
    for key, value in dict(getattr(module, "hparams", {})).items():
        if key in beside.written:
            _describe(found, f"self.hparams.{key}", value)
    for place, value in beside.places():
        if place.owner != ENVIRONMENT:
            _describe(found, str(place), value)
    return found


@functools.cache
def _names_of(kind: Any) -> frozenset[str]:
    """The names in the code by which a layer of the program computes."""
    forward = function_of(inspect.getattr_static(kind, "forward", None))
    return frozenset() if forward is None else frozenset(names_in(forward.__code__))


def _set_on(part: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from ((key, value) for key, value in vars(part).items() if key not in _OF_TORCH)


def _describe(found: Description, name: str, value: Any) -> None:
    words = in_words(value)
    if words is not None and not (isinstance(value, str) and os.sep in value):  # a file of each rank
        found[name] = words


def _items_of(table: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """What a dict says, without what a class of dicts notes about it under private keys.

    The configurations of diffusers list the settings left to defaults, in the order of a set.
    """
    has_notes = type(table).__module__.partition(".")[0] not in sys.stdlib_module_names
    return [(key, value) for key, value in table.items() if not (has_notes and str(key).startswith("_"))]
