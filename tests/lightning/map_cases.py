"""Cases: plans with several stages on a rank, from files; plans that are made after a warm-up."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from deepspeed_partition import InfeasibleError, make_plan, replay
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.warmup import replanning
from deepspeed_partition.engine.warmup.run_plan import BUFFERS
from tests.engine import plans
from tests.engine.running import divides_backwards, recomputes_on_a_cpu
from tests.engine.step_watch_cases import SLOW_FROM, slow_on_rank_1
from tests.exhaustive import is_exhaustive
from tests.lightning import lightning_cases as cases
from tests.lightning.loop_cases import named_samples

MAPS = {"0-1-0": ((0, 1, 0), [0, 3, 6, 8]), "0-1-1-0": ((0, 1, 1, 0), [0, 2, 4, 5, 8])}
CUTS = {
    "one stage": ((0,), [0, 8]),
    "two stages": ((0, 1), [0, 2, 8]),
    "two others": ((0, 1), [0, 6, 8]),
    "0-1-0": MAPS["0-1-0"],
    "four stages": ((0, 1, 2, 3), [0, 1, 3, 6, 8]),
}
SAVED_UNDER = {
    2: ["one stage", "two stages", "two others", "0-1-0"],
    4: ["one stage", "four stages"],
}
"""By so many processes; those that are more than the stages are data parallel."""
NUM_MICRO_BATCHES = 4


def plan_file(host: cases.Host, name: str) -> str:
    """Of those in ``MAPS`` rank 0 has the first and the last stage: it takes the inputs, and runs whole steps."""
    devices, cuts = {**MAPS, **CUTS}[name]
    orders = plans.depth_first(devices, NUM_MICRO_BATCHES, 2)
    platform = plans.platform_of(max(devices) + 1)
    plan = plans.plan_of(plans.chain_of(cuts[-1]), platform, cuts, devices, orders=orders)
    path = host.folder / f"{name}.json"
    plan.save(path)  # alike on all ranks
    return str(path)


def strategies(host: cases.Host) -> list[dict[str, Any]]:
    return [{"plan": plan_file(host, name)} for name in MAPS]


def several_stages(host: cases.Host) -> dict[str, Any]:
    """Losses, logs, rates, hooks, the best checkpoint."""
    records = []
    for index, strategy in enumerate(strategies(host)):
        checkpoint = ModelCheckpoint(host.folder / f"several{index}", monitor="loss", filename="{epoch}")
        record = cases.fit(host, cases.Classifier, cases.loader(54), callbacks=[checkpoint], strategy=strategy)
        records.append({**record, "best": Path(checkpoint.best_model_path).name})
    return {"records": records}


def several_stages_in_all_forms(host: cases.Host) -> dict[str, Any]:
    """ZeRO-1, clipped, accumulated, logged, predicted."""
    records = []
    for strategy in strategies(host):
        arguments = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}
        record = cases.fit(host, cases.Logger, cases.loader(54), strategy={**strategy, "stage": 1}, **arguments)
        module = cases.seeded(Predicting)
        predicted = host.trainer(strategy=strategy).predict(module, cases.loader(21, seed=3))
        records.append({**record, "predicted": [batch.tolist() for batch in predicted]})
    return {"records": [{**record, "num_hook_calls": None} for record in records]}


class Predicting(cases.Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


def several_stages_resumed(host: cases.Host) -> dict[str, Any]:
    return {"records": [cases.resumed(host, strategy=strategy) for strategy in strategies(host)]}


class Unlike(cases.Classifier):
    """Layers that keep much more than they send, that draw numbers, and that count."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        wide = (nn.Linear(cases.WIDTH, 256), nn.BatchNorm1d(256), nn.Tanh(), nn.Dropout(0.5))
        narrow = (*(nn.Tanh() for _ in range(8)), nn.Linear(256, cases.WIDTH))
        self.blocks = nn.ModuleList([*wide, *narrow, cases.Block()])


class Chain(Callback):
    """The chain and the platform of a run, and whether its plan recomputes."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        engine = trainer.strategy.deepspeed_engine
        self.found = gather_objects((engine.chain, engine.plan.platform))[0]
        self.recomputes = any(stage.blocks for stage in engine.plan.stages)


def recomputed(host: cases.Host) -> dict[str, Any]:
    """In less memory than any plan takes without recomputation: the same losses as without."""
    if not host.pipelined or not recomputes_on_a_cpu():
        return {}
    plain, tight = Chain(), Chain()
    options = {"warmup_steps": 0, "algorithm": "contiguous"}
    record = cases.fit(
        host, Unlike, cases.loader(48), callbacks=[plain], strategy={**options, "recompute": "never"}
    )
    chain, platform = plain.found
    platform = replace(platform, comm_buffers=BUFFERS)  # a plan with room takes more where that is faster
    least = []
    for mode in ("never", "auto"):
        with pytest.raises(InfeasibleError) as error:
            make_plan(
                chain, replace(platform, memory_bytes=platform.fixed_bytes + 1), "contiguous", recompute=mode,
                num_micro_batches=NUM_MICRO_BATCHES, every_device_trains=True,
            )  # fmt: skip
        least.append(error.value.smallest_memory_bytes or 0)
    strategy = {**options, "memory": sum(least) // 2}
    again = cases.fit(host, Unlike, cases.loader(48), callbacks=[tight], strategy=strategy)
    assert least[1] < 0.95 * least[0] and tight.recomputes and not plain.recomputes
    assert again["rows"] == record["rows"], (again["rows"], record["rows"])
    strategy = {"plan": one_by_one_file(host, chain.num_layers)}
    one_by_one = cases.fit(host, Unlike, cases.loader(48), strategy=strategy)
    expected = [pytest.approx(row, rel=1e-5) for row in record["rows"]]  # micro-batches add up in another order
    assert one_by_one["rows"] == expected, (one_by_one["rows"], record["rows"])
    return {}


def one_by_one_file(host: cases.Host, num_layers: int) -> str:
    """Some micro-batches recomputed, some backwards in halves; a pattern of two, and two stages on rank 0."""
    devices, cuts = (0, 1, 0), [0, 3, num_layers - 2, num_layers]
    orders = plans.some_recomputed(plans.depth_first(devices, NUM_MICRO_BATCHES, 2), seed=1)
    if divides_backwards():
        orders = plans.some_in_halves(orders, seed=2)
    kinds = {name[0] for order in orders for name, _ in order}
    assert kinds == set("FfRBIW" if divides_backwards() else "FfRB")
    chain, platform = plans.chain_of(num_layers), plans.platform_of(2)
    plan = plans.of_two_per_period(plans.plan_of(chain, platform, cuts, devices, orders=orders))
    assert all("the plan says" in violation for violation in replay(plan, chain).violations)
    path = host.folder / "one_by_one.json"
    plan.save(path)
    return str(path)


def in_halves(host: cases.Host) -> dict[str, Any]:
    """Backwards in two halves, as a plan that is made says and as a plan file says: the same losses as without."""
    if not host.pipelined or not divides_backwards():
        return {}
    plain, split = Chain(), Chain()
    options = {"warmup_steps": 0, "algorithm": "contiguous"}
    record = cases.fit(host, cases.Classifier, cases.loader(48), callbacks=[plain], strategy=options)
    expected = [pytest.approx(row, rel=1e-5) for row in record["rows"]]  # micro-batches add up in another order
    strategy = {**options, "split_backward": True}
    made = cases.fit(host, cases.Classifier, cases.loader(48), callbacks=[split], strategy=strategy)
    assert made["rows"] == expected, (made["rows"], record["rows"])
    assert all(layer.backward_input_seconds is not None for layer in split.found[0].layers)
    assert all(layer.backward_input_seconds is None for layer in plain.found[0].layers)
    orders = plans.some_in_halves(plans.depth_first((0, 1), NUM_MICRO_BATCHES, 2), 1, share=1.0)
    num_layers = split.found[0].num_layers
    chain, platform = plans.chain_of(num_layers), plans.platform_of(2)
    file = host.folder / "halves.json"
    plans.plan_of(chain, platform, [0, 3, num_layers], (0, 1), orders=orders).save(file)
    given = cases.fit(host, cases.Classifier, cases.loader(48), strategy={"plan": str(file)})
    assert given["rows"] == expected, (given["rows"], record["rows"])
    return {}


class LastLayerDear(Callback):
    """From the second batch on layers take as long as planned, and half more on rank 1 from a step on."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.world_size == 1 or trainer.global_step > 1:
            return
        engine = trainer.strategy.deepspeed_engine
        last = engine.chain.num_layers - 1
        layers = (
            replace(layer, forward_seconds=seconds, backward_seconds=2 * seconds)
            for place, layer in enumerate(engine.chain.layers) for seconds in [0.06 if place == last else 0.01]
        )  # fmt: skip
        engine.chain = replace(engine.chain, layers=tuple(layers), warm_up=None)
        self.stack.enter_context(slow_on_rank_1(engine.plan, SLOW_FROM))
        self.stack.enter_context(patch.object(replanning, "MIN_GAIN", -1.0))

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.stack.close()
        if trainer.world_size > 1:
            engine = trainer.strategy.deepspeed_engine
            # The slow one takes the first layers now, and the other one the dear end.
            assert [(stage.layers, stage.device) for stage in engine.plan.stages] == [((0, 6), 1), ((6, 8), 0)]
            assert [engine.plan.platform.speed_of(each) for each in (0, 1)] == [
                1.0,
                pytest.approx(2 / 3, rel=0.01),
            ]


def slow_rank(host: cases.Host) -> dict[str, Any]:
    """A rank becomes slow, and the last stage moves to the other one in the middle of an epoch."""
    strategy = {"replan": "when_slow", "warmup_steps": 0, "algorithm": "contiguous", "recompute": "never"}
    slowed, data = LastLayerDear(), cases.loader(4 * (SLOW_FROM + 24), batch_size=4)
    return cases.fit(host, cases.Classifier, data, callbacks=[slowed], strategy=strategy, max_epochs=1)


class Planned(Callback):
    """At the end of which epochs there was a plan."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.world_size > 1:
            self.found.append(trainer.strategy.plan is not None)


def warmed_up(host: cases.Host) -> dict[str, Any]:
    """Measured while it trains, then moved with its states: between two epochs, as by default, and within one."""
    records = []
    for warm_up, found in (({}, [False, True]), ({"warmup_steps": 2, "stage": 1}, [True, True])):
        planned = Planned()
        strategy = {"algorithm": [0, 2, 8], **warm_up}
        records.append(cases.fit(host, cases.Classifier, cases.loader(54), callbacks=[planned], strategy=strategy))
        assert planned.found == (found if host.pipelined else [])
    return {"records": records}


class RunsOut(cases.Classifier):
    """Takes its batch apart and counts what it sees; its loss runs out of memory where ``failures`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[int] = []
        self.num_samples = 0
        self.mean = MeanMetric()
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        y, x = batch.pop("y"), batch.pop("x").mul_(0.5)
        logits = self(x)
        loss = F.cross_entropy(logits.mul_(0.5), y)
        self.num_samples += len(y)
        self.labels += y.tolist()
        self.mean.update(loss.detach(), len(y))
        self.steps = self.steps + len(y)
        if not failures.empty() and failures.get():
            raise torch.cuda.OutOfMemoryError("tried to allocate more than there is")
        self.log("loss", loss, batch_size=len(y))
        return loss


failures: Any = multiprocessing.SimpleQueue()
"""Whether each of the next losses runs out of memory. What this process keeps would be undone with it."""


def given_up(host: cases.Host) -> dict[str, Any]:
    """Twice in the warm-up a step runs again, and its traces on the module are those of one run."""
    for fails in [*[False] * 6, True, *[False] * 2, True] if host.pipelined else []:
        failures.put(fails)
    data = torch.utils.data.DataLoader(cases.samples(54), batch_size=16, collate_fn=named_samples)
    modules: list[RunsOut] = []
    # A trial would run the step, too, and so would a look at what layers change.
    strategy = {"algorithm": [0, 2, 8], "warmup_epochs": 1, "loss": "mean", "check_layers": False}
    record = cases.fit(host, lambda: modules.append(RunsOut()) or modules[0], data, strategy=strategy)
    left = 0
    while not failures.empty():
        failures.get()
        left += 1
    assert left in (0, 10), "the last stage alone runs whole steps, and failed as often as it should"
    [module] = modules
    rows = [[module.num_samples, float(module.steps), float(module.mean.compute())]]
    return {"record": record, "labels": module.labels, "rows": rows}


def warmed_up_and_resumed(host: cases.Host) -> dict[str, Any]:
    """From a checkpoint of the warm-up: the plan is made when it is over, at once or within the next epoch."""
    return {
        "records": [
            cases.resumed(host, strategy={"algorithm": "uniform", **warm_up})
            for warm_up in ({"warmup_epochs": 1}, {"warmup_steps": 6})
        ]
    }


def every_cut(host: cases.Host) -> dict[str, Any]:
    """Saved under each cut and loaded under each other one, or under the next alone; half of them with ZeRO."""
    data = cases.loader(32)
    if not host.pipelined:
        return {"rows": recorded(host, data, max_epochs=2)[1][2:]}
    cuts = SAVED_UNDER[host.num_processes]
    found: dict[str, list[list[float]]] = {}
    written: set[Path] = set()
    in_turn = zip(cuts, [*cuts[1:], cuts[0]], strict=True)
    for saved, now in itertools.permutations(cuts, 2) if is_exhaustive() else in_turn:
        zero = (cuts.index(saved) + cuts.index(now) + (saved < now)) % 2
        path = host.folder / f"every cut {saved} {zero}.ckpt"
        if path not in written:
            trainer, _ = recorded(host, data, max_epochs=1, strategy=under(host, saved, zero))
            trainer.save_checkpoint(path)
            written.add(path)
        strategy = under(host, now, zero)
        trainer, rows = recorded(host, data, seed=99, max_epochs=2, strategy=strategy, ckpt_path=path)
        assert trainer.strategy.pipeline.parts == CUTS[now][1] and trainer.strategy.plan is not None
        found[f"{saved} -> {now}, ZeRO {zero}"] = rows
    return found


def under(host: cases.Host, name: str, zero: int) -> dict[str, Any]:
    return {"plan": plan_file(host, name), "num_stages": max(CUTS[name][0]) + 1, "stage": zero}


def recorded(host: cases.Host, data: Any, seed: int = 0, **arguments: Any) -> tuple[Any, list[list[float]]]:
    recorder = cases.Recorder()
    trainer = cases.trained(host, cases.seeded(seed=seed), recorder, data=data, **arguments)
    return trainer, recorder.rows


SAME_AS_SINGLE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {
    2: [
        several_stages, several_stages_in_all_forms, several_stages_resumed, recomputed, in_halves, warmed_up,
        given_up, warmed_up_and_resumed, every_cut, slow_rank,
    ],
    4: [every_cut],
}  # fmt: skip


def adopted(host: cases.Host) -> dict[str, Any]:
    """A run that plans by itself takes the map of a checkpoint over, and the device of the loss with it."""
    strategy = {"plan": plan_file(host, "0-1-0")}
    root = host.folder / "adopted"
    cases.fit(
        host, cases.Classifier, cases.loader(54), max_epochs=1,
        callbacks=[ModelCheckpoint(root, save_last=True)], strategy=strategy,
    )  # fmt: skip
    rows = []
    for settings in (strategy, {}):
        module, recorder = cases.seeded(seed=99), cases.Recorder()
        trainer = host.trainer(recorder, strategy=settings)
        trainer.fit(module, cases.loader(54), ckpt_path=str(root / "last.ckpt"))
        rows.append(recorder.rows)
        devices = trainer.strategy.pipeline.device_of_stage
    return {"same": rows[0], "adopted": rows[1], "devices": devices}


ONLY_PIPELINE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {2: [adopted], 4: []}
