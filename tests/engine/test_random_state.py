"""States of random generators, and where they are kept for longer than a step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_partition.engine.runtime.random_state import random_state
from deepspeed_partition.generators import state_of_numpy

ACTIONS = {
    "normal": np.random.randn,
    "uniform": np.random.rand,
    "word": lambda: np.random.randint(2**31),
    "seed": lambda: np.random.seed(3),
    "shuffle": lambda: np.random.permutation(5),
}


def same(one, other):
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.fixture(autouse=True)
def numpys_state():
    before = np.random.get_state()
    yield
    np.random.set_state(before)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(ACTIONS)), max_size=12))
def test_the_state_that_is_kept_is_the_one_that_numpy_has(actions):
    """Also behind a normal number that NumPy kept from the draw before: its draw moves nothing else."""
    for action in actions:
        ACTIONS[action]()
        assert same(state_of_numpy(), np.random.get_state())


def test_a_generator_of_another_kind_has_its_own_state():
    bits = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        restore = random_state()
        drawn = np.random.rand(3)
        restore()
        assert same(drawn, np.random.rand(3))
    finally:
        np.random.set_bit_generator(bits)
