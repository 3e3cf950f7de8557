"""The published profiles: fine and honest chains, plans that replay, and PipeDream's own figures."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from deepspeed_partition import Chain, Platform, make_plan, replay
from tests.planner import oracles
from tests.planner.instances import FREE

FOLDER = Path(__file__).parents[2] / "examples" / "profiles" / "pipedream"
NETWORKS = ("vgg16", "resnet50", "resnet101", "inception_v3", "densenet121")
NODE = re.compile(
    r"^\w+ -- (?P<description>.*) -- forward_compute_time=(?P<forward>[\d.]+), "
    r"backward_compute_time=(?P<backward>[\d.]+), .*parameter_size=(?P<weight>[\d.]+)"
)


def graph(name):
    return FOLDER / f"{name}.graph.txt"


@pytest.mark.parametrize("name", NETWORKS)
def test_profiles_become_fine_chains_that_keep_time_and_weights(name):
    made = Chain.load(graph(name))
    nodes = [match for line in graph(name).read_text().splitlines() if (match := NODE.match(line))]
    layers = [node for node in nodes if not node["description"].startswith("Input")]
    milliseconds = sum(float(node["forward"]) + float(node["backward"]) for node in layers)
    assert len(nodes) > made.num_layers and milliseconds > 0
    assert made.compute_seconds == pytest.approx(milliseconds / 1000, rel=1e-9)
    assert sum(layer.weight_bytes for layer in made.layers) == sum(float(node["weight"]) for node in layers)
    assert max(layer.compute_seconds for layer in made.layers) < made.compute_seconds / 4


@pytest.mark.parametrize("name", NETWORKS)
def test_profiles_have_plans_that_replay(name):
    made = Chain.load(graph(name))
    plan = make_plan(
        made, Platform(num_devices=4, memory_bytes=16e9, bandwidth=12e9), "contiguous", recompute="never"
    )
    assert replay(plan, made).violations == ()
    assert len(plan.stages) > 1 and plan.proved


@pytest.mark.parametrize(
    ("bandwidth", "figure"),
    [
        pytest.param(1e9, 0.41104, id="two transfers at a cut, as in the slides"),
        pytest.param(FREE, 0.21645, id="computation alone, as in PipeDream's own program"),
    ],
)
def test_pipedream_on_vgg16(bandwidth, figure):
    made = Chain.load(graph("vgg16"))
    passed = list(accumulate((layer.compute_seconds for layer in made.layers), initial=0.0))
    fastest = min(
        max(
            *(passed[stop] - passed[start] for start, stop in pairwise(cuts)),
            *(2 * made.boundary_bytes(cut) / bandwidth for cut in cuts[1:-1]),
        )
        for cuts in oracles.all_cuts(made.num_layers, 4)
        if len(cuts) > 2
    )
    assert fastest == pytest.approx(figure, abs=5e-6)
    plan = make_plan(made, Platform(num_devices=4, memory_bytes=1e12, bandwidth=bandwidth), "pipedream-blind")
    assert plan.period_seconds == pytest.approx(fastest, rel=1e-9)
