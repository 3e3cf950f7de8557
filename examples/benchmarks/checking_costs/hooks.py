"""What a function of torch takes in a hook that is watched, beside one that is not.

    python examples/benchmarks/checking_costs/hooks.py

The hook moves an average of 200 small weights, as one written by hand does; the least of 20 runs counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_madpipe.compat.followed_values import FollowedValues

NUM_LAYERS, WIDTH, NUM_RUNS = 100, 64, 20


def least_seconds(run: Callable[[], None]) -> float:
    found = []
    for _ in range(NUM_RUNS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    names = {id(weight): name for name, weight in model.named_parameters()}
    averages = [weight.detach().clone() for weight in model.parameters()]

    @torch.no_grad()
    def hook() -> None:
        for average, weight in zip(averages, model.parameters(), strict=True):
            average.lerp_(weight, 0.1)

    def watched() -> None:
        with FollowedValues(lambda: names, WeakIdKeyDictionary(), lambda *_: None):
            hook()

    bare, with_it = (least_seconds(run) / len(averages) for run in (hook, watched))
    print(f"a call takes {bare * 1e6:.1f} us, {with_it * 1e6:.1f} us where it is watched")


if __name__ == "__main__":
    main()
