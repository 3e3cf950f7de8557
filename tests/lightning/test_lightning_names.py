"""Users' names, hooks and attributes hold on a pipeline; layers that compute something else are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lightning.test_lightning_pipeline import Records, assert_same, records_of


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    folder: Path = tmp_path_factory.mktemp("names")
    return records_of(request, 2, folder, "names")


@pytest.mark.parametrize(
    "groups",
    [
        "by name", "by name, moved", "by name, moved with ZeRO", "per parameter", "per parameter, moved", "named",
        "named, moved",
    ],
)  # fmt: skip
def test_groups_that_are_made_by_names_train_like_one_process(two: Records, groups: str) -> None:
    assert_same(two.of("groups_by_name")[groups], two.reference["groups_by_name"][groups])


def test_what_was_set_before_trains_like_one_process(two: Records) -> None:
    expected_records = two.reference["hooks_and_attributes"]["records"]
    for found, expected in zip(two.of("hooks_and_attributes")["records"], expected_records, strict=True):
        assert_same(found, expected)


def test_hooks_on_what_is_called_as_a_whole_run(two: Records) -> None:
    assert_same(two.of("hooks_around"), two.reference["hooks_around"])


def test_every_hook_sees_the_names_of_the_user(two: Records) -> None:
    first, second = (rank["names_in_hooks"] for rank in two.ranks)
    everything = first["all"]
    assert first["seen"].keys() == second["seen"].keys()
    hooks = {hook.rpartition(" ")[0] for hook in first["seen"]}
    assert hooks == {f"{whose} {hook}" for whose in ("callback", "module") for hook in first["hooks"]}
    assert len(hooks) == 26
    cuts = set()
    for hook, names in first["seen"].items():
        others = second["seen"][hook]
        if is_whole(hook):
            assert names == others == everything
            continue
        assert names and others and [*names, *others] == everything, hook
        cuts.add(len(names))
    assert len(cuts) == 2, "layers moved between the second and the third step"
    for one, other in zip(first["got"].items(), second["got"].items(), strict=True):
        hook, _, name = one[0].rpartition(" ")
        if is_whole(hook):
            assert isinstance(one[1], float) and one[1] == other[1]
            continue
        trained, answer = sorted([one[1], other[1]], key=lambda found: isinstance(found, str))
        assert isinstance(trained, float), one[0]
        assert answer.startswith(f"{name} is asked for on a rank that does not run its layer")
        if " on_train_end " in hook:
            assert trained != first["got"][f"callback setup 0 {name}"]
            assert trained == first["got"][one[0].replace("on_train_end", "on_fit_end")]


def is_whole(hook: str) -> bool:
    """Whether each rank has all layers there: before they are on their ranks, and when they are back."""
    return " setup " in hook or " on_fit_end " in hook


def test_layers_that_forward_does_not_run_so_are_refused_on_every_rank(two: Records) -> None:
    said = two.ranks[0]["said_of_layers"]
    for case in ("left out", "in evaluation", "hook on a container", "synchronized"):
        assert two.ranks[1]["said_of_layers"][case] == said[case]
    assert said["left out"].startswith(
        "pipeline_layers() of LeftOut is not what forward() computes: forward() calls tanh between layer 5 "
        "(Block) and layer 6 (Linear): list torch.tanh there"
    )
    [unchecked] = said["left out, unchecked"]
    assert (
        "check_layers=False: the layers are not compared with forward(), and no line names layers that mix"
        in unchecked
    )
    assert "forward() calls softmax after layer 7 (Linear)" in said["in evaluation"]
    assert "self.encoder (Sequential) has a forward hook (Contained.collect)" in said["hook on a container"]
    assert "self.net.1 is a SyncBatchNorm" in said["synchronized"]


NORMALIZATIONS = "self.net.1, self.net.5 (BatchNorm1d)"
"""Those that are not in evaluation."""


def test_statistics_of_one_sample_are_refused_with_the_numbers(two: Records) -> None:
    """A short last batch ended in torch's words, which know nothing of micro-batches."""
    for rank in two.ranks:
        end = rank["said_of_layers"]["one sample"]
        assert end.startswith(f"training_step: batch normalization ({NORMALIZATIONS}) cannot compute")
        assert "of 4 samples is cut into 4 micro-batches, of which the smallest has 1" in end
        assert "num_micro_batches=2" in end and "drop_last=True" in end


def test_batch_normalization_and_hooks_are_told_once(two: Records) -> None:
    said, others = (rank["said_of_layers"] for rank in two.ranks)
    about_hooks, about_gradients, about_statistics = said["batch normalization"]
    assert "self.net.0" in about_hooks and "once per micro-batch" in about_hooks
    # A hook that added noise, or changed its output after some calls, trained otherwise without a word.
    assert "random numbers that they draw, or a count of their calls, make the training another" in about_hooks
    assert "self.net.2" in about_hooks and "the gradient that they are given is that of a micro" in about_hooks
    assert "gradient hooks (self.net.0.weight)" in about_gradients
    # The first one alone was named, "and 1 more".
    assert f"({NORMALIZATIONS}) has the statistics of a micro-batch, 4 of the 16" in about_statistics
    assert "net.3" not in about_statistics and "num_micro_batches" in about_statistics
    assert others["batch normalization"] == [] and len(said["one micro-batch"]) == 2


def test_instance_normalization_is_told_by_its_own_name(two: Records) -> None:
    """It was called batch normalization, and without running statistics it treats each sample by itself."""
    [about] = two.ranks[0]["said_of_layers"]["instances"]
    assert "instance normalization (self.net.1.1 (InstanceNorm1d)) updates its running statistics once" in about
    assert "4 times for a batch" in about and "track_running_stats=False" in about


def test_observers_of_quantization_are_told_once(two: Records) -> None:
    """A range that got its shape with first data ended in torch's words; others trained otherwise in silence."""
    said = two.ranks[0]["said_of_layers"]["observed"]
    [about] = [each for each in said if "observers of quantization" in each]
    assert "observers of quantization (self.net.1 (Ranged)) see micro-batches, 4 of the 16 samples" in about


def test_layers_that_micro_batches_change_are_told_once(two: Records) -> None:
    """A layer that took the mean of its batch away, or counted its calls, trained otherwise in silence.

    So did one that divided its gradient by the norm over the batch, and one with a branch on its mean.
    """
    mixing, deciding, keeping, gradients = two.ranks[0]["said_of_layers"]["centered"]
    assert "what self.net.1 (Centered) gives for a sample depends on the others" in mixing
    assert "of the 16 samples" in mixing and "num_micro_batches" in mixing
    assert "the gradient that self.net.3 (Divided) gives for a sample depends on the others" in gradients
    assert "4 of the 16 samples" in gradients
    assert "the code of self.net.4 (Gated), naming_cases.py:" in deciding and "num_micro_batches=1" in deciding
    kept = "self.net.1.calls, self.net.1.average, self.net.1.generator"
    assert f"{kept} changes whenever the layer runs" in keeping and "4 times per batch" in keeping
    assert two.ranks[1]["said_of_layers"]["centered"] == []


def test_layers_that_hooks_let_mix_samples_later_are_told(two: Records) -> None:
    """They were looked at before the first step alone: nothing was said of what epochs after it let them do."""
    said = two.ranks[0]["said_of_layers"]["changed later"]
    keeping, statistics, mixing, hooked, on_weights = said
    assert "self.net.2.calls changes whenever the layer runs" in keeping
    assert "(self.net.1 (BatchNorm1d)) has the statistics of a micro-batch, 4 of the 16 samples" in statistics
    assert "what self.net.2 (MixingLater) gives for a sample depends on the others" in mixing
    assert "self.net.0" in hooked and "once per micro-batch" in hooked
    # Hung on while training runs, they changed gradients of micro-batches, and nothing was said.
    assert on_weights.startswith("madpipe: gradient hooks (self.net.0.weight, self.net.6.bias) run on the rank")
    assert two.ranks[1]["said_of_layers"]["changed later"] == []


def test_hooks_that_are_hung_on_later_are_told_without_the_check_of_layers(two: Records) -> None:
    """With ``check_layers=False`` nothing was said of them, nor of batch normalization that a hook turns on."""
    unchecked, statistics, hooked, on_weights = two.ranks[0]["said_of_layers"]["changed later, unchecked"]
    assert "check_layers=False: the layers are not compared" in unchecked
    assert "(self.net.1 (BatchNorm1d)) has the statistics of a micro-batch" in statistics
    assert "self.net.0" in hooked and "gradient hooks (self.net.0.weight, self.net.6.bias)" in on_weights


def test_layers_that_hooks_let_mix_samples_within_an_epoch_are_told(two: Records) -> None:
    """By a buffer or a container of a layer, on either rank: losses were others, and nothing was said."""
    said = two.ranks[0]["said_of_layers"]["changed within"]
    places = [1, 2, 5, 6, 7]
    assert len(said) == len(places)
    for place, sentence in zip(places, said, strict=True):
        assert f"what self.net.{place} (MixingWithin) gives for a sample depends on the others" in sentence


def test_what_a_step_changes_under_a_layer_is_told_once(two: Records) -> None:
    """What a step changed in a dict came to layers at another time than in one process, in silence."""
    said = [each for rank in two.ranks for each in rank["said_of_layers"]["tempered"] if "in place" in each]
    assert len(said) == 1
    assert "training_step changes self.settings in place, which is self.net.1.settings of a layer, too" in said[0]
    assert "on_train_batch_end" in said[0]


def test_layers_may_mix_samples_in_whole_batches(two: Records) -> None:
    assert_same(two.of("whole_batches"), two.reference["whole_batches"])


@pytest.mark.parametrize("case", ["Unfrozen", "Dropping", "FrozenLater"])
def test_layers_that_a_hook_changes_train_like_one_process(two: Records, case: str) -> None:
    assert_same(two.of("alike_later")[case], two.reference["alike_later"][case])


@pytest.mark.parametrize(
    "case, num_steps, sentence",
    [
        (
            "Scaled",
            4,
            "since self.scale has changed, pipeline_layers() of Scaled is not what forward() computes: ",
        ),
        ("ScaledBySettings", 4, "since self.settings has changed, pipeline_layers() of ScaledBySettings is not"),
        ("ScaledByCalls", 4, "since FACTORS has changed, pipeline_layers() of ScaledByCalls is not"),
        ("ScaledByEpoch", 4, "since self.current_epoch has changed, pipeline_layers() of ScaledByEpoch is not"),
        ("ScaledInEvaluation", 6, "since self.scale has changed, pipeline_layers() of ScaledInEvaluation is not"),
        ("Replaced", 4, "self.head is another module than when this run began"),
        ("Unfrozen", 4, "is unfrozen while fit runs, and DeepSpeed's ZeRO, bf16 and fp16 optimizers"),
        ("UnfrozenWithoutRate", 4, "is unfrozen while fit runs, and configure_optimizers has not given it"),
        ("WithAuxiliary", 0, "training_step reads self.blocks.0.auxiliary_loss, which a layer sets while it runs"),
        ("WithAuxiliaryAtTheEnd", 0, "training_step reads self.blocks.4.auxiliary_loss, which a layer sets"),
        ("WithCollected", 0, "training_step reads self.losses, which self.forward() or a layer sets"),
        ("PenalizedGradient", 0, "training_step asks for gradients by what it passes to self.forward()"),
    ],
)
def test_what_changes_later_is_refused_on_every_rank(
    two: Records, case: str, num_steps: int, sentence: str
) -> None:
    """``forward`` was compared once; these runs went on as they had begun, or ended in words of torch."""
    for rank in two.ranks:
        assert sentence in rank["different_later"][case]["end"]
        assert rank["different_later"][case]["num_steps"] == num_steps


def test_what_may_change_is_said_before_the_first_step(two: Records) -> None:
    record = two.ranks[0]["different_later"]
    asking, compiled = record["Asking"], record["Compiled"]
    assert asking["end"] == compiled["end"] == "not refused"
    trainers, numbers = asking["said"]
    assert "forward() of Asking reads self.global_step, and is not run in a pipeline" in trainers
    assert "asks for the numbers in tensors (bool) outside of its layers" in numbers
    assert "self.net was compiled in place (compile()), as a whole" in compiled["said"][0]
    assert not two.ranks[1]["different_later"]["Asking"]["said"]


# Hooks and optimizers that look at all parameters


@pytest.mark.parametrize(
    "case",
    [
        "norms_over_ranks",
        "as_in_one_process",
        "each_by_itself",
        "by_places",
        "logged_features",
        "set_by_name",
        "in_the_order_of_the_loader",
        "own_ratio",
        "groups_found_by_parameters",
        "averages_in_validation",
        "hooks_of_steps",
        "asked_in_steps",
        "taught",
        "skipped_batches",
        "recurrent_layers",
    ],
)
def test_hooks_on_all_parameters_train_like_one_process(two: Records, case: str) -> None:
    """``clip_grad_norm_`` in a hook took the norm of a part of the gradients, and nothing was said.

    The refusal of a step that skips a batch said what trains otherwise.
    """
    assert_same(two.of(case), two.reference[case])


def test_a_mark_that_the_next_micro_batch_overwrites_is_told(two: Records) -> None:
    """A hook found that of the last micro-batch, stepped with gradients of NaN, and nothing was said."""
    [told] = [line for rank in two.ranks for line in rank["marked_for_a_while"]]
    assert "left self.skips = True behind micro-batch 2 of a batch and False behind the last" in told


@pytest.mark.parametrize("precision, tolerance", [("flat", 1e-5), ("flat in two pipelines", 1e-5), ("half", 2e-2)])
def test_what_hooks_write_into_weights_lasts(two: Records, precision: str, tolerance: float) -> None:
    """Under stage=1, bf16 and fp16 the next step, or the end of the run, threw it away, and nothing was said."""
    record, reference = two.of("written_by_hooks")[precision], two.reference["written_by_hooks"][precision]
    assert_same(record, reference, tolerance=tolerance)


@pytest.mark.parametrize(
    "case, sentence",
    [
        ("NormByHand", "on_before_optimizer_step of NormByHand takes numbers out of several parameters"),
        ("Stacked", "on_after_backward of Stacked computes with several parameters or gradients together"),
        ("RateOfAll", "on_train_batch_end of RateOfAll "),
        ("Noisy", "on_train_epoch_start of Noisy draws random numbers for parameters"),
        ("ScaledAtRandom", "on_before_optimizer_step of ScaledAtRandom draws random numbers for parameters"),
        ("DrawnByOneSeed", "on_train_batch_end of DrawnByOneSeed draws random numbers for parameters"),
        ("DrawnByOneSeedForOne", "on_train_batch_end of DrawnByOneSeedForOne draws random numbers for parameters"),
        ("NormsLogged", "on_before_optimizer_step of NormsLogged logs values of single parameters"),
        ("NormsOfLightning", "on_before_optimizer_step of NormsOfLightning computes with several parameters"),
        ("NormOfOneEach", "on_before_optimizer_step of NormOfOneEach computes with several parameters"),
        ("Counted", "on_train_epoch_end of Counted counts the elements of several parameters"),
        # Numbers of what the optimizer has were those of a rank, and nothing was said.
        (
            "OptimizerCounted",
            "on_train_epoch_end of OptimizerCounted counts the optimizer's parameters (here len(",
        ),
        (
            "StatesCounted",
            "counts the parameters that the optimizer has a state of (here len(optimizer.state) is ",
        ),
        ("CountedInStep", "training_step counts the optimizer's parameters (here len(group['params']) is "),
        ("counted zero", "(under stage=1, bf16 and fp16 one flat tensor of each group)"),
        ("counted bf16", "(under stage=1, bf16 and fp16 one flat tensor of each group)"),
        ("PlacesOfOptimizer", "on_before_optimizer_step of PlacesOfOptimizer takes the optimizer's parameters by"),
        ("CountedPlacesOfOptimizer", "takes the optimizer's parameters by their places"),
        # A rate for the number of processes is another one than in one process.
        ("RateOfWorld", "trainer.world_size is asked for at hook_cases.py:"),
        ("RateOfDevices", "trainer.num_devices is asked for at hook_cases.py:"),
        # So is one by these two, which were told of in steps alone.
        ("RateOfEnvironment", "WORLD_SIZE of the environment is asked for at hook_cases.py:"),
        ("RateOfGroup", "torch.distributed.get_world_size() is asked for at hook_cases.py:"),
        # What rank 0 alone changed the step, which runs on another one, never saw, and nothing was said.
        (
            "WeighedOnRankZero",
            "on_train_batch_start of WeighedOnRankZero changes self.share and lr of group 0 of the optimizer on",
        ),
        ("WeighedByRank", "on_train_start of WeighedByRank changes self.share and lr of group 0 of the optimizer"),
        ("FrozenAtRandom", "on_train_epoch_start of FrozenAtRandom draws random numbers for parameters ("),
        ("LookingLate", "on_train_batch_end of LookingLate looks at gradients ("),
        ("SavingItself", "on_train_epoch_end of SavingItself asks for state_dict(), which has the layers of this"),
        # Code that the optimizer or the schedule ran saw a part of the parameters, and nothing was said.
        (
            "NormAfterStep",
            "the step post hook NormAfterStep.shrink of SGD takes numbers out of several parameters",
        ),
        ("ClippedEarly", "before the backward of its step. One process still has those of the step before there"),
        ("StepReplaced", "step of SGD computes with several parameters or gradients together"),
        ("ScheduledByWeights", "step of RateOfWeights takes numbers out of several parameters"),
        ("StatesAsked", "state_dict() of the optimizer is asked for, which has the states of this rank's"),
        # A sum of one rank's weights went into a checkpoint, and into the bar.
        ("NormInSave", "on_save_checkpoint of NormInSave computes with several parameters or gradients together"),
        ("NormBar", "get_metrics of NormBar takes numbers out of several parameters"),
        ("looking zero", "under stage=1, bf16 and fp16 those of a step lie in flat buffers of DeepSpeed's"),
        ("looking bf16", "under stage=1, bf16 and fp16 those of a step lie in flat buffers of DeepSpeed's"),
    ],
)
def test_hooks_that_see_a_part_of_the_parameters_are_told_once(two: Records, case: str, sentence: str) -> None:
    records = [rank["told_of_hooks"][case] for rank in two.ranks]
    [line] = [line for record in records for line in record["said"]]
    assert sentence in line
    if case in ("Noisy", "ScaledAtRandom"):  # once of whichever rank was the first, which was not rank 0 at times
        assert records[0]["said"] == [line]
    assert [record["end"] for record in records] == ["not refused"] * 2


@pytest.mark.parametrize(
    "case, is_told", [("GroupOfSeveralFoundByParameter", True), ("GroupFoundByParameter", False)]
)
def test_a_group_that_ranks_set_otherwise_is_told_once(two: Records, case: str, is_told: bool) -> None:
    """A hook found one of its parameters on one rank, and the others trained by another rate without a word."""
    found = [rank["told_of_hooks"][case] for rank in two.ranks]
    lines = [line for record in found for line in record["said of groups"]]
    assert [record["end"] for record in found] == ["not refused"] * 2
    assert len(lines) == is_told
    if is_told:
        assert "'lr' of group 0 of the optimizer is 0.1 on rank 0 and 0.0 on rank 1" in lines[0]


def test_frozen_modules_beside_the_layers_are_told_once(two: Records) -> None:
    [line] = [line for rank in two.ranks for line in rank["told_of_hooks"]["Mentored"]["said"]]
    assert line.startswith("self.mentor (144 B) is frozen and beside the layers: every rank has all of it")


def test_gradients_that_a_hook_clears_are_not_told(two: Records) -> None:
    assert all(rank["told_of_hooks"]["DrawnOnce"]["said"] == [] for rank in two.ranks)
    # What the line about draws names as the way out was told of by it.
    assert all(rank["told_of_hooks"]["DrawnBySeeds"]["said"] == [] for rank in two.ranks)
    assert all(rank["told_of_hooks"]["ZeroingGradients"]["said"] == [] for rank in two.ranks)
    assert all(rank["told_of_hooks"]["CopyingItself"]["said"] == [] for rank in two.ranks)
    assert all(rank["told_of_hooks"]["CopiesInSave"]["said"] == [] for rank in two.ranks)
    assert all(rank["told_of_hooks"]["StepReplacedByItself"]["said"] == [] for rank in two.ranks)
    assert all(rank["told_of_hooks"]["WeighedOnAll"]["said"] == [] for rank in two.ranks)


def test_parameters_of_an_optimizer_that_are_read_one_by_one_are_not_told(two: Records) -> None:
    assert [rank["told_of_hooks"]["OptimizerRead"] for rank in two.ranks] == [
        {"end": "not refused", "said": [], "said of groups": []}
    ] * 2


@pytest.mark.parametrize(
    "case, sentence",
    [
        (
            "ListsOfOne",
            "a hook clips the norm of gradients one by one, or calls clip_grad_norm_ otherwise on each",
        ),
        (
            "OnRankZero",
            "a hook clips the norm of gradients one by one, or calls clip_grad_norm_ otherwise on each",
        ),
        ("Averaged", "on_train_batch_end of Averaged changes teacher.0."),
        ("Averaged", "Average by hand in a dict by the names of self.named_parameters()"),
        # The rank whose layers have other shapes than the first ones ended with torch's words about sizes.
        ("AveragedWhole", "on_train_batch_end of AveragedWhole changes teacher."),
        ("AveragedWholeAsSums", "on_train_batch_end of AveragedWholeAsSums changes teacher."),
        # Each rank averaged the layers that it had, and nobody was told.
        ("AveragedInBuffers", "on_train_batch_end of AveragedInBuffers changes average."),
        ("ClippedInClosure", "optimizer_step of ClippedInClosure looks at gradients after the closure"),
        (
            "OwnOptimizer",
            "configure_optimizers returns GlobalNorm, whose step of a parameter depends on the others",
        ),
        ("StepsByPlace", "whose step of a parameter depends on which others it is given (by their places in"),
        (
            "OptimizersSetUp",  # an IndexError
            "strategy.setup_optimizers() makes a new optimizer, and the pipeline's engine steps with the one",
        ),
        ("ScheduledByOne", "head.weight is asked for on a rank that does not run its layer"),
        # After a move its lists were of other parameters than those beside them.
        (
            "LooksAhead",
            "the optimizer of the pipeline is Lookahead, which keeps tensors of parameters in self.slow",
        ),
        ("StepsWithNoise", "returns Langevin, whose step draws from the common random generators"),
        ("StepsWithClosure", "the step of AsksForClosure calls its closure without asking whether there is one"),
        ("WithSAM", "the step of SAM calls its closure without asking whether there is one"),
        ("WithSAM", "an optimizer that needs the loss a second time, such as SAM, cannot run in a pipeline"),
        ("WithPoliteSAM", "the step of PoliteSAM calls its closure 2 times"),
        (
            "WithSlowedByLoss",
            "SlowedByLoss does something else with a closure than without one, such as to follow",
        ),
        ("EvaluatedTwice", "optimizer_step evaluates its closure a second time for a batch"),
        ("WithLBFGS", "a pipeline works with a torch optimizer whose step needs no closure"),
        ("LearnedWeights", "LearnedWeights has parameters outside its pipeline layers (weights; 1 in all)"),
        ("LearnedWeightsOfFound", "depends on weights in other ways than through self() (weights), such as"),
        ("LearnedWeightsOfFound", "or by weights of its terms that are learned"),
        # These were dropped from the optimizer, and never trained, without a word.
        ("LearnedWeightsInOneStage", "depends on weights in other ways than through self() (weights), such as"),
        ("LearnedByTensor", "configure_optimizers puts a tensor of shape () into group 1 that is a parameter"),
        ("LearnedByTensorInOneStage", "configure_optimizers puts a tensor of shape () into group 1"),
        ("RateInStep", "training_step changes 'lr' of parameter group 0 of the optimizer (it was 0.3)"),
        # Layers that share weights waited for ever, and others trained from the next micro-batch on.
        ("UnfreezesInStep", "training_step sets requires_grad of head.bias to True, and in a pipeline a step"),
        ("UnfreezesInOneStage", "training_step sets requires_grad of head.bias to True, and in a pipeline a step"),
        ("UnfreezesInOneStage", "step runs once per micro-batch: freeze and unfreeze in a hook"),
        ("RateInOneStage", "not refused"),
        (
            "RateTwiceInOneStage",
            "training_step changes 'lr' of parameter group 0 of the optimizer again in the second",
        ),
        ("AveragedInOneStage", "training_step changes mentor.weight again in the second micro-batch of a batch"),
        # Behind the first looks nothing looked.
        ("AveragedLate", "training_step changes mentor.weight again in the second micro-batch of a batch"),
        ("AveragedOnceLate", "training_step changes mentor.weight again in the second micro-batch of a batch"),
        ("ClampedAlike", "not refused"),
        ("HeadClampedLate", "training_step changes head.weight, and in a pipeline it has the"),
        ("UnfreezesInOneMicroBatch", "not refused"),
        ("Judged", "not refused"),
        ("RateBeforeForward", "training_step changes 'lr' of parameter group 0 of the optimizer (it was 0.3)"),
        ("ClampedInStep", "training_step uses embed.weight other than by its call of self.forward()"),
        ("HeadClamped", "training_step changes head.weight, and in a pipeline it has the"),
        ("HeadClamped measured", "training_step changes head.weight, and in a pipeline it has the"),
        # On the first rank the averages stayed in the place of the weights, for its step ends at its call.
        ("SwapsInValidation", "validation_step changes embed.weight, and in a pipeline it has the"),
        ("SwapsInValidation", "change them in on_validation_epoch_start and back in on_validation_epoch_end"),
        ("CopiesInValidation", "validation_step changes embed.weight, and in a pipeline it has the"),
        ("NormInStep", "training_step uses embed.weight other than by its call of self.forward()"),
        # It was said to use the weight other than by its call, without a word of the gradient.
        ("GradientsInStep", "training_step reads the gradient of embed.weight (hook_cases.py:"),
        ("GradientsInStep", "read gradients in on_before_optimizer_step"),
        ("NormInEvaluation", "validation_step uses embed.weight other than by its call of self.forward()"),
        ("NormBeforeForward", "training_step uses embed.weight other than by its call of self.forward()"),
        ("StateInStep", "training_step uses embed.weight other than by its call of self.forward()"),
        (
            "StoppingAlone",
            "rank 0 has left the loop over the batches of epoch 0 after 2 of them; trainer.",
        ),
        ("StoppingAlone", "all=False), and rank 1 begins another batch"),
        ("StoppingTogether", "not refused"),
        (
            "EpochEndedAlone",
            "rank 1 has left the loop over the batches of epoch 0 after 1 of them, and rank 0",
        ),
        ("GroupAdded", "the optimizer had 1 parameter groups when fit began and has 2 now (add_param_group)"),
        ("StepsClippedRarely", "returns RarelyClipped, whose step of a parameter depends on the others"),
        ("StepLeftOut", "optimizer_step of StepLeftOut has called its closure without optimizer.step(closure="),
        ("OptimizerReplaced", "trainer.optimizers has another optimizer (Adam) than when fit began"),
        ("ClippingReplaced", "trainer.gradient_clip_val was None when fit began and is 0.05 now"),
        ("clipped zero", "a hook clips gradients, and under stage=1, bf16 and fp16 they lie in flat buffers"),
        (
            "values clipped zero",
            "a hook clips gradients, and under stage=1, bf16 and fp16 they lie in flat buffers",
        ),
        ("clipped bf16", "a hook clips gradients, and under stage=1, bf16 and fp16 they lie in flat buffers"),
        ("ratio zero", "returns Ratio, whose step of an element depends on the tensor that it stands in"),
        ("ratio bf16", "returns Ratio, whose step of an element depends on the tensor that it stands in"),
    ],
)
def test_what_cannot_be_done_with_a_part_of_the_parameters_is_refused(
    two: Records, case: str, sentence: str
) -> None:
    assert all(sentence in rank["told_of_hooks"][case]["end"] for rank in two.ranks)


@pytest.mark.parametrize("case", ["SetOnRankZero", "SetByRank", "DecidedByBuffer", "BufferLogged"])
def test_a_hook_that_needs_a_tensor_of_another_rank_is_told_what_it_may_do(two: Records, case: str) -> None:
    """A hook that set one buffer of another rank was refused with advice that speaks of parameters."""
    end = two.ranks[0]["told_of_hooks"][case]["end"]
    assert end.startswith("ElsewhereError: blocks.4.heat is asked for on a rank that does not run its layer"), end
    assert "A hook that every rank runs may change it in place, or set a buffer" in end


def test_a_hook_that_runs_layers_is_told_where_they_run(two: Records) -> None:
    # One rank went on with what stands for the layers of the other, and was told of names and buffers.
    for rank in two.ranks:
        end = rank["told_of_hooks"]["RunsBlocks"]["end"]
        assert end.startswith("ElsewhereError: a hook runs a layer that another rank has (Linear)"), end
        assert "let a step make in one call what it gives" in end


# What steps change beside their module


@pytest.mark.parametrize("case", ["beside_the_module", "annealed_by_globals"])
def test_what_steps_change_beside_their_module_is_on_every_rank(two: Records, case: str) -> None:
    """Globals, attributes of callbacks and of data sets were changed on the last stage alone, trials counted."""
    assert_same(two.of(case), two.reference[case])


@pytest.mark.parametrize("case", ["by_objects", "metered", "kept_metrics"])
def test_what_steps_keep_in_objects_is_on_every_rank(two: Records, case: str) -> None:
    """Trials of a loss that a schedule in an object made advanced that, and other ranks kept what they had.

    So did counters in slots, defaults and attributes of functions, and a generator in a global. A mean of the
    epoch by a meter was 0 on rank 0, by which it stopped early. Metrics in dicts and lists, which gather what
    ranks have, kept what trials had told them, 1.4 % off; and a short batch, cut unevenly, weighed less in a mean.
    """
    tells = case == "metered"
    for rank in two.ranks:
        assert_same({**rank[case], "said": 1} if tells else rank[case], two.reference[case])
    if tells:
        assert sorted(rank[case]["said"] for rank in two.ranks) in ([0, 1], [1, 1])


def test_a_logger_that_a_step_calls_itself_has_a_row_for_each_batch(two: Records) -> None:
    """It had one for each micro-batch, and nothing was said."""
    rows = two.ranks[0]["logged_by_itself"]["rows"]
    assert_same(rows, two.reference["logged_by_itself"]["rows"])
    said = [line for rank in two.ranks for line in rank["logged_by_itself"]["said"]]
    assert len(said) == 1 and "with the mean of each number over micro-batches" in said[0]


def test_what_cannot_follow_beside_the_module_is_told(two: Records) -> None:
    said = [line for rank in two.ranks for line in rank["told_of_what_is_beside"]["said"]]
    assert any("training_step opens '/dev/null' for writing, and a step runs on" in line for line in said)
    assert any("a step changes tests.lightning.beside_cases.HUGE in place" in line for line in said)
    assert any("tests.lightning.beside_cases.SEEN gets 4 entries instead of 1" in line for line in said)


def test_what_is_not_looked_into_beside_the_module_is_told(two: Records) -> None:
    """Arrays above 1 GiB and in files, and metrics in a global or a plain dict, were changed on the last stage
    alone, and nothing was said."""
    said = [line for rank in two.ranks for line in rank["told_of_what_is_beside"]["said"]]
    unseen = [line.partition(" and is not looked at")[0] for line in said if "is not looked at" in line]
    named = "tests.lightning.beside_cases.{}, an array that the steps' code names,"
    assert sorted(unseen) == [named.format("FILED") + " is in a file", named.format("OUTSIZE") + " has 1,024 MiB"]
    changed = [line.partition(", and objects")[0].rpartition(" ")[2] for line in said if ", and objects" in line]
    assert sorted(changed) == ["MeanMetric", "MetricCollection"]


# The state in which steps call their layers


@pytest.mark.parametrize(
    "run",
    [
        "attributes", "attributes, recomputed", "attributes, once per batch", "set back", "late", "names",
        "hooks and modes", "autocast",
    ],
)  # fmt: skip
def test_layers_run_in_the_state_in_which_the_step_calls_them(two: Records, run: str) -> None:
    """What a step set before its call held on the first rank alone, and stayed there; autocast around it did
    nothing."""
    assert_same(two.of("in_another_state")[run], two.reference["in_another_state"][run])


def test_a_step_under_autocast_is_told_once_what_it_rounds(two: Records) -> None:
    """Losses differed by 0.1 % from those of one process, and a document alone said so."""
    said = [rank["told_of_rounding"] for rank in two.ranks]
    assert all(each["1"] == [] and len(each["4"]) <= 1 for each in said)
    assert said[0]["4"][0].startswith("training_step calls its layers under torch.autocast: each micro-batch ")


def test_calls_of_several_modules_in_another_state_are_refused(two: Records) -> None:
    said = two.of("refused_states")["parts"]
    assert "training_step changes torch.autocast before it calls self.encoder()" in said
    assert "put the calls into forward(), and call self(...)" in said


def test_copies_of_layers_that_a_hook_averages_by_pairs_are_refused(two: Records) -> None:
    """Each weight was averaged with that of another layer, and nothing was said; later than in four steps, too.

    A probe that had the form of a layer was refused as its copy, and so was a copy that all ranks loaded alike.
    """
    ranks = [rank["averages_by_pairs"] for rank in two.ranks]
    for rank in ranks:
        for case in ("changes", "begins late", "synchronized"):
            refusal, said = rank[case]
            assert "ByPairs.copies.0 is a copy of layers" in refusal and "named_parameters()" in refusal
            assert not said
        for case in ("stays", "begins behind the last look", "a probe", "a teacher"):
            assert rank[case][0] == "not refused", case
    told = {case: [line for rank in ranks for line in rank[case][1]] for case in ranks[0]}
    assert not told["stays"] and not told["a probe"] and not told["a teacher"]
    [line] = told["begins behind the last look"]
    assert "AverageByPairs.copies.0 is a copy of layers" in line


def test_weights_in_one_memory_that_a_hook_unfreezes_are_refused(two: Records) -> None:
    said = two.of("unfreezes_one_memory")
    assert "are two parameters in one memory, which a hook has unfrozen" in said, said


def test_what_a_hook_keeps_of_other_ranks_is_told_once(two: Records) -> None:
    said = [rank["kept_by_modules"] for rank in two.ranks]
    [line] = [line for each in said for line in each["AverageByModules"]]
    assert line.startswith(
        "on_train_batch_end of AverageByModules keeps what it has made of a tensor that another "
    )
    assert [each["LooksByModules"] for each in said] == [[], []]
    for each in said:  # a file had forms in the place of weights
        assert "is asked for on a rank that does not run its layer" in each["saves"]
