"""Medians and bootstrap intervals of timings; the same samples give the same interval everywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_DRAWS = 2000
_TAIL = 0.025  # each side: a 95 % interval


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    samples: int


def interval(samples: Sequence[float], seed: int = 1) -> Interval:
    """Median of samples with its percentile bootstrap interval (Efron 1979). Needs at least one sample."""
    draws = _draws(samples, random.Random(seed))
    return Interval(median(samples), *_ends(draws), len(samples))


def ratio(first: Sequence[float], second: Sequence[float], seed: int = 1) -> Interval:
    """Ratio of two medians, first over second, with its interval; the two are drawn independently."""
    chance = random.Random(seed)
    draws = [a / b for a, b in zip(_draws(first, chance), _draws(second, chance), strict=True)]
    return Interval(median(first) / median(second), *_ends(draws), min(len(first), len(second)))


def _draws(samples: Sequence[float], chance: random.Random) -> list[float]:
    return [median(chance.choices(samples, k=len(samples))) for _ in range(_DRAWS)]


def _ends(draws: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(draws)
    cut = round(_TAIL * len(ordered))
    return ordered[cut], ordered[-1 - cut]
