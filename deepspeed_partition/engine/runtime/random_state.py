"""Random generators that layers may draw from, put back to where they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_partition.generators import (
    COMMON,
    common_marks,
    generator_state,
    generators_of,
    set_generator_state,
    set_tracked_states,
    tracked_states,
)
from deepspeed_partition.numpy_state import put_back, state_of


def random_state() -> Callable[[], None]:
    """Return a function that puts every random generator that a layer may draw from back to where it is now."""
    python, numbers, cpu = random.getstate(), state_of(COMMON["numpy.random"]), torch.get_rng_state()
    device = device_state()
    tracked = tracked_states()

    def restore() -> None:
        set_tracked_states(tracked)
        random.setstate(python)
        put_back(COMMON["numpy.random"], numbers)
        torch.set_rng_state(cpu)
        set_device_state(device)

    return restore


def device_state() -> torch.Tensor | None:
    """Return where torch's generator of the present device is; None on a CPU, which has no other."""
    accelerator = get_accelerator()
    return None if accelerator.device_name() == "cpu" else accelerator.get_rng_state()


def set_device_state(state: torch.Tensor | None) -> None:
    """Put torch's generator of the present device to where :func:`device_state` has found one."""
    if state is not None:
        get_accelerator().set_rng_state(state)


def drawn_state(layers: Iterable[object]) -> Callable[[], None]:
    """Return a function that puts generators back to where they are now: those that a checkpoint leaves alone.

    These are Python's, NumPy's, states of trackers, and what layers hold in attributes: of torch, of ``random``
    and of NumPy. Torch's own checkpoint restores torch's default generators alone.

    Args:
        layers: modules, with all modules in them; anything else has no generators.
    """
    python, numbers, tracked = random.getstate(), state_of(COMMON["numpy.random"]), tracked_states()
    own = [
        partial(set_generator_state, generator, generator_state(generator))
        for layer in layers
        if isinstance(layer, torch.nn.Module)
        for module in layer.modules()
        for generator in generators_of(module).values()
    ]

    def restore() -> None:
        random.setstate(python)
        put_back(COMMON["numpy.random"], numbers)
        set_tracked_states(tracked)
        for put_back_own in own:
            put_back_own()

    return restore


def torch_state() -> bytes:
    """Return where torch's generators are, of the CPU and the accelerator: it changes when one is drawn from."""
    states = torch.get_rng_state(), device_state()
    return b"".join(state.cpu().numpy().tobytes() for state in states if state is not None)


def device_drawn_on(before: bytes, after: bytes) -> str | None:
    """Return the kind of device whose generator was drawn from between two states of :func:`torch_state`."""
    if before == after:
        return None
    size = torch.get_rng_state().numel()
    return "cpu" if before[size:] == after[size:] else get_accelerator().device_name()


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Leave every random generator that building a layer may draw from as it was."""
    restore = random_state()
    try:
        yield
    finally:
        restore()


class DrawnAtOnce:
    """A look at whether layers draw between two micro-batches from a generator that the data is drawn from.

    All micro-batches of a batch are read before the first one is computed, and plain DeepSpeed reads each when it
    is computed: where both draw from one generator, they get its numbers in another order.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        """Generators from which the present batch was drawn, and the one before. A loader draws one
        when it begins an epoch, on which no sample need depend."""
        self._drawn: set[str] = set()
        self._states: dict[str, Any] = {}
        self._is_said = self._has_read = self._shuffles = False

    def note_reading(
        self, before: Mapping[str, Any], after: dict[str, Any], num_micro_batches: int, *, has_seeds: bool
    ) -> None:
        """Note that a batch has been read.

        Args:
            before: :func:`~deepspeed_partition.generators.common_marks` before it was.
            after: The same afterwards.
            num_micro_batches: Those of the batch.
            has_seeds: Whether layers are given seeds, which set torch's generator.
        """
        drawn, self._drawn, self._names = self._drawn, set(), set()
        has_read, self._has_read, self._shuffles = self._has_read, True, False
        if self._is_said or (num_micro_batches == 1 and not has_seeds):
            return
        self._states = after
        self._drawn = {name for name, state in self._states.items() if state != before[name]}
        self._names = drawn & self._drawn if num_micro_batches > 1 else set()
        self._shuffles = (
            has_seeds
            and has_read
            and "torch" in self._drawn
            and not _is_one_draw(before["torch"], self._states["torch"])
        )

    def is_shuffled_by_seeds(self) -> bool:
        """Whether an epoch began with this batch whose order depends on the seeds that layers have set."""
        return self._shuffles and not self._names and common_marks()["torch"] != self._states["torch"]

    def computed(self) -> list[str]:
        """The generators that the batch and its computation have both drawn from, once it is computed."""
        if not self._names:
            return []
        now = common_marks()
        names = sorted(name for name in self._names if now[name] != self._states[name])
        self._is_said = self._is_said or bool(names)
        return names


def _is_one_draw(before: bytes, after: bytes) -> bool:
    """Whether torch's generator gave one number in between, as to each iterator of a loader for its workers."""
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(before), dtype=torch.uint8))
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return generator.get_state().numpy().tobytes() == after
