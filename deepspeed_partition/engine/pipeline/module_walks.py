"""What torch's own walks over the modules of a model do, in less time: each step makes them."""

from __future__ import annotations

import torch
from torch import nn


def set_mode(module: nn.Module, mode: bool) -> None:
    """Do what ``nn.Module.train(module, mode)`` does: torch assigns the mode also where it is the same."""
    _assign_mode(module, mode)
    for child in module._modules.values():
        if child is None:
            continue
        if type(child).train is not nn.Module.train or "train" in child.__dict__:
            child.train(mode)
        else:
            set_mode(child, mode)


def _assign_mode(module: nn.Module, mode: bool) -> None:
    if module.__dict__.get("training") is not mode:  # a scripted module, or a property, keeps it elsewhere
        module.training = mode


def walks_as_torch(module_class: type) -> bool:
    """Return whether modules of a class give their parts and weights as ``nn.Module`` does."""
    names = ("children", "modules", "named_children", "named_modules", "named_parameters", "parameters")
    owners = (next(each for each in module_class.__mro__ if name in vars(each)) for name in names)
    return all(owner.__module__.partition(".")[0] in ("torch", "deepspeed_partition") for owner in owners)


def clear_gradients(module: nn.Module) -> None:
    """Let all weights of a module have no gradient."""
    for weight in module._parameters.values():
        if weight is not None:
            weight.grad = None
    for child in module._modules.values():
        if child is not None:
            clear_gradients(child)


def have_gradients_of(module: nn.Module, kind: torch.dtype) -> bool:
    """Return whether all weights of a module that train have dense gradients of one type."""
    for weight in module._parameters.values():
        if weight is not None and weight.requires_grad:
            gradient = weight.grad
            if gradient is None or gradient.dtype != kind or gradient.is_sparse:
                return False
    return all(child is None or have_gradients_of(child, kind) for child in module._modules.values())
