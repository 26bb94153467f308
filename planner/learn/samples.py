"""Measured times of a plan, and which of them say something about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median_low

from planner.records import MAX_COUNT

LEAST = 3  # samples of one kind: fewer have no middle that one bad sample cannot move
_FLOOR_PERCENT = 2  # timers and loads differ by as much
_FAR = 5  # median deviations from the median: 3.4 standard deviations of a normal spread
_NOISY_PERCENT = 10  # a median deviation above it: the samples are not of one machine


class Kind(Enum):
    """What a sample is the time of."""

    TOKEN = "token"  # one token of one sequence
    PROMPT = "prompt"  # a whole prompt


class Dropped(Enum):
    """Why a sample says nothing about the plan."""

    WARM_UP = "of the first pass"
    AFTER_CHANGE = "of the first pass after a change"
    CONTENDED = "while something else ran"
    OTHER_USE = "with another number of sequences at once"
    TOO_LONG = "of more tokens than the plan's context holds"
    OUTLIER = "far from the others"
    EMPTY = "of no time or no tokens"


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured time."""

    kind: Kind
    ns: int  # of a token, or of the whole prompt
    tokens: int  # made, or of the prompt
    depth: int = 0  # cells filled, of a token in the middle of the answer
    lanes: int = 1  # sequences computed at once
    count: int = 1  # times that this is the median of
    warm_up: bool = False
    after_change: bool = False
    contended: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """The middle of the samples that count."""

    ns: int
    tokens: int
    depth: int
    samples: int


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What the samples of a plan say, and what was left out of them."""

    token: Measured | None  # None: too few, or too far from each other
    prompt: Measured | None
    dropped: Mapping[Dropped, int]
    noisy: tuple[Kind, ...] = ()


def cleaned(samples: Iterable[Sample], lanes: int = 1, cells: int = MAX_COUNT) -> Cleaned:
    """The middle of tokens and of prompts, without what is known or seen to be no measurement of the plan.

    `lanes`: sequences at once that the plan is for; `cells`: of its cache.
    Prompts are compared with those of their own length: the length that most have decides.
    """
    dropped: Counter[Dropped] = Counter()
    kept: dict[Kind, list[Sample]] = {kind: [] for kind in Kind}
    for sample in samples:
        if why := _fault(sample, lanes, cells):
            dropped[why] += sample.count
        else:
            kept[sample.kind].append(sample)
    prompts = kept[Kind.PROMPT]
    if prompts:
        usual = median_low([s.tokens for s in _spread(prompts)])
        near = [s for s in prompts if usual * 3 <= s.tokens * 4 and s.tokens * 3 <= usual * 4]
        dropped[Dropped.OTHER_USE] += sum(s.count for s in prompts) - sum(s.count for s in near)
        # Lengths differ a little: a prompt's time is counted as that of the usual length.
        kept[Kind.PROMPT] = [_scaled(s, usual) for s in near]
    found: dict[Kind, Measured | None] = {}
    noisy = []
    for kind, each in kept.items():
        near, far = _without_outliers(each)
        dropped[Dropped.OUTLIER] += far
        found[kind] = _middle(near)
        if found[kind] and _deviation(near) * 100 > _NOISY_PERCENT * median_low(
            [s.ns for s in _spread(near)]
        ):
            found[kind] = None
            noisy.append(kind)
    return Cleaned(
        found[Kind.TOKEN], found[Kind.PROMPT], {w: n for w, n in dropped.items() if n}, tuple(noisy)
    )


def _fault(sample: Sample, lanes: int, cells: int) -> Dropped | None:
    if sample.ns <= 0 or sample.tokens <= 0 or sample.count <= 0:
        return Dropped.EMPTY
    if sample.warm_up:
        return Dropped.WARM_UP
    if sample.after_change:
        return Dropped.AFTER_CHANGE
    if sample.contended:
        return Dropped.CONTENDED
    if max(sample.depth, sample.tokens) > cells:
        return Dropped.TOO_LONG
    return Dropped.OTHER_USE if sample.lanes != lanes else None


def _scaled(sample: Sample, tokens: int) -> Sample:
    return Sample(
        sample.kind, sample.ns * tokens // sample.tokens, tokens, sample.depth, sample.lanes, sample.count
    )


def _spread(samples: Sequence[Sample]) -> list[Sample]:
    """A median of several times stands for as many, up to a dozen."""
    return [sample for sample in samples for _ in range(min(sample.count, 12))]


def _deviation(samples: Sequence[Sample]) -> int:
    middle = median_low([s.ns for s in _spread(samples)])
    return median_low([abs(s.ns - middle) for s in _spread(samples)])


def _without_outliers(samples: Sequence[Sample]) -> tuple[list[Sample], int]:
    if not samples:
        return [], 0
    middle = median_low([s.ns for s in _spread(samples)])
    limit = _FAR * max(_deviation(samples), middle * _FLOOR_PERCENT // 100)
    near = [s for s in samples if abs(s.ns - middle) <= limit]
    return near, sum(s.count for s in samples) - sum(s.count for s in near)


def _middle(samples: Sequence[Sample]) -> Measured | None:
    if sum(s.count for s in samples) < LEAST:
        return None
    each = _spread(samples)
    return Measured(
        median_low([s.ns for s in each]),
        median_low([s.tokens for s in each]),
        median_low([s.depth for s in each]),
        sum(s.count for s in samples),
    )
