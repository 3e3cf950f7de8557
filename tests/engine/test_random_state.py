"""States of random generators, put back and compared, also of a device."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_partition.engine.pipeline.own_optimizers import why_not_in_parts
from deepspeed_partition.engine.runtime import random_state as generator_states
from deepspeed_partition.engine.runtime.random_state import random_state
from deepspeed_partition.generators import common_marks
from deepspeed_partition.numpy_state import NumpyState, put_back, state_of
from tests.other_device import OtherDevice, rand_on_device

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


class Langevin(torch.optim.SGD):
    """Adds noise that is drawn where the weights are."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.add_(0.1 * rand_on_device(weight))


def test_an_optimizer_that_draws_on_a_device_is_told_what_to_do(monkeypatch):
    """It was told that a step of a parameter depends on the others, and to use another optimizer."""
    monkeypatch.setattr(generator_states, "get_accelerator", OtherDevice)
    optimizer = Langevin([torch.nn.Parameter(torch.ones(3)) for _ in range(2)], lr=0.1)
    reason = why_not_in_parts(optimizer, flattened=False)
    assert reason is not None and "Langevin, whose step draws from the common random generators" in reason


def test_another_numpy_tells_its_state_itself(monkeypatch):
    """One in which the number that is kept does not lie where it is looked for."""
    monkeypatch.setattr("deepspeed_partition.numpy_state._place_of_kept", lambda: None)
    state = state_of(NUMPYS)
    drawn = np.random.randn(3)
    put_back(NUMPYS, state)
    assert not isinstance(state, NumpyState) and np.array_equal(drawn, np.random.randn(3))
