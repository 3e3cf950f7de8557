"""Checkpoints saved under every layout and loaded under every other; see ``test_checkpoints.py``.

The packages are imported once. What is saved on so many processes is saved by one job of that size, and likewise
for what is loaded.
"""

from __future__ import annotations

import functools
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import deepspeed
import torch
import torch._dynamo
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_partition.engine import MadPipeEngine
from tests.choice import is_chosen
from tests.engine.harness import forget_engines, share_groups
from tests.engine.loading_cases import CASES
from tests.engine.pipelines import train_alone
from tests.engine.running import same, train
from tests.engine.saved_layouts import KINDS, LAYOUTS, STEPS, begin, data_of, noisy, plan_of
from tests.engine.training_state_multiproc import OPTIMIZERS, warm_up
from tests.ranks import before_any_fork, run_job


def save(num_processes: int, folder: Path, rank: int) -> None:
    """Save under every layout of so many processes, and write down how the unbroken run goes on."""
    prepare()
    for name, kind in KINDS.items():
        if not is_chosen(name):
            continue
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
        if not is_chosen(name):
            continue
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
    report = ""
    try:
        case()
    except Exception:
        report = traceback.format_exc()
    reports = [""] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    return "\n".join(filter(None, reports))


def go_on(name: str, saved: str, under: str, folder: Path) -> None:
    kind, layout, before = KINDS[name], LAYOUTS[under], LAYOUTS[saved]
    data = data_of(kind)
    engine, scheduler = begin(kind, layout)
    path, client_state = engine.load_checkpoint(str(folder / name / saved))
    assert path is not None and client_state["note"] == saved and engine.global_steps == STEPS
    assert engine.module.parts == layout.cut and engine.plan == plan_of(layout)
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


def prepare() -> None:
    torch.set_num_threads(1)
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # of small models, whatever DeepSpeed says
    deepspeed.init_distributed()
    share_groups()


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
            if any(status != 0 for status in ended.exits):  # None: killed
                print(*(log[-3000:] for log in ended.logs), sep="\n", file=sys.stderr)
                return
    outcomes = {}
    for size in sizes:
        outcomes.update(json.loads((out.parent / f"loaded_by_{size}.json").read_text()))
    out.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
