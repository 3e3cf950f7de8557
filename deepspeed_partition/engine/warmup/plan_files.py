"""Where the plan of a run is kept, and what it was made from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.planner.io import files
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import Chain

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine

NAME = "madpipe-plan.json"
"""The name of the plan's file beside the logs."""


def save_plan(engine: MadPipeEngine, plan: Plan, chain: Chain) -> None:
    """Save the plan, on rank 0: where ``save_plan`` says, else beside the logs of the run, if it has any.

    Raises:
        OSError: the place that ``save_plan`` says cannot be written; beside the logs that is only a warning.
    """
    given = engine.options.save_plan
    folder = _folder_of_logs(engine)
    if given is None and folder is None:
        announce(
            "the plan is not saved, because this run writes no logs: the option save_plan names a place",
            logging.DEBUG,
        )
        return
    path = Path(given) if given is not None else Path(folder or "") / NAME
    beside = path.with_suffix(".chain.json")
    try:
        if given is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        # A link at the place that the user chose is the user's; beside the logs somebody else may have planted it.
        files.write_json(path, plan.to_dict(), through_link=given is not None)
        files.write_json(beside, chain.to_dict(), through_link=given is not None)
    except OSError as error:
        if given is not None:
            raise
        announce(f"the plan is not saved: {error}; save_plan names another place", logging.WARNING)
        return
    announce(f"the plan is saved in {path}, what it was made from in {beside.name}")


def _folder_of_logs(engine: MadPipeEngine) -> str | Path | None:
    if engine.folder_of_logs is not None:
        return engine.folder_of_logs
    monitors = engine._config.monitor_config
    for monitor in (monitors.tensorboard, monitors.csv_monitor):
        if monitor.enabled:
            return Path(monitor.output_path) / monitor.job_name
    return None
