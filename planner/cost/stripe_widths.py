"""Widths of a striped layer: how many hot experts in device memory, in granules, and what they serve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from planner.constants import PPM, STRIPE_GRANULE
from planner.cost.unit_time import Prices
from planner.model.units import Unit, divisible
from planner.powers import power

STEPS = 16  # of a whole layer; widths tried are multiples of one


@dataclass(frozen=True, slots=True)
class Stripe:
    """The k hottest experts of one layer on a device, the others in pinned host memory."""

    k: int
    device_bytes: int
    host_bytes: int
    cold_decode_ppm: int  # of the bytes a decoded token reads: those that lie on the host
    cold_prefill_ppm: int  # of the bytes a ubatch reads


def stripe_widths(unit: Unit, prices: Prices, curve: Sequence[float]) -> Iterator[Stripe]:
    """Some widths, evenly spaced; each fills the last granule it touches."""
    n = unit.experts
    if n < 2 or len(curve) != n + 1:
        return
    sizes = [prices.tensors[name].size_bytes for name in divisible(unit)]
    whole = [_granules(size) for size in sizes]
    touched = _touched(tuple(curve), unit.used, prices.workload.n_ubatch)
    every = max(math.fsum(touched), 1e-12)
    for k in dict.fromkeys(round(n * step / STEPS) for step in range(1, STEPS)):
        if not 0 < k < n:
            continue
        hot = [_granules(size * k // n) for size in sizes]
        yield Stripe(
            k,
            sum(hot) * STRIPE_GRANULE,
            sum(w - h for w, h in zip(whole, hot, strict=True)) * STRIPE_GRANULE,
            round((1.0 - curve[k]) * PPM),
            round(math.fsum(touched[k:]) / every * PPM),
        )


def _granules(size: int) -> int:
    return -(-size // STRIPE_GRANULE)


@lru_cache(maxsize=1 << 10)
def _touched(curve: tuple[float, ...], used: int, batch: int) -> tuple[float, ...]:
    """The probability that a batch touches each expert, hottest first."""
    shares = [b - a for a, b in itertools.pairwise(curve)]
    return tuple(1.0 - power(1.0 - min(1.0, used * share), batch) for share in shares)
