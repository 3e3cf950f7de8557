"""Which readings are named as suspicious."""

from __future__ import annotations

from typing import Any

from deepspeed_partition import Chain, LayerProfile
from deepspeed_partition.profiling import suspicious


def chain_of(**fields: Any) -> Chain:
    cost = {
        "name": "a",
        "forward_seconds": 1.0,
        "backward_seconds": 2.0,
        "weight_bytes": 4,
        "output_bytes": 4,
        "num_trainable_parameters": 1,
    }
    return Chain(input_bytes=4, layers=(LayerProfile(**(cost | fields)),))


def test_good_readings_are_not_named():
    assert suspicious(chain_of()) == []
    assert suspicious(chain_of(forward_spread_seconds=0.5, backward_spread_seconds=1.0)) == []
    assert suspicious(chain_of(backward_seconds=0.0, num_trainable_parameters=0)) == []


def test_no_backward_although_it_trains():
    (sentence,) = suspicious(chain_of(backward_seconds=0.0, num_trainable_parameters=7))
    assert sentence.startswith("layer 'a': its backward took 0 s, although it has 7 trainable parameters")


def test_no_forward():
    (sentence,) = suspicious(chain_of(forward_seconds=0.0))
    assert sentence.startswith("layer 'a': its forward took 0 s")


def test_wide_spreads():
    (sentence,) = suspicious(chain_of(forward_spread_seconds=0.51))
    assert "its forward took 1 s with a spread of 0.51 s, more than half" in sentence
    (sentence,) = suspicious(chain_of(backward_spread_seconds=1.1))
    assert "its backward took 2 s with a spread of 1.1 s, more than half" in sentence
    (sentence,) = suspicious(chain_of(forward_spread_seconds=0.9, backward_spread_seconds=1.1))
    assert "its forward took 1 s with a spread of 0.9 s" in sentence and "1 more of 2 times" in sentence
