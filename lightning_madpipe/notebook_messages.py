"""What forked ranks show in a notebook: pictures, progress bars, and lines that a progress bar shows above itself.

A kernel shows them by messages that its own process sends. It drops those of a process that is forked from it, and
writes a warning into its log for each of them. So a rank hands its messages to the process of the notebook, which
sends them.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from typing import Any

LAST_SECONDS = 5.0
"""How long the messages of ranks that have ended may take."""


class NotebookMessages:
    """Pipes by which ranks hand their messages to the kernel of a notebook; nothing where there is no kernel.

    Args:
        num_ranks: how many ranks will be forked.
    """

    def __init__(self, num_ranks: int) -> None:
        self._kernel = _kernel()
        number = 0 if self._kernel is None else num_ranks
        self._pipes = [multiprocessing.Pipe(duplex=False) for _ in range(number)]

    def hand_over(self, rank: int) -> None:
        """Hand what this forked rank sends to the process of the notebook, from now on."""
        if self._kernel is None:
            return
        pipe, in_turn = self._pipes[rank][1], threading.Lock()

        def send(stream: Any, message: Any, *arguments: Any, buffers: Any = None, **options: Any) -> None:
            # ``msg_or_type, content, parent, ident, buffers``: a view of memory goes through no pipe.
            given = list(arguments)
            if len(given) > 3:
                buffers, given[3] = given[3], None
            whole = [bytes(each) for each in buffers or ()] or None
            with in_turn, suppress(OSError):  # the kernel may have ended
                pipe.send((message, given[:3], given[4:], whole, options))

        self._kernel.session.send = send

    @contextmanager
    def sent(self) -> Iterator[None]:
        """Send what ranks hand over, within the context, in which they have been started."""
        readers = [reader for reader, _ in self._pipes]
        for _, writer in self._pipes:
            writer.close()  # so that the end of a rank is the end of its pipe
        thread = threading.Thread(target=self._send_all, args=(readers,), name="madpipe-messages", daemon=True)
        thread.start()
        yield
        thread.join(LAST_SECONDS)  # not after an interruption, which finds ranks that have to be ended first

    def _send_all(self, readers: list[connection.Connection]) -> None:
        open_ones = list(readers)
        while open_ones:
            for reader in connection.wait(open_ones):
                assert isinstance(reader, connection.Connection)
                try:
                    message, first, others, buffers, options = reader.recv()
                except (EOFError, OSError):
                    open_ones.remove(reader)
                    continue
                stream = self._kernel.iopub_socket
                if others:  # ``track, header, metadata`` by their places
                    options |= dict(zip(("track", "header", "metadata"), others, strict=False))
                self._kernel.session.send(stream, message, *first, buffers=buffers, **options)


def _kernel() -> Any:
    """Return the kernel of the notebook that this process is; None in a program, and in IPython in a terminal."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None)
