"""What a signal handler raises within a run of a step leaves nothing replaced, wherever it comes.

The story: a data-loader worker died, and torch's handler of SIGCHLD raised as the contexts of a step ended. While
the engine still held that error it told the other rank of it by a collective, which was refused as the step's.
"""

from __future__ import annotations

import builtins
import dis
import io
import logging
import os
import random
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.hooks import RemovableHandle

pytest.importorskip("pytorch_lightning")

from pytorch_lightning.utilities import rank_zero_only

from lightning_madpipe.compat.elsewhere import HiddenTensors
from lightning_madpipe.compat.optimizer_counts import _Listening
from lightning_madpipe.steps import own_generators, step_runs
from lightning_madpipe.steps.call_state import LayerAttributes
from lightning_madpipe.steps.layers_call import LayersCall
from lightning_madpipe.steps.micro_batches import MicroBatch
from lightning_madpipe.steps.own_generators import OwnGenerators
from tests.exhaustive import some


class WorkerDied(RuntimeError):
    """What torch's signal handler raises."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self._trainer = self.trainer = SimpleNamespace(
            optimizers=[optimizer],
            current_epoch=0,
            global_step=0,
            state=SimpleNamespace(stage=None),
            loggers=["its own"],
            should_stop=False,
            strategy=SimpleNamespace(rank_in_step=None),
        )

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def log(self, *_: Any) -> None:
        pass

    def print(self, *_: Any) -> None:
        pass

    def training_step(self, batch: Any) -> Any:
        self.log("loss", 1.0)
        return self(batch).sum()


@contextmanager
def listed() -> Iterator[None]:
    before, HiddenTensors.listing = HiddenTensors.listing, "a list"
    try:
        yield
    finally:
        HiddenTensors.listing = before


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def runs_of(model: Model, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of the step of ``model`` on the rank of the last stage."""
    grid = SimpleNamespace(get_data_parallel_rank=lambda: 1)  # another rank than that of the process
    pipeline = SimpleNamespace(elsewhere=SimpleNamespace(listed=listed), mpu=lambda: grid)
    monkeypatch.setattr(step_runs, "pipeline_of", lambda _: pipeline)
    draws = OwnGenerators(model, (), ValueError)
    runs = step_runs.StepRuns(
        model, LayersCall(model, "forward", ValueError), nullcontext, ValueError, draws, True, None
    )
    runs.told_of_draws.add("training_step")
    attributes = LayerAttributes({model.net: "net"})

    def run() -> None:
        micro_batch = MicroBatch(
            step="training_step", data=torch.ones(2, 2), size=2, arguments=(), seed=0, batch_seed=0
        )
        ignore = lambda *_, **__: None  # noqa: E731
        runs.run(micro_batch, lambda x: x * 1.0, ignore, ignore, again=False, begins=attributes.noted)

    return run


def replaceable(model: Model) -> dict[str, Any]:
    """What a run replaces."""
    return {
        "forward": vars(model).get("forward"),
        "log": vars(model).get("log"),
        "print": vars(model).get("print"),
        "loggers": model.trainer.loggers,
        "collectives": distributed_c10d._rank_not_in_group,
        "open": builtins.open,
        "io.open": io.open,
        "os.write": os.write,
        "sockets": socket.socket.sendall,
        "logs": logging.FileHandler.emit,
        "parameters listed": HiddenTensors.listing,
        "hooks' handles": RemovableHandle.__init__,
        "counts told": _Listening.tell,
        "rank": dist.get_rank,
        "rank in the step": model.trainer.strategy.rank_in_step,
        "rank of decorators": rank_zero_only.rank,
    }


OURS = {"lightning_madpipe", "contextlib"}
_CHECKS: dict[CodeType, set[int]] = {}


def checks_of(code: CodeType) -> set[int]:
    """Where Python looks for signals in ``code``: as it begins or goes on, behind calls, where it jumps back."""
    if code not in _CHECKS:
        found, before = set(), ""
        for each in dis.get_instructions(code):
            if each.opname in ("RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE") or before.startswith("CALL"):
                found.add(each.offset)
            before = each.opname
        _CHECKS[code] = found
    return _CHECKS[code]


class Interrupted:
    """Raises at the instruction of a number, among those at which a signal handler may run; or counts them."""

    def __init__(self, at: int | None) -> None:
        self._at, self.count = at, 0

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        package = (frame.f_globals.get("__name__") or "").partition(".")[0]
        if package not in OURS:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event in ("call", "opcode") and (event == "call" or frame.f_lasti in checks_of(frame.f_code)):
            self.count += 1
            if self.count - 1 == self._at:
                sys.settrace(None)
                raise WorkerDied
        return self.trace

    def __enter__(self) -> Interrupted:
        self._before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._before)


def test_nothing_stays_replaced(monkeypatch, one_process):
    monkeypatch.setattr(own_generators, "found_in", lambda *_: {})  # whose search is long
    model = Model()
    run = runs_of(model, monkeypatch)
    run()
    before = replaceable(model)
    with Interrupted(None) as whole:
        run()
    assert whole.count > 200, "the contexts are followed"
    for at in random.Random(0).sample(range(whole.count), some(whole.count)):
        try:
            with Interrupted(at):
                run()
        except WorkerDied as raised:  # held meanwhile, as the engine holds it until all ranks have heard of it
            stay = [name for name, value in replaceable(model).items() if value is not before[name]]
            assert not stay, f"{stay} after an error at instruction {at} of {whole.count}, in {line_of(raised)}"


def line_of(error: BaseException) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name != "trace"]
    code, line = frames[-1].f_code, frames[-1].f_lineno
    return f"{Path(code.co_filename).name}: {code.co_name}, line {line}"
