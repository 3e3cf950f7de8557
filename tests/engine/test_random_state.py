"""States of random generators, put back and compared."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_partition.engine.runtime.random_state import random_state
from deepspeed_partition.generators import common_marks
from deepspeed_partition.numpy_state import NumpyState, put_back, state_of

NUMPYS = np.random.mtrand._rand
DRAWS = {
    "a normal number": lambda: NUMPYS.standard_normal(),
    "two normal numbers": lambda: NUMPYS.standard_normal(2),
    "words": lambda: NUMPYS.randint(100, size=3),
    "many words": lambda: NUMPYS.random_sample(700),
    "a permutation": lambda: NUMPYS.permutation(5),
    "nothing": lambda: None,
    "a seed": lambda: NUMPYS.seed(7),
}


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_numpys_common_generator_is_put_back(kind, recwarn):
    """Of whatever kind it is, with the normal number that it keeps from the draw before, and without a warning."""
    bits = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(kind(1))
        np.random.randn()
        restore = random_state()
        drawn = np.random.randn(3)
        restore()
        assert np.array_equal(drawn, np.random.randn(3))
    finally:
        np.random.set_bit_generator(bits)
    assert not recwarn.list


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=6), st.lists(st.sampled_from(sorted(DRAWS)), max_size=6))
def test_numpys_state_is_read_as_numpy_tells_it(first, then):
    """Whatever was drawn; and it differs where a draw has changed it, also by the number that is kept."""
    began = NUMPYS.get_state()
    try:
        for name in first:
            DRAWS[name]()
        state, marks, told = state_of(NUMPYS), common_marks(), NUMPYS.get_state()
        assert isinstance(state, NumpyState), "of the kind that NumPy begins with"
        assert_same(state.legacy, told)
        for name in then:
            DRAWS[name]()
        is_same = all(map(np.array_equal, NUMPYS.get_state(), told))
        assert (state_of(NUMPYS) == state) == is_same == (common_marks() == marks)
        put_back(NUMPYS, state)
        assert_same(NUMPYS.get_state(), told)
        assert state_of(NUMPYS) == state
    finally:
        NUMPYS.set_state(began)


def assert_same(state, other):
    assert state[0] == other[0] and np.array_equal(state[1], other[1]) and state[2:] == other[2:]


def test_another_numpy_tells_its_state_itself(monkeypatch):
    """One in which the number that is kept does not lie where it is looked for."""
    monkeypatch.setattr("deepspeed_partition.numpy_state._place_of_kept", lambda: None)
    state = state_of(NUMPYS)
    drawn = np.random.randn(3)
    put_back(NUMPYS, state)
    assert not isinstance(state, NumpyState) and np.array_equal(drawn, np.random.randn(3))
