"""The largest and the strangest values that may be asked for: an answer or a sentence, never an overflow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepspeed_partition import Chain, InfeasibleError, LayerProfile, Platform, make_plan, replay
from deepspeed_partition.planner.units import printable, shown
from tests.planner.instances import chain

LAYER = LayerProfile(name="a", forward_seconds=1, backward_seconds=1, weight_bytes=1, output_bytes=1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layers", [1], "layers is .1., not a sequence of LayerProfile"),
        ("layers", 5, "layers is 5, not a sequence of LayerProfile"),
        ("layers", [], "at least one layer"),
        ("micro_batch_size", True, "micro_batch_size is True, not a whole number"),
        ("micro_batch_size", 0, "micro_batch_size is 0: it must be a whole number from 1"),
        ("micro_batch_size", "8", "micro_batch_size is '8'"),
        ("hardware", 3, "hardware is 3, not a string"),
        ("name", None, "the name of a chain is a string"),
    ],
)
def test_a_chain_cannot_be_built_wrong(field, value, message):
    with pytest.raises(ValueError, match=message):
        Chain(**({"input_bytes": 1, "layers": (LAYER,)} | {field: value}))


@pytest.mark.parametrize("field", ["memory_bytes", "bandwidth", "latency_seconds", "weight_copies"])
@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan")])
def test_a_platform_of_endless_numbers_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Platform(**({"num_devices": 2, "memory_bytes": 1, "bandwidth": 1} | {field: value}))


def test_a_fraction_of_a_byte_is_no_memory():
    """It was rounded to none, which the plan's own file then refused."""
    with pytest.raises(ValueError, match="more than 0"):
        Platform(num_devices=1, memory_bytes=0.5, bandwidth=1)


@pytest.mark.parametrize("num_micro_batches", [None, 10_000])
@pytest.mark.parametrize("algorithm", ["contiguous", "pipedream", "mcap", "uniform"])
def test_more_than_any_device_has(algorithm, num_micro_batches):
    """The search for enough memory once left the largest that there is; buffers overflowed."""
    largest = 2**53
    made = chain([1, 1], [1, 1], weights=[largest] * 2, outputs=[largest, 0], stash=[largest] * 2)
    platform = Platform(num_devices=2, memory_bytes=100, bandwidth=1e12, weight_copies=1e6, comm_buffers=1000)
    with pytest.raises(InfeasibleError, match="nor into the largest memory that a device may have here") as raised:
        make_plan(made, platform, algorithm, num_micro_batches=num_micro_batches)
    assert raised.value.smallest_memory_bytes is None


@pytest.mark.parametrize(
    "how", [{}, {"num_micro_batches": 2}, {"period_seconds": 9}, {"weight_versions": "stashing"}]
)
@pytest.mark.parametrize("algorithm", ["madpipe", "contiguous", "pipedream-blind", [0, 1, 2]])
@pytest.mark.parametrize("large", ["weights", "outputs"])
def test_the_largest_memory_has_no_room_for_more(large, algorithm, how):
    """Sizes are cut off in tables: once at as much as the largest device has, and then the replay overflowed."""
    sizes = {"weights": [0, 0], "outputs": [0, 0], large: [2**53] * 2}
    made = chain([1, 1], [1, 1], stash=[0, 0], **sizes)
    platform = Platform(num_devices=2, memory_bytes=2**60, bandwidth=1e12, weight_copies=1e6, comm_buffers=1000)
    if large == "outputs":
        make_plan(made, platform, "madpipe", **how)  # on one device, where nothing is sent
        if not isinstance(algorithm, list):
            return
    with pytest.raises(InfeasibleError, match="nor into the largest memory that a device may have here"):
        make_plan(made, platform, algorithm, **how)


@pytest.mark.parametrize("more", [{"weight_copies": 10**6}, {"comm_buffers": 1000}])
def test_the_replay_counts_no_more_than_any_device_has(more):
    made = chain([1, 1], [1, 1], weights=[2**53] * 2, outputs=[2**53, 0], stash=[0, 0])
    platform = Platform(num_devices=2, memory_bytes=2**60, bandwidth=1e12, weight_copies=3)
    plan = make_plan(made, platform, [0, 1, 2])
    assert not replay(plan, made).violations
    (sentence, *_) = replay(replace(plan, platform=replace(platform, **more)), made).violations
    assert sentence.startswith("device 0") and sentence.endswith("bytes short")


def test_one_byte_is_no_bytes():
    made = chain([1], [1], stash=[101])
    with pytest.raises(InfeasibleError, match=r"1 byte more than there are.* would do is 101 bytes \(101 B\)"):
        make_plan(made, Platform(num_devices=1, memory_bytes=100, bandwidth=1))


def test_a_negative_zero_is_zero():
    """Equal chains have equal digests."""
    zero, negative = chain([0.0, 1], [1, 1]), chain([-0.0, 1], [1, 1])
    assert zero == negative
    assert zero.digest() == negative.digest()


def test_text_in_messages():
    assert printable("a\nb\x1b[31m\ud800é") == r"a b\x1b[31m\ud800é"
    assert shown("x" * 100) == "'" + "x" * 56 + "..."
    assert shown("\n\ud800") == r"'\n\ud800'"
