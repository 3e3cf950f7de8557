"""Ranks that profile together, all three and two of them; one start of the processes for all tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_partition.profiling import measure_links, profile_chain
from deepspeed_partition.profiling.links import LARGE_BYTES, SMALL_BYTES, fit
from deepspeed_partition.profiling.sharing import share_of
from tests.profiling.networks import networks
from tests.profiling.profile_multiproc import QUICK, sizes
from tests.ranks import run_ranks

HERE = Path(__file__).parent


NUM_RANKS = 3


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("ranks") / "report.json"
    log = path.with_name("output.txt")
    status = run_ranks(HERE / "profile_multiproc.py", [str(path)], NUM_RANKS, log, timeout_seconds=120)
    assert status == 0, log.read_text()
    return json.loads(path.read_text())


@pytest.fixture(autouse=True)
def one_thread():
    """As the ranks: what kernels need for themselves depends on the number of their threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", networks())
def test_together_they_find_the_sizes_that_one_finds(report, name):
    layers, x = networks()[name]
    alone = profile_chain(layers, x, **QUICK)
    assert report["networks"][name]["sizes"] == sizes(alone)


def test_all_have_the_same_chain_to_the_last_digit(report):
    for network in report["networks"].values():
        assert len(network["digests"]) == NUM_RANKS
        assert len(set(network["digests"])) == 1


def test_each_measures_its_share(report):
    assert report["who"] == [[0], [1, 2], [3, 4]]


def test_more_ranks_than_layers(report):
    assert len(report["few"]) == NUM_RANKS
    assert all(chain == report["few"][0] and len(chain["layers"]) == 1 for chain in report["few"])


def test_stages_that_ranks_have_make_the_chain_of_the_whole(report):
    assert report["staged"]["stashes"] == [4 * 5 * 8, 0, 4 * 5 * 16, 4 * 5 * 4]


def test_an_error_on_one_is_an_error_on_all(report):
    for name, sentence in (
        ("first layer", "ValueError: layer '0.Linear' cannot take its input (5, 8) float32"),
        ("last layer", "ValueError: layer '1.Linear' cannot take its input (5, 8) float32"),
        ("unforeseen", "RuntimeError: KeyError: 'no mode'"),
        ("no memory", "MemoryError: layer '1.exhausted' with its input (5, 8) float32 does not fit on cpu"),
    ):
        messages = report["errors"][name]
        assert len(messages) == NUM_RANKS
        assert len(set(messages)) == 1
        assert messages[0].startswith(sentence)


def test_links_are_the_same_everywhere(report):
    assert len(report["links"]) == NUM_RANKS
    bandwidth, latency_seconds = report["links"][0]
    assert all(link == [bandwidth, latency_seconds] for link in report["links"])
    assert bandwidth > 0
    assert latency_seconds >= 0
    # Every message travelled within the time that all of it took.
    assert bandwidth * report["links_seconds"] > LARGE_BYTES
    assert latency_seconds < report["links_seconds"]


def test_a_group_of_some_ranks(report):
    outside, first, second = report["subgroup"]["found"]
    assert outside is None
    assert first == second
    assert first["bandwidth"] > 0
    for name, (layers, x) in networks().items():
        assert first["sizes"][name] == sizes(profile_chain(layers, x, **QUICK))
    assert report["subgroup"]["own"] == 1


def test_one_rank_has_no_links(report):
    expected = "ValueError: links are measured between ranks, and the group has only one"
    assert report["subgroup"]["single"] == [expected] * NUM_RANKS


def test_no_ranks_no_links():
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialized"):
        measure_links()


def test_shares_are_consecutive_and_even():
    for num_layers in range(1, 12):
        for num_ranks in range(1, 6):
            shares = [share_of(num_layers, rank, num_ranks) for rank in range(num_ranks)]
            assert [layer for start, stop in shares for layer in range(start, stop)] == list(range(num_layers))
            lengths = [stop - start for start, stop in shares]
            assert max(lengths) - min(lengths) <= 1


def test_fit_of_a_known_link():
    bandwidth, latency_seconds = 2.0**30, 1e-4
    link = fit(latency_seconds + SMALL_BYTES / bandwidth, latency_seconds + LARGE_BYTES / bandwidth)
    assert link.bandwidth == pytest.approx(bandwidth)
    assert link.latency_seconds == pytest.approx(latency_seconds)


def test_fit_survives_noise():
    link = fit(2e-3, 1e-3)  # the large message was faster
    assert (link.bandwidth, link.latency_seconds) == (LARGE_BYTES / 1e-3, 0)
    link = fit(0.0, 1e-3)
    assert link.latency_seconds == 0
