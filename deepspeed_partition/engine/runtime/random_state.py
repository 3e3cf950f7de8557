"""Random generators that layers may draw from, put back to where they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_partition.generators import generator_state, generators_of, set_generator_state


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

    These are Python's, NumPy's, and what layers hold in attributes: of torch, of ``random`` and of NumPy. Torch's
    own checkpoint restores torch's default generators alone.

    Args:
        layers: modules, with all modules in them; anything else has no generators.
    """
    python, numbers = random.getstate(), numpy.random.get_state()
    own = [
        partial(set_generator_state, generator, generator_state(generator))
        for layer in layers
        if isinstance(layer, torch.nn.Module)
        for module in layer.modules()
        for generator in generators_of(module).values()
    ]

    def restore() -> None:
        random.setstate(python)
        numpy.random.set_state(numbers)
        for put_back in own:
            put_back()

    return restore


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
