"""Looking for generators and for what code reads, in objects of programs that do not like to be asked."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn

from deepspeed_partition.code_names import CodeSearch, function_of
from deepspeed_partition.generators import generators_of
from lightning_madpipe.steps.own_generators import found_in


class NotInstalled:
    """Stands for a package that is not installed: raises its reason whatever it is asked, as MONAI's do."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError("import cupy (No module named 'cupy')")

    def __call__(self, *_: Any) -> Any:
        raise ImportError("import cupy (No module named 'cupy')")


cupy = NotInstalled()
draw = np.random.default_rng(0).normal


def inferred(x: torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else cupy.asarray(x)


class Windows(pl.LightningModule):
    """Its validation reaches a package that is not installed. It was refused with the words of that package."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.backend, self.random = cupy, random.Random(0).random

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(inferred(batch)).sum() * draw()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(cupy.asarray(batch)).sum()


def test_a_package_that_is_not_installed_is_no_function_and_holds_no_generator() -> None:
    assert function_of(cupy) is None
    found = found_in(Windows())
    assert set(map(type, found.values())) == {random.Random, np.random.Generator}
    layer = nn.Linear(2, 2)
    layer.backend, layer.draw = cupy, draw  # type: ignore[assignment]
    assert [type(each) for each in generators_of(layer).values()] == [np.random.Generator]


def test_code_that_names_it_is_read() -> None:
    search = CodeSearch(lambda module: module == __name__)
    search.read(Windows.validation_step, Windows)
    assert (__name__, "cupy") in search.found
