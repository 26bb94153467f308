"""From misses to milliseconds: a fitted line, prefetch over a shared link, and the cache to ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.errors import AnswerIsNo, InputError
from planner.heat_found import StepCost
from planner.simulate import POLICIES, Demand, Replay, replay

Ints = NDArray[np.int64]

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
    sizes = sorted({max(n_used, round(most * (i + 1) / points)) for i in range(points)})
    curve = [_advice(replay(demand, POLICIES["lru"], slots, after=after), expert_bytes) for slots in sizes]
    enough = ENOUGH * curve[-1].hit_rate
    return next(entry for entry in curve if entry.hit_rate >= enough), curve


def _advice(run: Replay, expert_bytes: int) -> CacheAdvice:
    return CacheAdvice(run.slots * expert_bytes, run.slots, run.hit_rate, float(run.misses.mean()))
