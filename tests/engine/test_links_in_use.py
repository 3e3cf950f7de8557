"""What real messages say of a link, from instants by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed")

from deepspeed_partition.engine.runtime.tracing import DeviceTrace
from deepspeed_partition.engine.warmup.stage_profiler import links_of
from deepspeed_partition.planner.warm_up_report import LinkUse
from deepspeed_partition.schedule.instructions import Message

F, B = ([Message(direction, 0, number) for number in range(3)] for direction in "FB")


def part(sent: dict[Message, float], received: dict[Message, tuple[float, float]], num_bytes: int) -> DeviceTrace:
    return DeviceTrace(
        computed=[], sent=sent, received=received, received_bytes=dict.fromkeys(received, num_bytes),
        clock_error_seconds=0.0,
    )  # fmt: skip


def test_a_message_begins_when_it_is_there_wanted_and_let_through():
    """Each of the three waits for another one of these; the gradients, for none."""
    first = part({F[0]: 2.0, F[1]: 3.0, F[2]: 4.0}, {B[0]: (1.0, 10.5), B[1]: (2.0, 20.5)}, 30)
    second = part({B[0]: 10.0, B[1]: 20.0}, {F[0]: (1.0, 3.0), F[1]: (5.0, 6.0), F[2]: (5.0, 9.0)}, 40)
    # F0 was posted early and sent at 2; F1 was sent at 3 and posted at 5; F2 was let through at 6.
    [use] = links_of([[first], [second]], [0, 1])
    assert use == LinkUse(
        link=(0, 1), forward_bytes=40, forward_seconds=1.0, backward_bytes=30, backward_seconds=0.5
    )


def test_medians_are_taken_over_all_steps():
    steps = [
        (part({F[0]: 0.0}, {B[0]: (0.0, seconds)}, 8), part({B[0]: 0.0}, {F[0]: (0.0, 2 * seconds)}, 8))
        for seconds in (1.0, 5.0, 1.5)
    ]
    [use] = links_of([[first for first, _ in steps], [second for _, second in steps]], [0, 1])
    assert (use.forward_seconds, use.backward_seconds) == (3.0, 1.5)


def test_clocks_that_differ_by_more_than_a_message_takes():
    [use] = links_of(
        [[part({F[0]: 5.0}, {B[0]: (0.0, 4.0)}, 8)], [part({B[0]: 1.0}, {F[0]: (0.0, 4.9)}, 8)]], [0, 1]
    )
    assert use.forward_seconds == 0.0 and use.bandwidth is None


def test_without_recorded_steps_there_is_nothing_to_say():
    assert links_of([[], []], [0, 1]) == ()
