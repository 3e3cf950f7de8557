"""One thread: small models are slower with more, and the machine has other tests to run."""

import pytest


@pytest.fixture(autouse=True)
def one_thread():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
