"""Whose hook runs: Lightning enters a context of its profiler around each hook, which nothing public does."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lightning_madpipe.module import named_owners

OF_MODULE, OF_CALLBACK = "[LightningModule]", "[Callback]"
"""How Lightning (2.5 to 2.6) begins the name of a context: the owner follows, a dot and the hook."""


class HookOwners:
    """Finds the module or the callback whose hook a context of the Trainer's profiler is around.

    The context names a callback by its ``state_key``, which several of one class have alike, such as two
    LambdaCallbacks. Lightning calls these in their order: each context of that name is the next one's.

    Args:
        trainer: Lightning's.
        module: The LightningModule.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer, self._module = trainer, module
        self._num_contexts = Counter[str]()

    def of(self, action: str) -> Any:
        """The owner of the hook in the context ``action``, or None. To be asked once as each context begins."""
        place, _, hook = action.rpartition(".")
        if place.startswith(OF_MODULE):
            return self._module
        if not place.startswith(OF_CALLBACK):
            return None
        key = place.removeprefix(OF_CALLBACK)
        owners = [
            each
            for each in self._trainer.callbacks
            if each.state_key == key and callable(getattr(each, hook, None))
        ]
        if not owners:
            return None
        self._num_contexts[action] += 1
        return owners[(self._num_contexts[action] - 1) % len(owners)]

    def name_of(self, owner: Any) -> str:
        """The class of an owner, with its place among the callbacks where an earlier one is of that class."""
        names = {id(each): name for name, each in named_owners(self._module).items()}
        return type(owner).__name__ if owner is self._module else names.get(id(owner), type(owner).__name__)
