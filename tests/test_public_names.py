"""What users rely on, held against what it was, and the direction of imports."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import deepspeed_partition
from tests.public_surface import surface

BEFORE = Path(__file__).with_name("public_surface.json")
"""What there was before training could no longer differ in silence, and before the modules got their folders."""
ADDED = {
    "MadPipeStrategy/replan",
    "options/replan",
    "commands/schemes/--bandwidth",
    "commands/schemes/--copy-bandwidth",
    "commands/schemes/--devices",
    "commands/schemes/--devices-per-port",
    "commands/schemes/--duplex",
    "commands/schemes/--json",
    "commands/schemes/--latency",
    "commands/schemes/--machines",
    "commands/schemes/--memory",
    "commands/schemes/--micro-batches",
    "commands/schemes/--numbers",
    "commands/schemes/--operation-seconds",
    "commands/schemes/--port-bandwidth",
    "commands/schemes/--recompute",
    "commands/schemes/--split-backward",
    "commands/schemes/--weight-versions",
    "commands/schemes/--time-limit",
    "commands/schemes/--weight-copies",
    "commands/schemes/-o/--output",
    "commands/schemes/chain",
    "commands/compare/--machines",
    "commands/plan/--machines",
    "schemas/machines.schema.json/$comment",
    "schemas/machines.schema.json/$defs/devices/properties/count/maximum",
    "schemas/machines.schema.json/$defs/devices/properties/count/minimum",
    "schemas/machines.schema.json/$defs/devices/properties/count/type",
    "schemas/machines.schema.json/$defs/devices/properties/memory_bytes/maximum",
    "schemas/machines.schema.json/$defs/devices/properties/memory_bytes/minimum",
    "schemas/machines.schema.json/$defs/devices/properties/memory_bytes/type",
    "schemas/machines.schema.json/$defs/devices/properties/name/type",
    "schemas/machines.schema.json/$defs/devices/properties/speed/maximum",
    "schemas/machines.schema.json/$defs/devices/properties/speed/minimum",
    "schemas/machines.schema.json/$defs/devices/properties/speed/type",
    "schemas/machines.schema.json/$defs/devices/required/0",
    "schemas/machines.schema.json/$defs/devices/required/1",
    "schemas/machines.schema.json/$defs/devices/type",
    "schemas/machines.schema.json/$defs/level/properties/bandwidth/exclusiveMinimum",
    "schemas/machines.schema.json/$defs/level/properties/bandwidth/type",
    "schemas/machines.schema.json/$defs/level/properties/group/maximum",
    "schemas/machines.schema.json/$defs/level/properties/group/minimum",
    "schemas/machines.schema.json/$defs/level/properties/group/type",
    "schemas/machines.schema.json/$defs/level/properties/latency_seconds/maximum",
    "schemas/machines.schema.json/$defs/level/properties/latency_seconds/minimum",
    "schemas/machines.schema.json/$defs/level/properties/latency_seconds/type",
    "schemas/machines.schema.json/$defs/level/required/0",
    "schemas/machines.schema.json/$defs/level/type",
    "schemas/machines.schema.json/$schema",
    "schemas/machines.schema.json/properties/devices/items/$ref",
    "schemas/machines.schema.json/properties/devices/maxItems",
    "schemas/machines.schema.json/properties/devices/minItems",
    "schemas/machines.schema.json/properties/devices/type",
    "schemas/machines.schema.json/properties/format/const",
    "schemas/machines.schema.json/properties/links/items/$ref",
    "schemas/machines.schema.json/properties/links/maxItems",
    "schemas/machines.schema.json/properties/links/minItems",
    "schemas/machines.schema.json/properties/links/type",
    "schemas/machines.schema.json/properties/price_per_device_hour/items/maximum",
    "schemas/machines.schema.json/properties/price_per_device_hour/maxItems",
    "schemas/machines.schema.json/properties/price_per_device_hour/items/minimum",
    "schemas/machines.schema.json/properties/price_per_device_hour/items/type",
    "schemas/machines.schema.json/properties/price_per_device_hour/type",
    "schemas/machines.schema.json/required/0",
    "schemas/machines.schema.json/required/1",
    "schemas/machines.schema.json/required/2",
    "schemas/machines.schema.json/title",
    "schemas/machines.schema.json/type",
    "schemas/plan.schema.json/$defs/devices/properties/count/maximum",
    "schemas/plan.schema.json/$defs/devices/properties/count/minimum",
    "schemas/plan.schema.json/$defs/devices/properties/count/type",
    "schemas/plan.schema.json/$defs/devices/properties/memory_bytes/maximum",
    "schemas/plan.schema.json/$defs/devices/properties/memory_bytes/minimum",
    "schemas/plan.schema.json/$defs/devices/properties/memory_bytes/type",
    "schemas/plan.schema.json/$defs/devices/properties/name/type",
    "schemas/plan.schema.json/$defs/devices/properties/speed/maximum",
    "schemas/plan.schema.json/$defs/devices/properties/speed/minimum",
    "schemas/plan.schema.json/$defs/devices/properties/speed/type",
    "schemas/plan.schema.json/$defs/devices/required/0",
    "schemas/plan.schema.json/$defs/devices/required/1",
    "schemas/plan.schema.json/$defs/devices/type",
    "schemas/plan.schema.json/$defs/level/properties/bandwidth/exclusiveMinimum",
    "schemas/plan.schema.json/$defs/level/properties/bandwidth/type",
    "schemas/plan.schema.json/$defs/level/properties/group/maximum",
    "schemas/plan.schema.json/$defs/level/properties/group/minimum",
    "schemas/plan.schema.json/$defs/level/properties/group/type",
    "schemas/plan.schema.json/$defs/level/properties/latency_seconds/maximum",
    "schemas/plan.schema.json/$defs/level/properties/latency_seconds/minimum",
    "schemas/plan.schema.json/$defs/level/properties/latency_seconds/type",
    "schemas/plan.schema.json/$defs/level/required/0",
    "schemas/plan.schema.json/$defs/level/type",
    "schemas/plan.schema.json/properties/platform/properties/devices/items/$ref",
    "schemas/plan.schema.json/properties/platform/properties/devices/maxItems",
    "schemas/plan.schema.json/properties/platform/properties/devices/minItems",
    "schemas/plan.schema.json/properties/platform/properties/devices/type",
    "schemas/plan.schema.json/properties/platform/properties/links/items/$ref",
    "schemas/plan.schema.json/properties/platform/properties/links/maxItems",
    "schemas/plan.schema.json/properties/platform/properties/links/minItems",
    "schemas/plan.schema.json/properties/platform/properties/links/type",
    "schemas/plan.schema.json/properties/platform/properties/pipelines/items/items/$ref",
    "schemas/plan.schema.json/properties/platform/properties/pipelines/items/maxItems",
    "schemas/plan.schema.json/properties/platform/properties/pipelines/items/minItems",
    "schemas/plan.schema.json/properties/platform/properties/pipelines/items/type",
    "schemas/plan.schema.json/properties/platform/properties/pipelines/maxItems",
    "schemas/plan.schema.json/properties/platform/properties/pipelines/type",
    "schemas/plan.schema.json/properties/platform/properties/price_per_device_hour/items/maximum",
    "schemas/plan.schema.json/properties/platform/properties/price_per_device_hour/maxItems",
    "schemas/plan.schema.json/properties/platform/properties/price_per_device_hour/items/minimum",
    "schemas/plan.schema.json/properties/platform/properties/price_per_device_hour/items/type",
    "schemas/plan.schema.json/properties/platform/properties/price_per_device_hour/type",
    "MadPipeStrategy/check_layers",
    "MadPipeStrategy/checkpoint_checksums",
    "MadPipeStrategy/devices_per_port",
    "MadPipeStrategy/duplex",
    "MadPipeStrategy/copy_bandwidth",
    "MadPipeStrategy/operation_seconds",
    "MadPipeStrategy/loss",
    "MadPipeStrategy/patience_seconds",
    "MadPipeStrategy/port_bandwidth",
    "MadPipeStrategy/recompute",
    "MadPipeStrategy/split_backward",
    "MadPipeStrategy/weight_versions",
    "MadPipeStrategy/unpickle",
    "MadPipeStrategy/whole_model",
    "commands/compare/--devices-per-port",
    "commands/compare/--duplex",
    "commands/compare/--port-bandwidth",
    "commands/compare/--copy-bandwidth",
    "commands/compare/--operation-seconds",
    "commands/compare/--plot",
    "commands/compare/--recompute",
    "commands/compare/--split-backward",
    "commands/compare/--weight-versions",
    "commands/compare/--zero",
    "commands/convert/--micro-batches",
    "commands/convert/--to",
    "commands/frontier/--devices-per-port",
    "commands/frontier/--duplex",
    "commands/frontier/--port-bandwidth",
    "commands/frontier/--copy-bandwidth",
    "commands/frontier/--operation-seconds",
    "commands/frontier/--plot",
    "commands/frontier/--recompute",
    "commands/frontier/--split-backward",
    "commands/frontier/--weight-versions",
    "commands/plan/--devices-per-port",
    "commands/plan/--duplex",
    "commands/plan/--port-bandwidth",
    "commands/plan/--copy-bandwidth",
    "commands/plan/--operation-seconds",
    "commands/plan/--recompute",
    "commands/plan/--split-backward",
    "commands/plan/--weight-versions",
    "commands/plan/--zero",
    "commands/profile/--config",
    "commands/profile/--mcap",
    "commands/report/--chain",
    "commands/report/--measured",
    "commands/report/-o/--output",
    "commands/report/--time-limit",
    "commands/report/plan",
    "commands/show/--chain",
    "commands/show/--memory",
    "commands/trace/--chain",
    "commands/trace/--measured",
    "commands/trace/-o/--output",
    "commands/trace/plan",
    "names/deepspeed_partition.engine/TiedModule",
    "names/deepspeed_partition.profiling/CountedMemory",
    "names/deepspeed_partition.profiling/OperationCost",
    "names/deepspeed_partition.profiling/counted_memory",
    "names/deepspeed_partition.profiling/measure_operations",
    "names/deepspeed_partition.profiling/limit_memory",
    "names/deepspeed_partition/layers_of",
    "options/checkpoint_checksums",
    "options/devices_per_port",
    "options/copy_bandwidth",
    "options/duplex",
    "options/operation_seconds",
    "options/patience_seconds",
    "options/port_bandwidth",
    "options/recompute",
    "options/shard_weights",
    "options/split_backward",
    "options/weight_versions",
    "options/unpickle",
    "schemas/chain.schema.json/$defs/warm_up/properties/step_seconds/$ref",
    "schemas/chain.schema.json/$defs/differences/items/maximum",
    "schemas/chain.schema.json/$defs/differences/items/minimum",
    "schemas/chain.schema.json/$defs/differences/items/type",
    "schemas/chain.schema.json/$defs/differences/minItems",
    "schemas/chain.schema.json/$defs/differences/type",
    "schemas/chain.schema.json/$defs/layer/properties/backward_input_seconds/$ref",
    "schemas/chain.schema.json/$defs/layer/properties/backward_weight_seconds/$ref",
    "schemas/chain.schema.json/$defs/layer/properties/cut_stash_bytes/$ref",
    "schemas/chain.schema.json/$defs/layer/properties/first_backward_bytes/$ref",
    "schemas/chain.schema.json/$defs/layer/properties/forward_running_bytes/$ref",
    "schemas/chain.schema.json/$defs/layer/properties/gradient_bytes/$ref",
    "schemas/chain.schema.json/$defs/layer/properties/optimizer_transient_bytes/$ref",
    "schemas/chain.schema.json/$defs/layer/properties/recomputable/type",
    "schemas/chain.schema.json/$defs/layer/properties/reduction_bytes/$ref",
    "schemas/chain.schema.json/$defs/layer/properties/running_bytes/$ref",
    "schemas/chain.schema.json/$defs/layer/properties/shared_weights/additionalProperties/$ref",
    "schemas/chain.schema.json/$defs/layer/properties/shared_weights/type",
    "schemas/chain.schema.json/$defs/layer/properties/training_bytes/$ref",
    "schemas/chain.schema.json/$defs/layer/properties/weight_stash_bytes/$ref",
    "schemas/chain.schema.json/$defs/mcap/properties/added_bytes/$ref",
    "schemas/chain.schema.json/$defs/mcap/properties/added_bytes_per_more/$ref",
    "schemas/chain.schema.json/$defs/mcap/properties/isolated_bytes/$ref",
    "schemas/chain.schema.json/$defs/mcap/properties/isolated_bytes_per_more/$ref",
    "schemas/chain.schema.json/$defs/mcap/properties/num_runs/$ref",
    "schemas/chain.schema.json/$defs/mcap/required/0",
    "schemas/chain.schema.json/$defs/mcap/required/1",
    "schemas/chain.schema.json/$defs/mcap/required/2",
    "schemas/chain.schema.json/$defs/mcap/required/3",
    "schemas/chain.schema.json/$defs/mcap/required/4",
    "schemas/chain.schema.json/$defs/mcap/type",
    "schemas/chain.schema.json/properties/mcap/$ref",
    "schemas/plan.schema.json/$defs/operation/properties/index/$ref",
    "schemas/plan.schema.json/properties/memory/items/properties/fixed/$ref",
    "schemas/plan.schema.json/properties/micro_batches_per_period/maximum",
    "schemas/plan.schema.json/properties/micro_batches_per_period/minimum",
    "schemas/plan.schema.json/properties/micro_batches_per_period/type",
    "schemas/plan.schema.json/properties/pattern_seconds/maximum",
    "schemas/plan.schema.json/properties/pattern_seconds/minimum",
    "schemas/plan.schema.json/properties/pattern_seconds/type",
    "schemas/plan.schema.json/properties/platform/properties/copy_bandwidth/exclusiveMinimum",
    "schemas/plan.schema.json/properties/platform/properties/copy_bandwidth/type",
    "schemas/plan.schema.json/properties/platform/properties/operation_seconds/$ref",
    "schemas/plan.schema.json/properties/platform/properties/devices_per_port/maximum",
    "schemas/plan.schema.json/properties/platform/properties/devices_per_port/minimum",
    "schemas/plan.schema.json/properties/platform/properties/devices_per_port/type",
    "schemas/plan.schema.json/properties/platform/properties/duplex/enum/0",
    "schemas/plan.schema.json/properties/platform/properties/duplex/enum/1",
    "schemas/plan.schema.json/properties/platform/properties/fixed_bytes/$ref",
    "schemas/plan.schema.json/properties/platform/properties/optimizer_step/enum/0",
    "schemas/plan.schema.json/properties/platform/properties/optimizer_step/enum/1",
    "schemas/plan.schema.json/properties/platform/properties/port_bandwidth/exclusiveMinimum",
    "schemas/plan.schema.json/properties/platform/properties/port_bandwidth/type",
    "schemas/plan.schema.json/properties/proved_of/enum/0",
    "schemas/plan.schema.json/properties/proved_of/enum/1",
    "schemas/plan.schema.json/properties/step_gap/minimum",
    "schemas/plan.schema.json/properties/step_gap/type",
    "schemas/plan.schema.json/properties/step_lower_bound_seconds/$ref",
    "schemas/plan.schema.json/properties/step_proved/type",
    "schemas/plan.schema.json/properties/zero_stage/enum/0",
    "schemas/plan.schema.json/properties/zero_stage/enum/1",
    "schemas/plan.schema.json/properties/weight_versions/enum/0",
    "schemas/plan.schema.json/properties/weight_versions/enum/1",
    "schemas/plan.schema.json/properties/weight_versions/enum/2",
    "schemas/plan.schema.json/properties/weight_versions/enum/3",
    "schemas/plan.schema.json/properties/update_seconds/$ref",
    "schemas/plan.schema.json/properties/flush_step_seconds/$ref",
}
"""What came since, by its place in the document; whoever adds something public adds it here."""
WIDENED = {
    "commands/plan/--devices": "option, integer range, 1 value",
    "commands/plan/--memory": "option, text, 1 value",
    "commands/plan/--bandwidth": "option, text, 1 value",
    "commands/compare/--devices": "option, integer range, 1 value",
    "commands/compare/--memory": "option, text, 1 value",
    "commands/compare/--bandwidth": "option, text, 1 value",
    "schemas/plan.schema.json/$comment": "SF and SB a link;",
    "schemas/plan.schema.json/$defs/operation/properties/operation/pattern": "SB12",
    "schemas/plan.schema.json/properties/order/items/items/prefixItems/0/pattern": "F3",
    "schemas/timeline.schema.json/$comment": "SF and SB a link; a step has every operation of every micro-batch",
    "schemas/timeline.schema.json/$defs/operation/properties/operation/pattern": "SB12",
}
"""What means more than it did, and an example of what it still means."""
ROOT = Path(deepspeed_partition.__file__).parent


def test_public_names():
    assert sorted(deepspeed_partition.__all__) == [
        "Allocation", "Chain", "ChainFormatError", "InfeasibleError", "LayerProfile", "MadPipeError", "Plan",
        "PlanFormatError", "PlanMismatchError", "Platform", "Replay", "Stage", "install", "layers_of", "make_plan",
        "replay",
    ]  # fmt: skip
    for name in deepspeed_partition.__all__:
        assert hasattr(deepspeed_partition, name)


def test_public_names_of_the_hosts():
    import deepspeed_partition.engine
    import deepspeed_partition.profiling
    import lightning_madpipe

    engine = ["MadPipeEngine", "PipelineModule", "TiedModule", "initialize", "install", "prepare_cpu"]
    assert sorted(deepspeed_partition.engine.__all__) == engine
    assert sorted(lightning_madpipe.__all__) == ["MadPipeStrategy", "TiedModule", "consolidate", "strategy_class"]
    for package in (deepspeed_partition.engine, deepspeed_partition.profiling, lightning_madpipe):
        for name in package.__all__:
            assert hasattr(package, name)


def flat(document: Any, place: str = "") -> dict[str, Any]:
    """Every value of a JSON document by its place; public names are places, too."""
    if isinstance(document, list) and place.startswith("names/"):
        return {f"{place}/{name}": name for name in document}
    if not isinstance(document, dict | list):
        return {place: document}
    parts = document.items() if isinstance(document, dict) else enumerate(document)
    below = (flat(part, f"{place}/{name}" if place else str(name)) for name, part in parts)
    return {found: value for values in below for found, value in values.items()}


def test_what_users_rely_on_stays():
    """Nothing goes, and nothing means something else."""
    before, now = flat(json.loads(BEFORE.read_text())), flat(surface())
    assert {place: now.get(place) for place in before if place not in WIDENED} == {
        place: value for place, value in before.items() if place not in WIDENED
    }
    for place, example in WIDENED.items():
        is_pattern = place.endswith("pattern")
        for meaning in (before[place], now[place]):
            assert re.search(meaning, example) if is_pattern else set(example.split()) <= set(meaning.split())
    assert now.keys() - before.keys() == ADDED


def imported_by(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_imports_point_down():
    """lightning -> engine, profiling -> planner; the planner knows neither torch nor a host."""
    hosts = ("pytorch_lightning", "lightning", "lightning_madpipe")
    forbidden = {
        "planner": (*hosts, "torch", "deepspeed", "deepspeed_partition.engine", "deepspeed_partition.profiling"),
        "profiling": (*hosts, "deepspeed_partition.engine"),
        "engine": hosts,
    }
    for folder, names in forbidden.items():
        files = list((ROOT / folder).rglob("*.py"))
        assert files
        for file in files:
            for module in imported_by(file):
                assert not (module + ".").startswith(tuple(f"{name}." for name in names)), f"{file}: {module}"
