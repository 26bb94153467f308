"""What llama-server writes: times of requests and sums of drafts in its log, its page of metrics.

A log may hold what a stranger sent, and a file given as one may be anything: a number is read as far as it is
one, bounded, and is 0 otherwise. Lines are as b10068, b10434 and b11549 write them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest

MOST = 1 << 53  # a count or a time in ns beyond it is none
_MS = 1_000_000
_A = re.ASCII
_TIMING = re.compile(
    r"print_timing: id +(\d+) \| task (-?\d+) \| +(prompt )?eval time = +([0-9.]+) ms /"
    r" +(\d+) (?:tokens|runs)",
    _A,
)
_REQUEST = re.compile(
    r"draft acceptance = [0-9.]+ \( *(\d+) accepted / *(\d+) generated\)(?:, mean len = *([0-9.]+))?", _A
)
_SUMS = re.compile(
    r"statistics +(\S+): #calls\(b,g,a\) = +\d+ +(\d+) +\d+, #gen drafts = +(\d+),"
    r" #acc drafts = +\d+, #gen tokens = +(\d+), #acc tokens = +(\d+)(.*)",
    _A,
)
_RATES = re.compile(r"#acc rate/pos = \(([0-9., ]*)\)", _A)
_FIGURE = re.compile(r'^llamacpp:(\w+)(?:\{position="(\d{1,3})"\})? ([0-9.e+]+)\s*$', re.M | _A)


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a request's prompt or its answer took."""

    slot: str
    task: str
    prompt: bool  # else the tokens of the answer
    ns: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafted tokens of a request, or of all since the server started."""

    steps: int  # with a draft; 0: not told
    drafted: int
    accepted: int
    asked: int = 0  # steps that might have had one, where that is told
    at: tuple[int, ...] = ()  # steps that accepted at least 1, 2, … guesses; (): not told


def whole(text: str) -> int:
    """Some decimal digits as a count, at most MOST."""
    digits = text.lstrip("0")
    return min(int(digits or "0"), MOST) if len(digits) <= 16 else MOST


def decimal(text: str) -> float:
    """A decimal number; 0 for what is none, or is infinite."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def nanoseconds(value: float) -> int:
    """A time as a whole number from 0 to MOST; ValueError for NaN."""
    return round(min(max(value, 0), MOST))


def timing(line: str) -> Timing | None:
    """What a line says of a request's time; None for every other line."""
    match = _TIMING.search(line)
    if match is None:
        return None
    return Timing(match[1], match[2], bool(match[3]), nanoseconds(decimal(match[4]) * _MS), whole(match[5]))


def requests(text: str) -> tuple[Drafts, ...]:
    """The drafts of each request that a text tells of."""
    found = []
    for accepted, drafted, mean in _REQUEST.findall(text):
        right, longer = whole(accepted), decimal(mean) - 1
        # Where nothing was accepted the mean is 1 and tells no steps.
        steps = min(round(right / longer), MOST) if longer > 0 and right else 0
        found.append(Drafts(steps, whole(drafted), right))
    return tuple(found)


def sums(text: str) -> Mapping[str, Drafts]:
    """The drafts since the start, by who drafts: every line repeats the sums of those before it."""
    found = {}
    for match in _SUMS.finditer(text):
        asked, steps, drafted, accepted = (whole(match[n]) for n in (2, 3, 4, 5))
        rates = _RATES.search(match[6])
        parts = rates[1].split(",") if rates else ()
        at = tuple(round(steps * min(decimal(part), 1.0)) for part in parts if part.strip(" ."))
        found[match[1]] = Drafts(steps, drafted, accepted, asked, at)
    return found


def by_position(drafts: Iterable[Drafts]) -> list[int]:
    """Steps of all that accepted at least 1, 2, … guesses."""
    return [sum(column) for column in zip_longest(*(each.at for each in drafts), fillvalue=0)]


def figures(text: str) -> Mapping[tuple[str, str], float]:
    """A page of metrics by name, without `llamacpp:`, and position ("": of none)."""
    return {(name, position): decimal(value) for name, position, value in _FIGURE.findall(text)}
