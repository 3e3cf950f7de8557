"""Checkpoints saved under every layout and loaded under every other; see ``test_checkpoints.py``.

The packages are imported once. What is saved on so many processes is saved by one job of that size, and likewise
for what is loaded.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import pipelines
import torch
import torch._dynamo
import torch.distributed as dist
from any_plan_multiproc import plan_for
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from harness import forget_engines
from pipelines import mlp, train_alone
from running import NUM_MICRO_BATCHES, all_tensors, batches, planned, raised, same, start, train
from torch import nn
from training_state_multiproc import OPTIMIZERS, Frozen, Noisy, Traced, turned, warm_up

from deepspeed_partition.engine import MadPipeEngine, folders
from deepspeed_partition.engine.collectives import from_rank_0
from deepspeed_partition.planner.errors import PlanFormatError, PlanMismatchError
from tests.ranks import before_any_fork, run_job

STEPS = 2
"""Before the checkpoint, and after it."""


class Layout(NamedTuple):
    """Where the layers are."""

    num_processes: int
    cut: list[int]
    devices: tuple[int, ...] = ()
    num_replicas: int = 1

    @property
    def num_stages(self) -> int:
        return self.num_processes // self.num_replicas


LAYOUTS = {
    "one stage": Layout(1, [0, 8]),
    "two stages": Layout(2, [0, 2, 8]),
    "two others": Layout(2, [0, 6, 8]),
    "0-1-0": Layout(2, [0, 3, 6, 8], (0, 1, 0)),
    "four stages": Layout(4, [0, 1, 3, 4, 8]),
    "two stages twice": Layout(4, [0, 5, 8], (), 2),
}
ALL = list(LAYOUTS)
SOME = ["two stages", "four stages", "two stages twice"]
ALONE = ["one stage", "0-1-0", "four stages"]


class Kind(NamedTuple):
    """What is trained, and how."""

    specs: Callable[[], list[Any]]
    optimizer: str
    zero: int
    half: str = ""
    layouts: list[str] = SOME
    tokens: bool = False

    def loaded_under(self, saved: str) -> list[str]:
        """The next layout; of all of them, every other one, one way with ZeRO and the other way without."""
        place = self.layouts.index(saved)
        if self.layouts is not ALL:
            return [self.layouts[(place + 1) % len(self.layouts)]]
        ways = {other: (number > place) != ((number + place) % 2 == self.zero) for number, other in enumerate(ALL)}
        return [other for other, taken in ways.items() if taken and other != saved]


def tied_by_functions() -> list[Any]:
    """One weight is used by functions alone: DeepSpeed saves it nowhere but with the optimizer. Another one is
    used by a function first, on whose rank DeepSpeed loads nothing.
    """
    first, middle, last = (
        TiedLayerSpec("embed", pipelines.Embedding, pipelines.WORDS, 16, forward_fn=use)
        for use in (embedded, turned, pipelines.head)
    )
    by_function = TiedLayerSpec("turn", nn.Linear, 16, 16, bias=False, forward_fn=run)
    as_it_is = TiedLayerSpec("turn", nn.Linear, 16, 16, bias=False)
    return [first, by_function, LayerSpec(pipelines.Block, 16), LayerSpec(pipelines.Block, 16), middle, as_it_is,
            LayerSpec(pipelines.Block, 16), last]  # fmt: skip


def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def embedded(embedding: pipelines.Embedding, tokens: torch.Tensor) -> torch.Tensor:
    return embedding(tokens)


def noisy() -> list[Any]:
    """Dropout with seeds, batch statistics, and a frozen layer."""
    specs = [LayerSpec(nn.Linear, 8, 16), *(LayerSpec(Noisy, 16) for _ in range(6)), LayerSpec(nn.Linear, 16, 4)]
    specs[4] = LayerSpec(Frozen, 16)
    return specs


KINDS = {
    "AdamW, ZeRO 1": Kind(mlp, "AdamW", 1, layouts=ALL),
    "SGD, ZeRO 0": Kind(mlp, "SGD", 0, layouts=ALL),
    "AdamW, ZeRO 0": Kind(mlp, "AdamW", 0),
    "SGD, ZeRO 1": Kind(mlp, "SGD", 1),
    "bf16, ZeRO 0": Kind(mlp, "AdamW", 0, "bf16"),
    "bf16, ZeRO 1": Kind(mlp, "AdamW", 1, "bf16"),
    "fp16, ZeRO 1": Kind(mlp, "AdamW", 1, "fp16"),
    "tied, ZeRO 0": Kind(tied_by_functions, "SGD", 0, tokens=True),
    "tied, ZeRO 1": Kind(tied_by_functions, "AdamW", 1, tokens=True),
    "noisy, ZeRO 1": Kind(noisy, "AdamW", 1, layouts=ALONE),
    "noisy, ZeRO 0": Kind(noisy, "SGD", 0, layouts=ALONE),
}
TYPES = {"": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def begin(kind: Kind, layout: Layout) -> tuple[MadPipeEngine, Any]:
    """An engine, and its scheduler."""
    engine, _, scheduler = start(
        kind.specs(), layout.cut, config_of(kind), num_stages=layout.num_stages, lr_scheduler=warm_up,
        optimizer=OPTIMIZERS[kind.optimizer], plan=plan_of(layout),
    )  # fmt: skip
    return engine, scheduler


def config_of(kind: Kind) -> dict[str, Any]:
    config: dict[str, Any] = {
        "zero_optimization": {"stage": kind.zero},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # its norm adds up by stages, and the last bits depend on them
    }
    if kind.half:
        config[kind.half] = {"enabled": True}
    if kind.half == "fp16":
        config["fp16"].update(initial_scale_power=24, loss_scale_window=2, hysteresis=1)
    return config


def plan_of(layout: Layout) -> Any:
    return plan_for(layout.devices, layout.cut, num_micro_batches=NUM_MICRO_BATCHES) if layout.devices else None


def data_of(kind: Kind) -> list[Any]:
    return batches(2 * STEPS, tokens=kind.tokens, **({} if kind.tokens else {"dtype": TYPES[kind.half]}))


def save(num_processes: int, folder: Path, rank: int) -> None:
    """Save under every layout of so many processes, and write down how the unbroken run goes on."""
    prepare()
    for name, kind in KINDS.items():
        for under in kind.layouts:
            layout = LAYOUTS[under]
            if layout.num_processes != num_processes:
                continue
            engine, _ = begin(kind, layout)
            data = data_of(kind)
            train(engine, data[:STEPS])
            engine.save_checkpoint(str(folder / name / under), client_state={"note": under})
            losses = train(engine, data[STEPS:])
            if rank == 0:
                further = {"losses": losses, "skipped": engine.skipped_steps, "scale": scale_of(engine)}
                (folder / name / under / "further.json").write_text(json.dumps(further))
        forget_engines()
    finish()


def scale_of(engine: MadPipeEngine) -> float | None:
    return getattr(engine.optimizer, "loss_scale", None)


def load(num_processes: int, folder: Path, rank: int) -> None:
    """Load everything that is to be loaded under the layouts of so many processes; write down what went wrong."""
    prepare()
    outcomes: dict[str, str] = {}
    for name, kind in KINDS.items():
        for saved in kind.layouts:
            for under in kind.loaded_under(saved):
                if LAYOUTS[under].num_processes == num_processes:
                    outcomes[f"{name}: {saved} -> {under}"] = outcome_of(
                        functools.partial(go_on, name, saved, under, folder)
                    )
        forget_engines()
    for case in CASES.get(num_processes, []):
        outcomes[case.__name__] = outcome_of(functools.partial(case, folder))
    if rank == 0:
        (folder / f"loaded_by_{num_processes}.json").write_text(json.dumps(outcomes))
    finish()


def outcome_of(case: Callable[[], None]) -> str:
    """What went wrong on which rank; empty if nothing did."""
    flaw = ""
    try:
        case()
    except Exception:
        flaw = traceback.format_exc()
    flaws = [""] * dist.get_world_size()
    dist.all_gather_object(flaws, flaw)
    return "\n".join(filter(None, flaws))


def go_on(name: str, saved: str, under: str, folder: Path) -> None:
    kind, layout, before = KINDS[name], LAYOUTS[under], LAYOUTS[saved]
    data = data_of(kind)
    engine, scheduler = begin(kind, layout)
    path, client_state = engine.load_checkpoint(str(folder / name / saved))
    assert path is not None and client_state["note"] == saved and engine.global_steps == STEPS
    if engine.module.parts != layout.cut:  # a checkpoint of as many stages brings its cut
        assert engine.module.parts == before.cut and before.num_stages == layout.num_stages
        engine.recut(plan_of(layout) or layout.cut)
    losses = train(engine, data[STEPS:])
    further = json.loads((folder / name / saved / "further.json").read_text())
    if before.num_replicas == layout.num_replicas == 1:
        assert losses == further["losses"], (losses, further["losses"])
    same(losses, further["losses"], digits=5e-3 if kind.half else 1e-5)
    assert engine.skipped_steps == further["skipped"] and scale_of(engine) == further["scale"]
    assert scheduler.last_epoch == 2 * STEPS - engine.skipped_steps, scheduler.last_epoch
    if not kind.half and kind.specs is not noisy:
        alone = train_alone(kind.specs(), data, OPTIMIZERS[kind.optimizer], clip=0.0, make_scheduler=warm_up)
        same(losses, alone[STEPS:])


def plans_for_the_ranks_that_are_left(folder: Path) -> None:
    """A job that would plan for itself does so, and goes on; one with a plan of its own takes that."""
    kind = KINDS["AdamW, ZeRO 1"]
    data, where = data_of(kind), folder / "AdamW, ZeRO 1" / "four stages"
    further = json.loads((where / "further.json").read_text())["losses"]
    for method, plan in (("madpipe", None), (None, plan_of(LAYOUTS["0-1-0"]))):
        config = {**config_of(kind), **planned([0, 6, 8])}
        optimizer = OPTIMIZERS[kind.optimizer]
        engine, _, _ = start(mlp(), method, config, optimizer=optimizer, lr_scheduler=warm_up, plan=plan)
        engine.load_checkpoint(str(where))
        assert engine.plan is plan and engine.global_steps == STEPS
        assert train(engine, data[STEPS:]) == further
        assert engine.plan is not None and engine.module.parts == ([0, 6, 8] if plan is None else plan.boundaries)


class Shifted(nn.Linear):
    """A bias and a running mean, which DeepSpeed does not tie."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return super().forward(x) + self.mean


def what_copies_of_tied_modules_do_not_share(folder: Path) -> None:
    """Each copy is again what it was, whether functions run it at the first layer, at the last one or at both."""
    ways = [(run, None), (None, run), (run, run)]
    firsts, lasts = (
        [TiedLayerSpec(f"tie {number}", Shifted, forward_fn=way[end]) for number, way in enumerate(ways)]
        for end in (0, 1)
    )
    specs = [*firsts, LayerSpec(nn.Linear, 8, 8), *lasts, LayerSpec(nn.Linear, 8, 4)]
    data = batches(4)
    for zero in (0, 1):
        config = {"zero_optimization": {"stage": zero}}
        engine, _, _ = start(specs, [0, 4, 8], config)
        train(engine, data[:2])
        engine.save_checkpoint(str(folder / f"ties {zero}"))
        losses = train(engine, data[2:])
        again, _, _ = start(specs, [0, 4, 8], config)
        train(again, data[2:])
        again.load_checkpoint(str(folder / f"ties {zero}"))
        assert train(again, data[2:]) == losses


def what_cannot_be_loaded(folder: Path) -> None:
    """Told before a weight changes."""
    kind = KINDS["AdamW, ZeRO 1"]
    where, damaged = folder / "AdamW, ZeRO 1" / "two stages", folder / "damaged"
    engine, _ = begin(kind, LAYOUTS["one stage"])
    before = all_tensors(engine)
    shutil.copytree(where, damaged)
    file = damaged / f"global_step{STEPS}" / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    file.write_bytes(bytes(file.stat().st_size))
    with raised(PlanFormatError, file.name, "take another checkpoint"):
        engine.load_checkpoint(str(damaged))
    file.unlink()
    with raised(PlanFormatError, file.name, "is missing", "take another checkpoint"):
        engine.load_checkpoint(str(damaged))
    (file.parent / folders.FILES_NAME).unlink()  # as earlier versions wrote it
    with raised(PlanFormatError, file.name, "take another checkpoint"):
        engine.load_checkpoint(str(damaged))
    (file.parent / "madpipe-state.json").unlink()
    with raised(PlanMismatchError, "2 stages and this run 1", "start it with 2 stages"):
        engine.load_checkpoint(str(damaged))
    factored, _, _ = start(mlp(), [0, 8], optimizer=lambda model: Traced(model.parameters()))
    train(factored, data_of(kind)[:1])
    factored.save_checkpoint(str(folder / "factored"))
    flat, _, _ = start(mlp(), [0, 8], config_of(kind), optimizer=lambda model: Traced(model.parameters()))
    with raised(RuntimeError, "'factor'", "load it without ZeRO"):
        flat.load_checkpoint(str(folder / "factored"))
    wider = [*mlp(), LayerSpec(pipelines.Block, 4)]
    with raised(PlanMismatchError, "8 layers and this run 9"):
        start(wider, [0, 9], config_of(kind), optimizer=OPTIMIZERS["AdamW"])[0].load_checkpoint(str(where))
    assert all(torch.equal(tensor, before[name]) for name, tensor in all_tensors(engine).items())


def a_damaged_checkpoint_of_as_many_stages(folder: Path) -> None:
    """One rank alone would read the file, and every rank is told, before a layer has moved."""
    kind = KINDS["AdamW, ZeRO 1"]
    engine, _, _ = start(mlp(), "madpipe", config_of(kind), optimizer=OPTIMIZERS[kind.optimizer])
    parts, before = engine.module.parts, all_tensors(engine)
    assert parts != LAYOUTS["two stages"].cut
    whole = folder / "AdamW, ZeRO 1" / "two stages"
    of_the_optimizer = "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    for name in ("layer_07-model_states.pt", "mp_rank_01_model_states.pt", of_the_optimizer):
        damaged = folder / name
        file = damaged / f"global_step{STEPS}" / name
        from_rank_0(functools.partial(shutil.copytree, whole, damaged))
        cut_short = functools.partial(os.truncate, file, 100)
        for damage, words in ((cut_short, "100 bytes"), (file.unlink, "is missing")):
            from_rank_0(damage)
            with raised(PlanFormatError, name, words, "take another checkpoint"):
                engine.load_checkpoint(str(damaged))
    assert engine.module.parts == parts and engine.global_steps == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in all_tensors(engine).items())
    weights, _ = begin(kind, LAYOUTS["two others"])
    weights.load_checkpoint(str(folder / of_the_optimizer), load_module_only=True)
    engine.load_checkpoint(str(whole), load_module_only=True)
    loaded = all_tensors(engine)
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in all_tensors(weights).items())


def a_run_that_waits_for_its_plan_still_does_where_loading_fails(folder: Path) -> None:
    """The layers have moved to the cut of the checkpoint by then."""
    where = folder / "factored on two"
    plan = plan_for((0, 1), [0, 3, 8], num_micro_batches=NUM_MICRO_BATCHES)
    saved, _, _ = start(mlp(), plan=plan, optimizer=lambda model: Traced(model.parameters()))
    data = batches(3)
    train(saved, data[:1])
    saved.save_checkpoint(str(where))
    config = {**config_of(KINDS["AdamW, ZeRO 1"]), **planned([0, 3, 8], warmup_steps=1)}
    engine, _, _ = start(mlp(), "madpipe", config, optimizer=lambda model: Traced(model.parameters()))
    with raised(RuntimeError, "'factor'", "load it without ZeRO"):
        engine.load_checkpoint(str(where))
    train(engine, data)
    assert engine.plan not in (None, plan) and engine.chain is not None


def other_kinds_of_optimizers(folder: Path) -> None:
    """fp32 without ZeRO goes on with ZeRO, and the other way; weights alone are loaded from anything."""
    for saved, now in (("SGD, ZeRO 0", 1), ("SGD, ZeRO 1", 0)):
        where, data = folder / saved / "two stages", data_of(KINDS[saved])
        engine, _ = begin(KINDS[saved]._replace(zero=now), LAYOUTS["one stage"])
        engine.load_checkpoint(str(where))
        assert train(engine, data[STEPS:]) == json.loads((where / "further.json").read_text())["losses"]
        weights, _ = begin(KINDS[saved]._replace(zero=now), LAYOUTS["one stage"])
        weights.load_checkpoint(str(where), load_module_only=True)
        other, _ = begin(KINDS[saved], LAYOUTS["one stage"])
        other.load_checkpoint(str(where), load_optimizer_states=False)
        assert (weights.global_steps, other.global_steps) == (0, STEPS)
        found = all_tensors(weights)
        assert all(torch.equal(tensor, found[name]) for name, tensor in all_tensors(other).items())


def weights_alone_outlive_the_next_step(folder: Path) -> None:
    """Master weights are those that were loaded: a step of rate 0 changes nothing."""
    for name in ("bf16, ZeRO 0", "bf16, ZeRO 1", "tied, ZeRO 1"):
        for option in ({"load_optimizer_states": False}, {"load_module_only": True}):
            kind = KINDS[name]
            engine, _ = begin(kind, LAYOUTS["one stage"])
            first = weights_of(engine)
            engine.load_checkpoint(str(folder / name / "two stages"), **option)
            loaded = weights_of(engine)
            assert not any(torch.equal(tensor, loaded[name]) for name, tensor in first.items())
            for group in engine.basic_optimizer.param_groups:
                group["lr"] = 0.0
            train(engine, data_of(kind)[:1])
            assert all(torch.equal(tensor, loaded[name]) for name, tensor in weights_of(engine).items())


def weights_of(engine: MadPipeEngine) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}


def layers_that_are_sliced(folder: Path) -> None:
    """Nothing says which slice lies where, so such a checkpoint is refused by other numbers of stages."""
    where = folder / "sliced"
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    sliced, _, _ = start(mlp(), [0, 8], topology=topology, num_stages=1)
    sliced.save_checkpoint(str(where))
    assert sliced.load_checkpoint(str(where))[0] is not None
    with raised(PlanMismatchError, "1 stages and this run 2", "does not say where the optimizer's states lie"):
        start(mlp(), [0, 2, 8])[0].load_checkpoint(str(where))


def a_folder_that_is_written_again(folder: Path) -> None:
    """It has the new checkpoint's files and those of the script, and nothing of the old one's."""
    where, kind = folder / "again", KINDS["AdamW, ZeRO 1"]
    shutil.copytree(folder / "AdamW, ZeRO 1" / "four stages" / f"global_step{STEPS}", where / "same")
    (where / "same" / "tokenizer").mkdir()
    (where / "same" / "tokenizer" / "words.txt").write_text("a b c")
    engine, _ = begin(kind, LAYOUTS["one stage"])
    engine.save_checkpoint(str(where), tag="same", save_latest=False)
    assert not (where / "latest").exists()
    engine.save_checkpoint(str(where), tag="same")
    assert (where / "latest").read_text() == "same"
    assert (where / "same" / "tokenizer" / "words.txt").read_text() == "a b c"
    assert [file.name for file in (where / "same").glob("*_rank_*")] == [
        file.name for file in (where / "same").glob("*mp_rank_00_*")
    ]
    assert not [entry for entry in where.iterdir() if entry.name.startswith(".")]
    engine.load_checkpoint(str(where))


def bf16_without_zero_as_deepspeed_loads_it(folder: Path) -> None:
    """It cannot read what it wrote; the day it can, this fails, and ``ResumingEngine`` need not."""
    engine, _ = begin(KINDS["bf16, ZeRO 0"], LAYOUTS["one stage"])
    engine.save_checkpoint(str(folder / "bf16"))
    with raised(KeyError, "0"):
        deepspeed.PipelineEngine.load_checkpoint(engine, str(folder / "bf16"))


CASES: dict[int, list[Callable[[Path], None]]] = {
    1: [
        what_cannot_be_loaded, other_kinds_of_optimizers, a_folder_that_is_written_again,
        bf16_without_zero_as_deepspeed_loads_it, weights_alone_outlive_the_next_step,
    ],
    2: [
        plans_for_the_ranks_that_are_left, what_copies_of_tied_modules_do_not_share,
        a_damaged_checkpoint_of_as_many_stages, a_run_that_waits_for_its_plan_still_does_where_loading_fails,
        layers_that_are_sliced,
    ],
}  # fmt: skip


def prepare() -> None:
    torch.set_num_threads(1)
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # of small models, whatever DeepSpeed says
    deepspeed.init_distributed()


def finish() -> None:
    dist.barrier()
    dist.destroy_process_group()


def main(out: Path) -> None:
    before_any_fork()
    sizes = sorted({layout.num_processes for layout in LAYOUTS.values()})
    for work in (save, load):
        for size in sizes:
            began = time.monotonic()
            logs = [out.parent / f"{work.__name__}_{size}_{rank}.log" for rank in range(size)]
            ended = run_job(functools.partial(work, size, out.parent), logs)
            print(work.__name__, size, round(time.monotonic() - began, 1), flush=True)
            if any(ended.exits):
                print(*(log[-3000:] for log in ended.logs), sep="\n", file=sys.stderr)
                return
    outcomes = {}
    for size in sizes:
        outcomes.update(json.loads((out.parent / f"loaded_by_{size}.json").read_text()))
    out.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
