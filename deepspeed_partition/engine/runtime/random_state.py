"""Random generators that layers may draw from, put back to where they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
