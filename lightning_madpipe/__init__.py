"""MadPipe for PyTorch Lightning: ``import lightning_madpipe``, then ``Trainer(strategy="madpipe")``.

The import registers the strategy for ``pytorch_lightning`` and, where it is installed, for
``lightning.pytorch``. These are two packages with base classes of their own: ``MadPipeStrategy`` belongs
to ``lightning.pytorch`` if that one was imported before this package and ``pytorch_lightning`` was not, or
is not installed, else to ``pytorch_lightning``; ``strategy_class(namespace)`` gives the other one.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

from deepspeed_partition.quiet import leave_out_useless_lines
from deepspeed_partition.versions import HostError, check_versions, require

__all__ = ["MadPipeStrategy", "TiedModule", "consolidate", "strategy_class"]

NAMESPACES = ("pytorch_lightning", "lightning.pytorch")

_INSTALLED = [namespace for namespace in NAMESPACES if find_spec(namespace.partition(".")[0]) is not None]
if not _INSTALLED:
    raise HostError(
        "lightning_madpipe needs PyTorch Lightning, which is not installed: pip install 'madpipe[lightning]'",
        name="pytorch_lightning",
    )

_PREFERRED = (
    "lightning.pytorch"
    if "lightning.pytorch" in sys.modules and "pytorch_lightning" not in sys.modules
    else _INSTALLED[0]
)


def strategy_class(namespace: str = _PREFERRED) -> type:
    """The strategy's class for ``"pytorch_lightning"`` or ``"lightning.pytorch"``.

    Raises:
        ValueError: another namespace, or one that is not installed.
    """
    if namespace not in NAMESPACES:
        raise ValueError(f"namespace is {namespace!r}, not 'pytorch_lightning' or 'lightning.pytorch'")
    if namespace not in _INSTALLED:
        raise ValueError(f"{namespace} is not installed here, but {_INSTALLED[0]} is: use that one")
    from lightning_madpipe import strategy

    return strategy.strategy_class(namespace)


def __getattr__(name: str) -> Any:
    # DeepSpeed takes seconds to import: only who builds the strategy pays.
    if name == "MadPipeStrategy":
        return strategy_class()
    if name == "TiedModule":
        from lightning_madpipe.module import TiedModule

        return TiedModule
    if name == "consolidate":
        from lightning_madpipe.checkpoint.checkpoint_folders import consolidate

        return consolidate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _build(namespace: str, **arguments: Any) -> Any:
    return strategy_class(namespace)(**arguments)


def _register() -> None:
    leave_out_useless_lines()
    require("lightning_madpipe", "lightning", "torch", "deepspeed")  # whose pipeline engine runs the plans
    check_versions("pytorch-lightning", "lightning")
    from lightning_madpipe.checkpoint.reading import read_folders  # torch
    from lightning_madpipe.compat.namespace import show_notes_as_lines

    for namespace in _INSTALLED:
        try:
            strategies = importlib.import_module(f"{namespace}.strategies")
        except RuntimeError as error:
            if "torchvision" not in str(error):
                raise
            raise ImportError(
                f"{namespace} cannot be imported, because the installed torchvision was built for another "
                f"torch ({error}): install the torchvision of this torch, or uninstall it"
            ) from error
        read_folders(namespace)
        show_notes_as_lines()
        strategies.StrategyRegistry.register(
            "madpipe",
            partial(_build, namespace),
            description="Pipeline parallelism on a cut planned from measured time and memory",
            override=True,
        )


_register()
