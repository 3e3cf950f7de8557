"""Does Megatron-LM read our layouts as we mean them? Its own parser reads them here, without the rest of it.

    git clone https://github.com/NVIDIA/Megatron-LM
    python examples/benchmarks/any_model/megatron.py Megatron-LM

Plans for chains of 2 to 24 blocks on 1 to 8 devices, contiguous and interleaved, are written as layouts. What the
parser needs of its package is given to it here: kinds of layers, where a rank is, and two functions that log.
"""

from __future__ import annotations

import argparse
import enum
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, make_plan
from deepspeed_partition.schedule.other_runtimes import ConversionError, megatron_layout

PARSER = "megatron/core/transformer/pipeline_parallel_layer_layout.py"


class LayerType(enum.Enum):
    """Megatron-LM's kinds of layers, by its names."""

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5


def parser_of(checkout: Path) -> tuple[Any, ModuleType]:
    """Its class of layouts, and the module that it asks for the number of virtual stages."""
    names = ["core", "core._rank_utils", "core.utils", "core.parallel_state", "core.transformer"]
    names.append("core.transformer.enums")
    modules = {name: ModuleType(name) for name in ("megatron", *(f"megatron.{name}" for name in names))}
    for name in ("megatron.core._rank_utils", "megatron.core.utils"):
        vars(modules[name]).update(log_single_rank=lambda *_, **__: None, safe_get_rank=lambda: 0)
    vars(modules["megatron.core.transformer.enums"])["LayerType"] = LayerType
    state = modules["megatron.core.parallel_state"]
    vars(modules["megatron.core"]).update(parallel_state=state, __path__=[])
    sys.modules.update(modules)
    found: dict[str, Any] = {"__name__": "layouts"}
    exec(compile((checkout / PARSER).read_text(), PARSER, "exec"), found)
    return found["PipelineParallelLayerLayout"], state


def chain_of(kinds: list[str]) -> Chain:
    layers = tuple(
        LayerProfile(
            name=f"{index}.{kind}",
            forward_seconds=0.01 * (1 + index % 3),
            backward_seconds=0.02,
            weight_bytes=10**6,
            output_bytes=10**5,
            stash_bytes=10**6,
        )
        for index, kind in enumerate(kinds)
    )
    return Chain(input_bytes=10**5, layers=layers, name="gpt")


def interleaved(plan: Plan) -> Plan:
    """The stages of ``plan`` on half as many devices, each of which has two."""
    number = len(plan.stages) // 2
    return replace(
        plan,
        platform=replace(plan.platform, num_devices=number),
        stages=tuple(replace(stage, device=index % number) for index, stage in enumerate(plan.stages)),
        operations=(),
        memory=plan.memory[:number],
        peak_memory_bytes=plan.peak_memory_bytes[:number],
        step=None,
    )


def is_read_as_meant(layouts: Any, state: ModuleType, plan: Plan, text: str, num_blocks: int) -> bool:
    """Whether each stage has the blocks there that it has in the plan."""
    num_devices = plan.platform.num_devices
    layout = layouts(text, num_devices)
    layout.validate_layer_layout(num_blocks, None)
    per_device = layout.virtual_pipeline_model_parallel_size
    vars(state)["get_virtual_pipeline_model_parallel_world_size"] = lambda: per_device if per_device > 1 else None
    return per_device * num_devices == len(plan.stages) and all(
        layout.get_layer_id_list(vp_stage=index // num_devices, pp_rank=index % num_devices)
        == [layer - 1 for layer in range(*stage.layers) if 1 <= layer <= num_blocks]
        for index, stage in enumerate(plan.stages)
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("checkout", type=Path, help="of NVIDIA/Megatron-LM")
    checkout = arguments.parse_args().checkout
    if not (checkout / PARSER).is_file():
        sys.exit(f"{checkout} has no {PARSER}: give the folder of a checkout of NVIDIA/Megatron-LM")
    layouts, state = parser_of(checkout)
    num_read, wrong, refused = 0, [], []
    for num_devices in range(1, 9):
        for num_blocks in (2, 5, 9, 24):
            for head in (["Linear"], ["LayerNorm", "Linear"]):
                if num_devices > num_blocks:
                    continue
                kinds = ["Embedding", *["Block"] * num_blocks, *head]
                platform = Platform(num_devices=num_devices, memory_bytes=10**9, bandwidth=1e9)
                plan = make_plan(chain_of(kinds), platform, algorithm="contiguous", num_micro_batches=4)
                halves = [interleaved(plan)] if len(plan.stages) > 2 and len(plan.stages) % 2 == 0 else []
                for each in (plan, *halves):
                    try:
                        text = megatron_layout(each)
                    except ConversionError as error:
                        refused.append(str(error))
                        continue
                    num_read += 1
                    if not is_read_as_meant(layouts, state, each, text, num_blocks):
                        wrong.append(text)
    print(f"{num_read} layouts read, {len(wrong)} of them otherwise than meant; {len(refused)} plans refused:")
    for sentence in sorted(set(refused)):
        print(f"  {sentence}")
    if wrong:
        sys.exit("otherwise than meant: " + ", ".join(wrong))


if __name__ == "__main__":
    main()
