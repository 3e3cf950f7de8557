"""Whether the loss of a batch is that of its micro-batches, weighted, or computed once on all of its outputs.

``loss="auto"`` tries it before the first step: the batch goes forward once, without gradients, and on the last
stage the step runs on all outputs and on those of each micro-batch. Then micro-batches have a loss each where
that gives the loss of the batch. It is tried again

- before a step whose batch could tell two explanations apart that were alike so far, such as the first one with
  padding, or with classes that had always been spread evenly (``losses.py``);
- in a step whose loss has operations that no loss which was tried had, such as a term that begins, or which logs
  or returns a number under a new name, or one that was the same, such as 0, in all micro-batches that were tried,
  so that nothing shows how it is merged: the batch is given up in all pipelines, tried, and trained anew
  (``loss_signs.py``); so it is where a step has changed something that it changes in no batch that was tried;
- before a step for which an attribute of the module, or the epoch, has changed, and before the first one of an
  epoch if the last trial is 64 steps ago;
- before steps 2, 4, 8, ..., 128, and before each 128th from there on, whatever the batches are.

A loss that takes a number of the whole batch to a threshold may be a mean in every batch that is tried and none in
others. Where that is a single number in the graph of the loss, such as ``loss.clamp(max=8)``, a batch whose
micro-batches are not all on one side is given up and tried. Else the loss is computed once from the trial on that
shows such a function, or a branch (``batch_numbers.py``).

Where the pipeline never drains (``weight_versions``) a trial brings it to rest: behind four beside the regular
ones, those for values that no batch had before come at intervals that double. And a batch that shows a sign of
another loss cannot be given up: the next one is tried, before it is trained on. A loss that has to be computed
once is refused there.

A trial costs a forward of the batch, and the loss on it four times. What is looked at in every step are counts of
the values of labels and masks, the operations of the loss, and numbers on the module. So a loss that turns out to
be another one is trained as such from the very step on that shows it; where a regular trial shows what nothing
else has, the sentence says that steps before may have been wrong, and which ones were tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy

from deepspeed_partition.capture.sizes import ShapeError, way_of_sizes
from deepspeed_partition.engine import MadPipeEngine, PipelineModule
from deepspeed_partition.engine.pipeline.plan_engine import LossCost
from deepspeed_partition.engine.runtime.collectives import any_bits, gather_objects
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.engine.runtime.first_failure import met_by_all
from deepspeed_partition.planner.units import counted
from deepspeed_partition.planner.weight_versions import FLUSH
from lightning_madpipe.module import outside_pipeline
from lightning_madpipe.steps.batch_runs import WAY_OUT, BatchRun
from lightning_madpipe.steps.batches import not_by_samples
from lightning_madpipe.steps.list_in_words import some
from lightning_madpipe.steps.logged_sizes import LoggedSizes
from lightning_madpipe.steps.loss_signs import STEPS_BEFORE_AN_EPOCH, Attributes
from lightning_madpipe.steps.losses import (
    SAMPLES,
    SUM,
    Finding,
    Tracked,
    Unknown,
    View,
    Weight,
    best_of,
    class_weights_of,
    error_in_words,
    features_of,
    in_words,
    normalized,
    still_fits,
    values_of,
    views_of,
    weights_of,
)
from lightning_madpipe.steps.step_results import RULES, does_with
from lightning_madpipe.steps.step_runs import draws_in_words
from lightning_madpipe.steps.trials import try_batch
from lightning_madpipe.steps.what_steps_leave import said

LOSSES = ("auto", "mean", "batch")
MOST_STEPS_BETWEEN = 128
RESTS_TOLD_OF = 4
"""Irregular trials of a pipeline that never drains, of which a line tells."""
MOST_NAMED = 6
"""Steps that were tried that a sentence names."""
MEET_AGAIN = (Unknown.MEETS_AGAIN, Unknown.NO_LOSS)
DRAWS_BOTH = (
    "it draws from torch's generator for each sample and once for a batch, and micro-batches could not do both"
)
DECIDED_BY = (
    "training_step leaves {names} as a number of its batch decides in {line}, and runs once per micro-batch, each "
    "of which decides by its own: in batches where these are on two sides, what it leaves is not that of one "
    "process. MadPipeStrategy(loss='batch') runs it once per batch"
)
MEAN_AS_ASKED_FOR = (
    "loss='mean': the loss of a batch is the mean of those of its {number} micro-batches, as asked for. Where the "
    "loss compares samples, or weighs them (contrastive losses, labels of -100), this is another loss than in one "
    "process"
)
FOR_MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory")
SAME = 1e-7
"""Relative difference of the factors that two explanations give."""


@dataclass(kw_only=True)
class LossOfBatches:
    """Decides how the batches of training steps get their loss, alike on all ranks.

    Args:
        option: ``auto``, ``mean`` or ``batch``.
        num_micro_batches: Pieces of a Lightning batch; 1: nothing is to be decided.
        forward: Takes a batch through the pipeline without gradients and without traces; what a layer raised.
        again: The same batch in micro-batches that are not all of one size, or again in those that are trained on.
        refusal: The host's exception with a sentence.
    """

    option: str
    num_micro_batches: int
    module: Any
    pipeline: PipelineModule
    engine: MadPipeEngine
    steps: Any
    forward: Callable[[BatchRun], str | None]
    again: Callable[[BatchRun, bool], BatchRun]
    refusal: Callable[[str], Exception]
    once: bool = False
    """Whether the step runs once for each batch."""
    weight: Weight = SAMPLES
    log_rules: dict[str, str] = field(default_factory=dict)
    logged_sizes: LoggedSizes = field(default_factory=LoggedSizes)
    """What is known of the ``batch_size`` that training steps log with."""
    _fitting: frozenset[Weight] | None = None
    """All weights that have explained every batch that was tried."""
    _considered: frozenset[Weight] = frozenset()
    _tracked: Tracked = field(default_factory=Tracked)
    _num_steps: int = 0
    _last_trial: int = 0
    _tried_steps: list[int] = field(default_factory=list)
    """Those of the steps in which batches were tried; not more than are named."""
    _is_sure: bool = True
    """Whether no step before the trial can have had the loss that it finds."""
    _looked_at: tuple[BatchRun, list[View]] | None = None
    _attributes: Attributes | None = None
    _epoch: int = 0
    _found: Finding | None = None
    _draws_for_batch: bool = False
    """Whether steps draw from torch's generator once for a batch, so that its micro-batches draw alike."""
    _draws_for_samples: bool = False
    _fitting_rules: dict[str, frozenset[str]] = field(default_factory=dict)
    """The rules that gave a logged number of the whole batch in every trial so far, by the name of the number."""
    _means: dict[str, None] = field(default_factory=dict)
    """Metrics that are told a mean of each micro-batch."""
    _told_traces: set[str] = field(default_factory=set)
    """What was told of that micro-batches leave otherwise than a batch."""
    _told_draws: set[str] = field(default_factory=set)
    """The common generators of which it was told that a step draws from them."""
    _num_rests: int = 0
    """Trials for which a pipeline that never drains came to rest, beside the regular ones."""
    _told: set[str] = field(default_factory=set)
    _has_run_whole: bool = False
    """Whether a batch has gone through the layers as one."""

    def prepare(self, window: Sequence[BatchRun]) -> None:
        """Say, before a step, of each of its batches how it gets its loss. Collective over the job."""
        self._num_steps += 1
        flushes = _flushes_of(window)
        if self.num_micro_batches > 1 and self.option != "mean":
            if not self.once:
                # Layers that run out of memory here do so where they are trained, too, and may then be cut
                # anew. If they do not, the loss is one that was not tried, and the batch is given up for that.
                is_last = not self.engine.runs_lists or self._never_drains
                self._try_where_needed(window, flushes, is_last=is_last)
            self._give_losses(window)
        elif self.num_micro_batches > 1:
            self._tell(MEAN_AS_ASKED_FOR.format(number=self.num_micro_batches), key="mean")
        self.engine.flushes = flushes if self.once else None
        self._watch()

    def look_again(self, window: Sequence[BatchRun]) -> None:
        """Try the batches of a step that was given up for a sign of another loss. Collective over the job."""
        flushes, self._is_sure = _flushes_of(window), True
        wanted = [any(micro_batch.is_untried for micro_batch in run.micro_batches) for run in window]
        for micro_batch in (each for run in window for each in run.micro_batches):
            micro_batch.is_untried = False
        self._try_those(window, flushes, self._on_any(wanted), is_last=True)
        self._give_losses(window)
        self.engine.flushes = flushes if self.once else None
        self._watch()

    def _watch(self) -> None:
        # Where DeepSpeed's own schedule runs, a batch that has begun cannot be given up.
        may_be_tried = self.option == "auto" and self.num_micro_batches > 1 and not self.once
        self.steps.watches = may_be_tried and self.engine.runs_lists
        self.steps.gives_up = not self._never_drains

    @property
    def _never_drains(self) -> bool:
        """Whether a batch that has begun cannot be given up, because others are in flight beside it."""
        return self.engine.weight_versions != FLUSH

    def _give_losses(self, window: Sequence[BatchRun]) -> None:
        is_by_classes = self.weight[0] == "class weights" and not self.once
        known = class_weights_of(outside_pipeline(self.module)) if is_by_classes else {}
        self.steps.class_weights.in_use = known.get(str(self.weight[-1]))
        for run in window:
            self._give_loss(run)
        self._looked_at = None  # it holds a batch

    def _give_loss(self, run: BatchRun) -> None:
        run.runs_once = self.once
        for micro_batch in run.micro_batches:
            micro_batch.draws_alike = self._draws_for_batch
        if self.once or self.weight == SAMPLES or not self.engine.is_last_stage():
            return
        values = values_of(self.weight, self._weights(run))
        factors = None if values is None else normalized(values, self.weight)
        for place, micro_batch in enumerate(run.micro_batches):
            # A batch without anything that counts has no loss in one process either: NaN.
            micro_batch.share = None if factors is None else float(factors[place])

    # Trials

    def _try_where_needed(self, window: Sequence[BatchRun], flushes: tuple[int, ...], *, is_last: bool) -> None:
        if self.option == "batch":
            for finding in self._try(window[0], compares=False):
                if finding.unknown is Unknown.NOT_JOINED:  # micro-batches of one size might hide it
                    raise self.refusal(f"{window[0].whole.step}: {finding.why_unknown}: {WAY_OUT}")
            self._switch(flushes, "")
            return
        differing = [self._may_differ(run) for run in window]
        has_changed = self._module_has_changed() or self.steps.has_seen_sign
        self.steps.has_seen_sign = False
        # Where nothing is explained yet, as by a batch without a gradient, each may be the one that shows it.
        untried = [self._fitting is None and len(run.micro_batches) > 1 for run in window]
        due = [has_changed or self._is_due() or untried[0], *untried[1:]]
        found = self._on_any([*differing, *due])
        has_waited = self._never_drains and self._num_rests >= RESTS_TOLD_OF
        self._is_sure = self._fitting is None or not (found[len(window)] or has_waited)
        wanted = [any(both) for both in zip(found[: len(window)], found[len(window) :], strict=True)]
        if self._never_drains and any(wanted) and not self._is_due():
            self._num_rests += 1
            if self._num_rests == RESTS_TOLD_OF:
                announce(
                    f"the loss has been tried in {self._num_rests} of {self._num_steps} steps beside those in "
                    "which it is anyway, because batches differ in values of labels or the module has changed; "
                    "the pipeline drains for each. From here on batches that differ in values alone are tried "
                    "less and less often; loss='mean' leaves all of it out, if the loss is a mean over samples"
                )
        self._try_those(window, flushes, wanted, is_last=is_last)

    def _try_those(
        self, window: Sequence[BatchRun], flushes: tuple[int, ...], wanted: Sequence[bool], *, is_last: bool
    ) -> None:
        for run, wants in zip(window, wanted, strict=True):
            if wants and not self.once:
                self._decide(flushes, self._try(run, compares=True), is_last=is_last)
                self._last_trial = self._num_steps
                if self._num_steps not in self._tried_steps[-1:]:
                    self._tried_steps = [*self._tried_steps, self._num_steps][-MOST_NAMED - 1 :]

    def _is_due(self) -> bool:
        number = self._num_steps
        return number & (number - 1) == 0 if number < MOST_STEPS_BETWEEN else number % MOST_STEPS_BETWEEN == 0

    def _module_has_changed(self) -> bool:
        if self._attributes is None:
            self._attributes, self._epoch = self.steps.attributes(), self.module.current_epoch
        is_long_ago = self._num_steps - self._last_trial >= STEPS_BEFORE_AN_EPOCH
        begins, self._epoch = self.module.current_epoch != self._epoch, self.module.current_epoch
        return self._attributes.have_changed() or (begins and is_long_ago)

    def _may_differ(self, run: BatchRun) -> bool:
        """Whether this batch could tell apart what was alike so far. Only the last stage looks."""
        if not self.engine.is_last_stage() or self._fitting is None or len(run.micro_batches) == 1:
            return False
        weights = self._weights(run)
        own = values_of(self.weight, weights)
        if own is None:  # a batch of another kind
            return True
        factors = normalized(own, self.weight)
        if factors is None:
            return False
        for other in self._fitting:
            given = values_of(other, weights)
            theirs = None if given is None else normalized(given, other)
            if theirs is None or numpy.any(numpy.abs(theirs - factors) > SAME * numpy.abs(factors).max()):
                return True
        return not self._waits and self._tracked.is_new(self._features(run), own)

    @property
    def _waits(self) -> bool:
        """Whether it is too early to try a batch that differs from those before in its values alone.

        Of labels with many values, such as words, each batch does, and in a pipeline that never drains each trial
        costs a drain. So behind the fourth irregular trial that has shown nothing the steps between two double.
        """
        more = self._num_rests - RESTS_TOLD_OF
        since = self._num_steps - self._last_trial
        return self._never_drains and more >= 0 and since < min(MOST_STEPS_BETWEEN, 2 ** (more + 1))

    def _weights(self, run: BatchRun) -> dict[Weight, Any]:
        return weights_of(self._views(run), run.sizes, class_weights_of(outside_pipeline(self.module)))

    def _features(self, run: BatchRun) -> dict[Weight, Any]:
        return features_of(self._views(run), run.sizes)

    def _views(self, run: BatchRun) -> list[View]:
        if self._looked_at is None or self._looked_at[0] is not run:
            self._looked_at = run, views_of([micro_batch.data for micro_batch in run.micro_batches])
        return self._looked_at[1]

    def _try(self, run: BatchRun, *, compares: bool) -> list[Finding]:
        """Try a batch; return on all ranks what the last stage of each pipeline finds."""
        trial = self.again(run, True)
        trial.runs_once, trial.trained_as = True, run.micro_batches
        self._found = None

        def ask(tried: BatchRun, is_tuple: bool) -> None:
            self._found = try_batch(self.steps, self.module, tried, is_tuple, compares=compares)

        trial.asks = ask
        self._learn_dims(run, trial)
        reason = self.forward(trial)
        if reason is not None:
            self.steps.forget_whole()
            self._refuse_sizes(run, trial, reason)
            return [Finding(unknown=Unknown.MEETS_AGAIN, why_unknown=reason)]
        if self._found is not None:
            self._keep(run, trial, self._found)
        findings = self._from_every_pipeline(self._found)
        self.engine.loss_cost = LossCost(
            forward_seconds=findings[0].loss_seconds[0],
            backward_seconds=findings[0].loss_seconds[1],
            peak_bytes=findings[0].loss_bytes,
        )
        return findings

    def _learn_dims(self, run: BatchRun, trial: BatchRun) -> None:
        """See on the batch as one which dimension of outputs grows with the samples. Collective.

        Where batches are small, micro-batches that are tried are all of one size, and do not show it.
        """
        is_of_one_size = len(trial.sizes) > 1 and len(set(trial.sizes)) == 1
        unknown = self.engine.is_last_stage() and not self.steps.knows_dims(run.whole.step)
        if self._has_run_whole or not self._on_any([is_of_one_size and unknown])[0]:
            return
        self._has_run_whole = True
        whole = BatchRun([replace(run.whole)], run.whole, run.tensors)
        whole.runs_once, whole.asks = True, lambda run, _: self.steps.note_whole(run)
        self.forward(whole)  # where it fails, they are guessed

    def _refuse_sizes(self, run: BatchRun, trial: BatchRun, reason: str) -> None:
        """Refuse layers that can run the micro-batches of a batch, and not those of other sizes. Collective.

        They take something for the samples' that is not, or the other way round, so that nothing is known of the
        loss. What fails for any sizes comes again where it is told.
        """
        if len(run.micro_batches) == 1 or any(each in reason for each in FOR_MEMORY):
            return
        same, whole = self.again(run, False), BatchRun([replace(run.whole)], run.whole, run.tensors)
        for other in (same, whole):
            other.runs_once, other.asks = True, lambda *_: None
        if self.forward(same) is None:
            told = cut_in_words(run.whole.size, run.sizes, trial.sizes)
        elif self.forward(whole) is None:
            told = f"a batch of {run.whole.size} can be run, and its micro-batches of {_sizes(run.sizes)} cannot"
        else:
            return
        if reason.startswith(ShapeError.__name__):
            raise self.refusal(
                f"{told}: {way_of_sizes(reason)}. MadPipeStrategy(num_micro_batches=1) cuts no batch (with"
                " drop_last=True in the loader, where the last one is shorter)"
            )
        raise self.refusal(
            f"{told} ({reason}), so something that {run.whole.step} or a layer is given does not go by samples, "
            f"or is kept from another micro-batch: {not_by_samples(run.whole.size)}"
        )

    def _keep(self, run: BatchRun, trial: BatchRun, finding: Finding) -> None:
        """Keep what the batch has shown, on the last stage.

        A trial cuts the batch otherwise than it is trained on. Where it shows nothing new, the same batch would
        show nothing new again: in an epoch of the same batches in the same order each would be tried for ever.
        """
        weight = self.weight if self.weight in finding.fitting else best_of(finding.fitting)
        if weight is None:
            return
        features, own = self._features(trial), self._weights(trial)[weight]
        if self._tracked.is_new(features, own):
            self._tracked.add(features, own)
        elif len(run.micro_batches) > 1:
            self._tracked.add(self._features(run), self._weights(run)[weight])

    def _decide(self, flushes: tuple[int, ...], findings: Sequence[Finding], *, is_last: bool) -> None:
        """Decide from what all pipelines found, the same on every rank. Collective.

        Args:
            is_last: Whether the batch is not tried again before it is trained on.

        Raises:
            Exception: what the step raises for the whole batch, where it does not raise the same for its parts.
        """
        raised = next((finding.raised for finding in findings if finding.raised is not None), None)
        if raised is not None:
            raise met_by_all(raised)
        error = max(
            (finding.relative_error for finding in findings if finding.relative_error is not None), default=None
        )
        drawn_from = {name for finding in findings for name in finding.drawn_from}
        if not drawn_from <= self._told_draws:
            self._told_draws |= drawn_from
            announce(draws_in_words("training_step", drawn_from))
        why_not = next((finding.why_not for finding in findings if finding.why_not), None)
        if why_not is not None:
            off = "" if error is None else f"the mean over its micro-batches is {error_in_words(error)}: "
            self._switch(flushes, off + why_not)
            return
        self._draws_for_batch |= any(finding.draws_for_batch for finding in findings)
        self._draws_for_samples |= any(finding.draws_for_samples for finding in findings)
        if self._draws_for_batch and self._draws_for_samples:
            self._switch(flushes, DRAWS_BOTH)
            return
        explained = [finding for finding in findings if finding.factors is not None]
        if not explained:
            self._go_on_without(flushes, next((each for each in findings if each.unknown), None), is_last)
            return
        fitting = self._explaining_all(explained)
        weight = best_of(fitting)
        if weight is None:
            self._switch(flushes, "no weight of micro-batches explains all batches so far")
            return
        since = f" from step {self._num_steps} on" if self._fitting is not None else ""
        if weight != self.weight and not (self._fitting is None and weight == SAMPLES):
            self._tell(
                "the loss of training_step is no mean over samples (the mean over its micro-batches is "
                f"{error_in_words(error)}): micro-batches are {in_words(weight)}{since}"
            )
        self._fitting, self.weight = fitting, weight
        self.steps.bends = self.steps.bends.union(*(finding.bends for finding in findings))
        may_not = next((finding.may_not for finding in findings if finding.may_not), None)
        if self.steps.bends and not self.engine.runs_lists:  # a batch that is bent cannot be given up
            may_not = may_not or f"{' and '.join(sorted(self.steps.bends))} of a number of the whole batch"
        if may_not is not None:
            self._switch_if_possible(flushes, may_not)
            if self.once:
                return
        of = "the first" if self._num_steps == 1 else "a"
        for finding in findings:
            self._means.update(dict.fromkeys(finding.means))
            self.steps.told_metrics.means = self._means
            new = [words for name, words in finding.traces if name not in self._told_traces]
            self._told_traces.update(name for name, _ in finding.traces)
            if new:
                announce(said(new, self._num_steps))
            for line, names in _by_line(finding.left_by, self._told_traces).items():
                self._tell(DECIDED_BY.format(line=line, names=some(names)))
            self._told_traces.update(finding.left_by)
            self._note_rules(finding)
            self.logged_sizes.learn(finding.constant_sizes, finding.counted_sizes)
            for name, joined, whole in finding.wrong_results:
                self._tell(
                    f"training_step returns {name}, which is {whole:.6g} for a batch and {joined:.6g} as joined "
                    "from its micro-batches, which is what hooks are given: MadPipeStrategy(loss='batch') runs "
                    "the step once per batch",
                    key=f"returned {name}",
                )
            for name, merged, whole, rule in finding.wrong_logs:
                self._tell(
                    f"training_step logs {name!r}, which is {whole:.6g} for {of} batch and {merged:.6g} as "
                    f"the {rule} of its micro-batches, which is what you will see: MadPipeStrategy(loss='batch') "
                    "runs the step once per batch",
                    key=name,
                )

    def _note_rules(self, finding: Finding) -> None:
        """Note how logged numbers are merged, and for which of them no batch has shown it."""
        for name, fitting in finding.log_rules.items():
            both = self._fitting_rules.get(name, fitting) & fitting
            self._fitting_rules[name] = both or fitting
            if fitting and not both:
                self._tell(
                    f"training_step {does_with(name)}, which no mean, weighted mean or sum of micro-batches gives "
                    f"in each batch that was tried: from step {self._num_steps} on it is merged as fits this one. "
                    "MadPipeStrategy(loss='batch') runs the step once per batch",
                    key=name,
                )
        for name, fitting in self._fitting_rules.items():
            self.log_rules[name] = next((rule for rule in RULES if rule in fitting), RULES[0])
        # Micro-batches with the weights of samples, or with none, have no other ones by their losses.
        same = {"loss"} if self.weight in (SAMPLES, SUM) else set()
        unlike = {name: fitting - same for name, fitting in self._fitting_rules.items()}
        self.steps.unsettled = {name: fitting for name, fitting in unlike.items() if len(fitting) > 1}

    def _go_on_without(self, flushes: tuple[int, ...], finding: Finding | None, is_last: bool) -> None:
        """Decide where a trial has shown nothing. Collective.

        Raises:
            Exception: the host's; nobody knows whether micro-batches would train the loss of the batch.
        """
        if finding is None:  # there is one micro-batch
            return
        if self._fitting is not None:
            if finding.unknown in MEET_AGAIN and is_last:
                return
            self._tell(
                f"the loss of a batch could not be tried again in step {self._num_steps} ({finding.why_unknown}): "
                f"micro-batches are {in_words(self.weight)}, as since the last trial",
                key="not tried again",
            )
        elif finding.unknown is Unknown.NOT_FINITE:
            self._switch(flushes, f"for this batch {finding.why_unknown}")
        elif finding.unknown is Unknown.NO_LOSS and is_last:
            raise self.refusal(finding.why_unknown or "training_step returns no loss")
        elif finding.unknown is Unknown.NOT_JOINED:
            raise self.refusal(f"training_step: {finding.why_unknown}: {WAY_OUT}")
        elif finding.unknown is Unknown.NO_TRIAL or (finding.unknown is Unknown.MEETS_AGAIN and is_last):
            raise self.refusal(
                "it is not known whether the loss of a batch is the mean of the losses of its micro-batches: its "
                f"trial before the first step failed ({finding.why_unknown}). If it is that mean, weighted by "
                "samples, write MadPipeStrategy(loss='mean'); else num_micro_batches=1 gives the loss of the batch"
            )
        elif finding.unknown in MEET_AGAIN:
            self.steps.forget_trials()  # if the step does not fail, it is given up and tried once more

    def _explaining_all(self, findings: Sequence[Finding]) -> frozenset[Weight]:
        """The weights that explain these batches and all before."""
        every = frozenset[Weight]().union(self._fitting or (), *(finding.fitting for finding in findings))
        for finding in findings:
            every = frozenset(
                weight for weight in every if still_fits(weight, finding.fitting, finding.considered)
            )
        if self._fitting is not None:
            every = frozenset(weight for weight in every if still_fits(weight, self._fitting, self._considered))
        self._considered = self._considered.union(*(finding.considered for finding in findings))
        return every

    def _switch(self, flushes: tuple[int, ...], why: str) -> None:
        """Run the step once per batch from now on."""
        since = self._since() if why and self._num_steps > 1 else ""
        if self._never_drains:
            mode = self.engine.weight_versions
            raise self.refusal(
                f"the loss of training_step is no mean over samples ({why}){since}, so it would be computed once "
                f"on all outputs of each batch, for which the pipeline drains, and weight_versions {mode!r} never "
                "does: loss='mean' takes the mean over micro-batches instead; or leave weight_versions out"
            )
        self.once = True
        try:
            self.engine.take_losses_of_batches(flushes)
        except ValueError as error:
            raise self.refusal(f"the loss of training_step is to be computed once per batch: {error}") from None
        if why:
            announce(
                f"the loss of training_step is no mean over samples ({why}), so it is computed once on all "
                f"outputs of each batch{since}: the {counted(self.num_micro_batches, 'forward')} of a batch come "
                "before its first backward, and plans count on that; loss='mean' takes the mean instead"
            )

    def _switch_if_possible(self, flushes: tuple[int, ...], why: str) -> None:
        """Run the step once per batch from now on, for a loss that may be no mean of other batches."""
        sentence = f"the loss of training_step may be no mean over samples in each batch ({why})"
        try:
            if self._never_drains:
                raise ValueError(f"weight_versions {self.engine.weight_versions!r} never drains")
            self.engine.take_losses_of_batches(flushes)
        except ValueError as error:
            self._tell(
                f"{sentence}, and is not computed once on all outputs of each batch, because {error}: "
                f"micro-batches are {in_words(self.weight)}",
                key="may be none",
            )
            return
        self.once = True
        since = f" from step {self._num_steps} on" if self._num_steps > 1 else ""
        announce(
            f"{sentence}, so it is computed once on all outputs of each batch{since}: the "
            f"{counted(self.num_micro_batches, 'forward')} of a batch come before its first backward, and plans "
            "count on that; loss='mean' takes the mean instead"
        )

    def _since(self) -> str:
        """Since when a batch has the loss that was found, in words, and what is not known of those before."""
        since = f" from step {self._num_steps} on"
        if self._is_sure:
            return since
        # A loss that comes and goes, as by a threshold, may have been another one before a trial that fitted, too.
        tried = [str(step) for step in self._tried_steps if step < self._num_steps]
        if len(tried) == self._num_steps - 1:
            return since
        named = ", ".join(["..."] * (len(tried) > MOST_NAMED) + tried[-MOST_NAMED:])
        return f"{since}; steps before that were not tried may have had another loss (tried: {named})"

    def _tell(self, sentence: str, key: str | None = None) -> None:
        if (key or sentence) not in self._told:
            self._told.add(key or sentence)
            announce(sentence)

    # Between ranks

    def _on_any(self, wanted: Sequence[bool]) -> list[bool]:
        """Return what holds on any rank. Collective."""
        return [bool(flag) for flag in any_bits([int(each) for each in wanted])]

    def _from_every_pipeline(self, found: Finding | None) -> list[Finding]:
        return [finding for finding in gather_objects(found) if finding is not None]


def _by_line(left_by: Mapping[str, str], told: Collection[str]) -> dict[str, list[str]]:
    """The names of what steps leave, but for those that were told of, by the line that decides."""
    found: dict[str, list[str]] = {}
    for name, line in left_by.items():
        if name not in told:
            found.setdefault(line, []).append(name)
    return found


def cut_in_words(size: int, sizes: Sequence[int], others: Sequence[int]) -> str:
    """Say that a batch can be run in micro-batches of ``sizes``, and not in those of ``others``."""
    only = set(others) - set(sizes) or set(others)
    return (
        f"a batch of {size} can be run in micro-batches of {_sizes(sizes)}, and not where one of them has "
        f"{_sizes(sorted(only))}"
    )


def _sizes(sizes: Sequence[int]) -> str:
    return f"{' or '.join(map(str, sorted(set(sizes))))} sample{'s' * (set(sizes) != {1})}"


def _flushes_of(window: Sequence[BatchRun]) -> tuple[int, ...]:
    return tuple(len(run.micro_batches) for run in window)
