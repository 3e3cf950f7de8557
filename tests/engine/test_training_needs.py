"""What an optimizer's step needs, tried out; and what training needs, laid upon the layers of a chain."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from deepspeed.pipe import TiedLayerSpec  # noqa: E402
from torch import nn  # noqa: E402

from deepspeed_partition.engine.pipeline.batch_attempt import BatchGivenUpError  # noqa: E402
from deepspeed_partition.engine.repartition.part_descriptions import (  # noqa: E402
    changed_attributes,
    remember_attributes,
)
from deepspeed_partition.engine.warmup import run_platform  # noqa: E402
from deepspeed_partition.engine.warmup.run_platform import num_states, state_bytes, training_bytes  # noqa: E402
from deepspeed_partition.engine.warmup.stage_profiler import Measuring  # noqa: E402
from deepspeed_partition.engine.warmup.training_needs import (  # noqa: E402
    OptimizerStep,
    TrainingNeeds,
    optimizer_step,
    with_training_needs,
)
from deepspeed_partition.profiling import counted_memory, layer_profiles, measure_stage  # noqa: E402
from deepspeed_partition.profiling.layers import measured_chain  # noqa: E402
from deepspeed_partition.schedule.instructions import Compute  # noqa: E402

NUMBERS = 2**18
OPTIMIZERS: dict[str, tuple[Any, OptimizerStep]] = {
    "SGD": (
        lambda weights: torch.optim.SGD(weights, lr=0.1),
        OptimizerStep(of_one=0, of_several=0, at_once=False),
    ),
    "momentum": (
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        OptimizerStep(of_one=0, of_several=0, at_once=False),
    ),
    "Adam": (torch.optim.Adam, OptimizerStep(of_one=2, of_several=3, at_once=False)),
    "AdamW, all at once": (
        lambda weights: torch.optim.AdamW(weights, foreach=True),
        OptimizerStep(of_one=1, of_several=1, at_once=True),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_trial_tells_what_a_step_needs(name):
    make, expected = OPTIMIZERS[name]
    assert optimizer_step(make([nn.Parameter(torch.zeros(3))])) == expected
    for num_tensors, copies in ((1, expected.of_one), (5, expected.of_several * (5 if expected.at_once else 1))):
        weights = [nn.Parameter(torch.zeros(NUMBERS)) for _ in range(num_tensors)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer = make(weights)
        optimizer.step()
        with counted_memory() as memory:
            optimizer.step()
        assert abs(memory.peak_bytes / (4 * NUMBERS) - copies) < 0.01


class OfMatrices(torch.optim.SGD):
    """Takes weights of two dimensions alone, as torch's Muon does."""

    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, lr=lr, momentum=momentum)
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            if weight.ndim != 2:
                raise ValueError(f"a matrix is needed, not {tuple(weight.shape)}")


def test_an_optimizer_of_matrices_is_tried_out(caplog):
    """It was taken for Adam, with shapes in a line that no weight of the program has."""
    with caplog.at_level("INFO"):
        optimizer = OfMatrices([nn.Parameter(torch.zeros(3, 2))])
        assert optimizer_step(optimizer) == OptimizerStep(of_one=0, of_several=0, at_once=False)
        assert num_states(optimizer) == 1
    assert "could not be tried out" not in caplog.text


def test_what_is_offloaded_takes_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for GPUs counted the copies and states that offload_optimizer keeps on the CPU, and tried a step."""
    master = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.AdamW([master])
    engine: Any = SimpleNamespace(
        module=nn.Linear(10, 1, bias=False, device="meta"), basic_optimizer=optimizer,
        optimizer=SimpleNamespace(single_partition_of_fp32_groups=[master]),
    )  # fmt: skip
    assert training_bytes(engine) == (
        40 + 3 * 4000,
        40,
    )
    device = SimpleNamespace(device_name=lambda: "cuda", current_device_name=lambda: "cuda:0")
    monkeypatch.setattr(run_platform, "get_accelerator", lambda: device)
    assert training_bytes(engine) == (40, 40)
    assert optimizer_step(optimizer) == OptimizerStep(of_one=0, of_several=0, at_once=False)


class Around(torch.optim.Optimizer):
    """An optimizer around another one, as Lookahead is widely copied."""

    def __init__(self, base):
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, {}

    def step(self, closure=None):
        return self.base.step(closure)


def test_why_an_optimizer_cannot_be_tried_out_is_said(caplog):
    """An error from within was all: 'list' object has no attribute 'param_groups'."""
    with caplog.at_level("INFO"):
        optimizer = Around(torch.optim.Adam([nn.Parameter(torch.zeros(3))]))
        assert optimizer_step(optimizer) == OptimizerStep(of_one=2, of_several=2, at_once=True)
        assert num_states(optimizer) == 2
    told = [each for each in caplog.messages if "could not be tried out" in each]
    assert len(told) == 2 and all("Around(weights) makes none" in each for each in told), told
    assert all("made of something else, such as an optimizer" in each for each in told), told


def test_what_gives_a_batch_up_is_no_failure_of_a_layer():
    """It was said that a layer could not be watched: UntriedLossError; and bytes were not measured."""

    class GivesUpError(BatchGivenUpError):
        pass

    def run(_):
        raise GivesUpError

    clock = SimpleNamespace(num_steps=1)
    profiler = SimpleNamespace(
        _memory=SimpleNamespace(forward=nullcontext), _computed_from=0.0, _computed_until=0.0, clock=clock
    )
    with pytest.raises(GivesUpError):
        Measuring.execute(profiler, Compute("F", 0, micro_batch=0, slot=0), run)


def test_lists_that_torch_makes_of_weights_are_no_change_of_a_layer():
    """It was said of every recurrent layer that nobody else has its _flat_weights."""
    layer = nn.GRU(3, 4)
    remember_attributes([layer])
    layer.weight_ih_l0 = nn.Parameter(torch.zeros(12, 3))
    layer._init_flat_weights()
    assert not any(changed_attributes(layer).values())


def test_a_trainer_that_a_hook_gives_a_layer_is_no_change_of_the_layer():
    """A layer that read trainer.global_step was said to have changed the Trainer while it ran."""

    class Trainer:
        pass

    Trainer.__module__ = "pytorch_lightning.trainer.trainer"

    class Meter:
        pass

    layer = nn.Linear(2, 2)
    layer.trainer, layer.meter, layer.own = None, None, Meter()
    remember_attributes([layer], again=True)
    layer.trainer, layer.meter, layer.own.number = Trainer(), Meter(), 1
    [changed] = changed_attributes(layer).values()
    assert sorted(changed) == ["meter", "own"]


def test_needs_by_layer():
    layers = [nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 4)]
    layers[0].bias.requires_grad_(False)
    x = torch.randn(5, 4)
    measured, _ = measure_stage(layers, x, device="cpu", warm_up=1, repeats=1)
    chain = measured_chain(
        measured, name="by hand", input_bytes=80, micro_batch_size=5, device=torch.device("cpu"), warn=print
    )
    assert list(chain.layers) == layer_profiles(measured)
    specs = [TiedLayerSpec("both", nn.Linear, 4, 3), nn.BatchNorm1d(3), TiedLayerSpec("both", nn.Linear, 4, 3)]
    some = TrainingNeeds(kept=8, gradient=4, accumulated=0, reduction=0, optimizer=12, before=0, at_once=False)
    more = TrainingNeeds(kept=4, gradient=4, accumulated=0, reduction=2, optimizer=12, before=0, at_once=False)
    first, middle, last = with_training_needs(chain, measured, [some, more], specs).layers
    # A frozen bias is kept as it is; batch normalization has buffers of 3 and 3 numbers and a count, and copies.
    assert first.training_bytes == 4 * (12 + 3) + (8 + 4) * 12
    assert middle.training_bytes == 4 * 6 + 2 * (4 * 6 + 8) + (8 + 4) * 6
    assert [layer.gradient_bytes for layer in (first, middle, last)] == [4 * 12, 4 * 6, 4 * 16]
    assert [layer.first_backward_bytes for layer in (first, middle, last)] == [0, 0, 0]
    assert [layer.reduction_bytes for layer in (first, middle, last)] == [2 * 12, 2 * 6, 2 * 16]
    assert [layer.optimizer_transient_bytes for layer in (first, middle, last)] == [12 * 12, 12 * 3, 12 * 12]
    assert [layer.shared_weights for layer in (first, middle, last)] == [
        (("tied_modules.both", 60),), (), (("tied_modules.both", 64),),
    ]  # fmt: skip
    # 12 numbers may come behind the 4 or 12 of the shared layers, 3 behind 4 (a step over 12 needs more).
    one_by_one = TrainingNeeds(
        kept=8, gradient=4, accumulated=0, reduction=0, optimizer=8, before=4, at_once=False
    )
    in_order = with_training_needs(chain, measured, [one_by_one], specs).layers
    needed = [layer.optimizer_transient_bytes for layer in in_order]
    assert needed == [8 * 12 + 4 * 12, 8 * 3 + 4 * 4, 8 * 12 + 4 * 12]
    alone = with_training_needs(chain, measured, [one_by_one], [nn.Linear(4, 3), specs[1], nn.Linear(3, 4)]).layers
    assert [layer.optimizer_transient_bytes for layer in alone] == [8 * 12, 8 * 3 + 4 * 3, 8 * 12 + 4 * 12]
    summed = replace(some, gradient=8, accumulated=4)
    of_both = with_training_needs(chain, measured, [summed], specs).layers
    assert [(layer.gradient_bytes, layer.first_backward_bytes) for layer in of_both] == [
        (8 * 12, 4 * 12), (8 * 6, 4 * 6), (8 * 16, 4 * 16),
    ]  # fmt: skip
    at_once = TrainingNeeds(kept=8, gradient=4, accumulated=0, reduction=0, optimizer=12, before=0, at_once=True)
    assert with_training_needs(chain, measured, [at_once], specs).layers[2].optimizer_transient_bytes == 12 * 16


def test_modules_in_lists_and_plain_tensors_are_kept_with_their_layer():
    """A teacher in a list, larger than its layer, took nothing."""
    teacher, unrelated = nn.Linear(100, 100), torch.zeros(7, device="meta")
    teacher.register_buffer("table", torch.zeros(50))
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[0].tools = {"teachers": [teacher], "again": teacher.weight, "weights": layers[2].weight}
    layers[1].teacher, layers[1].positions, layers[1].other = (
        [teacher],
        SimpleNamespace(of=torch.zeros(30)),
        unrelated,
    )
    layers[2].seen = [torch.zeros(20)[:5], layers[1], layers[2].weight * 2]
    measured, _ = measure_stage(layers, torch.randn(5, 4), device="cpu", warm_up=1, repeats=1)
    sizes = [4 * (10_100 + 50), 4 * 30, 4 * 20]
    assert [layer.hidden_bytes for layer in measured] == sizes
    chain = measured_chain(
        measured, name="by hand", input_bytes=80, micro_batch_size=5, device=torch.device("cpu"), warn=print
    )
    needs = TrainingNeeds(kept=8, gradient=4, accumulated=0, reduction=0, optimizer=0, before=0, at_once=False)
    with_needs = with_training_needs(chain, measured, [needs], layers).layers
    assert [layer.training_bytes for layer in with_needs] == [(4 + 8 + 4) * 20 + size for size in sizes]


class Whitened(torch.optim.Optimizer):
    """Keeps, as Shampoo does, a square matrix for each dimension of a weight, in a list."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None and not self.state[weight]:
                self.state[weight].update(step=torch.zeros(()), factors=[torch.eye(n) for n in weight.shape])


@pytest.mark.parametrize("has_stepped", [False, True])
def test_states_are_counted_by_their_own_shapes(has_stepped: bool) -> None:
    """They were taken to be as many copies of a weight as of a vector of two numbers: too many, or too few."""
    matrix, vector = nn.Parameter(torch.zeros(30, 50)), nn.Parameter(torch.zeros(40))
    counts = {
        torch.optim.Adafactor: 4 * (30 + 50 + 40),
        torch.optim.AdamW: 2 * 4 * (1500 + 40),
        torch.optim.SGD: 0,
        Whitened: 4 * (30**2 + 50**2 + 40**2),
    }
    for kind, num_bytes in counts.items():
        optimizer = kind([matrix, vector], lr=0.1)
        if has_stepped:
            matrix.grad, vector.grad = torch.ones_like(matrix), torch.ones_like(vector)
            optimizer.step()
        assert state_bytes(optimizer) == num_bytes, kind
