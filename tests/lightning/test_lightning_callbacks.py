"""Callbacks, checkpoints, optimizers, precision and settings: as in one process, or refused with a sentence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning.callbacks
import torch

import lightning_madpipe
from tests.lightning.test_lightning_pipeline import Records, assert_same, check_end, records_of
from tests.ranks import run_ranks

HERE = Path(__file__).parent
FEATURES = Path(lightning_madpipe.__file__).parent / "FEATURES.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("callbacks")


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, folder: Path) -> Records:
    return records_of(request, 2, folder, "callbacks")


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    return records_of(request, 4, tmp_path_factory.mktemp("callbacks-4"), "callbacks")


@pytest.mark.parametrize(
    "case",
    [
        "watching_callbacks", "timed_out", "rate_finder", "rate_finder_with_a_plan",
        "resumed_by_word", "names_and_values", "files_of_one_device", "folders_on_other_stages",
        "resumed_on_other_stages", "overridden_state_dicts", "optimizers", "own_steps", "settings", "loggers",
        "profilers",
        "after_an_exception", "averages", "averages_resumed", "kept_weights", "kept_far_away",
        "kept_with_buffers", "kept_in_one_shape", "kept_where_orders_coincide", "metrics_made_in_hooks",
        "metrics_asked_anywhere", "metrics_of_one_rank", "metrics_asked_in_steps", "metrics_told_by_both",
        "metrics_told_before_the_layers", "metrics_called_in_steps", "metrics_told_by_rank_0",
        "metrics_of_batches_that_run_again", "metrics_told_in_two_fits",
        "loaders_asked_for_early",
        "validation_at_intervals_of_time", "throughput_of_evaluation", "batches_that_are_absent",
    ],
)  # fmt: skip
def test_two_stages_do_as_one_process(two: Records, case: str) -> None:
    if case == "rate_finder" and pytorch_lightning.__version__ < "2.6":
        pytest.skip("one process forgets the rate that it found: Lightning 2.5.0 restores the old one after it")
    assert_same(two.of(case), two.reference[case])


def test_what_a_hook_makes_of_an_optimizers_states_is_said(two: Records) -> None:
    for rank in two.ranks:
        said = rank["states_of_optimizers"]
        assert all("on_train_batch_end of " in line for line in said)
    assert any(
        "Moments takes" in line or "Moments computes" in line for line in two.ranks[0]["states_of_optimizers"]
    )
    assert not any("Decays" in line for line in two.ranks[0]["states_of_optimizers"])


def test_metrics_of_predictions_are_said_to_count_each_rank(two: Records) -> None:
    for rank in two.ranks:
        found = rank["metrics_of_predictions"]
        assert (found["own"], found["every"]) == (21.0, 42.0)
        [line] = found["said"]
        assert "a SumMetric that the script asks after trainer.predict" in line and "count them 2 times" in line


@pytest.mark.parametrize(
    "kind",
    [
        "kept steps", "kept epochs", "kept best two", "kept highest", "kept link", "kept interval", "kept weights",
    ],
)  # fmt: skip
def test_the_checkpoints_that_one_process_keeps_are_kept(two: Records, kind: str) -> None:
    assert_same(two.of("model_checkpoints")[kind], two.reference["model_checkpoints"][kind])


def test_random_numbers_go_on_after_a_checkpoint(two: Records) -> None:
    record = two.of("draws_go_on")
    assert record["again"] == record["whole"] and record["difference"] < 1e-6


def test_sums_over_stages_are_said(two: Records) -> None:
    """A number that a hook adds up over all ranks was as many times that of one process as there are stages."""
    for rank in two.ranks:
        number, [line] = rank["sums_over_stages"]["Summing"]
        assert number == 42.0 and "on_validation_epoch_end of Summing calls torch.distributed.all_reduce" in line
        assert "same_data_cases.py:" in line and "2 times as much as in one process" in line
        assert rank["sums_over_stages"]["Highest"] == [21.0, []]


def test_copies_from_before_the_checkpoint_are_said(two: Records) -> None:
    """A resumed run makes them before its weights are loaded, and in one process behind that: nothing said so."""
    for rank in two.ranks:
        found = rank["copies_before_the_checkpoint"]
        assert found["none"] == found["later"] == found["saved"] == [0]
        for kind, place in (("list", "self.anchor"), ("dict", "Averages.average")):
            anew, line = found[kind]
            assert anew == 0 and line.startswith(f"{place}: copies of weights, made by configure_optimizers"), line


def test_hooks_are_called_in_the_order_of_one_process(two: Records) -> None:
    """All but ``on_before_backward``: the engine runs several backwards in a step."""
    for owner, calls in two.of("hooks").items():
        expected = [name for name in two.reference["hooks"][owner] if name != "on_before_backward"]
        assert calls == expected
        assert {"on_before_zero_grad", "on_after_backward", "on_save_checkpoint"} <= set(calls)


def test_the_summary_shows_the_whole_model(two: Records) -> None:
    assert_same(two.ranks[0]["summaries"], two.reference["summaries"])
    assert all(shown is None for shown in two.ranks[1]["summaries"].values())


def test_a_model_of_specs_has_a_summary_of_its_stage(two: Records) -> None:
    assert [rank["summary_of_specs"]["names"] for rank in two.ranks] == [["pipeline_module"]] * 2


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed", "16-true"])
def test_low_precision_is_close(two: Records, precision: str) -> None:
    record, reference = two.of("low_precision")[precision], two.reference["low_precision"][precision]
    assert_same(record, reference, tolerance=2e-2)
    assert record != reference, "32 bits were used"


def test_the_loss_scale_is_that_of_the_configuration(two: Records) -> None:
    small, large = two.of("loss_scales")["8"], two.of("loss_scales")["40"]
    assert small["scale"] == 2**8 and small["skipped"] == 0 and small["moved"]
    assert small["ZeRO"] == 1, "the optimizer whose fp32 weights are known by parameter"
    # As under Lightning's own DeepSpeed strategy, a skipped step counts, and schedulers go on.
    assert large["skipped"] == 8 and large["scale"] == 2**32 and not large["moved"]
    assert large["steps"] == small["steps"] == [8, 8] and large["rates"] == small["rates"]


def test_settings_of_a_second_fit_are_those_it_has_then(two: Records) -> None:
    for rank in two.ranks:
        assert rank["changed_settings"]["engine"] == [0.5, 8]
        assert "set through MadPipeStrategy class" in rank["changed_settings"]["another Trainer"]


def test_throughput_counts_a_pipeline_once() -> None:
    """Two pipelines of three stages: twice the batches of one, and the operations of three devices."""
    from lightning_fabric.utilities.throughput import Throughput

    from lightning_madpipe.compat.callback_patches import count_pipelines

    monitor = pytorch_lightning.callbacks.ThroughputMonitor(batch_size_fn=len)
    monitor._throughputs = {"train": Throughput(available_flops=100.0, world_size=6, window_size=2)}
    count_pipelines(monitor, num_pipelines=2, num_stages=3)
    throughput = monitor._throughputs["train"]
    throughput.update(time=1.0, batches=1, samples=4, flops=30)
    throughput.update(time=2.0, batches=2, samples=8, flops=30)
    seen = throughput.compute()
    assert seen["device/samples_per_sec"] == 4.0 and seen["samples_per_sec"] == 8.0
    assert seen["device/mfu"] == pytest.approx(30 / 300)


# Whole-model files


def check_whole_models(records: Records) -> None:
    reference = records.reference["whole_model_files"]["fp32"]
    for kind, record in records.of("whole_model_files").items():
        assert record["names"] == reference["names"], kind
        assert record["same"], f"{kind}: the callback, the Trainer, the strategy and consolidate() differ"
        assert record["types"] == ["torch.float32"], "master weights"
        assert record["hyper-parameters"] == reference["hyper-parameters"]
        assert record["note"] == ["hello at 8"] * 3
        assert record["now"] == ["now", ["hello at 8"]], "load_from_checkpoint: hyper-parameters and hooks"
        tolerance = 1e-5 if kind.startswith("fp32") else 1e-2
        difference = torch.tensor(record["outputs"]) - torch.tensor(reference["outputs"])
        assert difference.abs().max() < tolerance, kind


def test_whole_model_files_are_those_of_one_device(two: Records) -> None:
    check_whole_models(two)


def test_metrics_that_one_of_two_pipelines_tells_something_are_asked_by_both(four: Records) -> None:
    for rank in four.ranks:
        assert rank["metrics_asked_anywhere"]["metrics"]["later_1"] == 42.0


def test_whole_model_files_of_two_pipelines_are_those_of_one(four: Records) -> None:
    """With ZeRO-1 each replica has a half of the master weights."""
    check_whole_models(four)


def test_a_whole_model_file_needs_neither_deepspeed_nor_this_package(two: Records, folder: Path) -> None:
    program = """
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("deepspeed", "deepspeed_partition", "lightning_madpipe"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import json
from tests.lightning import checkpoint_cases
modules = [checkpoint_cases.Keeping.load_from_checkpoint(path) for path in sys.argv[1:]]
print(json.dumps([checkpoint_cases.outputs(module) for module in modules]))
"""
    files = folder / "pipeline" / "whole" / "bf16 ZeRO-1"
    paths = [str(files / f"{file}.ckpt") for file in ("trainer", "callback", "offline")]
    printed = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    for outputs in json.loads(printed.stdout.splitlines()[-1]):
        assert_same(outputs, two.of("whole_model_files")["bf16 ZeRO-1"]["outputs"])


@pytest.mark.parametrize(
    "made, sentence",
    [
        (
            "setup",
            "Averaging.average is an AveragedModel of all layers, of which each rank of a pipeline has a part",
        ),
        ("on_fit_start", "Averaging.average (AveragedModel) is a copy of the layers that this rank has now"),
        ("in the module", "self.average is an AveragedModel of all layers"),
    ],
)
def test_averages_that_cannot_follow_the_layers_are_refused(two: Records, made: str, sentence: str) -> None:
    """They were averaged with the weights of other layers, or ended one rank alone."""
    said = two.of("averages_that_stay")[made]
    assert sentence in said and "for name, weight in pl_module.named_parameters()}" in said


def test_a_plugin_writes_whole_model_files(two: Records) -> None:
    names = two.of("weights_past_a_plugin")["names"]
    assert names == [name for name in two.reference["whole_model_files"]["fp32"]["names"] if "width" not in name]


# Failures


def test_a_failed_save_leaves_what_was_there(two: Records) -> None:
    record = two.of("failed_saves")
    assert "full.ckpt cannot be written: [Errno 28] No space left on device" in record["failed"]
    assert record["kept"] and record["again"]
    assert record["names"] == ["file", "full.ckpt", "weights.ckpt"]
    # Of a file of weights half was there, also in the place of a whole one.
    assert "No space left on device: its tensors take" in record["full"] and " for them." in record["full"]
    assert "cannot be written" in record["no folder"] and "cannot be written" in record["no file"]
    # A checkpoint once took the place of any folder of its name.
    assert "it is a folder with other things in it (notes.txt)" in record["a user's folder"]
    assert record["what was in it"] == "my work"
    assert "storage_options are for a checkpoint of weights only" in record["options"]


def test_sections_of_a_step_count_its_micro_batches(two: Records) -> None:
    first, last = (rank["sections_of_steps"] for rank in two.ranks)
    assert first["number"] == 0 and last["number"] == 2 * last["batches"] > 0
    said = [line for rank in two.ranks for line in rank["sections_of_steps"]["said"]]
    assert (
        len(said) == 1 and "training_step profiles its section 'of the step': the profiler of the last" in said[0]
    )


def test_a_checkpoint_after_an_evaluation_says_that_the_optimizer_is_gone(two: Records) -> None:
    # With `fit(); test(); save_checkpoint()` a run went on with an optimizer of its own without a word, and after
    # the evaluation of another Trainer the checkpoint could not be loaded.
    record = two.of("saved_after_an_evaluation")
    for what in ("validate", "test"):
        [line] = record[what]
        assert "has no states of the optimizer, which went when" in line and "Save before validate" in line
        *sentences, number, has_groups = record[f"optimizers in {what}"]
        assert [sentence.partition(":")[0] for sentence in sentences[:3]] == [
            "IndexError",
            *["AttributeError"] * 2,
        ]
        assert all("that of fit ended when this evaluation began" in sentence for sentence in sentences)
        assert len(sentences) == 4 and (number, has_groups) == ("0", "False")
    [line] = record["after"]
    assert "has no states of an optimizer, because it was saved after validate, test or predict" in line
    assert record["before"] == []
    assert "another Trainer has run this module since" in record["by another"]
    assert "give weights_only=True" in record["by another"] and record["weights"]


@pytest.mark.parametrize(
    "reason, sentence",
    [
        ("cut short", "/checkpoint is damaged: mp_rank_01_model_states.pt has"),
        ("unreadable", "is damaged: mp_rank_01_model_states.pt has the checksum"),
        ("without a file", "/checkpoint is damaged: layer_03-model_states.pt is missing"),
        ("unfinished", "is not a complete checkpoint of the madpipe strategy"),
        ("not mine", "is damaged: madpipe-model.json has the checksum"),
        ("nothing", "there is no checkpoint at /absent.ckpt"),
        ("a part", "give the checkpoint itself, /full.ckpt"),
        ("other shapes", "is of another model, a Classifier: blocks.4.bias is missing there"),
        ("other layers", "missing in this SequentialClassifier"),
        ("weights", "load its weights with load_from_checkpoint() and fit without ckpt_path"),
        ("other file", "it lacks blocks.4.weight, blocks.4.bias and has blocks.4.linear.bias"),
        ("torn file", "torn.ckpt"),
        ("tested other", "is of another model, a Classifier"),
    ],
)
def test_a_wrong_checkpoint_is_refused_on_every_rank(two: Records, reason: str, sentence: str) -> None:
    refusal = two.of("wrong_checkpoints")[reason]
    assert sentence in refusal and refusal.startswith("MisconfigurationException")


@pytest.mark.parametrize("kind", ["flat", "flattened"])
def test_what_a_hook_makes_of_the_state_of_a_checkpoint_is_loaded(two: Records, kind: str) -> None:
    """It was lost, so that a layer that was left out came back trained, and no line said so."""
    said = []
    for rank in two.ranks:
        found = dict(rank["states_of_hooks"][kind])
        said += [line for line in found.pop("said") if "leaves embed.weight, embed.bias, head.bias out of" in line]
        assert_same(found, two.reference["states_of_hooks"][kind])
    assert len(said) == 1 or (kind == "flattened" and not said), "once in a job"


@pytest.mark.parametrize("key", ["state_dict", "optimizer_states"])
def test_a_hook_that_takes_the_state_away_is_refused(two: Records, key: str) -> None:
    """Without ``optimizer_states`` a file with the layers of rank 0 alone was written."""
    assert f'takes checkpoint["{key}"] away' in two.of("states_that_hooks_take_away")[key]


def test_a_state_that_a_class_makes_of_its_parts_is_refused(two: Records) -> None:
    """The file had the layers of rank 0 alone."""
    error = two.of("states_made_of_parts")["error"]
    assert "state_dict() of FromParts does not call super().state_dict() once" in error


def test_a_flipped_bit_is_told_by_the_name_of_its_file(two: Records) -> None:
    """One was never noticed, and 3 of 6 runs went on with other losses."""
    found = two.ranks[0]["flipped_bits"]  # which alone consolidates
    assert found.pop("whole") == ["not refused", "not refused"]
    assert "flipped-weights.ckpt is damaged: the checksum of" in found.pop("flipped-weights.ckpt")
    assert len(found) == 15 and sum("optim_states" in name for name in found) == 2
    for name, record in found.items():
        for how, refusal in record.items():
            assert name in refusal, (name, how, refusal)
            assert "damaged" in refusal or "not JSON" in refusal, (name, how, refusal)


def test_what_a_checkpoint_holds_runs_no_code(two: Records) -> None:
    record = two.of("foreign_checkpoints")
    assert record["said"] == "not refused" and not record["trace"]
    assert "holds" in record["strict"] and "Settings" in record["strict"]
    assert "layer_03-model_states.pt holds posix.mkdir" in record["bomb"]
    assert "layer_03-model_states.pt holds posix.mkdir" in record["bomb, tested"]
    assert "'../../secret' is not the name of a file in this folder" in record["outside"]


@pytest.mark.parametrize(
    "reason, sentence",
    [
        ("BackboneFinetuning", "is not available with a pipeline, because it freezes and unfreezes layers"),
        (
            "GradientAccumulationScheduler",
            "set trainer.accumulate_grad_batches in on_train_epoch_start of a callback",
        ),
        ("StochasticWeightAveraging", "because it averages a copy of the whole model"),
        ("BatchSizeFinder", "is not supported with distributed strategies"),
        ("ModelPruning", "the callback ModelPruning is not available with a pipeline, because it puts masks"),
        ("finder", "the learning-rate finder works in 32-true with stage=0 only"),
        ("elsewhere", "DeepSpeed's folders to memory://folder: folders are written by each process to a disk of"),
        (
            "root elsewhere",
            "DeepSpeed's folders to memory://root/checkpoints: folders are written by each",
        ),
        ("resumed from elsewhere", "fit resumes from a folder on a disk of this machine"),
        ("saved elsewhere", "cannot be written: folders are written by each process to a disk of this machine"),
        ("plugin", "past the plugin AsyncCheckpointIO: give it save_weights_only=True"),
        ("sync_batchnorm", "sync_batchnorm is not available"),
        ("64-true", "`precision` must be one of"),
        ("16-mixed", "needs a device that DeepSpeed trains on in fp16"),
        ("transformer-engine", "`precision` must be one of"),
        ("optimizer_zero_grad", "overrides optimizer_zero_grad(), whose work the pipeline engine does"),
        # It was refused, too, where it did what the engine does.
        ("ordinary optimizer_zero_grad", "not refused"),
        ("configure_gradient_clipping", "overrides configure_gradient_clipping()"),
        ("LBFGS", "a torch optimizer whose step needs no closure"),
        ("no optimizer", "configure_optimizers returns no optimizer with parameters"),
        (
            "two schedulers",
            "at most one scheduler; of torch.optim.lr_scheduler, ChainedScheduler makes one of",
        ),
        ("Adafactor", "looks at the shape of each parameter"),
        ("WeightAveraging", "averages a copy of the whole model"),
        ("EMAWeightAveraging", "averages a copy of the whole model"),
    ],
)
def test_what_is_not_available_says_so_on_every_rank(two: Records, reason: str, sentence: str) -> None:
    sentences = two.of("not_available")
    if reason in ("WeightAveraging", "EMAWeightAveraging") and reason not in sentences:
        pytest.skip("this Lightning has no such callback")
    assert sentence in sentences[reason]


def test_what_differs_is_said_once(two: Records) -> None:
    assert two.ranks[0]["notes"]["quiet"] == []
    [hook, early, graph] = two.ranks[0]["notes"]["notes"]
    hosts = "Listener, LambdaCallback"
    assert early.startswith(f"madpipe: on_before_zero_grad of {hosts} is called before the batches of a step run")
    assert f"on_before_backward of {hosts} is not called" in hook and "log_graph=True shows nothing" in graph
    [uploads] = two.ranks[0]["notes"]["uploads"]
    assert "UploadsModels(log_model=...) uploads no checkpoint of a pipeline" in uploads
    assert two.ranks[0]["notes"]["uploads files"] == []
    [precision] = two.ranks[0]["notes"]["mixed"]
    assert "the loss are in bf16" in precision and "self(x).float()" in precision
    assert two.ranks[1]["notes"]["notes"] == two.ranks[1]["notes"]["mixed"] == []


def test_weights_that_a_callback_takes_follow_their_layers(two: Records) -> None:
    """A set, pairs and references kept weights of layers that had gone, whose gradient is None, without a word."""
    [said], nothing = (rank["collected_weights"]["said"] for rank in two.ranks)
    assert nothing == [] and said.startswith(
        "Collects.in_tuple, Collects.one of rank 0 has weights of layers that"
    )
    assert "Read pl_module.parameters() or named_parameters() where the weights are used" in said


def test_a_list_whose_order_nothing_tells_is_named(two: Records) -> None:
    """It was taken for one in the order of ``state_dict()``, in silence."""
    [said], nothing = (rank["order_untold"]["said"] for rank in two.ranks)
    assert nothing == [] and said.startswith("The tensors of self.sums may be in the order of state_dict() or")
    assert "or of parameters() and then buffers(); their shapes and values do not tell which" in said


def test_orders_of_a_list_that_do_not_matter_are_not_named(two: Records) -> None:
    """A line named statistics of modules beside the layers, and averages of layers that run in another order."""
    assert [rank["orders_that_do_not_matter"]["said"] for rank in two.ranks] == [[], []]


def test_a_checkpoint_on_one_rank_names_those_that_do_not_come(two: Records) -> None:
    """It waited for ever, as does `if trainer.is_global_zero: trainer.save_checkpoint(path)` of one process."""
    first, second = (rank["saved_on_one_rank"] for rank in two.ranks)
    said, of_weights, of_loading, of_gathering = first["said"]
    assert of_loading.startswith(
        "trainer.strategy.load_checkpoint() has waited 0 s on rank 0 for rank 1: each rank"
    )
    assert of_gathering.startswith(
        "trainer.strategy.gather_model() has waited 0 s on rank 0 for rank 1: each rank"
    )
    assert of_weights.startswith(
        "trainer.strategy.lightning_module_state_dict() has waited 0 s on rank 0 for rank"
    )
    assert said.startswith("trainer.save_checkpoint() has waited 0 s on rank 0 for rank 1: each rank has a part")
    assert len(first["refused"]) == 8 and all("on rank 0 for rank 1: each" in each for each in first["refused"])
    assert first["is_there"] and second == {"said": [], "refused": [], "is_there": True}


def test_a_rank_at_the_end_of_its_program_is_not_waited_for(tmp_path: Path) -> None:
    """Rank 0, which called save_checkpoint after fit, waited 300 s for a rank whose program was through."""
    log = tmp_path / "log"
    code = run_ranks(HERE / "lonely_multiproc.py", [str(tmp_path), "ended"], 2, log, timeout_seconds=200)
    printed = log.read_text()
    assert code not in (0, -9), "it had to be killed"
    assert "trainer.save_checkpoint() waits on rank 0 for rank 1, and rank 1 " in printed
    assert "has come to the end of its program: each rank has a part of the model" in printed


def test_a_checkpoint_on_one_rank_ends_where_the_others_wait_elsewhere(tmp_path: Path) -> None:
    """It was said, and for 300 s no rank ended: one waited in save_checkpoint, the other one in its next batch."""
    log = tmp_path / "log"
    code = run_ranks(HERE / "lonely_multiproc.py", [str(tmp_path), "saving"], 2, log, timeout_seconds=90)
    printed = log.read_text()
    assert code not in (0, -9), "it had to be killed"
    assert re.search(
        r"trainer.save_checkpoint\(\) waits on rank 0 for rank 1, and rank 1 waits in the beginning of a batch, "
        r"for \d+ s: each rank has a part of the model, so call trainer.save_checkpoint\(path\) on every rank",
        printed,
    )


@pytest.mark.parametrize("run", ["validate", "fit"])
def test_no_run_waits_for_a_rank_at_the_end_of_its_program(tmp_path: Path, run: str) -> None:
    """Where a script calls it on one rank alone, that ends, and says whom it waits for."""
    log = tmp_path / "log"
    code = run_ranks(HERE / "lonely_multiproc.py", [str(tmp_path), run], 2, log, timeout_seconds=200)
    printed = log.read_text()
    assert code not in (0, -9), "it had to be killed"
    assert re.search("rank 0 ends: it waits in .*, and rank 1 has come to the end of its program", printed)


def test_a_rank_that_fails_alone_ends_the_job_without_a_checkpoint(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = run_ranks(HERE / "lonely_multiproc.py", [str(tmp_path)], 2, log, timeout_seconds=200)
    printed = log.read_text()
    assert code not in (0, -9), "it had to be killed"
    assert "only this disk is full" in printed
    assert "no checkpoint is written after this exception, because only 1 of 2 processes met one" in printed
    assert not list(tmp_path.glob("*.ckpt")) and not list(tmp_path.glob(".*"))


# Command line, namespaces, wrong starts


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("cli")
    log = folder / "log"
    check_end(run_ranks(HERE / "cli_multiproc.py", [str(folder)], 2, log, timeout_seconds=300), "cli", log)
    [first, second] = [json.loads((folder / f"cli-{rank}.json").read_text()) for rank in range(2)]
    assert first["class"] == second["class"]
    return first


def test_the_command_line_takes_the_class_and_the_name(command_line: dict[str, Any]) -> None:
    for how in ("class", "name", "override"):
        assert command_line[how]["strategy"] == "MadPipeStrategy" and command_line[how]["lr"] == "sgd"
        assert_same(command_line[how]["metrics"], command_line["class"]["metrics"])


def test_the_command_line_names_wrong_arguments(command_line: dict[str, Any]) -> None:
    for how, word in (("wrong name", "memori"), ("wrong type", "num_stages")):
        assert command_line[how].startswith("exit 2") and word in command_line[how]
    assert command_line["wrong value"].startswith("ValueError")


def test_both_namespaces_train_in_one_process(command_line: dict[str, Any]) -> None:
    record = command_line["namespaces"]
    assert record["unified"] == pytest.approx(record["classic"], rel=1e-5)
    assert record["unified by name"] == pytest.approx(record["classic"], rel=1e-5)
    assert record["mixed"].startswith("TypeError") and "LightningModule" in record["mixed"]
    assert "must be either a string or an instance of `lightning.pytorch" in record["other strategy"]
    assert "strategy_class('lightning.pytorch')(...) or strategy='madpipe'" in record["other strategy"]


ABSENT = """
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
def without(name, *arguments):
    return None if name.split(".")[0] in sys.argv[1].split(",") else find(name, *arguments)
importlib.machinery.PathFinder.find_spec = without
import lightning_madpipe
print(lightning_madpipe.MadPipeStrategy.namespace, *sorted(set(sys.modules) & {"pytorch_lightning", "lightning"}))
print(lightning_madpipe.strategy_class("pytorch_lightning"))
"""


@pytest.mark.parametrize(
    "absent, sentence",
    [
        ("pytorch_lightning", "lightning.pytorch lightning\n"),
        ("lightning", "pytorch_lightning pytorch_lightning\n"),
        ("pytorch_lightning", "ValueError: pytorch_lightning is not installed here, but lightning.pytorch is"),
        ("pytorch_lightning,lightning", "HostError: lightning_madpipe needs PyTorch Lightning, which is not"),
    ],
)
def test_either_package_may_be_absent(absent: str, sentence: str) -> None:
    ended = subprocess.run([sys.executable, "-c", ABSENT, absent], capture_output=True, text=True, timeout=120)
    assert sentence in ended.stdout + ended.stderr


WRONG_STARTS: dict[str, tuple[str, str]] = {
    "no import": ("Trainer(strategy='madpipe')", "You selected an invalid strategy name: `strategy='madpipe'`"),
    "unknown argument": ("import lightning_madpipe as m; m.MadPipeStrategy(memori=1)", "unknown argument memori"),
    "one device": (
        "import lightning_madpipe\n"
        "Trainer(strategy='madpipe', **ONE).fit(Classifier(), loader(16)); print('done')",
        "done",
    ),
    "more stages than layers": (
        "import lightning_madpipe as m; s = m.MadPipeStrategy(num_stages=2)\n"
        "Trainer(strategy=s, **ONE).fit(Classifier(), loader(16))",
        "num_stages=2 does not divide the 1 processes",
    ),
    "no layers": (
        "import lightning_madpipe, pytorch_lightning as pl, torch\n"
        "class Bare(pl.LightningModule):\n"
        "    def training_step(self, batch): return None\n"
        "    def train_dataloader(self): return loader(16)\n"
        "    def configure_optimizers(self): return None\n"
        "Trainer(strategy='madpipe', **ONE).fit(Bare())",
        "write `def pipeline_layers(self)",
    ),
    "wrong accelerator": (
        "import os; os.environ['DS_ACCELERATOR'] = 'cuda'; import lightning_madpipe\n"
        "Trainer(strategy='madpipe', **ONE).fit(Classifier(), loader(16))",
        "set DS_ACCELERATOR=cpu in the environment",
    ),
    "compiled module": (
        "import lightning_madpipe, torch\n"
        "Trainer(strategy='madpipe', **ONE).fit(torch.compile(Classifier(), backend='eager'), loader(16))",
        "Using a compiled model is incompatible with the current strategy: `MadPipeStrategy`",
    ),
    "no file": (
        "import sys; sys.argv[0] = '-c'\n"
        "import lightning_madpipe; Trainer(strategy='madpipe', **{**ONE, 'devices': 2})",
        "this program has no file (it came with python -c, or from standard input)",
    ),
    "another folder": (
        "import os, sys; os.mkdir('other'); os.chdir('other'); sys.argv[0] = 'start.py'\n"
        "import lightning_madpipe; Trainer(strategy='madpipe', **{**ONE, 'devices': 2})",
        "start it by its absolute path where it changes its folder (os.chdir)",
    ),
    "another folder, by torchrun": (  # which has started all processes
        "import os, sys; os.mkdir('other'); os.chdir('other'); sys.argv[0] = 'start.py'\n"
        "os.environ.update(TORCHELASTIC_RUN_ID='a', RANK='0', LOCAL_RANK='0', WORLD_SIZE='2')\n"
        "import lightning_madpipe; Trainer(strategy='madpipe', **{**ONE, 'devices': 2}); print('done')",
        "done",
    ),
}


@pytest.mark.parametrize("start", WRONG_STARTS)
def test_a_wrong_start_is_told_what_to_do(start: str, tmp_path: Path) -> None:
    program, sentence = WRONG_STARTS[start]
    prelude = (
        "from pytorch_lightning import Trainer\nfrom tests.lightning.lightning_cases import Classifier, loader\n"
        "ONE = dict(accelerator='cpu', devices=1, max_epochs=1, logger=False, enable_checkpointing=False)\n"
    )
    script, log = tmp_path / "start.py", tmp_path / "log"
    script.write_text(prelude + program)
    if start == "wrong accelerator":  # which DeepSpeed looks for when it is imported
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        with log.open("w") as output:
            command = [sys.executable, str(script)]
            ended = subprocess.run(
                command, cwd=tmp_path, env=environment, stdout=output, stderr=output, timeout=200
            )
        code = ended.returncode
    else:
        code = run_ranks(script, [], None, log, timeout_seconds=200)
    assert sentence in log.read_text()
    assert (code == 0) == (sentence == "done")


# The table of features


def test_every_callback_that_lightning_ships_stands_in_the_table() -> None:
    table = FEATURES.read_text()
    missing = [name for name in pytorch_lightning.callbacks.__all__ if not re.search(rf"`{name}`", table)]
    assert not missing, f"{FEATURES.name} says nothing about {', '.join(missing)}: try them, and write a row"


def table_rows() -> list[str]:
    rows = [line for line in FEATURES.read_text().splitlines() if line.startswith("| ")]
    return [row for row in rows if not row.endswith("| test |")]


def test_every_test_that_the_table_names_exists() -> None:
    table = "\n".join(row.rstrip("| ").rpartition("|")[2] for row in table_rows())
    # Those of the first section stand without their file.
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", table)
    named += [("test_lightning_steps.py", test) for test in re.findall(r"`(test_\w+)`", table)]
    for file, test in named:
        assert f"def {test}(" in (HERE / file).read_text(), f"{file}::{test}"
    found = []
    for row in table_rows():
        tests = row.rstrip("| ").rpartition("|")[2]
        files = set(re.findall(r"`(test_\w+\.py)::", tests)) or {"test_lightning_steps.py"}
        texts = "".join((HERE / file).read_text() for file in files)
        cases = re.findall(r"`(?:\.\.\.|test_two_stages_\w+)?\[(\w+)\]`", tests)
        assert all(f'"{case}"' in texts for case in cases), cases
        found += cases
    assert found


def test_every_row_of_the_table_names_a_test() -> None:
    assert not [row for row in table_rows() if not row.rstrip("| ").endswith(("`", "the same"))]
