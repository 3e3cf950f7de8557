"""Training through the strategy equals training in one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.choice import environment_for
from tests.exhaustive import is_exhaustive
from tests.ranks import run_ranks

HERE = Path(__file__).parent
SCRIPT = HERE / "lightning_multiproc.py"
TIMEOUT_SECONDS = 2400
"""Of a start of many cases, three times what the slowest takes on two busy cores; a job that hangs ends then."""


def check_end(code: int, command: str, log: Path) -> None:
    if code != 0:
        printed = log.read_text()
        where = max(printed.find("failed on rank"), len(printed) - 12000, 0)
        pytest.fail(f"{command} ended with {code}:\n{printed[where : where + 12000]}")


def torchrun(num_processes: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]


class Records:
    """What the reference and each rank of the pipeline recorded."""

    def __init__(self, folder: Path, mode: str, num_processes: int) -> None:
        def read(name: str, rank: int) -> dict[str, Any]:
            return json.loads((folder / f"{name}-{num_processes}-{rank}.json").read_text())

        self.reference = read("reference", 0)
        self.ranks = [read(mode, rank) for rank in range(num_processes)]

    def of(self, case: str) -> Any:
        """The record of a case whose values are the same on every rank."""
        for rank in self.ranks[1:]:
            assert rank[case] == self.ranks[0][case]
        return self.ranks[0][case]


def records_of(request: pytest.FixtureRequest, num_processes: int, folder: Path, kind: str = "loops") -> Records:
    """Run the chosen cases of a kind in one process with Lightning alone, and through the strategy."""
    variables = {"CASES_OF": kind, **environment_for(request, num_processes=num_processes)}
    for mode, num_ranks in (("reference", None), ("pipeline", num_processes)):
        log, arguments = folder / f"{mode}.log", [mode, str(num_processes), str(folder / mode)]
        code = run_ranks(SCRIPT, arguments, num_ranks, log, timeout_seconds=TIMEOUT_SECONDS, variables=variables)
        check_end(code, f"{SCRIPT.name} {' '.join(arguments)}", log)
    return Records(folder, "pipeline", num_processes)


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    return records_of(request, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    return records_of(request, 4, tmp_path_factory.mktemp("four"))


def assert_same(
    actual: Any, expected: Any, path: str = "", tolerance: float = 1e-5, near_zero: float = 1e-6
) -> None:
    """Equal, and numbers equal to 5 digits, or up to ``near_zero``."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for key in expected:
            assert_same(actual[key], expected[key], f"{path}.{key}", tolerance, near_zero)
    elif isinstance(expected, list):
        assert len(actual) == len(expected), path
        for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
            assert_same(left, right, f"{path}[{index}]", tolerance, near_zero)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=tolerance, abs=near_zero), path
    else:
        assert actual == expected, path


@pytest.mark.parametrize("case", ["several_stages", "several_stages_in_all_forms"])
def test_several_stages_on_a_rank_train_like_one_process(two: Records, case: str) -> None:
    record, reference = two.of(case), two.reference[case]
    for found, expected in zip(record["records"], reference["records"], strict=True):
        assert_same(found, expected)


def test_a_resumed_run_of_several_stages_on_a_rank_is_the_uninterrupted_one(two: Records) -> None:
    references = two.reference["several_stages_resumed"]["records"]
    for record, reference in zip(two.of("several_stages_resumed")["records"], references, strict=True):
        check_resumed(record, reference)


def test_layers_leave_a_slow_rank(two: Records) -> None:
    assert_same(two.of("slow_rank"), two.reference["slow_rank"])


def test_a_warm_up_and_a_move_train_like_one_process(two: Records) -> None:
    for found, expected in zip(two.of("warmed_up")["records"], two.reference["warmed_up"]["records"], strict=True):
        assert_same(found, expected)


WARMS_UP = "training begins at the cut [0, 3, 8], with a warm-up of "
LEFT_OUT = "there is no warm-up of 1 epoch, because "
IN_VAIN = ", and nothing would be trained after it"


@pytest.mark.parametrize(
    "run, sentence, has_plan",
    [
        ("default", WARMS_UP + "1 epoch", True),
        ("one epoch", LEFT_OUT + "max_epochs is 1" + IN_VAIN, True),
        ("none", None, True),
        ("steps given", WARMS_UP + "3 steps", True),
        ("no steps given", None, True),
        ("four steps", LEFT_OUT + "max_steps is 4" + IN_VAIN, True),
        ("five steps", WARMS_UP + "1 epoch", True),
        ("more steps than the run has", "no warm-up of 8 steps, because the run has 8 steps" + IN_VAIN, True),
        ("fast", LEFT_OUT + "fast_dev_run only tries the model out", True),
        ("stream", WARMS_UP + "1 epoch", True),
        ("stream of one epoch", LEFT_OUT + "max_epochs is 1" + IN_VAIN, True),
        ("stream without end", LEFT_OUT + "neither max_epochs nor the length of the data says", True),
        ("ended early", WARMS_UP + "1 epoch", False),
        ("plan", None, True),
        ("boundaries", None, False),
        ("off", None, False),
    ],
)
def test_a_fit_says_when_it_plans(two: Records, run: str, sentence: str | None, has_plan: bool) -> None:
    said, other = (rank["sentences"][run]["said"] for rank in two.ranks)
    assert all("(names stay)" in each for each in other), "rank 0 speaks, but for what each rank has now"
    assert all(rank["sentences"][run]["has plan"] == has_plan for rank in two.ranks)
    of_warm_ups = [each for each in said if "warm-up" in each]
    if sentence is None:
        assert not of_warm_ups
        return
    assert sentence in of_warm_ups[0], said
    one_by_one = [each for each in said if "one by one on the first micro-batch" in each]
    if sentence.startswith(WARMS_UP):
        end = "the warm-up is over after step " if has_plan else "the run has ended within its warm-up of 1 epoch"
        assert of_warm_ups[1].startswith(end) and not one_by_one, said
        assert any("has ended within" in each for each in said) != has_plan
    else:
        assert len(of_warm_ups) == len(one_by_one) == 1, said
    moved = [each for each in said if "as planned (until now: [0, 3, 8])" in each]
    assert len(moved) == has_plan == any(" moved in " in each for each in said), said


def test_the_plan_is_kept_beside_the_logs(two: Records) -> None:
    for rank, records in enumerate(each["kept"] for each in two.ranks):
        written, in_the_way = records["written"], records["in the way"]
        assert written["same"] and written["chain"] and written["steps"] == in_the_way["steps"] == 8
        if rank == 0:
            assert any("madpipe-plan.chain.json" in each for each in written["said"])
            assert any("the plan is not saved" in each for each in in_the_way["said"])


@pytest.mark.parametrize("optimizer", ["AdamW", "momentum", "Signs"])
def test_runs_that_move_are_those_that_never_do(two: Records, optimizer: str) -> None:
    """Optimizers, precisions, ZeRO, ties, frozen weights, running statistics, dropout, groups, schedules."""
    later = {4: [[[0, 3, 6, 9], [0, 1, 0]], [[0, 6, 9], [0, 1]]], 2: []}
    never, moves = two.of("moved")[optimizer]
    cuts = moves["cuts"]
    assert all(cut == [[0, 5, 9], [0, 1]] for cut in never["cuts"])
    assert cuts[0] != cuts[1] == [[0, 2, 9], [0, 1]] and cuts[2:] == later[len(cuts)]
    assert_same({**moves, "cuts": None}, {**never, "cuts": None})


def test_a_planned_recomputation_changes_no_loss(two: Records) -> None:
    assert two.of("recomputed") == {}  # the case compares


def test_backwards_in_two_halves_change_no_loss(two: Records) -> None:
    """As a run plans them, and as a plan file has them."""
    assert two.of("in_halves") == {}  # the case compares


def test_a_step_that_ran_out_of_memory_and_runs_again_leaves_the_traces_of_one(two: Records) -> None:
    assert_same(two.of("given_up"), two.reference["given_up"])


def test_a_run_resumed_from_its_warm_up_is_the_uninterrupted_one(two: Records) -> None:
    references = two.reference["warmed_up_and_resumed"]["records"]
    for record, reference in zip(two.of("warmed_up_and_resumed")["records"], references, strict=True):
        check_resumed(record, reference)


@pytest.mark.parametrize("num_processes, num_cuts", [(2, 4), (4, 2)])
def test_a_checkpoint_of_every_cut_is_loaded_under_every_other(
    request: pytest.FixtureRequest, num_processes: int, num_cuts: int
) -> None:
    records: Records = request.getfixturevalue({2: "two", 4: "four"}[num_processes])
    found = records.of("every_cut")
    num_pairs = num_cuts * (num_cuts - 1) if is_exhaustive() else num_cuts
    assert len(found) == num_pairs and sum("ZeRO 1" in pair for pair in found) == num_pairs // 2
    for pair, rows in found.items():
        assert_same(rows, records.reference["every_cut"]["rows"], pair)


def test_the_map_of_a_checkpoint_is_taken_over(two: Records) -> None:
    record = two.of("adopted")
    assert record["devices"] == [0, 1, 0]
    assert_same(record["adopted"], record["same"])


# Each record holds every step's number and loss, every step's rates, the metrics at the end, the numbers of
# steps and epochs, and how often hooks were called.


@pytest.mark.parametrize(
    "case",
    [
        "plain", "tiny_last_batch", "announced_shapes", "clipped", "zero_1", "sequential", "tied",
        "part_groups", "part_groups_zero_1", "plateau", "logged", "stopped_early", "alone", "states_of_optimizers",
    ],
)  # fmt: skip
def test_two_stages_train_like_one_process(two: Records, case: str) -> None:
    assert_same(two.of(case), two.reference[case])


@pytest.mark.parametrize("case", ["plain", "clipped", "zero_1", "tied"])
def test_four_stages_train_like_one_process(four: Records, case: str) -> None:
    assert_same(four.of(case), four.reference[case])


@pytest.mark.parametrize("case", ["replicated", "replicated_zero_1", "replicated_clipped", "replicated_and_moved"])
def test_two_pipelines_of_two_stages_train_like_one_process_on_their_batches(four: Records, case: str) -> None:
    assert_same(four.of(case), four.reference[case])


@pytest.mark.parametrize("case", ["accumulated", "logged_in_windows"])
def test_batches_of_a_window_make_one_step_and_log_each(two: Records, case: str) -> None:
    record, reference = two.of(case), two.reference[case]
    assert_same({**record, "num_hook_calls": None}, {**reference, "num_hook_calls": None})
    # Two windows per epoch, of three batches and of one; one process runs backward for each batch.
    assert reference["num_hook_calls"] == {"on_after_backward": 8, "on_before_optimizer_step": 4}
    assert record["num_hook_calls"] == {"on_after_backward": 4, "on_before_optimizer_step": 4}


def test_early_stopping_stopped(two: Records) -> None:
    assert two.reference["stopped_early"]["epoch"] < 12


def test_bf16_is_close(two: Records) -> None:
    record, reference = two.of("bf16"), two.reference["bf16"]
    assert_same(record["rows"], reference["rows"], tolerance=2e-2)
    assert record["rows"] != reference["rows"], "32 bits were used"


@pytest.mark.parametrize("case", ["resumed", "resumed_zero_1"])
def test_a_resumed_run_is_the_uninterrupted_one(two: Records, case: str) -> None:
    check_resumed(two.of(case), two.reference[case])


def test_a_resumed_run_of_four_stages_is_the_uninterrupted_one(four: Records) -> None:
    check_resumed(four.of("resumed"), four.reference["resumed"])


def check_resumed(record: dict[str, Any], reference: dict[str, Any]) -> None:
    assert_same({key: record[key] for key in reference}, reference)
    assert record["num_rows"] == 4, "the first epoch ran again"


def test_a_saved_model_is_tested_like_the_trained_one(two: Records) -> None:
    record = two.of("saved_after_fit")
    assert_same(record["after"], record["before"])


def test_the_progress_bar_shows_the_loss(two: Records) -> None:
    loss = two.reference["progress_bar"]["metrics"]["train_loss_step"]
    assert f"train_loss_step={loss:.3f}"[:-1] in two.ranks[0]["progress_bar"]["postfix"]
    assert two.ranks[1]["progress_bar"]["postfix"] == ""
    phases = two.ranks[0]["progress_bar"]["phases"]
    assert [name for name, _ in phases] == ["warm-up", "planning", ""]
    assert ["madpipe=warm-up" in phases[0][1], "madpipe=planning" in phases[1][1]] == [True, True]
    assert "madpipe" not in phases[2][1] + two.ranks[0]["progress_bar"]["postfix"]


def test_both_ends_of_a_pipeline_draw_alike(two: Records) -> None:
    record = two.of("same_draws")
    assert record["difference"] == 0.0
    assert 0 < record["share"] < 1


def test_layers_from_specs_do_not_depend_on_the_cut(two: Records) -> None:
    one_stage, two_stages = two.of("layer_specs")["records"]
    assert_same(two_stages, one_stage)


def test_an_earlier_engine_is_collected_without_harm(two: Records) -> None:
    for rank in two.ranks:
        record = rank["collected_engine"]
        assert record["collected"] == record["kept"]
        assert record["linked"] and all(record["linked"])


def test_a_saved_plan_is_run_without_measuring(two: Records) -> None:
    record = two.of("plan_files")
    assert record["same plan"]
    assert record["boundaries"] == record["planned"]
    assert not record["measured"]
    assert record["wrong"].startswith("PlanMismatchError")


def test_a_rank_trains_its_own_layers(two: Records) -> None:
    records = [rank["own_layers_only"] for rank in two.ranks]
    assert sum(record["local"] for record in records) == records[0]["all"]
    for record in records:
        assert 0 < record["local"] < record["all"] == record["after fit"]
        assert record["model is the module"] and record["readable"]
        assert record["children"] == ["embed", "blocks", "head"]
        num_with, num_without = record["gradients"]
        assert num_with > 0 and num_without == 0


@pytest.mark.parametrize(
    "reason, sentence",
    [
        ("outside", "has parameters outside its pipeline layers (scale; 1 in all)"),
        (
            "one layer",
            "OneLayer has 1 pipeline layer for 2 stages: use at most 1 stage, MadPipeStrategy(num_stages=1), "
            "which makes 2 pipelines of the 2 processes, or Trainer(devices=1); or name finer layers",
        ),
        (
            "one trained layer",
            "1 of them with trainable parameters: use at most 1 stage, MadPipeStrategy(num_stages=1), which "
            "makes 2 pipelines of the 2 processes, or Trainer(devices=1)",
        ),
        ("optimizers", "a pipeline works with one optimizer"),
        ("manual", "leave automatic_optimization = True"),
        ("backward", "overrides backward()"),
        ("shared", "TiedModule"),
        ("keywords", "training_step calls self.forward() with the keyword arguments x"),
        ("no forward", "training_step returns for this batch without a call of self.forward()"),
        ("parts", "forward(), uses parts of self.net"),
        ("parts", "and leave there what they set on themselves: call it as a whole"),
        ("parts", "Set modes (eval()), buffers and weights in a hook, such as on_train_batch_start"),
        # One process trains; a check ended with torch's words about an inplace operation.
        (
            "tied max_norm",
            "self.embed (Embedding) has max_norm=1, by which it changes its weight whenever it runs",
        ),
        ("penalty", "training_step uses embed.weight other than by its call of self.forward()"),
        (
            "penalty on a layer",
            "training_step uses embed.weight other than by its call of self.forward()",
        ),
        ("penalty on parts", "forward(), uses parts of self.net"),
        ("forward in a hook", "self.forward() is called outside a step"),
        ("net in a hook", "self.net() is called outside a step"),
        ("value clipping", "clip by 'norm'"),
        ("fp16", "needs a device that DeepSpeed trains on in fp16"),
        ("stages", "num_stages=3 does not divide the 2 processes"),
        # They were cut along time, which was called samples.
        ("unstacked", "lists of 4 tensors, one for each sample of the loader's batch_size, and all have 6 rows"),
        ("no tensors", "holds no tensor whose dimension 0 counts its samples"),
        ("data", "ranks 0 and 1 of a pipeline read different batches"),
        ("memory", "InfeasibleError"),
        # What its user calls the layer was not said.
        ("failing", "layer '3.FailsInBackward' (self.blocks.2) fails in its backward for the input"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(two: Records, reason: str, sentence: str) -> None:
    refusal = two.of("refusals")[reason]
    assert sentence in refusal
    if reason not in ("memory", "failing"):
        assert refusal.startswith("MisconfigurationException")


@pytest.mark.parametrize(
    "case",
    [
        "stashing, momentum", "stashing, adam", "2bw, momentum", "2bw, adam", "vertical-sync, momentum",
        "vertical-sync, adam",
    ],
)  # fmt: skip
def test_a_pipeline_that_never_drains_trains_as_delayed_updates_in_one_process(two: Records, case: str) -> None:
    assert two.of("never_drains")[case]["delay"] == 1  # the case compares


@pytest.mark.parametrize("form", ["zero 1", "windows", "bf16"])
def test_a_pipeline_that_never_drains_in_other_forms(two: Records, form: str) -> None:
    assert two.of("in_other_forms")[form] == {}  # the case compares


@pytest.mark.parametrize(
    "pair",
    [
        f"{mode} to {other}"
        for mode in ("stashing", "2bw", "vertical-sync")
        for other in ("stashing", "2bw", "vertical-sync", "flush")
    ],
)
def test_a_pipeline_that_never_drains_goes_on_from_a_checkpoint(two: Records, pair: str) -> None:
    assert two.of("rests_for_checkpoints")[pair] == {}  # the case compares


def test_errors_end_a_pipeline_that_never_drains(two: Records) -> None:
    assert two.of("failures_in_flight") == {}  # the case compares


def test_four_ranks_that_never_drain(four: Records) -> None:
    assert four.of("four_ranks_in_flight") == {}  # the case compares


def test_losses_of_a_pipeline_that_never_drains(two: Records) -> None:
    assert "weight_versions '2bw' never does: loss='mean'" in two.of("losses_in_flight")["refusal"]


def test_hooks_of_a_pipeline_that_never_drains(two: Records) -> None:
    for rank in two.ranks:
        found = rank["hooks_in_flight"]["refusals"]
        assert "changes weights" in found["Writes"] and "register_step_post_hook" in found["Writes"]
        assert "ReadsState changes the optimizer's state (momentum_buffer)" in found["ReadsState"]
        assert "calls torch.distributed.all_reduce at asynchronous_cases.py" in found["Meets"]
        assert "use Trainer(gradient_clip_val=...)" in found["Clips"]
        # Each rank made the change at a step of its own, and nothing compared them.
        assert "on_before_optimizer_step of Slows changes 'lr' of the optimizer's groups" in found["Slows"]
        assert "in on_train_batch_start" in found["Slows"]
        assert "changes 'lr' of the optimizer's groups" in found["SlowsBehind"]


def test_logs_of_hooks_weigh_as_their_batches_in_a_pipeline_that_never_drains(two: Records) -> None:
    assert two.of("weights_of_logs_in_flight") == {}  # the case compares


def test_lightning_starts_the_processes(two: Records, tmp_path: Path) -> None:
    arguments, log = ["launcher", "2", str(tmp_path / "launcher")], tmp_path / "log"
    check_end(run_ranks(SCRIPT, arguments, None, log, timeout_seconds=TIMEOUT_SECONDS), "launcher", log)
    for rank in range(2):
        record = json.loads((tmp_path / f"launcher-2-{rank}.json").read_text())["plain"]
        assert_same(record, two.reference["plain"])
