"""What DeepSpeed leaves out of its checkpoints: the loss function's weights, and tied modules that functions run.

It saves the layers that run as they are, and loads each where it runs; then all copies get the tied weights of the
first layer's. That gives wrong weights to a tie whose first layer runs a function, and leaves out what copies do
not share on ranks that have functions only: buffers, and weights that ``tied_weight_attr`` does not name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.pipe import PipelineModule
from torch import nn

from deepspeed_partition.engine.pipeline.parts import LOSS, held_modules, loss_part_of
from deepspeed_partition.engine.pipeline.tied_copies import forms_with_functions

LOSS_FILE = "madpipe-loss.pt"


@dataclass(frozen=True, slots=True)
class Copy:
    """This rank's copy of a tied module that a function runs somewhere."""

    module: nn.Module
    is_first: bool
    """Whether this rank runs the first layer of the tie."""
    shared_names: list[str]
    """Names of the weights that are the same in all copies; none where there is one copy."""
    whole_file: str
    """Name of the file with the whole first copy. It is DeepSpeed's file where the layer runs as it is."""
    is_saved_by_deepspeed: bool
    own_file: str
    """Name of the file with what a copy other than the first one does not share."""


def save_ties(folder: Path, module: PipelineModule) -> None:
    """Write what DeepSpeed leaves out of this rank's copies; one replica does.

    Raises:
        OSError: the folder cannot be written.
    """
    if module.mpu().get_data_parallel_rank() != 0:
        return
    loss = loss_part_of(module)
    if loss is not None and module.stage_owner(loss.layers[0]) == module.stage_id:
        torch.save(clone_tensors_for_torch_save(module.loss_fn.state_dict()), folder / LOSS_FILE)
    for copy in _copies(module):
        state = clone_tensors_for_torch_save(copy.module.state_dict())  # ZeRO's are parts of something larger
        own = {name: value for name, value in state.items() if name not in copy.shared_names}
        if copy.is_first and not copy.is_saved_by_deepspeed:
            torch.save(state, folder / copy.whole_file)
        elif own and not copy.is_first:
            torch.save(own, folder / copy.own_file)


def load_ties(
    folder: Path, module: PipelineModule, *, same_cut: bool, strict: bool, read: Callable[[Path], Any]
) -> None:
    """Give this rank's copies what they were, after DeepSpeed has loaded the rest.

    Args:
        same_cut: Whether the ranks have the layers that they had. If not, all copies become the first one.
        strict: Refuse a file that lacks something.
        read: Gives the content of a file.
    """
    if loss_part_of(module) is not None and (state := _read(folder / LOSS_FILE, read)):
        of_layers = _of_layers_here(module)
        loaded = module.loss_fn.load_state_dict(
            {name: value for name, value in state.items() if name not in of_layers},
            strict=strict and not of_layers,
        )
        if strict and (missing := sorted({*loaded.missing_keys} - of_layers)):
            raise RuntimeError(f"{LOSS_FILE} lacks {', '.join(missing)} of the loss function")
    for copy in _copies(module):
        if copy.is_first and copy.is_saved_by_deepspeed:
            continue
        state = _read(folder / copy.whole_file, read)
        if same_cut and not copy.is_first:
            shared = {name: value for name, value in state.items() if name in copy.shared_names}
            copy.module.load_state_dict({**shared, **_read(folder / copy.own_file, read)}, strict=False)
        elif state:
            copy.module.load_state_dict(state, strict=strict)


def _of_layers_here(module: PipelineModule) -> set[str]:
    """The tensors of the loss, by name, that a layer of this rank has, too, and that are loaded as the layer's."""
    parts = [part for name, part in held_modules(module).items() if name != LOSS]
    of_layers = {id(tensor) for part in parts for tensor in (*part.parameters(), *part.buffers())}
    return {name for name, tensor in module.loss_fn.state_dict(keep_vars=True).items() if id(tensor) in of_layers}


def _read(path: Path, read: Callable[[Path], Any]) -> dict[str, Any]:
    """Read a file; give nothing where there is no such file, which earlier versions did not write."""
    return read(path) if path.exists() else {}


def _copies(module: PipelineModule) -> Iterator[Copy]:
    held, grid = held_modules(module), module.mpu()
    rank, slice_rank = grid.get_stage_id(), grid.get_slice_parallel_rank()
    number_of_slice = f"-model_{slice_rank:02d}" if slice_rank else ""
    for number, form in enumerate(forms_with_functions(module._layer_specs)):
        layers = form.layers
        if form.part_name in held:
            as_it_is = module._layer_specs[layers[0]].forward_fn is None
            deepspeeds = Path(module.ckpt_layer_path("", layers[0] - module._local_start)).name
            file = f"madpipe-tied-{number}{number_of_slice}"
            yield Copy(
                module=held[form.part_name],
                is_first=module.stage_owner(layers[0]) == rank,
                shared_names=form.spec.tied_weight_attr if form.key in module.tied_comms else [],
                whole_file=deepspeeds if as_it_is else f"{file}.pt",
                is_saved_by_deepspeed=as_it_is,
                own_file=f"{file}-rank_{rank:02d}.pt",
            )
