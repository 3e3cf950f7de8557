"""The plan that a run is still to make: what it waits for, and what a checkpoint changes about that."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from deepspeed_partition.engine.checkpoint.checkpoint_engine import Found
from deepspeed_partition.engine.checkpoint.saved_cut import SavedCut
from deepspeed_partition.engine.pipeline.before_step import written_in
from deepspeed_partition.engine.pipeline.endless_conditions import why_not_with
from deepspeed_partition.engine.pipeline.module import Cut
from deepspeed_partition.engine.pipeline.stages import allocation_in_words, allocation_of, owner
from deepspeed_partition.engine.repartition.layer_moves import check_that_layers_can_move
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.kept_weights import WRITTEN
from deepspeed_partition.planner.errors import InfeasibleError, PlanMismatchError
from deepspeed_partition.planner.units import counted, format_seconds
from deepspeed_partition.planner.weight_versions import FLUSH

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine
    from deepspeed_partition.engine.warmup.warm_up import WarmUp

T = TypeVar("T")


class PendingPlan:
    """Whether a run waits for its plan, with or without a warm-up, and how the plan is made.

    Args:
        engine: The engine of the run.
    """

    def __init__(self, engine: MadPipeEngine) -> None:
        self._engine = engine
        self.is_pending = False
        """Whether the plan is still to be made."""
        self.warm_up: WarmUp | None = None
        """The steps before the plan, in which layers are measured. None: the plan comes before the first step."""
        self._knows_what_moves = False

    def wait(self) -> None:
        """Make a plan before the next step, unless a warm-up comes first."""
        self.is_pending = True

    def settle(self) -> None:
        """Wait no longer: the cut is decided."""
        self.is_pending, self.warm_up = False, None

    def warm_up_until(self, is_over: Callable[[], bool], length: str) -> None:
        """Train on the trial cut first, see :meth:`MadPipeEngine.warm_up_until`."""
        if not self.is_pending:
            return
        if not self._engine.runs_lists:
            announce(
                "DeepSpeed's own schedule runs here, under which layers are not measured while they train: there "
                "is no warm-up, and the plan is made before the first optimizer step",
                logging.WARNING,
            )
            return
        from deepspeed_partition.engine.warmup.warm_up import WarmUp  # with the profiler, like planning

        self.warm_up = WarmUp(self._engine, is_over, length)

    def train(self, step: Callable[..., T], data_iter: Iterator[Any] | None) -> T:
        """Make a training step; before it the plan, when the time has come.

        Args:
            step: Makes the step, on an iterator of data or on the engine's own.

        Returns:
            What ``step`` returns.
        """
        engine = self._engine
        while self.is_pending and torch.is_grad_enabled():
            if engine.num_stages == 1 and not engine.options.ask_for_plan_of_one_stage:
                announce(
                    "one stage has the whole model: there is nothing to cut, and it trains as it is, without a "
                    "warm-up (recompute='block', or memory=..., asks for a plan of what to recompute)"
                )
                engine.adopt(Cut("boundaries", is_of_a_run=True))
                break
            if not self._knows_what_moves:
                check_that_layers_can_move(engine.module)  # not after minutes
                engine.check_that_scheduler_can_go_on()
                if self.warm_up is not None:
                    engine.check_that_optimizer_can_go_on(after_steps=True)
                self._knows_what_moves = True
            if data_iter is not None:
                engine.set_dataiterator(data_iter)
            data_iter = None  # the engine's own begins with the micro-batch that was measured
            trained = None if self.warm_up is None else self.warm_up.train(step)
            if trained is not None:
                return trained[0]
            self._plan_and_move()
        return step(data_iter)

    def _plan_and_move(self) -> None:
        self._engine.tell_phase("planning")
        try:
            self._make()
        finally:
            self._engine.tell_phase("")

    def _make(self) -> None:
        """Make the plan, and move the layers to it. Collective."""
        engine, warm_up = self._engine, self.warm_up
        if engine.module.activation_checkpoint_interval:
            announce(
                "activation checkpointing is on: layers are measured without it, so the plan counts on more "
                "memory than they will keep, and on backwards without recomputation",
                logging.WARNING,
            )
        from deepspeed_partition.engine.warmup.run_plan import measure_and_plan  # the profiler, used only here

        before, started = allocation_in_words(allocation_of(engine.module)), time.perf_counter()
        if warm_up is None or not warm_up.has_begun:
            announce(
                f"the layers, cut at {before} until the plan is made, are measured one by one on the first "
                f"micro-batch, before training {'goes on' if engine.global_steps else 'begins'}"
            )
        elif not warm_up.ran_out_of_memory:
            announce(f"the warm-up is over after step {engine.global_steps}", logging.DEBUG)
        try:
            with engine.around_measurements():
                plan, engine.chain = measure_and_plan(engine, None if warm_up is None else warm_up.measuring)
        except InfeasibleError as error:
            present = allocation_of(engine.module)
            if warm_up is None or warm_up.ran_out_of_memory or warm_up.ran_at != present:
                raise
            # It has run so far, at this cut: no reason to end it.
            goes_on = f"training goes on at {allocation_in_words(present)}"
            announce(f"no plan fits, and {goes_on}: {error}", logging.WARNING)
            if warm_up.has_fallen_back:
                warm_up.goes_on = True
            else:
                engine.adopt(Cut("boundaries", is_of_a_run=True))
            return
        for words, names in gather_objects(([*WRITTEN.in_words], written_in(engine.module))):
            WRITTEN.in_words.update(dict.fromkeys(words))
            engine.written_by_forwards |= names
        planned = time.perf_counter()
        old, new = allocation_of(engine.module), allocation_of(plan)
        num_moved = sum(owner(old, layer) != owner(new, layer) for layer in range(engine.module._num_layers))
        engine.recut_to_plan_of_run(plan)
        moved = f"{counted(num_moved, 'layer')} moved in {format_seconds(time.perf_counter() - planned)}"
        took = f"measuring and planning took {format_seconds(planned - started)}"
        where = f"the layers are cut at {allocation_in_words(allocation_of(engine.module))} as planned"
        if num_moved:
            announce(f"{where} (until now: {before})", logging.DEBUG)
            announce(f"{moved}; {took}")
        else:
            announce(f"no layer moved; {took}")

    # Checkpoints

    def resume(
        self, found: Found | None, options: Mapping[str, Any], load: Callable[[], tuple[Any, Any]]
    ) -> tuple[Any, Any]:
        """Load a checkpoint under its cut, if this run waits for a plan, else under that of this run.

        Args:
            found: The checkpoint; None where DeepSpeed loads one as it is.
            options: The arguments of ``load_checkpoint``.
            load: Loads it on the cut that the engine has then.

        Returns:
            What ``load`` returns.
        """
        engine, asked_for_plan, warm_up = self._engine, self.is_pending, self.warm_up
        # Weights alone load on any cut.
        saved = None if found is None or options["load_module_only"] else found.cut
        try:
            if found is not None and saved is not None:
                self._adopt_cut_of(found, saved, whole=options["load_optimizer_states"])
            loaded = load()
        except Exception:
            # A script may go on without, or with another one. A warm-up needs one stage per rank: where the layers
            # have moved to a plan with several, that plan stays.
            if asked_for_plan and allocation_of(engine.module).is_contiguous:
                self._wait_anew(warm_up)
            raise
        if warm_up is not None and saved is not None and engine.global_steps:
            warm_up.ran_at = saved.allocation
        plans_anew = saved is not None and (
            saved.num_ranks != engine.num_stages or self._why_not_versions_of(saved) is not None
        )
        if asked_for_plan and engine.plan is None and (warm_up is not None or not engine.global_steps):
            # Written before a plan was made: the warm-up goes on, where there is one.
            self._wait_anew(warm_up)
        elif self.is_pending and engine.global_steps and not plans_anew:
            self.is_pending = False
            announce(
                f"the checkpoint was written without a plan: training goes on at the cut {engine.module.parts}",
                logging.WARNING,
            )
        return loaded

    def _wait_anew(self, warm_up: WarmUp | None) -> None:
        """Let the present cut be a trial, as it was before a checkpoint's was adopted."""
        self._engine.adopt(Cut("trial"))
        self.is_pending, self.warm_up = True, warm_up
        if warm_up is not None:
            warm_up.limit_depth()

    def _why_not_versions_of(self, saved: SavedCut) -> str | None:
        """Why this run cannot go on with the plan of a checkpoint, in its versions of the weights."""
        asked = self._engine.options.weight_versions
        if saved.plan is not None:
            return why_not_with(saved.plan, asked, self._engine.micro_batches)
        return None if asked in (None, FLUSH) else f"there is no plan, and weight_versions {asked!r} needs one"

    def _adopt_cut_of(self, found: Found, saved: SavedCut, *, whole: bool) -> None:
        """Take over the cut of a checkpoint where this run waits for a plan.

        Args:
            whole: Whether the optimizer's states are to be loaded.
        """
        engine, module = self._engine, self._engine.module
        num_layers, as_many = saved.boundaries[-1], saved.num_ranks == engine.num_stages
        if num_layers != module._num_layers:
            raise PlanMismatchError(
                f"the checkpoint in {found.folder} has {num_layers} layers and this run "
                f"{module._num_layers}: it is of another model"
            )
        same_cut, cut_here = found.is_at_cut_of(module), allocation_in_words(allocation_of(module))
        of_versions = self._why_not_versions_of(saved)
        takes = as_many and self.is_pending and of_versions is None
        if as_many and self.is_pending and not takes:
            announce(f"in the checkpoint {of_versions}; this run makes a plan of its own")
        cut_there = allocation_in_words(saved.allocation)
        if takes and same_cut:
            engine.adopt(Cut("boundaries" if saved.plan is None else "plan", saved.plan, is_of_a_run=True))
        elif takes:
            announce(f"the checkpoint was written at the cut {cut_there}: the layers move to it")
            if saved.plan is None:
                engine.recut(saved.boundaries)
            else:
                engine.recut_to_plan_of_run(saved.plan)
        elif not same_cut:
            there, here = f"{saved.num_ranks} stages", str(engine.num_stages)
            if as_many:
                there, here = f"the cut {cut_there}", cut_here
            if found.layout is None and (whole or not as_many):
                raise PlanMismatchError(
                    f"the checkpoint in {found.folder} has {there} and this run {here}, and it does not say where "
                    f"the optimizer's states lie: start it with {there}"
                )
            where = "are planned for these" if self.is_pending else f"stay cut at {cut_here}"
            announce(f"the checkpoint has {there} and this run {here}: the layers {where}")
