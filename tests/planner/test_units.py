"""Quantities as people write them."""

from __future__ import annotations

import pytest

from deepspeed_partition.options import Options
from deepspeed_partition.planner.units import (
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_seconds,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GB", 16 * 10**9),
        ("16GiB", 16 * 2**30),
        ("1.5 MB", 1_500_000),
        ("7", 7),
        ("2e3", 2000),
        (16e9, 16 * 10**9),
        ("16gb", 16 * 10**9),
        ("3B", 3),
        ("1kB", 1000),
        ("1TiB", 2**40),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


def test_bandwidths_and_times():
    assert parse_bandwidth("12GB/s") == 12e9
    assert parse_bandwidth("12GB") == 12e9
    assert parse_seconds("10us") == pytest.approx(1e-5)
    assert parse_seconds("5 ms") == 0.005
    assert parse_seconds("0") == 0


@pytest.mark.parametrize("text", ["", "GB", "16XB", "-1", "1,5GB", "nan", "inf", "1e999", True, float("nan")])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="16GB"):
        parse_size(text)


def test_zero_bandwidth_is_refused():
    with pytest.raises(ValueError, match="more than zero"):
        parse_bandwidth("0")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("100Gb/s", "write 12.5GB/s, or 100GB/s if bytes are meant"),
        ("100gb/s", "write 12.5GB/s, or 100GB/s if bytes are meant"),
        ("10 Gib", "write 1.25GiB/s, or 10GiB/s if bytes are meant"),
        ("8e9b/s", "write 1000000000B/s, or 8000000000B/s if bytes are meant"),
        ("100 kb/s", "write 12.5KB/s, or 100KB/s if bytes are meant"),
    ],
)
def test_a_bandwidth_in_bits_is_refused(text, words):
    """100 gigabits per second, as links are sold, were read as 100 gigabytes: eight times too fast."""
    with pytest.raises(ValueError, match="is in bits, for its small b: " + words):
        parse_bandwidth(text)
    for option in ("bandwidth", "port_bandwidth", "copy_bandwidth"):
        with pytest.raises(ValueError, match=f"'{option}': .* is in bits"):
            Options.from_mapping({option: text})


def test_only_a_bandwidth_is_per_second():
    with pytest.raises(ValueError, match="'16GB/s' is not a size"):
        parse_size("16GB/s")
    with pytest.raises(ValueError, match="'10us/s' is not a time"):
        parse_seconds("10us/s")
    assert parse_bandwidth("1e9/s") == 1e9


def test_formats():
    assert [format_bytes(n) for n in (0, 999, 1500, 3435973836)] == ["0 B", "999 B", "1.5 kB", "3.44 GB"]
    assert [format_seconds(s) for s in (0, 2e-9, 0.0123, 68)] == ["0 s", "2 ns", "12.3 ms", "68 s"]


def test_options_read_what_people_write():
    options = Options.from_mapping(
        {"memory": "16GB", "bandwidth": "1GB/s", "algorithm": [0, 2, 4], "warmup_steps": 20}
    )
    assert (options.memory, options.bandwidth, options.algorithm) == (16 * 10**9, 1e9, (0, 2, 4))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"memroy": "16GB"}, "unknown madpipe option memroy: known are memory, bandwidth"),
        ({"memory": "lots"}, "'memory': 'lots' is not a size"),
        ({"memory": 0}, "'memory': it must be more than 0"),
        ({"warmup_steps": -1}, "'warmup_steps': -1"),
        ({"warmup_steps": True}, "'warmup_steps': True"),
        ({"plan": 3}, "'plan' is 3, not a path"),
        ({"algorithm": 3}, "'algorithm': algorithm is 3"),
        ({"algorithm": "best"}, "'algorithm': unknown algorithm 'best': known are madpipe"),
        ({"time_limit_seconds": 0}, "'time_limit_seconds': 0"),
        ({"weight_copies": "many"}, "'weight_copies': 'many'"),
        ([1], "not a mapping"),
    ],
)
def test_wrong_options_are_named(mapping, message):
    with pytest.raises(ValueError, match=message):
        Options.from_mapping(mapping)
