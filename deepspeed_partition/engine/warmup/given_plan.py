"""What a plan that a run is given must hold to, and what has no effect beside it."""

from __future__ import annotations

from dataclasses import fields

from deepspeed.accelerator import get_accelerator

from deepspeed_partition.engine.runtime.environment import announce, warn_here
from deepspeed_partition.options import Options
from deepspeed_partition.planner.errors import PlanMismatchError
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.units import format_bytes

OF_PLANNING = frozenset((
    "algorithm", "bandwidth", "latency_seconds", "duplex", "port_bandwidth", "devices_per_port",
    "operation_seconds", "copy_bandwidth", "weight_copies", "warmup_steps", "save_plan", "recompute",
    "split_backward", "time_limit_seconds",
))  # fmt: skip
"""Options by which a run makes a plan."""


def check_given_plan(options: Options, plan: Plan, place: int) -> None:
    """Hold a plan that a run is given against memory, and say which options have no effect beside it.

    Args:
        place: of this rank in its pipeline.

    Raises:
        PlanMismatchError: the plan needs more than the option ``memory`` says.
    """
    device, most = max(enumerate(plan.peak_memory_bytes), key=lambda pair: pair[1])
    if options.memory is not None and most > options.memory:
        raise PlanMismatchError(
            f"the plan needs {format_bytes(most)} on device {device}, and the option memory says "
            f"{format_bytes(options.memory)}: plan for that, or leave one of the two out"
        )
    default = Options()
    idle = [
        field.name
        for field in fields(options)
        if field.name in OF_PLANNING and getattr(options, field.name) != getattr(default, field.name)
    ]
    if idle:
        announce(f"this run has a plan, beside which {', '.join(idle)} has no effect: leave it out, or the plan")
    accelerator, own = get_accelerator(), plan.peak_memory_bytes[place]
    if accelerator.device_name() != "cpu" and own > (total := int(accelerator.total_memory())):
        warn_here(f"the plan needs {format_bytes(own)} on this device, which has {format_bytes(total)}")
