"""A signal to one rank is answered by all of them together: SIGTERM, and SLURM's before it requeues the job."""

from __future__ import annotations

import logging
from typing import Any

from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine.runtime.collectives import any_bits
from deepspeed_partition.engine.runtime.environment import announce

ENDS, REQUEUES = 1, 2
"""What a rank is asked for by a signal, as bits."""


class SignalsTogether:
    """Lets a signal to any rank be answered by all of them, after the batch that runs.

    Lightning's handlers (2.5 to 2.6) broadcast, or save a checkpoint, from within: a signal may have stopped its
    rank in the middle of a transfer that the others wait for, and they never come.

    Args:
        trainer: Lightning's.
        engine: The engine of the run.
        launcher: What has started the other processes of this machine; None where something else has.
    """

    def __init__(self, trainer: Any, engine: MadPipeEngine, launcher: Any) -> None:
        self._connector, self._launcher = trainer._signal_connector, launcher
        self._asked: set[int] = set()
        """What this rank is asked for. A handler may run behind each step of other code: a set loses nothing."""
        self._saves = False
        self._last_signal: Any = None
        # Attributes of Lightning (2.5 to 2.6), which registers the methods after setup() and reads the flag at the
        # end of each batch.
        self._connector._sigterm_notifier_fn = self._note_end
        loop = trainer.fit_loop.epoch_loop
        # Before each batch of training it tells all ranks what rank 0 knows, which they know here.
        loop._broadcast_sigterm_tensor = lambda: None
        self._requeues = bool(getattr(trainer._accelerator_connector.cluster_environment, "auto_requeue", False))
        if self._requeues:
            self._requeue = type(self._connector)._slurm_sigusr_handler_fn
            self._connector._slurm_sigusr_handler_fn = self._note_requeue
            # What it does last of a batch, when its own counts are those that a checkpoint is resumed by.
            self._end_batch = type(loop)._save_loggers_on_train_batch_end
            loop._save_loggers_on_train_batch_end = lambda: self._after_batch(loop)
        engine.wants_to_stop = lambda: bool(self._asked)
        engine.when_asked_to_stop = self._agree
        engine.data_ends_with_batch = True
        engine.runs_ahead = engine.watches_reads = False

    def _note_end(self, number: int, _: Any) -> None:
        if self._connector.received_sigterm:
            return
        if ENDS not in self._asked and self._launcher is not None:
            self._launcher.kill(number)  # its processes have handlers like this one
        self._asked.add(ENDS)

    def _note_requeue(self, number: int, _: Any) -> None:
        self._last_signal = number
        self._asked.add(REQUEUES)

    def _agree(self) -> None:
        """Go on with what some rank was asked for; all ranks come here in the same batch."""
        mine = frozenset(self._asked)
        [asked] = any_bits([sum(mine)]) if self._requeues else [ENDS]
        self._asked -= mine
        # Behind a batch of training, when counts are those that a checkpoint is resumed by.
        self._saves |= bool(asked & REQUEUES)
        if asked & ENDS:
            self._stop()

    def _stop(self) -> None:
        self._connector.received_sigterm = True
        announce("some rank was asked to end by SIGTERM: all ranks end after this batch", logging.WARNING)

    def _after_batch(self, loop: Any) -> None:
        self._end_batch(loop)
        if self._saves:
            self._saves = False
            announce("some rank was asked by SLURM to save before the job is requeued: all ranks save now")
            self._requeue(self._connector, self._last_signal, None)
