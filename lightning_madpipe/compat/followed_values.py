"""Values that are followed from the parameters that they come from, through every function of torch.

What mixes those of several parameters is told, and what draws random numbers for them, takes numbers out of them,
or looks at their gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Generator, Tensor, equal
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_madpipe.compat.elsewhere import StandIn
from lightning_madpipe.compat.hook_sentences import (
    ELEMENTS_OF_SEVERAL,
    LOGGED,
    NUMBERS_OF_SEVERAL,
    RANDOM,
    SEVERAL,
    WHOLE_STATE,
)
from lightning_madpipe.compat.running_code import is_logged, is_saved

RANDOM_FACTORIES = frozenset(("rand", "randn", "randint", "randperm", "normal"))
RANDOM_OF_TENSORS = frozenset((
    "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "poisson", "dropout", "normal_",
    "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_", "geometric_", "log_normal_",
))  # fmt: skip

NUMBERS = frozenset((
    "item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__float__", "__int__", "__bool__", "__index__",
    "__complex__", "__array__",
))  # fmt: skip
"""Functions by which a value leaves torch."""

FORMS = frozenset((
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "requires_grad_", "is_leaf", "size", "dim",
    "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_contiguous", "stride", "data_ptr",
    "__len__", "grad_fn", "is_cuda", "is_sparse", "is_meta", "is_quantized", "retains_grad", "names", "type",
    "get_device",
    "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full",
    "untyped_storage", "storage_offset", "register_hook", "_version", "_base", "name", "__hash__", "__repr__",
    "__format__", "_is_view", "is_inference", "is_pinned", "is_signed", "output_nr", "itemsize", "nbytes",
))  # fmt: skip
"""What can be asked of a tensor without its values; the text of one is for people."""

MOST_WRITTEN = 8
"""How many of the parameters that a hook writes are looked at for draws between them."""

GRADIENT, NO_GRADIENT = "a gradient", "no gradient"
"""What is found where a gradient is looked at; what it means depends on the hook."""

NOISE = "random numbers"
"""Stands among the sources of a value for a draw of no parameter."""

SEEDED = "random numbers of a seed"
"""Stands there for a draw from a generator that has just got its seed, by which alone the numbers go."""

DRAWS = frozenset((NOISE, SEEDED))


class FollowedValues(TorchFunctionMode):
    """Follows values from the parameters that they come from, and tells what mixes several.

    Args:
        names: Gives the name of each parameter of this rank by its ``id``; asked for at the first use of one.
        sources: What values that live on after a hook come from, by tensor.
        tell: Called with a kind of sentence and the names of parameters.
        states: Gives numbers that tell whether generators of Python's and NumPy's were drawn from.
        tell_of_write: Called with the names of what is written, and of the parameters by which it is.
        buffers: Gives the name of each buffer beside the layers, by its ``id``.
        tell_of_use: Called before values of tensors may be used, with whether the first is written, with the
            tensors and with the names of the parameters that they come from; None: nobody asks.
    """

    def __init__(
        self,
        names: Callable[[], Mapping[int, str]],
        sources: WeakIdKeyDictionary,
        tell: Callable[[str, Iterable[str]], None],
        states: Callable[[], list[int]],
        tell_of_write: Callable[[frozenset[str], frozenset[str]], None] = lambda written, by: None,
        buffers: Callable[[], Mapping[int, str]] = dict,
        tell_of_use: Callable[[bool, list[Tensor], frozenset[str]], None] | None = None,
    ) -> None:
        super().__init__()
        self._tell_of_use = tell_of_use
        self._read_buffers = buffers
        self._buffers: Mapping[int, str] | None = None
        self._tell_of_write = tell_of_write
        self._read_states = states
        self._written: dict[str, list[int]] = {}
        """Parameters that were written, and where generators were then."""
        self.written: set[str] = set()
        """The parameters that may have been written, through themselves or through what is made of them."""
        self._read_names, self._sources, self._tell = names, sources, tell
        self._known: Mapping[int, str] | None = None
        self._read: list[str] = []
        self._counted: frozenset[str] = frozenset()
        self._drawn_for: set[str] = set()
        """Parameters for which numbers were drawn by a seed."""
        self._has_met_one = False
        """Whether a parameter was looked at: what was drawn before is the same on all ranks."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if len(self._drawn_for) == 1:  # one generator for all ranks' parameters would be at its seed here, too
            self._tell(RANDOM, self._drawn_for)

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        name = _name_of(function)
        is_seeded = _is_just_seeded(keywords.get("generator"))
        if self._tell_of_use is not None and name not in FORMS and name != "grad":
            self._note_use(self._tell_of_use, name, (*arguments, *keywords.values()))
        try:
            result = function(*arguments, **keywords)
        except RuntimeError:
            self._note_failure((*arguments, *keywords.values()))
            raise
        if not self._has_met_one:
            self._has_met_one = any(map(self._is_of_parameters, _tensors((*arguments, *keywords.values()))))
        if name in ("numel", "nelement"):
            self._note_count(*_tensors(arguments[:1]))
        elif name == "requires_grad_":
            self._note_draws(frozenset[str]().union(*map(self._sources_of, _tensors(arguments[:1]))) - DRAWS)
        elif name not in FORMS:
            if name == "__deepcopy__":  # whose second argument holds all that was copied before
                self._follow(name, arguments[:1], result)
            elif name.startswith("_foreach_"):
                for each in _one_by_one(arguments, result):
                    self._follow(name, *each, is_seeded=is_seeded)
            else:
                self._follow(name, (*arguments, *keywords.values()), result, is_seeded=is_seeded)
        return result

    def _follow(self, name: str, arguments: tuple[Any, ...], result: Any, *, is_seeded: bool = False) -> None:
        given = list(_tensors(arguments))
        sources = frozenset[str]().union(*(self._sources_of(tensor) for tensor in given))
        is_drawn = self._has_met_one and (name in RANDOM_FACTORIES or name in RANDOM_OF_TENSORS)
        weights = sources - DRAWS
        if name == "grad" and not any(weight.startswith(FLAT) for weight in weights) and weights:
            self._tell(NO_GRADIENT if result is None else GRADIENT, weights)
        if not sources and not is_drawn:
            return
        drawn = sources | {SEEDED if is_seeded else NOISE} if is_drawn else sources
        if weights and NOISE in drawn:
            self._tell(RANDOM, weights)
        elif weights and SEEDED in drawn:
            self._drawn_for |= weights
        written = _writes(name)
        if written and given and weights:
            target = self._known_or_own(given[0]) - DRAWS
            if target and not weights <= target:
                self._tell_of_write(target, weights - target)
        if len(weights) > 1 or (weights and self._is_all_of_a_rank(weights) and _is_one_of_many(given, result)):
            self._tell(SEVERAL, weights)
        if name in NUMBERS:
            self._note_number(weights)
        elif name == "clone" and weights and is_logged(sys._getframe()):
            self._tell(LOGGED, weights)
        elif name == "detach" and weights and is_saved(sys._getframe()):
            self._tell(WHOLE_STATE, weights)
        elif written and given:
            self.written |= self._sources_of(given[0])
            self._note_draws(self._sources_of(given[0]) - DRAWS)
            self._read = [weight for weight in self._read if weight not in self._sources_of(given[0])]
        for tensor in _tensors((result,)):
            if id(tensor) not in (self._known or ()) and self._sources_of(tensor) != drawn:
                self._sources[tensor] = drawn

    def _note_failure(self, arguments: tuple[Any, ...]) -> None:
        """Tell of what could not be computed, as of shapes that differ, as if it had been written.

        Where code goes through a copy and the layers together, those beside one another on this rank are others.
        """
        weights = frozenset[str]().union(*(self._known_or_own(tensor) for tensor in _tensors(arguments))) - DRAWS
        if len(weights) > 1:
            self._tell_of_write(weights, weights)

    def _known_or_own(self, tensor: Tensor) -> frozenset[str]:
        own = self._own_name(tensor)
        return self._sources_of(tensor) if own is None else own

    def _note_use(
        self, tell: Callable[[bool, list[Tensor], frozenset[str]], None], name: str, arguments: tuple[Any, ...]
    ) -> None:
        """Tell of tensors that a function is about to use, and of the parameters that they come from."""
        given = list(_tensors(arguments))
        weights = frozenset[str]().union(*(self._sources_of(tensor) for tensor in given)) - DRAWS
        if given:
            tell(_writes(name), given, weights)

    def _note_draws(self, weights: frozenset[str]) -> None:
        """Note that parameters are written: what is drawn between two of them is drawn for each.

        What is drawn once before the first is the same number on every rank, for all of them.
        """
        if not weights or len(self._written) >= MOST_WRITTEN or weights <= self._written.keys():
            return
        now = self._read_states()
        if any(before != now for before in self._written.values()):
            self._tell(RANDOM, weights)
        self._written.update(dict.fromkeys(weights, now))

    def _note_number(self, weights: frozenset[str]) -> None:
        """Note that numbers leave torch: those of several parameters may meet where nobody sees it.

        A number that is read of a parameter before it is written, such as whether to scale it, counts no more.
        """
        self._read += [weight for weight in weights if weight not in self._read]
        if len(self._read) > 1 or (self._read and self._is_all_of_a_rank(weights)):
            self._tell(NUMBERS_OF_SEVERAL, self._read)

    def _note_count(self, tensor: Tensor) -> None:
        """Note that elements are counted: those of several parameters are that of a part of them."""
        sources = self._sources_of(tensor)
        self._counted |= sources
        if len(self._counted) > 1 or (sources and self._is_all_of_a_rank(sources)):
            self._tell(ELEMENTS_OF_SEVERAL, self._counted)

    def _is_of_parameters(self, tensor: Tensor) -> bool:
        return isinstance(tensor, StandIn) or bool(self._sources_of(tensor) - DRAWS)

    def _own_name(self, tensor: Tensor) -> frozenset[str] | None:
        """The name of a buffer that is written; None for another tensor."""
        if self._buffers is None:
            self._buffers = self._read_buffers()
        name = self._buffers.get(id(tensor))
        return None if name is None else frozenset((name,))

    def _sources_of(self, tensor: Tensor) -> frozenset[str]:
        if self._known is None:
            self._known = self._read_names()  # which notes what optimizers keep, too
        found = self._sources.get(tensor)
        if found is not None:
            return found
        name = self._known.get(id(tensor))
        return frozenset() if name is None else frozenset((name,))

    def _is_all_of_a_rank(self, weights: frozenset[str]) -> bool:
        """Whether a single tensor holds all that this rank has, as a flat one does."""
        return len(self._known or ()) == 1 or any(name.startswith(FLAT) for name in weights)


FLAT = "the flat weights of group "
"""How tensors are named that DeepSpeed gives an optimizer in the place of parameters."""


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):  # of a property
        of = getattr(getattr(function, "__self__", None), "__name__", name)
        return of if name == "__get__" else name
    return name


def _is_just_seeded(generator: Any) -> bool:
    """Whether nothing was drawn from a generator since it got its seed."""
    if not isinstance(generator, Generator):
        return False
    seeded = Generator(generator.device).manual_seed(generator.initial_seed())
    return equal(seeded.get_state(), generator.get_state())


def _writes(name: str) -> bool:
    """Whether a function changes its first tensor in place."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__set__") or (name.startswith("__i") and name != "__index__")


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _one_by_one(arguments: tuple[Any, ...], result: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The calls that one of a function on lists of tensors stands for."""
    lists = [
        value for value in arguments if isinstance(value, list | tuple) and any(True for _ in _tensors(value))
    ]
    common = tuple(value for value in arguments if not any(value is each for each in lists))
    results = result if isinstance(result, list | tuple) else [None] * len(lists[0] if lists else ())
    for each, made in zip(zip(*lists, strict=True), results, strict=True):
        yield (*each, *common), made


def _is_one_of_many(given: list[Tensor], result: Any) -> bool:
    """Whether a call has made one number of a tensor."""
    return isinstance(result, Tensor) and result.numel() == 1 and any(tensor.numel() > 1 for tensor in given)
