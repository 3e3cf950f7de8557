"""What the tests of the command line share."""

from __future__ import annotations

import json

import pytest

from deepspeed_partition.planner.solvers.step import annealing, exact_step, group_search, step_search
from tests.planner.test_files import CHAIN


@pytest.fixture(autouse=True, scope="module")
def search_alone(request):
    """Plan steps without the exact program, which would hide what a search misses, but in its own tests.

    So would long changes of single orders, which are half of what planning a small step costs, and long walks.
    """
    most = exact_step.MOST_OPERATIONS, step_search.MOST_OPERATIONS_POLISHED
    steps = annealing.MOST_STEPS, group_search.MOST_STEPS
    annealing.MOST_STEPS, group_search.MOST_STEPS = 300, 250
    if not request.module.__name__.endswith("test_exact_step"):
        exact_step.MOST_OPERATIONS = 0
        is_of_orders = request.module.__name__.endswith("test_interleaving")
        step_search.MOST_OPERATIONS_POLISHED = 200_000 if is_of_orders else 20_000
    yield
    exact_step.MOST_OPERATIONS, step_search.MOST_OPERATIONS_POLISHED = most
    annealing.MOST_STEPS, group_search.MOST_STEPS = steps


@pytest.fixture
def chain(tmp_path):
    """The path of a chain file of two layers."""
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(CHAIN))
    return str(path)
