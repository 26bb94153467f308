"""From misses to milliseconds: a fitted line, prefetch over a shared link, and the cache to ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.constants import PPM
from planner.errors import AnswerIsNo, InputError
from planner.plan.plan import CachePoint
from planner.routing.cache_simulation import Demand, Replay
from planner.routing.found import StepCost

Ints = NDArray[np.int64]

SHARES_PPM = tuple(62_500 * n for n in range(1, 13))  # of the experts: a sixteenth to three quarters
ENOUGH = 0.98  # of the hit rate that the whole budget gives: what is beyond it buys little


@dataclass(frozen=True, slots=True)
class TimeModel:
    """`time = fixed + per_miss * misses`, in nanoseconds a step."""

    fixed_ns: int
    per_miss_ns: int
    error_ns: int  # root mean square of what the line does not explain; 0 when it was given
    samples: int

    def step_ns(self, misses: float) -> float:
        """Time of a step with so many misses."""
        return self.fixed_ns + self.per_miss_ns * misses


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A look-ahead that guesses the next demand.

    `recall`: share of would-be misses it names in time; `width`: experts it fetches a step, right or
    wrong; `spare`: share of the fixed part of a step in which the link is free for it.
    """

    recall: float
    width: int
    spare: float


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """What a prefetcher makes of a replay, means per step."""

    plain_ns: float
    ahead_ns: float
    right: float  # misses that it turned into hits
    wasted: float  # experts it fetched that were not asked for

    @property
    def gain(self) -> float:
        """Time saved, as a share; negative when it costs."""
        return 1.0 - self.ahead_ns / self.plain_ns


@dataclass(eq=False)
class NothingToFit(InputError):
    """A ledger that cannot give a time per miss."""

    why: str

    def message(self) -> str:
        return f"no time model: {self.why}"


@dataclass(eq=False)
class CacheTooSmall(AnswerIsNo):
    """A budget in which the engine would build no cache."""

    budget_bytes: int
    needed_bytes: int

    def message(self) -> str:
        return (
            f"no cache: {self.budget_bytes / 2**20:.1f} MiB hold fewer experts than one token uses; "
            f"at least {self.needed_bytes / 2**20:.1f} MiB are needed"
        )


def fit(ledger: Sequence[StepCost]) -> TimeModel:
    """Least squares over the steps with a time, the first left out (it warms up). Raises NothingToFit."""
    timed = [cost for cost in ledger[1:] if cost.time_ns]
    if len(timed) < 3:
        raise NothingToFit("fewer than three steps with a time (ms=) and misses=")
    misses = np.array([cost.misses for cost in timed], dtype=float)
    times = np.array([cost.time_ns for cost in timed], dtype=float)
    if np.ptp(misses) == 0:
        raise NothingToFit("every step missed equally often")
    slope, fixed = np.polyfit(misses, times, 1)
    error = float(np.sqrt(np.mean((times - fixed - slope * misses) ** 2)))
    return TimeModel(round(float(fixed)), round(float(slope)), round(error), len(timed))


def prefetched(run: Replay, model: TimeModel, ahead: Prefetch) -> PrefetchResult:
    """The time of a replay with a prefetcher on the same serial link.

    Experts fetched ahead travel in the link's spare time; what does not fit there delays the demand
    behind it one for one. A guess is at most `width` experts, so `width - right` of them are wasted.
    """
    misses = run.misses.astype(float)
    right = np.minimum(ahead.recall * misses, ahead.width)
    fetched = np.full_like(misses, ahead.width)
    free = ahead.spare * model.fixed_ns / max(1, model.per_miss_ns)
    late = np.maximum(0.0, fetched - free)
    plain = model.fixed_ns + model.per_miss_ns * misses
    ahead_ns = model.fixed_ns + model.per_miss_ns * (misses - right + late)
    return PrefetchResult(
        float(plain.mean()), float(ahead_ns.mean()), float(right.mean()), float((fetched - right).mean())
    )


@dataclass(frozen=True, slots=True)
class CacheAdvice:
    """One size of the engine's MoE cache and what it would do."""

    cache_bytes: int
    slots: int  # experts it holds, of all layers together
    hit_rate: float
    misses: float  # per step


def advise(
    demand: Demand, expert_bytes: int, n_used: int, budget_bytes: int, after: int = 0, points: int = 8
) -> tuple[CacheAdvice, list[CacheAdvice]]:
    """The smallest cache that does nearly what the whole budget would, and the curve it stands on.

    The engine keeps one LRU for all layers of equal layout and caches nothing when it holds fewer
    experts than a token uses; `demand` is of the shared kind, its first `after` steps are not counted.
    Raises CacheTooSmall.
    """
    most = min(budget_bytes // expert_bytes, demand.n_items)
    if most < n_used:
        raise CacheTooSmall(budget_bytes, n_used * expert_bytes)
    depths = lru_depths(demand, after)
    steps = max(1, demand.n_steps - after)
    sizes = sorted({max(n_used, round(most * (i + 1) / points)) for i in range(points)})
    curve = [_advice(depths, slots, steps, expert_bytes) for slots in sizes]
    enough = ENOUGH * curve[-1].hit_rate
    return next(entry for entry in curve if entry.hit_rate >= enough), curve


def _advice(depths: Ints, slots: int, steps: int, expert_bytes: int) -> CacheAdvice:
    hits = int((depths < slots).sum())
    rate, misses = hits / max(1, len(depths)), (len(depths) - hits) / steps
    return CacheAdvice(slots * expert_bytes, slots, rate, misses)


def hit_curve(demand: Demand, n_used: int, after: int = 0) -> tuple[CachePoint, ...]:
    """What sizes of one cache for all layers serve, by their share of the experts; ascending, concave.

    `demand` is of the shared kind, its first `after` steps are not counted. Sizes that some mixture of a
    smaller and a larger one would beat are left out, as are those that hold no token's experts.
    """
    depths = lru_depths(demand, after)
    found = []
    for share in SHARES_PPM:
        slots = demand.n_items * share // PPM
        hits = int((depths < slots).sum()) * PPM // max(1, len(depths))
        if slots >= n_used and hits:
            found.append(CachePoint(share_ppm=share, hit_ppm=hits))
    return _concave(found)


def _concave(points: Sequence[CachePoint]) -> tuple[CachePoint, ...]:
    """The points on the upper hull of all of them and nothing at no size."""
    hull: list[tuple[int, int]] = [(0, 0)]
    for x, y in ((p.share_ppm, p.hit_ppm) for p in points):
        while len(hull) > 1 and _turns_up(hull[-2], hull[-1], (x, y)):
            hull.pop()
        if y > hull[-1][1]:
            hull.append((x, y))
    return tuple(CachePoint(share_ppm=x, hit_ppm=y) for x, y in hull[1:])


def _turns_up(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    """Whether the middle point is not above the line between the others."""
    return (b[1] - a[1]) * (c[0] - a[0]) <= (c[1] - a[1]) * (b[0] - a[0])


def lru_depths(demand: Demand, after: int = 0) -> Ints:
    """For each id asked for, how many others were used since; never used is deeper than any cache.

    An LRU cache of so many slots or fewer misses it, one with more serves it: one pass for all sizes that
    hold an event's ids. Only for one bank; the first `after` steps are not counted.
    """
    if demand.ids.shape[1] != 1:
        raise ValueError("one cache for all layers has one bank")
    last = np.full(demand.n_items, -1, dtype=np.int64)
    width = demand.ids.shape[2]
    found = []
    for event, step, ids in zip(range(len(demand.ids)), demand.steps, demand.ids[:, 0], strict=True):
        asked = ids[ids >= 0]
        seen = last[asked]
        if step >= after:
            depth = np.count_nonzero(last[None, :] > seen[:, None], axis=1)
            found.append(np.where(seen < 0, demand.n_items, depth))
        last[asked] = event * width + np.arange(width - 1, width - 1 - len(asked), -1)  # best ranks last
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
