"""What profile_chain accepts, what it says of it, and that it leaves no trace."""

from __future__ import annotations

import functools
import logging
import queue
import random
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from deepspeed_partition.profiling import (
    forward_stage,
    layer_profiles,
    measure_stage,
    profile_chain,
    profile_stage,
)
from deepspeed_partition.profiling.attributes import attributes_kept
from deepspeed_partition.profiling.sources import layer_sources

QUICK = {"warm_up": 1, "repeats": 1, "device": "cpu"}
X = torch.zeros(5, 8)


@pytest.fixture(scope="module")
def pipe():
    return pytest.importorskip("deepspeed.pipe")


# What it says of a layer.


def test_weights_trainable_parameters_and_types():
    frozen = nn.Linear(8, 8).requires_grad_(False)
    half = nn.Linear(8, 4).to(torch.bfloat16)
    chain = profile_chain(
        [nn.Linear(8, 8), frozen, nn.ReLU(), lambda x: x.to(torch.bfloat16), half, torch.relu], X, **QUICK
    )
    assert [layer.weight_bytes for layer in chain.layers] == [4 * 72, 4 * 72, 0, 0, 2 * 36, 0]
    assert [layer.num_trainable_parameters for layer in chain.layers] == [72, 0, 0, 0, 36, 0]
    assert [layer.type for layer in chain.layers] == ["Linear", "Linear", "ReLU", "<lambda>", "Linear", "relu"]
    assert chain.layers[0].name == "0.Linear"
    assert (chain.micro_batch_size, chain.input_bytes) == (5, 4 * 40)
    assert "thread" in chain.hardware


def test_parameters_that_share_memory_count_once():
    layer = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    layer[1].weight = layer[0].weight
    layer[2].weight = nn.Parameter(layer[0].weight.data)
    chain = profile_chain([layer], X, **QUICK)
    assert chain.layers[0].weight_bytes == 4 * 64


def test_parameters_in_one_flat_buffer_count_with_their_own_size():
    """ZeRO and BF16_Optimizer keep all parameters of a rank as views of one buffer."""
    layer = nn.Linear(8, 8)
    flat = torch.zeros(10_000)
    layer.weight.data = flat[100:164].view(8, 8)
    layer.bias.data = flat[164:172]
    assert profile_chain([layer], X, **QUICK).layers[0].weight_bytes == 4 * 72


def test_a_sequential_keeps_the_names_of_its_children():
    net = nn.Sequential()
    net.add_module("first", nn.Linear(8, 8))
    shared = nn.ReLU()
    net.add_module("again", shared)
    net.add_module("2", shared)
    assert [layer.name for layer in profile_chain(net, X, **QUICK).layers] == ["first", "again", "2.ReLU"]


def test_tuples_between_layers():
    def fork(x):
        return x, x[:, 0] > 0, x.sum(-1).long()

    def join(parts):
        x, mask, number = parts
        return x * mask[:, None] + number[:, None]

    chain = profile_chain([nn.Linear(8, 8), fork, join], X, **QUICK)
    assert chain.layers[1].output_bytes == 4 * 40 + 5 + 8 * 5
    assert chain.layers[1].backward_seconds > 0
    pair = profile_chain([join], [X, X[:, 0] > 0, X[:, 0].long()], **QUICK)  # a list, as a DataLoader gives
    assert pair.input_bytes == 4 * 40 + 5 + 8 * 5


def test_layers_with_several_parameters():
    """They are measured as they train: each gets the members of the tuple."""

    class Fork(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    class Join(nn.Linear):
        def forward(self, x, before):
            return super().forward(x) + before

    def join(x, before):
        return x + before

    chain = profile_chain([Fork(8, 8), Join(8, 8), Fork(8, 8), join], X, **QUICK)
    assert [layer.type for layer in chain.layers] == ["Fork", "Join", "Fork", "join"]
    assert [layer.weight_bytes for layer in chain.layers] == [288, 288, 288, 0]


def test_layer_specs_are_built_one_at_a_time(pipe):
    alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    most = []

    class Counted(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            alive.add(self)
            most.append(len(alive))

    specs = [pipe.LayerSpec(Counted, 8, 8) for _ in range(4)]
    chain = profile_chain(specs, X, **QUICK)
    assert [layer.name for layer in chain.layers] == ["0.Counted", "1.Counted", "2.Counted", "3.Counted"]
    assert [layer.weight_bytes for layer in chain.layers] == [4 * 72] * 4
    assert (max(most), len(most), len(alive)) == (1, 4, 0)


def test_a_tied_layer_costs_wherever_it_appears(pipe):
    def head(embedding, x):
        return x @ embedding.weight.t()

    tokens = torch.zeros(2, 5, dtype=torch.long)
    specs = [
        pipe.TiedLayerSpec("embed", nn.Embedding, 20, 8),
        nn.Linear(8, 8),
        pipe.TiedLayerSpec("embed", nn.Embedding, 20, 8, forward_fn=head),
    ]
    chain = profile_chain(specs, tokens, **QUICK)
    assert [layer.type for layer in chain.layers] == ["Embedding", "Linear", "Embedding"]
    assert [layer.weight_bytes for layer in chain.layers] == [4 * 160, 4 * 72, 4 * 160]
    assert chain.layers[2].output_bytes == 4 * 2 * 5 * 20
    assert all(layer.backward_seconds > 0 for layer in chain.layers)
    # As the pipeline engine holds it: built, the forward a partial of the module.
    embedding = nn.Embedding(20, 8)
    built = profile_chain([embedding, nn.Linear(8, 8), functools.partial(head, embedding)], tokens, **QUICK)
    sizes = ("type", "weight_bytes", "stash_bytes", "num_trainable_parameters")
    for ours, theirs in zip(built.layers, chain.layers, strict=True):
        assert [getattr(ours, key) for key in sizes] == [getattr(theirs, key) for key in sizes]


def test_a_spec_that_cannot_be_built_is_named(pipe):
    with pytest.raises(ValueError, match=r"layer '1\.Linear' cannot be built: TypeError"):
        profile_chain([nn.Linear(8, 8), pipe.LayerSpec(nn.Linear, 8)], X, **QUICK)


# Stages: what the pipeline engine measures with.


def test_stages_measured_apart_make_the_chain_of_the_whole():
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh()]
    labels = torch.zeros(5, dtype=torch.long)
    whole = profile_chain(layers, (X, labels), loss_fn=nn.functional.cross_entropy, **QUICK)
    first, boundary = measure_stage(layers[:2], X, **QUICK)
    second, _ = measure_stage(
        layers[2:], boundary, labels, nn.functional.cross_entropy, first_stage=False, first_index=2, **QUICK
    )
    together = layer_profiles([*first, *second])
    for ours, theirs in zip(together, whole.layers, strict=True):
        for key in ("name", "type", "weight_bytes", "output_bytes", "stash_bytes", "num_trainable_parameters"):
            assert getattr(ours, key) == getattr(theirs, key)


def test_a_stage_hands_on_detached_outputs_and_receives_what_needs_a_gradient():
    layers = [nn.Linear(8, 8), nn.ReLU()]
    profiles, outputs = profile_stage(layers, X, **QUICK)
    assert len(profiles) == 2
    assert outputs.is_leaf and outputs.requires_grad
    assert torch.equal(outputs, layers[1](layers[0](X)))
    assert torch.equal(forward_stage(layers, X, device="cpu"), outputs)
    later, _ = profile_stage([nn.ReLU()], outputs.detach(), first_stage=False, **QUICK)
    assert later[0].backward_seconds > 0
    first, _ = profile_stage([nn.ReLU()], outputs.detach(), first_stage=True, **QUICK)
    assert first[0].backward_seconds == 0


# No trace.


class Restless(nn.Module):
    """Changes all that a forward can change."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.replaced = self.replaced + 1
        self.hidden.add_(1)
        with torch.no_grad():
            self.weight.add_(1)
        random.random()
        np.random.rand()
        return self.dropout(self.norm(x)) * self.weight


def test_nothing_is_changed():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Restless(), nn.Linear(8, 8))
    net[1].dropout.eval()
    net[0].weight.grad = torch.full((8, 8), 7.0)
    gradient = net[0].weight.grad
    fired = []
    for parameter in net.parameters():
        parameter.register_hook(lambda _: fired.append("hook"))
        parameter.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
    objects = {name: id(tensor) for name, tensor in [*net.named_parameters(), *net.named_buffers()]}
    values = {name: tensor.clone() for name, tensor in [*net.named_parameters(), *net.named_buffers()]}
    modes = [module.training for module in net.modules()]
    x = torch.randn(5, 8)
    x_before = x.clone()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    for attempt in (x, torch.randn(5, 9)):  # the second one fails half-way
        torch.set_rng_state(states[0])
        if attempt is x:
            profile_chain(net, attempt, **QUICK)
            forward_stage(net, attempt, device="cpu")
        else:
            with pytest.raises(ValueError):
                profile_chain([*net[1:], net[0]], attempt, **QUICK)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
        now = dict([*net.named_parameters(), *net.named_buffers()])
        assert {name: id(tensor) for name, tensor in now.items()} == objects
        assert all(torch.equal(now[name], value) for name, value in values.items())
        assert [module.training for module in net.modules()] == modes
    assert torch.equal(x, x_before)
    assert net[0].weight.grad is gradient
    assert torch.equal(gradient, torch.full((8, 8), 7.0))
    assert [name for name, p in net.named_parameters() if p.grad is not None] == ["0.weight"]
    assert fired == []


def test_dropout_is_measured_in_training_mode():
    layer = nn.Dropout(0.5).eval()
    chain = profile_chain([nn.Linear(8, 8), layer], X, **QUICK)
    assert chain.layers[1].stash_bytes > 0  # its mask
    assert not layer.training


def test_parameters_that_a_function_reaches_keep_their_gradients():
    outer = nn.Linear(8, 8)
    outer.weight.grad = torch.ones(8, 8)
    profile_chain([nn.Linear(8, 8), lambda x: outer(x)], X, **QUICK)
    assert torch.equal(outer.weight.grad, torch.ones(8, 8))
    assert outer.bias.grad is None


def test_layers_that_work_in_place_leave_the_sample_alone():
    x = -torch.ones(5, 8)
    profile_chain([nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True)], x, **QUICK)
    assert torch.equal(x, -torch.ones(5, 8))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_the_callers_grad_mode_does_not_matter(around):
    with around():
        chain = profile_chain([nn.Linear(8, 8), nn.Tanh()], X, **QUICK)
    assert all(layer.backward_seconds > 0 for layer in chain.layers)


def test_the_backward_is_under_no_autocast_but_the_forward_is():
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(("forward", torch.is_autocast_enabled("cpu")))
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            seen.append(("backward", torch.is_autocast_enabled("cpu")))
            return gradient

    with torch.autocast("cpu", dtype=torch.bfloat16):
        profile_chain([nn.Linear(8, 8), Watch.apply], X, **QUICK)
    assert set(seen) == {("forward", True), ("backward", False)}


def test_modules_that_share_a_parameter_still_do_while_measured():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
            self.other.weight = self.one.weight

        def forward(self, x):
            assert self.other.weight is self.one.weight
            return self.other(self.one(x))

    assert profile_chain([Pair()], X, **QUICK).layers[0].weight_bytes == 4 * (64 + 8 + 8)


# Bad input.


class Around(nn.Module):
    """A loss with a module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, outputs, labels):
        return self.inner(outputs).mean()


@pytest.mark.parametrize(
    "lazy",
    [nn.LazyBatchNorm1d(affine=False), nn.LazyBatchNorm1d(), nn.LazyLinear(8)],
    ids=["buffers", "both", "weights"],
)
def test_a_layer_without_shapes_is_named(lazy):
    """Of lazy buffers alone the error was torch's own, without the layer."""
    with pytest.raises(
        ValueError, match=r"layer '1\.Lazy\w+' has lazy parameters or buffers, without shapes: run it once"
    ):
        profile_chain([nn.Linear(8, 8), lazy], X, **QUICK)
    with pytest.raises(ValueError, match="the loss function has lazy parameters or buffers"):
        profile_chain([nn.Linear(8, 8)], (X, X), loss_fn=Around(lazy), **QUICK)


def test_no_layers():
    with pytest.raises(ValueError, match="layers is empty: a chain has at least one layer"):
        profile_chain([], X, **QUICK)


def test_layers_that_are_no_layers():
    with pytest.raises(ValueError, match="layer 1 is a int: a layer is a module, a LayerSpec or a function"):
        profile_chain([nn.ReLU(), 3], X, **QUICK)
    with pytest.raises(ValueError, match=r"layers is a Linear: a list of layers or an nn\.Sequential is needed"):
        profile_chain(nn.Linear(8, 8), X, **QUICK)
    with pytest.raises(ValueError, match=r"'0\.LazyLinear' has lazy parameters"):
        profile_chain([nn.LazyLinear(8)], X, **QUICK)


def test_a_sample_that_the_first_layer_cannot_take():
    with pytest.raises(
        ValueError, match=r"layer '0\.Linear' cannot take its input \(5, 8\) float32: RuntimeError: mat1"
    ):
        profile_chain([nn.Linear(9, 8)], X, **QUICK)


def test_layers_that_do_not_fit_together():
    with pytest.raises(ValueError, match=r"layer '1\.Linear' cannot take its input \(5, 8\) float32"):
        profile_chain([nn.Linear(8, 8), nn.Linear(7, 8)], X, **QUICK)


def test_a_skip_that_goes_from_layer_to_layer_in_a_dictionary():
    """KeyError, and no word of why a layer that runs in the model does not run here."""
    skips = {}

    class Stash(nn.Linear):
        def forward(self, x):
            skips["x"] = x
            return super().forward(x)

    class Pop(nn.Linear):
        def forward(self, x):
            return super().forward(x) + skips.pop("x")

    stash, pop = Stash(8, 8), Pop(8, 8)
    with pytest.raises(ValueError, match=r"(?s)layer '1\.Pop' .*KeyError: 'x'; each layer is run alone.*"):
        profile_chain([stash, pop], X, **QUICK)
    assert profile_chain([nn.Sequential(stash, pop)], X, **QUICK).num_layers == 1


@pytest.mark.parametrize("output", [None, {"x": X}, [X], (X, None), ()])
def test_an_output_that_cannot_be_handed_on(output):
    with pytest.raises(
        ValueError, match=r"layer '0\.<lambda>' returns .* for the input \(5, 8\) float32: a layer"
    ):
        profile_chain([lambda x: output], X, **QUICK)


@pytest.mark.parametrize("sample", [None, 3, "text", {"x": X}, (X, "labels"), ()])
def test_a_sample_that_is_no_tensor(sample):
    with pytest.raises(
        ValueError, match=r"inputs of the sample are .*: they must be a tensor or a tuple of tensors"
    ):
        profile_chain([nn.Linear(8, 8)], sample, **QUICK)


def test_a_sample_without_labels_for_the_loss():
    with pytest.raises(ValueError, match=r"with a loss_fn it must be a pair \(inputs, labels\)"):
        profile_chain([nn.Linear(8, 8)], X, loss_fn=nn.functional.mse_loss, **QUICK)


def test_a_loss_that_cannot_be_computed():
    with pytest.raises(
        ValueError, match=r"'0\.Linear' gives \(5, 8\) float32, which loss_fn cannot take: TypeError"
    ):
        profile_chain([nn.Linear(8, 8)], (X, None), loss_fn=lambda y: y.sum(), **QUICK)
    with pytest.raises(ValueError, match=r"loss_fn returns \(5, 8\) float32: the loss is a tensor of one number"):
        profile_chain([nn.Linear(8, 8)], (X, None), loss_fn=lambda y, _: y, **QUICK)


def test_a_backward_that_fails():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("no way back")

    with pytest.raises(ValueError, match=r"'1\.apply' fails in its backward for the input \(5, 8\) .*no way back"):
        profile_chain([nn.Linear(8, 8), Broken.apply], X, **QUICK)


@pytest.mark.parametrize("device", ["tpu-or-so", "meta", "cuda:99"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(ValueError, match=f"device '{device}'"):
        profile_chain([nn.Linear(8, 8)], X, device=device)


# What is shown.


def test_no_bar_but_on_a_terminal(capsys):
    profile_chain([nn.Linear(8, 8)], X, **QUICK)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    profile_chain([nn.Linear(8, 8), nn.ReLU()], X, name="mine", **QUICK)
    captured = capsys.readouterr()
    assert captured.out == "" and "mine" in captured.err and "2/2" in captured.err
    profile_chain([nn.Linear(8, 8)], X, progress=False, **QUICK)
    assert capsys.readouterr().err == ""


def test_suspicious_readings_are_logged(caplog):
    class Cut(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    with caplog.at_level(logging.WARNING, logger="deepspeed_partition"):
        profile_chain([Cut(8, 8)], X, **QUICK)
    assert "layer '0.Cut': its backward took 0 s, although it has 72 trainable parameters" in caplog.text


def test_a_table_that_cannot_be_written_to_is_left_as_it_is():
    """A model of diffusers was refused: its configuration is a dictionary that lets nobody update it."""

    class Frozen(dict):
        def update(self, *_, **__):
            raise RuntimeError("frozen")

        clear = update

    layer = nn.Linear(8, 8)
    layer.config, layer.seen = Frozen(width=8, places=[1, 2]), {}
    with attributes_kept([layer]):
        layer.config["places"].append(3)
        layer.seen["forward"] = 1
    assert layer.config == {"width": 8, "places": [1, 2]} and layer.seen == {}


def test_a_list_that_cannot_be_written_to_is_left_as_it_is():
    """A data set of pytorch-forecasting ended in a TypeError: an index of pandas has its names in such a list."""

    class Frozen(list):
        def __setitem__(self, *_):
            raise TypeError("frozen")

    layer = nn.Linear(8, 8)
    layer.names, layer.places = Frozen(["time", "group"]), Frozen([[1], [2]])
    with attributes_kept([layer]):
        layer.places[0].append(3)
    assert layer.names == ["time", "group"] and layer.places == [[1], [2]]


class Pending(queue.Queue):
    """A queue of a program's own class."""


@pytest.mark.parametrize("kind", [queue.Queue, Pending])
def test_threads_that_wait_at_a_queue_are_woken_afterwards(kind):
    """What was put into a queue after a measurement went nowhere: who waited was put back to nobody."""
    layer = nn.Linear(8, 8)
    layer.items = kind()
    with attributes_kept([layer]):
        thread = threading.Thread(target=layer.items.get, daemon=True)
        thread.start()
        while not layer.items.not_empty._waiters:
            time.sleep(0.001)
    layer.items.put("loss")
    thread.join(timeout=10)
    assert not thread.is_alive()


NUM_CALLS, SEEN = 0, []
RNG = random.Random(3)


def counting_loss(outputs, labels):
    global NUM_CALLS
    NUM_CALLS += 1
    SEEN.append(float(outputs.mean()))
    return outputs.mean() * RNG.random()


class LossObject:
    """A loss that is no module: a number, a generator, a tensor, a list in a tuple, and a meter of its own."""

    def __init__(self):
        self.calls, self.generator, self.total = 0, torch.Generator().manual_seed(1), torch.zeros(1)
        self.logs, self.criterion = ([],), nn.BatchNorm1d(3)
        self.table = np.broadcast_to(np.zeros(1), (3,))  # not to be written to

    def __call__(self, outputs, labels):
        self.calls += 1
        self.last = outputs.detach()
        self.total += 1
        self.logs[0].append(self.calls)
        return self.criterion(outputs).mean() + outputs.mean() * torch.rand(1, generator=self.generator)[0]

    def told(self):
        tensors = self.total, self.generator.get_state(), self.criterion.running_mean
        return [self.calls, hasattr(self, "last"), str(self.logs), *(tensor.tolist() for tensor in tensors)]


class Remembers(nn.Module):
    """Sets a buffer in its first forward, lengthens it in the others, and registers another one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", None)

    def forward(self, inputs):
        row = inputs.detach().mean(0, keepdim=True)
        self.rows = row if self.rows is None else torch.cat([self.rows, row])
        self.register_buffer("newest", row, persistent=False)
        return inputs - self.rows.mean(0)


def test_buffers_that_a_layer_sets_while_it_is_measured_are_put_back():
    """A memory bank began with the rows of ten runs that trained nothing."""
    layer = Remembers()
    before = list(vars(layer)), layer.state_dict()
    profile_chain([nn.Linear(8, 8), layer], X, **QUICK)
    assert layer.rows is None and not hasattr(layer, "newest")
    assert (list(vars(layer)), layer.state_dict()) == before and not layer._non_persistent_buffers_set
    layer(X)
    assert len(layer.rows) == 1


def averaging_loss():
    average, number = [1.0], 0

    def loss(outputs, labels):
        nonlocal number
        number += 1
        average.append(float(outputs.mean()))
        return outputs.mean()

    return loss, lambda: (list(average), number)


def test_losses_and_functions_that_keep_something_are_put_back():
    """A warm-up of the loss that counts its calls began in the middle: measuring calls it, too."""
    held, (closure, of_closure), shared = LossObject(), averaging_loss(), []

    def counting_layer(inputs):
        shared.append(1)
        return inputs * len(shared)

    def appending(log, outputs, labels):
        log.append(1)
        return outputs.mean()

    log = []
    losses = [
        (counting_loss, lambda: (NUM_CALLS, list(SEEN), RNG.getstate())),
        (held, held.told),
        (held.__call__, held.told),
        (closure, of_closure),
        (functools.partial(appending, log), lambda: list(log)),
    ]
    for loss, state in losses:
        before = state()
        layers = [nn.Linear(3, 3), counting_layer]
        chain = profile_chain(
            layers, (torch.ones(2, 3), torch.ones(2)), loss_fn=loss, warm_up=1, repeats=2, progress=False
        )
        assert state() == before and shared == [] and chain.num_layers == 2
        loss(torch.ones(2, 3), None)
        assert state() != before, "it keeps something"


# Attributes of parameters.


class Counter:
    """What a library may hang on a weight: its history of largest values, as for float8."""

    def __init__(self):
        self.largest, self.calls = torch.zeros(4), 0


class Marked(nn.Linear):
    """Keeps counts, an average, a gradient in full precision and objects as attributes of its weight."""

    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("table", torch.ones(8))
        self.weight.seen, self.table.seen = torch.zeros(()), torch.zeros(())
        self.weight.average, self.weight.history = self.weight.detach().clone(), [torch.zeros(2), 3]
        self.weight.names, self.weight.counter = {"calls": np.zeros(2)}, Counter()
        self.weight.main_grad = torch.zeros(8, 8)
        self.weight.register_hook(lambda gradient: self.weight.main_grad.add_(gradient))

    def forward(self, x):
        self.weight.seen += 1
        self.table.seen += 1
        self.weight.average.lerp_(self.weight.detach(), 0.5)
        self.weight.history[0].add_(1)
        self.weight.history.append(4)
        self.weight.names["calls"] += 1
        self.weight.names["last"] = x
        self.weight.counter.largest.copy_(x.detach().abs().amax().expand(4) + 1)
        self.weight.counter.calls += 1
        self.weight.main_grad.add_(1)
        return super().forward(x) * self.table


def test_attributes_of_parameters_are_put_back():
    """Tensors among them were those of the stand-ins, too: measuring counted in them, in silence."""
    layer = Marked()
    layer.weight.average.mul_(2)
    own, average = dict(vars(layer.weight)), layer.weight.average.clone()
    profile_chain([layer], X, **QUICK)
    assert vars(layer.weight).items() == own.items()
    assert not layer.weight.seen and not layer.table.seen and not layer.weight.main_grad.any()
    assert torch.equal(layer.weight.average, average) and own["counter"].calls == 0
    assert not own["counter"].largest.any()
    assert own["names"].keys() == {"calls"} and not own["names"]["calls"].any()
    assert not own["history"][0].any() and own["history"][1:] == [3]
    with attributes_kept([layer]):
        layer.weight.later = 1
    assert vars(layer.weight).items() == own.items()


class Scaled(nn.Parameter):
    """A parameter of a class with a method of its own."""

    def scaled(self):
        return self * self.factor


class OfClass(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Scaled(torch.ones(8))
        self.weight.factor = 2

    def forward(self, x):
        assert isinstance(self.weight, Scaled)
        return x * self.weight.scaled()


def test_parameters_keep_their_class_while_layers_are_measured():
    """They were plain ones: a layer that calls a method of its weight could not be measured."""
    layer = OfClass()
    weight = layer.weight
    [measured] = profile_chain([layer], X, **QUICK).layers
    assert measured.weight_bytes == 32 and layer.weight is weight and type(weight) is Scaled


class Noted(nn.Parameter):
    """A parameter with a place for a value."""

    __slots__ = ("note",)


def test_parameters_of_a_class_with_slots_are_measured():
    """Torch cannot make a plain one to one of these later: an error of Python ended the measurement."""

    class OfSlots(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = Noted(torch.ones(8))
            self.weight.note, self.weight.mark = 2, 3

        def forward(self, x):
            assert isinstance(self.weight, Noted) and self.weight.requires_grad
            return x * self.weight * self.weight.note * self.weight.mark

    layer = OfSlots()
    profile_chain([layer], X, **QUICK)
    assert (layer.weight.note, layer.weight.mark) == (2, 3)


# Tensors of other kinds.


class Neighbours(nn.Module):
    """Keeps who is next to whom in a graph as sparse buffers and as an attribute."""

    def __init__(self):
        super().__init__()
        near = torch.eye(8)
        self.register_buffer("near", torch.sparse_coo_tensor(torch.arange(8).expand(2, 8).clone(), torch.ones(8)))
        self.register_buffer("rows", torch.sparse_csr_tensor(torch.arange(9), torch.arange(8), torch.ones(8)))
        self.linear, self.fixed = nn.Linear(8, 8), near.to_sparse_csc()

    def forward(self, x):
        return torch.sparse.mm(self.near, self.linear(x).t()).t() @ self.rows.to_dense() @ self.fixed.to_dense()


def test_sparse_buffers_are_counted_by_their_parts():
    """An error of torch ended the measurement, which says that a sparse tensor has no memory."""
    layer = Neighbours()
    [measured] = profile_chain([layer], X, **QUICK).layers
    assert layer_sources([layer])[0].build().buffer_bytes == 2 * 8 * 8 + 8 * 4 + (9 + 8) * 8 + 8 * 4
    assert measured.weight_bytes == 4 * 72


def test_what_a_tensor_of_tensors_holds_is_counted():
    """Such a weight has no memory of its own, and nothing could be measured."""
    layer = nn.Linear(8, 8, bias=False)
    layer.weight = nn.Parameter(TwoTensor(torch.ones(8, 8), torch.ones(8, 8)))
    [source] = layer_sources([layer])
    assert source.build().weight_bytes == 2 * 4 * 64


def test_an_expanded_mask_stays_one_row():
    """Its copy had each of its elements in memory, of which the mask has one row."""

    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.register_buffer("mask", torch.ones(1, 8).expand(2**20, 8))

        def forward(self, x):
            assert self.mask.untyped_storage().nbytes() == 32
            return super().forward(x) * self.mask[: len(x)]

    profile_chain([Masked()], X, **QUICK)


def test_what_a_tensor_of_tensors_holds_is_copied():
    """Its copy had the tensors of the original, which may lie on another device."""

    class Ragged(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            rows = [torch.ones(2, 8), torch.ones(3, 8)]
            self.register_buffer("table", torch.nested.nested_tensor(rows, layout=torch.jagged))
            self.table.mark = 2
            self.own = self.table.values().data_ptr()

        def forward(self, x):
            assert self.table.mark == 2 and self.table.values().data_ptr() != self.own
            return super().forward(x) * self.table.values().mean()

    layer = Ragged()
    profile_chain([layer], X, **QUICK)
    assert layer.table.values().data_ptr() == layer.own
