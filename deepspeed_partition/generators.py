"""Generators of random numbers that a program draws from, and their states."""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from itertools import islice
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from deepspeed_partition.code_names import is_installed
from deepspeed_partition.numpy_state import NumpyState, state_of

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
"""The types of what a program draws random numbers from."""

METHODS = (MethodType, BuiltinMethodType, MethodWrapperType)
"""The types of what has an object as its ``__self__``; other objects may raise anything when they are asked."""

COMMON: dict[str, Any] = {"random": random._inst, "numpy.random": np.random.mtrand._rand}
"""The common generators of Python and of NumPy."""

TRACKER = "_CUDA_RNG_STATE_TRACKER"
"""Name by which DeepSpeed's checkpointing, and each Megatron, has the states that dropout draws from there."""

_NO_OBJECTS = (nn.Module, type, torch.Tensor, FunctionType, *METHODS)
_OF_TORCH = frozenset(vars(nn.Module()))
_LIBRARIES = frozenset(
    ("deepspeed", "lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics")
)
OF_THREADS = frozenset(
    ("asyncio", "concurrent", "logging", "multiprocessing", "queue", "selectors", "subprocess", "threading")
)
"""Modules of Python whose objects threads change at any time: who waits for one stands among its attributes."""
_DEPTH = 3
_MOST_MEMBERS = 1000


def generator_state(generator: Any) -> Any:
    """The state of one of :data:`GENERATORS`, which can be pickled; None of one that has none."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return _bits_of(generator).state


def set_generator_state(generator: Any, state: Any) -> None:
    """Put a generator to where :func:`generator_state` has found it."""
    if state is None:
        return
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bits_of(generator).state = state


def common_states() -> dict[str, Any]:
    """Where the common generators of Python, NumPy and torch are, and the states of trackers, by their names.

    They are to be compared with ``==``.
    """
    return _states_with(_state_of_numpy())


def _states_with(of_numpy: Any) -> dict[str, Any]:
    states = {
        "random": COMMON["random"].getstate(),
        "numpy.random": of_numpy,
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    for module, tracked in tracked_states().items():
        states |= {
            f"{name} of {module}": state.cpu().numpy().tobytes()
            for name, state in tracked.items()
            if isinstance(state, torch.Tensor)
        }
    return states


def common_marks() -> dict[str, Any]:
    """Values by which it shows whether the generators of :func:`common_states` were drawn from, in less time.

    NumPy's state is read where it lies.
    """
    state = state_of(COMMON["numpy.random"])
    return _states_with(state) if isinstance(state, NumpyState) else common_states()


def _state_of_numpy() -> tuple[Any, ...]:
    generator = COMMON["numpy.random"]
    if type(generator._bit_generator) is not np.random.MT19937:  # after ``numpy.random.set_bit_generator``
        return (pickle.dumps(generator.get_state(legacy=False)),)
    kind, words, *rest = generator.get_state()
    return (kind, words.tobytes(), *rest)


def is_tracked(name: str) -> bool:
    """Whether a name of :func:`common_states` is that of a state in a tracker, which no seed of torch changes."""
    return " of " in name


def tracked_states() -> dict[str, dict[str, Any]]:
    """The states that trackers hold now, by the names of their modules; a draw puts others in their places."""
    return {module: dict(tracker.states_) for module, tracker in _trackers().items()}


def set_tracked_states(states: dict[str, dict[str, Any]]) -> None:
    """Put trackers back to where :func:`tracked_states` has found them; one that is newer stays."""
    for module, tracker in _trackers().items():
        if module in states:
            tracker.states_ = dict(states[module])


_modules_with_trackers: tuple[int, list[tuple[str, dict[str, Any]]]] = 0, []


def _trackers() -> dict[str, Any]:
    """The trackers of all modules, each once."""
    global _modules_with_trackers
    if _modules_with_trackers[0] != len(sys.modules):
        tables = [(name, getattr(module, "__dict__", None)) for name, module in list(sys.modules.items())]
        found = [(name, table) for name, table in tables if isinstance(table, dict) and TRACKER in table]
        _modules_with_trackers = len(sys.modules), found
    by_id: dict[int, str] = {}
    trackers = {}
    for name, table in _modules_with_trackers[1]:
        tracker = table.get(TRACKER)
        if isinstance(getattr(tracker, "states_", None), dict) and by_id.setdefault(id(tracker), name) == name:
            trackers[name] = tracker
    return trackers


def set_common_state(name: str, state: Any) -> None:
    """Put a common generator to where :func:`common_states` has found it."""
    if name == "random":
        COMMON[name].setstate(state)
    elif name == "numpy.random" and len(state) == 1:
        COMMON[name].set_state(pickle.loads(state[0]))
    elif name == "numpy.random":
        kind, words, *rest = state
        COMMON[name].set_state((kind, np.frombuffer(words, np.uint32), *rest))
    elif is_tracked(name):
        key, _, module = name.rpartition(" of ")
        _trackers()[module].states_[key] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    else:
        numbers = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        (torch.set_rng_state if name == "torch" else torch.cuda.set_rng_state)(numbers)


def _bits_of(generator: Any) -> Any:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def generators_of(module: nn.Module) -> dict[str, Any]:
    """Return the random generators that a module's own attributes hold, by names such as ``tools['first'][0]``.

    They may be in lists, tuples, dicts and deques, in objects of the program, and behind a method that draws
    (``self.draw = random.Random(0).random``).
    """
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name not in _OF_TORCH and not isinstance(value, nn.Module):
            _add_generators(value, name, _DEPTH, found)
    return found


def _add_generators(value: Any, name: str, depth: int, found: dict[str, Any]) -> None:
    owner = value.__self__ if isinstance(value, METHODS) else None
    if isinstance(value, GENERATORS) or isinstance(owner, GENERATORS):
        held = value if isinstance(value, GENERATORS) else owner
        if not any(held is other for other in found.values()):
            found[name] = held
    elif not depth or isinstance(value, str | bytes | torch.Tensor | np.ndarray | bool | int | float | None):
        return
    elif isinstance(value, dict | list | tuple | deque):
        members = value.items() if isinstance(value, dict) else enumerate(value)
        for key, member in islice(members, _MOST_MEMBERS):
            _add_generators(member, f"{name}[{key!r}]", depth - 1, found)
    else:
        for key, member in (members_of(value) or {}).items():
            _add_generators(member, f"{name}.{key}", depth - 1, found)


def members_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of the program, such as a meter; None of all else, also of what is called."""
    return None if callable(value) else attributes_of_object(value)


def attributes_of_object(value: Any) -> dict[str, Any] | None:
    """As :func:`members_of`, and also of an object that can be called and is no function, such as a schedule."""
    kind = type(value)
    if isinstance(value, _NO_OBJECTS) or not hasattr(value, "__dict__"):
        return None
    if isinstance(value, ModuleType) and is_installed(value.__name__):  # which loads parts of itself at any time
        return None
    table = vars(value)
    of_library = str(kind.__module__).partition(".")[0] in (*_LIBRARIES, *OF_THREADS)
    return None if of_library or not isinstance(table, dict) or len(table) > _MOST_MEMBERS else table
