"""The steps and hooks that a program has written, in its module and in its callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from deepspeed_partition.code_names import function_of, is_librarys
from lightning_madpipe.module import named_owners

_NO_HOOKS = frozenset(("forward", "setup", "teardown", "configure_optimizers", "prepare_data", "pipeline_layers"))
"""Methods of hosts that programs write, and that run no batch, or not in a pipeline."""


def hooks_of_program(module: Any) -> Iterator[tuple[str, Any, Any]]:
    """The steps and hooks that a program has written, in words, with their owner and the function."""
    for name, owner in named_owners(module).items():
        kind = type(owner)
        of_host = {key for base in kind.__mro__ if is_librarys(base) for key in vars(base)}
        # Those of a LambdaCallback are its own attributes.
        own = {key: value for key, value in vars(owner).items() if key in of_host and not is_librarys(value)}
        of_class = dict.fromkeys(key for base in kind.__mro__ if not is_librarys(base) for key in vars(base))
        for key in {**of_class, **own}:
            function = function_of(own[key] if key in own else inspect.getattr_static(kind, key))
            is_hook = key in of_host and key not in _NO_HOOKS and not key.startswith("_")
            if function is not None and is_hook:
                yield key if owner is module else f"{key} of {name}", owner, function
