"""Cases: DeepSpeed's mixture of experts in two pipelines of two ranks, beside plain DeepSpeed on these ranks."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.nn.utils import clip_grad_norm_

from deepspeed_partition.engine import engine as engines
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.planner.errors import PlanMismatchError
from tests.engine import plans
from tests.engine.running import NUM_MICRO_BATCHES, batches, planned, raised, same, start, train

WIDTH = 8
CUT = [0, 2, 5]
UNCLIPPED = {"gradient_clipping": 0.0}
IN_BF16 = {"bf16": {"enabled": True}}
ZERO_1 = {"zero_optimization": {"stage": 1}}


class Mixed(nn.Module):
    """Two experts, of which each pipeline has one if ``ep_size`` is 2, and both if it is 1."""

    def __init__(self, ep_size: int = 2) -> None:
        super().__init__()
        expert = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, expert, num_experts=2, ep_size=ep_size, k=1, use_rts=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x)[0]


class PlainEngine(deepspeed.PipelineEngine):
    """DeepSpeed's own, which ``install`` leaves alone."""


def specs() -> list[Any]:
    return [
        LayerSpec(Mixed), LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Tanh), LayerSpec(Mixed),
        LayerSpec(nn.Linear, WIDTH, 4),
    ]  # fmt: skip


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def begin(method: Any, config: dict[str, Any], *, plain: bool = False, **more: Any) -> Any:
    if plain:
        more["module_class"] = deepspeed.pipe.PipelineModule
        more["start_engine"] = functools.partial(engines.initialize_with, PlainEngine)
    layers = more.pop("layers", None) or specs()
    more.setdefault("optimizer", sgd if not config.keys() & {"bf16", "zero_optimization"} else None)
    return start(layers, method, config, num_stages=2, **more)[0]


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """The weights of this pipeline, whose experts no other one has."""
    own = {name: each.detach().clone() for name, each in engine.module.named_parameters()}
    parts = gather_objects(own, engine.grid.get_pipe_parallel_group())
    return {name: each for part in parts for name, each in part.items()}


def alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in found.items():
        assert torch.allclose(each, expected[name], rtol=1e-5, atol=1e-6), name


def shared_weights_are_alike(engine: Any) -> None:
    shared = {name: each for name, each in weights(engine).items() if "experts" not in name}
    for other in gather_objects(shared, engine.grid.get_data_parallel_group()):
        assert all(torch.equal(each, other[name]) for name, each in shared.items()), "pipelines have parted"


def experts_train_as_under_deepspeed(_: Path) -> None:
    """Gradients of experts that one pipeline has alone were not divided by the number of pipelines, in silence."""
    for config in ({}, IN_BF16, {**IN_BF16, "communication_data_type": "fp32"}, ZERO_1, {**IN_BF16, **ZERO_1}):
        data = batches(dtype=torch.bfloat16 if "bf16" in config else torch.float32)
        config = {**UNCLIPPED, **config}
        plain = begin("uniform", config, plain=True)
        assert type(plain) is PlainEngine
        losses = train(plain, data)
        for method in (plain.module.parts, CUT, "uniform"):
            engine = begin(method, config)
            same(train(engine, data), losses)
            alike(weights(engine), weights(plain))
            shared_weights_are_alike(engine)


def experts_are_clipped_alike(_: Path) -> None:
    """Each pipeline took the norm of its own experts, and the weights that all have parted, in silence."""
    engine = begin(CUT, {"gradient_clipping": 0.1})
    squares: list[float] = []

    def note() -> None:
        squares.append(sum(float(each.grad.norm() ** 2) for each in engine.module.parameters()))

    engine.before_optimizer_step = note
    train(engine, batches())
    mine = torch.tensor(squares)
    by_pipeline: dict[int, Any] = {}
    for pipeline, part in gather_objects((engine.grid.data_parallel_id, mine)):
        by_pipeline[pipeline] = by_pipeline.get(pipeline, 0) + part
    norms = [total.sqrt() for total in by_pipeline.values()]
    assert len(norms) == 2 and not torch.allclose(norms[0], norms[1]), "pipelines have other experts"
    torch.testing.assert_close(torch.as_tensor(engine.get_global_grad_norm()), (norms[0] + norms[1])[-1] / 2)
    shared_weights_are_alike(engine)
    engine = begin(CUT, UNCLIPPED)
    parameters = list(engine.module.parameters())

    def clip(*_: Any) -> None:
        clip_grad_norm_(parameters, 0.1)

    engine.optimizer.register_step_pre_hook(clip)
    train(engine, batches())
    shared_weights_are_alike(engine)


def plan_for(devices: tuple[int, ...], cuts: list[int], *, recomputes: bool = False, halves: bool = False) -> Any:
    orders: Any = plans.depth_first(devices, NUM_MICRO_BATCHES // 2, 2)
    if recomputes:
        orders = plans.some_recomputed(orders, 1, share=0.9)
    if halves:
        orders = plans.some_in_halves(orders, 1, share=0.9)
    return plans.plan_of(plans.chain_of(cuts[-1]), plans.platform_of(2), cuts, devices, orders=orders)


def experts_under_plans(_: Path) -> None:
    """Several stages on a rank, forwards that run again, and backwards in halves: all ranks send alike."""
    data, layers = batches(), [*(LayerSpec(Mixed) for _ in range(4)), LayerSpec(nn.Linear, WIDTH, 4)]
    plain = begin("uniform", UNCLIPPED, plain=True, layers=layers)
    losses = train(plain, data)
    expected = weights(plain)
    for plan in (
        plan_for((0, 1, 0, 1), [0, 1, 2, 3, 5]), plan_for((0, 1), [0, 2, 5], recomputes=True),
        plan_for((0, 1, 0, 1), [0, 1, 2, 3, 5], halves=True),
    ):  # fmt: skip
        engine = begin(None, UNCLIPPED, layers=layers, plan=plan)
        assert engine.runs_lists
        same(train(engine, data), losses)
        alike(weights(engine), expected)


def experts_without_a_drain(_: Path) -> None:
    """With ``ep_size`` 2 pipelines train as with 1, where each has all experts and nothing is sent to others."""
    data = batches(6)
    for mode in ("stashing", "2bw", "vertical-sync"):
        found = []
        chain, platform = plans.chain_of(8), plans.platform_of(2, bandwidth=40.0, comm_buffers=4)
        plan = plans.packed(chain, platform, [0, 3, 8], (0, 1))
        plan = replace(plan, weight_versions=mode, micro_batches_per_update=NUM_MICRO_BATCHES // 2)
        for ep_size in (1, 2):
            engine = begin(None, UNCLIPPED, layers=of_eight(ep_size), plan=plan)
            found.append(train_ahead(engine, data))
            engine.come_to_rest()
            shared_weights_are_alike(engine)
        same(found[1], found[0])
    engine = begin(
        None, {"gradient_clipping": 0.5}, layers=of_eight(), plan=replace(plan, weight_versions="stashing")
    )
    with raised(ValueError, "'stashing' clips by the norm of each rank's own gradients", "MoE", "'2bw'"):
        train_ahead(engine, data)
    engine = begin(None, {"gradient_clipping": 0.1}, layers=of_eight(), plan=replace(plan, weight_versions="2bw"))
    train_ahead(engine, data)
    engine.come_to_rest()
    shared_weights_are_alike(engine)


def of_eight(ep_size: int = 2) -> list[Any]:
    first, *others = [LayerSpec(Mixed, ep_size), LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Tanh)]
    return [first, *others, *others, first, others[1], LayerSpec(nn.Linear, WIDTH, 4)]


def train_ahead(engine: Any, data: list[list[Any]]) -> list[float]:
    """Losses of calls that read data ahead, as of one more batch."""
    replica = engine.grid.data_parallel_id
    items = iter([item for batch in [*data, *data] for item in batch[replica::2]])
    has_an_end = engine.is_first_stage() or engine.is_last_stage()
    return [float(engine.train_batch(items if has_an_end else None)) for _ in data]


def where_experts_stay(_: Path) -> None:
    """A move ended in DeepSpeed's bare "Attempting to override an existing ep_group"."""
    stay = (
        "the model has layers of DeepSpeed's MoE, so all layers stay on their ranks",
        "partition_method=[0, ..., 5]",
    )
    for config in ({}, planned(CUT), planned(CUT, warmup_steps=1)):
        with raised(ValueError, *stay):
            begin("madpipe", config)
    with raised(ValueError, *stay):
        begin("uniform", {"pipeline": {"partition_method": "madpipe"}})
    data = batches()
    engine = begin(CUT, UNCLIPPED)
    losses = train(engine, data[:2])
    with raised(RuntimeError, *stay):
        engine.recut([0, 3, 5])
    engine.recut(CUT)
    losses += train(engine, data[2:])
    same(losses, train(begin(CUT, UNCLIPPED), data))
    with raised(RuntimeError, *stay):
        begin([0, 3, 5], {"pipeline": {"partition_method": CUT}})
    with raised(ValueError, "the cut [0, 4, 5] rank 2 has no MoE layers, and another one MoE layers of ep_size 2"):
        begin([0, 4, 5], {})
    shared_out = {"pipeline": {"madpipe": {"shard_weights": True}}}
    with raised(ValueError, "shard_weights: pipelines have different experts of MoE layers"):
        begin(None, shared_out, plan=plan_for((0, 1), CUT))


def checkpoints_of_experts(folder: Path) -> None:
    """At the cut that wrote them they load equal. At others a bare error of torch's came, with some loaded."""
    data = batches()
    for name, config in (("fp32", {}), ("zero", ZERO_1)):
        where = str(folder / name)
        config = {**UNCLIPPED, **config}
        adam = {"optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2)} if name == "fp32" else {}
        engine = begin(CUT, config, **adam)
        train(engine, data[:2])
        engine.save_checkpoint(where)
        losses = train(engine, data[2:])
        resumed = begin(CUT, config, **adam)
        train(resumed, data[:1])
        resumed.load_checkpoint(where)
        same(train(resumed, data[2:]), losses)
        alike(weights(resumed), weights(engine))
        elsewhere = begin([0, 3, 5], config, **adam)
        before = weights(elsewhere)
        for options in ({}, {"load_module_only": True}):
            with raised(PlanMismatchError, "the cut [0, 2, 5]", "run [0, 3, 5]", "partition_method=[0, 2, 5]"):
                elsewhere.load_checkpoint(where, **options)
        assert all(torch.equal(each, before[key]) for key, each in weights(elsewhere).items()), "nothing loads"
    other = begin(CUT, UNCLIPPED)
    with raised(PlanMismatchError, "DeepSpeedZeroOptimizer", "load_optimizer_states=False"):
        other.load_checkpoint(where)
    plain = begin("uniform", UNCLIPPED, plain=True)
    train(plain, data[:2])
    plain.save_checkpoint(str(folder / "plain"))
    losses = train(plain, data[2:])
    parts = plain.module.parts
    resumed = begin(parts, UNCLIPPED)
    resumed.load_checkpoint(str(folder / "plain"))
    same(train(resumed, data[2:]), losses)
    other = begin([0, 1, 5], UNCLIPPED)
    with raised(PlanMismatchError, "written by plain DeepSpeed", "MoE layers by ranks", "on the cut that wrote"):
        other.load_checkpoint(str(folder / "plain"))


CASES = [
    experts_train_as_under_deepspeed, experts_are_clipped_alike, experts_under_plans, experts_without_a_drain,
    where_experts_stay, checkpoints_of_experts,
]  # fmt: skip
