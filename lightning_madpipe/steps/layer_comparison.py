"""The layers of the pipeline against ``forward``: rank 0 compares them, and every rank hears what it found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine.runtime.collectives import from_rank_0, gather_objects
from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.compat.unsupported import layers_of_statistics, notes_on_statistics
from lightning_madpipe.steps.forward_reads import Read
from lightning_madpipe.steps.layer_check import Verdict, check_layers
from lightning_madpipe.steps.user_step import UserSteps
from lightning_madpipe.steps.what_layers_set import LayerTraces


class LayerComparison:
    """Compares the layers with what ``forward`` computes, on rank 0.

    Args:
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
        module: Any,
        pipeline: Any,
        engine: MadPipeEngine,
        steps: UserSteps,
        traces: LayerTraces,
        lightning: Lightning,
        context: Callable[[], AbstractContextManager[Any]],
        is_wanted: bool,
    ) -> None:
        self._module, self._pipeline, self._engine, self._steps = module, pipeline, engine, steps
        self._traces, self._lightning, self._context, self._is_wanted = traces, lightning, context, is_wanted
        self._noted: set[str] = set()

    def compare(self, arguments: Sequence[Any], sizes: Sequence[int], changed: Sequence[str]) -> Sequence[Read]:
        """Compare the layers with ``forward`` for one micro-batch. Collective.

        Weights of other ranks' layers are there as they were when these left rank 0: for the comparison any do.

        Args:
            arguments: What the step gives ``forward``, for the first micro-batch.
            sizes: The samples of each micro-batch.
            changed: What ``forward`` reads, and is another thing than when they were compared before.

        Returns:
            What ``forward`` reads besides.

        Raises:
            MisconfigurationException: they differ; on every rank.
        """
        verdict = from_rank_0(lambda: self._verdict(arguments))
        if verdict.difference is not None:
            since = f"since {', '.join(changed)} has changed, " if changed else ""
            raise self._lightning.refusal(f"{since}{verdict.difference}")
        self._traces.add(verdict.left)
        notes = list(verdict.notes)
        if self._module.training and len(sizes) > 1:
            notes += notes_on_statistics(self._layers_of_statistics(), verdict.statistics, sizes)
        for note in notes:
            if note not in self._noted:
                self._lightning.warn(note)
        self._noted.update(notes)
        return verdict.reads

    def _verdict(self, arguments: Sequence[Any]) -> Verdict:
        call, engine = self._pipeline.call_of_module, self._engine
        half = torch.bfloat16 if engine.bfloat16_enabled() else torch.float16 if engine.fp16_enabled() else None
        if not self._is_wanted or call.attribute != "forward":
            return Verdict()  # one nn.Sequential is called as it is
        with self._pipeline.elsewhere.lifted():
            return check_layers(
                self._module,
                call,
                arguments,
                device=engine.device,
                dtype=half,
                context=self._context,
                traces=lambda: self._steps.leftovers(undoable=True),
            )

    def _layers_of_statistics(self) -> list[str]:
        elsewhere = self._pipeline.elsewhere
        named = ((f"self.{name}", part) for name, part in self._module.named_modules() if part in elsewhere.inside)
        made = ((type(part).__name__, part) for part in elsewhere.made_for_the_pipeline())
        mine = [*layers_of_statistics(named), *layers_of_statistics(made)]
        everyone = gather_objects(mine, self._pipeline.mpu().get_pipe_parallel_group())
        return list(dict.fromkeys(name for names in everyone for name in names))
