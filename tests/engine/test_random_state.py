"""States of random generators, put back."""

import numpy as np
import pytest

from deepspeed_partition.engine.runtime.random_state import random_state


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
