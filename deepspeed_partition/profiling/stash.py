"""Chain of layers that were measured one by one: who pays for a tensor that several of them keep."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_partition.planner.problem import LayerProfile
from deepspeed_partition.profiling.measure import MeasuredLayer


def layer_profiles(measured: Sequence[MeasuredLayer]) -> list[LayerProfile]:
    """Return the costs of consecutive layers, in seconds and bytes.

    A tensor that several layers keep is charged to the last of them (``stash_bytes``); the source of that rule is
    the MadPipe paper, section 3, where each layer keeps its input.
    """
    return [
        LayerProfile(
            name=layer.name,
            forward_seconds=layer.forward.median_seconds,
            backward_seconds=layer.backward.median_seconds,
            weight_bytes=layer.weight_bytes,
            output_bytes=layer.output_bytes,
            stash_bytes=stash,
            transient_bytes=layer.memory.transient_bytes,
            type=layer.type,
            num_trainable_parameters=layer.num_trainable_parameters,
            forward_spread_seconds=layer.forward.interquartile_seconds,
            backward_spread_seconds=layer.backward.interquartile_seconds,
        )
        for layer, stash in zip(measured, stash_bytes(measured), strict=True)
    ]


def stash_bytes(measured: Sequence[MeasuredLayer]) -> list[int]:
    """Return the stash bytes of consecutive layers; their sum is what all of them together keep alive.

    A tensor between two layers may be kept by both: a ReLU keeps its output, the linear layer after it its
    input, and these are the same bytes. They count once, in the last layer that keeps them; for an input
    that a layer keeps that is the layer itself, as in the MadPipe paper. So a stage that ends between two
    layers that keep the same tensor is charged for it only by the buffers at its boundary.
    """
    storage_bytes: dict[tuple[int, int], int] = {}
    last_keeper: dict[tuple[int, int], int] = {}
    # Storages are named by the layer that made them and a number; -1 made the input of the first one.
    boundary = [(-1, place) for place in range(len(measured[0].input_tensor_bytes))] if measured else []
    for name in boundary:
        storage_bytes[name] = measured[0].input_tensor_bytes[name[1]]
    for index, layer in enumerate(measured):
        for place in layer.memory.saved_inputs:
            last_keeper[boundary[place]] = index
        following = []
        for output in layer.memory.outputs:
            if output.from_input is not None:
                name = boundary[output.from_input]
            elif output.new_storage is not None:
                name = (index, output.new_storage)
                storage_bytes[name] = output.storage_bytes
            else:  # part of a parameter or buffer, which the weights count
                name = (index, -1)
                storage_bytes[name] = 0
            if output.saved:
                last_keeper[name] = index
            following.append(name)
        boundary = following
    stashes = [layer.memory.inner_stash_bytes for layer in measured]
    for name, index in last_keeper.items():
        stashes[index] += storage_bytes[name]
    return stashes
