"""The layers of the pipeline against ``forward``: rank 0 compares them, and every rank hears what it found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_partition.capture.model_layers import Branch
from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine.runtime.collectives import any_bits, from_rank_0, gather_objects
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.profiling.sources import users_names
from lightning_madpipe.compat.collective_calls import IN_A_LAYER, collectives_refused
from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.compat.unsupported import (
    averages_instances,
    layers_of_instances,
    layers_of_observers,
    layers_of_statistics,
    notes_on_draws,
    notes_on_hooks,
    notes_on_instances,
    notes_on_observers,
    notes_on_parts,
    notes_on_statistics,
    uses_statistics,
    weights_with_hooks,
)
from lightning_madpipe.steps.batch_runs import BatchRun, as_tuple
from lightning_madpipe.steps.batches import some_of
from lightning_madpipe.steps.captured_check import CapturedCheck
from lightning_madpipe.steps.ending_contexts import run_within
from lightning_madpipe.steps.forward_reads import ForwardWatch
from lightning_madpipe.steps.layer_check import LayerCheck, Verdict
from lightning_madpipe.steps.layer_settings import LayerSettings
from lightning_madpipe.steps.layer_writes import Found, LayerWrites
from lightning_madpipe.steps.layers_on_parts import FEW, MANY, FewSamples, OnParts, few_samples, layers_on_parts
from lightning_madpipe.steps.micro_batches import MicroBatch
from lightning_madpipe.steps.user_step import UserSteps
from lightning_madpipe.steps.what_layers_set import LayerTraces
from lightning_madpipe.steps.written_files import LayerWriting
from lightning_madpipe.steps.written_inputs import WRITES

T = TypeVar("T")

UNCHECKED = (
    "check_layers=False: the layers are not compared with forward(), and no line names layers that mix samples, "
    "keep something from run to run, decide by numbers in tensors, hand something over beside their outputs, "
    "draw random numbers or write to files. Where a layer does, training differs from that of one process, and no "
    "line says so"
)
"""What is said once of a run without the check."""


class LayerComparison:
    """Compares the layers with what ``forward`` computes, once in each mode, and where something has changed.

    Args:
        trainer: Lightning's.
        module: The LightningModule.
        pipeline: Its pipeline.
        engine: The pipeline's engine.
        steps: Runs the user's steps.
        traces: What layers set on the module.
        lightning: The package of the module's class.
        context: Gives the context in which ``forward`` runs.
        is_wanted: Whether layers are to be compared; else they are trained as they are.
    """

    def __init__(
        self,
        *,
        trainer: Any,
        module: Any,
        pipeline: Any,
        engine: MadPipeEngine,
        steps: UserSteps,
        traces: LayerTraces,
        lightning: Lightning,
        context: Callable[[], AbstractContextManager[Any]],
        is_wanted: bool,
    ) -> None:
        self._trainer, self._module, self._pipeline = trainer, module, pipeline
        self._engine, self._steps = engine, steps
        self._traces, self._lightning, self._context, self._is_wanted = traces, lightning, context, is_wanted
        self._noted = set(self._notes_on_hooks())  # of which a fit has told
        self._looked_at: set[tuple[str, bool]] = set()
        """Steps of which it is known what they read of that which layers change, each with the module's mode."""
        self._told_of_writes: set[str] = set()
        """What layers change outside of themselves, and was told of."""
        self._named: set[str] = set()
        """Layers, and what they keep, that were told of."""
        self._draws: set[str] = set()
        """What was told of that draws random numbers."""
        self._settings = LayerSettings(module, pipeline.elsewhere, self._named)
        self._writing = LayerWriting(lambda: pipeline.elsewhere.inside)
        self._watches: dict[Any, ForwardWatch] = {}
        """What ``forward`` reads, by the mode of the module and the call that the layers run."""
        self._set_on_metrics: dict[Any, dict[tuple[str, str], str | None]] = {}
        """How metrics compute, by the same; each by the metric's name and its attribute."""

    @property
    def is_due(self) -> bool:
        """Whether the layers have not been compared in the mode that the module has now."""
        return self._state not in self._watches

    @property
    def _state(self) -> Any:
        captured = self._pipeline.call_of_module.captured
        return self._module.training, None if captured is None else captured.now

    def changed(self) -> Sequence[str]:
        """What ``forward`` reads, and is another thing than when the layers were compared."""
        watch = self._watches.get(self._state)
        return [] if watch is None else watch.changed()

    def look_is_due(self, *, epoch_begins: bool) -> bool:
        """Whether hooks have changed something in the layers of this rank, by which they may mix samples now.

        Such as ``layer.train()``, ``layer.alpha = 0.5`` or ``layer.mask.fill_(1)``. What layers change themselves
        whenever they run does not count.
        """
        return self._settings.is_look_due(epoch_begins=epoch_begins)

    def note_settings(self) -> None:
        """Note what the layers hold when those of a step have run, and before hooks may change it."""
        self._settings.note()

    def compare_if_changed(self, run: BatchRun) -> None:
        """Compare the layers again if what ``forward`` reads has changed. Collective over the job."""
        watch = self._watches.get(self._state)
        if watch is not None and watch.is_needed:
            changed = watch.changed()
            if any(any_bits([bool(changed)])):
                self.compare_again(run, changed)

    def compare_again(self, run: BatchRun, changed: Sequence[str]) -> None:
        """Compare the layers for the first micro-batch of ``run``. Collective; see :meth:`compare`."""
        self._settings.bring()
        with self._steps.rehearsal(), self._pipeline.elsewhere.everything_hidden():
            inputs = self._steps.inputs_of_first(run)
        self.compare(inputs, run, changed)

    def compare(self, inputs: Any, run: BatchRun, changed: Sequence[str]) -> None:
        """Compare the layers with ``forward`` for one micro-batch. Collective.

        Args:
            inputs: What the step gives ``forward``, for the first micro-batch.
            run: The batch.
            changed: What ``forward`` reads, and is another thing than when they were compared before.

        Raises:
            MisconfigurationException: they differ; on every rank.
        """
        few = self._few_of(run, as_tuple(inputs))
        with self._steps.rehearsal():
            sizes = [micro_batch.size for micro_batch in run.micro_batches]
            verdict = self._agreed(as_tuple(inputs), sizes, changed, few)
        state = self._state
        settings = {(metric, name): value for metric, name, value in verdict.settings}
        self._set_on_metrics.setdefault(state, {}).update(settings)
        self.set_on_metrics()
        if state not in self._watches:
            captured = self._pipeline.call_of_module.captured
            called = None if captured is None else captured.now.called.replace("the modules of ", "")
            self._watches[state] = ForwardWatch(
                self._module, lambda: self._trainer.current_epoch, announce, called
            )
        self._watches[state].begin(verdict.reads)

    def set_on_metrics(self) -> None:
        """Set on metrics what ``forward`` does in the mode that the module has now."""
        for (metric, name), value in self._set_on_metrics.get(self._state, {}).items():
            vars(self._module.get_submodule(metric))[name] = value

    def look_at_writes(self, run: BatchRun) -> None:
        """Look what layers change outside of themselves, and the step of a batch or a hook reads. Collective.

        Raises:
            MisconfigurationException: what the step returns depends on it; on every rank.
        """
        key = run.whole.step, self._module.training
        if not self._is_wanted or key in self._looked_at:
            return
        self._looked_at.add(key)
        with self._steps.rehearsal():
            found = from_rank_0(lambda: self._writes(run.micro_batches[0]))
        if found.refusal is not None:
            raise self._lightning.refusal(found.refusal)
        self._steps.changed_by_layers.update(of for of, _ in found.notes)
        for of, note in found.notes:
            if of not in self._told_of_writes:
                self._lightning.warn(note)
                self._told_of_writes.add(of)

    def _writes(self, first: MicroBatch) -> Found:
        traces, call = self._traces, self._pipeline.call_of_module
        writes = LayerWrites(
            self._module, call, self._steps, vars(self._lightning.module_class()), traces.has, traces.shown
        )

        def refuse(name: str, *_: str) -> None:
            raise RuntimeError(f"{name} is called on one rank")  # it is told where the step runs for good

        def look() -> Found:
            return writes.found(first, device=self._engine.device, dtype=self._half)

        rank = dist.get_rank()
        alone = collectives_refused(refuse, lambda: [rank])
        return run_within([self._pipeline.elsewhere.lifted(), alone, self._writing.watching()], look)

    @property
    def _half(self) -> torch.dtype | None:
        """The type of 16 bits that the engine trains in, if it does."""
        engine = self._engine
        return torch.bfloat16 if engine.bfloat16_enabled() else torch.float16 if engine.fp16_enabled() else None

    def _agreed(
        self, arguments: Sequence[Any], sizes: Sequence[int], changed: Sequence[str], few: FewSamples | None
    ) -> Verdict:
        """What rank 0 finds when it compares; every rank hears it.

        Weights of other ranks' layers are there as they were when these left rank 0: for the comparison any do.
        """
        verdict, on_parts = from_rank_0(lambda: (self._verdict(arguments), self._on_parts(few)))
        if on_parts.handed_over is not None and self._may_part(*(on_parts.handed_over[0])):
            raise self._lightning.refusal(on_parts.handed_over[1])
        if verdict.difference is not None:
            since = f"since {', '.join(changed)} has changed, " if changed else ""
            raise self._lightning.refusal(f"{since}{verdict.difference}")
        self._traces.add(verdict.left)
        # A hook that is hung on while training runs is on the parameter, which a rank has of its own layers.
        hooked = {name for names in gather_objects(weights_with_hooks(self._module)) for name in names}
        notes = [*verdict.notes, *self._notes_on_hooks(hooked)]
        if not self._is_wanted:
            notes.append(UNCHECKED)
        statistics: list[str] = []
        if self._module.training and len(sizes) > 1:
            statistics = self.layers_of_statistics()
            notes += notes_on_statistics(statistics, sizes)
            instances = self._layers_of_all_ranks(
                layers_of_instances, functools.partial(self._opened, averages_instances)
            )
            notes += notes_on_instances(instances, sizes)
            observers = self._layers_of_all_ranks(layers_of_observers)
            notes += notes_on_observers(observers, sizes)
            statistics += [*instances, *observers]
        if len(sizes) > 1:
            mixing = [name for name in on_parts.mixing if name not in (*statistics, *self._named)]
            keeping = [name for name in on_parts.keeping if name not in self._named]
            gradients = [name for name in on_parts.mixing_gradients if name not in self._named]
            # Of layers that are found, what was written down of their code tells the most of it.
            captured = self._pipeline.call_of_module.captured
            untold = [name for name in on_parts.deciding if captured is None or not captured.is_told(name)]
            deciding = [name for name in untold if name not in self._named]
            self._named.update(mixing, keeping, gradients, deciding)
            notes += notes_on_parts(mixing, keeping, gradients, deciding, sizes, on_parts.ended)
        notes += [WRITES.format(layer=name) for name in on_parts.writing]
        notes += notes_on_draws(self._drawing(on_parts.drawing))
        for note in notes:
            if note not in self._noted:
                self._lightning.warn(note)
        self._noted.update(notes)
        return verdict

    def _drawing(self, found: Sequence[str]) -> list[str]:
        """What draws in the layers, in the user's words, but for what was told of."""
        captured = self._pipeline.call_of_module.captured
        lines = [] if captured is None else captured.lines_that_draw()
        named = [name for name in found if name.startswith("self.")]
        shown = [*named, *(lines or [name for name in found if name not in named])] if found else []
        new = [name for name in shown if name not in self._draws]
        self._draws.update(new)
        return new

    def _may_part(self, giver: int | None, taker: int) -> bool:
        """Whether two layers run on different stages, or may come to do so."""
        if giver is None or self._engine.options.plan is None:
            return True  # to make a plan each layer is run alone
        stages = [stage.layers for stage in self._pipeline.allocation.stages]
        return not any(first <= giver and taker < last for first, last in stages)

    def _notes_on_hooks(self, on_all_ranks: Collection[str] = frozenset()) -> list[str]:
        with self._pipeline.elsewhere.lifted():
            return list(notes_on_hooks(self._module, self._pipeline.call_of_module, on_all_ranks))

    def _verdict(self, arguments: Sequence[Any]) -> Verdict:
        call, engine, half = self._pipeline.call_of_module, self._engine, self._half
        if not self._is_wanted or (call.attribute != "forward" and call.captured is None):
            return Verdict()  # one nn.Sequential is called as it is
        check = LayerCheck if call.captured is None else CapturedCheck
        traces = functools.partial(self._steps.leftovers, undoable=True)

        def verdict() -> Verdict:
            device, context = engine.device, self._context
            return check(
                self._module, call, arguments, device=device, dtype=half, context=context, traces=traces
            ).verdict()

        return self._alone(verdict)

    def _few_of(self, run: BatchRun, inputs: tuple[Any, ...]) -> FewSamples | None:
        """What the step gives ``forward`` for a few samples; None where nothing is to be looked at."""
        whole = run.whole
        size = FEW if whole.size >= FEW else 2
        # Without a backward, twice a micro-batch takes no more memory than one with it.
        many = min(MANY, whole.size, 2 * max(micro_batch.size for micro_batch in run.micro_batches)) // 2 * 2
        if not self._is_wanted or (len(run.micro_batches) == 1 and self._pipeline.num_stages == 1):
            return None
        try:
            with self._steps.rehearsal(), self._pipeline.elsewhere.everything_hidden():
                some = [
                    as_tuple(self._steps.inputs(replace(whole, data=some_of(whole.data, whole.size, n), size=n)))
                    for n in (size, size // 2, many)[: 3 if many > size else 2]
                ]
        except Exception:  # the step is told of where it runs for good
            return FewSamples(inputs, None)
        return replace(few_samples(some[0], some[1]), more=some[2] if len(some) > 2 else None)

    def _on_parts(self, few: FewSamples | None) -> OnParts:
        if few is None:
            return OnParts()
        engine, half = self._engine, self._half
        call, is_cut = self._pipeline.call_of_module, self._pipeline.num_stages > 1
        return self._alone(
            lambda: layers_on_parts(self._module, call, few, device=engine.device, dtype=half, is_cut=is_cut)
        )

    def _alone(self, look: Callable[[], T]) -> T:
        """What ``look`` finds, on this rank alone, with all layers.

        Raises:
            Exception: the host's, for a collective of a layer, also where the layer catches what that raises.
        """
        found: list[str] = []

        def refuse(name: str, line: str, ranks: str) -> None:
            found.append(IN_A_LAYER.format(name=name, line=line, ranks=ranks))
            raise RuntimeError(found[-1])

        try:
            rank = dist.get_rank()
            alone = collectives_refused(refuse, lambda: [rank])
            return run_within([self._pipeline.elsewhere.lifted(), alone, self._writing.watching()], look)
        finally:
            if found:
                raise self._lightning.refusal(found[0]) from None

    def layers_of_statistics(self) -> list[str]:
        return self._layers_of_all_ranks(layers_of_statistics, functools.partial(self._opened, uses_statistics))

    def _layers_of_all_ranks(
        self,
        found: Callable[[Iterator[tuple[str, nn.Module]]], Iterator[str]],
        more: Callable[[Sequence[nn.Module]], Iterator[str]] = lambda _: iter(()),
    ) -> list[str]:
        """The names of the layers, of any stage, that a function finds. Collective."""
        elsewhere = self._pipeline.elsewhere
        named = ((f"self.{name}", part) for name, part in self._module.named_modules() if part in elsewhere.inside)
        parts = list(elsewhere.made_for_the_pipeline())
        made = ((type(part).__name__, part) for part in parts if not isinstance(part, Branch))
        mine = [*found(named), *found(made), *more(parts)]
        everyone = gather_objects(mine, self._pipeline.mpu().get_pipe_parallel_group())
        return list(dict.fromkeys(name for names in everyone for name in names))

    def _opened(self, counts: Callable[[nn.Module, bool], bool], parts: Sequence[nn.Module]) -> Iterator[str]:
        """Normalization of which layers run the code alone, as within ``torch.no_grad()``, by its own mode."""
        captured = self._pipeline.call_of_module.captured
        for part in parts:
            if isinstance(part, Branch) and "running_mean" in part._buffers:
                own = captured.root.get_submodule(part.path)
                if counts(own, part._buffers["running_mean"] is not None):
                    yield f"{users_names.get(own, part.path)} ({type(own).__name__})"
