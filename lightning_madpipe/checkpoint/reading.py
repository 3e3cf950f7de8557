"""Checkpoint folders where Lightning reads a file: ``load_from_checkpoint(folder)``, in any program.

A ``ModelCheckpoint`` names a folder in ``best_model_path``, and Lightning alone would only say that it is one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def read_folders(namespace: str) -> None:
    """Let ``load_from_checkpoint`` and trainers of other strategies read the strategy's folders, too.

    Args:
        namespace: ``pytorch_lightning`` or ``lightning.pytorch``.
    """
    fabric = "lightning_fabric" if namespace == "pytorch_lightning" else "lightning.fabric"
    for name in (f"{namespace}.core.saving", f"{fabric}.plugins.io.torch_io"):
        module: Any = importlib.import_module(name)
        # A private function of Lightning (2.5 to 2.6): between the path and torch.load there is nothing public.
        if not hasattr(module.pl_load, "__wrapped__"):
            module.pl_load = _with_folders(module.pl_load)


def _with_folders(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def read_either(
        path_or_url: Any, map_location: Any = None, weights_only: bool | None = None, **keywords: Any
    ) -> Any:
        if isinstance(path_or_url, str | Path) and Path(path_or_url).is_dir():
            return _read_folder(Path(path_or_url), map_location, weights_only)
        return read(path_or_url, map_location=map_location, weights_only=weights_only, **keywords)

    return read_either


def _read_folder(path: Path, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """The whole model that ``path`` has the parts of, as an ordinary file would give it.

    Raises:
        ValueError: no folder of the strategy, a damaged one, or one that would have to be unpickled for
            ``weights_only=True``.
    """
    from lightning_madpipe.checkpoint.checkpoint_folders import (
        whole_checkpoint,  # with DeepSpeed, which takes seconds
    )

    checkpoint = whole_checkpoint(path, unpickle=None if weights_only is None else not weights_only)
    checkpoint["state_dict"] = {
        name: value.to(_place(value, map_location)) if isinstance(value, torch.Tensor) else value
        for name, value in checkpoint["state_dict"].items()
    }
    return checkpoint


def _place(value: torch.Tensor, map_location: Any) -> Any:
    """Return the place where ``torch.load`` would put a tensor that was saved on a CPU."""
    if isinstance(map_location, Mapping):
        return map_location.get("cpu", "cpu")
    if callable(map_location):
        storage = value.untyped_storage()
        return (map_location(storage, "cpu") or storage).device
    return "cpu" if map_location is None else map_location
