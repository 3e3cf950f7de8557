"""The loss of a batch on a pipeline is that of one process, whatever the loss is."""

from __future__ import annotations

import copy
import math
import re
from array import array
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LambdaCallback
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_partition.raw_states import RawState
from lightning_madpipe.steps import left_alike, loss_signs
from lightning_madpipe.steps.batch_runs import (
    BatchRun,
    SamplesSelectedError,
    cut_inputs,
    dims_by_whole,
    dims_of_outputs,
)
from lightning_madpipe.steps.batches import fingerprint_of, split_batch
from lightning_madpipe.steps.loss_signs import (
    Attributes,
    ClassWeights,
    LossGraph,
    Operations,
    UntriedLossError,
    are_in_proportion,
    graph_of,
    read_operations,
)
from lightning_madpipe.steps.losses import (
    MOST_EXTREMES,
    SAMPLES,
    SUM,
    Tracked,
    error_in_words,
    features_of,
    fits,
    shared_gradients_fit,
    views_of,
    weights_of,
)
from lightning_madpipe.steps.micro_batches import MicroBatch
from lightning_madpipe.steps.step_side_effects import Change, Place
from lightning_madpipe.steps.trials import _logs, _passes_rows, _results
from lightning_madpipe.steps.user_step import UserSteps
from lightning_madpipe.steps.what_steps_leave import StepTraces, Trace, differences, numbers_of
from tests.lightning.test_lightning_pipeline import Records, assert_same, records_of


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    return records_of(request, 2, tmp_path_factory.mktemp("two"), "losses")


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    return records_of(request, 4, tmp_path_factory.mktemp("four"), "losses")


LABELS = ["labels", "batch['labels']", "[:, 1:]", -100]
FOUND: dict[str, tuple[bool, list[Any]]] = {
    "padded": (False, LABELS),
    "padded later": (False, LABELS),
    "masked": (False, LABELS),
    "padding as label": (False, ["labels", "batch['input_ids']", "[:, 1:]", 0]),
    "class weights": (False, ["class weights", "batch[1]", "", "self.criterion.weight"]),
    "hidden weights": (True, ["samples"]),
    "other class weights": (True, ["samples"]),
    "contrastive": (True, ["samples"]),
    "summed": (False, ["sum"]),
    "towers": (True, ["samples"]),
    "accumulated towers": (True, ["samples"]),
    "scaled by a weight": (True, ["samples"]),
    "scaled mean": (False, ["samples"]),
    "scaled mean, whole": (False, ["samples"]),
    "weighed": (False, ["samples"]),
    "weighed, whole": (False, ["samples"]),
    "weighed, mean": (False, ["samples"]),
    "weighed, in twos": (False, ["samples"]),
    "weighed, in fours": (False, ["samples"]),
    "weighed sums": (True, ["samples"]),
    "auxiliary, whole": (False, ["samples"]),
    "complex": (False, ["samples"]),
    "complex, of a batch": (True, ["samples"]),
    "divided": (False, ["samples"]),
    "statistics": (True, ["samples"]),
    "time first": (True, ["samples"]),
    "time first, moved": (True, ["samples"]),
    "accumulated": (True, ["samples"]),
    "accumulated padded": (False, LABELS),
    "asked for": (True, ["samples"]),
    "warmed up": (True, ["samples"]),
    "warmed up padded": (False, LABELS),
    "given up": (True, ["samples"]),
    "clipped": (True, ["samples"]),
    "missing later": (False, ["labels", "batch[1]", "", "NaN"]),
    "padding later": (False, ["labels", "batch[0]", "", 0.0]),
    "changing": (True, ["samples"]),
    "changing in warm-up": (True, ["samples"]),
    "accumulated changing": (True, ["samples"]),
    "accumulated flips": (True, ["samples"]),
    "switched on": (True, ["samples"]),
    "begun": (True, ["samples"]),
    "begun elsewhere": (True, ["samples"]),
    "clamped": (True, ["samples"]),
    "flooded": (True, ["samples"]),
    "hinged": (True, ["samples"]),
    "on both sides": (True, ["samples"]),
    "of features": (True, ["samples"]),
    "by counts": (True, ["samples"]),
    "easy": (True, ["samples"]),
    "scaled inputs": (True, ["samples"]),
    "hardest later": (True, ["samples"]),
    "cools in step 3": (True, ["samples"]),
    "masks in step 3": (True, ["samples"]),
    "inputs in step 3": (True, ["samples"]),
    "labels in step 3": (True, ["samples"]),
    "weights in step 3": (True, ["samples"]),
    "shifted in step 3": (True, ["samples"]),
    "numbers in step 3": (True, ["samples"]),
    "factors in step 3": (True, ["samples"]),
    "samples in step 3": (True, ["samples"]),
    "named late": (False, ["samples"]),
    "returned counts": (False, ["samples"]),
    "logged late": (False, LABELS),
    "in place": (False, ["samples"]),
    "in place contrastive": (True, ["samples"]),
    "seeded": (True, ["samples"]),
    "own generator": (True, ["samples"]),
    "drawing": (False, ["samples"]),
    "accumulated drawing": (False, ["samples"]),
    "drawing for samples": (True, ["samples"]),
    "cut to the longest": (True, ["samples"]),
    "gradient later": (True, ["samples"]),
    "infinite at first": (True, ["samples"]),
}
"""Whether the step runs once per batch, and else how micro-batches are weighted."""


@pytest.mark.parametrize("case", FOUND)
def test_a_loss_trains_as_in_one_process(two: Records, case: str) -> None:
    """Each step's loss, what is logged and the weights in the end, and the loss of validation."""
    record, reference = two.of("losses")[case], two.reference["losses"][case]
    found, actual, expected = record["found"], copy.deepcopy(record["record"]), copy.deepcopy(reference["record"])
    assert (found["once"], found["weight"]) == FOUND[case]
    assert not any("could not be tried" in each for each in found["said"])
    if case == "masked":  # a number that is no mean of micro-batches', which is said
        [said] = [each for each in found["said"] if "training_step logs 'perplexity'" in each]
        assert "loss='batch'" in said
        assert abs(actual["metrics"].pop("perplexity") / expected["metrics"].pop("perplexity") - 1) > 1e-3
    if case == "named late":  # once silent, for the trial of the first batch had not seen them
        [logged] = [each for each in found["said"] if "training_step logs 'largest'" in each]
        [returned] = [each for each in found["said"] if "training_step returns ['extremes'][0]" in each]
        assert all("loss='batch'" in each for each in (logged, returned))
        assert actual["metrics"].pop("largest") != expected["metrics"].pop("largest")
    if case == "returned counts":
        assert not any("training_step returns" in each for each in found["said"])
    assert_same(actual, expected)
    said = [each for each in found["said"] if re.search("the loss of training_step (is|may be) no mean", each)]
    if case in ("of features", "by counts"):  # from the first step on
        assert "may be no mean over samples in each batch" in said[0] and "from step" not in said[0]
    assert len(said) == (FOUND[case] != (False, ["samples"]) and case != "asked for")
    if case in ("cools in step 3", "masks in step 3"):  # in silence, with other weights from step 3 on
        assert "from step 3 on:" in said[0]
    if case == "hardest later":  # it ended in "selected index k out of range"
        assert "for a part of it, it raises" in said[0] and "from step 5 on:" in said[0]
    # Any order of one micro-batch has all forwards before the first backward.
    if found["flushed"] is not None and not case.startswith("accumulated") and not case.endswith(", whole"):
        assert found["flushed"] == found["once"], "the plan is made for that order"


def test_what_is_found_late_is_said(two: Records) -> None:
    """A plan is made anew where the loss becomes another one; draws for each sample are no reason."""
    found = two.of("turned")
    for case, since in (
        (
            "rising",
            "from step 8 on; steps before that were not tried may have had another loss (tried: 1, 2, 4, 5):",
        ),
        ("changing", "from step 6 on:"),
    ):
        assert found[case]["once"] and found[case]["flushed"]
        [said] = [each for each in found[case]["said"] if "no mean over samples" in each]
        assert since in said
        assert any("made again" in each for each in found[case]["said"])
    assert not found["denoising"]["once"] and found["denoising"]["weight"] == ["samples"]
    assert found["mix-up"]["once"]
    [stops] = [each for each in found["stopping"]["said"] if "sets trainer.should_stop for some" in each]
    assert "loss='batch'" in stops and found["stopping"]["steps"] == 2
    assert not found["mean"]["once"] and not any("no mean" in each for each in found["mean"]["said"])
    [logs] = [each for each in found["roots"]["said"] if "training_step logs" in each]
    assert "'root'" in logs and not found["roots"]["once"]


def test_a_mean_that_is_asked_for_is_said(two: Records) -> None:
    """A refusal named it as the way out; CLIP trained 1.16 instead of 4.62, and nothing was said of it."""
    said = {
        name: [each for each in run["said"] if "loss compares samples" in each]
        for name, run in two.of("means").items()
    }
    assert {name: len(lines) for name, lines in said.items()} == {"towers": 1, "auto": 0}


def test_forwards_that_try_a_loss_draw_nothing(two: Records) -> None:
    """They moved the generators that layers draw from where they draw in evaluation, too."""
    found = two.of("noisy")
    assert found["auto"] == found["mean"]


def test_micro_batches_draw_alike_what_is_drawn_for_a_batch(two: Records) -> None:
    """Each took the branch that its own numbers said, so that a step was neither of the two."""
    found = two.of("turned")["drawn for a batch"]
    assert not found["once"] and found["weight"] == ["samples"]
    assert [found["drawn"][place] for place in (0, 4)] == [found["drawn"][place] for place in (3, 7)]
    assert len({str(each) for each in found["drawn"]}) == 2, "two batches"
    [said] = [each for each in found["said"] if "common random generators" in each]
    assert "(numpy.random, random, torch)" in said and "self.rng = random.Random(0)" in said
    # Steps that are not tried drew other numbers in silence.
    said = [each for each in two.of("turned")["drawn untried"]["said"] if "draws from" in each]
    trained, validated = said
    assert trained.startswith("training_step draws from the common random generators (random): ")
    assert validated.startswith("validation_step draws from the common random generators (torch): ")
    both = two.of("turned")["drawn for both"]
    assert both["once"] and len(both["drawn"]) == 2


def test_rounding_by_a_gpu_is_no_comparison_of_samples(two: Records) -> None:
    """Where products and convolutions round to TF32, a loss was said to compare samples: it ran once a batch."""
    found = two.of("turned")["perceptual"]
    assert not found["once"] and found["weight"] == ["samples"]


def test_inputs_may_differ_by_rounding() -> None:
    """A product of another number of rows, as of mel filters on a GPU, need not be the same to the last bit."""
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

    def passes(of_parts: torch.Tensor, whole: torch.Tensor = rows) -> bool:
        pieces: Any = [SimpleNamespace(passed=(of_parts[:5],)), SimpleNamespace(passed=(of_parts[5:],))]
        return _passes_rows(cast(Any, SimpleNamespace(passed=(whole,))), pieces, [5, 3])

    assert passes(rows) and passes(rows * (1 + 1e-6)) and passes(rows.bfloat16(), rows.bfloat16())
    assert not passes(rows - rows.mean()) and not passes(rows * (1 + 1e-4)) and not passes(rows.double())
    assert not passes((rows * 1.01).bfloat16(), rows.bfloat16()), "as a statistic of the batch may make them"
    assert not passes(torch.arange(8), torch.arange(1, 9))
    # A time in seconds, beside which all else is small.
    centered = torch.cat((rows[:5] - rows[:5].mean(), rows[5:] - rows[5:].mean()))
    timed = [torch.cat((torch.full((8, 1), 1.7e9), each), 1) for each in (centered, rows - rows.mean())]
    assert not passes(*timed)
    # Marks of what is missing, and a place that is near zero in the few samples of a micro-batch.
    missing = rows.masked_fill(rows > 1, float("nan")).masked_fill(rows < -1, -math.inf)
    assert passes(missing, missing) and passes(missing * (1 + 1e-6), missing)
    assert not passes(missing * (1 + 1e-4), missing) and not passes(missing, rows)
    wide = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    assert passes(wide + 1e-6, wide) and not passes(wide - wide.mean(0), wide)


def test_what_micro_batches_leave_otherwise_on_the_module_is_said_once(two: Records) -> None:
    """Predictions and labels that are joined, and a mean of losses, are what one process leaves."""
    [said] = [each for each in two.of("turned")["collecting"]["said"] if "once per micro-batch" in each]
    assert "self.losses gets 4 entries instead of 1; self.num_steps is 4 instead of 1" in said
    assert "; and 1 more: " in said  # self.features, which nobody joins
    assert "self.highest (MaxMetric) is" in said and "self.all (CatMetric) has 4 values instead of 1" in said
    assert not any(name in said for name in ("outputs", "names", "MeanMetric", "accuracy"))
    assert "loss='batch'" in said and not two.of("turned")["collecting"]["once"]


def test_what_steps_do_that_are_not_tried_is_told(two: Records) -> None:
    """Step 3 kept and counted four times, and drew other numbers than one process, in silence."""
    said = two.of("turned")["keeping in step 3"]["said"]
    [first, third] = [each for each in said if "once per micro-batch, so that" in each]
    assert "for the first batch self.last has 3 values instead of 1: " in first
    assert "for a batch of step 3 self.kept gets 4 entries instead of 1; self.count is 4 instead of 1: " in third
    [drawn] = [each for each in said if "draws from" in each]
    assert drawn.startswith("training_step draws from the common random generators (torch): ")


def test_what_a_trial_shows_alike_is_told_where_it_differs(two: Records) -> None:
    """In step 1 a count was that of one process, and in step 7 it was 5 instead of 2, in silence."""
    said = two.of("turned")["counting marked"]["said"]
    [told] = [each for each in said if "once per micro-batch, so that" in each]
    assert "for a batch of step 7 self.count is 5 instead of 2: " in told
    assert "self.rate" not in told and not two.of("turned")["counting marked"]["once"]


def test_tensors_that_a_trial_shows_alike_are_told_where_they_differ(two: Records) -> None:
    """Of a count in a tensor, in a buffer and in a dict nothing was said where a number was told."""
    said = two.of("turned")["marking tensors"]["said"]
    [told] = [each for each in said if "once per micro-batch, so that" in each]
    for name in ("self.count", "self.total", "self.of['marked']"):
        assert f"{name} " in told, told
    assert "for a batch of step 7 " in told and "self.rate" not in told
    assert not two.of("turned")["marking tensors"]["once"]


KEPT = Place("", "attribute", "kept")


def test_large_values_that_micro_batches_go_on_changing_are_seen() -> None:
    """Tensors of more than 256 numbers, arrays and longer lists were not looked at."""
    for value in (torch.zeros(1000), numpy.zeros(1000), list(range(900))):
        change = Change(KEPT, "refill", value)
        before = left_alike.shown(change)
        assert left_alike.is_followed(change) and not left_alike.go_on(before, left_alike.shown(change))
        change.value[7] = 1
        assert left_alike.go_on(before, left_alike.shown(change))
    large = Change(KEPT, "refill", torch.empty(5 << 20))
    assert left_alike.is_too_large(large) and not left_alike.is_followed(large)


def test_a_list_that_gains_another_share_gives_its_batch_up() -> None:
    """Nothing was looked at where trials showed it alike. After four batches that are tried a line says so."""
    module: Any = pl.LightningModule()
    module.kept = []
    steps = UserSteps(module, "forward")
    tried = [Change(KEPT, "extend", [torch.zeros(8)])]
    steps.untried("training_step", tried)
    steps.note_left(tried, (), {"self.kept": 8}, 4)

    def run(*numbers: int) -> None:
        steps.before_batch = steps.leftovers(may_be_undone=True)
        for place, number in enumerate(numbers):
            module.kept.append(torch.zeros(number))
            known: dict[str, Any] = {"step": "training_step", "arguments": (), "batch_seed": 0, "seed": 0}
            last = place == len(numbers) - 1
            steps._check_changes(MicroBatch(data=None, size=2, place=place, is_last=last, **known))

    run(4, 4)
    for _ in range(4):
        with pytest.raises(UntriedLossError):
            run(4, 2)
    with pytest.warns(UserWarning, match="4 times training_step has left self.kept as no tried batch had"):
        run(4, 2)


def test_what_the_cut_that_is_trained_leaves_is_told() -> None:
    """The cut of the trial left what the batch leaves, by chance, and the other cut did not, in silence."""
    traces: Any = SimpleNamespace(is_told_again=lambda *_: False, is_joined=lambda _: True)
    one, two = {"": torch.ones(2)}, {"": torch.ones(3)}
    whole, pieces, trained = ({"self.kept": Trace(*each)} for each in ((1, one), (4, one), (4, two)))
    assert differences(traces, whole, pieces, trained) == [("self.kept", "self.kept gets 4 entries instead of 1")]


def test_large_tensors_and_lists_are_told_where_they_differ(two: Records) -> None:
    """In step 7 the last micro-batch marked a tensor of 1,000 numbers, and lists got other rows, in silence."""
    said = two.of("turned")["keeping in large"]["said"]
    [told] = [each for each in said if "for a batch of step 7 " in each]
    for name in ("self.table", "self.array", "self.above"):
        assert f"{name} " in told, said
    assert not any("self.seen" in each or "from here on" in each for each in said), said


def test_what_a_decision_leaves_is_told(two: Records) -> None:
    """In step 7 the first micro-batch alone set an attribute, which one process did not, in silence."""
    said = two.of("turned")["alarmed"]["said"]
    [told] = [
        each for each in said if "training_step leaves self.alarm as a number of its batch decides in" in each
    ]
    assert "loss_cases.py:" in told and "loss='batch'" in told and not two.of("turned")["alarmed"]["once"]


def test_what_one_of_both_changes_is_told() -> None:
    """The lowest loss was that of a micro-batch, in silence, where the batch had none that low."""
    one = {"": torch.ones(1)}
    traces: Any = SimpleNamespace(is_told_again=lambda *_: False, is_joined=lambda _: False)
    left = {"self.lowest": Trace(None, one), "self.kept": Trace(2, one)}
    assert differences(traces, {}, left, {}) == [
        ("self.lowest", "self.lowest is changed by micro-batches alone"),
        ("self.kept", "self.kept gets 2 entries instead of 0"),
    ]
    assert differences(traces, left, {}, {})[0][1] == "self.lowest is changed by the batch alone"
    assert not differences(traces, left, left, left)


def test_numbers_are_read_in_all_that_is_looked_at() -> None:
    """A deque, a set or an array was said to be the same, whatever was in it."""
    values: list[Any] = [
        deque([1.5, 2]), {2, 1.5}, frozenset((1.5, 2)), array("d", [1.5, 2]), RawState(array("d", [1.5, 2])),
        1.5 + 2j, torch.tensor(1.5 + 2j),
    ]  # fmt: skip
    for value in values:
        assert numbers_of(value)[""].tolist() == [1.5, 2.0], value
    assert numbers_of(numpy.bool_(True))[""].tolist() == [1.0] and numbers_of(RawState(b"\2"))[""].tolist() == [
        2.0
    ]


def test_divisors_that_shares_do_not_go_by_are_seen() -> None:
    """A mask that a step made itself was a sign of nothing: its losses were weighted by samples."""
    parts = [[torch.tensor(2.0), torch.tensor(3)], [torch.tensor(4.0), torch.tensor(3)]]
    assert are_in_proportion(parts, [2, 4], [0.5, 0.5]) and are_in_proportion(parts, [1, 1], [0.25, 0.5])
    assert not are_in_proportion(parts, [1, 1], [0.5, 0.5])
    assert are_in_proportion([*parts, [torch.tensor(1.0), torch.tensor(1)]], [2, 4, 2], [0.3, 0.6, 0.0])
    assert are_in_proportion([[], []], [1, 1], [1, 1])
    empty = [[torch.tensor(0.0)], [torch.tensor(0.0)]]  # a mask by position: all weights were NaN
    assert not are_in_proportion(empty, [1, 1], [0.5, 0.5])


def test_a_step_may_divide_by_a_number_while_it_is_measured() -> None:
    """A number of Python's is no tensor to who watches all operations: ``loss / 2`` ended the first step."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Watching():
        divisors = graph_of((torch.ones(3, requires_grad=True) ** 2).sum() / 2, ()).divisors
        assert len(divisors) == 1 and are_in_proportion([divisors, divisors], [1, 1], [0.5, 0.5])
    learned = torch.tensor(2.0, requires_grad=True)
    assert len(graph_of(torch.zeros((), requires_grad=True).abs() / learned, ()).divisors) == 1, "of 0, too"


def test_the_number_of_entries_is_told_of_tensors_that_nobody_joins() -> None:
    """A list of outputs got 8 entries for each batch in silence, where a list of numbers was told."""
    tensors = {"": torch.arange(4.0)}
    whole = {"self.joined": Trace(1, tensors), "self.kept": Trace(1, tensors), "self.names": Trace(4, tensors)}
    pieces = {"self.joined": Trace(4, tensors), "self.kept": Trace(4, tensors), "self.names": Trace(4, tensors)}
    traces: Any = SimpleNamespace(is_told_again=lambda *_: False, is_joined=lambda name: name == "self.joined")
    found = differences(traces, whole, pieces, {})
    assert found == [("self.kept", "self.kept gets 4 entries instead of 1, which are the same joined")]
    trained = {**pieces, "self.kept": Trace(8, tensors)}  # the trial cuts eight samples in four
    found = differences(traces, whole, pieces, trained)
    assert found == [("self.kept", "self.kept gets 8 entries instead of 1, which are the same joined")]


class KeepsLists(pl.LightningModule):
    """Fills lists in its step, which joins something else; hooks join one of them, and count the other."""

    def __init__(self) -> None:
        super().__init__()
        self.joined, self.counted, self.by_other = [], [], []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        both = torch.cat([batch, batch])
        self.joined.append(both)
        self.counted.append(both)
        self.by_other.append(both)
        return both.sum()

    def on_train_epoch_end(self) -> None:
        self.log("joined", torch.cat(self.joined).mean())
        self.joined.clear()
        self.log("by other", self.mean_of(list(self.by_other)))

    def on_train_end(self) -> None:
        self.log("counted", sum(each.mean() for each in self.counted) / len(self.counted))

    def mean_of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tensors).mean()


def test_a_list_that_is_filled_beside_a_join_is_not_joined() -> None:
    """A step that joins its inputs kept the line about its lists away."""
    module = KeepsLists()
    module.trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    traces: Any = SimpleNamespace(
        _module=module, _steps=SimpleNamespace(beside=SimpleNamespace(is_programs=lambda _: True))
    )
    joined = [name for name in ("joined", "counted", "by_other") if StepTraces.is_joined(traces, f"self.{name}")]
    assert joined == ["joined", "by_other"]
    # A LambdaCallback has its hooks as its own attributes, which were not looked at.
    joining = LambdaCallback(on_train_end=lambda _, each: each.log("all", torch.cat(each.counted).mean()))
    module.trainer.callbacks.append(joining)
    assert StepTraces.is_joined(traces, "self.counted")


def test_a_number_that_two_ways_to_merge_give_by_chance_is_not_settled() -> None:
    """A batch's hits are all in two of its eight samples, with a quarter of its 28 labels: 1/28 by either weight.

    The micro-batches of one sample, in which it is trained, were then merged by samples to 1/40.
    """

    def part(share: float, size: int, value: float) -> SimpleNamespace:
        return SimpleNamespace(share=share, size=size, log_calls=[{"name": "hits", "value": value}])

    by_three = [part(9 / 28, 3, 0.0), part(12 / 28, 3, 0.0), part(7 / 28, 2, 1 / 7)]
    by_one = [*(part(21 / 28 / 6, 1, 0.0) for _ in range(6)), part(2 / 28, 1, 0.0), part(5 / 28, 1, 1 / 5)]
    run: Any = SimpleNamespace(whole=part(1.0, 8, 1 / 28))
    for cuts, rules in (([by_three], {"samples", "loss"}), ([by_three, by_one], {"loss"})):
        found = _logs(run, cuts, 1e-5)
        assert found["log_rules"] == {"hits": rules} and not found["wrong_logs"]


def test_a_count_of_samples_that_a_step_returns_is_told_of() -> None:
    """Micro-batches of one sample return 1 each, which hooks got for the 8 of a batch; only a trial can tell."""

    def part(size: int) -> SimpleNamespace:
        returned = {"loss": 1.0, "n": size, "squared": size**2, "same": 3, "any": True}
        return SimpleNamespace(returned=returned, size=size, share=None)

    tried, trained = [part(size) for size in (2, 1, 1, 4)], [part(1) for _ in range(8)]
    rules, wrong = _results(part(8).returned, cast(Any, [tried, trained]), 1e-5)
    assert rules["returned ['n']"] == {"sum"} and rules["returned ['same']"] == {"samples"}
    assert rules["returned ['any']"] == {"samples"}  # truths are no numbers that are summed
    assert wrong == (("['squared']", 1.0, 64.0),)
    assert not _results(part(8).returned, cast(Any, [tried]), 1e-5)[1], "it is refused where it is trained"
    none: Any = SimpleNamespace(returned={"n": 0}, size=1, share=None)
    unsettled, _ = _results({"n": 0}, [[none, none]], 1e-5)
    assert unsettled["returned ['n']"] == {"samples", "sum"}


def test_numbers_in_words_are_those_of_training() -> None:
    """A trial cuts 8 samples in 7: a counter was said to be 7, at the end of an epoch it was 64 for 8 batches."""
    whole, tried, trained = ({"self.t": Trace(None, {"": torch.tensor([value])})} for value in (1.0, 7.0, 8.0))
    traces: Any = SimpleNamespace(is_told_again=lambda *_: False)
    assert differences(traces, whole, tried, trained) == [("self.t", "self.t is 8 instead of 1")]
    assert differences(traces, whole, tried, {}) == [("self.t", "self.t is 7 instead of 1")]
    [(_, unlike)] = differences(traces, whole, tried, whole)
    assert unlike == "self.t is 7 instead of 1 where its micro-batches are of unlike sizes"
    assert error_in_words(0.5) == "50.00% off"
    assert error_in_words(4e11) == "far off, for that of the batch is next to 0"  # was 44926466047763.83%
    assert error_in_words(None) == "no number, as of a micro-batch in which nothing counts"


def test_a_whole_number_that_no_sum_gives_is_refused_with_the_way_out(two: Records) -> None:
    """A line said what hooks are given, and the run was refused then, without a way out that works."""
    refusal = two.of("planned")["returned peak"]
    assert "what training_step returns['highest'], a Tensor of shape ()" in refusal
    assert "; or MadPipeStrategy(loss='batch') runs training_step once per batch" in refusal
    assert two.of("planned")["returned peak, once"] == "not refused"


def test_samples_that_are_selected_before_the_layers_are_refused(two: Records) -> None:
    record = two.of("planned")
    for case in ("selected", "selected later"):
        assert "rows to forward() for a batch of 16 samples" in record[case]
        assert "self(x)[mask] instead of self(x[mask])" in record[case]
        assert "MadPipeStrategy(num_micro_batches=1) cuts nothing" in record[case]
    assert "rows to forward() for a batch of 16 samples" in record["fewer later"], (
        "x[:8] leaves micro-batches whole"
    )
    assert record["selected after"] is False, "weighted by the labels that are not 9"


def test_a_loss_that_cannot_be_tried_is_no_mean_unless_the_user_says_so(two: Records) -> None:
    """The mean was taken, which was said, and training was another one."""
    record = two.of("planned")
    assert "output 1 of forward(), of shape (), differs between micro-batches" in record["without a trial"]
    assert "MadPipeStrategy(loss='mean')" in record["without a trial"] and record["accepted"] is False
    for way in ("`.expand(len(x))`", "num_micro_batches=1", "another loss where samples are compared"):
        assert way in record["without a trial"]
    assert "output 1 of forward(), of shape (), differs between micro-batches" in record["sized"]
    assert "more samples than there is room for" in record["raising for batches"]


def test_what_a_step_raises_for_a_batch_is_told_and_not_what_it_raises_for_a_part(two: Records) -> None:
    """It was refused for the rate that it sets, and the user read "Expected input batch_size (4)"."""
    said = two.of("planned")["raising otherwise"]
    assert said.startswith("MisconfigurationException: training_step changes 'lr' of parameter group 0")


def test_low_precision_is_close_and_explained_alike(two: Records) -> None:
    for case in ("padded", "contrastive"):
        record, reference = two.of("low")[case], two.reference["low"][case]["record"]
        assert (record["found"]["once"], record["found"]["weight"]) == FOUND[case]
        assert_same(record["record"]["rows"], reference["rows"], tolerance=6e-2)


def test_a_plan_for_another_order_is_run_in_this_one_if_it_has_room(two: Records) -> None:
    record = two.of("planned")
    assert_same(record["record"], record["alone"])
    assert len(record["said"]) == 1
    assert "all 4 of a batch need" in record["tight"] and "loss='mean'" in record["tight"]
    assert "loss is 'sum': it must be one of 'auto', 'mean', 'batch'" in record["unknown"]


@pytest.mark.parametrize("case", ["padded", "contrastive", "changing"])
def test_two_pipelines_take_the_mean_of_their_batches_losses(four: Records, case: str) -> None:
    record, reference = four.of("replicated")[case], four.reference["replicated"][case]
    assert (record["found"]["once"], record["found"]["weight"]) == FOUND[case]
    assert_same(record["record"], reference["record"])


# Parts


def pieces_of(batch: Any, num: int = 4) -> tuple[list[Any], list[int]]:
    pieces = split_batch(batch, num)
    return pieces, [len(next(iter(piece.values()))) for piece in pieces]


def test_sparse_and_nested_tensors_are_refused_in_words() -> None:
    """They ended in words of torch's, about what cannot be viewed or indexed."""
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    for tensor in (torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr(), nested):
        with pytest.raises(ValueError, match="a sparse or nested tensor, which cannot be cut"):
            split_batch({"x": torch.zeros(4, 2), "y": tensor}, 2)
        assert fingerprint_of({"y": tensor}) == [((), 0)], "ranks compare batches before they cut them"


def test_a_batch_that_could_tell_weights_apart_is_new() -> None:
    """Without padding, samples and labels are alike; what was uneven in a batch that was tried is known."""
    tracked = Tracked()

    def features(batch: Any) -> tuple[Any, Any]:
        pieces, sizes = pieces_of(batch)
        return features_of(views_of(pieces), sizes), numpy.array(sizes, dtype=float)

    full = {"labels": torch.tensor([[1, 2], [1, 2], [1, 2], [1, 2]])}
    assert not tracked.is_new(*features(full))
    padded = {"labels": torch.tensor([[1, 2], [1, 2], [1, 2], [1, -100]])}
    assert tracked.is_new(*features(padded))
    tracked.add(*features(padded))
    assert not tracked.is_new(*features(padded))
    assert not tracked.is_new(*features({"labels": padded["labels"].flip(0)}))
    assert tracked.is_new(*features({"labels": torch.tensor([[1, 1], [1, 2], [1, 2], [1, 2]])}))


def test_weights_are_told_by_the_factors_of_micro_batches() -> None:
    batch = {"labels": torch.tensor([[1, 2], [2, 1], [1, -1], [-1, -1]])}
    pieces, sizes = pieces_of(batch, 2)
    weights = weights_of(views_of(pieces), sizes, {"self.weight": torch.tensor([0.0, 1.0, 3.0])})
    losses = numpy.array([1.0, 5.0])

    def fitting(factors: list[float]) -> set[Any]:
        found = numpy.array(factors)
        loss = float(found @ losses)
        return {key for key, values in weights.items() if fits(found, losses, loss, values, key, 1e-6)}

    assert SAMPLES in fitting([0.5, 0.5]) and SUM not in fitting([0.5, 0.5])
    assert fitting([1.0, 1.0]) == {SUM}
    assert ("labels", "batch['labels']", "", -1) in fitting([0.8, 0.2])
    assert fitting([8 / 9, 1 / 9]) == {("class weights", "batch['labels']", "", "self.weight")}
    assert fitting([0.7, 0.3]) == set()


@pytest.mark.parametrize(
    ("of_whole", "of_pieces", "does_fit"),
    [
        (1.0, (1.5, 0.5), True),
        (1.0, (1.5, 0.6), False),
        (3e-8, (1e-7, -4e-8), True),  # rounding beside the gradient of the rows, as of a bias before a softmax
        (0.5, (1e-8, -1e-8), False),  # nothing in the parts alone
        (0.001, (0.004, 0.004), False),
        (float("inf"), (float("inf"), 1.0), False),
        (None, (0.5, 0.5), False),
    ],
)
def test_gradients_by_what_micro_batches_share_add_up(
    of_whole: float | None, of_pieces: tuple[float, float], does_fit: bool
) -> None:
    def tried(shared: float | None) -> Any:
        return SimpleNamespace(gradients=(torch.ones(4), None if shared is None else torch.tensor([shared])))

    for tolerance in (1e-5, 2e-2):  # of low precision, where what is little beside other gradients is no rounding
        fit = shared_gradients_fit(
            tried(of_whole), list(map(tried, of_pieces)), (0, None), numpy.full(2, 0.5), tolerance
        )
        assert fit is does_fit


def test_missing_values_and_rows_of_padding_are_counted() -> None:
    y = torch.tensor([[0.5, torch.nan], [0.1, 0.2], [-9.0, -9.0], [-9.0, 0.3]])
    x = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 3.0], [0.0, 4.0]])
    views = views_of([{"y": y[:2], "x": x[:2]}, {"y": y[2:], "x": x[2:]}])
    features = features_of(views, [2, 2])
    counted = {key: list(values) for key, values in features.items() if key[0] in ("labels", "rows")}
    assert counted == {
        ("labels", "batch['y']", "", "NaN"): [1, 0],
        ("rows", "batch['y']", "", "NaN"): [1, 0],
        ("labels", "batch['y']", "", -9.0): [0, 3],
        ("labels", "batch['x']", "", 0.0): [3, 1],
        ("rows", "batch['x']", "", 0.0): [1, 0],
    }
    weights = weights_of(views, [2, 2], {})
    assert list(weights["rows", "batch['x']", "", 0.0]) == [1, 2]
    assert list(weights["labels", "batch['y']", "", "NaN"]) == [3, 4]


def test_extremes_of_their_own_in_each_batch_are_no_sign() -> None:
    """A batch whose smallest value is another one each time is tried some times, and not always."""
    tracked, sizes, num_new = Tracked(), numpy.array([2.0, 2.0]), 0
    for number in range(1, 40):
        x = torch.tensor([[1.0], [-number], [-number], [-number]])
        features = features_of(views_of([(x[:2],), (x[2:],)]), [2, 2])
        num_new += tracked.is_new(features, sizes)
        tracked.add(features, sizes)
    assert num_new <= MOST_EXTREMES + 2


def test_a_term_that_begins_shows_in_the_graph() -> None:
    outputs = torch.randn(4, 3, requires_grad=True) * 1.0
    ends = [outputs.grad_fn]

    def operations(scale: float) -> Operations:
        return graph_of(outputs.square().mean() + scale * outputs.mean(0).sum(), ends).operations

    assert operations(0.5) == operations(0.7)
    assert not operations(0.5) <= operations(0.0)
    assert not operations(0.5) <= graph_of(outputs.square().mean(), ends).operations


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    "term",
    [
        lambda term, beta: beta * term,
        lambda term, beta: term * beta.reshape(1),
        lambda term, beta: (beta * term.expand(3)).sum(),
        lambda term, beta: beta / term.exp(),
        lambda term, beta: torch.lerp(torch.zeros(()), term, beta),
        lambda term, beta: torch.lerp(term, torch.zeros(()), 1 - beta),
        lambda term, beta: torch.addcmul(term.detach(), beta, term),
        lambda term, beta: term.masked_fill(beta == 0, 0.0),
        lambda term, beta: term.exp() ** beta,
        lambda term, beta: (torch.stack([torch.ones(()), beta]) * torch.stack([term.exp(), term])).sum(),
        lambda term, beta: (torch.cat([term.exp()[None], term[None]]) * torch.stack([torch.ones(()), beta])).sum(),
        lambda term, beta: torch.stack([term, term.exp()]) @ torch.stack([beta, torch.ones(())]),
    ],
)
def test_a_term_that_begins_shows_wherever_its_weight_is(
    monkeypatch: pytest.MonkeyPatch, term: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], elsewhere: bool
) -> None:
    """A weight on the left of its term was not looked at, and none on a GPU, up to 127 steps."""
    outputs = torch.randn(4, 3, requires_grad=True) * 1.0
    monkeypatch.setattr(loss_signs, "is_elsewhere", lambda number: elsewhere)

    def graph(beta: torch.Tensor) -> LossGraph:
        return graph_of(outputs.square().mean() + term(outputs.mean(0).sum(), beta), [outputs.grad_fn])

    beta = torch.tensor(0.0)
    zero, half = graph(beta), graph(torch.tensor(0.5))
    beta.fill_(1.0)  # what a graph says is of the time when it was made
    assert (read_operations([zero]) == frozenset()) != elsewhere
    first, second = (each.operations | read_operations([each]) for each in (zero, half))
    assert not second <= first and not first <= second
    assert read_operations([zero, half]) == read_operations([zero]) | read_operations([half])


def test_weights_of_samples_are_no_terms_of_a_loss() -> None:
    """Masks are other ones in each batch, and a batch is given up for each new sign."""
    outputs = torch.randn(4, 3, requires_grad=True) * 1.0

    def operations(weights: list[float]) -> Operations:
        return graph_of((outputs.mean(1) * torch.tensor(weights)).sum(), [outputs.grad_fn]).operations

    assert operations([1.0, 0.0, 1.0, 1.0]) == operations([0.0, 1.0, 1.0, 0.0])
    seen: Operations = frozenset()
    for number in range(16):  # of a loss for each sample, joined: no more signs than two for each
        weights = torch.tensor([float(number >> place & 1) for place in range(4)])
        seen |= graph_of((weights * torch.stack([*outputs.mean(1)])).sum(), [outputs.grad_fn]).operations
    assert len([1 for name, _ in seen if " at " in name]) == 8


@pytest.mark.parametrize("joined", [torch.add, torch.sub])
def test_a_term_that_begins_by_a_keyword_shows(joined: Callable[..., torch.Tensor]) -> None:
    outputs = torch.randn(4, 3, requires_grad=True) * 1.0
    found = [
        graph_of(joined(outputs.square().mean(), outputs.mean(0).sum(), alpha=alpha), [outputs.grad_fn]).operations
        for alpha in (0.0, 0.5, 0.7)
    ]
    assert found[0] != found[1] == found[2]


def test_factors_on_a_device_are_read_behind_the_last_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for the device in each micro-batch would cost a pipeline its overlap."""
    steps, beta = UserSteps(pl.LightningModule(), "forward"), torch.tensor(0.0)
    monkeypatch.setattr(loss_signs, "is_elsewhere", lambda number: number.data_ptr() == beta.data_ptr())

    def run(place: int) -> None:
        outputs = torch.ones(2, 3, requires_grad=True) * 1.0
        known: dict[str, Any] = {"step": "training_step", "arguments": (), "batch_seed": 0, "seed": 0}
        micro_batch = MicroBatch(data=None, size=2, place=place, is_last=place == 1, **known)
        steps._check_graph(micro_batch, outputs.square().mean() + beta * outputs.sum(), [outputs.grad_fn])

    with pytest.raises(UntriedLossError):  # of all that is known without the device
        run(0)
    run(0)
    with pytest.raises(UntriedLossError):
        run(1)
    run(0)
    run(1)
    beta.fill_(0.5)
    run(0)
    with pytest.raises(UntriedLossError):
        run(1)


@pytest.mark.parametrize(
    "bent",
    [
        lambda loss: loss.clamp(max=2.0),
        lambda loss: torch.clamp(loss, torch.tensor(-1.0), torch.tensor(2.0)),
        lambda loss: torch.relu(loss - 2.0),
        lambda loss: (loss - 2.0).abs() + 2.0,
        lambda loss: torch.maximum(loss, torch.tensor(2.0)),
        lambda loss: torch.where(loss > 2.0, loss * 0.5, loss),
        lambda loss: F.hardtanh(loss, -1.0, 2.0),
    ],
)
def test_a_threshold_that_a_loss_crosses_is_a_sign_of_another_loss(
    bent: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A clamp that acted in two steps between trials changed the training by 1 %, and nothing was said."""
    outputs = torch.ones(6, 3, requires_grad=True) * 1.0

    def operations(scale: float) -> Operations:
        return graph_of(bent((outputs * scale).mean()), [outputs.grad_fn]).operations

    assert operations(1.0) == operations(1.1) != operations(3.0)
    each = [graph_of((outputs * scale).clamp(max=2.0).mean(), [outputs.grad_fn]) for scale in (1.0, 3.0)]
    assert each[0] == each[1]  # of each sample by itself


def test_other_class_weights_are_a_sign_of_another_loss() -> None:
    """Those of deferred re-weighting began at a step that was not tried, and micro-batches kept the old shares."""
    outputs, labels = torch.randn(6, 3, requires_grad=True) * 1.0, torch.tensor([0, 1, 2, 0, 1, 2])

    def found(weight: torch.Tensor | None, **how: Any) -> list[torch.Tensor]:
        loss = F.cross_entropy(outputs, labels, weight=weight, **how)
        return graph_of(loss * 2 + outputs.mean(), [outputs.grad_fn]).class_weights

    even, balanced = torch.ones(3), torch.tensor([0.1, 1.0, 3.0])
    assert found(None) == [] and torch.equal(found(balanced)[0], balanced)
    assert torch.equal(found(balanced, label_smoothing=0.1)[0], balanced)
    known = ClassWeights()
    known.note(found(even))
    assert not known.are_others(found(even)) and not known.are_others(found(even.clone()))
    assert known.are_others(found(balanced)) and not known.are_others(found(balanced)), "tried once"
    known.in_use = balanced
    assert not known.are_others(found(balanced.clone()))
    assert known.are_others(found(even)), "micro-batches have the shares of others"
    balanced += 0.5  # as a hook does: micro-batches are weighted by what they are now
    assert not known.are_others(found(balanced))
    known.in_use = None
    counts = [known.are_others(found(balanced * number)) for number in range(2, 12)]
    assert [place for place, counted in enumerate(counts) if counted] == [1, 5], "the 4th and the 8th new ones"


def test_changes_of_a_counter_count_ever_more_seldom() -> None:
    module = torch.nn.Linear(1, 1)
    module.counter, module.phase = 1, "first"
    attributes = Attributes(module, ignored=())
    found = []
    for _ in range(20):
        module.counter += 1
        found.append(attributes.have_changed())
    assert [step for step, counts in enumerate(found, start=1) if counts] == [1, 2, 4, 8, 16]
    module.phase = "second"
    assert attributes.have_changed() and not attributes.have_changed()


def test_inputs_are_cut_where_they_grow_with_the_samples() -> None:
    batch, mask = torch.arange(24).reshape(2, 12), torch.zeros(12, 12)
    pieces = cut_inputs((batch, mask), [(2, 6), (12, 12)], [3, 2, 1])
    assert [tuple(piece[0].shape) for piece in pieces] == [(2, 6), (2, 4), (2, 2)]
    assert all(piece[1] is mask for piece in pieces)
    assert torch.equal(torch.cat([piece[0] for piece in pieces], 1), batch)
    with pytest.raises(ValueError, match="no dimension counts the samples"):
        cut_inputs((torch.zeros(6, 6),), [(3, 3)], [3, 2, 1])
    with pytest.raises(SamplesSelectedError, match="for a batch of 6 samples and 3 for 3 of them"):
        cut_inputs((torch.zeros(7, 2),), [(3, 2)], [3, 2, 1])
    # A step cuts its batch to the longest sample, of 9 in the batch and of 4 in the first micro-batch.
    assert [tuple(piece[0].shape) for piece in cut_inputs((torch.zeros(6, 9),), [(3, 4)], [3, 3])] == [(3, 9)] * 2
    known = [(1, 1)]
    assert [tuple(piece[0].shape) for piece in cut_inputs((torch.zeros(6, 6),), [(3, 3)], [3, 3], known)] == [
        (6, 3)
    ] * 2


def test_outputs_are_joined_where_micro_batches_differ() -> None:
    shared = torch.ones(4, 4)
    uneven = [(torch.zeros(4, size), shared) for size in (2, 1)]
    assert dims_of_outputs(uneven, [2, 1], None) == (1, None)
    even = [(torch.zeros(4, 4), shared) for _ in range(2)]
    assert dims_of_outputs(even, [4, 4], (1, None)) == (1, None)
    with pytest.raises(ValueError, match="no dimension"):
        dims_of_outputs([(torch.zeros(()),), (torch.ones(()),)], [2, 1], None)
    with pytest.raises(ValueError, match="no dimension"):
        dims_of_outputs([(torch.zeros(2, dtype=torch.int64),), (torch.ones(2, dtype=torch.int64),)], [2, 1], None)
    of_one_size = [(torch.zeros(8, 4, 3), torch.zeros(4, 8))] * 2
    assert dims_of_outputs(of_one_size, [4, 4], None) == (1, 0), "the length that is just theirs"
    with pytest.raises(ValueError, match="dimension 1 or 2, which"):
        dims_of_outputs([(torch.zeros(3, 4, 4),)] * 2, [4, 4], None)


def test_an_output_without_samples_may_differ_by_rounding() -> None:
    """Embeddings of a fixed graph, which a GPU adds in any order, were refused as no output of a batch."""
    nodes = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    nodes[0, 0] = torch.nan

    def outputs(other: torch.Tensor, first: torch.Tensor = nodes) -> list[tuple[torch.Tensor, ...]]:
        return [(torch.zeros(2, 3), first), (torch.zeros(1, 3), other)]

    rounded = nodes + nodes.nan_to_num().abs().max() * torch.finfo(torch.float32).eps
    assert not torch.equal(rounded.nan_to_num(), nodes.nan_to_num())
    assert dims_of_outputs(outputs(rounded), [2, 1], None) == (0, None)
    assert dims_by_whole([torch.zeros(3, 3), rounded], outputs(nodes)[0]) == (0, None)
    parts: Any = [SimpleNamespace(size=2), SimpleNamespace(size=1)]
    run = BatchRun(parts, SimpleNamespace(size=3))  # type: ignore[arg-type]
    for each in outputs(rounded):
        run.collect(each)
    assert torch.equal(run.join(None, trains=False)[1].nan_to_num(), nodes.nan_to_num()), "the first one's"
    half = nodes.nan_to_num().bfloat16()
    for other, first in (
        (nodes * (1 + 1e-5), nodes),
        (nodes.nan_to_num(), nodes),
        (half.view(torch.int16).add(1).view(torch.bfloat16), half),  # as that of samples may be
    ):
        with pytest.raises(ValueError, match="no dimension"):
            dims_of_outputs(outputs(other, first), [2, 1], None)
        with pytest.raises(ValueError, match="no dimension"):
            dims_by_whole([torch.zeros(3, 3), other], outputs(first)[0])
