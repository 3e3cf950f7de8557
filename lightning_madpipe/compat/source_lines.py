"""Lines of the user's code that a refusal names, found in the compiled code, which is there without its source."""

from __future__ import annotations

import dis
from pathlib import Path
from typing import Any


def line_that_sets(module: Any, name: str) -> str:
    """The line of a LightningModule that sets an attribute, such as ``gan.py:91``; empty: no method does."""
    for kind in type(module).__mro__:
        for method in vars(kind).values():
            code = getattr(method, "__code__", None)
            if code is None:
                continue
            for instruction in dis.get_instructions(code):
                if instruction.opname == "STORE_ATTR" and instruction.argval == name:
                    at = instruction.offset
                    line = next((line for start, end, line in code.co_lines() if start <= at < end), None)
                    return f"{Path(code.co_filename).name}:{line or code.co_firstlineno}"
    return ""


def line_of_method(module: Any, name: str) -> str:
    """The line where the class of a LightningModule defines a method; empty: not in Python."""
    code = getattr(getattr(type(module), name, None), "__code__", None)
    return "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"
