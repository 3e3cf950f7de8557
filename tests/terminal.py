"""A terminal for a command to write to."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path


def output_in_a_terminal(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    columns: int = 80,
    folder: Path | None = None,
    only_output: bool = False,
) -> str:
    """Return all that a command writes to a terminal, with its controls; it must end with 0.

    Args:
        only_output: let the terminal have the standard output alone, and nothing the errors.
    """
    terminal, its_end = os.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("4H", 50, columns, 0, 0))
    text = b""
    with subprocess.Popen(
        command,
        stdin=None if only_output else its_end,
        stdout=its_end,
        stderr=subprocess.DEVNULL if only_output else its_end,
        env=environment,
        cwd=folder,
    ) as run:
        os.close(its_end)
        while True:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            text += part
    os.close(terminal)
    assert run.returncode == 0, text.decode()
    return text.decode()
