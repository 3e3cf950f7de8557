"""Captured layers, run in order, do what the model does, and are the model's own modules."""

from __future__ import annotations

import copy
import inspect
import itertools
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from deepspeed_partition.capture import (  # noqa: E402
    CaptureError,
    ShapeError,
    capture,
    layers_as_they_are,
    layers_from,
    model_layers,
    partition,
)
from deepspeed_partition.capture.layout import layout_of  # noqa: E402
from deepspeed_partition.capture.model_layers import CapturedLayer, TiedLayer  # noqa: E402
from deepspeed_partition.capture.ordering import choose_order  # noqa: E402
from deepspeed_partition.capture.partition import flow_of  # noqa: E402
from deepspeed_partition.capture.planned_memory import PlannedMemory  # noqa: E402
from deepspeed_partition.generators import generators_of  # noqa: E402
from deepspeed_partition.planner.errors import InfeasibleError  # noqa: E402
from deepspeed_partition.planner.planning.make_plan import make_plan  # noqa: E402
from deepspeed_partition.planner.problem import Platform  # noqa: E402
from deepspeed_partition.profiling import profile_chain  # noqa: E402
from tests.capture import networks  # noqa: E402
from tests.capture.comparing import assert_same, captured_layers, run_in_order, tensors_in  # noqa: E402


def words(batch: int, length: int, count: int = 20) -> torch.Tensor:
    return torch.randint(0, count, (batch, length))


def causal(length: int) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length)


def one(*args: object, **kwargs: object) -> tuple[tuple[object, ...], dict[str, object]]:
    return args, kwargs


def encoder_decoder(batch: int, source: int, target: int) -> object:
    return one(torch.randn(batch, source, 16), torch.randn(batch, target, 16), tgt_mask=causal(target))


MODELS = {
    "skip": (networks.Skip, [one(torch.randn(5, 8)), one(torch.randn(1, 8))], 4),
    "u-net": (networks.UNet, [one(torch.randn(2, 3, 16, 16)), one(torch.randn(3, 3, 24, 16))], 8),
    "dense net": (networks.DenseNet, [one(torch.randn(2, 3, 8, 8)), one(torch.randn(3, 3, 6, 6))], 6),
    "encoder and decoder": (
        lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
        [encoder_decoder(2, 5, 4), encoder_decoder(3, 7, 6)],
        8,
    ),
    "lstm": (networks.RecurrentLanguageModel, [one(words(3, 7)), one(words(2, 5)), one(words(1, 1))], 3),
    "gpt": (networks.MinimalGPT, [one(words(3, 9), words(3, 9)), one(words(2, 5), words(2, 5))], 5),
    "checkpointed": (networks.Checkpointed, [one(torch.randn(3, 8, requires_grad=True))], 4),
    "in place": (networks.InPlace, [one(torch.randn(3, 8)), one(torch.randn(2, 8))], 2),
    "choosing": (networks.Choosing, [one(torch.randn(3, 8)), one(torch.randn(3, 8))], 3),
    "repeated": (networks.Repeated, [one(torch.randn(3, 8)), one(torch.randn(1, 8))], 8),
    "sizes": (networks.Sizes, [one(torch.randn(2, 3, 8, 8)), one(torch.randn(3, 3, 8, 12))], 2),
}
"""A model, arguments (captured with the first), and how many layers there are at the least."""


@pytest.mark.parametrize("name", MODELS)
def test_layers_do_what_the_model_does(name):
    make, batches, fewest = MODELS[name]
    torch.manual_seed(0)
    model = make()
    layers = captured_layers(model, *batches[0][0], **batches[0][1])
    assert len(layers) >= fewest
    before = copy.deepcopy(model.state_dict())
    assert_same(model, layers, batches)
    assert model.state_dict().keys() == before.keys()


def test_a_layer_lists_no_more_weights_than_it_asks_for():
    """Each run of a layer listed all of its weights to know its device: an eighth of a small model's step."""
    layers, listed = captured_layers(networks.MinimalGPT(), words(3, 9), words(3, 9)), []

    def listing(module: nn.Module, *args: Any) -> Any:
        for weight in parameters(module, *args):
            listed.append(weight)
            yield weight

    parameters = nn.Module.parameters
    with patch.object(nn.Module, "parameters", listing):
        run_in_order(layers, words(3, 9), words(3, 9))
    assert len(layers) <= len(listed) <= 2 * len(layers)  # for its device, and for its type


def test_captured_in_evaluation_and_trained():
    torch.manual_seed(0)
    model = networks.Skip().eval()
    assert_same(model, captured_layers(model, torch.randn(5, 8)), [one(torch.randn(3, 8))])


def test_captured_without_gradients_and_trained():
    torch.manual_seed(0)
    model = networks.MinimalGPT()
    with torch.no_grad():
        layers = captured_layers(model, words(3, 9), words(3, 9))
        assert not tensors_in(run_in_order(layers, words(3, 9), words(3, 9)))[0].requires_grad
    assert_same(model, layers, [one(words(2, 5), words(2, 5))])


def test_modules_stay_the_users_own_under_their_own_names():
    model = networks.MinimalGPT()
    layers = captured_layers(model, words(3, 9), words(3, 9))
    own = dict(model.named_modules())
    held = {
        name: module for layer in layers for name, module in _root(layer).named_modules() if name and name in own
    }
    assert all(own[name] is module for name, module in held.items() if not _is_a_branch(module))
    weights = {name: id(weight) for name, weight in model.named_parameters(remove_duplicate=False)}
    found = {
        name: id(weight)
        for layer in layers
        for name, weight in _root(layer).named_parameters(remove_duplicate=False)
    }
    assert found == weights
    states = {name for layer in layers for name in _root(layer).state_dict()}
    assert states == set(model.state_dict())


def _root(layer: nn.Module) -> nn.Module:
    return layer.shared if isinstance(layer, TiedLayer) else layer


def _is_a_branch(module: nn.Module) -> bool:
    return type(module).__name__ == "Branch"


def test_ties_are_found_by_identity():
    layers = captured_layers(networks.MinimalGPT(), words(3, 9), words(3, 9))
    tied = [place for place, layer in enumerate(layers) if isinstance(layer, TiedLayer)]
    assert len(tied) == 2 and tied[1] == len(layers) - 1
    first, last = (layers[place] for place in tied)
    assert first.key == last.key and first.shared is last.shared
    assert [name for name, _ in first.shared.named_parameters()] == ["head.weight"]
    assert all(isinstance(layer, CapturedLayer) for layer in layers[tied[0] + 1 : -1])


def test_names_of_inputs_and_outputs():
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    (args, kwargs) = encoder_decoder(2, 5, 4)
    layers = captured_layers(model, *args, **kwargs)
    assert layers.input_names == ["src", "tgt", "tgt_mask"] and layers.output_names == ["output"]
    layers = captured_layers(networks.RecurrentLanguageModel(), words(3, 7))
    assert layers.output_names == ["logits", "hidden.0", "hidden.1"]
    output = run_in_order(layers, words(3, 7))
    assert type(output) is networks.Output and type(output.hidden) is tuple


def test_a_number_that_the_model_returns_is_that_of_the_batch():
    layers = captured_layers(networks.Grid(), torch.randn(2, 3, 8, 8))
    assert run_in_order(layers, torch.randn(2, 3, 8, 12))[1] == 24


def test_a_step_that_calls_modules_of_the_model():
    model = networks.MinimalGPT()

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits, _ = model(batch["tokens"])
        return (
            nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
            + model.head.weight.norm()
        )

    model.eval()
    layers = layers_from(capture(model, ({"tokens": words(3, 9), "targets": words(3, 9)},), call=step))
    assert layers.input_names == ["batch.tokens", "batch.targets"]
    batch = {"tokens": words(2, 5), "targets": words(2, 5)}
    torch.testing.assert_close(run_in_order(layers, batch), step(batch))


def test_compiled_blocks_and_hooks_stay():
    """Hooks run for every micro-batch, and a compiled block is called as one."""
    seen = []
    model = nn.Sequential(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend="eager"),
        nn.Linear(8, 8),
    )
    model[0].register_forward_hook(lambda module, args, output: seen.append(output) or output * 2)
    x = torch.randn(3, 8)
    layers = captured_layers(model, x)
    seen.clear()
    torch.testing.assert_close(run_in_order(layers, x), model(x))
    assert len(seen) == 2 and not any(type(output).__name__ == "FakeTensor" for output in seen)
    assert any("OptimizedModule" in str(type(module)) for layer in layers for module in layer.modules())


def test_what_layers_make_for_themselves_is_the_same_in_each_state():
    """In evaluation there is less work without dropout: a table that each layer made in training was too dear."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.1)
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
            self.register_buffer("places", torch.arange(64)[None])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = (x[:, :1] > 0).long().expand(-1, 64)
            table = torch.gather(self.places.expand(x.shape[0], -1), 1, places)
            for layer in self.layers:
                x = layer(self.drop(x))
            return x + table[:, :8]

    model = Table()
    for percent in range(1, 40):
        with patch.object(partition, "MOST_REPEATED", percent / 100):
            layers = captured_layers(model.train(), torch.randn(4, 8))
            assert_same(model, layers, [one(torch.randn(3, 8))])


def test_masks_from_sizes_are_made_where_they_are_needed():
    """The mask is as large as the activations, and no boundary carries it."""
    layers = captured_layers(networks.MinimalGPT(), words(3, 9), words(3, 9))
    shapes = {shape for shapes in layers.boundary_shapes for shape in shapes}
    assert (3, 9, 16) in shapes and (9, 9) not in shapes


def test_what_is_read_late_is_computed_late():
    """In the order of the source a boundary carries 64 numbers per sample past each of the blocks."""
    model = networks.Early()
    layers = captured_layers(model, torch.randn(3, 8))
    wide = [place for place, shapes in enumerate(layers.boundary_shapes) if (3, 64) in shapes]
    assert len(wide) <= 1
    assert_same(model, layers, [one(torch.randn(2, 8))])


class Counting(nn.Module):
    """Counts its runs in a buffer, and goes by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("runs", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.runs += 1
        return x + self.linear(x).tanh() * (1 - 0.5 ** self.runs.float())


def test_a_buffer_is_used_by_the_layer_that_changes_it():
    model = nn.Sequential(Counting(), Counting(), Counting())
    alone, layers = copy.deepcopy(model), captured_layers(model, torch.randn(4, 8))
    apart = [copy.deepcopy(layer) for layer in layers]  # as on ranks of their own
    for _ in range(3):
        x = torch.randn(4, 8)
        passed = x
        for layer in apart:
            passed = layer(passed)
        torch.testing.assert_close(passed, alone(x))


def test_the_length_of_a_tensor_is_its_first_size():
    class Tokened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
            self.token = nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.stack([self.token.expand(len(x), -1), self.embed(x)], 1)
            return self.head(torch.zeros(len(x), 2, 8) + hidden / len(x))

    model = Tokened()
    layers = captured_layers(model, torch.randn(4, 8))
    assert_same(model, layers, [((torch.randn(size, 8),), {}) for size in (4, 5, 3)])
    assert type(len(torch.randn(4, 8))) is int  # afterwards, as before


def test_a_loop_over_chunks_holds_for_as_many_chunks():
    """``range(0, B, chunk)``, as of a NeRF, held for one number of rays: batches of other sizes were refused."""

    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert isinstance(range(2), range) and not isinstance(2, range)
            chunks = [self.before(x[at : at + 4]).tanh() for at in range(0, x.shape[0], 4)]
            return self.after(torch.cat(chunks))

    model = Chunked()
    layers = captured_layers(model, torch.randn(7, 8))
    assert_same(model, layers, [((torch.randn(size, 8),), {}) for size in (7, 8, 5)])
    with pytest.raises(ShapeError, match=r"test_models\.py:\d+, 3 and not 2"):
        run_in_order(layers, torch.randn(9, 8))
    assert type(range) is type  # afterwards, as before


def test_a_length_that_the_capture_does_not_hold_for_is_refused():
    model = networks.Unrolled()
    layers = captured_layers(model, torch.randn(3, 4, 8))
    assert_same(model, layers, [one(torch.randn(2, 4, 8))])
    with pytest.raises(ShapeError, match=r"networks\.py:\d+, 5 and not 4"):
        run_in_order(layers, torch.randn(3, 5, 8))
    model = networks.UNet()
    layers = captured_layers(model, torch.randn(2, 3, 16, 16))
    with pytest.raises(ShapeError, match="takes another way for the sizes"):
        run_in_order(layers, torch.randn(2, 3, 18, 16))


def test_shapes_that_a_library_keeps_are_those_of_each_capture():
    """``einops`` gave the second capture what it had kept of the first one: it was refused, in evaluation."""
    einops = pytest.importorskip("einops")

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = einops.rearrange(layer(x), "b t (h c) -> b h t c", h=2)
                x = einops.rearrange(x.softmax(-1), "b h t c -> b t (h c)")
            return einops.rearrange(x, "b t c -> (b t) c")

    model = Heads()
    layers = captured_layers(model, torch.randn(3, 4, 8))
    assert_same(model, layers, [one(torch.randn(3, 4, 8)), one(torch.randn(2, 5, 8))])


def least_memory(layers: list[nn.Module], inputs: torch.Tensor, num_devices: int) -> int:
    """The memory of a device with which there is a plan, of layers that were measured."""
    chain = profile_chain(layers, inputs, warm_up=1, repeats=1, progress=False)
    with pytest.raises(InfeasibleError) as caught:
        make_plan(
            chain,
            Platform(num_devices=num_devices, memory_bytes=1, bandwidth=1e9),
            num_micro_batches=8,
            recompute="never",
        )
    return caught.value.smallest_memory_bytes


@pytest.mark.parametrize("num_devices", [2, 4])
def test_the_order_is_that_of_least_memory_as_the_planner_counts_it(num_devices):
    """In the order of the source what is read at the end is made at the beginning, and crosses every boundary."""
    inputs = torch.randn(512, 8)
    chosen = captured_layers(networks.Early(), inputs)
    with patch.object(model_layers, "choose_order", lambda flow: None):
        source = captured_layers(networks.Early(), inputs)
    assert least_memory(chosen, inputs, num_devices) < 0.7 * least_memory(source, inputs, num_devices)


def test_what_is_kept_for_the_backward_is_foreseen_as_it_is_measured():
    """The order is judged before anything is measured: by the bytes that a profile then finds."""
    inputs = torch.randn(2, 3, 16, 16)
    layers = captured_layers(networks.UNet(), inputs)
    flow = flow_of(layers.captured.graph)
    choose_order(flow)
    foreseen = PlannedMemory(flow).chain(layout_of(flow).boundaries)
    measured = profile_chain(layers, inputs, warm_up=1, repeats=1, progress=False)
    for field in ("stash_bytes", "weight_bytes", "output_bytes"):
        two = [[getattr(layer, field) for layer in chain.layers[:-1]] for chain in (foreseen, measured)]
        assert two[0] == pytest.approx(two[1], abs=1024), field


@pytest.mark.parametrize("overwrites", [False, True])
def test_what_is_made_from_sizes_alone_may_be_asked(overwrites):
    """Hugging Face's code asks positions; it was answered as if their data were unknown, with a slower way."""
    model = networks.Positions(overwrites=overwrites)
    if overwrites:  # then they are not of sizes alone
        with pytest.raises(CaptureError, match=r"networks\.py:\d+"):
            captured_layers(model, words(3, 6))
        return
    layers = captured_layers(model, words(3, 6))
    assert_same(model, layers, [one(words(2, 5)), one(words(3, 8))])
    with pytest.raises(ShapeError, match=r"sizes of this batch \(.*networks\.py:\d+, True and not False\)"):
        run_in_order(layers, words(3, 9))


class Lengthened(nn.Module):
    """Multiplies by the length of what it was given, between layers as wide as that is in the capture.

    Args:
        turns: Whether length and width change places behind each layer.
    """

    def __init__(self, *, turns: bool) -> None:
        super().__init__()
        self.turns, self.layers = turns, nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        for layer in self.layers:
            mean = layer(x).mean(1, keepdim=True)
            x = (mean.transpose(1, 2).expand(-1, -1, 8) if self.turns else mean.expand(-1, 8, -1)) * length
        return x


def test_a_size_that_was_another_one_by_chance_is_told_apart():
    """Length and width are both 8 in the capture; where they differed, a batch was refused."""
    model = Lengthened(turns=False)
    layers = captured_layers(model, torch.randn(2, 8, 8))
    assert_same(model, layers, [((torch.randn(2, size, 8),), {}) for size in (8, 5)])


def test_a_size_at_the_place_of_another_one_is_refused():
    """Length and width are both 8 in the capture, and change places; nothing is computed with the wrong one."""
    layers = captured_layers(Lengthened(turns=True), torch.randn(2, 8, 8))
    with pytest.raises(ShapeError, match=r"a size of 5 was the same as another one .*, which is 8 now"):
        run_in_order(layers, torch.randn(2, 5, 8))


def test_a_width_that_was_the_number_of_samples_by_chance_is_not_taken_for_it():
    """Four samples, heads of width 4: batches of other sizes were refused."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(1, 3, 8))
            self.q, self.k, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k = self.q(self.queries.repeat(len(x), 1, 1)), self.k(x)
            q, k = (torch.cat(each.split(4, 2), 0) for each in (q, k))  # as many rows as heads * samples
            out = q + (q @ k.transpose(1, 2)).softmax(2) @ k
            return self.last(torch.cat(out.split(len(x), 0), 2)).mean((1, 2))

    model = Pooled()
    layers = captured_layers(model, torch.randn(4, 5, 8))
    assert_same(model, layers, [((torch.randn(size, 5, 8),), {}) for size in (4, 5, 3)])


def test_half_precision_after_the_capture():
    """Types that code reads, and makes masks of, are those of the weights when a layer runs."""

    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x).float().softmax(-1).to(self.first.weight.dtype)
            return self.last(hidden + torch.zeros(8, dtype=hidden.dtype, device=x.device))

    model = Typed()
    layers = captured_layers(model, torch.randn(3, 8))
    half = model.bfloat16()
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(run_in_order(layers, x), half(x))
    model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(run_in_order(layers, x.float()), model(x.float()))


def test_autocast_inside_the_model():
    """Some of its calls run in another type than the rest, which is in no argument of theirs."""

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.layers[1](torch.relu(self.layers[0](x)))
                with torch.autocast("cpu", enabled=False):
                    x = self.layers[2](x.float())
            return self.layers[3](x)

    model = Casting()
    layers = captured_layers(model, torch.randn(3, 8))
    assert len(layers) == 4
    assert_same(model, layers, [one(torch.randn(2, 8))])
    x = torch.randn(2, 8)
    assert torch.equal(run_in_order(layers, x), model(x))


def test_a_model_without_memory_is_captured():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**14, 2**14) for _ in range(64)))  # 64 GiB
    layers = captured_layers(model, torch.empty(4, 2**14, device="meta"))
    assert len(layers) == 64


def test_a_capture_leaves_the_model_as_it_was():
    model = networks.InPlace()
    state = copy.deepcopy(model.state_dict())
    weights = dict(model.named_parameters())
    captured_layers(model, torch.randn(3, 8))
    torch.testing.assert_close(dict(model.state_dict()), dict(state))
    assert all(weights[name] is weight for name, weight in model.named_parameters())
    assert not any(type(value).__name__ == "FakeTensor" for value in model.buffers())


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][-1])


def test_packed_sequences_are_to_stay_within_a_layer():
    match = r"packed sequences .* forward\(\) of one module .* \(.*test_models"
    with pytest.raises(CaptureError, match=match):
        capture(Packed(), (torch.randn(3, 5, 4), torch.tensor([5, 3, 2])))
    with pytest.raises(CaptureError, match=match):
        capture(PackedBetween(), (torch.randn(3, 5, 4), torch.tensor([5, 3, 2])))


class Packing(nn.Module):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> nn.utils.rnn.PackedSequence:
        return nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


class PackedBetween(Packed):
    """A packed sequence goes from one module to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.packing = Packing()

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.packing(x, lengths))[1][-1])


class Encoder(nn.Module):
    """Packs sequences, runs over them, and unpacks them."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 8, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, last = self.rnn(packed)
        return nn.utils.rnn.pad_packed_sequence(states, batch_first=True)[0], last[-1]


class PackedWithin(nn.Module):
    """One module packs, runs and unpacks; what it returns is as long as the longest sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.encoder = nn.Embedding(9, 4), Encoder()
        self.wide, self.head = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        states, last = self.encoder(self.table(words), lengths)
        masked = states.masked_fill((words == 0)[:, : states.shape[1], None], 0.0)
        return self.head(torch.relu(self.wide(masked.sum(1) + last)))


def test_a_module_that_packs_runs_and_unpacks_sequences_stays_whole():
    torch.manual_seed(0)
    model, lengths = PackedWithin(), torch.tensor([5, 3, 2])
    words = torch.randint(1, 9, (3, 5)) * (torch.arange(5) < lengths[:, None])
    layers = captured_layers(model, words, lengths)
    assert len(layers) > 2
    batches = []
    for longest in (5, 3):
        shorter = lengths.clamp(max=longest)
        batches.append(((words * (torch.arange(5) < shorter[:, None]), shorter), {}))
    assert_same(model, layers, batches)


@pytest.mark.parametrize("seed", range(4))
def test_what_cannot_be_captured_is_told_with_its_line(seed):
    torch.manual_seed(seed)  # by some numbers its blocks are no elements, and the sentence ended with the line
    with pytest.raises(CaptureError, match=r"networks\.py:\d+: if x\.sum\(\) > 0.*module of its own"):
        layers_as_they_are(networks.DataDependentBetween(), (torch.randn(3, 8),), {})


def test_what_the_models_code_refuses_is_refused():
    """Of two answers, one raises: the other one is supposed, and verified for every batch."""
    model = networks.Validating()
    layers = captured_layers(model, words(3, 7))
    assert len(layers) == 5
    assert_same(model, layers, [one(words(2, 5))])
    with pytest.raises(ValueError, match=r"refuses this batch \(.*networks\.py"):
        run_in_order(layers, words(3, 7) + 20)


def test_blocks_of_a_model_that_cannot_be_captured_are_layers():
    """What is around them runs twice, on the same random numbers, and its weights count once."""
    torch.manual_seed(0)
    model = networks.DataDependent()
    layers = layers_as_they_are(model, (padded(3, 7),), {})
    assert [type(layer).__name__ for layer in layers] == ["TiedLayer", *["ElementLayer"] * 3, "TiedLayer"]
    assert "blocks.0 and its followers" in layers.captured.notes[0] and "networks.py" in layers.captured.notes[0]
    assert_same(model, layers, [one(padded(3, 7)), one(padded(2, 5))])
    with pytest.raises(ShapeError, match=r"gives blocks\.0 something else"):
        run_in_order(layers, words(3, 7).clamp(min=1))


class Skipping(nn.Module):
    """Leaves blocks out by what ``draw`` gives, in its own code: between its layers."""

    def __init__(self, draw: Callable[[Skipping], float], least: float = 0.02) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.draw, self.least = draw, least
        self.own, self.of_numpy = random.Random(0), numpy.random.default_rng(0)
        self.given = itertools.cycle([0.5, 1.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.draw(self) < self.least:
                continue
            x = block(x)
        return self.last(x)


DRAWS: dict[str, Callable[[Skipping], float]] = {
    "random": lambda _: random.random(),
    "numpy.random": lambda _: numpy.random.rand(),
    "self.own": lambda model: model.own.random(),
    "self.of_numpy": lambda model: model.of_numpy.random(),
    "self.given": lambda model: next(model.given),
}


@pytest.mark.parametrize("source", DRAWS)
def test_numbers_that_a_model_draws_between_its_layers_are_refused(source: str):
    """What the capture drew held for ever: no block was ever left out again, in silence."""
    with pytest.raises(CaptureError, match=rf"draws between its layers, from {source} at .*test_models\.py:\d+"):
        layers_as_they_are(Skipping(DRAWS[source]), (torch.randn(3, 8),), {})


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(self.first(x))
        return x * random.random()


def test_a_number_drawn_behind_the_last_layer_is_told_with_its_own_line():
    """The line was that of whoever ran the model, such as one of the Trainer's."""
    lines, first = inspect.getsourcelines(Scaled.forward)
    with pytest.raises(CaptureError, match=rf"test_models\.py:{first + len(lines) - 1}\b"):
        layers_as_they_are(Scaled(), (torch.randn(3, 8),), {})


@pytest.mark.parametrize("source", ["random", "numpy.random"])
def test_numbers_by_which_nothing_is_decided_hinder_nothing(source: str):
    """As Hugging Face models draw where no layer is to be dropped."""
    model = Skipping(DRAWS[source], least=0.0)
    assert_same(model, captured_layers(model, torch.randn(3, 8)), [one(torch.randn(2, 8))])


def test_what_a_capture_takes_from_an_iterator_is_given_once_more():
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scales = nn.Linear(8, 8), iter([1.0, 2.0, 3.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * next(self.scales)

    model = nn.Sequential(Scaling(), nn.Linear(8, 8))
    captured_layers(model, torch.randn(3, 8))
    assert list(model[0].scales) == [1.0, 2.0, 3.0]


class DrawingBlock(nn.Module):
    """Draws a number from one generator of its own, and a tensor from another."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.numbers, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape, generator=self.generator)
        return x + self.linear(x).tanh() * self.numbers.random() + 0.1 * noise


class NoisyBlock(nn.Module):
    """Draws tensors alone, so that its calls are written down."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(8, 8), torch.Generator().manual_seed(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh() + torch.randn(x.shape, generator=self.generator)


def test_generators_of_modules_are_where_they_were_after_a_capture():
    model = nn.Sequential(*(DrawingBlock(seed) for seed in range(3)))
    alone, layers, x = copy.deepcopy(model), captured_layers(model, torch.randn(4, 8)), torch.randn(4, 8)
    for _ in range(2):
        torch.testing.assert_close(run_in_order(layers, x), alone(x))


def test_a_layer_names_the_generators_that_its_calls_are_given():
    model = nn.Sequential(*(NoisyBlock(seed) for seed in range(3)))
    layers = captured_layers(model, torch.randn(4, 8))
    held = [generator for layer in layers for generator in layer.generators]
    assert held == [block.generator for block in model]
    assert all(len(generators_of(layer)) == len(layer.generators) for layer in layers)


def test_a_module_whose_code_draws_stays_whole():
    """It was opened for its size, and what it had drawn in the capture then held for ever."""
    model = nn.Sequential(nn.Linear(8, 8), Skipping(DRAWS["random"], least=0.5), nn.Linear(3, 3))
    layers = captured_layers(model, torch.randn(3, 8))
    x = torch.randn(3, 8)
    for seed in range(8):
        random.seed(seed)
        expected = model(x)
        random.seed(seed)
        torch.testing.assert_close(run_in_order(layers, x), expected)


def test_blocks_that_the_models_code_leaves_out_for_a_batch_are_refused():
    """Layers ran all blocks, whatever ``forward`` did with the torch numbers that it drew: 6 % of batches."""
    torch.manual_seed(0)
    model = Skipping(lambda _: torch.rand(1).item())
    layers = layers_as_they_are(model, (torch.randn(3, 8),), {})
    x, refused = torch.randn(3, 8), 0
    for seed in range(100):
        torch.manual_seed(seed)
        expected = model(x)
        torch.manual_seed(seed)
        try:
            torch.testing.assert_close(run_in_order(layers, x), expected)
        except (ShapeError, CaptureError) as error:  # of another type where the last one is left out
            refused += "does not call blocks." in str(error)
    assert refused


def test_weights_around_blocks_have_the_models_names():
    """The model's own ``state_dict`` had those that were trained there as they were in the beginning."""
    model = networks.DataDependent()
    layers = layers_as_they_are(model, (padded(3, 7),), {})
    held = {"tied_modules.around_elements": layers[0].shared, **dict(enumerate(layers[1:-1], 1))}
    state = {f"{key}.{name}": weight for key, part in held.items() for name, weight in part.named_parameters()}
    found = layers.model_state_dict({name: weight.detach() + 1.0 for name, weight in state.items()})
    for name, weight in model.state_dict().items():
        assert torch.equal(found[name], weight + 1.0), name


def test_small_calls_beside_shared_weights_are_layers_of_their_own():
    """Positions and a norm were in the blocks, so that no cut was that of a list written by hand."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.norm = nn.Embedding(20, 32), nn.Embedding(16, 32), nn.LayerNorm(32)
            wide = (nn.Sequential(nn.Linear(32, 2048), nn.GELU(), nn.Linear(2048, 32)) for _ in range(4))
            self.blocks, self.head = nn.ModuleList(wide), nn.Linear(32, 20, bias=False)
            self.head.weight = self.words.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = x + block(x)
            return self.head(self.norm(x))

    model = Tied()
    layers = captured_layers(model, words(3, 9))
    names = [sorted(name for name, _ in layer.named_parameters()) for layer in layers]
    assert names[1] == ["places.weight"] and names[-2] == ["norm.bias", "norm.weight"]
    assert_same(model, layers, [one(words(2, 7))])


def test_a_small_head_behind_a_large_frozen_body_has_layers():
    """All of it was one layer, for two stages."""

    class Finetuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).requires_grad_(False)
            self.first, self.second, self.third = nn.Linear(256, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.second(self.first(self.body(x))).relu())

    model = Finetuned()
    layers = captured_layers(model, torch.randn(3, 256))
    assert len(layers) == 3
    assert_same(model, layers, [one(torch.randn(2, 256))])


class Wrapped(nn.Module):
    """Most of it is in a part that decides by data and reads an attribute of a block. It returns a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last, self.scale = networks.DataDependent(), nn.Linear(20, 4), 1.0
        self.inner.blocks[0].kind = "causal"
        self.inner.register_forward_pre_hook(self._ask)

    def _ask(self, *_: Any) -> None:
        assert self.inner.blocks[0].kind == "causal"

    def forward(self, tokens: torch.Tensor) -> dict[str, Any]:
        return {"x": self.last(self.inner(tokens)["logits"]) * self.scale, "scale": self.scale}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_that_code_around_blocks_asks_for_is_told(reentrant):
    """The refusal named what checkpoint's own code does with the blocks' outputs, and no cause."""
    model = networks.DataDependentRecomputed()
    model.reentrant = reentrant
    told = "runs blocks.0 and its followers under torch.utils.checkpoint.*within their own forward"
    with pytest.raises(CaptureError, match=told):
        layers_as_they_are(model, (padded(3, 7),), {})


def test_blocks_within_a_part_that_cannot_be_captured_are_layers():
    """The part was a single layer; what code around blocks read of modules was what it had been in the capture."""
    torch.manual_seed(0)
    model = Wrapped()
    layers = layers_as_they_are(model, (padded(3, 7),), {})
    assert len(layers) == 5
    assert (
        "inner (DataDependent) stays whole: its code decides by the numbers in a tensor"
        in layers.captured.notes[0]
    )
    assert_same(model, layers, [one(padded(3, 7)), one(padded(2, 5))])
    assert layers.output(run_in_order(layers, padded(2, 5)))["scale"] == 1.0
    model.scale = 2.0
    with pytest.raises(ShapeError, match="returns other values beside tensors for this batch"):
        run_in_order(layers, padded(2, 5))


def padded(batch: int, length: int) -> torch.Tensor:
    tokens = words(batch, length).clamp(min=1)
    tokens[0, length - 2 :] = 0
    return tokens


def test_a_layer_says_how_many_tensors_it_takes():
    layers = layers_from(capture(networks.MinimalGPT(), (words(3, 9), words(3, 9))))
    with pytest.raises(ValueError, match="takes 2: tokens, targets"):
        layers[0](words(3, 9))


class TwoViews(nn.Module):
    """Both views go through one head with running statistics, as in Barlow twins."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(16, 16), norm(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(first)) - self.head(self.encoder(second))


def test_statistics_in_layers_that_share_weights_are_refused() -> None:
    """The ranks had other statistics in the end, and nothing was said."""
    views = torch.randn(4, 8), torch.randn(4, 8)
    with pytest.raises(
        CaptureError, match=r"head.1 \(BatchNorm1d\) keeps running statistics, and stands in layers"
    ):
        layers_from(capture(TwoViews(nn.BatchNorm1d), views))
    assert len(layers_from(capture(TwoViews(nn.LayerNorm), views))) > 1


def test_a_module_at_two_places_of_a_sequential_is_one_layer_for_both():
    """A KeyError of the second place's name stood in the sentence, and the model had fewer layers than it has."""
    block = nn.Linear(6, 6)
    model = nn.Sequential(nn.Linear(4, 6), block, nn.Tanh(), block, nn.ReLU(), nn.Linear(6, 2))
    outer = nn.Sequential(model)
    layers = captured_layers(outer, torch.randn(3, 4))
    assert not any("ElementLayer" in type(layer).__name__ for layer in layers)
    assert_same(outer, layers, [one(torch.randn(5, 4))])


class Pads(nn.Module):
    """As the U-Net of fastMRI, which asks a tensor that it makes of how much is to be padded."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv1d(2, 2, 2, stride=2), nn.ConvTranspose1d(2, 2, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.up(self.down(x))
        padding = [0, x.shape[-1] - found.shape[-1]]
        if torch.sum(torch.tensor(padding)) != 0:
            found = nn.functional.pad(found, padding)
        return x + found


@pytest.mark.parametrize("length", [8, 9])
def test_a_tensor_of_numbers_is_asked_for_these_sizes(length: int) -> None:
    """The model was said to decide by data."""
    model, x = Pads(), torch.randn(3, 2, length)
    layers = captured_layers(model, x)
    assert len(layers) == 2
    torch.testing.assert_close(run_in_order(layers, x[:2]), model(x[:2]))
    with pytest.raises(Exception, match="size"):
        run_in_order(layers, torch.randn(3, 2, 17 - length))


class Keeps(nn.Module):
    """Fills masks that it makes of numbers with what data say, beside one that it asks."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make, self.blocks = make, nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = self.make(x)
        keep.scatter_(1, x.norm(dim=-1).topk(2, 1).indices, True)
        x = x * keep.unsqueeze(-1)
        if (torch.arange(x.shape[1]).diff() != 1).any():
            x = x + 1
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.zeros(x.shape[:2], dtype=torch.bool),
        lambda x: torch.tensor([[False] * x.shape[1]] * x.shape[0]),
    ],
)
def test_masks_that_are_filled_by_data_keep_nothing_whole(make):
    model, x = nn.Sequential(Keeps(make), nn.Linear(8, 2)), torch.randn(4, 5, 8)
    layers = captured_layers(model, x)
    assert len(layers) == 4
    torch.testing.assert_close(run_in_order(layers, x), model(x))


class FillsOrDoubles(nn.Module):
    """Fills a tensor of numbers with data, or does without where that is not supported."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        try:
            scale = torch.tensor([1, x.shape[-1]])
            scale += (x[0] > 0).long()
            x = x * scale
        except Exception:
            x = x * 2
        return self.last(x)


def test_no_code_of_a_model_stops_a_recording_that_begins_anew():
    """What a recording raises to begin anew was taken for an error of the model, whose other way was recorded."""
    model, x = FillsOrDoubles(), torch.randn(3, 4)
    torch.testing.assert_close(run_in_order(captured_layers(model, x), x), model(x))
