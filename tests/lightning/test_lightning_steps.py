"""What steps, hooks and loaders do on a pipeline is what they do in one process."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import Counter, UserDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchmetrics import Metric

from deepspeed_partition.profiling import LiveBytes
from deepspeed_partition.tensor_values import bytes_view
from lightning_madpipe.compat.elsewhere import Elsewhere
from lightning_madpipe.module import HOLDER, PipelineHolder, find_layers
from lightning_madpipe.steps import rank_of_step
from lightning_madpipe.steps.batch_runs import dims_of_outputs
from lightning_madpipe.steps.batches import (
    UncutBatchError,
    fingerprint_of,
    join_pieces,
    map_children,
    normal_tensors,
    split_batch,
)
from lightning_madpipe.steps.logged_sizes import LoggedSizes
from lightning_madpipe.steps.metrics import metrics_of
from lightning_madpipe.steps.same_batches import uses_argument
from lightning_madpipe.steps.serialization import packed, unpacked
from lightning_madpipe.steps.step_side_effects import Leftovers, make_changes
from tests.lightning.lightning_cases import Classifier
from tests.lightning.test_lightning_parts import HalfAPipeline
from tests.lightning.test_lightning_pipeline import HERE, Records, assert_same, records_of, torchrun
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    return records_of(request, 2, tmp_path_factory.mktemp("two"), "steps")


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    return records_of(request, 4, tmp_path_factory.mktemp("four"), "steps")


# Records.of asserts that every rank saw the same.


@pytest.mark.parametrize(
    "case",
    [
        "predictions", "default_predictions", "returned", "left_behind", "with_metrics", "metrics_of_hooks",
        "weights_left_out", "summed", "data_modules", "combined", "reloaded", "streamed", "structured_batches",
        "masked", "consumed_batches", "ended_epochs",
        "refilled_batches", "arriving_batches", "skips", "logged_sizes", "last_batches", "empty_steps",
    ],
)  # fmt: skip
def test_two_stages_do_what_one_process_does(two: Records, case: str) -> None:
    assert_same(two.of(case), two.reference[case])


def test_a_batch_weighs_what_the_host_finds_in_it(two: Records) -> None:
    """Batches weighed by their samples in means of epochs, and Lightning's line about it was missing."""
    assert_same(two.ranks[0]["scaled_batches"], two.reference["scaled_batches"])
    for name, record in two.ranks[1]["scaled_batches"].items():
        assert_same({**record, "told": None}, {**two.reference["scaled_batches"][name], "told": None})


def test_hooks_within_a_window_have_what_the_last_window_returned(two: Records) -> None:
    for record in (rank["returned_in_windows"] for rank in two.ranks):
        assert record["seen"] == [[0, None, 0], [1, 1, 16], [2, 1, 16], [3, 3, 6]]
        told = "the outputs that on_train_batch_end is given have no 'logits' after this batch: with accumulate"
        assert told in record["read"], record["read"]


def test_what_a_run_leaves_out_is_told_or_refused(two: Records) -> None:
    """Batches of a window, and states of the optimizer, were lost; one pipeline waited for another."""
    found = [rank["told_or_refused"] for rank in two.ranks]
    [line] = [line for rank in found for line in rank["left"]]
    assert "a window of accumulate_grad_batches was left unfinished, and 2 batches of it did not run" in line
    for rank in found:
        assert "on_save_checkpoint sets checkpoint['optimizer'], which is the name of an entry" in rank["saved"]
        assert "have different numbers of them ([2] on rank 0, [1] on rank 1)" in rank["uneven"]
        for none in rank["none"]:
            assert none.startswith("MisconfigurationException: 2 pipelines take each batch together, and the data")
            assert "let the number of samples be a multiple of batch size times pipelines" in none
            assert ("give none to that of rank 1: let" in none) == (none is not rank["none"][0])


def test_calls_until_a_run_trains_grow_with_the_number_of_layers(two: Records) -> None:
    """And not with its square: an engine of 200 layers once took 17 s to build."""
    for record in (rank["many_layers"] for rank in two.ranks):
        assert record["some"] and not record["beyond"], record


def test_who_reads_what_no_batch_has_logged_yet_is_told_why(two: Records) -> None:
    """A KeyError with the name alone, where one process has a value."""
    first, logged, is_none, *rest = two.of("read_within_windows")["read"]
    at_the_end = "after this batch: with accumulate_grad_batches=2"
    assert first.startswith(f"trainer.callback_metrics has no 'train_loss' {at_the_end}")
    assert logged.startswith(f"trainer.logged_metrics has no 'train_loss_step' {at_the_end}")
    assert is_none and all(isinstance(each, float | bool) for each in rest) and not any(rest[2::3])
    assert len(rest) == 9 and rest[0] == rest[3] != rest[6], "of the window before, and then of its own"
    assert two.of("read_within_windows")["kinds"] == ["dict"]


@pytest.mark.parametrize(
    "settings",
    [
        "sanity", "several", "interval", "fraction", "every n", "limits", "no validation", "no training",
        "overfit", "fast", "fast 2", "steps", "min epochs", "stopped", "min steps", "window",
        "scheduled windows",
    ],
)  # fmt: skip
def test_loops_are_those_of_one_process(two: Records, settings: str) -> None:
    """What the Trainer is told of epochs, steps and batches, in training and validation."""
    assert_same(two.of("loops")[settings], two.reference["loops"][settings])


@pytest.mark.parametrize(
    "run",
    [
        "heads", "heads, momentum", "heads, moved", "heads, clipped", "heads, two pipelines",
        "heads that are found", "heads, resumed", "tied", "tied, momentum", "tied, moved",
    ],
)  # fmt: skip
def test_weights_without_a_gradient_are_left_as_in_one_process(two: Records, run: str) -> None:
    """They got zeros, so that weight decay shrank them and momentum moved them, and nothing was said."""
    found, expected = two.of("without_gradients")[run], two.reference["without_gradients"][run]
    assert_same(found, expected, tolerance=1e-4)


@pytest.mark.parametrize(
    "precision, named",
    [
        ("flat", ["net.1.block.unused.weight", "net.2.block.unused.weight"]),
        ("half", ["early.weight"]),
        ("tied", ["net.1.block.unused.weight", "net.1.block.unused.weight"]),
        ("tied, half", ["net.1.block.unused.weight", "net.1.block.unused.weight"]),
        ("all used", []),
    ],
)
def test_zeros_for_weights_without_a_gradient_are_told(two: Records, precision: str, named: list[str]) -> None:
    """DeepSpeed's flat optimizers know no other way, and nothing was said."""
    told = [line for rank in two.ranks for line in rank["told_of_zeros"][precision]]
    assert len(told) == len(named)
    for line, name in zip(told, named, strict=True):
        assert line.startswith(f"a step has computed no gradient of {name}, ") and "precision='32-true'" in line


@pytest.mark.parametrize("case", ["predictions", "left_behind"])
def test_four_stages_do_what_one_process_does(four: Records, case: str) -> None:
    assert_same(four.of(case), four.reference[case])


def test_metrics_of_two_pipelines_are_over_the_data_of_both(four: Records) -> None:
    assert_same(four.of("replicated_metrics"), four.reference["replicated_metrics"])


def test_logs_of_every_form_and_hook(two: Records) -> None:
    printed = []
    for record in [two.reference, *two.ranks]:
        record = dict(record["logs_everywhere"])
        printed.append(record.pop("printed"))
        assert_same(record, {k: v for k, v in two.reference["logs_everywhere"].items() if k != "printed"})
    assert two.reference["logs_everywhere"]["advice"] == 0
    # Three batches in two epochs, in four micro-batches each, of which one is shown. Rank 0 alone prints.
    assert printed == [6, 6, 0]


def test_a_batch_size_is_a_count_or_a_constant() -> None:
    """In batches of as many micro-batches either gives the same mean; once it is known, the mean stays."""
    told: list[str] = []
    sizes = LoggedSizes(told.append)
    totals = [
        sizes.weights(("a", 0), [3] * len(pieces), pieces).of_batch for pieces in ([2] * 4, [2] * 4, [1] * 2)
    ]
    assert totals == [12, 12, 12]
    assert sizes.weights(("b", 0), [2] * 4, [2] * 4).of_batch == 8
    assert sizes.weights(("b", 0), [2, 1, 1], [2, 1, 1]) == ([2, 1, 1], 4)
    assert sizes.weights(("b", 0), [1], [1]).of_batch == 1
    assert not told
    sizes.weights(("c", 0), [1] * 4, [1] * 4, matters=True)
    assert sizes.weights(("c", 0), [1] * 2, [1] * 2, matters=True).of_batch == 2
    assert len(told) == 1 and told[0].startswith("logs 'c' with batch_size=1 in each of 2 micro-batches")


def test_a_step_reaches_the_loggers_of_rank_0(two: Records) -> None:
    reference, ranks = two.reference["shown"], [rank["shown"] for rank in two.ranks]
    assert reference["rank 0"][1] == {"sizes": [16, 16, 5]}
    assert_same(ranks[0], reference)
    assert ranks[1] == {"rank 0": [None, None], "rate": ranks[0]["rate"]}


def test_a_step_runs_once_per_micro_batch(two: Records) -> None:
    """Whatever measures or rehearses it before leaves nothing: 16 + 16 + 5 samples are 4 + 4 + 4 pieces.

    A mean is told once for each batch what its pieces told it.
    """
    counts = {"before": 12, "after": 12, "draws": 12, "steps": 12.0, "updates": 3}
    assert two.of("counted") == {**counts, "on rank 0": 12}


def test_a_step_of_the_first_pipeline_is_told_that_it_is_rank_0(two: Records) -> None:
    """What stands behind ``if trainer.is_global_zero:`` ran nowhere, and nothing was said."""
    ways = two.reference["rank_zero"]["ways"]
    assert len(ways) == 19 and len(ways["training, Trainer"]) == 3 and len(ways["decorator"]) == 6
    assert_same(two.of("rank_zero"), two.reference["rank_zero"])


def test_a_step_reaches_a_logger_by_a_name_of_its_own(two: Records) -> None:
    """It got the dummy of another rank than 0, and nothing was said."""
    reference, ranks = two.reference["global_board"], [rank["global_board"] for rank in two.ranks]
    assert len(reference["images"]) == len(reference["rows"]) == 3
    assert_same(ranks[0], reference)
    assert ranks[1] == {"images": None, "rows": []}


def test_a_step_of_another_pipeline_is_not_told_that_it_is_rank_0(four: Records) -> None:
    found = {each["pipeline"]: each["ways"] for each in (rank["ranks_of_pipelines"] for rank in four.ranks)}
    kinds = ("Trainer", "environment", "module", "rank", "torch", "torch by another name")
    ways = ["decorator", *(f"training, {kind}" for kind in kinds)]
    assert found == {0: ways, 1: []}


def test_a_step_that_compares_its_local_rank_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stood behind ``if self.local_rank == 0:`` ran nowhere, and nothing was said."""
    said: list[str] = []
    monkeypatch.setattr(rank_of_step, "warn_once", lambda _, sentence: said.append(sentence))
    code = "class Strategy:\n    @property\n    def local_rank(self):\n        tell(1)\n        return 1"
    host: dict[str, Any] = {"__name__": "lightning.strategies", "tell": rank_of_step.tell_of_local_rank}
    exec(code, host)
    strategy = host["Strategy"]()
    assert str(torch.device("cuda", strategy.local_rank)) == "cuda:1" and not said
    assert strategy.local_rank != 0
    if not strategy.local_rank:
        raise AssertionError
    assert len(said) == 2 and "the last stage, whose local rank is 1" in said[0]


@pytest.mark.parametrize(
    "module, sentences",
    [
        (
            "AsksForSize",
            [
                "training_step asks for WORLD_SIZE of the environment at step_cases.py:",
                "training_step asks for torch.distributed.get_world_size() at step_cases.py:",
            ],
        ),
        ("AsksForLocalRank", ["training_step reads LOCAL_RANK from the environment at step_cases.py:"]),
        (
            "AsksInLayers",
            ["madpipe: self.blocks.0 (AskingBlock) asks for RANK of the environment where it computes: "],
        ),
        ("Unlike", ["self.factor is 1.0 on rank 0 and 2.0 on rank 1: "]),
        (
            "UnlikeLayers",
            ["MisconfigurationException: self.blocks.1 is Linear on rank 0 and Block on rank 1"],
        ),
        (
            "UnlikeSlopes",
            ["MisconfigurationException: self.activation.negative_slope is 0.1 on rank 0 and 1."],
        ),
        ("Classifier", []),
    ],
)
def test_what_goes_by_the_rank_is_told_or_refused(two: Records, module: str, sentences: list[str]) -> None:
    """It trained otherwise than in one process, by up to 100 %, and nothing was said."""
    said = dict.fromkeys(line for rank in two.ranks for line in rank["ranks_asked_for"][module])
    assert len(said) == len(sentences)
    for line, sentence in zip(said, sentences, strict=True):
        assert line.startswith(sentence)


def test_what_cannot_be_sent_is_named_and_stays(two: Records) -> None:
    # The plan of the run may put the last stage on either rank.
    first, last = sorted((rank["unsendable"] for rank in two.ranks), key=lambda each: len(each["sentences"]))
    secret, many, metric = last["sentences"]
    assert "self.secret, set by training_step, cannot be sent to the other ranks" in secret
    assert "training_step changes a MulticlassAccuracy, and" in metric
    assert "training_step changes a MetricCollection, and" in many
    assert last["has it"] and not first["has it"] and first["sentences"] == []
    assert first["number"] == last["number"] == 1


def test_predictions_that_cannot_be_are_refused_on_every_rank(two: Records) -> None:
    refusals = two.of("refused_predictions")
    assert "predict_step returns for this batch without a call of self.forward()" in refusals["no forward"]
    assert "predict_step calls self.forward() with list" in refusals["a list"]
    assert "what predict_step returns, a Tensor of shape ()" in refusals["a scalar"]
    assert "has different fields for the micro-batches" in refusals["other fields"]
    assert refusals["once per batch"] == ["not refused"] * 2


def test_a_layer_that_gives_a_dict_is_refused_on_every_rank(two: Records) -> None:
    assert "a layer of a pipeline returns a tensor or a tuple of tensors" in two.of("refused_layers")["dict"]


def test_outputs_are_joined_only_where_somebody_reads_them(two: Records) -> None:
    """One rank's callback is somebody; without one the same step passes."""
    assert "what validation_step returns['count'], a int" in two.of("unread")["read"]


def test_an_error_in_a_step_is_raised_on_every_rank(two: Records) -> None:
    errors = two.of("step_errors")
    skips, early = errors["skips"], errors["skips early"]
    assert "training_step returns None, and a pipeline cannot skip a batch in its step" in skips
    assert "p.grad = None" in skips  # with momentum, zeros train on: see skipped_batches
    # "does not call self.forward(): call it once" was said of a step that does so in all other batches.
    assert "training_step returns None without a call of self.forward(), and a pipeline cannot skip" in early
    assert skips.partition("in its step")[2] == early.partition("in its step")[2] and len(early) < 400
    assert "training_step returns None, and a pipeline cannot skip a batch in its step" in errors["skips whole"]
    # All were told that they return None, and how to skip a batch.
    shapes, flags, calls = (errors["no losses"][place : place + 2] for place in (0, 2, 4))
    assert all("training_step calls self.forward() a second time" in each for each in calls)
    assert all("training_step returns a loss of shape (" in each and "return its mean" in each for each in shapes)
    assert all("the loss of training_step needs no gradient" in each for each in flags)
    validates = "validation_step returns for this batch without a call of self.forward(), which runs the layers: "
    assert validates in errors["validates some"]
    # One step was made before it; and none where validation comes first and raises.
    assert errors["training"] == ["ValueError: the user's own error in training", 1]
    assert errors["validation"] == ["ValueError: the user's own error in validation", 0]
    assert "calls strategy.barrier()" in errors["waits"]
    assert errors["works"] == "not refused"


def test_skips_in_a_dictionary_that_layers_share_are_refused(two: Records) -> None:
    """KeyError, and the advice of num_micro_batches=1, which did not help."""
    for sentence in two.of("refused_skips").values():
        assert "(Pop) does not compute from its input alone" in sentence and "(Stash) leaves beside" in sentence


@pytest.mark.parametrize(
    "build, sentence",
    [
        ("ReducesLoss", "training_step calls torch.distributed.all_reduce at step_cases.py:"),
        ("GathersInputs", "training_step calls torch.distributed.all_gather at step_cases.py:"),
        ("Waits", "validation_step calls torch.distributed.barrier at step_cases.py:"),
        ("LayerReduces", "forward() or a layer calls torch.distributed.all_reduce at step_cases.py:"),
        ("AsksOnly", "not refused"),
    ],
)
def test_collectives_that_no_other_stage_comes_to_are_refused(two: Records, build: str, sentence: str) -> None:
    """They hung."""
    [found] = (value for name, value in two.of("collectives").items() if name == build)
    assert sentence in found and ("in a hook" in found or build == "AsksOnly")


def test_ranks_draw_the_same_data_whatever_their_layers_draw(two: Records) -> None:
    found = two.of("alike")  # the same on every rank
    assert {name: len(batches) for name, batches in found.items()} == {
        "workers": 6,
        "shuffled": 6,
        "on the device": 6,
    }
    assert all(len({str(batch) for batch in batches}) == 6 for batches in found.values())


def test_ranks_that_draw_other_data_are_told(two: Records) -> None:
    found = two.of("unlike")
    windows, differ = found["told"]
    assert "on_train_batch_end of LambdaCallback uses its outputs, and is given the loss and outputs" in windows
    assert "IgnoresOutputs" not in windows
    assert "read different batch[0], batch[1] in training_step" in differ
    [of_one] = found["told_of_one"]  # nothing was said where one tensor differed
    assert "read different batch[1] in training_step" in of_one and "sort what numbers are made of" in of_one
    assert "ranks 0 and 1 of a pipeline read different batches" in found["refused"]


def test_what_uses_its_outputs_is_seen_in_its_code() -> None:
    class Hooks:
        def passes(self, outputs: object, batch: object) -> None: ...

        def uses(self, outputs: object, batch: object) -> None:
            print(outputs)

        def rest(self, *arguments: object) -> None:
            print(arguments)

        def captures(self, outputs: object) -> object:
            return lambda: outputs

    found = {name: uses_argument(getattr(Hooks(), name), 0) for name in ("passes", "uses", "rest", "captures")}
    assert found == {"passes": False, "uses": True, "rest": True, "captures": True}
    assert not uses_argument(lambda trainer, module, *_: None, 2) and uses_argument(print, 2)


def test_what_a_decorated_hook_uses_is_seen_in_its_code() -> None:
    """An average of weights without gradients was told to use its outputs, for it uses what comes before them."""

    class Hooks:
        @torch.no_grad()
        def passes(self, trainer: object, module: object, outputs: object) -> None:
            print(module)

        @torch.no_grad()
        def uses(self, trainer: object, module: object, outputs: object) -> None:
            print(outputs)

    assert not uses_argument(Hooks().passes, 2) and uses_argument(Hooks().uses, 2)


def test_time_is_over_at_the_same_step_everywhere(two: Records) -> None:
    assert two.of("timed")["some"]


def test_collectives_are_over_pipelines_and_decisions_over_all(four: Records) -> None:
    record = four.of("gathers")
    assert record["values"] == {
        "gathered": {"rank": [[0.0], [1.0]]}, "sum": 3.0, "mean": 1.5, "max": 1.0, "number": 3.0, "any": True,
        "all": False, "really all": True, "broadcast": [0.0], "ones": 4.0,
    }  # fmt: skip
    # 32 samples in all: what a step gathers is from both pipelines.
    assert_same(
        record["metrics"],
        {"gathered": 32.0, "synced_sum": 3.0, "synced_mean": 1.5, "synced_max": 2.0, "synced_min": 1.0},
    )


def test_collectives_before_there_is_a_pipeline_have_a_group_of_our_own(two: Records) -> None:
    """They went over the default group, where a signal's handler of Lightning sends at any instant."""
    assert two.of("gathers_in_setup") == {
        "sum": 2.0, "gathered": [[0.0], [1.0]], "over groups of our own": [True, True],
    }  # fmt: skip


@pytest.mark.parametrize("run", ["synchronized", "as it is"])
def test_gathered_features_of_one_pipeline_keep_their_gradient(two: Records, run: str) -> None:
    """It was cut off, in silence; with sync_grads=True it raised that rank 0 is not in the group."""
    assert_same(two.of("contrasts")[run], two.reference["contrasts"][run])


@pytest.mark.parametrize("run", ["synchronized", "cut off"])
def test_gathered_features_of_two_pipelines_have_the_gradient_that_ddp_gives(four: Records, run: str) -> None:
    assert_same(four.of("contrasts")[run], four.reference["contrasts"][run])


def test_streams_of_other_lengths_end_together(four: Records) -> None:
    # The first pipeline has five batches and the second three, twice.
    assert four.of("uneven_streams") == {"steps": 6, "epoch": 2}


def test_an_error_in_one_pipeline_stops_all_before_the_step(four: Records) -> None:
    record = four.of("step_errors_of_a_pipeline")
    assert record == {"sentence": "ValueError: the user's own error in training", "steps": [1, 1]}


def test_a_job_that_lightning_started_ends_where_one_rank_fails(tmp_path: Path) -> None:
    """A rank in a layer cannot be heard by those that wait for its output: whoever started them ends them."""
    log = tmp_path / "log"
    code = run_ranks(HERE / "failing_multiproc.py", ["layer"], None, log, timeout_seconds=120)
    check_failure(code, "the layer's own error", log)


def test_a_job_that_torchrun_started_ends_where_one_rank_fails(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [*torchrun(2), str(HERE / "failing_multiproc.py"), "anomaly"]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    check_failure(code, "returned nan values", log)


def check_failure(code: int, sentence: str, log: Path) -> None:
    printed = log.read_text()
    assert code not in (0, -9) and sentence in printed, printed[-3000:]
    assert "the job reached its end" not in printed


# Without other processes


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 9))
def test_joined_pieces_are_the_whole(size: int, num_pieces: int) -> None:
    x = torch.arange(size)
    whole = {"x": x, "names": [str(number) for number in range(size)], "twice": (2 * x, {"array": x.numpy()})}
    pieces = split_batch({"x": x, "names": whole["names"]}, num_pieces)
    returned = [
        {**piece, "twice": (2 * piece["x"], {"array": piece["x"].numpy()}), "fixed": "text"} for piece in pieces
    ]
    joined = join_pieces(returned, [len(piece["x"]) for piece in pieces], "it")
    assert torch.equal(joined["x"], x) and joined["names"] == whole["names"] and joined["fixed"] == "text"
    assert torch.equal(joined["twice"][0], 2 * x) and (joined["twice"][1]["array"] == x.numpy()).all()


def test_sets_of_several_sizes_are_refused_with_the_way_out() -> None:
    batch = [torch.ones(rows, 2) for rows in (3, 4, 5)]
    with pytest.raises(UncutBatchError, match=r"they have 3, 4, 5 rows, .*\(torch.nn.utils.rnn.pad_sequence\)"):
        split_batch(batch, 2)


def test_a_loss_of_a_module_is_refused_with_the_way_out() -> None:
    outputs = [(torch.tensor(number),) for number in (1.0, 2.0)]
    with pytest.raises(ValueError, match=r"such as a center loss, let it return one value for each sample"):
        dims_of_outputs(outputs, [2, 2], None)


def test_means_are_joined_by_samples_where_they_are_means() -> None:
    pieces = [{"loss": torch.tensor(1.0), "share": 0.5}, {"loss": torch.tensor(4.0), "share": 2.0}]
    assert join_pieces(pieces, [2, 1], "it", mean=True) == {"loss": torch.tensor(2.0), "share": 1.0}
    with pytest.raises(ValueError, match=r"it\['loss'\], a Tensor of shape \(\)"):
        join_pieces(pieces, [2, 1], "it")


@pytest.mark.parametrize(
    "pieces", [[3, 4], [{"a": 1}, {"b": 1}], [None, torch.zeros(2)], [torch.zeros(3, 2), torch.zeros(3, 2)]]
)
def test_what_cannot_be_joined(pieces: list[Any]) -> None:
    with pytest.raises(ValueError, match="return tensors or lists with an item per sample"):
        join_pieces(pieces, [2, 2], "it")


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Totals:
    number: int
    values: torch.Tensor


def test_an_object_of_inference_mode_that_cannot_be_copied_is_itself() -> None:
    """Its tensors have no version, and an evaluation on such batches was an error."""
    with torch.inference_mode():
        batch = SimpleNamespace(x=torch.ones(3), lock=threading.Lock())
    with normal_tensors(batch) as given:
        assert given is batch


def test_parcels_keep_values_aliases_and_little_else() -> None:
    large = torch.arange(1000.0)
    view = large[3:5]
    value = {"pair": Pair(view, view), "mask": torch.tensor([[True], [False]]), "half": view.bfloat16()}
    value["empty"], value["number"], value["graph"] = torch.zeros(0, 3), 7, nn.Linear(2, 1)(torch.ones(1, 2))
    sent = packed(value)
    assert len(sent["pair"].left.elements) == 8, "the storage of the view went with it"
    got = unpacked(sent, torch.device("cpu"))
    assert got["pair"].left is got["pair"].right and torch.equal(got["pair"].left, view)
    for name in ("mask", "half", "empty"):
        assert torch.equal(got[name], value[name]) and got[name].dtype == value[name].dtype
    assert got["number"] == 7 and not got["graph"].requires_grad
    got["pair"].left.zero_()
    assert view[0] == 3


def test_one_element_of_any_stride_is_sent() -> None:
    """The first column of a micro-batch of one sample ended the run: torch calls its stride of 3 contiguous."""
    column = torch.arange(3.0).reshape(1, 3)[:, :1]
    for value in (column[:, 0], column, column.to(torch.complex64)[:, 0].conj()):
        got = unpacked(packed([value]), torch.device("cpu"))[0]
        assert torch.equal(got, value) and got.shape == value.shape
        assert fingerprint_of([value]) == fingerprint_of([value.clone()])
    assert bytes_view(torch.arange(6).reshape(2, 3).t()).view(torch.int64).tolist() == [0, 3, 1, 4, 2, 5]
    assert not bytes_view(torch.zeros(0, 3)).numel()


def test_mappings_of_other_classes_stay_what_they_are() -> None:
    grouped: defaultdict[str, Any] = defaultdict(list, x=torch.arange(4))
    encoding = UserDict(x=torch.arange(4))  # as Hugging Face's BatchEncoding
    encoding.n_sequences = 1  # type: ignore[attr-defined]
    first, second = split_batch([grouped, encoding], 2)
    assert second[0]["x"].tolist() == second[1]["x"].tolist() == [2, 3]
    assert second[0].default_factory is list and type(second[1]) is UserDict and second[1].n_sequences == 1
    assert first[1]["x"].tolist() == [0, 1] and len(encoding["x"]) == 4


class NetworkDistance(Metric):
    """Computes with a network, as FID does."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(2, 2)

    def update(self) -> None: ...

    def compute(self) -> None: ...


def test_the_network_of_a_metric_is_no_layer() -> None:
    module = Classifier()
    module.distance = NetworkDistance()
    call = find_layers(module)
    pipeline = HalfAPipeline(call.layers, held=())
    pipeline.elsewhere = Elsewhere(module, pipeline)
    pipeline.elsewhere.hide()
    assert len(call.layers) == 8
    object.__setattr__(module, HOLDER, PipelineHolder(pipeline))
    assert metrics_of(module) == {"distance": module.distance}
    assert {name.partition(".")[0] for name, _ in module.named_parameters()} == {"distance"}


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.zeros(2))
        self.pipeline_module = nn.BatchNorm1d(2)
        self.child = nn.BatchNorm1d(2, affine=False)
        self.items: list[Any] = [torch.ones(1)]
        self.table: dict[str, Any] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.recent: deque[int] = deque([1, 2], maxlen=2)
        self.totals, self.array, self.members = Totals(0, torch.zeros(2)), numpy.zeros(2), {1}
        self.nested = ({"deep": [torch.zeros(1)]},)
        self.number, self.gone = 1, "here"
        self.items_elsewhere = self.items


def change_item(module: Stateful) -> None:
    module.items[0] += 1


def grow(module: Stateful) -> None:
    module.items.append(torch.zeros(2))
    module.items = [*module.items, "more"]


CHANGES = {
    "number": lambda m: setattr(m, "number", 2),
    "new": lambda m: setattr(m, "fresh", torch.ones(2)),
    "deleted": lambda m: delattr(m, "gone"),
    "buffer in place": lambda m: m.buffer.add_(1),
    "buffer bound": lambda m: setattr(m, "buffer", torch.ones(3)),
    "child": lambda m: m.child(torch.randn(4, 2)),
    "append": lambda m: m.items.append(3),
    "grow a new list": grow,
    "item in place": change_item,
    "shorter": lambda m: m.items.clear(),
    "table": lambda m: m.table["a"].append(1),
    "counts": lambda m: m.counts.update("ab"),
    "recent": lambda m: m.recent.append(3),
    "record": lambda m: m.totals.values.add_(1),
    "record's number": lambda m: setattr(m.totals, "number", 5),
    "array": lambda m: m.array.__setitem__(0, 2.0),
    "members": lambda m: m.members.add(2),
    "nested": lambda m: m.nested[0]["deep"][0].add_(1),
}


def contents(value: Any) -> Any:
    """Comparable."""
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return ("array", value.tolist())
    if isinstance(value, Totals):
        return contents(vars(value))
    if isinstance(value, deque):
        return ("deque", list(value), value.maxlen)
    return map_children(value, contents)


def state(module: Stateful) -> dict[str, Any]:
    hidden = vars(nn.Module())
    own = {name: contents(value) for name, value in vars(module).items() if name not in hidden}
    buffers = {name: contents(buffer) for name, buffer in module.named_buffers() if "pipeline" not in name}
    return {**own, **buffers}


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_is_undone_or_repeated_elsewhere(name: str) -> None:
    here, there, untouched = Stateful(), Stateful(), Stateful()
    ignored = vars(nn.Module())
    before = Leftovers(here, ignored, undoable=True)
    assert before.changes() == []
    CHANGES[name](here)
    changes = before.changes()
    assert changes and state(here) != state(untouched)
    make_changes(there, unpacked(packed(changes), torch.device("cpu")))
    assert state(there) == state(here)
    assert there.items_elsewhere is there.items or here.items is not here.items_elsewhere
    before.undo()
    assert state(here) == state(untouched)
    assert here.items is here.items_elsewhere


def test_only_the_new_items_of_a_list_are_sent() -> None:
    module = Stateful()
    before = Leftovers(module, vars(nn.Module()), undoable=False)
    module.items.append("new")
    assert {change.kind: change.value for change in before.changes()} == {"extend": ["new"]}


class Seen:
    """An object of a user's own class."""

    def __init__(self) -> None:
        self.number = 0


def test_a_counter_of_memory_that_counts_meanwhile_is_no_change_of_the_step() -> None:
    """The example that README runs was told that its step changes the counter of its callback."""
    module = Stateful()
    module.counter, module.seen = LiveBytes(), Seen()
    before = Leftovers(module, vars(nn.Module()), undoable=False)
    with module.counter:
        tensor = torch.zeros(8)
    module.seen.number += 1
    assert module.counter.peak_bytes == tensor.nbytes and before.changed_objects() == []
    assert [str(change.place) for change in before.changes()] == ["self.seen.number"]


def test_the_pipeline_and_the_weights_are_no_leftovers() -> None:
    module = Classifier()
    module.pipeline_module = nn.BatchNorm1d(2)
    module.listed = [module.head.weight]
    before = Leftovers(module, vars(nn.Module()), undoable=False)
    module.pipeline_module(torch.randn(4, 2))
    with torch.no_grad():
        module.head.weight.add_(1)
    assert before.changes() == []
