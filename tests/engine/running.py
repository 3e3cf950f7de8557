"""Starting engines and training them, for the cases that run in several processes."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from deepspeed_partition.engine import MadPipeEngine, PipelineModule, initialize
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.profiling.backward_halves import CAN_SPLIT
from tests.engine import pipelines
from tests.engine.pipelines import Counted, loss_fn, micro_batch

NUM_MICRO_BATCHES = 4
NUM_STEPS = 4
ADAM = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}
CUTS = {2: [0, 2, 8], 4: [0, 1, 3, 4, 8]}
"""Cuts that DeepSpeed's balance would not choose, so that layers must move."""


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def configuration(**more: Any) -> dict[str, Any]:
    num_replicas = dist.get_world_size() // more.pop("num_stages", dist.get_world_size())
    more = copy.deepcopy(more)  # some versions of DeepSpeed take options out of it
    settings = {
        "train_micro_batch_size_per_gpu": pipelines.MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": NUM_MICRO_BATCHES // num_replicas,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,  # the default of some versions of DeepSpeed; of others it is 0
        **more,
    }
    return {key: value for key, value in settings.items() if value is not None}


def planned(boundaries: list[int] | str, **options: Any) -> dict[str, Any]:
    """A configuration that measures the layers, on links that are told, and plans, with this answer.

    What an operation takes is told, too: to measure it takes a tenth of a short run.
    """
    link = {"bandwidth": 1e9, "latency_seconds": 0.0, "operation_seconds": 0.0, "copy_bandwidth": 1e12}
    return {"pipeline": {"madpipe": {"algorithm": boundaries, **link, **options}}}


def start(
    specs: list[Any], method: Any = "madpipe", config: dict[str, Any] | None = None, *,
    num_stages: int | None = None, optimizer: Any = None, lr_scheduler: Any = None,
    training_data: Any = None, plan: Any = None,
    module_class: type = PipelineModule, start_engine: Any = initialize, loss_fn: Any = loss_fn,
    seed_layers: bool = True, **module_options: Any,
) -> tuple[MadPipeEngine, Any, Any]:  # fmt: skip
    """An engine, its optimizer and its scheduler. ``optimizer`` makes of the module what is passed on."""
    num_stages = num_stages or dist.get_world_size()
    if plan is not None:
        module_options["plan"] = plan
    module = module_class(
        layers=specs, num_stages=num_stages, loss_fn=loss_fn, partition_method=method,
        seed_layers=seed_layers,
        base_seed=pipelines.BASE_SEED, **module_options,
    )  # fmt: skip
    config = configuration(num_stages=num_stages, **(config or {}))
    if optimizer is None:
        config.setdefault("optimizer", copy.deepcopy(ADAM))
    made = optimizer(module) if optimizer is not None else None
    if made is not None and lr_scheduler is not None and not getattr(lr_scheduler, "for_engine", False):
        lr_scheduler = lr_scheduler(made)
    engine, wrapped, _, scheduler = start_engine(
        model=module,
        config=config,
        optimizer=made,
        model_parameters=[parameter for parameter in module.parameters() if parameter.requires_grad],
        lr_scheduler=lr_scheduler,
        training_data=training_data,
    )
    return engine, wrapped, scheduler


def batches(num_steps: int = NUM_STEPS, **kind: Any) -> list[list[Any]]:
    """The micro-batches of each step, of all replicas together."""
    numbers = iter(range(10**6))
    return [[micro_batch(next(numbers), **kind) for _ in range(NUM_MICRO_BATCHES)] for _ in range(num_steps)]


def mine(engine: MadPipeEngine, data: list[list[Any]]) -> Counted:
    """What this rank's replica trains on; nothing on ranks that read no data."""
    replica, num_replicas = engine.grid.data_parallel_id, engine.grid.data_parallel_size
    items = [item for batch in data for item in batch[replica::num_replicas]]
    return Counted(items)


def train(engine: MadPipeEngine, data: list[list[Any]]) -> list[float]:
    items = mine(engine, data)
    has_an_end = engine.is_first_stage() or engine.is_last_stage()
    losses = [float(engine.train_batch(items if has_an_end else None)) for _ in data]
    if engine.is_first_stage() or engine.is_last_stage():
        assert items.taken == len(items.items), "every micro-batch is taken once"
    elif has_an_end and items.taken > 1:
        assert items.taken % engine.micro_batches == 0, "whole steps, until a plan gave the stages to other ranks"
    else:
        assert items.taken <= 1, "one may have been measured, before a plan gave the stages to other ranks"
    return losses


def train_on_four_cuts(engine: MadPipeEngine, data: list[list[Any]]) -> list[float]:
    """Train one step on the present cut of eight layers, and the others on three cuts to which layers move."""
    losses = train(engine, data[:1])
    for place, more in (([0, 4, 8], data[1:2]), ([0, 7, 8], data[2:3]), ([0, 2, 8], data[3:])):
        engine.recut(place)
        losses += train(engine, more)
    return losses


def same(actual: list[float], expected: list[float], digits: float = 1e-5) -> None:
    assert len(actual) == len(expected)
    difference = max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))
    assert difference < digits, f"losses {actual} are not {expected}"


def all_tensors(engine: MadPipeEngine) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of the pipeline by its global name."""
    own = {name: tensor.detach().clone() for name, tensor in engine.module.named_parameters()}
    own.update({name: tensor.clone() for name, tensor in engine.module.named_buffers()})
    everything: dict[str, torch.Tensor] = {}
    for part in gather_objects(own, engine.grid.get_pipe_parallel_group()):
        everything.update(part)
    return everything


def raised(kind: type[Exception], *words: str):
    """A context in which every rank must raise ``kind`` with ``words`` in its message."""

    class Raised:
        def __enter__(self) -> None:
            pass

        def __exit__(self, actual: Any, error: Any, _: Any) -> bool:
            assert actual is not None, f"nothing was raised, not {kind.__name__}"
            if not issubclass(actual, kind):
                return False
            for word in words:
                assert word in str(error), f"{word!r} is not in: {error}"
            return True

    return Raised()


def two() -> bool:
    return dist.get_world_size() == 2


def cut() -> list[int]:
    return CUTS[dist.get_world_size()]


def recomputes_on_a_cpu() -> bool:
    """Whether DeepSpeed's activation checkpointing runs here: that of 0.19.0 wants the streams of a GPU."""
    return not deepspeed.__version__.startswith("0.19.0")


def divides_backwards() -> bool:
    """Whether backwards run in two halves here: older torch and DeepSpeed run them undivided."""
    return CAN_SPLIT and hasattr(deepspeed.runtime.engine, "_ENGINE_BACKWARD_GRAPH_TRACKER")


def divides_gradients_once() -> bool:
    """Whether DeepSpeed's own cuts train right: 0.19.0 divides once more on every stage but the last."""
    return "_backward_prologue_per_tensor" in vars(PipelineEngine)
