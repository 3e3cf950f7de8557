"""A plan in the files of other runtimes: what each can say of it, and a refusal of the rest.

- ``torch_csv``: the schedule file of ``torch.distributed.pipelining``, which ``_PipelineScheduleRuntime`` reads by
  ``_load_csv(file, format="compute_only")``. A row for each rank, with its forwards and backwards in order:
  ``0F0,0F1,0B0,0B1``. The runtime adds the transfers.
- ``megatron_layout``: the argument ``--pipeline-model-parallel-layout`` of Megatron-LM: ``Et*3|t*4|t*3L``. It says
  which layers a stage has; Megatron-LM runs its own 1F1B on them.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from deepspeed_partition.planner.errors import MadPipeError
from deepspeed_partition.planner.plan import Plan, PlannedStage
from deepspeed_partition.schedule.instructions import Compute
from deepspeed_partition.schedule.lowering import lower


class ConversionError(MadPipeError, ValueError):
    """A plan holds what the other runtime's file cannot say."""


def torch_csv(plan: Plan, num_micro_batches: int | None = None) -> str:
    """Return the compute-only schedule of one step, for ``torch.distributed.pipelining``.

    Args:
        num_micro_batches: of the step; left out, the plan's own.

    Raises:
        ConversionError: the plan recomputes layers; neither it nor the caller says how many micro-batches there
            are, or they say different numbers.
    """
    _refuse_recomputation(plan, "a schedule file of torch.distributed.pipelining")
    _refuse_versions(plan, "a schedule file of torch.distributed.pipelining")
    planned = None if plan.step is None else plan.step.num_micro_batches
    number = planned if num_micro_batches is None else num_micro_batches
    if number is None:
        raise ConversionError(
            "the plan is for a steady state and names no number of micro-batches, and a schedule file lists each "
            "of them: say how many (--micro-batches)"
        )
    if planned not in (None, number):
        raise ConversionError(
            f"the plan is for a step of {planned} micro-batches, not of {number}: plan with --micro-batches "
            f"{number}"
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for instructions in lower(plan, number).lists:
        writer.writerow(
            f"{each.stage}{each.kind}{each.micro_batch}" for each in instructions if isinstance(each, Compute)
        )
    return text.getvalue()


def megatron_layout(plan: Plan) -> str:
    """Return the layout of a plan whose chain is an embedding, transformer layers and a head.

    The transformer layers are the longest unbroken run of layers of one kind. What stands before it is the
    embedding (``E``), what stands behind it the final norm, the head and the loss (``L``).

    Raises:
        ConversionError: the plan recomputes layers; its chain is not of that form or its layers have no names; the
            embedding or the head lies on two stages; a stage is on another device than Megatron-LM puts it on.
    """
    _refuse_recomputation(plan, "a layout of Megatron-LM")
    _refuse_versions(plan, "a layout of Megatron-LM")
    _refuse_other_places(plan)
    kinds = [kind for stage in plan.stages for kind in _kinds(stage.layer_names, stage.layers)]
    first, last = _transformer_layers(kinds)
    letters = ["E"] * first + ["t"] * (last - first) + ["L"] * (len(kinds) - last)
    return "|".join(
        _stage_text(letters[slice(*stage.layers)], is_last=stage is plan.stages[-1])
        for stage in _checked_ends(plan, first, last)
    )


def _refuse_versions(plan: Plan, what: str) -> None:
    if plan.is_asynchronous:
        raise ConversionError(
            f"weight_versions of the plan is {plan.weight_versions!r}, a pipeline that never drains, and "
            f"{what} is of steps that do: plan with --weight-versions flush"
        )


def _refuse_recomputation(plan: Plan, file: str) -> None:
    if not plan.treats_all_alike:
        raise ConversionError(
            f"the plan treats micro-batches differently (recomputation or several per period, or backwards in two "
            f"halves), which {file} cannot say: plan without --recompute micro-batch"
        )
    recomputed = [index for index, stage in enumerate(plan.stages) if stage.blocks]
    if recomputed:
        raise ConversionError(
            f"the plan recomputes layers of stage {recomputed[0]}, which {file} cannot say: plan without "
            "recomputation"
        )


def _refuse_other_places(plan: Plan) -> None:
    num_devices, num_stages = plan.platform.num_devices, len(plan.stages)
    if num_stages % num_devices:
        raise ConversionError(
            f"the plan has {num_stages} stages on {num_devices} devices, and Megatron-LM gives every device the "
            f"same "
            "number of stages: plan with --algorithm contiguous"
        )
    for index, stage in enumerate(plan.stages):
        if stage.device != index % num_devices:
            raise ConversionError(
                f"stage {index} of the plan is on device {stage.device}, and Megatron-LM puts it on device "
                f"{index % num_devices}: plan with --algorithm contiguous"
            )


def _kinds(names: Sequence[str], layers: tuple[int, int]) -> list[str]:
    """The kind of each layer, such as ``Block`` of the name ``3.Block``."""
    start, stop = layers
    if len(names) != stop - start:
        raise ConversionError(
            f"the plan has no names for layers {start} to {stop}, and a layout tells transformer layers from "
            f"others: "
            "make the plan from a chain whose layers have names"
        )
    return [name.partition(".")[2] or name for name in names]


def _transformer_layers(kinds: Sequence[str]) -> tuple[int, int]:
    """The range of the transformer layers."""
    first, number, start = 0, 0, 0
    for _, run in groupby(kinds):
        length = len(list(run))
        if length > number:
            first, number = start, length
        start += length
    kind = kinds[first]
    outside = [layer for layer, other in enumerate(kinds) if other == kind and not first <= layer < first + number]
    if number < 2 or outside:
        told = ", ".join(f"{count} of {name}" for name, count in Counter(kinds).most_common(3))
        raise ConversionError(
            f"the layers are no embedding, one run of transformer layers of one kind and a head ({told}), which "
            f"is "
            "all that a layout of Megatron-LM can say"
        )
    if first == 0:
        raise ConversionError(
            f"layer 0 is a {kind} like those after it, and a layout of Megatron-LM begins with the embedding: "
            "profile the model with its embedding as a layer"
        )
    return first, first + number


def _checked_ends(plan: Plan, first: int, last: int) -> Sequence[PlannedStage]:
    """The stages of a plan whose embedding and head are on one stage each."""
    embedding_ends, head_begins = plan.stages[0].layers[1], plan.stages[-1].layers[0]
    if embedding_ends < first:
        raise ConversionError(
            f"layers 0 to {first} are the embedding, and the plan cuts them at {embedding_ends}: Megatron-LM has "
            f"it "
            "in one piece"
        )
    if head_begins > last:
        raise ConversionError(
            f"layers {last} to {plan.chain.num_layers} are the head, and the plan cuts them at {head_begins}: "
            "Megatron-LM has it in one piece"
        )
    return plan.stages


def _stage_text(letters: Sequence[str], *, is_last: bool) -> str:
    number = letters.count("t")
    layers = f"t*{number}" if number > 1 else "t" * number
    return ("E" if "E" in letters else "") + layers + ("L" if is_last else "")
