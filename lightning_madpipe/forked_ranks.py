"""The ranks of a pipeline that a notebook starts: processes that are forked from it, and what comes back to it.

Lightning's own forking launcher leaves three things open here. OpenMP (libgomp) hangs in a child if the thread
that forked has computed on several threads before: so the ranks are forked from a new thread. The other ranks are
ended with SIGTERM, which a rank that waits in a transfer does not follow: here they end by themselves, or are
killed. And results that are larger than a pipe's buffer block the rank that sends them: here they come in a file.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed_partition.engine.runtime.environment import announce, leave_together
from deepspeed_partition.engine.runtime.watch import GRACE_SECONDS, leave_at_once
from deepspeed_partition.planner.plan import Plan
from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.module import pipeline_of
from lightning_madpipe.notebook_messages import NotebookMessages

FORK = "fork"
MOMENTS_SECONDS = GRACE_SECONDS + 5
"""How long the other ranks may take to end by themselves, with a reason, after one has failed."""
TICK_SECONDS = 1.0
RESULT = "result"
RESTART = "restart the kernel, and run this cell first"
OF_CHECKPOINTS = ("best_model_path", "best_model_score", "last_model_path", "current_score", "kth_best_model_path")
"""What a notebook asks a ``ModelCheckpoint`` for after a fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOfRanks:
    """What rank 0 hands back to the notebook."""

    returned: Any
    """What ``fit``, ``validate``, ``test`` or ``predict`` returned."""
    trainer_state: Any
    weights: dict[str, Any] | None
    """The state of the whole module after a fit; None where rank 0 has not got it, and after another run."""
    buffers: dict[str, torch.Tensor]
    """Buffers that no state has, after a fit."""
    metrics: tuple[dict[str, Any], dict[str, Any]]
    """``callback_metrics`` and ``logged_metrics``."""
    progress: dict[str, Any] | None
    """The state of the loop of fit: epochs and steps."""
    checkpoints: dict[str, dict[str, Any]]
    """What each checkpoint callback has found, by its ``state_key``."""
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank ended with."""

    seconds: float
    """Instant of the failure, in seconds by the clock of the machine."""
    error: BaseException
    text: str
    """Traceback of the error, as Python prints it."""

    @property
    def is_echo(self) -> bool:
        """Whether it is of another rank's failure."""
        return " failed first: " in str(self.error)


class TracebackOfRank(Exception):
    """Where a rank failed: the cause of what is raised in the notebook."""


@cache
def launcher_class(namespace: str) -> type:
    """The launcher of ``pytorch_lightning`` or ``lightning.pytorch``, whose base classes are different ones."""
    base = Lightning(namespace).module("strategies.launchers.launcher")._Launcher
    body = {"_lightning": Lightning(namespace), "__module__": "lightning_madpipe", "__doc__": ForkedRanks.__doc__}
    return type("ForkedRanksLauncher", (ForkedRanks, base), body)


class ForkedRanks:
    """Lightning's launcher of ranks that are forked from a notebook, all of them, rank 0 too.

    Args:
        strategy: The strategy whose ranks they are.
    """

    is_interactive_compatible = True
    _lightning: Lightning

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._has_fit = False
        self._processes: list[BaseProcess] = []

    def launch(self, function: Callable[..., Any], *arguments: Any, trainer: Any = None, **keywords: Any) -> Any:
        """Run ``function`` in each rank, and take over what rank 0 has then.

        Raises:
            MisconfigurationException: the ranks cannot be forked, or all refuse the run.
            Exception: what a rank failed with first, with its traceback.
        """
        assert trainer is not None, "the Trainer launches"
        fitting = trainer.state.fn == "fit"
        self._refuse_what_cannot_be_forked(fitting)
        strategy = self._strategy
        # Here, so that all ranks have the same port, and folders of logs the same number as here.
        os.environ["MASTER_PORT"] = str(strategy.cluster_environment.main_port)
        for logger in trainer.loggers:
            _ = logger.version
        if not self._has_fit:
            announce(
                f"{strategy.num_processes} processes, forked from this one, run the pipeline. Trained weights, "
                "metrics, results and the plan come back; what hooks and callbacks keep elsewhere does not"
            )
        sys.stdout.flush()
        sys.stderr.flush()
        messages = NotebookMessages(strategy.num_processes)
        with tempfile.TemporaryDirectory(prefix="madpipe-") as name:
            folder = Path(name)
            processes = [
                _forked(
                    target=_run_rank,
                    args=(rank, os.getpid(), folder, trainer, lambda: function(*arguments, **keywords), messages),
                    name=f"rank {rank}",
                )
                for rank in range(strategy.num_processes)
            ]
            try:
                in_new_thread(lambda: _start(processes))
                self._processes = processes
                with messages.sent():
                    wait_for_all(processes)
                self._raise_failure(processes, folder)
                run: RunOfRanks = _read(folder / RESULT)
            except KeyboardInterrupt:
                if fitting:
                    announce(
                        "the fit was interrupted, and its ranks have ended: the module has the weights that it "
                        "had before; a ModelCheckpoint keeps what was trained, and fit(ckpt_path=...) goes on"
                    )
                raise
            finally:
                self._processes = []
                for process in processes:
                    if process.pid is not None:
                        process.kill()
                        process.join()
        self._has_fit |= fitting
        self._take_over(run, trainer)
        return run.returned

    def kill(self, number: int) -> None:
        """Send a signal to all ranks."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _refuse_what_cannot_be_forked(self, fitting: bool) -> None:
        strategy = self._strategy
        refuse_initialized_process(self._lightning)
        if strategy.root_device.type == "cuda" and not can_use_cuda_after_fork():
            raise self._lightning.refusal(
                "CUDA is initialized in this process, and forked ranks cannot use it: keep tensors and models on "
                f"the CPU before the Trainer runs, and do not ask torch.cuda for anything; {RESTART}"
            )
        if strategy.whole_model == "none":
            raise self._lightning.refusal(
                "whole_model='none' leaves trained layers in the ranks, which end with the run: in a notebook "
                "leave it out"
            )
        if fitting and self._has_fit:
            raise self._lightning.refusal(
                "this Trainer has fit in forked ranks, which have ended, and with them the optimizer: make a new "
                "Trainer, which begins with the trained weights; fit(ckpt_path=...) has the optimizer, too"
            )

    def _raise_failure(self, processes: Sequence[BaseProcess], folder: Path) -> None:
        failures = [_read(path) for path in sorted(folder.glob("failure*"))]
        if failures:
            failure: Failure = min(failures, key=lambda each: (each.is_echo, each.seconds))
            is_sentence = isinstance(failure.error, self._lightning.exception)
            raise failure.error from None if is_sentence else TracebackOfRank(f"\n{failure.text}")
        for rank, process in enumerate(processes):
            if process.exitcode:
                raise RuntimeError(f"the process of rank {rank} has ended: {_in_words(process.exitcode)}")

    def _take_over(self, run: RunOfRanks, trainer: Any) -> None:
        if run.progress is not None:
            self._take_over_weights(run, trainer.lightning_module)  # first: they are what a fit is for
            self._strategy.plan_of_ranks = run.plan
            trainer.fit_loop.load_state_dict(run.progress)
        trainer.state = run.trainer_state
        for mine, theirs in zip((trainer.callback_metrics, trainer.logged_metrics), run.metrics, strict=True):
            mine.update(theirs)
        callbacks = {callback.state_key: callback for callback in trainer.checkpoint_callbacks}
        for key in callbacks.keys() & run.checkpoints.keys():
            vars(callbacks[key]).update(run.checkpoints[key])
        lost = sorted(run.checkpoints.keys() - callbacks.keys())
        if lost:
            self._lightning.warn(
                f"{', '.join(lost)} came from configure_callbacks in the ranks, and has ended there with its "
                "best_model_path; its checkpoints are where it wrote them. Give it to Trainer(callbacks=[...])"
            )

    def _take_over_weights(self, run: RunOfRanks, module: Any) -> None:
        if run.weights is None:
            self._lightning.warn(
                "the module has the weights that it had before fit, because rank 0 had no room for the whole "
                "model: load them from a checkpoint that fit has written"
            )
            return
        _take_over_buffers({**run.weights, **run.buffers}, module)
        lost = nn.Module.load_state_dict(module, run.weights, strict=False).unexpected_keys
        if lost:
            self._lightning.warn(
                f"{', '.join(lost[:3])} and the like were made in the ranks, and have ended there"
            )


def _take_over_buffers(found: Mapping[str, Any], module: nn.Module) -> None:
    """Let the buffers of a module be those of the ranks, in which they may have grown."""
    for path, part in module.named_modules():
        for name, buffer in list(part._buffers.items()):
            value = found.get(f"{path}.{name}" if path else name)
            if value is None:
                continue
            if buffer is not None and buffer.shape == value.shape:
                buffer.copy_(value)
            else:
                part._buffers[name] = value


def refuse_initialized_process(lightning: Lightning) -> None:
    """Refuse to fork ranks from a process that is a rank itself.

    Raises:
        MisconfigurationException: it is one.
    """
    if torch.distributed.is_initialized():
        raise lightning.refusal(
            "this process is a rank itself, of a Trainer with devices=1 that has run here, and ranks that were "
            f"forked from it could not meet: {RESTART}"
        )


def in_new_thread(act: Callable[[], object]) -> None:
    """Act in a thread that has computed nothing, and wait for it.

    A child has the thread that forks it and no other. OpenMP's parallel regions there would wait for ever for the
    threads that helped this thread of the parent; a new one has had no helpers.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="madpipe-forks")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def wait_for_all(processes: Sequence[BaseProcess]) -> None:
    """Return when all processes have ended. After the first that failed the others have some moments for that."""
    running, deadline = list(processes), None
    while running and (deadline is None or time.monotonic() < deadline):
        connection.wait([process.sentinel for process in running], timeout=TICK_SECONDS)
        for process in [each for each in running if not each.is_alive()]:
            running.remove(process)
            if process.exitcode and deadline is None:
                deadline = time.monotonic() + MOMENTS_SECONDS


def can_use_cuda_after_fork() -> bool:
    """Whether a child of this process could use CUDA, found out by a child."""
    process = _forked(target=_end_with_whether_cuda_is_lost)
    process.start()
    process.join()
    return process.exitcode == 0


def _forked(**arguments: Any) -> BaseProcess:
    context: Any = multiprocessing.get_context(FORK)
    return context.Process(**arguments)


def _start(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.start()


def _end_with_whether_cuda_is_lost() -> None:
    os._exit(int(torch.cuda._is_in_bad_fork()))


def _run_rank(
    rank: int, parent: int, folder: Path, trainer: Any, function: Callable[[], Any], messages: NotebookMessages
) -> None:
    """Run a rank in its process, and leave in the folder what it has to say."""
    messages.hand_over(rank)
    threading.Thread(target=_end_with, args=(parent,), name="madpipe-parent", daemon=True).start()
    os.environ["LOCAL_RANK"] = str(rank)
    strategy = trainer.strategy
    strategy.set_world_ranks()  # by which Lightning knows who may speak
    strategy.whole_model = "rank_zero"  # for the notebook
    interruption = strategy._lightning.module("trainer.call")
    threads = strategy._lightning.module("strategies.launchers.subprocess_script")._set_num_threads_if_needed
    try:
        threads(num_processes=strategy.num_processes)
        returned = function()
        run = _run_of(trainer, returned)
        if rank == 0:
            _write(folder / RESULT, run)
        leave_together()
    except KeyboardInterrupt:  # which the parent has got, too
        os._exit(1)
    except BaseException as error:
        _write(folder / f"failure{rank}", _failure(error))
        with contextlib.suppress(Exception):
            interruption._interrupt(trainer, error)
            trainer._teardown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _end_with(parent: int) -> None:
    """End this process where its parent has ended, such as a kernel that was restarted."""
    while os.getppid() == parent:
        time.sleep(TICK_SECONDS)
    leave_at_once()


def _run_of(trainer: Any, returned: Any) -> RunOfRanks:
    module, fitting = trainer.lightning_module, trainer.state.fn == "fit"
    weights, buffers = None, {}
    state = nn.Module.state_dict(module)  # on every rank: metrics meet
    pipeline = pipeline_of(module)
    if fitting and (pipeline is None or pipeline.is_whole):
        weights = state
        buffers = {name: buffer for name, buffer in module.named_buffers() if name not in state}
    found = {
        callback.state_key: {name: vars(callback)[name] for name in OF_CHECKPOINTS if name in vars(callback)}
        for callback in trainer.checkpoint_callbacks
    }
    return RunOfRanks(
        returned=returned,
        trainer_state=trainer.state,
        weights=weights,
        buffers=buffers,
        metrics=(dict(trainer.callback_metrics), dict(trainer.logged_metrics)),
        progress=trainer.fit_loop.state_dict() if fitting else None,
        checkpoints=found,
        plan=trainer.strategy.plan,
    )


def _failure(error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a class of the user's with other arguments, or with a tensor of a device
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Failure(time.time(), error, text)


def _write(path: Path, value: Any) -> None:
    unfinished = path.with_name(f"unfinished-{path.name}")
    torch.save(value, unfinished)
    unfinished.rename(path)


def _read(path: Path) -> Any:
    return torch.load(path, weights_only=False, map_location="cpu")  # what a process of this one has written


def _in_words(exit_code: int) -> str:
    if exit_code > 0:
        return f"with status {exit_code}"
    of_memory = ", as a system that is out of memory does" * (-exit_code == signal.SIGKILL)
    return f"by {signal.Signals(-exit_code).name}{of_memory}"
