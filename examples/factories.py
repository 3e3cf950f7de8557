"""Models for ``madpipe profile``: functions of the micro-batch size that return layers, one micro-batch, a loss.

madpipe profile examples/factories.py:digits --micro-batch 16 -o chain.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))


def digits(micro_batch_size: int) -> tuple[list[nn.Module], Any, Callable[..., torch.Tensor]]:
    """The network of ``train_lightning.py``."""
    from train_lightning import Digits

    sample = torch.rand(micro_batch_size, 1, 32, 32), torch.randint(10, (micro_batch_size,))
    return list(Digits(1).net), sample, F.cross_entropy


def gpt(micro_batch_size: int) -> tuple[list[Any], Any, Callable[..., torch.Tensor]]:
    """The network of ``train_deepspeed.py``."""
    from train_deepspeed import CONTEXT, VOCABULARY, layers, loss_of

    text = torch.randint(VOCABULARY, (micro_batch_size, CONTEXT + 1))
    return layers(), (text[:, :-1], text[:, 1:]), loss_of
