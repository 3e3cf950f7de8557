"""Time as integers, so that sums are exact and no answer depends on the order of additions.

A period is the sum of some layers' times, and the question is always whether another sum fits into it.
In floats 0.1 + 0.2 three times is 0.9000000000000001 or 0.8999999999999999; in ticks it is one number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.problem import Chain, Platform

Ticks = NDArray[np.int64]

SHORTEST_SECONDS = 1e-9
"""Shortest time that a whole chain may take, in seconds."""
SLOWEST_TRANSFER = 1e6
"""Longest transfer, as a multiple of the time of the whole chain: the clock must resolve both."""
DIGITS = 15
"""Decimal digits of the whole chain's time in ticks: as many as a float holds for certain."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Ticks of ``10 ** exponent`` seconds: decimal, so that times written in decimals are whole ticks."""

    exponent: int

    @classmethod
    def of(cls, chain: Chain, platform: Platform, micro_batches: int = 1) -> Clock:
        """Make a clock on which one micro-batch, with all transfers, takes ``DIGITS`` digits of ticks.

        Args:
            micro_batches: as many take so many digits together, so that a pattern of all of them does, too.
        """
        total = sum((Fraction(layer.compute_seconds) for layer in chain.layers), Fraction(0))
        total += 2 * sum((Fraction(seconds) for seconds in one_way_seconds(chain, platform)), Fraction(0))
        return cls.resolving(total * micro_batches)

    @classmethod
    def resolving(cls, total: Fraction) -> Clock:
        """Make a clock on which ``total`` seconds take ``DIGITS`` digits of ticks."""
        if not total:
            return cls(0)
        digits = math.floor(math.log10(total))
        return cls(digits + 1 - DIGITS)

    def ticks(self, seconds: float) -> int:
        """Return the tick nearest to the decimal number that ``seconds`` prints as."""
        return _ticks(seconds, self.exponent)

    def seconds(self, ticks: int | Fraction) -> float:
        """Return the float nearest to ``ticks``, in seconds."""
        return float(Fraction(ticks) * Fraction(10) ** self.exponent)


@lru_cache(maxsize=2**14)  # each solver and each replay asks for the same layers
def _ticks(seconds: float, exponent: int) -> int:
    return round(Fraction(repr(seconds)) * Fraction(10) ** -exponent)


class TimedChain:
    """The times of a chain on a platform, in ticks.

    Args:
        clock: left out, that of the chain on the platform.

    Raises:
        ValueError: the chain takes no time at all, so that no period could be its answer.
    """

    def __init__(self, chain: Chain, platform: Platform, clock: Clock | None = None) -> None:
        self.chain = chain
        self.platform = platform
        one_way = one_way_seconds(chain, platform)
        if not any(layer.compute_seconds for layer in chain.layers):
            raise ValueError(f"chain {chain.name!r}: every layer takes 0 seconds, there is nothing to plan")
        if chain.compute_seconds < SHORTEST_SECONDS:
            raise ValueError(
                f"chain {chain.name!r} takes {chain.compute_seconds:g} s in all, less than {SHORTEST_SECONDS:g} "
                "s: are its times in seconds?"
            )
        if max(one_way) > SLOWEST_TRANSFER * chain.compute_seconds:
            raise ValueError(
                f"a transfer takes {max(one_way):g} s, more than {SLOWEST_TRANSFER:g} times what all layers take "
                f"({chain.compute_seconds:g} s): check bandwidth and latency"
            )
        copied = [platform.copy_seconds(chain.boundary_bytes(each)) for each in range(1, chain.num_layers)]
        for name, seconds in (
            ("operation_seconds", platform.operation_seconds),
            ("a copy", max(copied, default=0.0)),
        ):
            if seconds > SLOWEST_TRANSFER * chain.compute_seconds:
                raise ValueError(
                    f"{name} takes {seconds:g} s, more than {SLOWEST_TRANSFER:g} times what all layers take "
                    f"({chain.compute_seconds:g} s): check operation_seconds and copy_bandwidth"
                )
        self.clock = Clock.of(chain, platform) if clock is None else clock
        ticks = self.clock.ticks
        self.operation = ticks(platform.operation_seconds)
        """Ticks that each forward and each backward of a stage takes in a step beside those of its layers."""
        self.copies = [0, *map(ticks, copied), 0]
        """Ticks in which a device moves one tensor over the boundary before each layer; 0 at the ends of the
        chain."""
        self.forward: Ticks = _prefix([ticks(layer.forward_seconds) for layer in chain.layers])
        """Ticks, shape (L + 1,). Entry l: the forwards of layers 0 to l."""
        self.backward: Ticks = _prefix([ticks(layer.backward_seconds) for layer in chain.layers])
        halves = [(layer.backward_input_seconds, layer.backward_weight_seconds) for layer in chain.layers]
        self.backward_input: Ticks = _prefix([ticks(first or 0.0) for first, _ in halves])
        """Ticks, shape (L + 1,). Entry l: gradients of the inputs of layers 0 to l; 0 where not known."""
        self.backward_weight: Ticks = _prefix([ticks(second or 0.0) for _, second in halves])
        self.undivided: Ticks = _prefix([first is None for first, _ in halves])
        """Number of layers 0 to l whose backward is one operation, shape (L + 1,)."""
        self.one_way: Ticks = np.array([ticks(seconds) for seconds in one_way], dtype=np.int64)
        """Ticks, shape (L + 1,). Entry l: one tensor over the boundary before layer l; 0 at the ends of the
        chain."""

    @cached_property
    def compute(self) -> Ticks:
        """Ticks, shape (L + 1,). Entry l: forwards and backwards of layers 0 to l."""
        return self.forward + self.backward

    @cached_property
    def first_halves(self) -> Ticks:
        """Ticks, shape (L + 1,). Entry l: backwards of layers 0 to l, without their second halves if known."""
        whole = np.diff(self.backward)
        known = np.diff(self.undivided) == 0
        return _prefix(np.where(known, np.minimum(np.diff(self.backward_input), whole), whole).tolist())

    @property
    def round_trip(self) -> Ticks:
        """Ticks, shape (L + 1,): C(l) of the paper, the activation over a boundary and the gradient back."""
        return 2 * self.one_way

    def forward_ticks(self, start: int, stop: int) -> int:
        return int(self.forward[stop] - self.forward[start])

    def backward_ticks(self, start: int, stop: int) -> int:
        return int(self.backward[stop] - self.backward[start])

    def splits(self, start: int, stop: int) -> bool:
        """Return whether the chain says how long both halves of the backward of these layers last."""
        return bool(self.undivided[stop] == self.undivided[start])

    def ticks_beside_layers(self, cuts: Sequence[int], devices: Sequence[int]) -> list[int]:
        """Return the ticks of a forward or backward of each stage in a step, beside those of its layers."""
        crossing = [one != other for one, other in pairwise(devices)]
        copies = [0, *(self.copies[cut] * crosses for cut, crosses in zip(cuts[1:-1], crossing, strict=True)), 0]
        return [self.operation + before + behind for before, behind in pairwise(copies)]

    def compute_ticks(self, start: int, stop: int) -> int:
        """Forward and backward of layers ``start`` to ``stop``, in ticks: U(k, l) of the paper."""
        return int(self.compute[stop] - self.compute[start])


def one_way_seconds(chain: Chain, platform: Platform) -> list[float]:
    """Seconds, L + 1 entries. Entry l: one tensor over the boundary before layer l; 0 at the ends of the chain."""
    inner = [platform.transfer_seconds(chain.boundary_bytes(boundary)) for boundary in range(1, chain.num_layers)]
    return [0.0, *inner, 0.0]


def _prefix(values: list[int]) -> Ticks:
    return np.concatenate([[0], np.cumsum(np.array(values, dtype=np.int64))]).astype(np.int64)
