"""What a Lightning script that somebody else wrote is run with: its files, its module, its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

NUM_BATCHES, BATCH_SIZE, NUM_EPOCHS = 3, 16, 2


@dataclass(frozen=True)
class Script:
    files: Sequence[str]
    """The files within FOLDER; the last one has the module, which may use the others' names."""
    build: Callable[[Any], Any]
    """The LightningModule, from the names in the files."""
    data: Callable[[], Dataset] | None
    """None: what the module's own ``train_dataloader()`` gives, which then stands in ``keeps``."""
    layers: Callable[[Any, Any], list[Any]] | None = None
    """What ``pipeline_layers()`` would return, from the module and the names."""
    callbacks: Callable[[Any], list[Any]] = lambda names: []
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the Trainer."""
    today: Mapping[str, str] = field(default_factory=dict)
    """Text of the files that Lightning 2 does not take, and what stands there today instead."""
    edits: Mapping[str, str] = field(default_factory=dict)
    """Text that the user changes with ``pipeline_layers()``, as a refusal asks."""
    num_micro_batches: int = 4
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of samples, where the loader's own way does not."""
    validation: Callable[[], Dataset] | None = None
    """The data of the validation, such as of other shapes; None: those of the training."""
    logs: str = ""
    """The name that its loss is logged by, where nobody may read what its step returns; empty: what it returns."""
    keeps: Sequence[str] = ()
    """Hooks that are the module's own; the others among ``OF_DATA`` would download."""
    paths: Sequence[str] = ()
    """Folders within FOLDER whose packages the files import."""


def images(*shape: int, classes: int = 10) -> Callable[[], TensorDataset]:
    """Random images with labels."""

    def draw() -> TensorDataset:
        num_samples = NUM_BATCHES * BATCH_SIZE
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(num_samples, *shape, generator=generator)
        return TensorDataset(x, torch.randint(classes, (num_samples,), generator=generator))

    return draw


def numbers(*shapes: Sequence[int]) -> Callable[[], TensorDataset]:
    """Random numbers, and others to be found from them."""

    def draw() -> TensorDataset:
        num_samples = NUM_BATCHES * BATCH_SIZE
        generator = torch.Generator().manual_seed(3)
        return TensorDataset(*(torch.randn(num_samples, *shape, generator=generator) for shape in shapes))

    return draw


def tokens(length: int, vocabulary: int, *, pairs: bool = True) -> Callable[[], TensorDataset]:
    def draw() -> TensorDataset:
        text = torch.randint(
            vocabulary, (NUM_BATCHES * BATCH_SIZE, length + 1), generator=torch.Generator().manual_seed(3)
        )
        return TensorDataset(text[:, :-1], text[:, 1:]) if pairs else TensorDataset(text)

    return draw


class Samples(Dataset):
    """A data set of anything that a batch is collated from."""

    def __init__(self, sample: Callable[[], Any]) -> None:
        torch.manual_seed(3)
        self._samples = [sample() for _ in range(NUM_BATCHES * BATCH_SIZE)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]
