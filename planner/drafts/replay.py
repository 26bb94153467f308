"""Draft lengths replayed on a log of greedy decoding: what each would have taken.

A log is, for each position of a text, whether the draft's guess is right once all before it are the text's
own. With greedy decoding that depends on nothing else, so that every length can be replayed on it exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from planner.drafts.acceptance import Step
from planner.drafts.length import MOST, DraftLength, time_of


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of a text of `tokens` tokens."""

    tokens: int
    steps: int
    time_ns: int
    drafted: int
    accepted: int

    @property
    def speed(self) -> Fraction:
        """Tokens a nanosecond."""
        return Fraction(self.tokens, self.time_ns) if self.time_ns else Fraction(0)


def right_of(steps: Iterable[Step]) -> tuple[bool, ...]:
    """The log behind some verified drafts, in their order.

    The token that a step makes beyond its draft was not guessed: as one more right guess where the whole
    draft was right, else the wrong guess in its place.
    """
    found: list[bool] = []
    for step in steps:
        found += [True] * step.accepted + [step.accepted >= step.drafted]
    return tuple(found)


def fixed(right: Sequence[bool], tokens: int, step_ns: Sequence[int]) -> Replayed:
    """One length throughout."""
    return _replay(right, lambda: tokens, lambda step: None, step_ns)


def best_fixed(right: Sequence[bool], step_ns: Sequence[int], most: int = MOST) -> tuple[int, Replayed]:
    """The length that would have been best, no draft included, and what it takes."""
    found = [(n, fixed(right, n, step_ns)) for n in range(most + 1)]
    return max(found, key=lambda each: (each[1].speed, -each[0]))


def following(
    right: Sequence[bool], base: int, step_ns: Sequence[int], *, costs_known: bool = True
) -> Replayed:
    """The length that follows what is accepted, from a planned one."""
    length = DraftLength(base, step_ns if costs_known else ())
    return _replay(right, lambda: length.tokens, length.saw, step_ns)


def oracle(right: Sequence[bool], step_ns: Sequence[int], most: int = MOST) -> Replayed:
    """Every step with the length that is best for all that follows: no policy can be faster."""
    runs = _runs(right, most)
    n = len(right)
    least = [0] * (n + 1)
    chosen = [0] * n
    for at in range(n - 1, -1, -1):
        times = [
            time_of(step_ns, length) + least[min(at + min(runs[at], length) + 1, n)]
            for length in range(most + 1)
        ]
        least[at] = min(times)
        chosen[at] = times.index(least[at])
    at = steps = drafted = accepted = 0
    while at < n:
        took = min(runs[at], chosen[at])
        steps, drafted, accepted, at = steps + 1, drafted + chosen[at], accepted + took, at + took + 1
    return Replayed(n, steps, least[0] if n else 0, drafted, accepted)


def _replay(
    right: Sequence[bool], length: Callable[[], int], saw: Callable[[Step], None], step_ns: Sequence[int]
) -> Replayed:
    runs = _runs(right, 2 * MOST)
    at = steps = time_ns = drafted = accepted = 0
    while at < len(right):
        tokens = length()
        took = min(runs[at], tokens)
        saw(Step(tokens, took))
        time_ns += time_of(step_ns, tokens)
        steps, drafted, accepted, at = steps + 1, drafted + tokens, accepted + took, at + took + 1
    return Replayed(len(right), steps, time_ns, drafted, accepted)


def _runs(right: Sequence[bool], most: int) -> list[int]:
    """How many guesses from each position on are right in a row, up to `most`."""
    found = [0] * (len(right) + 1)
    for at in range(len(right) - 1, -1, -1):
        found[at] = min(found[at + 1] + 1, most) if right[at] else 0
    return found[:-1]
