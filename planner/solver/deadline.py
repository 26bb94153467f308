"""When planning must be over by the clock, and what ended its searches: a proof, the work, the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Deadline:
    """Seconds by the clock for a whole planning run; without a limit no clock is ever looked at."""

    def __init__(self, seconds: float = math.inf, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self.seconds = now, seconds
        self.ends = now() + seconds if math.isfinite(seconds) else math.inf
        self.ended: set[str] = set()  # clock, work; shared with all parts

    @property
    def limited(self) -> bool:
        return math.isfinite(self.ends)

    @property
    def ended_by(self) -> str:
        """What ended the searches so far: clock before work before proof."""
        return next((what for what in ("clock", "work") if what in self.ended), "proof")

    def left_s(self) -> float:
        """Seconds left, infinitely many without a limit."""
        return max(self.ends - self.now(), 0.0) if self.limited else math.inf

    def over(self) -> bool:
        """Whether the time is up: the search that asks ends by the clock."""
        if not self.limited or self.now() < self.ends:
            return False
        self.ended.add("clock")
        return True

    def part(self, share: float) -> Deadline:
        """A deadline for the next problem, which may take this share of what is left."""
        made = Deadline(math.inf, self.now)
        made.seconds, made.ended = self.seconds, self.ended
        if self.limited:
            made.ends = self.now() + share * self.left_s()
        return made
