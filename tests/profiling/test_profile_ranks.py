"""Ranks that profile together, all three and two of them; one start of the processes for all tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_partition.profiling import links, measure_links, profile_chain
from deepspeed_partition.profiling.links import LARGE_BYTES, SMALL_BYTES, crossing_at_once, fit, ranks_per_host
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


def test_a_rank_that_profiles_alone_is_told_who_is_missing(report):
    """It waited for ever in its first message, and said nothing."""
    found = report["on one rank"]
    said, of_links = found["said"]
    assert "on rank 0 for ranks 1, 2: the ranks of a group share" in said
    assert of_links.startswith("measure_links has waited 0 s on rank 0 for ranks 1, 2: each rank of a group")
    assert "on rank 0 for ranks 1, 2: each rank of a group measures" in found["of links"]
    assert "on rank 0 for ranks 1, 2: the ranks of a group share the layers" in found["sentence"]
    assert "group=torch.distributed.new_group([0], use_local_synchronization=True)" in found["sentence"]
    assert found["own"] == found["all"] == 1


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


def test_a_processor_that_is_busy_at_first_is_no_latency(report):
    assert report["busy start"] == pytest.approx([5e-5] * NUM_RANKS, rel=0.02)


def test_connections_of_their_own_are_made_once(report):
    """A group that is made again has the name of the one before, and finds its old addresses."""
    assert report["one other group"] == [True] * NUM_RANKS


def test_what_operations_cost_is_the_same_everywhere(report):
    assert report["operations"] == [report["operations"][0]] * NUM_RANKS
    seconds, copy_bandwidth = report["operations"][0]
    assert 0 < seconds < report["links_seconds"], "a message takes some of the processor"
    assert copy_bandwidth is None or copy_bandwidth > 0
    assert report["operations_on_gpus"] == [[0.0, None]] * NUM_RANKS


def test_ranks_of_one_machine_share_its_processors_which_is_no_link(report):
    assert report["sharing"] == [["half", None, 1]] * NUM_RANKS


def test_messages_of_many_flows_at_once(report):
    """Both ways, from one rank to two and from two to one: all arrive, and every rank has the same seconds."""
    assert len(set(report["flows"])) == 1
    assert report["flows"][0] > 0


def test_ranks_per_host():
    assert ranks_per_host(["a"] * 4) == 4
    assert ranks_per_host(["a", "b", "c"]) == 1
    assert ranks_per_host(["a", "a", "b", "b"]) == 2
    assert ranks_per_host(["a", "b", "a", "b"]) is None  # they do not follow one another
    assert ranks_per_host(["a", "a", "b"]) is None
    assert ranks_per_host(["a", "b", "b"]) is None


def test_two_transfers_leave_one_host():
    for num_ranks, per_host in [(3, 1), (4, 1), (6, 2), (12, 3), (4, 2), (6, 3)]:
        (one, to_one), (other, to_other) = crossing_at_once(num_ranks, per_host)
        assert one // per_host == other // per_host
        assert one // per_host not in (to_one // per_host, to_other // per_host)
        assert len({frozenset((one, to_one)), frozenset((other, to_other))}) == 2
        assert max(one, other, to_one, to_other) < num_ranks
    assert crossing_at_once(2, 1) is None
    assert crossing_at_once(4, 4) is None


@pytest.mark.parametrize(
    ("hosts", "both", "aside", "found"),
    [
        ("abcd", 1.1, 1.0, ("full", None, 1)),
        ("abcd", 1.9, 1.3, ("half", None, 1)),
        ("abcd", 1.2, 1.9, ("full", 100.0, 1)),
        ("aabb", 2.0, 2.0, ("half", 100.0, 2)),
        ("abab", 1.0, 2.0, ("full", None, 1)),  # whose port it would be is not said by numbers
        ("aaaa", 1.0, 2.0, ("half", None, 1)),
    ],
)
def test_what_transfers_share_is_told_by_how_much_longer_they_take(monkeypatch, hosts, both, aside, found):
    def seconds(flows, num_bytes, group, device, back=None):
        if len(flows) == 4:
            assert back == "connections of its own", "gloo would let both ways of one connection wait"
            return both
        return 1.0 if len(flows) == 1 or flows == [(0, 1), (2, 3)] else aside

    def gather(result, mine, group):
        result[:] = hosts

    monkeypatch.setattr(links.dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(links.dist, "all_gather_object", gather)
    monkeypatch.setattr(links, "_shared_seconds", seconds)
    monkeypatch.setattr(links, "_another", lambda group: "connections of its own")
    link = links._with_sharing(links.Link(bandwidth=100.0, latency_seconds=0.0), None, torch.device("cpu"))
    assert (link.duplex, link.port_bandwidth, link.devices_per_port) == found


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
