"""The loss of a batch on a pipeline is that of one process, whatever the loss is."""

from __future__ import annotations

import copy
from typing import Any

import numpy
import pytest
import torch
from test_lightning_pipeline import Records, assert_same, records_of

from lightning_madpipe.batch_runs import cut_inputs, dims_of_outputs
from lightning_madpipe.batches import split_batch
from lightning_madpipe.losses import SAMPLES, SUM, Tracked, features_of, fits, weights_of


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return records_of(2, tmp_path_factory.mktemp("two"), "losses")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return records_of(4, tmp_path_factory.mktemp("four"), "losses")


LABELS = ["labels", "batch['labels']", "[:, 1:]", -100]
FOUND: dict[str, tuple[bool, list[Any]]] = {
    "padded": (False, LABELS),
    "padded later": (False, LABELS),
    "masked": (False, LABELS),
    "padding as label": (False, ["labels", "batch['input_ids']", "[:, 1:]", 0]),
    "class weights": (False, ["class weights", "batch[1]", "", "self.criterion.weight"]),
    "hidden weights": (True, ["samples"]),
    "contrastive": (True, ["samples"]),
    "summed": (False, ["sum"]),
    "divided": (False, ["samples"]),
    "statistics": (True, ["samples"]),
    "time first": (True, ["samples"]),
    "accumulated": (True, ["samples"]),
    "accumulated padded": (False, LABELS),
    "asked for": (True, ["samples"]),
    "warmed up": (True, ["samples"]),
    "warmed up padded": (False, LABELS),
    "given up": (True, ["samples"]),
    "clipped": (True, ["samples"]),
}
"""Whether the step runs once per batch, and else how micro-batches are weighted."""


@pytest.mark.parametrize("case", FOUND)
def test_a_loss_trains_as_in_one_process(two: Records, case: str) -> None:
    """Each step's loss, what is logged and the weights in the end, and the loss of validation."""
    record, reference = two.of("losses")[case], two.reference["losses"][case]
    found, actual, expected = record["found"], copy.deepcopy(record["record"]), copy.deepcopy(reference["record"])
    assert (found["once"], found["weight"]) == FOUND[case]
    if case == "masked":  # a number that is no mean of micro-batches', which is said
        [said] = [each for each in found["said"] if "training_step logs 'perplexity'" in each]
        assert "loss='batch'" in said
        assert abs(actual["metrics"].pop("perplexity") / expected["metrics"].pop("perplexity") - 1) > 1e-3
    assert_same(actual, expected)
    said = [each for each in found["said"] if "the loss of training_step is no mean over samples" in each]
    assert len(said) == (FOUND[case] != (False, ["samples"]) and case != "asked for")
    if found["flushed"] is not None and not case.startswith("accumulated"):
        assert found["flushed"] == found["once"], "the plan is made for that order"


def test_what_is_found_late_is_said(two: Records) -> None:
    """A plan is made anew where the loss becomes another one; draws for each sample are no reason."""
    found = two.of("turned")
    assert found["changing"]["once"] and found["changing"]["flushed"]
    [said] = [each for each in found["changing"]["said"] if "no mean over samples" in each]
    assert "from step 8 on; steps since 4 may have had another loss" in said
    assert any("made anew" in each for each in found["changing"]["said"])
    assert not found["denoising"]["once"] and found["denoising"]["weight"] == ["samples"]
    assert found["mix-up"]["once"]
    assert not found["mean"]["once"] and not any("no mean" in each for each in found["mean"]["said"])
    [logs] = [each for each in found["roots"]["said"] if "training_step logs" in each]
    assert "'root'" in logs and not found["roots"]["once"]


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
    assert "loss is 'sum': it is one of 'auto', 'mean', 'batch'" in record["unknown"]


@pytest.mark.parametrize("case", ["padded", "contrastive"])
def test_two_pipelines_take_the_mean_of_their_batches_losses(four: Records, case: str) -> None:
    record, reference = four.of("replicated")[case], four.reference["replicated"][case]
    assert (record["found"]["once"], record["found"]["weight"]) == FOUND[case]
    assert_same(record["record"], reference["record"])


# Parts


def pieces_of(batch: Any, num: int = 4) -> tuple[list[Any], list[int]]:
    pieces = split_batch(batch, num)
    return pieces, [len(next(iter(piece.values()))) for piece in pieces]


def test_a_batch_that_could_tell_weights_apart_is_new() -> None:
    """Without padding, samples and labels are alike; what was uneven in a batch that was tried is known."""
    tracked = Tracked()

    def features(batch: Any) -> tuple[Any, Any]:
        pieces, sizes = pieces_of(batch)
        return features_of(pieces, sizes), numpy.array(sizes, dtype=float)

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
    weights = weights_of(pieces, sizes, {"self.weight": torch.tensor([0.0, 1.0, 3.0])})
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


def test_inputs_are_cut_where_they_grow_with_the_samples() -> None:
    batch, mask = torch.arange(24).reshape(2, 12), torch.zeros(12, 12)
    pieces = cut_inputs((batch, mask), [(2, 6), (12, 12)], [3, 2, 1])
    assert [tuple(piece[0].shape) for piece in pieces] == [(2, 6), (2, 4), (2, 2)]
    assert all(piece[1] is mask for piece in pieces)
    assert torch.equal(torch.cat([piece[0] for piece in pieces], 1), batch)
    with pytest.raises(ValueError, match="no dimension counts the samples"):
        cut_inputs((torch.zeros(7, 2),), [(3, 2)], [3, 2, 1])


def test_outputs_are_joined_where_micro_batches_differ() -> None:
    shared = torch.ones(4, 4)
    uneven = [(torch.zeros(4, size), shared) for size in (2, 1)]
    assert dims_of_outputs(uneven, [2, 1], None) == (1, None)
    even = [(torch.zeros(4, 4), shared) for _ in range(2)]
    assert dims_of_outputs(even, [4, 4], (1, None)) == (1, None)
    with pytest.raises(ValueError, match="no dimension"):
        dims_of_outputs([(torch.zeros(()),), (torch.ones(()),)], [2, 1], None)
