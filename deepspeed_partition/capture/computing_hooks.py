"""Hooks that compute with tensors alone, so that they are written down with the code of the module they are on.

A hook is called in the capture. What it computes is in the layers then; what else it does, such as to append to a
list, would be done in the capture alone. So a hook counts as computing where its code names nothing but torch's
functions, methods of tensors, plain numbers and attributes of its module.
"""

from __future__ import annotations

import builtins
import dis
import math
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_PLAIN = (bool, int, float, str, type(None))
_BUILTINS = frozenset(
    ("abs", "float", "int", "isinstance", "len", "list", "max", "min", "range", "sum", "tuple", "zip")
)
_CHANGING = ("DELETE_", "IMPORT_", "STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_SUBSCR", "YIELD_")


def only_computes(hook: Any, part: nn.Module) -> bool:
    """Whether a hook on the forward of a module does nothing else than to compute with tensors.

    What it hangs on their gradients is called in each run, by the layer that makes the tensor.
    """
    if not isinstance(hook, FunctionType) or hook.__kwdefaults__ or hook.__defaults__:
        return False
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    try:
        held = [cell.cell_contents for cell in cells.values()]
    except ValueError:  # one that is empty
        return False
    return all(isinstance(each, _PLAIN) for each in held) and _is_plain(hook.__code__, hook, part)


def _is_plain(code: CodeType, hook: FunctionType, part: nn.Module) -> bool:
    instructions = list(dis.get_instructions(code))
    if any(each.opname.startswith(_CHANGING) for each in instructions):
        return False
    of_file = {each.argval for each in instructions if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    if not all(_is_function_of_torch(name, hook) for name in of_file):
        return False
    if not all(_is_of_tensors(name, part) for name in set(code.co_names) - of_file):
        return False
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return "register_hook" in code.co_names or all(_is_plain(each, hook, part) for each in inner)


def _is_function_of_torch(name: str, hook: FunctionType) -> bool:
    if name not in hook.__globals__:
        return name in _BUILTINS and hasattr(builtins, name)
    value = hook.__globals__[name]
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(value, _PLAIN) or value is math or str(module).partition(".")[0] == "torch"


def _is_of_tensors(name: str, part: nn.Module) -> bool:
    if any(hasattr(owner, name) for owner in (torch.Tensor, torch, F, math)):
        return True
    if any(name in table for each in part.modules() for table in (each._parameters, each._buffers, each._modules)):
        return True
    return isinstance(vars(part).get(name, part), (*_PLAIN, torch.Tensor))
