"""How long the problems of one plan may be worked on: counted work, and a deadline by the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from planner.solver.deadline import Deadline
from planner.solver.solve import Limits


@dataclass(frozen=True, slots=True)
class Clock:
    """The work for each problem, and when all of them must be done."""

    work_s: float = 20.0  # deterministic seconds for each problem to solve: the same on every machine
    deadline: Deadline = field(default_factory=Deadline, compare=False)  # by the clock, for all of them
    # Told what is done of what is expected: (problems solved, problems in all); an expectation may rise.
    watch: Callable[[int, int], None] = field(default=lambda done, total: None, compare=False)

    def part(self, share: float) -> Clock:
        """The same with a share of the time that is left."""
        return replace(self, deadline=self.deadline.part(share))

    def limits(self, share: float = 1.0) -> Limits:
        """The limits of the next problem, which may take a share of the time that is left."""
        deadline = self.deadline if share == 1.0 else self.deadline.part(share)
        return Limits(self.work_s, deadline=deadline)
