"""What the user gave the strategy, checked: the DeepSpeed configuration and the options of planning."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_partition.options import Options
from deepspeed_partition.planner.units import counted


def read_config(config: Any) -> Any:
    """``config`` as a dict where it is a mapping or the path of a JSON file; a path of nothing as it is.

    Raises:
        ValueError: a file that holds no JSON object, or another type.
    """
    if config is None or isinstance(config, Mapping):
        return None if config is None else dict(config)
    if not isinstance(config, str | Path):
        raise ValueError(f"config is {config!r}, not a dict or the path of a JSON file")
    if not Path(config).is_file():
        return config  # which Lightning says
    try:
        read = json.loads(Path(config).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"the DeepSpeed config {config} cannot be read: {error}") from None
    if not isinstance(read, dict):
        raise ValueError(f"the DeepSpeed config {config} holds a {type(read).__name__}, not an object")
    return read


class Settings(NamedTuple):
    """The settings of a strategy: the DeepSpeed configuration, and the options of planning apart from it."""

    config: dict[str, Any]
    """The DeepSpeed configuration, without ``pipeline.madpipe``."""
    options: Options
    counts_steps: bool
    """Whether the warm-up is given in steps, be it none."""


def checked_settings(config: Mapping[str, Any], arguments: Mapping[str, Any], zero_stage: int) -> Settings:
    """Check what the user gave, and keep apart what is for DeepSpeed and what is for planning.

    Args:
        config: The DeepSpeed configuration; it stays as it is.
        arguments: The options that were given as arguments. Those that are not None win over ``pipeline.madpipe``.
        zero_stage: The ZeRO stage, for a configuration that names none.

    Raises:
        ValueError: an unknown or malformed option; a section that does not go with Lightning or a pipeline.
    """
    checked = copy.deepcopy(dict(config))
    for section in ("optimizer", "scheduler"):
        if section in checked:
            raise ValueError(
                f"the DeepSpeed config has {section!r}: return it from configure_optimizers() instead"
            )
    if "gradient_accumulation_steps" in checked:
        raise ValueError(
            "the DeepSpeed config has 'gradient_accumulation_steps': it is the product of "
            "Trainer(accumulate_grad_batches=...) and MadPipeStrategy(num_micro_batches=...), which you give"
        )
    if "train_batch_size" in checked:
        raise ValueError(
            "the DeepSpeed config has 'train_batch_size': leave it out, because the data loader's batch_size says "
            "it"
        )
    for section in ("zero_optimization", "pipeline", "bf16", "fp16"):
        if not isinstance(checked.get(section, {}), Mapping):
            raise ValueError(f"the DeepSpeed config has {section!r}: {checked[section]!r}, which is no object")
    if not isinstance(checked.get("pipeline", {}).get("madpipe", {}), Mapping):
        raise ValueError("the DeepSpeed config has 'madpipe' in 'pipeline', which is no object of options")
    if zero_stage:
        checked.setdefault("zero_optimization", {"stage": zero_stage})
    checked.setdefault("zero_allow_untested_optimizer", True)  # any optimizer of torch, as Lightning's default
    configured_stage = checked.get("zero_optimization", {}).get("stage", 0)
    if configured_stage not in (0, 1):
        raise ValueError(
            f"the DeepSpeed config has ZeRO stage {configured_stage}: a pipeline works with stage 0 or 1"
        )
    pipeline = dict(checked.get("pipeline", {}))
    given = {name: value for name, value in arguments.items() if value is not None}
    merged = {**pipeline.pop("madpipe", {}), **given}
    checked["pipeline"] = pipeline
    counts_steps = merged.get("warmup_steps") is not None
    options = Options.from_mapping(merged)
    if options.shard_weights:
        raise ValueError(
            "shard_weights leaves each rank some of the weights of its stages, and a Trainer reads all of them, "
            "for checkpoints and at the end: leave it out, or train under DeepSpeed "
            "(deepspeed_partition.engine.initialize)"
        )
    return Settings(checked, options, counts_steps)


def check_count(name: str, value: Any, *, least: int) -> None:
    """Refuse what is neither None nor a whole number.

    Raises:
        ValueError: that, or less than ``least``.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"{name} is {value!r}, not a whole number of at least {least}")


def fewer_stages(most: int, num_processes: int) -> str:
    """What to write where a pipeline may have so many stages at the most."""
    dividing = max(number for number in range(1, most + 1) if num_processes % number == 0)
    pipelines = num_processes // dividing
    return (
        f"use at most {counted(most, 'stage')}, MadPipeStrategy(num_stages={dividing}), which makes {pipelines} "
        f"pipelines of the {num_processes} processes, or Trainer(devices={most})"
    )


def resolved_num_stages(num_stages: int | None, num_processes: int) -> int:
    """The stages of a pipeline; all processes, where ``num_stages`` is None.

    Raises:
        ValueError: they do not divide the processes.
    """
    resolved = num_stages or num_processes
    if num_processes % resolved != 0:
        raise ValueError(
            f"num_stages={resolved} does not divide the {num_processes} processes: each pipeline has "
            "num_stages of them"
        )
    return resolved
