"""When planning must be over by the clock, and what ended its searches: a proof, the work, the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Deadline:
    """Seconds by the clock for a whole planning run; without a limit no clock is ever looked at.

    The seconds are those that a person waits: from `began` (None: now) to the plan. Searches end earlier, by
    what is kept for the work after them.
    """

    def __init__(
        self,
        seconds: float = math.inf,
        now: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        self.now, self.seconds = now, seconds
        self.ends = (now() if began is None else began) + seconds if math.isfinite(seconds) else math.inf
        self.ended: set[str] = set()  # clock, work; shared with all parts
        self._whole = self  # what this is a part of
        self._kept_s = 0.0

    @property
    def limited(self) -> bool:
        return math.isfinite(self.ends)

    @property
    def ended_by(self) -> str:
        """What ended the searches so far: clock before work before proof."""
        return next((what for what in ("clock", "work") if what in self.ended), "proof")

    def left_s(self) -> float:
        """Seconds left, infinitely many without a limit."""
        return max(self._last() - self.now(), 0.0) if self.limited else math.inf

    def over(self) -> bool:
        """Whether the time is up: the search that asks ends by the clock."""
        if not self.limited or self.now() < self._last():
            return False
        self.ended.add("clock")
        return True

    def keep(self, since: float, times: int) -> None:
        """Keep for the work after the searches a multiple of what was just done, since a look at the clock.

        Both are of one kind, prices and sums of every layer, and a machine that is busy slows both. Three
        quarters of the limit at most: a search gets something.
        """
        if self.limited:
            whole = self._whole
            whole._kept_s = max(whole._kept_s, min(times * (self.now() - since), whole.seconds * 0.75))

    def look(self) -> float:
        """The time by the clock; 0 without a limit."""
        return self.now() if self.limited else 0.0

    def _last(self) -> float:
        """When the last search must be over."""
        return min(self.ends, self._whole.ends - self._whole._kept_s)

    def part(self, share: float) -> Deadline:
        """A deadline for the next problem, which may take this share of what is left."""
        made = Deadline(math.inf, self.now)
        made.seconds, made.ended, made._whole = self.seconds, self.ended, self._whole
        if self.limited:
            made.ends = self.now() + share * self.left_s()
        return made
