"""What each rank says when something goes wrong in a batch."""

from unittest.mock import patch

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from deepspeed_partition.engine.runtime import first_failure
from deepspeed_partition.engine.runtime.first_failure import FirstFailure, raised_by_all


class Gone:
    """A store whose process has ended."""

    def compare_set(self, *_):
        raise RuntimeError("Connection reset by peer")


def fail(failure, rank, error, store):
    stored = patch.object(first_failure, "_get_default_store", lambda: store)
    with stored, patch.object(dist, "get_rank", lambda: rank), failure.told():
        raise error


def test_the_others_name_the_first_rank():
    store, failure = dist.HashStore(), FirstFailure(0)
    with pytest.raises(ArithmeticError, match=r"^enough$"):
        fail(failure, 2, ArithmeticError("enough"), store)
    for rank in (0, 1):
        with pytest.raises(
            RuntimeError, match=r"^rank 2 failed first: ArithmeticError: enough .here: OSError: closed.$"
        ):
            fail(failure, rank, OSError("closed"), store)
    with pytest.raises(OSError, match=r"^closed$"):  # another batch
        fail(FirstFailure(0), 1, OSError("closed"), store)


def test_what_all_ranks_agreed_upon_stays_as_it_is():
    store, failure = dist.HashStore(), FirstFailure(0)
    for rank in (1, 0):
        with pytest.raises(ValueError, match=r"^the metric is not a number$"):
            fail(failure, rank, ValueError("the metric is not a number"), store)


def test_errors_marked_as_agreed_upon_keep_their_type_and_text():
    """Such as one that cannot be pickled, and another pipeline's."""
    store, failure = dist.HashStore(), FirstFailure(0)
    for rank, error in ((1, ValueError("gone")), (0, RuntimeError("ValueError: gone"))):
        with pytest.raises(type(error), match=rf"^{error}$"):
            fail(failure, rank, raised_by_all(error), store)
    with pytest.raises(OSError, match=r"^closed$"):  # the first that is of one rank alone
        fail(failure, 0, OSError("closed"), store)


def test_where_nobody_can_be_asked():
    with pytest.raises(RuntimeError, match=r"rank 0 has ended.*here: OSError: closed"):
        fail(FirstFailure(0), 1, OSError("closed"), Gone())
