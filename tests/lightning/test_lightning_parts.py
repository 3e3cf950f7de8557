"""The parts of the strategy that need no other process."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import random
import re
import unittest.mock
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.weak import WeakIdKeyDictionary

import lightning_madpipe
from deepspeed_partition.engine.repartition.parameter_groups import EveryGroup
from deepspeed_partition.options import Options
from lightning_madpipe.checkpoint.checkpoint_folders import LoadedFolder
from lightning_madpipe.checkpoint.layers_on_rank_zero import TensorInfo
from lightning_madpipe.compat import elsewhere as compat_elsewhere
from lightning_madpipe.compat.absent_parameters import reached_in_hooks
from lightning_madpipe.compat.elsewhere import Elsewhere, ElsewhereError
from lightning_madpipe.compat.unsupported import note_on_validation_within_window, notes_on
from lightning_madpipe.finding import example_batch
from lightning_madpipe.module import OUTSIDE_A_STEP, find_layers, frozen_in_one_memory, outside_pipeline
from lightning_madpipe.planning import why_left_out
from lightning_madpipe.settings import checked_settings
from lightning_madpipe.steps import step_runs
from lightning_madpipe.steps.batch_runs import BatchRun, dims_by_whole
from lightning_madpipe.steps.batches import (
    UncutBatchError,
    batch_size_of,
    copy_of_batch,
    fingerprint_of,
    named_tensors_of,
    shapes_of,
    size_of,
    split_batch,
)
from lightning_madpipe.steps.forward_reads import MOST_TIMES, ForwardWatch, Read, facts_of
from lightning_madpipe.steps.loss_mode import cut_in_words
from lightning_madpipe.steps.losses import error_in_words
from lightning_madpipe.steps.metrics import copied
from lightning_madpipe.steps.micro_batches import MicroBatch
from lightning_madpipe.steps.other_weights import loss_depends_on_weights
from lightning_madpipe.steps.step_results import result_of, rule_of
from lightning_madpipe.steps.unlike_ranks import in_words, where_unlike
from lightning_madpipe.steps.user_step import UserSteps
from lightning_madpipe.steps.views_of_weights import told_views
from tests.lightning.lightning_cases import Classifier, SequentialClassifier, TiedLanguageModel


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Record:
    x: torch.Tensor
    name: str


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_pieces_make_up_the_batch_and_the_first_is_the_largest(size: int, num_pieces: int) -> None:
    x = torch.arange(size)
    pieces = split_batch({"x": x}, num_pieces)
    sizes = [len(piece["x"]) for piece in pieces]
    assert len(pieces) == min(size, num_pieces)
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert torch.equal(torch.cat([piece["x"] for piece in pieces]), x)


def test_nested_batches_keep_their_types() -> None:
    x = torch.arange(4.0)
    batch = [
        Pair(x, x + 1),
        {"record": Record(x, "all"), "names": ["a", "b", "c", "d"], "scale": torch.tensor(2.0)},
        7,
    ]
    first, second = split_batch(batch, 2)
    pair, rest, number = second
    assert isinstance(pair, Pair) and pair.y.tolist() == [3.0, 4.0]
    assert isinstance(rest["record"], Record) and rest["record"].x.tolist() == [2.0, 3.0]
    assert rest["record"].name == "all" and rest["names"] == ["c", "d"]
    assert rest["scale"] == 2.0 and number == 7
    assert first[1]["names"] == ["a", "b"]
    assert shapes_of(first) == ((2,), (2,), (2,), ())


def test_pieces_are_views() -> None:
    x = torch.zeros(4, 3)
    split_batch(x, 2)[1].fill_(1.0)
    assert x[2:].eq(1).all() and x[:2].eq(0).all()


@pytest.mark.parametrize("uneven", [False, True])
def test_one_sample_stands_beside_no_more(uneven):
    """Code that asks whether there is one sample ran for one micro-batch of a batch, and not for another."""
    for size in range(1, 20):
        for num in range(1, 7):
            pieces = split_batch(torch.arange(size), num, uneven=uneven, ones_apart=True)
            sizes = [len(piece) for piece in pieces]
            assert len(sizes) <= num and torch.cat(pieces).tolist() == list(range(size))
            assert set(sizes) == {1} or min(sizes) > 1
            assert not uneven or len(set(sizes)) > 1 or len(sizes) == 1 or size <= 4 or set(sizes) == {1}


@pytest.mark.parametrize(
    "batch, sentence",
    [
        ({"size": 3}, "holds no tensor"),
        ([torch.tensor(1.0)], "holds no tensor"),
        ([torch.zeros(0, 3)], "no samples"),
        (
            [[torch.zeros(4, 3), torch.zeros(2, 3), torch.zeros(5, 3)], torch.zeros(4)],
            "a list of 3 tensors stands",
        ),
        (
            [torch.zeros(4, 3), torch.zeros(3)],
            "shape (3,) stands in a batch whose first tensor has 4 rows",
        ),
    ],
)
def test_batches_that_cannot_be_split(batch: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as refusal:
        split_batch(batch, 2)
    assert sentence in str(refusal.value)


def test_what_a_checkpoint_of_a_pipeline_does_not_have_is_told_with_the_way_out() -> None:
    """A hook that set the learning rate in the states of the optimizer met a bare KeyError.

    And one that asked in another way, or that threw the states away for a new optimizer, changed nothing.
    """
    loaded = LoadedFolder(epoch=1)
    assert loaded["epoch"] == loaded.get("epoch") == loaded.pop("epoch") == 1
    for asks in (
        lambda: loaded["optimizer_states"],
        lambda: loaded.get("optimizer_states", []),
        lambda: "optimizer_states" in loaded,
        lambda: loaded.pop("optimizer_states", None),
        lambda: loaded.__setitem__("optimizer_states", []),
    ):
        with pytest.raises(KeyError) as absent:
            asks()
        assert "checkpoint['optimizer_states']" in str(absent.value) and "on_train_start" in str(absent.value)
        assert "to begin with a new optimizer, load the weights alone" in str(absent.value)
    with pytest.raises(KeyError, match="reads checkpoint\\['state_dict'\\]"):
        loaded["state_dict"]
    with pytest.raises(KeyError, match="asks for checkpoint\\['state_dict'\\]"):
        loaded.get("state_dict")
    with pytest.raises(KeyError, match="'other'"):
        loaded["other"]
    assert loaded.get("other", 2) == loaded.pop("other", 2) == 2 and "other" not in loaded


def test_a_hook_may_set_the_state_and_no_evaluation_asks_for_an_optimizer() -> None:
    loaded = LoadedFolder()
    loaded["state_dict"] = {"weight": 1}
    assert "state_dict" in loaded and loaded.get("state_dict") == {"weight": 1}
    loaded.is_fitting = False
    assert "optimizer_states" not in loaded and loaded.get("optimizer_states", []) == []
    loaded["optimizer_states"] = []


def test_fingerprints_tell_batches_apart() -> None:
    batch = [torch.arange(6), torch.randn(6, 2).bfloat16(), torch.tensor([True, False])]
    same = [tensor.clone() for tensor in batch]
    assert fingerprint_of(batch) == fingerprint_of(same)
    same[0][0] = 9
    assert fingerprint_of(batch)[0] != fingerprint_of(same)[0]
    assert fingerprint_of(batch)[1:] == fingerprint_of(same)[1:]


class HalfAPipeline(nn.Module):
    """What a rank has that runs the layers ``held``."""

    def __init__(self, layers: Sequence[Any], held: Sequence[int]) -> None:
        super().__init__()
        self._layer_specs, self.tied_modules, self.loss_fn = list(layers), nn.ModuleDict(), None
        for index in held:
            self.add_module(str(index), layers[index])


def test_layers_of_other_ranks_keep_their_places_and_cannot_be_read() -> None:
    module = Classifier()
    whole, weight = dict(module.named_parameters()), module.head.weight
    call = find_layers(module)
    assert call.attribute == "forward" and len(call.layers) == 8
    pipeline = HalfAPipeline(call.layers, held=(0, 1, 2))
    elsewhere = Elsewhere(module, pipeline)
    elsewhere.hide()
    here = [name for name in whole if name.startswith(("embed.", "blocks.0.", "blocks.1."))]
    assert [name for name, _ in module.named_parameters()] == here
    assert list(module.state_dict()) == ["class_weights", *here]
    assert all(module.get_parameter(name) is whole[name] for name in here)
    assert len(module.blocks) == 5 and module.get_submodule("blocks.3") is module.blocks[3]
    # The form can be read, and nothing else.
    assert "in_features=12" in repr(module) and module.head.weight.shape == (4, 12)
    assert module.head.bias is not None and hasattr(module.head, "weight")
    for read in (
        lambda: module.get_parameter("head.weight"),
        lambda: module.head.weight + 1,
        lambda: torch.stack([module.head.weight]),
        lambda: module.head.weight.detach(),
        lambda: module.head.weight.data,
        lambda: module.head.weight.tolist(),
        lambda: module.head(torch.zeros(2, 12)),
        lambda: isinstance(module.head.weight, nn.Parameter),
        lambda: setattr(module.head, "weight", nn.Parameter(torch.zeros(4, 12))),
        lambda: module.blocks[3].linear.weight.norm(),
    ):
        with pytest.raises(ElsewhereError, match=r"(head|blocks\.3\.linear)\.weight is asked for on a rank"):
            read()
    with pytest.raises(ElsewhereError):
        _ = copy.deepcopy(module).head.weight + 1
    with elsewhere.lifted():
        assert dict(module.named_parameters()) == whole and module.head.weight is weight
    pipeline._modules["7"] = pipeline._modules.pop("2")
    elsewhere.hide()  # as after a move
    assert [name for name, _ in module.named_parameters()] == [*here[:4], "head.weight", "head.bias"]
    elsewhere.show()
    assert dict(module.named_parameters()) == whole
    assert module(torch.zeros(2, 8)).shape == (2, 4)


def test_an_rnn_of_another_rank_can_be_moved_and_not_run() -> None:
    """It lists its weights anew, and asks each whether it is on a GPU: no pipeline with two RNNs began there."""
    module = Classifier()
    rnn = module.blocks[3].linear = nn.LSTM(12, 12)
    elsewhere = Elsewhere(module, HalfAPipeline(find_layers(module).layers, held=(0,)))
    elsewhere.hide()
    module.to("cpu").float()
    assert list(map(id, rnn._flat_weights)) == list(map(id, rnn._parameters.whole.values()))
    with pytest.raises(ElsewhereError):
        rnn(torch.zeros(2, 1, 12))


def test_what_another_rank_has_is_on_the_device_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden weights stay on the CPU, and next(self.parameters()).device was that, in steps of a GPU."""
    module = Classifier()
    elsewhere = Elsewhere(module, HalfAPipeline(find_layers(module).layers, held=(3,)))
    elsewhere.hide()
    device = SimpleNamespace(current_device_name=lambda: "meta")
    monkeypatch.setattr(compat_elsewhere, "get_accelerator", lambda: device)
    assert module.embed.weight.device.type == "meta" and module.embed.weight.new_zeros(3).device.type == "meta"
    with elsewhere.listed():
        first = next(module.parameters())
        assert (first.device.type, first.is_meta, first.is_cuda, first.is_cpu) == ("meta", True, False, False)
    with reached_in_hooks(module, "a hook"):
        assert module.embed.weight.device.type == "meta"


def test_a_module_that_takes_the_place_of_a_part_is_no_part_of_a_layer() -> None:
    """Parts are known by their identities, which Python gives away again."""
    module = Classifier()
    elsewhere = Elsewhere(module, HalfAPipeline(find_layers(module).layers, held=(0,)))
    assert (
        elsewhere.ids_inside == set(map(id, elsewhere.inside))
        and id(module.blocks[3].linear) in elsewhere.ids_inside
    )
    gone = id(module.blocks[3].linear)
    module.blocks[3].linear = None
    gc.collect()
    assert gone not in elsewhere.ids_inside and elsewhere.ids_inside == set(map(id, elsewhere.inside))


def test_what_is_beside_layers_is_found_without_a_look_at_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step asks a dozen times, and each time a set was made of all parts of all layers."""
    module = Classifier()
    elsewhere = Elsewhere(module, HalfAPipeline(find_layers(module).layers, held=(0,)))
    vars(module)["_madpipe"] = SimpleNamespace(pipeline=SimpleNamespace(elsewhere=elsewhere))
    monkeypatch.setattr(WeakIdKeyDictionary, "__iter__", lambda _: pytest.fail("all parts are looked at"))
    assert [name for name, _ in outside_pipeline(module)] == ["", "blocks"]


def test_a_tensor_that_stands_beside_its_layer_is_hidden_with_it() -> None:
    module = Classifier()
    module.shared, module.bare = module.head.weight, nn.Linear(12, 4, bias=False)
    module.bare.weight = module.head.weight
    pipeline = HalfAPipeline(find_layers(module).layers, held=(0,))
    elsewhere = Elsewhere(module, pipeline)
    elsewhere.hide()
    assert [name for name, _ in module.named_parameters()] == ["embed.weight", "embed.bias"]
    for read in (lambda: module.shared + 1, lambda: module.bare.weight + 1):
        with pytest.raises(ElsewhereError):
            read()


def test_layers_without_a_name_of_the_user_are_parameters_all_the_same() -> None:
    module = Classifier()
    layers = [*find_layers(module).layers, nn.Linear(4, 4), nn.Dropout(0.5)]
    pipeline = HalfAPipeline(layers, held=(7, 8, 9))
    elsewhere = Elsewhere(module, pipeline)
    elsewhere.hide()
    names = [name for name, _ in module.named_parameters()]
    assert names == ["head.weight", "head.bias", "pipeline_module.8.weight", "pipeline_module.8.bias"]
    # What DeepSpeed does before each batch leaves the user's modes as they are.
    module.head.eval()
    assert elsewhere.take_over_modes(True) is pipeline
    assert module.training and not module.head.training and layers[9].training
    module.eval()
    elsewhere.take_over_modes(True)
    assert not layers[9].training
    # A batch that is evaluated in the middle of training: by all layers, and by none afterwards.
    module.train()
    module.head.eval()
    elsewhere.take_over_modes(True)
    elsewhere.take_over_modes(False)
    assert module.training and not any(layers[index].training for index in (7, 8, 9))
    elsewhere.take_over_modes(True)
    assert [layers[index].training for index in (7, 8, 9)] == [False, True, True]


def test_a_sequential_needs_no_method() -> None:
    module = SequentialClassifier()
    call = find_layers(module)
    assert call.attribute == "net" and call.layers == tuple(module.net)


def test_tied_modules_are_one_owner() -> None:
    call = find_layers(TiedLanguageModel())
    assert [owner for owner, _ in call.existing_modules()] == ["embed", 1, 2, 3, 4, "embed"]


def micro_batch(data: Any, **arguments: Any) -> MicroBatch:
    defaults = {
        "step": "training_step",
        "size": batch_size_of(data),
        "arguments": (0,),
        "seed": 1,
        "batch_seed": 1,
    }
    return MicroBatch(data=data, **{**defaults, **arguments})


class Step(Classifier):
    """Doubles its input, and logs."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self(2 * batch[0])
        self.log("sum", outputs.sum())
        return (outputs - batch[1]).pow(2).mean()


def test_a_step_is_run_from_both_ends() -> None:
    module = Step()
    steps = UserSteps(module, "forward")
    x, y = torch.randn(4, 8), torch.randn(4, 4)
    micro = micro_batch([x, y], loss_scale=0.5)
    assert torch.equal(steps.inputs(micro), 2 * x)
    assert micro.log_calls == []
    outputs = torch.randn(4, 4)
    loss = steps.loss(outputs, micro)
    expected = (outputs - y).pow(2).mean()
    assert torch.equal(loss, 0.5 * expected) and torch.equal(micro.loss, expected)
    assert [call["name"] for call in micro.log_calls] == ["sum"]
    assert "forward" not in vars(module) and "log" not in vars(module)


def test_a_repeated_step_leaves_one_trace() -> None:
    """The profiler runs the loss several times."""
    steps, micro = UserSteps(Step(), "forward"), micro_batch([torch.zeros(4, 8), torch.zeros(4, 4)])
    for value in (1.0, 2.0, 3.0):
        steps.loss(torch.full((4, 4), value), micro)
    assert len(micro.log_calls) == 1
    assert micro.log_calls[0]["value"] == 48 and micro.loss == 9


def hands_all_on(self: Any, *arguments: Any, **keywords: Any) -> None:
    pl.LightningModule.log(self, *arguments, **keywords)


def hands_options_on(self: Any, name: str, value: Any, **options: Any) -> None:
    pl.LightningModule.log(self, f"my/{name}", value, **options)


@pytest.mark.parametrize("own", [hands_all_on, hands_options_on])
def test_what_a_log_method_of_the_module_is_given_is_found(own: Any) -> None:
    """pytorch_forecasting's modules have such a ``log``: the run ended with KeyError: 'name'."""
    steps = UserSteps(type("Logging", (Averaging,), {"log": own})(), "forward")
    micro = micro_batch([torch.zeros(4, 8), torch.zeros(4, 4)])
    steps.loss(torch.ones(4, 4), micro)
    assert micro.log_calls == [{"name": "mean", "value": 1.0, "on_step": True, "prog_bar": True}]


class Averaging(Step):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self(batch[0]).mean()
        self.log("mean", loss, on_step=True, prog_bar=True)
        return loss


def test_a_log_method_with_other_names_is_refused() -> None:
    """Every rank logs by the names."""
    own = lambda self, key, number, prog_bar=False: None  # noqa: E731
    with pytest.raises(ValueError, match=r"Logging\.log\(\) has no arguments of the names 'name' and 'value'"):
        UserSteps(type("Logging", (Step,), {"log": own})(), "forward")


class Twice(Step):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self(batch[0]) - self(batch[0])).sum()


class Mean(Step):
    """Logs a tensor of several elements, where a number is asked for."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self(batch[0])
        self.log("outputs", outputs)
        return outputs.mean()


class NoLoss(Step):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


@pytest.mark.parametrize(
    "module, sentence",
    [
        (Twice, "calls self.forward() a second time"),
        (Mean, "logs 'outputs', a Tensor"),
        (NoLoss, "returns a loss of shape (4, 4), and a loss is one number"),
    ],
)
def test_steps_that_cannot_run_on_a_pipeline(module: type, sentence: str) -> None:
    steps, micro = UserSteps(module(), "forward"), micro_batch([torch.zeros(4, 8), torch.zeros(4, 4)])
    with pytest.raises(ValueError, match=re.escape(sentence)):
        steps.loss(torch.zeros(4, 4), micro)


def test_calls_one_after_the_other_are_sent_where_the_whole_model_is() -> None:
    """Greedy decoding cannot join its inputs, and the refusal outside of a step sent it into one."""

    class Decodes(Step):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self(self(batch[0]))

    steps = UserSteps(Decodes(), "forward")
    micro = micro_batch([torch.zeros(4, 8), torch.zeros(4, 4)], step="validation_step")
    with pytest.raises(ValueError, match=r"calls self\.forward\(\) a second time") as refused:
        steps.loss(torch.zeros(4, 8), micro)
    for said in (str(refused.value), OUTSIDE_A_STEP):
        assert "from what the one before gave, as in decoding word by word: call it when fit has returned" in said
        assert "or load the whole model from a file of trainer.save_checkpoint(path, weights_only=True)" in said
    assert "in one call" in OUTSIDE_A_STEP


@pytest.mark.parametrize(
    "size, sizes, others, sentence",
    [
        (
            8,
            [2, 2, 2, 2],
            [3, 3, 2],
            "a batch of 8 can be run in micro-batches of 2 samples, and not where one of them has 3 samples",
        ),
        (
            8,
            [1] * 8,
            [2] * 4,
            "a batch of 8 can be run in micro-batches of 1 sample, and not where one of them has 2 samples",
        ),
        (16, [4] * 4, [3, 4, 4, 5], "of 4 samples, and not where one of them has 3 or 5 samples"),
    ],
)
def test_sizes_that_can_and_that_cannot_be_run_are_told_apart(
    size: int, sizes: list[int], others: list[int], sentence: str
) -> None:
    """Micro-batches of 2 samples were said to be run, and those of 2 or 3 samples not to be."""
    assert cut_in_words(size, sizes, others).endswith(sentence)


def test_random_numbers_of_a_step_are_its_own() -> None:
    class Draws(Step):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self(batch[0] + torch.rand(4, 1)).mean()

    steps = UserSteps(Draws(), "forward")
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = steps.inputs(micro_batch([torch.zeros(4, 8)], seed=3))
    assert torch.equal(first, steps.inputs(micro_batch([torch.zeros(4, 8)], seed=3)))
    assert not torch.equal(first, steps.inputs(micro_batch([torch.zeros(4, 8)], seed=4)))
    assert torch.equal(torch.rand(1), expected)


def test_generators_of_a_program_give_a_batch_what_they_give_one_step() -> None:
    """A trial left them where it had drawn to, and each micro-batch drew others than the batch."""

    class Draws(Step):
        def __init__(self) -> None:
            super().__init__()
            self.tools, self.place = {"draw": random.Random(1).random}, 0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            before = self.tools["draw"]()
            return self(batch[0] + before).mean() + self.tools["draw"]() + OF_THE_FILE.random()

    steps, twin, of_the_file = UserSteps(Draws(), "forward"), random.Random(1), numpy.random.default_rng(2)
    for seed in (1, 2):
        pieces = [
            micro_batch([torch.zeros(2, 8)], seed=10 * seed + place, batch_seed=seed, place=place)
            for place in range(2)
        ]
        before, after = twin.random(), twin.random() + of_the_file.random()
        with steps.rehearsal():
            steps.loss(torch.zeros(2, 4), pieces[0])
        steps.draws.begin()
        for piece in pieces:
            assert float(steps.inputs(piece)[0, 0]) == pytest.approx(before)
        for piece in pieces:
            assert float(steps.loss(torch.zeros(2, 4), piece)) == pytest.approx(after)
        left = steps.draws.left()
        assert list(left) == ["self.tools['draw']", "OF_THE_FILE"]
        steps.draws.put(left)
    steps.draws.begin(num_batches=2)
    with pytest.raises(ValueError, match=r"draws from self\.tools.* before and after its call of forward"):
        steps.loss(torch.zeros(2, 4), micro_batch([torch.zeros(2, 8)]))


OF_THE_FILE = numpy.random.default_rng(2)


def logged(value: float, size: int, **arguments: Any) -> MicroBatch:
    call = {"name": "metric", "value": torch.tensor(value), **arguments}
    return micro_batch(torch.zeros(size), loss=torch.tensor(value), log_calls=[call])


def test_means_are_weighted_by_samples() -> None:
    result = result_of([logged(1.0, 3), logged(5.0, 1)])
    assert result.loss == 2.0
    assert result.log_calls == [{"name": "metric", "value": 2.0}], "the host finds the weight of the batch"


def test_a_given_batch_size_is_the_weight() -> None:
    [call] = result_of([logged(1.0, 3, batch_size=1), logged(5.0, 1, batch_size=3)]).log_calls
    assert call["value"] == 4.0 and call["batch_size"] == 4


@pytest.mark.parametrize(
    "reduce_fx, value", [("sum", 6.0), (torch.sum, 6.0), ("min", 1.0), (torch.max, 5.0), (max, 5.0)]
)
def test_other_reductions_are_applied(reduce_fx: Any, value: float) -> None:
    [call] = result_of([logged(1.0, 3, reduce_fx=reduce_fx), logged(5.0, 1, reduce_fx=reduce_fx)]).log_calls
    assert call["value"] == value


def test_a_key_that_is_logged_twice_stays_two_calls() -> None:
    first, second = logged(1.0, 1), logged(3.0, 1)
    for micro in (first, second):
        micro.log_calls.append({"name": "metric", "value": 10.0})
    assert [call["value"] for call in result_of([first, second]).log_calls] == [2.0, 10.0]


class OnDevice(torch.Tensor):
    """Has the values of a tensor of the CPU, and the name of another device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def test_logs_of_several_devices_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of the CPU among what a step logs from a GPU ended in torch's words about two devices."""
    stack = torch.stack

    def stack_of_one_device(tensors: list[torch.Tensor]) -> torch.Tensor:
        assert len({tensor.device for tensor in tensors}) == 1
        return stack(tensors)

    def both(value: float) -> MicroBatch:
        step, size = logged(value, 1), {"name": "size", "value": torch.tensor(value + 1)}
        step.log_calls[0]["value"] = torch.tensor(value).as_subclass(OnDevice)
        step.log_calls.append({**step.log_calls[0], **size})
        return step

    monkeypatch.setattr(torch, "stack", stack_of_one_device)
    assert [call["value"] for call in result_of([both(1.0), both(3.0)]).log_calls] == [2.0, 3.0]


def test_no_loss_and_no_logs() -> None:
    assert result_of([micro_batch(torch.zeros(2))]) == (None, [], None)


def test_given_options_win_over_the_configuration() -> None:
    given = {"memory": "1GB", "plan": None}
    configured = {
        "pipeline": {"madpipe": {"memory": "2GB", "warmup_steps": 3}, "activation_checkpoint_interval": 1}
    }
    config, options, counts_steps = checked_settings(configured, given, zero_stage=1)
    assert options == Options(memory="1GB", warmup_steps=3) and counts_steps  # type: ignore[arg-type]
    assert config["pipeline"] == {"activation_checkpoint_interval": 1}
    assert config["zero_optimization"]["stage"] == 1
    assert configured["pipeline"]["madpipe"]["memory"] == "2GB"


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"memori": "1GB"}, ["memori", "memory", "num_stages", "save_plan"]),
        ({"memory": "-1"}, ["memory"]),
        (
            {"config": {"pipeline": {"madpipe": {"shard_weights": True}}}},
            ["shard_weights", "a Trainer reads all of them", "train under DeepSpeed"],
        ),
        ({"weight_versions": "2bw", "loss": "batch"}, ["loss='batch'", "weight_versions '2bw' never does"]),
        ({"num_micro_batches": 0}, ["num_micro_batches", "at least 1"]),
        ({"num_stages": True}, ["num_stages", "True"]),
        ({"stage": 2}, ["stage is 2", "0 or 1"]),
        ({"config": {"pipeline": {"madpipe": {"memry": 1}}}}, ["memry", "memory"]),
        ({"config": {"zero_optimization": {"stage": 3}}}, ["ZeRO stage 3"]),
        ({"config": {"optimizer": {"type": "Adam"}}}, ["configure_optimizers"]),
        ({"config": {"gradient_accumulation_steps": 4}}, ["num_micro_batches"]),
        ({"config": {"train_batch_size": 4}}, ["train_batch_size", "batch_size"]),
        ({"config": {"pipeline": "madpipe"}}, ["pipeline", "no object"]),
        ({"config": {"pipeline": {"madpipe": 3}}}, ["madpipe", "no object"]),
        ({"config": {"zero_optimization": 1}}, ["zero_optimization", "no object"]),
        ({"config": 3}, ["config is 3"]),
        ({"config": __file__}, [__file__, "cannot be read"]),
        ({"warmup_epochs": 2, "warmup_steps": 20}, ["give one of them"]),
        ({"warmup_epochs": None}, ["warmup_epochs is None"]),
        ({"warmup_epochs": -1}, ["warmup_epochs", "at least 0"]),
        (
            {"warmup_epochs": 2, "config": {"pipeline": {"madpipe": {"warmup_steps": 3}}}},
            ["warmup_epochs is 2 and warmup_steps is 3"],
        ),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        lightning_madpipe.MadPipeStrategy(**arguments)
    assert all(word in str(refusal.value) for word in words)


@pytest.mark.parametrize(
    "span, differences, reason",
    [
        ("epochs", {}, None),
        ("epochs", {"current_epoch": 1}, "the run goes on after 1 epoch"),
        ("steps", {"global_step": 12}, "the run goes on after 12 steps"),
        ("epochs", {"fast_dev_run": 2, "max_epochs": 1, "max_steps": 2}, "fast_dev_run"),
        ("epochs", {"overfit_batches": 1, "num_training_batches": 1}, "overfit_batches"),
        ("epochs", {"max_epochs": 1}, "max_epochs is 1,"),
        ("epochs", {"max_epochs": -1}, None),
        ("epochs", {"max_epochs": -1, "max_steps": 4}, "max_steps is 4,"),
        ("epochs", {"max_epochs": -1, "max_steps": 5}, None),
        ("epochs", {"num_training_batches": math.inf}, None),
        ("epochs", {"num_training_batches": math.inf, "max_steps": 1}, None),
        ("epochs", {"num_training_batches": math.inf, "max_epochs": 1}, "max_epochs is 1,"),
        ("epochs", {"num_training_batches": math.inf, "max_epochs": -1, "max_steps": 99}, "when an epoch ends"),
        ("steps", {}, "the run has 12 steps,"),
        ("steps", {"max_epochs": 4}, None),
        ("steps", {"max_epochs": -1}, None),
        ("steps", {"max_epochs": 4, "max_steps": 12}, "max_steps is 12,"),
        ("steps", {"num_training_batches": math.inf, "max_epochs": 1}, None),
    ],
)
def test_a_warm_up_is_left_out_where_nothing_is_trained_after_it(
    span: str, differences: dict[str, Any], reason: str | None
) -> None:
    """Ten batches per epoch in windows of three, so four steps; a warm-up of one epoch, or of twelve steps."""
    usual = {
        "current_epoch": 0, "global_step": 0, "fast_dev_run": False, "overfit_batches": 0, "max_epochs": 3,
        "max_steps": -1, "num_training_batches": 10, "accumulate_grad_batches": 3,
    }  # fmt: skip
    trainer = SimpleNamespace(**{**usual, **differences})
    found = why_left_out(trainer, *((1, 0) if span == "epochs" else (0, 12)))
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    "arguments, epochs, steps",
    [
        ({}, 1, 0),
        ({"warmup_epochs": 0}, 0, 0),
        ({"warmup_epochs": 3, "warmup_steps": 0}, 3, 0),
        ({"warmup_steps": 20}, 0, 20),
        ({"warmup_steps": 0}, 0, 0),
        ({"config": {"pipeline": {"madpipe": {"warmup_steps": 7}}}}, 0, 7),
    ],
)
def test_steps_take_the_place_of_the_epoch(arguments: dict[str, Any], epochs: int, steps: int) -> None:
    strategy = lightning_madpipe.MadPipeStrategy(**arguments)
    assert strategy.warmup_epochs == epochs
    assert strategy.options.warmup_steps == steps
    assert inspect.signature(lightning_madpipe.MadPipeStrategy).parameters["warmup_epochs"].default == 1


def test_the_strategy_is_registered_by_name() -> None:
    from pytorch_lightning.strategies import DeepSpeedStrategy, StrategyRegistry

    strategy = StrategyRegistry.get("madpipe")
    assert type(strategy) is lightning_madpipe.strategy_class("pytorch_lightning")
    assert isinstance(strategy, DeepSpeedStrategy)
    with pytest.raises(ValueError, match="namespace"):
        lightning_madpipe.strategy_class("pytorch_thunder")


def test_views_of_weights_outside_of_layers_are_told():
    """A step computed with the values from before training, in silence."""
    module = SequentialClassifier()
    layers = list(module.net)
    weight = module.net[0].weight
    module.shape, module.own, module.same = weight.shape, weight.detach().clone(), weight
    module.net[0].row, layers[-1].weights = weight[0], [layers[-1].weight.detach()]  # which move with their layers
    assert told_views(module, layers) is None
    module.rows = {"first": weight.detach()[1:]}
    told = told_views(module, layers)
    assert told is not None
    assert told.startswith("self.rows['first'] lies in the memory of weights (net.0.weight), ")
    module.register_buffer("mean", layers[-1].weight.detach())
    told = told_views(module, layers)
    assert told is not None and "self.rows['first']" in told and "self.mean" in told and " lie in " in told


def test_views_of_a_parameter_beside_modules_are_told():
    """What a layer that was found has of the module itself, such as a class token, has no module of its own."""
    module = SequentialClassifier()
    module.token = nn.Parameter(torch.zeros(3))
    module.seen = module.token.detach()
    layer = nn.Module()
    layer.token = module.token
    told = told_views(module, [*module.net, layer])
    assert told is not None and told.startswith("self.seen lies in the memory of weights (token), ")


def test_a_view_made_without_gradients_is_described_when_its_weight_has_been_written():
    """Where a fit ended, torch was asked whether it is a leaf, and raised."""
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.register_buffer("first", layer.weight[:2])
    torch.optim.SGD(layer.parameters(), 0.1).step()
    with torch.no_grad():
        layer.weight.mul_(2)
    info = TensorInfo.of("first", layer.first)
    assert info == ("first", (2, 3), torch.float32, False)
    info.mark(layer.first)


def test_schedulers_see_the_groups_that_were_dropped() -> None:
    """LambdaLR of two groups on a rank that has parameters in the second one only."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [], "lr": 1.0}, {"params": [weight], "lr": 2.0}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 0.1**step])
    groups = list(optimizer.param_groups)
    optimizer.param_groups[:] = groups[1:]
    every_group = EveryGroup(optimizer, groups)
    every_group.show_to(scheduler)
    optimizer.load_state_dict(optimizer.state_dict())  # which makes new groups
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    assert [group["lr"] for group in every_group.param_groups] == pytest.approx([0.5, 0.2])
    assert isinstance(every_group, torch.optim.SGD) and optimizer == every_group


def test_a_metric_that_keeps_a_graph_is_copied_without_it() -> None:
    """``clone()`` of it raises: torch copies no tensor that was computed with gradients."""
    metric = torchmetrics.MeanSquaredError()
    metric(torch.ones(3, requires_grad=True) * 2, torch.zeros(3))
    assert metric._forward_cache.grad_fn is not None
    with pytest.raises(RuntimeError, match="deepcopy"):
        metric.clone()
    own = copied(metric)
    assert float(own.compute()) == 4.0 and own._forward_cache.grad_fn is None


NO_NUMBER = "no number, as of a micro-batch in which nothing counts"


@pytest.mark.parametrize(
    "error, words",
    [
        (0.0295, "2.95% off"),
        (None, NO_NUMBER),
        (1e-6, "the same, and its gradient is another one"),
        (math.nan, NO_NUMBER),
        (math.inf, NO_NUMBER),
    ],
)
def test_how_far_a_mean_is_off_is_a_number_or_none(error: float | None, words: str) -> None:
    """It was once ``nan% off``, and ``0.00% off`` where the gradient alone differs."""
    assert error_in_words(error) == words


def test_a_batch_that_is_an_object_is_told_what_to_return() -> None:
    """The dict that was offered before has edges, which are no rows per graph, and was refused in its turn."""

    class Graphs:
        x = torch.zeros(5, 3)

    with pytest.raises(UncutBatchError, match=r"a Graphs, holds no tensor .* adjacency \(graphs, nodes, nodes\)"):
        batch_size_of(Graphs())
    with pytest.raises(UncutBatchError, match=r"cut into micro-batches; or MadPipeStrategy"):
        batch_size_of({"size": 3})


def test_a_number_that_grows_with_a_small_batch_is_no_number_of_weights() -> None:
    """`scale * len(x)` is alike in micro-batches of one size: half of what it is for the batch."""
    scale = torch.tensor(0.5)
    assert dims_by_whole((torch.zeros(2, 3), scale), (torch.zeros(1, 3), scale)) == (0, None)
    with pytest.raises(ValueError, match=r"output 1 .* differs between a batch and its micro-batches .*expand"):
        dims_by_whole((torch.zeros(2, 3), 2 * scale), (torch.zeros(1, 3), scale))


def test_a_head_that_takes_labels_is_told_the_way_that_trains() -> None:
    """The way out of a margin softmax beside self() was one that its program did not see how to take."""
    sentence = loss_depends_on_weights("training_step", "self()", "head.weight")
    assert "a head that takes labels (with self(x, y) in the step)" in sentence
    assert "call there a module that has weights, such as a projector" in sentence


class Graph:
    """As torch_geometric has it: tensors in a mapping of an object within, which knows the one around it."""

    def __init__(self) -> None:
        self.store = SimpleNamespace(mapping={"x": torch.zeros(5, 3), "edge_index": torch.zeros(2, 7).long()})
        self.store.around = self


def test_objects_that_go_by_samples_are_not_given_whole():
    """Each micro-batch would get all graphs beside its own labels. What has no row per sample goes to each."""
    settings_of_all = SimpleNamespace(scale=torch.ones(3), name="settings")
    labels = torch.arange(4)
    first, second = split_batch({"settings": settings_of_all, "labels": labels}, 2)
    assert first["settings"] is second["settings"] is settings_of_all and second["labels"].tolist() == [2, 3]
    graph = SimpleNamespace(nodes=SimpleNamespace(x=torch.zeros(9, 2)), targets=[torch.zeros(4)])
    with pytest.raises(
        ValueError, match=r"batch\['graph'\] is a SimpleNamespace .* number of samples, 4, and objects"
    ):
        split_batch({"graph": graph, "labels": labels}, 2)
    assert len(split_batch({"graph": graph, "labels": labels[:1]}, 2)) == 1


def test_a_batch_that_is_not_cut_passes_whole_whatever_it_is() -> None:
    """Graphs were refused with one micro-batch, too, for nothing counted their samples."""
    batch = {"x": torch.zeros(5, 3), "edge_index": torch.zeros(2, 7), "graph": Graph()}
    assert split_batch(batch, 1) == [batch] and split_batch(batch["graph"], 1) == [batch["graph"]]
    assert size_of(batch, 1) == 5 and size_of(torch.tensor(1.0), 1) == 1
    assert size_of(torch.eye(3).to_sparse(), 1) == 3
    with pytest.raises(ValueError, match="no samples"):
        split_batch(torch.zeros(0, 3), 1)
    with pytest.raises(UncutBatchError, match="num_micro_batches=1"):
        split_batch(batch, 2)


def test_tensors_of_an_object_are_compared_between_ranks_and_copied_for_a_step() -> None:
    graph = Graph()
    assert shapes_of({"graph": graph}) == ((5, 3), (2, 7))
    before = fingerprint_of(graph)
    assert len(before) == 2 == len(list(named_tensors_of(graph)))
    copied = copy_of_batch({"graph": graph})["graph"]
    copied.store.mapping["x"] += 1
    assert fingerprint_of(graph) == before != fingerprint_of(copied)


@pytest.mark.parametrize("given, rule", [("max", "max"), (torch.mean, "mean"), (min, "min"), ("SUM", "sum")])
def test_logs_are_merged_as_they_are_named(given: Any, rule: str) -> None:
    assert rule_of({"reduce_fx": given}) == rule


def test_facts_tell_what_has_changed() -> None:
    """In attributes of objects, too; what is equal is no change."""
    value = SimpleNamespace(scale=1.0, sizes=[1, 2], mask=torch.ones(2), names={"a", "b"}, other=object())
    before = facts_of(value)
    value.sizes = [1, 2]
    assert facts_of(value) == before
    for change in (
        lambda: value.mask.mul_(2),
        lambda: value.sizes.append(3),
        lambda: setattr(value, "scale", math.nan),
        lambda: value.names.add("c"),
        lambda: setattr(value, "other", object()),
    ):
        before = facts_of(value)
        change()
        assert facts_of(value) != before and facts_of(value) == facts_of(value)


def test_what_changes_in_each_step_is_compared_in_each_epoch() -> None:
    module, said, epoch = nn.Module(), list[str](), 0
    module.number = 0
    watch = ForwardWatch(module, lambda: epoch, said.append)
    watch.begin([Read("", "number")])
    num_times = []
    for epoch in range(2):
        for _ in range(10):
            module.number += 1
            if watch.changed():
                num_times.append(epoch)
                watch.begin([])
    assert num_times == [0] * MOST_TIMES + [1] * MOST_TIMES
    assert "reads self.number, which changes from step to step" in said[0]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"])
def test_half_precision_says_how_it_differs_from_one_process(precision: str) -> None:
    """Nothing was said of ``bf16-true``, in which one process loses small updates."""
    plugin = SimpleNamespace(precision=precision)
    strategy = SimpleNamespace(precision_plugin=plugin)
    trainer = SimpleNamespace(
        strategy=strategy, callbacks=[], loggers=[], accumulate_grad_batches=1, checkpoint_callbacks=[]
    )
    said = [note for note in notes_on(trainer, Classifier(), []) if "precision" in note]
    assert len(said) == (precision != "32-true")
    if precision.endswith("-true") and said:
        assert said[0].startswith(f"precision={precision!r} is DeepSpeed's")
        assert "loses them by rounding" in said[0]


def test_hooks_between_batches_of_a_window_are_told() -> None:
    """They saw other gradients, or changed what all batches of a window see, and nothing was said."""

    class Clipping(Classifier):
        def on_after_backward(self) -> None:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    class Decaying(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            module.factor = 0.9**batch_idx

    def notes(module: Any, *callbacks: pl.Callback, number: int = 3) -> list[str]:
        keeps = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=keeps,
            callbacks=list(callbacks), accumulate_grad_batches=number,
        )  # fmt: skip
        return list(
            notes_on(trainer, module, [pl.LightningModule.on_before_backward, pl.Callback.on_before_backward])
        )

    class Mixing(pl.LightningModule):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.draw()
            return batch

        def draw(self) -> None:
            self.share = 0.5

    class Casting(pl.LightningModule):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            image, label = batch
            return image.float(), label

    class Data(pl.LightningDataModule):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            self.trainer.model.share = 0.5
            return batch

    [mixing] = notes(Mixing())
    assert "what on_after_batch_transfer of Mixing change between two of them" in mixing
    assert notes(Casting()) == notes(Mixing(), number=1) == []
    given = property(lambda _: Data(), lambda *_: None)
    with unittest.mock.patch.object(pl.Trainer, "datamodule", given, create=True):
        assert "what transfer_batch_to_device of Data change" in notes(Casting())[0]

    class Early(pl.Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            pass

    [early] = notes(pl.LightningModule(), Early(), number=1)
    assert early.startswith("on_before_zero_grad of Early is called before the batches of a step run")
    after, between = notes(Clipping(), Decaying())
    assert "with accumulate_grad_batches=3, all batches of a window run at its end: on_after_backward of " in after
    assert "Clipping is called once there, with the gradients of all of them" in after
    assert "what on_train_batch_end of Decaying change between two of them" in between
    assert "callback_metrics has what training_step logged in the window before" in between
    best = ModelCheckpoint(monitor="train_loss", every_n_train_steps=1)
    [kept] = notes(pl.LightningModule(), best)
    assert "ModelCheckpoint(monitor='train_loss') looks for its best value after each batch, and, before" in kept
    keeps_all = ModelCheckpoint(monitor="train_loss", every_n_train_steps=1, save_top_k=-1)
    by_epochs = ModelCheckpoint(monitor="train_loss")
    assert notes(pl.LightningModule(), keeps_all, by_epochs, ModelCheckpoint(every_n_train_steps=1)) == []

    with unittest.mock.patch.object(pl.Trainer, "enable_validation", True):
        assert len(notes(pl.LightningModule(), keeps_all)) == 1

    def within(*callbacks: pl.Callback) -> str | None:
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False,
            callbacks=list(callbacks), accumulate_grad_batches=3,
        )  # fmt: skip
        return note_on_validation_within_window(trainer, pl.LightningModule())

    stopping = EarlyStopping("train_loss")
    assert "EarlyStopping(monitor='train_loss') may read these" in (within(stopping) or "")
    assert within(LearningRateMonitor()) is None
    assert notes(pl.LightningModule(), LearningRateMonitor()) == notes(Clipping(), Decaying(), number=1) == []


def test_long_values_are_shown_where_they_begin_to_differ() -> None:
    """A configuration of diffusers, with a list made of a set, gave a line of 3,000 letters."""
    first, other = (f"[{'name, ' * 100}{letter}, {'end, ' * 100}]" for letter in "ab")
    assert where_unlike(first, other) == (
        "..., name, name, name, a, end, end, end, end, end, end, end, en...",
        "..., name, name, name, b, end, end, end, end, end, end, end, en...",
    )
    assert where_unlike("0.1", "1.1") == ("0.1", "1.1")
    assert where_unlike("missing", "x" * 70) == ("missing", f"{'x' * 60}...")


def test_values_of_ranks_are_compared_without_the_order_of_a_set() -> None:
    """A frozen set of texts, and each configuration of diffusers, was told to differ between ranks."""

    class Settings(dict):
        pass

    for kind in (set, frozenset):
        assert [*kind((0, 8))] != [*kind((8, 0))]  # equal hashes by the size of the table
        assert in_words({"a": kind((0, 8))}) == in_words({"a": kind((8, 0))}) != in_words({"a": kind((0, 7))})
    assert in_words([0, 8]) != in_words([8, 0])  # as an alphabet: each number stands for another letter
    first, other = (Settings(depth=2, _left_to_defaults=names) for names in (["a", "b"], ["b", "a"]))
    assert in_words(first) == in_words(other) != in_words(Settings(depth=3))
    assert in_words(dict(first)) != in_words(dict(other))  # where it may be the program's own key
    assert in_words({"a": object()}) is None


def test_parameters_of_two_layers_in_one_memory_are_refused():
    """They trained as two weights, in silence."""
    module = SequentialClassifier()
    net = module.net
    flat = nn.utils.parameters_to_vector(net.parameters()).detach()
    nn.utils.vector_to_parameters(flat, net.parameters())  # one memory, and no byte of two of them
    find_layers(module)
    first, second = net[2].linear, net[3].linear
    second.weight.data = first.weight.data
    with pytest.raises(ValueError, match=r"net\.2\.\S+ and net\.3\.\S+, .* two parameters in one memory"):
        find_layers(module)
    for weight in (first.weight, second.weight):
        weight.requires_grad_(False)  # as a table of positions that each block is given
    find_layers(module)
    assert "net.2." in frozen_in_one_memory[first.weight] and second.weight in frozen_in_one_memory
    net[2].extra = nn.Parameter(first.weight.data)  # one of three trains
    with pytest.raises(ValueError, match="two parameters in one memory"):
        find_layers(module)


def test_a_step_that_seeds_torch_is_told(monkeypatch: pytest.MonkeyPatch):
    """The order of the next epoch's data was another one, and nothing was said."""
    said: list[str] = []
    monkeypatch.setattr(step_runs, "warn_once", lambda _, sentence: said.append(sentence))
    micro_batch: Any = SimpleNamespace(step="training_step", batch_seed=3, seed=4, draws_alike=False)
    before = torch.initial_seed()
    with step_runs._seeded(micro_batch):
        torch.rand(3), random.random()
        with torch.random.fork_rng():
            torch.manual_seed(7)
    assert not said and torch.initial_seed() == before
    with step_runs._seeded(micro_batch):
        torch.manual_seed(7)
    assert said == [step_runs.SEEDS.format(step="training_step")] and torch.initial_seed() == before


@pytest.mark.parametrize("kind", ["torch", "numpy", "more than is looked through"])
@pytest.mark.parametrize("rows, is_told", [(4, False), (300_000, True)])
def test_data_that_reading_changes_are_put_back_or_told(
    rows: int, is_told: bool, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """An example of large data left its first samples changed, on rank 0 alone, and nothing was said."""

    class Halved(Dataset):
        def __init__(self) -> None:
            self.x: Any = torch.ones(rows, 4) if kind == "torch" else numpy.ones((rows, 4))

        def __len__(self) -> int:
            return rows

        def __getitem__(self, place: int) -> Any:
            row = self.x[place]
            row *= 0.5
            return row

    said: list[str] = []
    monkeypatch.setattr(example_batch, "warn_once", lambda _, sentence: said.append(sentence))
    if kind == "more than is looked through":
        monkeypatch.setattr(example_batch, "_MOST_BYTES_READ", 2**20)
    data = Halved()
    batch, _ = example_batch._first_of(DataLoader(data, 2, collate_fn=lambda rows: [row.sum() for row in rows]))
    assert batch == [2, 2]
    assert data.x[0].sum() == (1 if is_told else 4)
    assert said == [example_batch.CHANGED] * is_told


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_cache_that_reading_fills_is_not_told(kind: str, monkeypatch: pytest.MonkeyPatch):
    """What is read is kept in a large array: a line said that reading changes the data."""

    class Cached(Dataset):
        def __init__(self) -> None:
            self.cache: Any = torch.zeros(300_000, 4) if kind == "torch" else numpy.zeros((300_000, 4))
            self.known = [False] * 8

        def __len__(self) -> int:
            return 8

        def __getitem__(self, place: int) -> Any:
            if not self.known[place]:
                self.cache[place], self.known[place] = place, True
            return self.cache[place] + 0

    said: list[str] = []
    monkeypatch.setattr(example_batch, "warn_once", lambda _, sentence: said.append(sentence))
    data = Cached()
    example_batch._first_of(DataLoader(data, 4))
    assert not said and data.known == [False] * 8


def test_files_of_data_are_not_read_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each file of tokens was read twice, by each rank, before training began."""
    for number in range(3):
        numpy.full(300_000, number, dtype=numpy.int64).tofile(tmp_path / str(number))

    class Tokens(Dataset):
        def __init__(self, mode: Any) -> None:
            files = sorted(tmp_path.iterdir())
            self.shards = [numpy.memmap(file, numpy.int64, mode) for file in files]

        def __len__(self) -> int:
            return 8

        def __getitem__(self, place: int) -> Any:
            return self.shards[0][place : place + 4] + 0

    read: list[int] = []
    crc32 = example_batch.zlib.crc32
    monkeypatch.setattr(example_batch.zlib, "crc32", lambda values: read.append(len(values)) or crc32(values))
    example_batch._first_of(DataLoader(Tokens("r"), 4))
    assert read == []
    monkeypatch.setattr(example_batch, "_MOST_BYTES_READ", 3_000_000)
    example_batch._first_of(DataLoader(Tokens("r+"), 4))
    assert read == [2_400_000, 600_000, 0] * 2


def test_a_last_layer_that_returns_an_object_is_named():
    """With a validation it ended with an AttributeError: the object has no attribute 'requires_grad'."""
    run = BatchRun.__new__(BatchRun)
    run.begin()
    with pytest.raises(
        TypeError, match=r"the last layer returns SimpleNamespace, .* make the object of them in the step"
    ):
        run.collect((torch.ones(2), SimpleNamespace()))  # type: ignore[arg-type]


def test_an_error_while_ranks_are_launched_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was replaced by one of Lightning's: the module is not attached to a Trainer yet."""
    # A worker of these tests has none, and then nothing is launched.
    monkeypatch.setattr("sys.argv", [__file__])
    strategy = lightning_madpipe.MadPipeStrategy()
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)

    def launch(*_: Any, **__: Any) -> None:
        raise OSError("no process can be started")

    monkeypatch.setattr(type(strategy.launcher), "launch", launch)
    with pytest.raises(OSError, match="no process can be started"):
        trainer.fit(SequentialClassifier(), DataLoader(torch.zeros(4, 2)))
