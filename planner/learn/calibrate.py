"""Measured times into a calibration: as little change of it as explains them.

A token's and a prompt's time are sums in which each device, each change of device and each token have a
factor of the calibration. How much of a predicted time hangs on each factor is found by pricing the same plan
with that factor changed. Of all changes that explain the measurement the likeliest is taken: factors of
devices are trusted more or less alike (ridge regression; exact fractions, so that every run agrees).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from planner.check.reprice import reprice
from planner.constants import PPM
from planner.cost.unit_time import calibration_for
from planner.learn.samples import Cleaned, Measured
from planner.machine.profile import Calibration, Profile
from planner.model.inventory import Inventory
from planner.plan.known import Known
from planner.plan.plan import Plan
from planner.records import MAX_COUNT, MAX_NS, MAX_PPM

_STEP = Fraction(1, 10)  # by which a factor is changed to see what hangs on it
_TRUST = Fraction(3, 10)  # how wrong a factor is expected to be
_NOISE = Fraction(2, 100)  # and a clean measurement
_PASSES = 3  # a plan's time is not quite linear: the CPU and a GPU may work at the same time
_LEAST, _MOST = Fraction(1, 5), Fraction(5)  # a factor beyond is no calibration but another machine
_SPLIT, _TOKEN, _PROMPT = " split", " token", " prompts"  # no device has such a name


@dataclass(frozen=True, slots=True)
class Times:
    """What the plan is predicted to take where it was measured; None: not measured."""

    token_ns: int | None
    prompt_ns: int | None


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A profile that predicts what was measured, and what it predicted before and after."""

    profile: Profile
    before: Times
    after: Times
    factors: Mapping[str, int]  # by device, of its former times, in ppm


def predicted(plan: Plan, inventory: Inventory, profile: Profile, known: Known, seen: Cleaned) -> Times:
    """The plan priced for the depth and the prompt that were measured."""

    def priced(measured: Measured | None, field: str) -> int | None:
        if measured is None:
            return None
        change = {field: measured.depth if field == "depth" else measured.tokens}
        work = plan.workload.model_copy(update=change)
        made = reprice(plan.model_copy(update={"workload": work}), inventory, profile, known).plan.predicted
        return made.tpot_ns if field == "depth" else made.prefill_ns

    return Times(priced(seen.token, "depth"), priced(seen.prompt, "prompt"))


@dataclass(frozen=True, slots=True)
class Observed:
    """What was measured of one plan, and the routing that it was made with."""

    plan: Plan
    known: Known
    seen: Cleaned


@dataclass(frozen=True, slots=True)
class Together:
    """A profile that explains several plans' measurements as well as one can, and what it says of each."""

    profile: Profile
    before: tuple[Times, ...]
    after: tuple[Times, ...]
    factors: Mapping[str, int]  # by device, of its former times, in ppm


def calibrated(plan: Plan, inventory: Inventory, profile: Profile, known: Known, seen: Cleaned) -> Calibrated:
    """The profile with the calibration for this model that explains what was seen."""
    found = calibrated_together([Observed(plan, known, seen)], inventory, profile)
    return Calibrated(found.profile, found.before[0], found.after[0], found.factors)


def calibrated_together(observed: Sequence[Observed], inventory: Inventory, profile: Profile) -> Together:
    """The profile with the calibration for a model that best explains what was seen of several plans."""
    devices = tuple(dict.fromkeys(use.name for each in observed for use in each.plan.devices))
    digest = inventory.table_digest()

    def times(factors: Mapping[str, Fraction]) -> tuple[Times, ...]:
        made = _with(profile, digest, devices, factors)
        return tuple(predicted(each.plan, inventory, made, each.known, each.seen) for each in observed)

    # What a device takes of tokens and of prompts is told apart: kernels, and what limits them, are others.
    names = [*devices, _SPLIT, _TOKEN]
    if any(each.seen.prompt for each in observed):
        names += [name + _PROMPT for name in devices]
    factors = dict.fromkeys(names, Fraction(1))
    before = after = times(factors)
    slopes = {
        name: [(b - a) / _STEP for a, b in _all_pairs(before, times({**factors, name: 1 + _STEP}))]
        for name in names
    }
    measured = [m for each in observed for m in (each.seen.token, each.seen.prompt) if m is not None]
    goals = [Fraction(m.ns) for m in measured]
    for _ in range(_PASSES):
        now = [a for a, _ in _all_pairs(after, after)]
        rows = [
            ([slopes[name][i] / goal for name in names], (goal - now[i]) / goal)
            for i, goal in enumerate(goals)
        ]
        moved = [factors[name] - 1 for name in names]
        change = _ridge(rows, moved)
        factors = {
            name: min(max(factors[name] + each, _LEAST), _MOST)
            for name, each in zip(names, change, strict=True)
        }
        after = times(factors)
    told = {name: int(factors[name] * PPM) for name in names if name not in (_SPLIT, _TOKEN)}
    counted = sum(m.samples for m in measured)
    return Together(_with(profile, digest, devices, factors, counted), before, after, told)


def _all_pairs(one: Sequence[Times], other: Sequence[Times]) -> list[tuple[Fraction, Fraction]]:
    return [pair for a, b in zip(one, other, strict=True) for pair in _pairs(a, b)]


def _pairs(one: Times, other: Times) -> list[tuple[Fraction, Fraction]]:
    both = ((one.token_ns, other.token_ns), (one.prompt_ns, other.prompt_ns))
    return [(Fraction(a), Fraction(b)) for a, b in both if a is not None and b is not None]


def _with(
    profile: Profile, digest: str, devices: Sequence[str], factors: Mapping[str, Fraction], runs: int = 0
) -> Profile:
    """The profile with a model's calibration times some factors."""
    old = calibration_for(profile, digest)
    scales = _scaled(old.scale_ppm, {name: factors[name] for name in devices})
    prompts = {name: factors[name + _PROMPT] for name in devices if name + _PROMPT in factors}
    # A profile at the bounds of its figures stays one: they can be as large as a file may say.
    made = Calibration(
        model=digest,
        split_ns=min(round(old.split_ns * factors[_SPLIT]), MAX_NS),
        mixed_ns=old.mixed_ns,
        token_ns=min(round(old.token_ns * factors[_TOKEN]), MAX_NS),
        scale_ppm=scales,
        prompt_scale_ppm=_scaled(old.prompt_scale_ppm or {}, prompts) or None,
        residual_ppm=old.residual_ppm,
        runs=min(old.runs + runs, MAX_COUNT),
    )
    others = tuple(c for c in profile.calibrations if c.model != digest)
    return profile.model_copy(update={"calibrations": (*others, made)})


def _scaled(old: Mapping[str, int], factors: Mapping[str, Fraction]) -> dict[str, int]:
    """Scales of a calibration times some factors, in ppm."""
    new = {name: min(round(old.get(name, PPM) * factor), MAX_PPM) for name, factor in factors.items()}
    return {**old, **new}


def _ridge(rows: Sequence[tuple[list[Fraction], Fraction]], moved: Sequence[Fraction]) -> list[Fraction]:
    """The change x of some factors, `moved` by now, that makes the sum of ((row x - miss) / noise)^2 and of
    ((moved + x) / trust)^2 least.
    """
    n = len(moved)
    matrix = [[Fraction(0)] * n for _ in range(n)]
    right = [Fraction(0)] * n
    for i in range(n):
        matrix[i][i] += 1 / _TRUST**2
        right[i] -= moved[i] / _TRUST**2
        for row, miss in rows:
            right[i] += row[i] * miss / _NOISE**2
            for j in range(n):
                matrix[i][j] += row[i] * row[j] / _NOISE**2
    return _solved(matrix, right)


def _solved(matrix: list[list[Fraction]], right: list[Fraction]) -> list[Fraction]:
    """x of matrix x = right, by elimination; the matrix is symmetric and positive definite."""
    n = len(right)
    for i in range(n):
        for k in range(i + 1, n):
            share = matrix[k][i] / matrix[i][i]
            right[k] -= share * right[i]
            for j in range(i, n):
                matrix[k][j] -= share * matrix[i][j]
    found = [Fraction(0)] * n
    for i in reversed(range(n)):
        known = sum((matrix[i][j] * found[j] for j in range(i + 1, n)), start=Fraction(0))
        # Times are whole nanoseconds: finer fractions would only grow from pass to pass.
        found[i] = ((right[i] - known) / matrix[i][i]).limit_denominator(10**9)
    return found


def deviation_ppm(before: Times, seen: Cleaned) -> int:
    """How far the measurement is from the prediction, at worst, in shares of the prediction."""
    pairs = ((before.token_ns, seen.token), (before.prompt_ns, seen.prompt))
    return max(
        (abs(ns - m.ns) * PPM // max(ns, 1) for ns, m in pairs if ns is not None and m is not None), default=0
    )
