"""Cases: code in the manner of others, unchanged but for ``install()`` and the method's word."""

from __future__ import annotations

import base64
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from deepspeed.utils import RepeatingLoader

import deepspeed_partition
from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine.pipeline.module import DualPipeVModule
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import logger
from deepspeed_partition.planner.errors import InfeasibleError
from tests.engine import language
from tests.engine.pipelines import loss_fn, mlp, train_alone
from tests.engine.running import (
    ADAM,
    adam,
    batches,
    configuration,
    cut,
    mine,
    planned,
    raised,
    recomputes_on_a_cpu,
    same,
    train,
)

NUM_STEPS, NUM_MICRO_BATCHES = 3, 4


def topology_of(kind: str) -> Any:
    world = dist.get_world_size()
    return {
        "pipe": lambda: PipeDataParallelTopology(num_pp=world, num_dp=1),
        "pipe x data": lambda: PipeDataParallelTopology(num_pp=2, num_dp=world // 2),
        "pipe x model": lambda: PipeModelDataParallelTopology(num_pp=2, num_mp=world // 2, num_dp=1),
    }[kind]()


def set_up(
    method: Any, config: dict[str, Any], *, mask: torch.dtype, topology: str = "pipe", recompute: int = 0
) -> tuple[Any, Any]:
    """As GPT-NeoX sets its model and optimizer up."""
    if method == "madpipe":
        deepspeed_partition.install()
    neox_args = language.arguments(method, checkpoint_num_layers=recompute)
    model = language.GPT2ModelPipe(neox_args, topology=topology_of(topology))
    optimizer = torch.optim.AdamW(language.parameters_for_weight_decay(model), lr=1e-2)
    num_replicas = model.mpu().get_data_parallel_world_size()
    engine, _, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 1 / (1 + step)]),
        dist_init_required=False,
        model_parameters=None,
        config_params=None,
        args=SimpleNamespace(local_rank=int(os.environ["LOCAL_RANK"]), deepspeed_config=None),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": NUM_MICRO_BATCHES // num_replicas,
            "steps_per_print": 10**9,
            "gradient_clipping": 0.5,
            **config,
        },
    )
    if mask == torch.bool:
        engine.set_has_attention_mask(True)
    engine.set_batch_fn(lambda item: language.batch_of(item, mask))
    return engine, scheduler


def neox_alone(mask: torch.dtype) -> list[float]:
    texts = iter(range(10**6))
    data = [
        [language.batch_of(language.text(next(texts)), mask) for _ in range(NUM_MICRO_BATCHES)]
        for _ in range(NUM_STEPS)
    ]
    return train_alone(
        language.specs(),
        data,
        lambda model: torch.optim.AdamW(language.parameters_for_weight_decay(model), lr=1e-2),
        loss_fn=language.cross_entropy,
        make_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, [lambda step: 1.0, lambda step: 1 / (1 + step)]
        ),
        clip=0.5,
    )


def neox_losses(engine: Any) -> list[float]:
    replica, num_replicas = engine.grid.data_parallel_id, engine.grid.data_parallel_size
    numbers = range(replica, NUM_STEPS * NUM_MICRO_BATCHES, num_replicas)
    loader = [language.text(number) for number in numbers]
    if engine.is_first_stage() or engine.is_last_stage():
        data: Any = iter(RepeatingLoader(loader))
    else:
        data = None
    losses = [float(engine.train_batch(data_iter=data)) for _ in range(NUM_STEPS)]
    if data is not None:
        assert torch.equal(next(data)["text"], loader[0]["text"]), "every micro-batch is taken once"
    return losses


def in_the_manner_of_neox(_: Path) -> None:
    """Masks of booleans and of floats; the cuts lie after the mask is dropped, and before."""
    world = dist.get_world_size()
    dropped, before = ([0, 7, 9], [0, 3, 9]) if world == 2 else ([0, 2, 4, 7, 9], [0, 1, 3, 5, 9])
    late = [0, 8, 9] if world == 2 else [0, 1, 7, 8, 9]
    expected = neox_alone(torch.bool)
    for mask, boundaries, config in (
        (torch.bool, dropped, {}),
        (torch.bool, before, {"zero_optimization": {"stage": 1}}),
        (torch.bool, late, {"zero_optimization": {"stage": 1}}),
        (torch.float32, before, {}),
        (torch.float32, dropped, {}),
    ):
        engine, scheduler = set_up("madpipe", {**planned(boundaries), **config}, mask=mask)
        same(neox_losses(engine), expected)
        assert engine.module.parts == boundaries == engine.plan.boundaries and engine.lr_scheduler is scheduler
        own = range(boundaries[engine.stage_id], boundaries[engine.stage_id + 1])
        assert all(engine.module.stage_owner(layer) == engine.stage_id for layer in own)
        assert len(engine.module.to_sequential()) == sum(
            layer not in (1, language.NUM_LAYERS - 3) for layer in own
        )
        assert isinstance(engine, deepspeed.PipelineEngine)
        logits = gather_objects(engine.module.num_logits)
        assert [number > 0 for number in logits] == [False] * (world - 1) + [True]
    engine, _ = set_up("type:transformer", {"gradient_clipping": 0.0}, mask=torch.bool)
    assert not engine.owns_cut and engine.module.parts != dropped
    engine.train_batch(iter(RepeatingLoader([language.text(0)])))


def neox_evaluates_and_recomputes(_: Path) -> None:
    expected = neox_alone(torch.bool)
    engine, _ = set_up("madpipe", planned([0, 7, 9]), mask=torch.bool, recompute=int(recomputes_on_a_cpu()))
    same(neox_losses(engine), expected)
    found = float(engine.eval_batch(iter(RepeatingLoader([language.text(0)]))))
    engine.set_dataloader([language.text(number) for number in range(NUM_MICRO_BATCHES)])
    assert abs(found) < 10 and float(engine.train_batch()) < expected[0]


def neox_with_other_axes(_: Path) -> None:
    """Replicas of the pipeline; and tensor-parallel ranks, which DeepSpeed hands slices of the activations."""
    expected = neox_alone(torch.bool)
    for topology, mask in (
        ("pipe x data", torch.bool), ("pipe x model", torch.bool), ("pipe x model", torch.float32),
    ):  # fmt: skip
        for zero in (0, 1):
            config = {**planned([0, 5, 9]), "zero_optimization": {"stage": zero}}
            engine, _ = set_up("madpipe", config, mask=mask, topology=topology)
            same(neox_losses(engine), expected)
            assert engine.module.parts == [0, 5, 9]


# Modules and engines of the user's own


class Sliced(deepspeed.PipelineModule):
    """A subclass that cuts itself."""

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = [0, *range(1, self.num_stages), self._num_layers]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


class OwnEngine(deepspeed.PipelineEngine):
    """A subclass made before ``install``."""


def module_of(module_class: type = deepspeed.PipelineModule, method: Any = "madpipe", **options: Any) -> Any:
    return module_class(
        layers=mlp(), num_stages=dist.get_world_size(), loss_fn=loss_fn, partition_method=method,
        seed_layers=True, **options,
    )  # fmt: skip


def initialize(module: Any, more: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """``deepspeed.initialize``, on this project's usual configuration and ``more`` if no other is given."""
    arguments.setdefault("config", configuration(optimizer=ADAM, **(more or {})))
    return deepspeed.initialize(model=module, model_parameters=list(module.parameters()), **arguments)[0]


def subclasses_that_cut_themselves(_: Path) -> None:
    """Their cut stays, unless the configuration asks for a plan."""
    data = batches()
    expected = train_alone(mlp(), data, adam)
    engine = initialize(module_of(Sliced), {"gradient_clipping": 0.0})
    own = engine.module.parts
    train(engine, data[:1])
    assert not engine.owns_cut and engine.module.parts == own and engine.plan is None
    config = planned(cut())
    config["pipeline"]["partition_method"] = "madpipe"
    engine = initialize(module_of(Sliced), config)
    same(train(engine, data), expected)
    assert engine.module.parts == cut()


def engines_of_other_kinds(_: Path) -> None:
    """What ``install`` leaves alone: DualPipeV, and engines of the user's own.

    qlora-pipe makes its own engine of a module that it has cut by ``parameters``: a configuration that asks for a
    plan got none, and no word.
    """
    deepspeed_partition.install()
    for method, configured in (("madpipe", {}), ("uniform", {"pipeline": {"partition_method": "madpipe"}})):
        heard: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, heard=heard: heard.append(record.getMessage())  # type: ignore[method-assign, misc]
        logger.addHandler(handler)
        try:
            module = module_of(method=method)
            config = configuration(optimizer=ADAM) | configured
            engine = OwnEngine(
                args=None, model=module, mpu=module.mpu(), model_parameters=list(module.parameters()),
                config=config, config_class=deepspeed.DeepSpeedConfig(config, module.mpu()),
            )  # fmt: skip
        finally:
            logger.removeHandler(handler)
        assert type(engine) is OwnEngine and not isinstance(engine, MadPipeEngine)
        said = [message for message in heard if "OwnEngine is an engine of your own" in message]
        assert dist.get_rank() != 0 or len(said) == 1, (method, heard)
        train(engine, batches(1))
    if DualPipeVModule is None:  # DeepSpeed 0.19.0 and before
        return
    with raised(ValueError, "DualPipeV", "DeepSpeed's methods"):
        module_of(DualPipeVModule)
    num_stages = dist.get_world_size()
    module = module_of(DualPipeVModule, "uniform")
    config = configuration(optimizer=ADAM, gradient_clipping=0.0)
    config["gradient_accumulation_steps"] = 2 * num_stages
    engine = initialize(module, config=config)
    assert isinstance(engine, deepspeed.PipelineEngine) and not isinstance(engine, MadPipeEngine)
    item = batches(1)[0][0]
    first, second = (float(engine.train_batch(iter([item] * 2 * num_stages))) for _ in range(2))
    assert second < first


def installed_after_the_module_was_built(_: Path) -> None:
    """``install`` comes after the module: the configuration can still ask."""
    data = batches()
    deepspeed_partition.install()
    partition = deepspeed.PipelineModule._partition_layers
    stock = partition.__closure__[0].cell_contents  # DeepSpeed's own, which our function wraps
    deepspeed.PipelineModule._partition_layers = stock
    try:
        with raised(NotImplementedError, "madpipe"):
            module_of()
        module = deepspeed.PipelineModule(layers=mlp(), num_stages=dist.get_world_size(), loss_fn=loss_fn)
    finally:
        deepspeed.PipelineModule._partition_layers = partition
    deepspeed_partition.install()
    config = planned(cut())
    config["pipeline"]["partition_method"] = "madpipe"
    engine = initialize(module, config)
    losses = train(engine, data)
    assert engine.module.parts == cut() and losses[-1] < losses[0]


def configurations_as_launchers_give_them(folder: Path) -> None:
    """A file, its text in base64, an argument of the command line; each asks for the plan by itself."""
    config = configuration(optimizer=ADAM, **planned(cut()))
    config["pipeline"]["partition_method"] = "MadPipe"
    text = json.dumps(config)
    path = folder / "ds_config.json"
    if dist.get_rank() == 0:
        path.write_text(text)
    dist.barrier()
    data = batches()
    expected = train_alone(mlp(), data, adam)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for arguments in (
        {"config": str(path)},
        {"config": encoded},
        {
            "config": None,
            "args": SimpleNamespace(deepspeed_config=str(path), local_rank=int(os.environ["LOCAL_RANK"])),
        },
        {"config": None, "config_params": config},
    ):
        engine = initialize(module_of(method="parameters"), **arguments)
        same(train(engine, data), expected)
        assert engine.module.parts == cut()


def monitors_are_opened_once(folder: Path) -> None:
    config = planned(cut())
    config["csv_monitor"] = {"enabled": True, "output_path": str(folder), "job_name": "csv"}
    config["tensorboard"] = {"enabled": True, "output_path": str(folder), "job_name": "board"}
    engine = initialize(module_of(), config)
    monitor = engine.monitor
    train(engine, batches())
    dist.barrier()
    assert engine.monitor is monitor and engine._config.monitor_config.enabled
    if dist.get_rank() == 0:
        assert len(list(folder.glob("board/*tfevents*"))) == 1
        [losses] = folder.glob("csv/*train_loss*.csv")
        assert len(losses.read_text().splitlines()) == 1 + 4


def a_plan_that_failed_is_tried_again(_: Path) -> None:
    """The micro-batch that was measured is not lost."""
    data = batches()
    engine = initialize(module_of(), planned(cut()))
    memory = engine.options
    items = mine(engine, data)
    engine.options = type(memory)(memory=1000)
    for _ in range(2):
        with raised(InfeasibleError, "into 1 kB per device"):
            engine.train_batch(items)
    assert items.taken <= 1
    engine.options = memory
    same([float(engine.train_batch(items)) for _ in data], train_alone(mlp(), data, adam))


BOTH = [in_the_manner_of_neox, engines_of_other_kinds]
ONLY_TWO = [
    neox_evaluates_and_recomputes, subclasses_that_cut_themselves, installed_after_the_module_was_built,
    configurations_as_launchers_give_them, monitors_are_opened_once, a_plan_that_failed_is_tried_again,
]  # fmt: skip
ONLY_FOUR = [neox_with_other_axes]
