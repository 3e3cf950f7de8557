"""What steps and hooks log, count and write is what it is in one process, or is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lightning.test_lightning_pipeline import Records, assert_same, records_of


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    folder: Path = tmp_path_factory.mktemp("writing")
    return records_of(request, 2, folder, "writing")


@pytest.mark.parametrize("moved_after", ["epochs", "steps"])
def test_numbers_that_are_logged_for_layers_go_with_them(two: Records, moved_after: str) -> None:
    """A rank went on showing the last number of a layer that had left it, and means of an epoch began anew."""
    everything, *ranks = (record["numbers_of_layers"][moved_after] for record in (two.reference, *two.ranks))
    for own in ranks:
        for row, expected in zip(own, everything, strict=True):
            assert_same(row, {name: expected[name] for name in row})
        assert own[0].keys() != own[-1].keys() and own[-1]
    assert {name for own in ranks for name in own[-1]} == everything[-1].keys()
    num_weights = [sum(name.startswith("norm/") for name in own[-1]) for own in ranks]
    assert sum(num_weights) == sum(name.startswith("norm/") for name in everything[-1])


def test_iterators_in_tuples_give_micro_batches_what_they_give_the_batch(two: Records) -> None:
    """Each run of the step drew the next item, also in trials: the loss was another one, and nothing was said."""
    assert_same(two.of("drawn_from_tuples"), two.reference["drawn_from_tuples"])


def test_what_a_step_does_for_each_micro_batch_is_told_where_nothing_is_compared(two: Records) -> None:
    """With loss='mean' a counter grew four times a batch, and no line said so."""
    [line] = [line for rank in two.ranks for line in rank["repeated"]["counts"]]
    assert line.startswith("with loss='mean' training_step runs once for each of the 4 micro-batches")
    assert "(self.count, self.log('root'))" in line


def test_writing_to_files_that_were_open_before_is_told(two: Records) -> None:
    """Each micro-batch and each trial wrote a line, and nothing was said."""
    said = [line for rank in two.ranks for line in rank["repeated"]["writes"] if "opened before it" in line]
    assert len(said) == 1 and "training_step writes to self.lines, self.table, opened before it" in said[0]


def test_values_that_a_step_writes_into_the_trainers_tables_are_told(two: Records) -> None:
    """They were missing on rank 0, and on the other those of the last micro-batch: nothing was said."""
    said = [line for rank in two.ranks for line in rank["repeated"]["tables"] if "itself" in line]
    assert [line.partition(" itself")[0] for line in said] == [
        "training_step writes trainer.callback_metrics['hand']",
        "training_step writes trainer.progress_bar_metrics['shown']",
    ]
    assert not any("itself" in line for rank in two.ranks for line in rank["repeated"]["reads"])


def test_a_loss_of_the_file_that_keeps_something_is_told(two: Records) -> None:
    """Its list had 254 entries instead of 16 on the last stage, and none on the first one: nothing was said."""
    said = [line for rank in two.ranks for line in rank["repeated"]["loss"] if "changes a" in line]
    assert len(said) == 1 and said[0].startswith("training_step changes a KeepsLosses, and objects of this class")


WRITES_TO = {
    "text pipe": "writes to self.target, opened", "printed to a pipe": "writes to self.target, opened",
    "binary pipe": "writes to self.target, opened", "pipe of bytes": "writes to self.target, opened",
    "table in a pipe": "writes to self.target, opened", "descriptor": "writes to the file descriptor",
    "gzip": "writes to self.target, opened", "bz2": "writes to self.target, opened",
    "lzma": "writes to self.target, opened", "socket": "calls socket.sendall()",
    "file of a socket": "writes to self.target[0], opened", "connection": "calls Connection.send()",
    "queue": "calls Queue.put()", "database": "writes to self.target, opened",
    "cursor": "writes to self.target, opened", "named temporary file": "writes to self.target.file, opened",
    "archive": "writes to self.target.fp, opened", "process": "writes to self.target.stdin, opened",
    "opened by bz2": "log.bz2' for writing", "opened by torch": "log.pt' for writing",
    "standard output": "prints or logs to the terminal in writing_cases.py:", "log": "logs to '",
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES_TO)
def test_writing_where_nothing_tells_how_much_was_written_is_told(two: Records, name: str) -> None:
    """Lines in pipes, rows in tables and messages came several times, because only places in files were asked."""
    [said] = [line for rank in two.ranks for line in rank["written_there"][name]]
    assert said.startswith("training_step ") and WRITES_TO[name] in said


def test_of_what_a_step_prints_that_of_one_run_for_each_batch_is_shown(two: Records) -> None:
    """Each micro-batch printed, and each trial, with a loss that is none of the training's: 60 lines for 2."""
    first, last = (rank["printed"]["steps"] for rank in two.ranks)
    shown = two.reference["printed"]["steps"]["shown"]
    expected = [line for line in shown if not line.startswith("the last")]
    own = [line for line in last["shown"] if not line.startswith(("the last", "itself"))]
    assert own == [line for line in expected if not line.startswith("itself")]
    assert first["shown"] == [line for line in shown if line.startswith("itself")]
    # A line of code that another micro-batch comes to first is shown, too.
    seldom = [line for line in last["shown"] if line.startswith("the last")]
    assert set(seldom) >= {line for line in shown if line.startswith("the last")}
    assert 0 < len(seldom) == len(set(seldom))
    [said] = [*first["said"], *last["said"]]
    assert said.startswith("training_step prints or logs to the terminal in writing_cases.py:")


def test_of_what_layers_print_nothing_is_shown_of_trials(two: Records) -> None:
    """A layer printed 17 times for each of its runs in the check of layers."""
    shown = [rank["printed"]["layers"]["shown"] for rank in two.ranks]
    reference = two.reference["printed"]["layers"]["shown"]
    samples = [sum(int(line.split()[-1]) for line in each) for each in (*shown, reference)]
    assert sum(samples[:-1]) == samples[-1] and not two.reference["printed"]["layers"]["said"]
    [said] = [line for rank in two.ranks for line in rank["printed"]["layers"]["said"]]
    assert said.startswith("a layer or forward() prints or logs to the terminal in writing_cases.py:")


def test_nothing_is_told_of_a_step_that_writes_nowhere(two: Records) -> None:
    assert [rank["written_there"]["none of them"] for rank in two.ranks] == [[], []]


def test_layers_that_write_are_told(two: Records) -> None:
    """Each micro-batch wrote a line, and so did trials and batches that were given up: nothing was said."""
    found = {name: two.ranks[0]["written_by_layers"][name] for name in ("held", "opened", "none")}
    assert [line[:48] for line in found["held"]] == ["a layer or forward() writes to tests.lightning.w"]
    [opened] = found["opened"]
    assert opened.startswith("a layer or forward() opens '") and "each of these writes" in opened
    assert not found["none"]


@pytest.mark.parametrize("how", ["cut", "whole", "at once"])
def test_hooks_see_what_a_step_does_to_its_batch(two: Records, how: str) -> None:
    """They saw the batch as it was before the step: what it had put there was missing."""
    for rank in two.ranks:
        assert_same(rank["changed_batches"][how], two.reference["changed_batches"][how])


@pytest.mark.parametrize("how", ["cut", "whole"])
def test_hooks_see_what_a_step_sets_on_its_batch(two: Records, how: str) -> None:
    """Attributes that it had set on a batch of a class of its own were missing, without a word."""
    for rank in two.ranks:
        assert_same(rank["marked_batches"][how], two.reference["marked_batches"][how])


def test_what_a_step_sets_on_an_object_of_all_micro_batches_is_told(two: Records) -> None:
    [line] = two.ranks[1]["marked_batches"]["told"]
    assert "training_step changes batch.about.mean of an object that is not cut" in line


def test_what_a_step_puts_into_its_batch_for_each_micro_batch_is_told(two: Records) -> None:
    each, windows = (two.ranks[1]["changed_unevenly"][name] for name in ("each", "in windows"))
    assert len(each) == 1 and "training_step changes batch['largest'], which hooks such as" in each[0]
    assert any(
        "(batch['logits']), and with accumulate_grad_batches it runs at the end" in line for line in windows
    )


def test_hooks_that_write_on_every_rank_are_told(two: Records) -> None:
    """Each line stood in the file once for each rank, and nothing was said."""
    found = two.ranks[1]["written_by_hooks"]
    opens, prints = sorted(found["appended"])  # whichever is said first
    assert opens.startswith("on_train_epoch_end of AppendsEpochs opens '") and "epochs.txt' for writing" in opens
    assert prints.startswith("on_train_epoch_end of AppendsEpochs prints, and hooks run on each of the 2 ranks")
    [predicts] = found["predicted"]
    assert predicts.startswith("on_predict_batch_end of WritesPredictions opens '")


def test_hooks_that_write_by_their_rank_are_not_told(two: Records) -> None:
    assert [rank["written_by_hooks"]["by rank"] for rank in two.ranks] == [[], []]


@pytest.mark.parametrize("module", ["Flow", "FlowAsForward", "SumsByItself", "ChangesBetween"])
def test_tensors_that_calls_change_in_place_are_those_of_one_process(two: Records, module: str) -> None:
    """A sum of layers was 0, had no gradient, or was the last one everywhere: each was refused with other reasons.

    A list that a step lengthens between its calls was said to be read by forward().
    """
    assert_same(two.of("changed_in_place")[module], two.reference["changed_in_place"][module])


@pytest.mark.parametrize(
    "kind",
    [
        "class of another file", "array", "bytes", "view of bytes", "number of C", "array of C", "shared value",
        "shared array", "queue", "queue by rank", "simple queue", "variable of a context",
        "variable without a value", "variables of a thread", "class of a function", "class that is held",
        "kept results", "lines", "bytes of a file",
    ],
)  # fmt: skip
def test_what_a_step_counts_in_gives_the_losses_of_one_process(two: Records, kind: str) -> None:
    """Trials counted, too, and each micro-batch, 9 to 50 % off from the first step: nothing was said."""
    for rank in two.ranks:
        assert_same(rank["kept_states"][kind], two.reference["kept_states"][kind])


LEFT = {
    "a list of the file": "layer_writes_cases.AUX", "a list of the file, layers that are named": "_cases.AUX",
    "a list of the file, layers that are found": "_cases.AUX", "a list of the module": "self.values",
    "a method of the module": "self.values", "a dict": "_cases.LAST", "an attribute": "self.value",
    "a context manager": "_cases.STACK",
}  # fmt: skip


@pytest.mark.parametrize("kind", LEFT)
def test_a_loss_of_what_a_layer_leaves_outside_of_itself_is_refused(two: Records, kind: str) -> None:
    """The auxiliary loss was left out whole, 5 to 26 % of the loss, and nothing was said."""
    for rank in two.ranks:
        *_, refusal = rank["said_of_layers"][kind]
        assert refusal.startswith("MisconfigurationException: self.net.") and "(Leaves) changes " in refusal
        assert f"{LEFT[kind]} while it runs, and training_step has a loss that depends on it" in refusal


def test_a_step_that_cannot_run_without_what_a_layer_leaves_is_refused(two: Records) -> None:
    for rank in two.ranks:
        *_, refusal = rank["said_of_layers"]["a step that raises without it"]
        assert "(Leaves) changes " in refusal and "training_step raises RuntimeError: stack expects" in refusal


def test_predictions_of_what_a_layer_leaves_are_refused(two: Records) -> None:
    """They were None."""
    for rank in two.ranks:
        assert "AUX while it runs, and predict_step returns it" in rank["said_of_predictions"]


def test_what_a_layer_changes_in_a_dict_of_the_module_is_not_said_of_the_step(two: Records) -> None:
    """It was said that training_step changes it, which reads nothing of it."""
    lines = [line for rank in two.ranks for line in rank["said_of_layers"]["a dict that both name"]]
    assert len(lines) == 3 and lines[1:] == ["not refused"] * 2
    assert "(Leaves) changes self.table while it runs, and on_train_epoch_end reads it" in lines[0]


READ_BY = {
    "what a step logs": "self.value while it runs, and training_step reads it",
    "what an evaluation logs": "_cases.AUX while it runs, and validation_step and training_step read it",
    "a hook": "_cases.AUX while it runs, and on_train_epoch_end reads it",
    "a callback": "_cases.AUX while it runs, and on_train_epoch_end of Reads reads it",
    "a metric of the file": "_cases.MEAN while it runs, and on_train_epoch_end reads it",
    "the Trainer": "trainer.act while it runs, and on_train_batch_end reads it",
    "a buffer of the module": "self.average while it runs, which is no part of that layer",
}


@pytest.mark.parametrize("kind", READ_BY)
def test_what_a_layer_leaves_outside_of_itself_is_told_where_it_is_read(two: Records, kind: str) -> None:
    """What was logged was another number on each rank, 22 % to five times off, and nothing was said."""
    first, *_ = two.ranks
    line, error = first["said_of_layers"][kind]
    assert error == "not refused" and "self.net.2 (Leaves) changes " in line and READ_BY[kind] in line
    number = "; what training_step logs as 'seen' is another number" if kind == "what a step logs" else ""
    assert number in line


def test_a_metric_that_layers_call_is_told_in_one_line(two: Records) -> None:
    """There was a line for each of its counts, which called it "a layer" and them no part of it."""
    line, error = two.ranks[0]["said_of_layers"]["a metric that a layer calls"]
    assert error == "not refused" and "and others while it runs in the layers" in line
    assert line.startswith("madpipe: self.mean (MeanMetric) keeps ")


def test_a_metric_that_no_layer_runs_is_told_in_one_line_that_says_so(two: Records) -> None:
    """A second line said that the rank that runs it has its counts, which none has, and a capture left its own."""
    line, error = two.ranks[0]["said_of_layers"]["a metric in a forward that is written down"]
    words = (
        "self() of MetricInForward also sets self.num_calls, updates self.accuracy (MulticlassAccuracy), and is "
    )
    assert error == "not refused" and line.startswith(f"madpipe: {words}not run in a pipeline")


def test_what_a_layer_keeps_of_its_input_is_told_where_a_hook_reads_it(two: Records) -> None:
    """The hook saw the last micro-batch alone, or nothing, which was not said, or failed in words of Python."""
    lines = [line for rank in two.ranks for line in rank["said_of_layers"]["own load that a hook reads"]]
    [told] = [line for line in lines if line != "not refused"]
    reads = "on_train_batch_end of HookReadsLoad reads self.net.2.load, which a layer sets while it runs"
    assert told.startswith(reads) and len(lines) == 3
    ends = [rank["said_of_layers"]["own load that a hook needs"][-1] for rank in two.ranks]
    raised = "on_train_batch_end of HookReadsLoad raises AttributeError on a rank that does not run that layer"
    assert all(raised in end and reads in end for end in ends)


def test_a_hook_that_needs_what_a_hook_on_a_layer_keeps_is_told_so(two: Records) -> None:
    """A rank without that layer raised Python's own KeyError."""
    ends = [rank["said_of_layers"]["a feature that a hook needs"][-1] for rank in two.ranks]
    words = "on_train_batch_end of HookNeeds raises KeyError where it reads self.features, which the hook keep on "
    assert all(f"{words}self.net.2 writes" in end for end in ends), ends


def test_a_hook_that_asks_for_what_a_hook_on_a_layer_keeps_goes_on(two: Records) -> None:
    ends = [rank["said_of_layers"]["a feature that a hook asks for"][-1] for rank in two.ranks]
    assert ends == ["not refused"] * 2


@pytest.mark.parametrize("kind", ["a layer that logs", "a layer that logs in evaluation"])
def test_a_layer_that_logs_is_told(two: Records, kind: str) -> None:
    """It logged the number of one micro-batch, or of a trial, on one rank, and nothing was said."""
    line, error = two.ranks[0]["said_of_layers"][kind]
    assert error == "not refused" and line.startswith(
        "madpipe: self.net.2 (Leaves) calls self.log('inner') while it runs"
    )


def test_several_layers_that_log_are_told_in_one_line(two: Records) -> None:
    line, error = two.ranks[0]["said_of_layers"]["two layers that log"]
    assert error == "not refused" and "(Leaves) and self.net.3 (Leaves) call self.log('inner') while they" in line


@pytest.mark.parametrize("kind", ["own count", "a cache", "a list that nobody reads", "none"])
def test_nothing_is_told_of_what_no_step_and_no_hook_reads(two: Records, kind: str) -> None:
    assert [rank["said_of_layers"][kind] for rank in two.ranks] == [["not refused"]] * 2


def test_what_a_layer_hands_on_with_its_output_is_what_it_is_in_one_process(two: Records) -> None:
    for rank in two.ranks:
        assert_same(rank["handed_on"], two.reference["handed_on"])


@pytest.mark.parametrize(
    "kind",
    [
        "one nn.Sequential, a buffer", "one nn.Sequential, a new buffer", "one nn.Sequential, an attribute",
        "layers that are found, a buffer", "layers that are found, a new buffer",
        "layers that are found, an attribute", "elements, a buffer", "elements, a new buffer",
        "elements, an attribute",
        "layers that are named, a buffer", "layers that are named, an attribute",
    ],
)  # fmt: skip
def test_weights_that_layers_set_in_their_first_call_are_set_once(two: Records, kind: str) -> None:
    """Looks at layers before the first step set them, too, and put back that they had: they were set twice.

    So the loss was another one from the first step, layers were said to mix samples, and those that were found
    were refused.
    """
    for rank in two.ranks:
        assert_same(rank["weights_set_once"][kind], two.reference["weights_set_once"][kind])
        assert rank["weights_set_once"][kind]["said"] == []


def test_weights_that_a_forward_writes_are_named_once(two: Records) -> None:
    for number, kind in enumerate(["SetsNamedWeights", "SetsOtherWeights"]):
        [line] = [line for rank in two.ranks for line in rank["said_of_weights"][number]]
        assert f"weight of {kind}" in line and "call the model once in __init__()" in line
        assert line.endswith("in the place of what forward() has written") is bool(number)
