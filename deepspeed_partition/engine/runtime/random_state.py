"""Random generators that layers may draw from, put back to where they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy
import torch
from deepspeed.accelerator import get_accelerator


def random_state() -> Callable[[], None]:
    """Return a function that puts every random generator that a layer may draw from back to where it is now."""
    accelerator = get_accelerator()
    python, numbers, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    device = None if accelerator.device_name() == "cpu" else accelerator.get_rng_state()

    def restore() -> None:
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.set_rng_state(cpu)
        if device is not None:
            accelerator.set_rng_state(device)

    return restore


def drawn_state(layers: Iterable[object]) -> Callable[[], None]:
    """Return a function that puts generators back to where they are now: those that a checkpoint leaves alone.

    These are Python's, NumPy's, and what layers hold as attributes: of torch, of ``random`` and of NumPy. Torch's
    own checkpoint restores torch's default generators alone.

    Args:
        layers: modules, with all modules in them; anything else has no generators.
    """
    python, numbers = random.getstate(), numpy.random.get_state()
    own = [
        _state_of(value)
        for layer in layers
        if isinstance(layer, torch.nn.Module)
        for module in layer.modules()
        for value in vars(module).values()
    ]

    def restore() -> None:
        random.setstate(python)
        numpy.random.set_state(numbers)
        for put_back in own:
            put_back()

    return restore


def _state_of(value: object) -> Callable[[], object]:
    """Return what puts a generator back to where it is now; nothing happens where it is none."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return lambda: None


def torch_state() -> bytes:
    """Return where torch's generators are, of the CPU and the accelerator: it changes when one is drawn from."""
    accelerator = get_accelerator()
    states = [torch.get_rng_state()]
    if accelerator.device_name() != "cpu":
        states.append(accelerator.get_rng_state())
    return b"".join(state.cpu().numpy().tobytes() for state in states)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Leave every random generator that building a layer may draw from as it was."""
    restore = random_state()
    try:
        yield
    finally:
        restore()
