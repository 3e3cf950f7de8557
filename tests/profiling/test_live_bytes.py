"""LiveBytes on steps whose tensors can be counted by hand. A float has 4 bytes."""

from __future__ import annotations

import threading

import torch
from torch import nn

from deepspeed_partition.profiling import LiveBytes
from deepspeed_partition.profiling.live_bytes import SwitchedCounter


def test_counts_what_is_created_until_it_is_freed():
    with LiveBytes() as live:
        a = torch.zeros(10)
        b = torch.zeros(20)
        assert live.current_bytes == 120
        del a
        assert live.current_bytes == 80
        c = b + 1
        assert (live.current_bytes, live.peak_bytes) == (160, 160)
    del b, c
    assert (live.current_bytes, live.peak_bytes) == (0, 160)


def test_a_storage_counts_once_whatever_looks_at_it():
    with LiveBytes() as live:
        a = torch.zeros(10, 10)
        views = [a.t(), a[3:5], a.view(-1), a.expand(7, 10, 10), a.detach()]
        a.add_(1)
        assert live.current_bytes == 400
        del a
        assert live.current_bytes == 400  # the views hold it
        del views
        assert live.current_bytes == 0


def test_what_others_made_can_be_counted_and_what_was_counted_left_out():
    with LiveBytes() as live:
        mine = torch.zeros(10)
        received: list[torch.Tensor] = []
        helper = threading.Thread(target=lambda: received.append(torch.zeros(20)))
        helper.start()
        helper.join()
        assert live.current_bytes == 40  # modes are a thread's own
        live.include(received)
        live.include(received)
        assert (live.current_bytes, live.peak_bytes) == (120, 120)
        assert live.leave_out([mine, mine.view(2, 5), torch.zeros(0)]) == 40
        assert live.leave_out([mine]) == 0
        mine.add_(1)
        assert live.current_bytes == 80
        del mine
        received.clear()
        assert (live.current_bytes, live.peak_bytes) == (0, 120)


def test_the_counter_of_a_backward_can_be_switched_within_it():
    """A mode that is entered in a hook is over with the node that runs."""
    x = torch.zeros(10, requires_grad=True)
    switch, before, after = SwitchedCounter(), LiveBytes(), LiveBytes()
    switch.counter = before
    y = x.exp()
    y.register_hook(lambda _: setattr(switch, "counter", after))
    z = torch.cat([y, y])
    with switch:
        z.backward(torch.ones(20))
    assert before.current_bytes == 0 and before.peak_bytes >= 40
    assert after.current_bytes == after.peak_bytes == 40  # the gradient of x


def test_what_existed_before_counts_only_where_included():
    old, included = torch.zeros(10), torch.zeros(5)
    with LiveBytes(include=[included, included.view(5, 1)]) as live:
        assert live.current_bytes == live.peak_bytes == 20
        old.add_(1)
        old.view(2, 5)
        assert live.current_bytes == 20
    del included
    assert live.current_bytes == 0


def test_tensors_made_from_python_numbers_count():
    with LiveBytes() as live:
        numbers = torch.tensor([1.0, 2.0, 3.0])
        assert live.current_bytes == 12
        del numbers


def test_a_resized_storage_counts_with_its_new_size():
    with LiveBytes() as live:
        a = torch.zeros(10)
        a.resize_(100)
        assert live.current_bytes == 400
        del a
    assert live.current_bytes == 0


def test_reset_peak_forgets_what_is_gone():
    with LiveBytes() as live:
        a = torch.zeros(100)
        del a
        b = torch.zeros(10)
        live.reset_peak()
        assert live.peak_bytes == 40
        del b


def test_a_whole_training_step():
    net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))
    weights = 4 * (8 * 16 + 16 * 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x = torch.zeros(5, 8)
    with LiveBytes(include=net.parameters()) as live:
        loss = net(x).sum()
        # Kept for the backward: the output of tanh, which the second layer keeps, too. And the loss.
        assert live.current_bytes == weights + 4 * 5 * 16 + 4
        loss.backward()
        del loss
        assert live.current_bytes == 2 * weights
        optimizer.step()
        assert live.current_bytes == 3 * weights
        optimizer.zero_grad()
        assert live.current_bytes == 2 * weights
    assert live.peak_bytes >= 3 * weights


def test_sparse_gradients_count_as_indices_and_values():
    table = nn.Embedding(1000, 4, sparse=True)
    indices = torch.tensor([1, 2, 2])
    with LiveBytes() as live:
        table(indices).sum().backward()
        gradient = table.weight.grad
        assert gradient is not None and gradient.layout == torch.sparse_coo
        values = 4 * gradient._values().numel()
        assert values <= live.current_bytes <= values + 8 * gradient._indices().numel()


def test_meta_tensors_take_no_memory():
    with LiveBytes() as live:
        torch.zeros(10, device="meta")
        assert live.peak_bytes == 0
