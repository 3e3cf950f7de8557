"""One rank fails in the middle of a step, which nobody catches: all others end by themselves, and say which one it
was and why."""

import pytest

pytest.importorskip("torch")

from tests.engine.ending_multiproc import CASES
from tests.ranks import MOST_SECONDS_APART


@pytest.fixture(scope="module")
def outcomes(outcomes_of):
    return outcomes_of("ending_multiproc.py", timeout_seconds=2400)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_end(outcomes, case):
    found = outcomes[str(case)]
    first, other = case.rank, 1 - case.rank
    told = "\n".join(log[-2500:] for log in found["logs"])
    assert found["exits"][other] == 1, told  # neither left, nor aborted
    assert found["seconds_apart"] < MOST_SECONDS_APART, told
    assert found["exits"][first] == (-9 if case.how == "killed" else 1), told
    if case.how == "refused":  # one that ends while the other is still connected may let it abort
        assert all("no plan suits rank 1" in log for log in found["logs"]) and "rank 1 was there" in told, told
        return
    gone = f"rank {first} has ended, or the link to it is down"
    cause = {
        "killed": gone,
        "raised": "ArithmeticError: the layer has had enough",
        "raised late": "ArithmeticError: the layer has had enough",
        "ended": "StopIteration: the data iterator ended after 2 micro-batches",
    }[case.how]
    if case.how == "ended":  # before anything of the step has been sent
        assert all(cause in log for log in found["logs"]), told
        return
    if case.how != "killed":
        assert cause in found["logs"][first] and " met this in " not in found["logs"][first], told
        assert f"rank {first} met this in " in found["logs"][other], told
        assert found["logs"][other].count(cause) >= 2, "raised there, too, with the traceback here"
        return
    # Rank 0 also keeps what was said, and may have ended with it.
    said_so = (gone, "rank 0 has ended, and with it what was said") if first == 0 else ()
    assert any(words in found["logs"][other] for words in (cause, *said_so)), told
