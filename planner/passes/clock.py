"""How long the problems of one plan may be worked on."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from planner.solver.solve import Limits

_SLACK = 6  # a machine may be as much slower, or busier, than the work is counted for
_LEAST_S = 1.0


@dataclass(frozen=True, slots=True)
class Clock:
    """The limit of each problem, and of all of them together."""

    time_limit_s: float = 20.0  # of work for each problem to solve
    ends: float = 0.0  # the monotonic clock's time by which all of them must be done; 0: none set yet

    def begun(self) -> Clock:
        """The same with an end: all problems of one plan together take six times the limit by the clock."""
        return self if self.ends else replace(self, ends=time.monotonic() + _SLACK * self.time_limit_s)

    def shared(self, parts: int) -> Clock:
        """The same time for several plans that are made together."""
        return replace(self, time_limit_s=self.time_limit_s / parts)

    @property
    def wall_s(self) -> float:
        """Seconds by the clock that the next problem may take: a safety net, it differs between machines."""
        most = _SLACK * self.time_limit_s
        return max(min(most, self.ends - time.monotonic()), _LEAST_S) if self.ends else most

    def limits(self) -> Limits:
        """The limits of the next problem."""
        return Limits(self.time_limit_s, self.wall_s)
