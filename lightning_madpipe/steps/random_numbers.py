"""Random numbers of a pipeline: the same on all its ranks for the data, and each rank's own for its layers.

Every rank of a pipeline reads the same batches: the inputs of the first one are trained with the labels of the
last one. Samplers, transforms, workers and hooks of a program draw from Python's, NumPy's and torch's common
generators, on the CPU and on the device of a rank, and so do layers. A layer with dropout on one rank alone would
shift what that rank draws for the data: it would turn its images otherwise than another rank its masks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.distributed as dist

from deepspeed_partition.engine.runtime.collectives import broadcast_object
from deepspeed_partition.engine.runtime.random_state import (
    device_state,
    preserved_random_state,
    random_state,
    set_device_state,
)
from lightning_madpipe.steps.own_generators import OwnGenerators


class RandomNumbers:
    """The common generators of a rank, which a program's data and its layers draw from.

    Args:
        group: The ranks of the pipeline; None: it has a single rank, where all draw from one stream, as in one
            process.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._restore_layers: Callable[[], None] | None = None

    def make_alike(self) -> None:
        """Give all ranks the generators of the pipeline's first one. Collective."""
        if self._group is None:
            return
        states = random.getstate(), numpy.random.get_state(), torch.get_rng_state(), device_state()
        python, numbers, cpu, device = broadcast_object(states, dist.get_global_rank(self._group, 0), self._group)
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.set_rng_state(cpu)
        set_device_state(device)

    def share(self, own: OwnGenerators) -> None:
        """Give all ranks the states of the program's own generators on the pipeline's first one. Collective."""
        if self._group is None:
            return
        own.put(broadcast_object(own.all_states(), dist.get_global_rank(self._group, 0), self._group))

    @contextmanager
    def of_layers(self) -> Iterator[None]:
        """Draw from the rank's own stream, and leave the one of the data where it was.

        It costs some ten microseconds per batch, and begins where the data's stream is at the first batch.
        """
        if self._group is None:
            yield
            return
        with preserved_random_state():
            if self._restore_layers is not None:
                self._restore_layers()
            try:
                yield
            finally:
                self._restore_layers = random_state()
