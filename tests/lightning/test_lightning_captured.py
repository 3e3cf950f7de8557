"""Modules that name no layers train through the strategy like in one process."""

from __future__ import annotations

import pytest

from tests.lightning import captured_cases
from tests.lightning.test_lightning_pipeline import Records, assert_same, records_of


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    return records_of(request, 2, tmp_path_factory.mktemp("two"), "captured")


@pytest.mark.parametrize("case", [case.__name__ for case in captured_cases.SAME_AS_SINGLE[2]])
def test_a_module_as_it_is_trains_like_one_process(two: Records, case: str) -> None:
    assert_same(two.of(case), two.reference[case])


def test_dropout_draws_from_the_seed(two: Records) -> None:
    first, again, other = two.of("dropout_repeats")["found"]
    assert first and first == again and first != other


@pytest.mark.parametrize(
    "module, sentence",
    [
        # None of them named the draw; the ways out of the second were refused in turn.
        ("Noisy", "training_step draws random numbers for a call of a module at captured_cases.py:"),
        ("Sampling", "training_step draws random numbers for a call of a module at captured_cases.py:"),
        ("Sampling", "one call that is given what is drawn, such as self(x, torch.randn(len(x), 8))"),
        ("DrawingBetween", "DrawingBetween draws between its layers, from random at "),
        ("DrawingBetween", "The loss may draw behind the last call"),
        ("MaskedByDraws", "training_step makes 2 calls, of which 1 is found: behind it training_step raises Data"),
        (
            "MaskedByDraws",
            ", or make one call, self(...) or that of a module whose forward() runs them",
        ),
        ("Dropping", "; dropout can stand in forward() itself"),
        ("NoCall", "calls neither self() nor a module whose weights are trained"),
        ("NoCall", "unknown. Change that, or name the layers: write `def pipeline_layers(self): return [self"),
        ("OtherOrder", "runs its modules in another order in evaluation, near "),
        ("ChangingCall", "training_step calls self() with scale=2.0, and its layers were found for scale=1.0"),
        (
            "ChangingCall",
            "Where this chooses a part of the model, such as the head of a task, let forward run all",
        ),
        ("ChangingCall", "A number that is only computed with is handed as a tensor: scale=torch.tensor(...)"),
        # It was called _.0.lengths.1.
        (
            "NumbersInBatch",
            "validation_step calls self() with given['lengths'][1]=5, and its layers were found without it: call",
        ),
        ("NumbersInBatch", "Let given['lengths'] be a tensor, as a collate_fn makes it by torch.tensor(...)"),
        # It was said to call with something else, or in another order.
        ("KeepsASize", "training_step raises ValueError (Expected input batch_size ("),
        ("KeepsASize", "Let its code take any number of samples, such as len(x) for a size that is kept"),
        # The look at its first call left the weights frozen, so that it was said to have one layer.
        (
            "FreezesItself",
            "training_step sets requires_grad of a weight to False, and in a pipeline a step runs on",
        ),
        ("FreezesItself", "or use a strategy that has the whole model on each device, such as 'ddp'"),
        (
            "UnfreezesBackbone",
            "self.backbone.0.0.bias is unfrozen while fit runs, and the layers of this pipeline",
        ),
        ("UnfreezesPosition", "self.position is unfrozen while fit runs, and the layers of this pipeline"),
        ("Branching", "captured_cases.py:"),
        ("Branching", "Nor can it be cut between its elements: the model's code uses the output of an element"),
        ("BranchingInside", "has 1 pipeline layer for 2 stages (net (Bounded) stays whole: its code decides by"),
        ("BranchingInside", "captured_cases.py:"),
        ("BranchingInside", "changes a buffer, and would change it twice"),
        ("RunsAgain", "has 1 pipeline layer for 2 stages (net (Encoder) runs 2 times in a step, so that it"),
        ("BranchingLoss", "it would return a loss of each micro-batch: let it return what the loss is made of"),
        ("BranchingLoss", "captured_cases.py:"),
        ("Resized", "self.model.transformer.wte.weight has the shape (20, 16) now and had (17, 16)"),
        ("Generating", "captured_cases.py:"),
        ("Carrying", "a state that begins as None is to be a tensor from the first step on, made in the step for"),
        (
            "CarryingForBatches",
            "self.state, of shape (16, 12), is given with ",
        ),
        (
            "CarryingByLayers",
            "self.state, of shape (16, 12), is given with ",
        ),
        ("Unequal", "since self.factor has changed, the layers that were found of self()"),
        ("MixedWindow", "accumulate_grad_batches=2 puts batches into one optimizer step of which one is cut into"),
        ("ByChance", "a batch of 8 can be run in micro-batches of 1 sample, and not where one of them has "),
        ("ByChance", "every tensor whose dimension 0 is 8 is cut, also one that has that length by chance"),
        ("Adjacent", "it runs for a whole batch of 16, and not for 4 of its samples: every tensor whose"),
        ("Adjacent", "such as the adjacency of a graph. MadPipeStrategy(num_micro_batches=1) cuts nothing"),
        (
            "SampleBySample",
            "a batch of 16 can be run in micro-batches of 4 samples, and not where one of them has 3 or 5 samples",
        ),
        ("SampleBySample", ": the model's code takes another way for the sizes of this batch ("),
        ("SampleBySample", ", 5 and not 4). MadPipeStrategy(num_micro_batches=1) cuts no batch (with drop_last"),
        ("SampleBySampleShort", "8 and not 16). Let all batches have the same sizes (drop_last=True in the"),
        ("SampleBySampleWhole", "not refused"),
        ("AdjacentInLayers", "a batch of 16 can be run, and its micro-batches of 4 samples cannot ("),
        # It ended with torch's words about shapes.
        (
            "AdjacentBefore",
            "runs for a whole batch of 16 up to its call of the layers, and not for 4 of its samples",
        ),
        (
            "AdjacentBefore",
            "(RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x16 and 4x8)): every tensor",
        ),
        ("SparseRows", "the batch holds a sparse or nested tensor, which cannot be cut into micro-batches"),
        ("ByChanceFound", "the layers that were found of self() cannot run that: ByChanceFound"),
        ("ByChanceFound", ". For a batch of 8 they can: every tensor whose dimension 0 is 8 is cut, also one"),
        ("MixedWindow", "leave the short batch out (drop_last=True), or do not accumulate"),
        ("RateInForward", "asks for the optimizer or its rate at captured_cases.py:"),
        ("RateOfTrainer", "asks for the optimizer or its rate at captured_cases.py:"),
        ("FeaturedDeciding", "the hook hook on self.blocks.0 writes self.features, which forward() of "),
        ("FeaturedDeciding", "let the elements return it"),
        (
            "FourBlocks",
            "the data, a OneIterator, is a stream that can be read once, and an example of it is needed",
        ),
        ("NeedsAHook", "at captured_cases.py:"),
        ("NeedsAHook", "before any hook of an epoch or a batch: set what it reads in __init__() or setup()"),
        (
            "ReadsOptimizer",
            "before configure_optimizers(), which sets self.optimizer: read an optimizer in the step as "
            "self.optimizers(), a learning-rate scheduler as self.lr_schedulers(), and make anything else in "
            "__init__()",
        ),
        ("Lazy", "self.net.0.weight and 3 more of Lazy has no shape before a first batch"),
        ("Lazy", "run the module on one batch before fit"),
        ("SeveralCallsOneSets", "training_step reads self.encoder.size, which a layer sets while it runs"),
        ("Attached", "since self.encoder.gain.alpha has changed, the layers that were found of self()"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_its_line(two: Records, module: str, sentence: str) -> None:
    assert sentence in two.of("refused_modules")[module]


def test_a_table_that_is_cut_like_samples_is_told(two: Records) -> None:
    """It was cut in silence, for the look at layers that were found ended at the first form that they keep."""
    [said] = [line for rank in two.ranks for line in rank["told_of_tables"]]
    assert ", and the code at captured_cases.py:" in said and "gives for a sample depends on the others" in said
    assert "as many rows as there are samples by chance" in said


def test_blocks_that_decide_by_lengths_are_told_like_those_that_decide_by_numbers(two: Records) -> None:
    """`if len(mask.nonzero()) > 3` in a layer that was found was not told."""
    said = [line for rank in two.ranks for line in rank["told_of_decisions"]]
    assert len(said) == 2, said
    by_number, by_length = sorted(said, key=lambda line: "asks for numbers" in line)
    assert "by_number (" in by_number and "captured_cases.py:" in by_number
    assert ", captured_cases.py:" in by_length


def test_what_hooks_set_and_forward_reads_is_told_before_the_first_step(two: Records) -> None:
    """It was refused at its first change, in the second epoch, when an epoch had been trained."""
    told = [rank["told_of_annealing"] for rank in two.ranks]
    said = {name: told[0][name] + told[1][name] for name in told[0]}
    assert said.pop("nothing") == []
    [unequal], [attached], [by_callback], [by_method] = said.values()
    assert "on_train_epoch_start of Unequal sets self.factor (captured_cases.py:" in unequal
    assert "which self() of Unequal reads, and the layers that were found have what it is now" in unequal
    assert "on_train_epoch_start of Attached sets self.encoder.gain.alpha (captured_cases.py:" in attached
    assert "on_train_epoch_end of Anneals sets self.factor (captured_cases.py:" in by_callback
    assert "on_train_batch_end of ByMethod sets self.factor (captured_cases.py:" in by_method
