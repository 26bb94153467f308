"""Widths of a striped layer: how many hot experts in device memory, in granules, and what they serve."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.constants import PPM, STRIPE_GRANULE
from planner.cost.unit_time import Prices
from planner.model.units import Unit, divisible

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
    ubatch = prices.workload.n_ubatch
    for k in dict.fromkeys(round(n * step / STEPS) for step in range(1, STEPS)):
        if not 0 < k < n:
            continue
        hot = [_granules(size * k // n) for size in sizes]
        whole = [_granules(size) for size in sizes]
        yield Stripe(
            k,
            sum(hot) * STRIPE_GRANULE,
            sum(w - h for w, h in zip(whole, hot, strict=True)) * STRIPE_GRANULE,
            round((1.0 - curve[k]) * PPM),
            _cold_share(curve, k, unit.used, ubatch),
        )


def _granules(size: int) -> int:
    return -(-size // STRIPE_GRANULE)


def _cold_share(curve: Sequence[float], k: int, used: int, batch: int) -> int:
    """Of the distinct experts that a batch touches, those beyond the k hottest."""
    shares = [b - a for a, b in itertools.pairwise(curve)]
    touched = [1.0 - (1.0 - min(1.0, used * share)) ** batch for share in shares]
    return round(sum(touched[k:]) / max(sum(touched), 1e-12) * PPM)
