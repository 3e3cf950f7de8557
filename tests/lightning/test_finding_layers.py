"""The example batch that layers are found with, and the loss that a model makes itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)

from deepspeed_partition.capture import CaptureError
from deepspeed_partition.capture.structure import flatten, written_names_of
from lightning_madpipe.finding.captured_call import CapturedCall, OtherCallError, _what_to_do
from lightning_madpipe.finding.captured_calls import CapturedCalls
from lightning_madpipe.finding.example_batch import NoExampleError, example_batch
from lightning_madpipe.finding.step_call import rest_of_arguments
from lightning_madpipe.module import refuse_other_calls
from lightning_madpipe.steps.deciding_layers import lines_that_decide


def trainer_with(loaders: Any, module: Any = None) -> Any:
    source = SimpleNamespace(instance=loaders, name="train_dataloader", dataloader=lambda: source.instance)
    selector = SimpleNamespace(get_instance=lambda _: module or pl.LightningModule())
    return SimpleNamespace(
        _data_connector=SimpleNamespace(_datahook_selector=selector),
        state=SimpleNamespace(fn=SimpleNamespace(value="fit")),
        fit_loop=SimpleNamespace(_data_source=source),
        precision_plugin=SimpleNamespace(convert_input=lambda batch: batch),
    )


MODULE: Any = SimpleNamespace(
    device=torch.device("cpu"),
    _on_before_batch_transfer=lambda batch, dataloader_idx: batch,
    _apply_batch_transfer_handler=lambda batch, device, dataloader_idx: batch,
)


class Squares(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return (number * number for number in range(5))


class OneWay(Squares):
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        return 1


def numbers(**settings: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(10)), **{"batch_size": 4, **settings})


def test_the_first_samples_are_read_without_a_draw() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = numbers(shuffle=True, generator=generator)
    own, common = generator.get_state(), torch.get_rng_state()
    [batch] = example_batch(trainer_with(loader), MODULE)
    assert batch.tolist() == [0, 1, 2, 3]
    assert torch.equal(own, generator.get_state()) and torch.equal(common, torch.get_rng_state())


@pytest.mark.parametrize(
    "loaders, expected",
    [
        (numbers(batch_size=None, sampler=range(4, 8)), [0]),
        (numbers(batch_size=1, sampler=None, batch_sampler=None), [0]),
        (DataLoader(TensorDataset(torch.arange(9)), batch_sampler=[[5, 7], [1]]), [5, 7]),
        (DataLoader(Squares(), batch_size=3), [0, 1, 4]),
        ([[torch.tensor([6])], [torch.tensor([7])]], None),
    ],
)
def test_every_kind_of_loader_has_a_first_batch(loaders: Any, expected: Any) -> None:
    batch = example_batch(trainer_with(loaders), MODULE)
    tensors = batch if isinstance(batch, list | tuple) else [batch]
    assert expected is None or tensors[0].reshape(-1).tolist() == expected


def test_several_loaders_give_a_batch_each() -> None:
    batch = example_batch(trainer_with({"one": numbers(), "two": numbers(batch_size=2)}), MODULE)
    assert [each[0].tolist() for each in (batch["one"], batch["two"])] == [[0, 1, 2, 3], [0, 1]]


def test_a_stream_gets_its_first_batch_back() -> None:
    trainer = trainer_with(iter([1, 2, 3]))
    assert example_batch(trainer, MODULE) == 1
    assert list(trainer.fit_loop._data_source.instance) == [1, 2, 3]


def test_a_data_set_that_can_be_read_once_is_refused() -> None:
    with pytest.raises(ValueError, match="can be read once"):
        example_batch(trainer_with(DataLoader(OneWay(), batch_size=2)), MODULE)


class AsksForWorker(Dataset[torch.Tensor]):
    """Shards opened by each worker, and keys that a sampler gives."""

    def __getitem__(self, key: Any) -> torch.Tensor:
        return torch.tensor([{"a": 1.0, "b": 2.0}[key], float(get_worker_info().seed >= 0)])


def test_data_that_need_workers_and_a_sampler_are_read_with_them() -> None:
    """A TypeError or a KeyError of the data left the run."""
    generator = torch.Generator().manual_seed(3)
    sampler = RandomSampler(["b", "a"], generator=generator)
    keys = BatchSampler([["b", "a"][number] for number in sampler], 2, drop_last=False)
    loader = DataLoader(
        AsksForWorker(), batch_sampler=keys, num_workers=1, persistent_workers=True, generator=generator
    )
    own, common = generator.get_state(), torch.get_rng_state()
    batch = example_batch(trainer_with(loader), MODULE)
    assert sorted(batch[:, 0].tolist()) == [1, 2] and loader._iterator is None
    assert torch.equal(own, generator.get_state()) and torch.equal(common, torch.get_rng_state())


def test_what_reading_an_example_raises_is_told_with_its_line() -> None:
    def fails(rows: Any) -> Any:
        return rows[0]["absent"]

    loader = DataLoader(range(4), collate_fn=fails)  # type: ignore[arg-type]
    with pytest.raises(NoExampleError, match=r"the hooks of fit have run, .* raises TypeError: .*test_finding"):
        example_batch(trainer_with(loader), MODULE)
    loader = DataLoader(range(4), collate_fn=fails, num_workers=1)  # type: ignore[arg-type]
    with pytest.raises(NoExampleError, match=r"raises TypeError: 'int' object is not subscriptable in a worker"):
        example_batch(trainer_with(loader), MODULE)


class Augments(pl.LightningModule):
    """Draws, counts and keeps in the hook that a batch goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.count, self.seen = torch.Generator().manual_seed(3), 0, []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.count += 1
        self.seen.append(self.count)
        return batch[0] + torch.randint(10, (), generator=self.generator)


def test_hooks_that_a_batch_goes_through_draw_no_more_than_in_one_process() -> None:
    """Their generators and counters moved on by a batch where the Trainer was given the loader itself."""
    module = Augments()
    before = module.generator.get_state()
    example_batch(trainer_with(numbers(), module), module)
    assert module.count == 0 and module.seen == [] and torch.equal(module.generator.get_state(), before)


class WithLoss(nn.Module):
    """Returns a loss of as many labels as there are, logits, and what its labels alone give."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, *, labels: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale
        kept = labels != -100
        return {"loss": F.cross_entropy(x[:, :5].flatten(0, -2), labels), "logits": x, "kept": kept}


def found() -> tuple[WithLoss, CapturedCall, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, inputs = WithLoss(), {"x": torch.randn(4, 6), "labels": torch.tensor([1, -100, 0, -100])}
    return model, CapturedCall(model, "self.model()", (inputs["x"],), {"labels": inputs["labels"]}), inputs


def outputs_of(call: CapturedCall, x: torch.Tensor, labels: torch.Tensor) -> Any:
    passed: Any = call.inputs((), {"labels": labels, "x": x})
    for layer in call.layers:
        passed = layer(passed)
    return passed


def test_a_loss_of_the_model_is_that_of_the_batch() -> None:
    """Micro-batches of two samples have one label each in the first pair, and none would weigh as much."""
    model, call, inputs = found()
    pieces = [outputs_of(call, inputs["x"][i : i + 2], inputs["labels"][i : i + 2]) for i in (0, 2)]
    joined = torch.cat(pieces)
    returned = call.returned(joined, (inputs["x"],), {"labels": inputs["labels"]})
    expected = model(**inputs)
    assert returned.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(returned[name], value)
    returned["loss"].backward()
    own = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    expected["loss"].backward()
    for gradient, weight in zip(own, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, weight.grad)


@pytest.mark.parametrize(
    "changed, sentence",
    [
        ({"scale": 0.5}, "scale=0.5, and its layers were found for scale=None"),
        ({"labels": None}, "labels=None"),
        ({"x": torch.zeros(2, 3, 6)}, "<floating tensor of 3 dimensions>"),
    ],
)
def test_another_call_is_refused(changed: dict[str, Any], sentence: str) -> None:
    _, call, inputs = found()
    with pytest.raises(OtherCallError, match=sentence):
        call.inputs((), {**inputs, **changed})


def test_a_cache_for_generation_is_left_out_and_said() -> None:
    model = WithLoss()
    model.config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    call = CapturedCall(model, "self.model()", (torch.randn(4, 6),), {"labels": torch.zeros(4, dtype=torch.long)})
    assert call.notes == ["WithLoss runs with use_cache=False: a pipeline has no cache of keys and values"]
    assert model.config.use_cache


def test_parts_that_change_their_mode_are_captured_again() -> None:
    """Dropout is no module here: the layer that is captured has what the code did in the mode of its part."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(F.dropout(self.first(x), 0.5, self.training))

    model = nn.Sequential(Part(), Part())
    model[0].eval()
    call = CapturedCall(model, "self.model()", (torch.randn(4, 6),), {})

    def run() -> torch.Tensor:
        torch.manual_seed(1)
        call.follow_modes()
        passed = torch.ones(4, 6)
        for layer in call.layers:
            passed = layer(passed)
        return passed

    for training in (False, True):
        model[0].train(training)
        found = run()
        torch.manual_seed(1)
        torch.testing.assert_close(found, model(torch.ones(4, 6)))


@pytest.mark.parametrize(
    "called, args, kwargs",
    [
        ("", ("x",), {"labels": "labels", "scale": 0.5}),
        ("layers.0", ("x",), {}),
        ("layers.3", ("x",), {}),
    ],
)
def test_layers_run_another_call_of_their_modules(called: str, args: Any, kwargs: Any) -> None:
    """A validation that calls the model otherwise than the training was refused."""
    model, first, inputs = found()
    for part in (model, *first.layers):
        part.eval()
    longer = {name: torch.cat([value, value]) for name, value in inputs.items()}

    def of(tensors: Any) -> Any:
        return [tensors[name] for name in args], {key: tensors.get(name, name) for key, name in kwargs.items()}

    part = model.get_submodule(called)
    other = CapturedCall(part, "self.part()", *of(inputs), first)
    first.know("training_step", first)
    first.know("validation_step", other)
    for step, call, given, run in (
        ("validation_step", other, of(longer), part),
        ("training_step", first, ([], inputs), model),
    ):
        assert first.follow(step) and first.now is call
        passed: Any = call.inputs(*given)
        for layer in first.layers:
            passed = layer(passed)
        returned, expected = call.returned(passed, *given), run(*given[0], **given[1])
        for one, wanted in zip(flatten(returned)[0], flatten(expected)[0], strict=True):
            torch.testing.assert_close(one, wanted)
    assert not first.follow("test_step")


def test_modules_in_another_order_are_refused() -> None:
    model, first, inputs = found()
    turned = nn.Sequential(model.layers[2], model.layers[0])
    with pytest.raises(CaptureError, match="another order"):
        CapturedCall(turned, "self.turned()", (inputs["x"],), {}, first)


class Autoencoder(pl.LightningModule):
    """Its step makes distributions between the calls of its modules."""

    def __init__(self, *, asks: bool = False) -> None:
        super().__init__()
        self.asks = asks
        self.encoder, self.mean, self.spread = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.decoder = nn.Linear(4, 8)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        code = self.encoder(batch)
        mean, spread = self.mean(code), self.spread(code).exp()
        prior, found = Normal(torch.zeros_like(mean), torch.ones_like(mean)), Normal(mean, spread)
        if self.asks and spread.max() > 1e9:
            raise ValueError("it does not converge")
        decoded = self.decoder(mean + spread * mean.sin())
        return F.mse_loss(decoded, batch) + kl_divergence(found, prior).mean()


def test_distributions_between_the_calls_of_a_step_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variational autoencoder was refused: they ask whether what they are made of is in their range."""
    # Another test may have left it otherwise.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    module, batch = Autoencoder(), torch.randn(4, 8)
    call = CapturedCalls(module, "training_step", batch, ["encoder", "mean", "spread", "decoder"])
    assert call.made == ("encoder", "mean", "spread", "decoder") and Normal._validate_args
    passed: Any = (batch,)
    for layer in call.layers:
        passed = layer(passed)
    found, expected = (flatten(each)[0] for each in (call.returned(passed, (batch,), {}), call.run([batch])))
    tensors = [(one, other) for one, other in zip(found, expected, strict=True) if isinstance(one, torch.Tensor)]
    assert len(tensors) == 8
    for one, other in tensors:
        torch.testing.assert_close(one, other)
    assert not call.why_fewer()


def test_a_step_that_asks_for_data_between_its_calls_is_named() -> None:
    """It was said to return 8 tensors, and the list 6; then to raise an error whose name nobody knows."""
    module, batch = Autoencoder(asks=True), torch.randn(4, 8)
    call = CapturedCalls(module, "training_step", batch, ["encoder", "mean", "spread", "decoder"])
    call.run([batch])
    words = (
        "training_step makes 4 calls, of which 3 are found: behind these training_step asks whether a tensor is "
        "true at test_finding_layers.py:"
    )
    assert call.why_fewer().startswith(words)


def test_a_step_that_asks_for_data_before_its_calls_is_named() -> None:
    """A step that acts in an environment of tensors was said to call nothing that depends on its arguments."""

    class Acts(Autoencoder):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            torch.arange(3.0).numpy()
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match=r"^training_step raises at test_finding_layers.py:\d+ where .* Runtime"):
        CapturedCalls(Acts(), "training_step", torch.randn(4, 8), ["encoder", "mean", "spread", "decoder"])


def test_sizes_that_a_step_asks_of_what_no_call_is_given_hinder_nothing() -> None:
    """A step that asked for the length of its labels, which it padded itself, ended in a KeyError."""

    class Pads(Autoencoder):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            code = self.encoder(batch)
            labels = pad_sequence([torch.as_tensor([0.0] * length) for length in (2, 3)], batch_first=True)
            if labels.shape[1] > 5:
                labels = labels[:, :5]
            return F.mse_loss(self.decoder(self.mean(code)), batch) + labels.sum()

    call = CapturedCalls(Pads(), "training_step", torch.randn(4, 8), ["encoder", "mean", "decoder"])
    assert call.made == ("encoder", "mean", "decoder")


def test_a_step_is_tried_with_its_own_defaults() -> None:
    """An argument of its own, behind those that Lightning gives, was 0."""

    class Weighted(Autoencoder):
        def training_step(self, batch: torch.Tensor, batch_idx: int = 5, weighted: bool = True) -> torch.Tensor:
            return self.decoder(self.mean(self.encoder(batch))).sum()

        def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int, last: int = 1) -> None:
            pass

        def test_step(self, batch: torch.Tensor) -> None:
            pass

    steps = ("training_step", "validation_step", "test_step")
    assert [rest_of_arguments(Weighted(), step) for step in steps] == [(0,), (0, 0), ()]


def test_sizes_that_found_layers_hand_on_are_no_decisions() -> None:
    """Their code was said to ask for numbers that depend on the samples, with a line of this package."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            length = x.shape[1]
            return self.second(torch.relu(self.first(x.mean(1)))) / length

    x = torch.randn(4, 5, 8)
    layers = CapturedCall(Scaled(), "self()", (x,), {}).layers
    passed: Any = (x,)
    for layer in layers[:-1]:
        passed = layer(passed)
    assert any(each.dtype is torch.int64 for each in passed)
    assert lines_that_decide(layers[-1], passed) == []


def test_a_call_that_is_refused_has_the_arguments_of_the_class() -> None:
    """A refusal of another call named the entry of a batch ``_.0.len.4``, after the arguments of what refuses."""
    model = nn.Sequential(nn.Linear(2, 2))
    before = inspect.signature(model.forward)
    allow = refuse_other_calls(model, "forward", ValueError)
    assert inspect.signature(model.forward) == before
    with pytest.raises(ValueError, match="outside a step"):
        model(torch.zeros(1, 2))
    allow()
    model(torch.zeros(1, 2))


def test_entries_of_arguments_are_named_as_code_writes_them() -> None:
    value = {"lengths": [3, (5,)], "x": slice(1, 2)}
    names = written_names_of(flatten(value)[1], "batch")
    assert names[:2] == ["batch['lengths'][0]", "batch['lengths'][1][0]"]
    assert names[2:] == ["batch['x'].start", "batch['x'].stop", "batch['x'].step"]


@pytest.mark.parametrize(
    "name, before, now, words",
    [
        ("x[0]", "one text", "another", ["Text of the samples is made into tensors before", "the head of a task"]),
        ("task", "tags", "words", ["the head of a task"]),
        ("x['count']", 1, 2, ["Let x be a tensor"]),
    ],
)
def test_what_changes_from_batch_to_batch_has_its_own_way_out(
    name: str, before: Any, now: Any, words: list[str]
) -> None:
    """A list of texts was told to run all heads and to choose by torch.where."""
    said = _what_to_do(name, before, now)
    assert all(each in said for each in words)
    assert ("Text of the samples" in said) == (name == "x[0]")
