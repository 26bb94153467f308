"""What llama-server says of its drafts: in its log and in its /metrics.

Four texts, seen of b10068 and b11549 on the same requests, with the same counts: a line a request
("draft acceptance = …"); a line a request with each position's rate (verbosity 4); a line a step
("accepted 3/4 draft tokens", verbosity 5); the counters of /metrics (b10434 and later). The one that tells
most is taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from planner.drafts.acceptance import Acceptance, NoAcceptance, Step, counted, of_steps, of_totals

_STEP = re.compile(r"id +(\d+) \| task (\d+) \| accepted +(\d+)/ *(\d+) draft tokens")
_STATISTICS = re.compile(
    r"statistics +(\S+): #calls\(b,g,a\) = +\d+ +(\d+) +\d+, #gen drafts = +(\d+),"
    r" #acc drafts = +\d+, #gen tokens = +(\d+), #acc tokens = +(\d+)(.*)"
)
_RATES = re.compile(r"#acc rate/pos = \(([0-9., ]*)\)")
_REQUEST = re.compile(
    r"draft acceptance = [0-9.]+ \( *(\d+) accepted / *(\d+) generated\)(?:, mean len = *([0-9.]+))?"
)
_METRIC = re.compile(r'^llamacpp:(spec_decode_\w+)(?:\{position="(\d{1,3})"\})? ([0-9.e+]+)\s*$', re.M)
_MOST = 1 << 53  # a count beyond it is none


@dataclass(frozen=True, slots=True)
class _Sums:
    accepted: int
    drafted: int
    steps: int


def acceptance_in(text: str, path: str) -> Acceptance:
    """Acceptance by position, as far as a log or a page of metrics tells; raises NoAcceptance with `path`."""
    steps = [step for one in steps_in(text).values() for step in one]
    statistics = _statistics(text)
    if steps:
        found = of_steps(steps)
        # A step without a draft writes no line; n-grams often find none.
        return found.scaled(*statistics[0]) if statistics else found
    if metrics := _metrics(text):
        return metrics
    if statistics:
        return statistics[1]
    if sums := _requests(text):
        return of_totals(sums.accepted, sums.drafted, sums.steps)
    raise NoAcceptance(
        path,
        "tells nothing of drafted tokens: give a log of llama-server that drafted, or its /metrics "
        "(started with --metrics)",
    )


def steps_in(text: str) -> Mapping[tuple[int, int], tuple[Step, ...]]:
    """The verified drafts of each slot's task, in their order; empty for a log without single steps."""
    found: dict[tuple[int, int], list[Step]] = {}
    for slot, task, accepted, drafted in _STEP.findall(text):
        step = Step(min(int(drafted), _MOST), min(int(accepted), _MOST))
        found.setdefault((int(slot), int(task)), []).append(step)
    return {key: tuple(steps) for key, steps in found.items()}


def _statistics(text: str) -> tuple[tuple[int, int], Acceptance] | None:
    """Drafts and steps, and the acceptance; every line repeats the sums of those before it."""
    last = {m[1]: m for m in _STATISTICS.finditer(text)}
    if not last:
        return None
    asked, drafts, drafted, accepted = (
        sum(min(int(m[n]), _MOST) for m in last.values()) for n in (2, 3, 4, 5)
    )
    if not drafts:
        return None
    rates = [(int(m[3]), r[1]) for m in last.values() if (r := _RATES.search(m[6]))]
    if not rates:
        return (drafts, asked), of_totals(accepted, drafted, asked)
    by_position: list[int] = []
    for number, each in rates:
        for n, part in enumerate(p for p in each.split(",") if p.strip(" .")):
            by_position += [0] * (n + 1 - len(by_position))
            by_position[n] += round(number * float(part))
    return (drafts, asked), counted(by_position, drafts).scaled(drafts, asked)


def _metrics(text: str) -> Acceptance | None:
    by_position: dict[int, int] = {}
    sums: dict[str, int] = {}
    for name, position, value in _METRIC.findall(text):
        number = _number(value)
        if position:
            by_position[int(position)] = number
        sums[name] = number
    steps = sums.get("spec_decode_num_drafts_total", 0)
    if not steps:
        return None
    if by_position:
        return counted([by_position.get(n, 0) for n in range(max(by_position) + 1)], steps)
    accepted = sums.get("spec_decode_num_accepted_tokens_total", 0)
    return of_totals(accepted, sums.get("spec_decode_num_draft_tokens_total", 0), steps)


def _requests(text: str) -> _Sums | None:
    found = _REQUEST.findall(text)
    if not found:
        return None
    accepted = drafted = steps = 0
    for right, guesses, mean in found:
        right_n, guesses_n = min(int(right), _MOST), min(int(guesses), _MOST)
        accepted, drafted = accepted + right_n, drafted + guesses_n
        longer = float(mean) - 1 if mean and mean.count(".") < 2 else 0.0
        # Where nothing was accepted the mean is 1 and tells no steps: one guess each is the fewest.
        steps += round(right_n / longer) if longer > 0 and right_n else guesses_n
    return _Sums(accepted, drafted, steps)


def _number(text: str) -> int:
    try:
        return min(round(float(text)), _MOST)
    except (ValueError, OverflowError):
        return 0
