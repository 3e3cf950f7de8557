"""What steps print and log to be shown: that of one run for each batch, and nothing of trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from deepspeed_partition.dropped_writing import prints_asked
from lightning_madpipe.steps.micro_batches import MicroBatch

PRINTS = (
    "{step} prints or logs to the terminal in {line}, and runs once per micro-batch, on the last stage: of each "
    "line of code you see what the first micro-batch that comes to it in a batch prints, and nothing of trials. "
    "Print what a batch has in a hook, such as on_train_batch_end; MadPipeStrategy(loss='batch') runs "
    "training_step once per batch"
)
"""What is said once of a step that prints."""
LAYERS_PRINT = (
    "a layer or forward() prints or logs to the terminal in {line}, and layers run once per micro-batch, on the "
    "rank that has them: you see what each of these prints, nothing of trials, and nothing of a forward() that "
    "layers were found in. num_micro_batches=1 prints once"
)
"""What is said once of layers that print."""
MOST_LINES = 10_000


class Prints:
    """Decides of what a step prints what is shown, by the line of code that prints it.

    Args:
        say: Is given the name of a step and what is said of it.
    """

    def __init__(self, say: Callable[[str, str], None]) -> None:
        self._say = say
        self._first: dict[tuple[int, str, int, type], object] = {}
        """The run that was the first of its batch to come to a line, by the seed of the batch."""

    @contextmanager
    def of_run(self, micro_batch: MicroBatch, *, is_shown: bool) -> Iterator[None]:
        """Show of what is printed meanwhile what is to be shown; nothing of a run that leaves no trace."""
        run = object()  # a batch that is given up runs again, and has been shown
        with prints_asked(lambda frame: is_shown and self.shows(micro_batch, frame, run)):
            yield

    def shows(self, micro_batch: MicroBatch, frame: FrameType, run: object) -> bool:
        """Whether a run, known by itself or its number, is the first of its batch to print in this line."""
        if micro_batch.is_whole:
            return True
        if len(self._first) > MOST_LINES:
            self._first.clear()
        self._say(micro_batch.step, PRINTS.format(step=micro_batch.step, line=line_of(frame)))
        key = micro_batch.batch_seed, frame.f_code.co_filename, frame.f_lineno, type(run)
        return self._first.setdefault(key, run) == run


def line_of(frame: FrameType) -> str:
    """The line of code that runs in a frame, in words."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
