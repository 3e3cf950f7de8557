"""The few names of torchvision that DeepSpeed's pipeline tests use: pictures of noise, numbered.

The real package brings its own torch, so it is not installed beside MadPipe.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

__version__ = "0.5.0"


class FakeData(torch.utils.data.Dataset):
    """``size`` pictures; each is drawn from its own number, so all ranks and runs see the same ones."""

    def __init__(self, size, image_size, num_classes, transform, random_offset) -> None:
        self._size, self._shape, self._num_classes = size, image_size, num_classes
        self._transform, self._offset = transform, random_offset

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int):
        if index >= self._size:
            raise IndexError(index)
        random = torch.Generator().manual_seed(index + self._offset)
        picture = torch.rand(self._shape, generator=random)
        target = int(torch.randint(0, self._num_classes, (1,), generator=random))
        return self._transform(picture), target


def _composed(transforms: list[Callable]) -> Callable:
    def apply(picture):
        for transform in transforms:
            picture = transform(picture)
        return picture

    return apply


def _normalize(mean: tuple, deviation: tuple) -> Callable:
    mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in (mean, deviation))
    return lambda picture: (picture - mean) / deviation


transforms = SimpleNamespace(
    Compose=_composed,
    Lambda=lambda function: function,
    Normalize=_normalize,
    ToTensor=lambda: lambda picture: picture,
)
datasets = SimpleNamespace(FakeData=FakeData)
