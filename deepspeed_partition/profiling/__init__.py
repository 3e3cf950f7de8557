"""Measurement of layers and links: from a list of layers and one micro-batch to a ``Chain``. Imports torch."""

from deepspeed_partition.versions import require

require("measuring layers", "deepspeed", "torch")  # before the imports that fail without it

from deepspeed_partition.profiling.allocator import CountedMemory, counted_memory, limit_memory
from deepspeed_partition.profiling.factory import load_factory, profile_factory
from deepspeed_partition.profiling.layers import forward_stage, measure_stage, profile_chain, profile_stage
from deepspeed_partition.profiling.links import Link, measure_links
from deepspeed_partition.profiling.live_bytes import LiveBytes
from deepspeed_partition.profiling.operations import OperationCost, measure_operations
from deepspeed_partition.profiling.readings import suspicious
from deepspeed_partition.profiling.stash import layer_profiles

__all__ = [
    "CountedMemory",
    "Link",
    "LiveBytes",
    "OperationCost",
    "counted_memory",
    "forward_stage",
    "layer_profiles",
    "limit_memory",
    "load_factory",
    "measure_links",
    "measure_operations",
    "measure_stage",
    "profile_chain",
    "profile_factory",
    "profile_stage",
    "suspicious",
]
