"""What a step that is given up puts back, and what goes along with moving layers: in one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from deepspeed_partition.engine.pipeline.before_step import Buffers  # noqa: E402
from deepspeed_partition.engine.repartition.kept_along import KeptAlong  # noqa: E402


def test_buffers_that_a_step_makes_are_gone_when_it_is_given_up() -> None:
    """A module that had none was not looked at: it kept what a step that never was had made of its statistics."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    buffers = Buffers(net)
    restore = buffers.before_step(all_of_them=False)
    net[0].register_buffer("total", torch.tensor(1.0))
    restore()
    assert "total" not in dict(net.named_buffers())
    net[0].register_buffer("total", torch.tensor(1.0))
    restore = buffers.before_step(all_of_them=False)
    net[0].total += 1
    net[1].running_mean.fill_(3)
    restore()
    assert net[0].total == 1 and net[1].running_mean.tolist() == [0, 0]


def test_buffers_of_scripted_modules_are_put_back() -> None:
    """Their table is no dict: a step that was given up ended with an AttributeError."""
    net = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), torch.jit.script(nn.BatchNorm1d(2)))
    restore = Buffers(net).before_step(all_of_them=False)
    net[1].running_mean.fill_(3)
    restore()
    assert net[1].running_mean.tolist() == [0, 0]


def test_buffers_made_in_inference_mode_are_put_back() -> None:
    """A table that grew in an evaluation has no count of changes: the next step ended, on one rank alone."""
    net = nn.Linear(2, 2)
    with torch.inference_mode():
        net.register_buffer("small", torch.zeros(2))
        net.register_buffer("large", torch.zeros(2**19))
    buffers = Buffers(net)
    for all_of_them in (False, True):
        restore = buffers.before_step(all_of_them=all_of_them)
        with torch.inference_mode():
            net.small.fill_(3)
            net.large.fill_(3 * all_of_them)
        restore()
        assert net.small.tolist() == [0, 0] and not net.large.any()


def test_a_list_for_each_group_goes_with_its_group_where_groups_have_the_same_shapes() -> None:
    """Slow weights of a second block went along with the first one's, and were lost where that left."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([{"params": list(each.parameters())} for each in (first, second)], lr=0.1)
    slow = [[weight.detach().clone() for weight in group["params"]] for group in optimizer.param_groups]
    optimizer.slow = [list(each) for each in slow]
    along = KeptAlong(optimizer, optimizer.param_groups)
    for layer, tensors in zip((first, second), slow, strict=True):
        for weight, tensor in zip(layer.parameters(), tensors, strict=True):
            assert [value for value in optimizer.state[weight].values() if value is tensor] == [tensor]
    along.give_back()
    assert all(
        own is tensor
        for group, tensors in zip(optimizer.slow, slow, strict=True)
        for own, tensor in zip(group, tensors, strict=True)
    )
