"""A run of the user's ``*_step`` as in one process: its random numbers, its precision, and what it may touch."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import Context
from typing import Any

import numpy
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.engine.runtime.random_state import random_state
from deepspeed_partition.kept_weights import marks_of
from lightning_madpipe.compat.collective_calls import IN_A_STEP, collectives_refused
from lightning_madpipe.compat.optimizer_counts import counts_told
from lightning_madpipe.finding.step_call import line_of_users, replaced
from lightning_madpipe.module import pipeline_of
from lightning_madpipe.steps.batches import copy_of_object, is_object, map_children, tensors_of
from lightning_madpipe.steps.changed_batches import Contents
from lightning_madpipe.steps.ending_contexts import EndingContexts
from lightning_madpipe.steps.hook_values import refuse_in_loss
from lightning_madpipe.steps.layers_call import LayersCall
from lightning_madpipe.steps.left_untouched import LeftUntouched
from lightning_madpipe.steps.metrics_by_hand import written_tables_told
from lightning_madpipe.steps.micro_batches import MicroBatch
from lightning_madpipe.steps.own_generators import OwnGenerators
from lightning_madpipe.steps.prints import Prints
from lightning_madpipe.steps.rank_of_step import told_as_process
from lightning_madpipe.steps.recorded_calls import Call, recorded_by_other_names, recorded_loggers
from lightning_madpipe.steps.what_layers_set import LayerTraces
from lightning_madpipe.steps.written_files import OpenFiles, WritingTold

SEEDS = (
    "{step} seeds torch's common generators: in one process what comes after it goes by that seed, too, as the "
    "order of a loader that shuffles does, and in a pipeline the seed ends with the step. Give such a loader a "
    "generator of its own, DataLoader(..., generator=torch.Generator().manual_seed(0))"
)
PROFILED = (
    "{step} profiles its section {name!r}: the profiler of the last stage alone has it, once per micro-batch, "
    "with the times of a micro-batch. num_micro_batches=1 counts batches"
)
MOST_LOOKS = 4
"""The runs of a step in which the values of its batch are compared before and after it."""


class StepRuns:
    """Runs the steps of a module while something stands for its call of the layers.

    Args:
        module: The LightningModule.
        call: Its steps' call of the layers.
        context: A context for each step, such as the precision's.
        error: The host's exception for a step that cannot run on a pipeline.
        draws: The generators of the program's own.
        is_cut: Whether other ranks have some of the layers.
        traces: What layers set on themselves, which a step may not read; None: it may.
    """

    def __init__(
        self,
        module: Any,
        call: LayersCall,
        context: Callable[[], AbstractContextManager],
        error: type[Exception],
        draws: OwnGenerators,
        is_cut: bool,
        traces: LayerTraces | None,
    ) -> None:
        self._module = module
        self._call = call
        self._context = context
        self._error = error
        self._untouched = LeftUntouched(module, error)
        self._draws = draws
        self._is_cut = is_cut
        self._traces = traces
        self._counts_told: set[str] = set()
        self._prints_told: set[str] = set()
        self._prints = Prints(self._say_of_prints)
        self._writing_told: dict[str, WritingTold] = {}
        self.context_apart: Callable[[bool], Context | None] = lambda _: None
        """The context with the variables of a step whose traces are undone, given whether it is rehearsed and
        others follow; None: it runs in that of this thread."""
        self.open_files = OpenFiles()
        """What steps may write to that was open before them."""
        self.ended: Mapping[str, int] = {}
        """Where generators were when a step that was rehearsed had ended."""
        self.drawn_from: set[str] = set()
        """The common generators that steps which were rehearsed have drawn from."""
        self._num_runs: dict[str, int] = {}
        self._changes_uncounted: set[str] = set()
        """The steps that change their batch in a way that torch does not count: by NumPy, or by ``.data``."""
        self.known_draws: set[str] = set()
        """Those that training steps have drawn from in trials, and of which it was told."""
        self.drawn: set[str] = set()
        """Others that the last training step has drawn from, where it was no trial."""
        self.told_of_draws: set[str] = set()
        """The names of steps of which it was said what they draw from common generators."""

    def run(
        self,
        micro_batch: MicroBatch,
        answer: Callable[..., Any],
        log: Callable[..., None],
        record: Callable[[Call], None],
        *,
        again: bool,
        rehearsing: bool = False,
        only_inputs: bool = False,
        is_behind: bool = False,
        tells: bool = True,
        begins: Callable[[], AbstractContextManager[object]] | None = None,
        within: list[ExitStack] | None = None,
    ) -> Any:
        """Run the step while ``answer`` stands for the layers and ``log`` for ``self.log``.

        Args:
            record: What is given the calls of loggers and of ``self.print``.
            again: The step will run again on this micro-batch, so it gets a copy: it may change what it is given.
            rehearsing: Whether it is to leave no trace; then what it draws from is noted.
            only_inputs: It ends at its call of the layers.
            is_behind: Whether it runs right behind the last stage, on the same micro-batch.
            tells: Whether it is said what the step writes; else layers run within it, of which that is said apart.
            begins: A context that is entered last, right before the step.
            within: Is given the contexts of this run: whoever closes them at the call of the layers is left with
                what the step itself has set.
        """
        run = functools.partial(
            self._run,
            micro_batch,
            answer,
            log,
            record,
            again=again,
            rehearsing=rehearsing,
            only_inputs=only_inputs,
            is_behind=is_behind,
            tells=tells,
            begins=begins,
            within=within,
        )
        is_undone = rehearsing or (only_inputs and within is None)
        context = self.context_apart(not only_inputs) if is_undone else None
        return run() if context is None else context.run(run)

    def _looks_at_values(self, step: str) -> bool:
        """Whether values of the batch are compared: in the first runs, and where they have changed uncounted."""
        number = self._num_runs[step] = self._num_runs.get(step, 0) + 1
        return number <= MOST_LOOKS or step in self._changes_uncounted

    def _run(
        self,
        micro_batch: MicroBatch,
        answer: Callable[..., Any],
        log: Callable[..., None],
        record: Callable[[Call], None],
        *,
        again: bool,
        rehearsing: bool,
        only_inputs: bool,
        is_behind: bool,
        tells: bool,
        begins: Callable[[], AbstractContextManager[object]] | None,
        within: list[ExitStack] | None,
    ) -> Any:
        data = _cloned(micro_batch.data) if again else micro_batch.data
        own = list(tensors_of(micro_batch.data))  # which a step may take out of a list or a dict

        def show(*values: Any, **keywords: Any) -> None:
            # A batch that is given up runs again with the same numbers, and makes its calls then.
            if is_shown and self._prints.shows(micro_batch, sys._getframe(1), micro_batch.place):
                record(Call(None, (("attribute", "print"),), tuple(map(str, values)), keywords))

        what = "layers" if within is not None else "inputs" if only_inputs else "all"
        looks = what == "all" and self._looks_at_values(micro_batch.step)
        changes = _Changes(list(tensors_of(data)), values=looks)
        is_shown = what == "all" and not rehearsing
        ends: Callable[[Any, Any], None] | None = self._note_end if rehearsing else None
        stack = EndingContexts()
        try:
            with stack:
                enter = stack.enter_context
                enter(self._context())
                self.drawn = set()
                is_looked_at = is_shown and micro_batch.step == "training_step" and len(self.known_draws) < 3
                enter(_seeded(micro_batch, self._note_drawn if is_looked_at else None))
                if is_shown and micro_batch.step not in self.told_of_draws:
                    ends = functools.partial(self._tell_draws, micro_batch.step, _places_of_torch())
                enter(self._draws.of_step(what, micro_batch.batch_seed, ends))
                enter(self._call.within(micro_batch.step, data))
                for stand_in in self._call.stand_ins(answer):
                    enter(replaced(*stand_in))
                enter(replaced(self._module, "log", log))
                enter(replaced(self._module, "print", show))
                enter(self._prints.of_run(micro_batch, is_shown=is_shown))
                enter(self._sections_counted(micro_batch, is_shown=is_shown))
                enter(_recorded(self._module, record))
                enter(_stop_noted(self._module, micro_batch))
                if micro_batch.progress is not None:  # such as trainer.is_last_batch
                    loop = self._module.trainer.fit_loop.epoch_loop
                    enter(replaced(loop, "batch_progress", micro_batch.progress))
                trainer, keeps = getattr(self._module, "_trainer", None), not rehearsing and not only_inputs
                enter(written_tables_told(trainer, micro_batch.step, warn_once, keeps=keeps))
                if self._traces is not None:
                    enter(self._traces.hidden(micro_batch.step, is_behind=is_behind))
                if self._is_cut:
                    for context in self._on_a_stage(micro_batch.step, rehearsing, tells):
                        enter(context)
                elif micro_batch.step == "training_step" and self._trains_parts():
                    is_first = rehearsing or micro_batch.place == 0
                    enter(self._untouched.changed_once(micro_batch.step, is_first=is_first))
                if within is not None:
                    within.append(stack)
                if begins is not None:
                    enter(begins())
                is_read = what == "all" and micro_batch.keeps_returned and not rehearsing
                before = Contents(data) if is_read else None
                try:
                    returned = getattr(self._module, micro_batch.step)(data, *micro_batch.arguments)
                    micro_batch.changed = {
                        place: (own[place], tensor.detach()) for place, tensor in changes.found().items()
                    }
                    if changes.are_uncounted:
                        self._changes_uncounted.add(micro_batch.step)
                    micro_batch.contents = [] if before is None else before.changed()
                    refuse_in_loss(returned)
                    return returned
                except StopIteration as error:  # by which Lightning would end the epoch
                    raise self._error(
                        f"{micro_batch.step} raises StopIteration at {line_of_users(error)}, by which Lightning "
                        "would end the epoch on some ranks alone: catch it there; -1 from on_train_batch_start "
                        "ends an epoch"
                    ) from error
        finally:
            stack.end()
        raise AssertionError("no context here takes an exception")

    @contextmanager
    def _sections_counted(self, micro_batch: MicroBatch, *, is_shown: bool) -> Iterator[None]:
        """Let a step's own sections of the profiler count where it is trained, and say once what they count."""
        profiler = getattr(getattr(self._module, "_trainer", None), "profiler", None)
        if profiler is None or type(profiler).__name__ == "PassThroughProfiler":
            yield
            return
        profile = profiler.profile

        def counted(name: str) -> AbstractContextManager[Any]:
            if not is_shown:
                return nullcontext()
            if not micro_batch.is_whole:
                warn_once(f"profiled/{micro_batch.step}", PROFILED.format(step=micro_batch.step, name=name))
            return profile(name)

        with replaced(profiler, "profile", counted):
            yield

    def _trains_parts(self) -> bool:
        """Whether one stage trains a batch in several micro-batches."""
        pipeline = pipeline_of(self._module)
        engine = None if pipeline is None else pipeline.engine()
        return engine is not None and engine.micro_batches > self._module.trainer.accumulate_grad_batches

    def _on_a_stage(self, step: str, rehearsing: bool, tells: bool) -> Iterator[AbstractContextManager[None]]:
        """What a step may not touch, or what is said of it, where other ranks have some of the layers."""

        def tell_of_count(kind: str, number: int) -> None:
            if kind not in self._counts_told:
                self._counts_told.add(kind)
                warn_once(f"{step}/{kind[:60]}", kind.format(place=step, number=number))

        def refuse(name: str, line: str, ranks: str) -> None:
            raise self._error(IN_A_STEP.format(step=step, name=name, line=line, ranks=ranks))

        def peers() -> list[int]:
            """The ranks that run this step now: not all pipelines are tried."""
            if rehearsing:
                return [dist.get_rank()]
            return dist.get_process_group_ranks(grid.get_data_parallel_group())

        grid = pipeline_of(self._module).mpu()
        yield told_as_process(step, self._module.trainer.strategy, grid.get_data_parallel_rank())
        yield collectives_refused(refuse, peers)
        yield counts_told(self._module.trainer.optimizers, tell_of_count)
        yield self._untouched.by(step)
        yield pipeline_of(self._module).elsewhere.listed()
        if not tells:
            return
        yield self.open_files.of_step()
        # Within the former, which flushes files.
        yield self._writing_told.setdefault(step, WritingTold(step, self._say_of_files)).watching()

    def _tell_draws(
        self, step: str, begun: Mapping[int, bytes], ended: Mapping[str, int], common: Collection[str]
    ) -> None:
        """Say once of a step what it draws from generators that are seeded otherwise than in one process."""
        self.told_of_draws.add(step)
        self.drawn = set()
        now = _places_of_torch()
        is_of_torch = any(now.get(seed, place) != place for seed, place in begun.items())
        if common or is_of_torch:
            self.tell_draws(step, {*common, *["torch"] * is_of_torch})

    def tell_draws(self, step: str, names: Collection[str]) -> None:
        """Say what a step draws from common generators."""
        if step == "training_step":
            self.known_draws.update(names)
        warn_once(f"draws/{type(self._module).__name__}/{step}/{sorted(names)}", draws_in_words(step, names))

    def _note_drawn(self, names: set[str]) -> None:
        self.drawn.update(names - self.known_draws)

    def _say_of_files(self, sentence: str) -> None:
        step, does, *_ = sentence.split()  # files may have another name in each step
        warn_once(f"written/{type(self._module).__name__}/{step}/{does}", sentence)

    def _say_of_prints(self, step: str, sentence: str) -> None:
        if step not in self._prints_told:
            self._prints_told.add(step)
            warn_once(f"prints/{type(self._module).__name__}/{step}", sentence)

    def _note_end(self, ended: Mapping[str, int], common: Collection[str]) -> None:
        self.ended = ended
        self.drawn_from.update(common)


def _places_of_torch() -> dict[int, bytes]:
    """Where torch's common generators are, by the seeds that they have been given."""
    accelerator = get_accelerator()
    places = {torch.initial_seed(): torch.get_rng_state().numpy().tobytes()}
    if accelerator.device_name() != "cpu":
        places[-accelerator.initial_seed()] = accelerator.get_rng_state().numpy().tobytes()
    return places


def draws_in_words(step: str, common: Collection[str]) -> str:
    """What is said of a step that draws from common generators."""
    return (
        f"{step} draws from the common random generators ({', '.join(sorted(common))}): in a pipeline these are "
        "other numbers than in one process, unless the step seeds them itself; a generator of its own, such as "
        "self.rng = random.Random(0), gives the same ones"
    )


class _Changes:
    """Tells which tensors of a batch a step changes in place.

    Args:
        tensors: The batch's.
        values: Whether their values are compared, too, in a pass over them.
    """

    def __init__(self, tensors: list[Tensor], *, values: bool) -> None:
        self._tensors, self._values = tensors, values
        self._before = marks_of(tensors, values=values)
        self.are_uncounted = False
        """Whether one has other values, and torch has counted no change: of NumPy, or of ``.data``."""

    def found(self) -> dict[int, Tensor]:
        """The tensors that have changed, by their places."""
        now = marks_of(self._tensors, values=self._values)
        changed = [place for place, (was, mark) in enumerate(zip(self._before, now, strict=True)) if was != mark]
        self.are_uncounted = any(self._before[place][0] == now[place][0] for place in changed)
        return {place: self._tensors[place] for place in changed}


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return copy_of_object(value) if is_object(value) else map_children(value, _cloned)


@contextmanager
def _recorded(module: Any, record: Callable[[Call], None]) -> Iterator[None]:
    """Let ``self.logger`` record what it is told."""
    trainer = getattr(module, "_trainer", None)
    if trainer is None:
        yield
        return
    loggers = trainer.loggers
    try:
        trainer.loggers = recorded_loggers(loggers, record)
        with recorded_by_other_names(loggers, record):
            yield
    finally:
        trainer.loggers = loggers


@contextmanager
def _stop_noted(module: Any, micro_batch: MicroBatch) -> Iterator[None]:
    """Note whether the step sets ``trainer.should_stop``, which is decided when the batch is through."""
    trainer = getattr(module, "_trainer", None)
    if trainer is None:
        yield
        return
    before = trainer.should_stop
    try:
        yield
    finally:
        micro_batch.stops, trainer.should_stop = trainer.should_stop, before


@contextmanager
def _seeded(micro_batch: MicroBatch, note: Callable[[set[str]], None] | None = None) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's random numbers, and restore them afterwards.

    The first and the last stage run the same step on the same micro-batch: what it draws, such as the shares of a
    mix-up of inputs and labels, must be the same on both. From Python's and NumPy's generators all micro-batches
    of a batch draw alike, as for the batch: which branch a step takes, say.

    Args:
        note: Is given the generators that the step has drawn from.
    """
    batch_seed = micro_batch.batch_seed
    seed = batch_seed if micro_batch.draws_alike else micro_batch.seed

    def begin() -> None:
        random.seed(batch_seed)
        numpy.random.seed(batch_seed % 2**32)
        torch.random.default_generator.manual_seed(seed)
        if get_accelerator().device_name() != "cpu":
            get_accelerator().manual_seed(seed)

    restore = random_state()
    try:
        begin()
        if note is None:
            yield
            return
        first = _drawn_next(seed)
        begin()
        yield
        note({name for name, number in _drawn_next(seed).items() if number != first.get(name, number)})
    finally:
        if torch.initial_seed() != seed:
            warn_once(f"seeds/{micro_batch.step}", SEEDS.format(step=micro_batch.step))
        restore()


def _drawn_next(seed: int) -> dict[str, Any]:
    """The next number of each common generator: it takes less time to draw than to ask where they are.

    Not of torch, where the step has seeded it itself.
    """
    accelerator, places = get_accelerator(), [torch.rand((), device="cpu").item()]
    if accelerator.device_name() != "cpu":
        places.append(accelerator.get_rng_state().numpy().tobytes())
    of_torch = "torch" if torch.initial_seed() == seed else ""
    return {"random": random.getrandbits(32), "numpy.random": numpy.random.random_sample(), of_torch: places}
