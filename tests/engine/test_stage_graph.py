"""The two ends of a stage's graph: nothing is kept that the backward does not need, and gradients are right."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from deepspeed_partition.engine.runtime.autograd_boundary import Arrived, Departed, detached  # noqa: E402
from deepspeed_partition.engine.runtime.shared_outputs import shared_places  # noqa: E402
from deepspeed_partition.engine.runtime.transfers import HEADER_SIZE, Shapes  # noqa: E402


def storage(tensor):
    return weakref.ref(tensor.untyped_storage())


def test_a_stage_between_two_others():
    """The gradients are those of the whole graph, for a boundary of floats, integers and booleans."""
    torch.manual_seed(1)
    inputs = torch.randn(3, 4), torch.arange(3), torch.randn(3, 4), torch.tensor([True, False, True])
    weight = torch.randn(4, 4, requires_grad=True)

    def stage(x, rows, y, flags):
        hidden = (x @ weight)[rows] * flags[:, None]
        return hidden.tanh(), rows, hidden * y

    whole = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    outputs = stage(*whole)
    sent_back = torch.randn(3, 4), torch.randn(3, 4)
    torch.autograd.backward([outputs[0], outputs[2]], sent_back)
    expected, weight.grad = (whole[0].grad, whole[2].grad, weight.grad), None

    arrived = Arrived(inputs)
    departed = Departed(stage(*arrived.clone()))
    departed.give(sent_back)
    departed.root.backward()
    for found, wanted in zip((*arrived.gradients(), weight.grad), expected, strict=True):
        assert torch.equal(found, wanted)


def test_what_the_backward_does_not_need_is_freed():
    """The sum of a stage's input needs neither of them; DeepSpeed keeps both, and a copy."""
    given = torch.ones(5)
    memory = given.data_ptr()
    arrived = Arrived(given)
    x = arrived.clone()
    assert x.data_ptr() == memory, "nothing is copied"
    output = x + 1
    departed = Departed(output)
    kept = storage(given), storage(output)
    del given, x, output
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
    departed.give((torch.full((5,), 2.0),))
    departed.root.backward()
    assert arrived.gradients()[0].tolist() == [2.0] * 5


def test_a_graph_ends_with_its_stage():
    """Without waiting for the collector of circles."""

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            alive.append(weakref.ref(ctx))
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    alive = []
    gc.disable()
    try:
        arrived = Arrived(torch.ones(2))
        departed = Departed(Kept.apply(arrived.clone()))
        departed.give((torch.ones(2),))
        departed.root.backward()
        assert arrived.gradients()[0].tolist() == [2, 2]
        del departed
        assert alive[0]() is None
    finally:
        gc.enable()


def test_gradients_that_do_not_come_back_are_zeros():
    arrived = Arrived((torch.ones(2), torch.ones(3, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int64)))
    used, _, _ = arrived.clone()
    departed = Departed(used * 3)
    departed.give((torch.ones(2),))
    departed.root.backward()
    first, second = arrived.gradients()
    assert first.tolist() == [3, 3]
    assert second.tolist() == [0, 0, 0] and second.dtype == torch.bfloat16


def test_an_output_that_needs_no_gradient():
    assert not Departed((torch.ones(2), torch.ones(2) > 0)).root.requires_grad
    with torch.no_grad():
        given = torch.ones(2)
        assert Arrived(given).clone() is given


def test_a_layer_may_change_its_input_in_place():
    before = torch.full((3,), 2.0, requires_grad=True)
    output = before * 3
    departed = Departed(output)
    arrived = Arrived(output.detach())
    changed = torch.nn.functional.relu(arrived.clone(), inplace=True)
    (changed * 5).sum().backward()
    departed.give(arrived.gradients())
    departed.root.backward()
    assert before.grad.tolist() == [15, 15, 15]


def test_a_change_in_place_of_what_the_stage_before_needs_is_told():
    """As in one process: the sigmoid's backward needs its output."""
    before = torch.full((3,), 2.0, requires_grad=True)
    output = before.sigmoid()
    departed = Departed(output)
    arrived = Arrived(output.detach())
    torch.nn.functional.relu(arrived.clone(), inplace=True).sum().backward()
    departed.give(arrived.gradients())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        departed.root.backward()


@pytest.mark.parametrize(
    "boundary",
    [
        torch.zeros(3, 5),
        (torch.zeros(()), torch.zeros(0, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)),
        (torch.zeros(1, dtype=torch.bfloat16),),
    ],
)
def test_shapes_are_told(boundary):
    shapes = Shapes.of(boundary)
    header = shapes.header()
    assert header.shape == (HEADER_SIZE,)
    assert Shapes.from_header(header) == shapes
    assert Shapes.of(shapes.empty(torch.device("cpu"))) == shapes


def test_too_many_shapes_to_tell():
    with pytest.raises(RuntimeError, match="90 tensors cross one cut"):
        Shapes.of(tuple(torch.zeros(1) for _ in range(90))).header()


def test_a_header_tells_which_tensors_are_one():
    one, other = torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)
    for boundary in ((one, other, one), (one, one), (one, torch.zeros(2, 3))):
        told = Shapes.from_header(Shapes.of(boundary).header())
        assert told == Shapes.of(boundary)
        made = told.empty(torch.device("cpu"))
        assert [made[0] is each for each in made] == [one is each for each in boundary]


def test_tensors_that_share_elements():
    """Halves of one memory beside each other share none, and neither do a tensor and itself."""
    whole, other = torch.zeros(3, 8), torch.zeros(3, 8)
    left, right = whole.chunk(2, dim=1)
    assert shared_places((left, right, other)) is None
    assert shared_places((whole, other, whole)) is None
    assert shared_places((whole, whole[:0])) is None
    assert shared_places((other, left, right, whole)) == (1, 3)
    assert shared_places((left, whole[:, 3:5])) == (0, 1)
    assert shared_places((whole.t(), other, whole[1])) == (0, 2)


@pytest.mark.parametrize("several", [False, True])
def test_what_a_layer_keeps_of_training_and_writes_in_evaluation_is_copied(several):
    """It has a graph still: the next micro-batch's forward wrote it before it had left."""
    kept = torch.ones(3, requires_grad=True) * 2
    with torch.no_grad():
        left = detached((kept, kept) if several else kept)
        kept.mul_(2)
    assert all(tensor.tolist() == [2.0] * 3 for tensor in (left if several else (left,)))
    assert detached(kept).data_ptr() == kept.data_ptr(), "of training nothing is copied"
