"""After fit, validate, test and predict the module is what it is on one device; what differs is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lightning.test_lightning_pipeline import Records, assert_same, records_of
from tests.ranks import run_ranks

TOLERANCES = {
    "whole_again": 1e-4,
    "unfrozen_and_fitted_again": 1e-4,
    "planned_otherwise": 1e-4,
    "planned_for_other_batches": 1e-4,
}
"""Of cases with so many steps that rounding shows, which is another one on each kind of processor."""


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    return records_of(request, 2, tmp_path_factory.mktemp("after"), "after")


@pytest.mark.parametrize(
    "case",
    [
        "read_where_a_file_is_expected", "compiled_sequential", "whole_again", "optimizer_from_outside",
        "tied_and_metric", "types_stay", "compiled_again", "unfrozen_and_fitted_again", "planned_otherwise",
        "planned_for_other_batches",
        "layers_that_keep", "scripted_layers", "adjusted_on_rank_zero",
        "copied_layers", "changed_on_rank_zero", "built_unlike", "attributes_that_hooks_set",
        "buffers_with_gradients",
        "buffers_that_layers_make", "pretrained_after_fit",
    ],
)  # fmt: skip
def test_two_stages_do_as_one_process(two: Records, case: str) -> None:
    """``load_from_checkpoint(best_model_path)`` was an IsADirectoryError, ``torch.compile(self.net)`` unknown.

    After ``fit`` layers of other stages once kept their initial weights on each rank. A second ``fit`` that
    trained other weights was refused with the plan of the first one, which no user had given; one by other options
    ran the first one's cut without a word. Gradients from before a fit were added to those of its first step.
    What layers had set on themselves (counters, averages) was missing on ranks that had not run them, or was that
    of the time when they had, and the trained model computed something else on each rank without a word. Scripted
    layers ended with an AttributeError. What a script changed on rank 0 after ``whole_model="rank_zero"`` stayed
    there. Copies of layers that a hook had made with ``copy.deepcopy`` lacked tensors when they were loaded.
    Weights that a script loaded on rank 0 alone counted for the layers of rank 0 alone. What hooks had set on
    parameters was missing on ranks that had not run their layers.
    """
    assert_same(two.of(case), two.reference[case], tolerance=TOLERANCES.get(case, 1e-5))


@pytest.mark.parametrize("run", ["first", "after fit", "validated", "after validate", "predicted"])
def test_the_module_of_the_first_run_is_that_of_one_process_to_5_digits(two: Records, run: str) -> None:
    """All of these runs were compared to 4 digits, because rounding shows in later fits."""
    found, expected = two.of("whole_again")[run], two.reference["whole_again"][run]
    assert_same(found, expected, near_zero=1e-5)  # of logits of about 1, which are differences


@pytest.mark.parametrize(
    "fits, cuts",
    [
        ("asked", [3, 5, 3, 4]),
        ("plan first", [3, 4]),
        ("recut", [6, 6, 4]),
        ("recut to a plan", [5, 5, 4]),
        ("recut from a plan", [6, 3, 4]),
        ("recut and frozen", [5, 3]),
    ],
)
def test_what_a_later_trainer_asks_for_is_run(two: Records, fits: str, cuts: list[int]) -> None:
    """The plan of the fit before was run, and nothing said so; so was the cut that a hook of it had moved to."""
    assert two.of("planned_again")[fits] == [[0, cut, 8] for cut in cuts]


@pytest.mark.parametrize(
    "pipelines, ways_out",
    [
        ("flat", "stage=0"),
        ("two pipelines", "with stage=0 and one pipeline"),
        ("flat, two pipelines", "stage=0"),
    ],
)
def test_types_that_an_optimizer_cannot_carry_are_refused_by_name(
    two: Records, pipelines: str, ways_out: str
) -> None:
    refusal = two.of("types_that_are_flattened")[pipelines]
    assert "blocks.0.scale (float64), blocks.0.phase (complex64)" in refusal and ways_out in refusal, refusal


@pytest.mark.parametrize("precision", ["fp32 ZeRO-1", "bf16", "bf16 ZeRO-1", "true bf16"])
def test_the_whole_module_has_the_weights_that_are_saved(two: Records, precision: str) -> None:
    record = two.of("in_every_precision")[precision]
    # In bf16-mixed the master weights, as one device has them.
    types = ["torch.bfloat16"] if precision == "true bf16" else ["torch.float32"]
    assert [kind for kind in record["after fit"]["types"] if "int" not in kind] == types
    for fact in ("as saved", "frozen", "unchanged by saving", "unchanged by validate"):
        assert record[fact], fact
    assert record["changed is saved"] == pytest.approx([1.0, 1.0], abs=1e-2)
    assert record["after fit"]["attributes"] == [] and len(record["resumed"]) == 4


HERE_IS = "not refused"


def test_a_layer_that_did_not_come_back_cannot_be_read(two: Records) -> None:
    first, second = (rank["whole_elsewhere"] for rank in two.ranks)
    assert first["rank_zero"]["head"] == first["rank_zero"]["call"] == HERE_IS
    assert "ElsewhereError: embed.weight is asked for" in second["rank_zero"]["embed"]
    assert "whole_model='rank_zero' has brought all layers to rank 0 only" in second["rank_zero"]["embed"]
    for kind in ("none", "short"):
        for own, other, record in (("embed", "head", first), ("head", "embed", second)):
            assert record[kind][own] == HERE_IS
            assert f"{other}.weight is asked for on a rank that did not run its layer" in record[kind][other]
            assert "trainer.strategy.gather_model() on every rank" in record[kind][other]
            assert "is called outside a step" in record[kind]["call"]
            assert own in record[kind]["names"] and other not in record[kind]["names"]
    for kind in ("rank_zero", "none"):
        assert first[kind]["gathered"] == second[kind]["gathered"]
    for kind in ("agreed", "interrupted", "validation"):
        assert first[kind]["second"] == second[kind]["second"] and first[kind]["whole"] == HERE_IS
    # Where all ranks have met an exception together, the model is whole behind it.
    for kind in ("agreed", "interrupted"):
        assert first[kind]["head"] == first[kind]["call"] == second[kind]["embed"] == HERE_IS
    said = first["short"]["said"][0]
    assert "is not put on every rank, because that takes" in said and "to spare" in said
    assert "cannot be put on every rank" in first["short"]["refused"]
    assert "has other layers now or is to run in num_stages=1" in first["other stages"]["refused"]
    assert first["other stages"]["then"] == HERE_IS


@pytest.mark.parametrize(
    "kind, words",
    [
        ("layer", "rank 0 has other layers of this Adjusted than in the run before"),
        ("part", "layer '5' was changed on rank 0 alone"),
        ("parameter", "its linear.bias is absent there and (12,) of float32 on rank 1, which runs it"),
    ],
)
def test_layers_that_rank_0_alone_has_changed_are_refused(two: Records, kind: str, words: str) -> None:
    """Ranks went on with other layers than rank 0, or waited for it."""
    for rank in two.ranks:
        record = rank["layers_of_rank_zero"]
        assert words in record[kind] and "trainer.strategy.gather_model() on every rank" in record[kind]
        assert record["everywhere"] == HERE_IS
    said = [line for rank in two.ranks for line in rank["layers_of_rank_zero"]["said"]]
    assert len(said) == 1, "on one rank, and in no run before the attribute differs"
    assert "self.gain is 0.5 on rank 0 and 1.0 on rank 1" in said[0] and "Set the same on all ranks" in said[0]


def test_layers_without_names_have_the_values_of_rank_zero(two: Records) -> None:
    record = two.of("layers_without_names_on_rank_zero")
    assert record["on rank 0"] == record["on all"]


def test_other_tensors_on_one_rank_are_refused_but_for_buffers(two: Records) -> None:
    record = two.of("layers_of_one_rank")
    assert "its blocks.3.linear.bias is absent on rank 0 and (12,) of float32 on rank 1" in record["parameter"]
    assert "Change layers on every rank" in record["parameter"]
    assert record["buffers"] == [[1.0, 1.0, 1.0], [0.5]]
    # Of these each rank kept its own values, in silence.
    for name in ("coordinates", "rows", "columns", "of a tensor", "of channels"):
        assert (
            "other values on rank 0 than on rank 1 in its blocks.4.graph, which is sparse or quantized"
            in record[name]
        )


def test_a_call_on_one_rank_is_named_on_the_other(tmp_path: Path) -> None:
    """The other rank once ended with the words of gloo."""
    script, log = Path(__file__).with_name("lonely_multiproc.py"), tmp_path / "log"
    code = run_ranks(script, [str(tmp_path), "sample"], 2, log, timeout_seconds=200)
    printed = log.read_text()
    assert code not in (0, -9), "it had to be killed"
    assert "self.forward() is called outside a step" in printed
    assert re.search(
        r"rank 1 ends: .* rank 0 left fit\(\) with MisconfigurationException: self.forward\(\)", printed
    )


def test_objects_that_a_layer_has_changed_are_named(two: Records) -> None:
    said = [line for rank in two.ranks for line in rank["objects_of_layers_are_named"]["said"]]
    for place in range(5):
        [line] = [line for line in said if f"self.blocks.{place}.meter (Meter) has changed where" in line]
        assert "an itertools.count; a generator or a lambda stays" in line


def test_what_only_a_spec_knows_stays_on_its_rank(two: Records) -> None:
    for rank, names in zip(two.ranks, (["0", "1"], ["2", "3"]), strict=True):
        record = rank["specs_after_fit"]
        found = {name.split(".")[1] for name in record["names"] if name.startswith("pipeline_module.")}
        assert sorted(found) == names and "is called outside a step" in record["call"] and record["again"] == 4


def test_a_folder_that_lightning_cannot_read_says_what_to_do(two: Records) -> None:
    record = two.of("folders_that_are_not_read")
    assert two.of("read_where_a_file_is_expected")  # the case that writes the folder of the note
    assert "is not a complete checkpoint of the madpipe strategy" in record["another folder"]
    assert 'MyModule.load_from_checkpoint("best.ckpt")' in record["note"]


def test_all_reasons_of_a_refusal_come_at_once(two: Records) -> None:
    record = two.of("all_reasons")
    everything = record["everything"]
    assert "4 things keep Everything from running under the madpipe strategy" in everything
    for reason in (
        "sync_batchnorm is not available",
        "uses manual optimization (after_fit_cases.py:",
        "overrides backward()",
        "configure_optimizers returns 2 optimizers (after_fit_cases.py:",
    ):
        assert reason in everything
    assert "share parameters of Block" in record["layers"] and "(scale; 1 in all)" in record["layers"]
    assert record["one"].startswith("MisconfigurationException: sync_batchnorm")
    assert "training_step() of Iterating takes dataloader_iter, and in a pipeline the batch" in record["iterating"]
    assert "training_step(self, batch, batch_idx)" in record["iterating"]
    # Lightning speaks of a DeepSpeed strategy there.
    assert "the callback Finetuning is not available with a pipeline" in record["finetuning"]
    assert "DeepSpeed" not in record["finetuning"]
    assert "Finetuning" in record["callbacks"] and "ModelPruning" in record["callbacks"]


def test_going_on_within_an_epoch_is_said_where_the_data_begin_anew(two: Records) -> None:
    """The losses are those of plain Lightning, which are not those of an unbroken run."""
    for kind in ("plain", "remembering"):
        record, reference = two.ranks[0]["resumed_within_an_epoch"][kind], two.reference["resumed_within_an_epoch"]
        assert_same(record["rows"], reference[kind]["rows"])
        assert record["quiet"] == []
    plain, remembering = (two.ranks[0]["resumed_within_an_epoch"][kind] for kind in ("plain", "remembering"))
    assert not plain["unbroken"] and remembering["unbroken"]
    [sentence] = plain["said"]
    assert (
        "training goes on within epoch 1, at batch 2, but the data loader begins that epoch from its start"
        in sentence
    )
    assert "in the place of its last 2 batches" in sentence and "StatefulDataLoader" in sentence
    assert remembering["said"] == []
    assert all(not two.ranks[1]["resumed_within_an_epoch"][kind]["said"] for kind in ("plain", "remembering"))


def test_hooks_on_weights_that_stay_on_a_rank_are_named(two: Records) -> None:
    first, second = (rank["hooks_of_a_fit"] for rank in two.ranks)
    for here, there, layer in ((first, second, "blocks.2.linear"), (second, first, "embed")):
        assert here["has"] != there["has"]
        [line] = here["said"]
        assert line.startswith(f"the hook doubled on self.{layer}.weight, self.{layer}.bias, self.")
        assert line.endswith("register it before fit, or again when fit has returned")
    assert first["has"]["head.bias"] == 1 and second["has"]["head.bias"] == 2  # one was there before


def test_names_that_each_rank_makes_for_itself_are_those_of_rank_0(two: Records) -> None:
    first, second = (rank["names_of_each_rank"] for rank in two.ranks)
    assert first["script"] == second["script"] and first["script"]["said"] is None
    assert first["script"]["are there"] == [True, True, True]
    assert all("at 0" in path for path in first["script"]["relative"])
    assert first["hook"]["said"] is None and second["hook"]["are there"] == [False, True, True]
    assert second["hook"]["said"].startswith("rank 1 saves a checkpoint as /at 0/in a hook of 1.ckpt, and rank 0")
