"""Faults of DeepSpeed that show without other processes, or would make them wait for ever.

Each test first shows DeepSpeed's own code at fault: the day that it is mended, the test says so.
"""

from __future__ import annotations

import inspect
import random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer  # noqa: E402
from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: E402
from deepspeed.runtime.pipe import p2p  # noqa: E402
from deepspeed.runtime.pipe.engine import PipelineEngine  # noqa: E402
from deepspeed.runtime.utils import partition_balanced  # noqa: E402
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer  # noqa: E402

from deepspeed_partition.engine import MadPipeEngine, repairs  # noqa: E402
from deepspeed_partition.engine.pipeline.boundary_engine import AnyBoundaryEngine  # noqa: E402
from deepspeed_partition.engine.pipeline.module import Cut, set_boundaries  # noqa: E402
from deepspeed_partition.engine.repartition.parameter_groups import EveryGroup  # noqa: E402


class Engine(MadPipeEngine):
    """An engine without its constructor, on the first of two stages, or on the last one."""

    def __init__(self, *, last: bool = False, **state: Any) -> None:
        self.module = SimpleNamespace(madpipe_cut=Cut("trial"))
        self._why_not_lists = "DeepSpeed's own schedule runs here"
        self.stage_id, self.num_stages = int(last), 2
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1
        self.is_pipe_partitioned = self.is_grad_partitioned = False
        self.has_attention_mask = self.has_bool_tensors = False
        self.using_bf16_optimizer = self._running_engine_backward = self._force_grad_boundary = False
        self.engine_timers = SimpleNamespace(backward_timers=[], backward_inner_timers=[])
        self.dynamic_shape, self.device, self._grad_layer_buf, self.grad_layer = (
            True,
            torch.device("cpu"),
            [],
            None,
        )
        self.__dict__.update(state)

    def wall_clock_breakdown(self) -> bool:
        return False

    def __del__(self) -> None:
        pass


def buffers(**kinds: Any) -> dict[str, list[Any]]:
    return {name: [kinds.get(name)] for name in ("inputs", "outputs", "labels", "output_tensors")}


@pytest.fixture
def sent(monkeypatch):
    """What is sent, in the place of sending it."""
    tensors: list[Any] = []
    monkeypatch.setattr(p2p, "send", lambda tensor, stage: tensors.append(tensor))
    return tensors


def test_integers():
    """``seed_layers`` adds the number of a layer to its seed."""
    parts = partition_balanced([3, 1, 2, 4], 2)
    if all(type(cut) is int for cut in parts):
        pytest.skip("this DeepSpeed gives Python's integers")
    with pytest.raises(TypeError):
        random.seed(1234 + parts[1])
    module = SimpleNamespace(_topo=SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=0)), global_rank=0)
    module._set_bounds = lambda start, stop: None
    set_boundaries(module, parts)
    assert module.parts == list(parts) and all(type(cut) is int for cut in module.parts)
    random.seed(1234 + module.parts[1])


def test_floats_without_gradient(sent):
    """They are sent a gradient of zeros, and take no part in the backward."""

    def received() -> tuple[Any, Any]:
        mask, hidden = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        (hidden * 3).sum().backward()
        return mask, hidden

    with pytest.raises(AssertionError):
        PipelineEngine._exec_send_grads(Engine(last=True, pipe_buffers=buffers(inputs=received())), 0)
    assert not sent
    Engine(last=True, pipe_buffers=buffers(inputs=received()))._exec_send_grads(0)
    assert [tensor.tolist() for tensor in sent] == [[0.0, 0.0], [3.0, 3.0]]

    def outputs() -> tuple[Any, Any, Any]:
        weight = torch.ones(2, requires_grad=True)
        gradients = [torch.full((2,), 5.0), torch.full((2,), 7.0)]
        return weight, gradients, buffers(outputs=(torch.ones(2), weight * 2))

    weight, gradients, slots = outputs()
    with pytest.raises(RuntimeError, match="does not require grad"):
        PipelineEngine._exec_backward_pass(Engine(pipe_buffers=slots, grad_layer=gradients, optimizer=object()), 0)
    weight, gradients, slots = outputs()
    engine = Engine(pipe_buffers=slots, grad_layer=gradients, optimizer=object())
    engine._exec_backward_pass(0)
    assert weight.grad.tolist() == [14.0, 14.0]
    assert engine.grad_layer is gradients, "the next ones arrive in the same buffers"


def test_attention_mask_flag(sent):
    """A boundary of one tensor under ``has_attention_mask``, which NeoX always sets."""
    hidden = torch.randn(3, 4)
    described: list[Any] = []

    def engine() -> Engine:
        made = Engine(pipe_buffers=buffers(outputs=hidden), has_attention_mask=True)
        made._send_tensor_meta = lambda boundary, stage: described.append(boundary)
        return made

    PipelineEngine._exec_send_activations(engine(), 0)
    assert len(sent) == 3 and sent[-1].dtype == torch.float16, "DeepSpeed does not split it by rows any more"
    sent.clear()
    described.clear()
    ours = engine()
    ours._exec_send_activations(0)
    assert sent == [hidden] == described and ours.has_attention_mask


def test_buffers_of_another_type():
    """Integers came first in the activations, and the first gradient is that of a float."""
    engine = Engine()
    PipelineEngine._allocate_or_extend_buffers(engine, 0, [8], torch.int64)
    again = PipelineEngine._allocate_or_extend_buffers(engine, 0, [4], torch.float32)
    assert again.dtype == torch.int64, "DeepSpeed looks at the type now"
    assert engine._allocate_or_extend_buffers(0, [4], torch.float32).dtype == torch.float32


def test_shapes():
    """DeepSpeed leaves it to the user to forget the shapes of the batch before."""
    stock = inspect.getsource(PipelineEngine.train_batch)
    assert "reset_activation_shape" not in stock or "if self.curriculum" in stock  # of DeepSpeed, in old versions
    assert "reset_activation_shape" in inspect.getsource(MadPipeEngine._train_batch)


def test_nothing_to_train():
    """The optimizer of a stage without parameters: refused before, as ``weights_move_as_they_are`` shows."""
    with pytest.raises(ValueError, match="empty parameter list"):
        torch.optim.AdamW([])


def test_numbers_of_groups():
    """ZeRO-1 meets the other stages once per group: where their numbers differ, one waits for ever."""
    meetings: list[int] = []

    def stage(num_groups: int) -> Any:
        optimizer = object.__new__(DeepSpeedZeroOptimizer)
        groups = {index: [] for index in range(num_groups)}
        vars(optimizer).update(
            bit16_groups=[[]] * num_groups, averaged_gradients=groups, params_in_partition=groups,
            cpu_offload=False,
            has_moe_layers=False, _muon_update_lacks_loss_scale=lambda index: False,
        )  # fmt: skip

        def meet(gradients: Any, parameters: Any, norm_type: int = 2) -> Any:
            meetings.append(num_groups)
            return torch.tensor(3.0 if len(meetings) % 2 else 4.0)

        optimizer.get_grad_norm_direct = meet
        return optimizer

    stage(1).scaled_global_norm(2)
    assert len(meetings) == 1, "DeepSpeed meets as often as the stage with the most groups now"
    meetings.clear()
    one = stage(1)
    repairs._take_part_in_norms(one, num_missing=1)
    assert one.scaled_global_norm(2) == pytest.approx(5.0) and len(meetings) == 2


def test_norms_that_are_not_finite_stay_so():
    optimizer = SimpleNamespace(
        scaled_global_norm=lambda norm_type: torch.tensor(3.0), get_grad_norm_direct=lambda *_: torch.tensor(-1.0)
    )
    repairs._take_part_in_norms(optimizer, num_missing=1)
    assert optimizer.scaled_global_norm(2) == float("inf")


def test_only_a_tied_copy(monkeypatch):
    """bf16: a stage that counts no parameter in the norm has nothing to stack."""
    optimizer = object.__new__(BF16_Optimizer)
    optimizer.get_grads_for_norm = lambda for_clipping=False: ([], {})
    assert optimizer.get_grads_for_norm() == ([], {})
    with pytest.raises(RuntimeError):
        torch.stack([])
    repairs._allow_nothing_to_count(optimizer, torch.device("cpu"))
    [zero], experts = optimizer.get_grads_for_norm()
    assert zero.tolist() == [0.0] and experts == {}
    assert optimizer.get_grads_for_norm(for_clipping=True) == ([], {})


def test_scheduler_of_dropped_groups():
    """DeepSpeed drops the first of two groups, whose parameters are elsewhere, and rates go to the wrong one."""
    source = inspect.getsource(DeepSpeedEngine._configure_optimizer)
    assert 'if len(pg["params"]) != 0' in source, "DeepSpeed keeps empty groups now"

    def made() -> tuple[Any, Any, list[Any]]:
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([{"params": [], "lr": 1.0}, {"params": [weight], "lr": 2.0}])
        rates = [lambda step: 0.5**step, lambda step: 0.1**step]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        groups = list(optimizer.param_groups)
        optimizer.param_groups[:] = groups[1:]
        optimizer.step()
        return optimizer, scheduler, groups

    optimizer, scheduler, _ = made()
    try:
        scheduler.step()
        wrong = optimizer.param_groups[0]["lr"] != pytest.approx(0.2)
    except ValueError:  # newer versions of torch see that the numbers differ
        wrong = True
    assert wrong
    optimizer, scheduler, groups = made()
    EveryGroup(optimizer, groups).show_to(scheduler)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def test_other_cuts_are_run_by_deepspeed(sent):
    """Who does not ask for a plan gets DeepSpeed's transfers as they are."""
    engine = Engine(last=True, pipe_buffers=buffers(inputs=(torch.ones(2, requires_grad=True),)))
    engine.module.madpipe_cut = None
    with pytest.raises(AssertionError):
        AnyBoundaryEngine._exec_send_grads(engine, 0)


def test_gradients_are_divided_once():
    """By the number of micro-batches, on the last stage, which sends them back so."""
    gradient = torch.ones(2)
    engine = Engine(gradient_accumulation_steps=lambda: 4, _scale_wrt_gas=True)
    if "_backward_prologue_per_tensor" not in vars(PipelineEngine):
        divided = PipelineEngine._backward_prologue_per_tensor(engine, gradient)
        assert divided.tolist() == [0.25, 0.25], "this DeepSpeed is the one that divides on every stage"
    assert engine._backward_prologue_per_tensor(gradient) is gradient
