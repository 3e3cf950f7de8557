"""Contexts that end whatever a signal handler raises, and whenever.

Python runs signal handlers between any two calls. Torch's handler for a data-loader worker that has died raises
there, and so may a program's own. Where that comes as a context begins or ends, before the generator of
:func:`contextlib.contextmanager` has gone on, the generator stays where it is for as long as somebody holds the
traceback: what it has replaced stays replaced, and what runs next meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

T = TypeVar("T")


class EndingContexts(ExitStack):
    """An ``ExitStack`` of which :meth:`end` ends what is left of it.

    Of one exception of a signal handler either the ``with`` statement is free, or the call of :meth:`end`::

        contexts = EndingContexts()
        try:
            with contexts:
                contexts.enter_context(...)
                ...
        finally:
            contexts.end()
    """

    def __init__(self) -> None:
        super().__init__()
        self._begun: list[AbstractContextManager[Any]] = []

    def enter_context(self, cm: AbstractContextManager[T]) -> T:
        """Begin a context, and note it before: the exception may come when it has begun."""
        self._begun.append(cm)
        return super().enter_context(cm)

    def end(self) -> None:
        """End, the last one first, each context that has not ended."""
        with ExitStack() as left:
            for context in self._begun:
                generator = getattr(context, "gen", None)
                if generator is not None:
                    left.callback(generator.close)  # which does nothing where it has ended
            left.callback(self.close)


def run_within(contexts: Iterable[AbstractContextManager[Any]], run: Callable[[], T]) -> T:
    """What ``run`` returns within ``contexts``, which have all ended afterwards, whatever has been raised."""
    stack = EndingContexts()
    try:
        with stack:
            for context in contexts:
                stack.enter_context(context)
            return run()
    finally:
        stack.end()
