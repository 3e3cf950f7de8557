"""Generators of random numbers that a program draws from, and their states."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
"""The types of what a program draws random numbers from."""

COMMON: dict[str, Any] = {"random": random._inst, "numpy.random": np.random.mtrand._rand}
"""The common generators of Python and of NumPy."""


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


def _bits_of(generator: Any) -> Any:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator
