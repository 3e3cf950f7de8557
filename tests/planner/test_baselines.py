"""DeepSpeed's own cuts, as DeepSpeed makes them."""

from __future__ import annotations

import random

import pytest

from deepspeed_partition import Chain, LayerProfile, Platform, make_plan
from deepspeed_partition.planner.solvers.contiguous import deepspeed_partitions

PLENTY = Platform(num_devices=3, memory_bytes=10**9, bandwidth=1e9)


TRAINABLE = {"Linear": 10, "Tanh": 0, "Head": 30}


def layers(*kinds: str) -> Chain:
    costs = {"forward_seconds": 1, "backward_seconds": 2, "weight_bytes": 4, "output_bytes": 1}
    return Chain(
        input_bytes=1,
        layers=tuple(
            LayerProfile(name=f"l{i}", type=kind, num_trainable_parameters=TRAINABLE[kind], **costs)
            for i, kind in enumerate(kinds)
        ),
    )


@pytest.mark.parametrize("seed", range(200))
def test_cuts_equal_deepspeeds(seed):
    utils = pytest.importorskip("deepspeed.runtime.utils")
    pick = random.Random(seed)
    count, stages = pick.randint(1, 14), pick.randint(1, 7)
    weights = [pick.choice([0, 0, 1, pick.random(), pick.randint(0, 5)]) for _ in range(count)]
    assert deepspeed_partitions.partition_balanced(weights, stages) == [
        int(p) for p in utils.partition_balanced(weights, stages)
    ]
    assert deepspeed_partitions.partition_uniform(count, stages) == [
        int(p) for p in utils.partition_uniform(count, stages)
    ]


def test_uniform_parameters_and_type():
    chain = layers("Linear", "Tanh", "Linear", "Tanh", "Linear", "Head")
    assert make_plan(chain, PLENTY, "uniform").boundaries == [0, 2, 4, 6]
    assert make_plan(chain, PLENTY, "parameters").boundaries == [0, 4, 5, 6]
    assert make_plan(chain, PLENTY, "type:linear").boundaries == [0, 2, 4, 6]
    assert make_plan(chain, PLENTY, "type:^(Linear|Head)$").algorithm == "type:^(Linear|Head)$"


def test_a_stage_that_deepspeed_leaves_empty_is_dropped():
    assert make_plan(layers("Linear", "Linear"), PLENTY, "uniform").boundaries == [0, 1, 2]
    chain = layers("Tanh", "Tanh", "Tanh", "Tanh", "Head")
    assert make_plan(chain, PLENTY, "parameters").boundaries[-1] == 5


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("type:Conv", "matches none of the layer types: Linear, Tanh"),
        ("type:(", "not a regular expression"),
        ("fastest", "unknown algorithm 'fastest': known are madpipe, contiguous"),
        ("", "unknown algorithm ''"),
        ("0,1", "do not rise from 0 to 2"),
        ("0,2,1,2", "do not rise from 0 to 2"),
        ("0,1,,2", "is no list of boundaries"),
        ([0, 1.0, 2], "are not whole numbers"),
        ([0, True, 2], "are not whole numbers"),
        ([], "do not rise"),
    ],
)
def test_unsuitable_algorithms_are_refused(algorithm, message):
    with pytest.raises(ValueError, match=message):
        make_plan(layers("Linear", "Tanh"), PLENTY, algorithm)


def test_more_boundaries_than_devices_are_refused():
    chain = layers("Linear", "Linear", "Linear", "Linear")
    with pytest.raises(ValueError, match="makes 4 stages for 3 devices"):
        make_plan(chain, PLENTY, "0,1,2,3,4")


def test_a_cut_whose_stage_trains_nothing_is_refused_where_that_matters():
    chain = layers("Tanh", "Linear", "Linear")
    assert make_plan(chain, PLENTY, [0, 1, 3]).boundaries == [0, 1, 3]
    with pytest.raises(ValueError, match="gives stage 0 layers 0 to 1, none of which has trainable parameters"):
        make_plan(chain, PLENTY, [0, 1, 3], every_stage_trains=True)
