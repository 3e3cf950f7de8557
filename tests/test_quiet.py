"""Lines that nobody can use are left out, and no others."""

from __future__ import annotations

import os
import sys
import warnings

import pytest

from deepspeed_partition.quiet import leave_out_useless_lines, without_lines_of_compilers


@pytest.mark.parametrize("in_notebook", [True, False])
def test_a_compiler_is_not_heard_in_a_notebook(in_notebook, capfd, monkeypatch):
    """``/usr/bin/ld: cannot find -laio`` stood below the cell that imported lightning_madpipe.

    DeepSpeed hides the compiler behind ``sys.stderr``, which is another file in a notebook.
    """

    class Stream:
        @staticmethod
        def fileno() -> int:
            return 99 if in_notebook else 2

    monkeypatch.setattr(sys, "stderr", Stream)
    os.write(2, b"before ")
    with without_lines_of_compilers():
        os.write(2, b"cannot find -laio ")
    os.write(2, b"after")
    heard = capfd.readouterr().err
    assert heard == ("before after" if in_notebook else "before cannot find -laio after")


def test_torch_does_not_blame_a_program_for_what_is_recorded_without_data():
    """A model with an autograd.Function heard of a bug in its code, at a line of the recorder."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        leave_out_useless_lines()
        for module in ("deepspeed_partition.capture.recorder", "program"):
            message = "Accessing the data pointer of FakeTensor is deprecated and will error in PyTorch 2.5."
            warnings.warn_explicit(message, UserWarning, f"{module}.py", 1, module=module)
    assert [each.filename for each in heard] == ["program.py"]
