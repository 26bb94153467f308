"""A draft length that follows what is accepted, for each sequence by itself.

After every fifth verified draft the last twenty decide: below 15 % of their tokens accepted the length falls
by one, above 50 % it rises by one, between half of the planned length and twice of it, at most eight.
These shares know nothing of costs: where a longer batch is dear (experts on the CPU) more than half may be
accepted at a length that is past its best. With the times of a step known, one more token must pay by the
rate that the window shows, and one less is taken where it pays clearly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from planner.constants import PPM
from planner.drafts.acceptance import Step

WINDOW, EVERY = 20, 5  # verified drafts
LOW, HIGH = 15, 50  # percent of drafted tokens accepted
MOST = 8
_CLEAR = 103  # percent: what a shorter draft must bring


def bounds(base: int, most: int = MOST) -> tuple[int, int]:
    """The shortest and the longest draft of a plan that drafts `base` tokens; `most` is a limit of memory."""
    high = max(min(2 * base, MOST), base)
    return min(max(base // 2, 1), most), min(high, most)


class DraftLength:
    """The length of one sequence's next draft.

    `step_ns`: times of a step that verifies 0, 1, 2, … drafted tokens, drafting included; () where they are
    not known, and beyond its end a step is taken to grow as it did last. Units are free as all are the same.
    """

    def __init__(self, base: int, step_ns: Sequence[int] = (), most: int = MOST) -> None:
        self.low, self.high = bounds(base, most)
        self.tokens = min(max(base, self.low), self.high)
        self._step_ns = tuple(step_ns) if len(step_ns) > 1 else ()
        self._last: deque[Step] = deque(maxlen=WINDOW)
        self._since = 0

    def saw(self, step: Step) -> None:
        """Learn from a verified draft; one of no tokens tells nothing."""
        if step.drafted <= 0:
            return
        self._last.append(step)
        self._since += 1
        if self._since == EVERY:
            self._since = 0
            self.tokens += self._change()

    def _change(self) -> int:
        accepted, drafted = (sum(s.accepted for s in self._last), sum(s.drafted for s in self._last))
        percent, n = accepted * 100, self.tokens
        if not self._step_ns:
            falls, rises = percent < LOW * drafted, percent > HIGH * drafted
        else:
            shorter, same, longer = (self._worth(n + d) for d in (-1, 0, 1))
            falls = shorter * 100 > same * _CLEAR or (percent < LOW * drafted and shorter >= same)
            rises = percent > HIGH * drafted and longer > same
        if falls and n > self.low:
            return -1
        return 1 if rises and not falls and n < self.high else 0

    def _worth(self, tokens: int) -> int:
        """Tokens a second, in some unit, of drafts of this length at the window's rate."""
        accepted = sum(s.accepted for s in self._last)
        tried = accepted + sum(s.accepted < s.drafted for s in self._last)
        each = accepted * PPM // max(tried, 1)
        made = share = PPM
        for _ in range(tokens):
            share = share * each // PPM
            made += share
        return made * PPM // max(time_of(self._step_ns, tokens), 1)


def time_of(step_ns: Sequence[int], tokens: int) -> int:
    """The time of a step with this many drafted tokens, carried on in a line past the last known one."""
    if tokens < len(step_ns):
        return step_ns[tokens]
    return step_ns[-1] + (tokens - len(step_ns) + 1) * max(step_ns[-1] - step_ns[-2], 0)
