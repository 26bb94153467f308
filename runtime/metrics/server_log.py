"""What llama-server says of each request in its log, into metrics as the lines come."""

from __future__ import annotations

import re
from collections.abc import Callable

from runtime.metrics.registry import Metrics, Request

_MS = 1_000_000
_SLOT = r"print_timing: id +(\d+) \| task (-?\d+) \| +"
_PROMPT = re.compile(_SLOT + r"prompt eval time = +([0-9.]+) ms / +(\d+) tokens")
_TOKENS = re.compile(_SLOT + r"eval time = +([0-9.]+) ms / +(\d+) (?:tokens|runs)")
_DRAFTS = re.compile(
    r"draft acceptance = [0-9.]+ \( *(\d+) accepted / *(\d+) generated\)(?:, mean len = *([0-9.]+))?"
)
_SUMS = re.compile(
    r"statistics +(\S+): #calls\(b,g,a\) = .*?#gen drafts = +(\d+),.*?#gen tokens = +(\d+),"
    r" #acc tokens = +(\d+)(?:.*?#acc rate/pos = \(([0-9., ]*)\))?"
)


def listening(metrics: Metrics) -> Callable[[str], None]:
    """A function that takes the server's log line by line.

    The time until the first token counts from when a slot took the request: what waits in the queue is not in
    the log. Sums of drafts by position come with `--verbosity 4`; without it those of each request are added.
    """
    waiting: dict[tuple[str, str], tuple[int, int]] = {}
    sums: dict[str, tuple[int, int, int, tuple[int, ...]]] = {}
    totals = [0, 0, 0]

    def heard(line: str) -> None:
        if match := _PROMPT.search(line):
            waiting[match[1], match[2]] = _ns(match[3]), int(match[4])
        elif match := _TOKENS.search(line):
            first_ns, prompt = waiting.pop((match[1], match[2]), (0, 0))
            made = int(match[4])
            metrics.request(Request(prompt, first_ns, made, _ns(match[3]) // max(made, 1)))
        elif match := _SUMS.search(line):
            rates = [float(p) for p in (match[5] or "").split(",") if _is_rate(p)]
            drafts = int(match[2])
            at = tuple(round(drafts * rate) for rate in rates)
            sums[match[1]] = drafts, int(match[3]), int(match[4]), at
            _tell(metrics, sums)
        elif (match := _DRAFTS.search(line)) and not sums:
            accepted, proposed = int(match[1]), int(match[2])
            longer = float(match[3]) - 1 if match[3] and _is_rate(match[3]) else 0.0
            totals[0] += round(accepted / longer) if longer > 0 else 0
            totals[1] += proposed
            totals[2] += accepted
            metrics.drafted_in_all(totals[0], totals[1], totals[2], ())

    return heard


def _tell(metrics: Metrics, sums: dict[str, tuple[int, int, int, tuple[int, ...]]]) -> None:
    longest = max(len(each[3]) for each in sums.values())
    at = [sum(each[3][n] for each in sums.values() if n < len(each[3])) for n in range(longest)]
    drafts, proposed, accepted = (sum(n) for n in zip(*(each[:3] for each in sums.values()), strict=True))
    metrics.drafted_in_all(drafts, proposed, accepted, at)


def _is_rate(text: str) -> bool:
    return re.fullmatch(r" *\d+(\.\d+)? *", text) is not None


def _ns(text: str) -> int:
    return round(float(text) * _MS) if _is_rate(text) else 0
