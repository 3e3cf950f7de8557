"""SIGTERM to one rank ends all of them together."""

from __future__ import annotations

import logging
from typing import Any

from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine.runtime.environment import announce


def end_together_on_sigterm(trainer: Any, engine: MadPipeEngine, launcher: Any) -> None:
    """Let SIGTERM to any rank end all of them, after the batch that runs.

    Lightning's handler (2.6) broadcasts from within: it may have stopped its rank in the middle of a transfer
    that the others wait for, and they never come to the broadcast.

    Args:
        trainer: Lightning's.
        engine: The engine of the run.
        launcher: What has started the other processes of this machine; None where something else has.
    """
    connector = trainer._signal_connector
    asked = False

    def note(number: int, _: Any) -> None:
        nonlocal asked
        if not asked and launcher is not None:
            launcher.kill(number)  # its processes have handlers like this one
        asked = True

    def stop() -> None:
        connector.received_sigterm = True
        announce("some rank was asked to end by SIGTERM: all ranks end after this batch", logging.WARNING)

    # Attributes of Lightning (2.5 to 2.6), which registers the method after setup() and reads the flag at the
    # end of each batch.
    connector._sigterm_notifier_fn = note
    # Before each batch of training it tells all ranks what rank 0 knows, which they know here.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    engine.wants_to_stop = lambda: asked and not connector.received_sigterm
    engine.when_asked_to_stop = stop
    engine.data_ends_with_batch = True
    engine.runs_ahead = engine.watches_reads = False
