"""What must hold where checkpoints are loaded, beyond that a run goes on; see ``test_checkpoints.py``."""

from __future__ import annotations

import functools
import io
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine.checkpoint import atomic_folders
from deepspeed_partition.engine.runtime.collectives import from_rank_0, gather_objects
from deepspeed_partition.planner.errors import InfeasibleError, PlanFormatError, PlanMismatchError
from tests.engine import hostile_cases, pipelines
from tests.engine.any_plan_multiproc import plan_for
from tests.engine.changed_modules_cases import Convolved
from tests.engine.pipelines import mlp, train_alone
from tests.engine.running import NUM_MICRO_BATCHES, adam, all_tensors, batches, planned, raised, same, start, train
from tests.engine.saved_layouts import (
    KINDS,
    LAYOUTS,
    STEPS,
    Kind,
    begin,
    config_of,
    data_of,
    losses_after,
    plan_of,
    run,
)
from tests.engine.training_state_multiproc import OPTIMIZERS, Traced, untested, warm_up
from tests.engine.warm_up_cases import heard, said_here


def waiting(kind: Kind, **options: Any) -> MadPipeEngine:
    """An engine that will plan for itself, at a known cut."""
    config = {**config_of(kind), **planned([0, 6, 8], **options)}
    engine, _, _ = start(
        kind.specs(), "madpipe", config, optimizer=OPTIMIZERS[kind.optimizer], lr_scheduler=warm_up
    )
    return engine


def plans_for_the_ranks_that_are_left(folder: Path) -> None:
    """A job that would plan for itself does so, after a warm-up that it is within, or at once."""
    kind = KINDS["AdamW, ZeRO 1"]
    data, where = data_of(kind), folder / "AdamW, ZeRO 1" / "four stages"
    for num_steps in (0, STEPS, STEPS + 1):
        engine = waiting(kind, warmup_steps=num_steps)
        engine.load_checkpoint(str(where))
        assert engine.plan is None and engine.global_steps == STEPS
        losses = train(engine, data[STEPS : STEPS + 1])
        assert (engine.plan is None) == (num_steps > STEPS)
        assert losses + train(engine, data[STEPS + 1 :]) == losses_after(where)
        assert engine.plan is not None and engine.module.parts == [0, 6, 8]


def no_plan_fits_after_a_warm_up(folder: Path) -> None:
    """A run goes on at a trial cut that has been run, and at no other."""
    kind = KINDS["AdamW, ZeRO 1"]
    data, of_four = data_of(kind), folder / "AdamW, ZeRO 1" / "four stages"
    engine = waiting(kind, warmup_steps=STEPS, memory=1000)
    engine.load_checkpoint(str(of_four))
    with raised(InfeasibleError):
        train(engine, data[STEPS:])
    engine = waiting(kind, warmup_steps=STEPS, memory=1000)
    engine.load_checkpoint(str(folder / "AdamW, ZeRO 1" / "two others"))
    assert train(engine, data[STEPS:]) == losses_after(folder / "AdamW, ZeRO 1" / "two others")
    assert engine.plan is None and engine.module.parts == LAYOUTS["two others"].cut


def a_run_that_waits_for_its_plan_takes_the_cut_of_a_checkpoint(folder: Path) -> None:
    for name, saved in itertools.product(("AdamW, ZeRO 1", "SGD, ZeRO 0"), ("two others", "0-1-0")):
        where, layout = folder / name / saved, LAYOUTS[saved]
        engine = waiting(KINDS[name])
        assert engine.module.parts != layout.cut
        engine.load_checkpoint(str(where))
        assert engine.plan == plan_of(layout) and engine.module.parts == layout.cut
        assert train(engine, data_of(KINDS[name])[STEPS:]) == losses_after(where)


def a_run_that_has_its_plan_keeps_it(folder: Path) -> None:
    """Whether it was given, and needs no warm-up, or made, and a checkpoint of the warm-up is loaded again."""
    kind = KINDS["AdamW, ZeRO 1"]
    data, where = data_of(kind), folder / "of a warm-up"
    engine = waiting(kind, warmup_steps=1, save_plan=str(folder / "plan.json"))
    losses = train(engine, data[:1])
    engine.save_checkpoint(str(where))
    losses += train(engine, data[1:])
    plan = engine.plan
    given = waiting(kind, warmup_steps=3, plan=str(folder / "plan.json"))
    for planned_run in (engine, given):
        assert planned_run.plan == plan is not None
        with heard() as sentences:
            planned_run.load_checkpoint(str(where))
        assert any("the layers stay cut at [0, 6, 8]" in sentence for sentence in sentences)
        assert planned_run.plan == plan and planned_run.module.parts == [0, 6, 8]
        assert planned_run.global_steps == 1 and train(planned_run, data[1:]) == losses[1:]


def planning_that_is_off(folder: Path) -> None:
    """``MADPIPE=0`` leaves DeepSpeed's cut, whatever the checkpoint's is."""
    kind, where = KINDS["AdamW, ZeRO 1"], folder / "AdamW, ZeRO 1" / "0-1-0"
    with patch.dict(os.environ, MADPIPE="0"):
        engine = waiting(kind)
        parts = engine.module.parts
        engine.load_checkpoint(str(where))
        assert engine.module.parts == parts and engine.plan is None
        same(train(engine, data_of(kind)[STEPS:]), losses_after(where))


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
    (file.parent / atomic_folders.FILES_NAME).unlink()  # as earlier versions wrote it
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


def what_one_rank_alone_cannot_read(folder: Path) -> None:
    """All of them are told, and load another checkpoint then."""
    kind, whole = KINDS["tied, ZeRO 1"], folder / "tied, ZeRO 1" / "two stages"
    engine, _ = begin(kind, LAYOUTS["two stages"])
    names = ("layer_06-model_states.pt", "mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt")
    for name in names:
        damaged = folder / f"unreadable {name}"
        file = damaged / f"global_step{STEPS}" / name
        from_rank_0(functools.partial(shutil.copytree, whole, damaged))
        from_rank_0(lambda file=file: file.write_bytes(bytes(file.stat().st_size)))
        with raised(PlanFormatError, name, "take another checkpoint"):
            engine.load_checkpoint(str(damaged))
    engine.load_checkpoint(str(whole))
    assert train(engine, data_of(kind)[STEPS:]) == losses_after(whole)


def a_checkpoint_that_does_not_say_where_states_lie(folder: Path) -> None:
    """As earlier versions wrote it: it loads where it was written."""
    kind, old = KINDS["AdamW, ZeRO 1"], folder / "old"
    from_rank_0(functools.partial(shutil.copytree, folder / "AdamW, ZeRO 1" / "two stages", old))
    for name in ("madpipe-state.json", atomic_folders.FILES_NAME):
        from_rank_0((old / f"global_step{STEPS}" / name).unlink)
    other, _ = begin(kind, LAYOUTS["two others"])
    with raised(PlanMismatchError, "the cut [0, 2, 8] and this run [0, 6, 8]", "start it with the cut [0, 2, 8]"):
        other.load_checkpoint(str(old))
    other.load_checkpoint(str(old), load_optimizer_states=False)
    engine, _ = begin(kind, LAYOUTS["two stages"])
    engine.load_checkpoint(str(old))
    assert train(engine, data_of(kind)[STEPS:]) == losses_after(old)


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
        assert train(engine, data[STEPS:]) == losses_after(where)
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


def a_checkpoint_without_an_optimizer(folder: Path) -> None:
    """Of an engine that evaluates: there is nothing to be loaded by parameters, and that is said."""
    untrained, _, _ = start(mlp(), [0, 8], optimizer=lambda _: None)
    untrained.save_checkpoint(str(folder / "untrained"))
    kind = KINDS["AdamW, ZeRO 1"]
    engine, _ = begin(kind, LAYOUTS["one stage"])
    fresh, _ = begin(kind, LAYOUTS["one stage"])
    with heard() as sentences:
        engine.load_checkpoint(str(folder / "untrained"), load_lr_scheduler_states=False)
    assert sentences == [
        "the checkpoint has no state of an optimizer: the optimizer of this run begins without one"
    ]
    assert train(engine, data_of(kind)) == train(fresh, data_of(kind))


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


def states_of_optimizers_that_a_script_keeps(_: Path) -> None:
    """A copy from before a move was taken for the state of the layers that are there now, without a word."""
    data, first, other = batches(3), [0, 3, 8], [0, 5, 8]
    for zero in (0, 1):
        config = {"zero_optimization": {"stage": zero}}

        def load(optimizer: Any, kept: Any, zero: int = zero) -> None:
            optimizer.load_state_dict([kept] if zero else kept)

        engine, optimizer, _ = start(mlp(), first, config)
        train(engine, data[:1])
        file = io.BytesIO()
        torch.save((engine.module.state_dict(), optimizer.state_dict()), file)
        kept = torch.load(io.BytesIO(file.getvalue()), weights_only=not zero)
        expected = train(engine, data[1:2])
        for cut in (first, other, first):
            engine.recut(cut)
            if cut == other:
                before = "layers 0, 1 and 2" if engine.stage_id == 0 else "layers 3, 4, 5, 6 and 7"
                with raised(ValueError, f"where rank {engine.stage_id} had {before}", "engine.save_checkpoint()"):
                    load(optimizer, kept[1])
                with raised(ValueError, "where rank"):
                    load(start(mlp(), other, config)[1], kept[1])
            else:
                engine.module.load_state_dict(kept[0])
                load(optimizer, kept[1])
                same(train(engine, data[1:2]), expected)
        del kept[1]["madpipe_parameters"]
        for num_lines in (1, 0):
            with heard() as said:
                load(optimizer, kept[1])
            assert len([line for line in said if "does not say of which parameters" in line]) == num_lines
        one_less = start([*mlp()[:7], nn.Linear(8, 8, bias=False)], first, config)[1].state_dict()
        if engine.stage_id == 1:
            with pytest.raises(ValueError, match=r"they differ by 7\.bias"):
                load(optimizer, one_less)


class Counting(torch.optim.SGD):
    """Keeps what is of no parameter in ``state``, as MADGRAD does; the rate falls by it.

    Args:
        per_rank: Whether ranks count otherwise.
    """

    def __init__(self, params: Any, per_rank: bool = False) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.state["k"] = torch.tensor([0])
        self.state["by rank"] = torch.distributed.get_rank() if per_rank else 0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.state["k"].item())
        super().step()
        self.state["k"] += 1


class OfItsOwnForm(torch.optim.SGD):
    """Its saved state has an entry more, as that of some Lookaheads has, or no groups."""

    saves_groups = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        return {**saved, "slow": 1} if self.saves_groups else {"inner": saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict.get("inner", state_dict)})


def states_of_no_parameter(folder: Path) -> None:
    """They were lost under another cut without a word, so that MADGRAD began again with its first rates."""
    data, first, other = batches(4), [0, 2, 8], [0, 5, 8]
    for zero, per_rank in ((0, False), (1, False), (0, True)):
        where = str(folder / f"{zero}, {per_rank}")
        make = functools.partial(Counting, per_rank=per_rank)
        config = untested(zero)
        saved, _, _ = start(mlp(), first, config, optimizer=lambda model, make=make: make(model.parameters()))
        losses = train(saved, data[:2])
        saved.save_checkpoint(where)
        engine, _, _ = start(mlp(), other, config, optimizer=lambda model, make=make: make(model.parameters()))
        with said_here() as said:  # whichever rank comes first says it
            engine.load_checkpoint(where)
        is_told = any("Counting keeps state['by rank']" in line for line in said)
        assert any(gather_objects(is_told)) == per_rank, said
        losses += train(engine, data[2:3])
        engine.recut(first)
        expected = train_alone(mlp(), data, lambda model, make=make: make(model.parameters()))
        same(losses + train(engine, data[3:]), expected)


def states_of_a_form_of_their_own(folder: Path) -> None:
    """What an optimizer adds to what torch saves was lost under another cut; groups that lack were 'damage'."""
    for saves_groups, found in ((True, "slow"), (False, "inner")):
        with patch.object(OfItsOwnForm, "saves_groups", saves_groups):
            where = str(folder / found)
            saved, _, _ = start(mlp(), [0, 2, 8], optimizer=lambda model: OfItsOwnForm(model.parameters()))
            train(saved, batches(1))
            saved.save_checkpoint(where)
            saved.load_checkpoint(where)
            other, _, _ = start(mlp(), [0, 5, 8], optimizer=lambda model: OfItsOwnForm(model.parameters()))
            with raised(RuntimeError, f"has {found!r}", "under the cut and the ranks that wrote it"):
                other.load_checkpoint(where)
            other.load_checkpoint(where, load_optimizer_states=False)


def rates_of_groups_that_ranks_leave_out(folder: Path) -> None:
    """A schedule had the rates of the groups of the rank that had saved them, for other groups of this one."""
    data = batches(4)

    def by_layer(model: nn.Module) -> torch.optim.Optimizer:
        members: dict[str, list[Any]] = {}
        for name, weight in model.named_parameters():
            members.setdefault(name.partition(".")[0], []).append(weight)
        return torch.optim.SGD(
            [{"params": each, "lr": 0.2 * 0.6 ** int(name)} for name, each in members.items()], momentum=0.9
        )

    def falling(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def layer_by_layer(optimizer: torch.optim.Optimizer) -> Any:
        """Rates by place: the groups of all ranks are to be in the order of the layers."""
        places = range(len(optimizer.param_groups))
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, [lambda step, place=place: 1 / (1 + place * step) for place in places]
        )

    def by_engine(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(optimizer: torch.optim.Optimizer) -> Any:
            return make(optimizer)

        made.for_engine = True  # type: ignore[attr-defined]
        return made

    schedulers = {
        "by rank": (falling, falling),
        "by engine": (by_engine(falling), falling),
        "by place": (by_engine(layer_by_layer), layer_by_layer),
    }
    for (name, (scheduler, of_one)), zero in itertools.product(schedulers.items(), (0, 1)):
        expected = train_alone(mlp(), data, by_layer, make_scheduler=of_one)
        for before, after in itertools.permutations(("0-1-0", "two stages", "two others"), 2):
            where, losses = str(folder / f"{name} {zero} {before} {after}"), []
            for layout in (before, after):
                engine, _, _ = start(
                    mlp(), LAYOUTS[layout].cut, untested(zero), optimizer=by_layer,
                    lr_scheduler=scheduler, plan=plan_of(LAYOUTS[layout]),
                )  # fmt: skip
                if layout == after:
                    engine.load_checkpoint(where)
                losses += train(engine, data[:2] if layout == before else data[2:])
                engine.save_checkpoint(where)
            same(losses, expected)


def groups_that_a_script_has_added(folder: Path) -> None:
    """A checkpoint under another cut ended in a zip() of two lists, behind the weights."""
    data, where, losses = batches(4), str(folder / "added"), []

    def weights_alone(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in model.parameters() if each.ndim > 1], lr=5e-2, momentum=0.9)

    def both(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = weights_alone(model)
        optimizer.add_param_group({"params": [each for each in model.parameters() if each.ndim == 1], "lr": 0.3})
        return optimizer

    for cut, batch, rate in (([0, 2, 8], data[:2], 0.3), ([0, 5, 8], data[2:], 7.0)):
        engine, optimizer, _ = start(mlp(), cut, optimizer=weights_alone)
        added = [weight for weight in engine.module.parameters() if weight.ndim == 1]
        optimizer.add_param_group({"params": added, "lr": rate})
        if losses:
            engine.load_checkpoint(where)
        losses += train(engine, batch)
        engine.save_checkpoint(where)
    same(losses, train_alone(mlp(), data, both))


def checkpoints_of_plain_deepspeed(folder: Path) -> None:
    """It finds states by places: under another cut those of other layers were taken, or torch spoke of sizes."""
    data = batches(4)

    def equal_layers() -> list[Any]:
        return [LayerSpec(nn.Linear, 8, 8) for _ in range(4)]

    def at(devices: tuple[int, ...], cuts: list[int]) -> Any:
        return plan_for(devices, cuts, num_micro_batches=NUM_MICRO_BATCHES)

    for zero in (0, 1):
        config, where = untested(zero), str(folder / str(zero))
        plain, _, _ = start(
            equal_layers(), "uniform", config, optimizer=adam, module_class=deepspeed.PipelineModule,
            start_engine=deepspeed.initialize,
        )  # fmt: skip
        assert type(plain) is deepspeed.PipelineEngine and plain.module.parts == [0, 2, 4]
        losses = train(plain, data[:2])
        plain.save_checkpoint(where)
        for plan, method, options, words in (
            (
                at((0, 1, 1, 0), [0, 1, 2, 3, 4]),
                None,
                {},
                "other parameters on this rank, which has layers 0 and 3",
            ),
            (None, [0, 1, 4], {}, "other parameters on this rank, which has layer 0"),
            (None, [0, 3, 4], {"num_stages": 2}, "other parameters on this rank"),
        ):
            other, _, _ = start(equal_layers(), method, config, optimizer=adam, plan=plan, **options)
            with raised(PlanMismatchError, "was written by plain DeepSpeed", words, "load_optimizer_states=False"):
                other.load_checkpoint(where)
            other.load_checkpoint(where, load_optimizer_states=False)
        engine, _, _ = start(equal_layers(), [0, 2, 4], config, optimizer=adam)
        engine.load_checkpoint(where)
        losses += train(engine, data[2:3])
        engine.save_checkpoint(where)
        engine, _, _ = start(equal_layers(), [0, 3, 4], config, optimizer=adam)
        engine.load_checkpoint(where)
        same(losses + train(engine, data[3:]), train_alone(equal_layers(), data, adam))


def an_optimizer_that_is_given_with_its_state(_: Path) -> None:
    """DeepSpeed's ZeRO left it behind with the parameters that it flattens, and began anew without a word."""
    data = batches(4)

    def experienced(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adam(model)
        for weight in model.parameters():
            weight.grad = weight.detach().cos() * 3
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    def partly(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = experienced(model)
        optimizer.state.pop(next(model.parameters()))
        return optimizer

    expected = train_alone(mlp(), data, experienced)
    for zero in (0, 1):
        engine, _, _ = start(mlp(), [0, 3, 8], {"zero_optimization": {"stage": zero}}, optimizer=experienced)
        losses = train(engine, data[:2])
        engine.recut([0, 5, 8])
        same(losses + train(engine, data[2:]), expected)
    with raised(RuntimeError, "is given with a state of '0.", "cannot lie in the flat tensor", "without states"):
        start(mlp(), [0, 3, 8], {"zero_optimization": {"stage": 1}}, optimizer=partly)


def states_of_weights_in_channels_last(folder: Path) -> None:
    """ZeRO's are flat; fused optimizers pair elements by their order in memory, and states came contiguous."""
    data = batches(4)
    specs = [LayerSpec(nn.Linear, 8, 16), LayerSpec(Convolved), LayerSpec(Convolved), LayerSpec(nn.Linear, 16, 4)]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.05, fused=True)

    saving, _, _ = start(specs, [0, 4], untested(1), optimizer=make)
    train(saving, data[:2])
    where = str(folder / "channels last")
    saving.save_checkpoint(where)
    expected = train(saving, data[2:])
    engine, _, _ = start(specs, [0, 4], optimizer=make)
    engine.load_checkpoint(where)
    for weight in (each.conv.weight for each in engine.module.modules() if isinstance(each, Convolved)):
        strides = {weight.stride(), engine.optimizer.state[weight]["exp_avg"].stride()}
        assert strides == {(16, 1, 8, 4)}, strides
    assert train(engine, data[2:]) == pytest.approx(expected, rel=1e-4)


CASES: dict[int, list[Callable[[Path], None]]] = {
    1: [
        what_cannot_be_loaded, other_kinds_of_optimizers, a_folder_that_is_written_again,
        bf16_without_zero_as_deepspeed_loads_it, weights_alone_outlive_the_next_step,
        a_checkpoint_without_an_optimizer, *hostile_cases.CASES[1], states_of_weights_in_channels_last,
    ],
    2: [
        plans_for_the_ranks_that_are_left, no_plan_fits_after_a_warm_up,
        a_run_that_waits_for_its_plan_takes_the_cut_of_a_checkpoint, a_run_that_has_its_plan_keeps_it,
        planning_that_is_off, an_optimizer_that_is_given_with_its_state,
        states_of_optimizers_that_a_script_keeps, states_of_no_parameter, states_of_a_form_of_their_own,
        rates_of_groups_that_ranks_leave_out, groups_that_a_script_has_added,
        checkpoints_of_plain_deepspeed,
        what_copies_of_tied_modules_do_not_share, a_damaged_checkpoint_of_as_many_stages,
        what_one_rank_alone_cannot_read, a_checkpoint_that_does_not_say_where_states_lie,
        a_run_that_waits_for_its_plan_still_does_where_loading_fails, layers_that_are_sliced,
        *hostile_cases.CASES[2],
    ],
}  # fmt: skip
