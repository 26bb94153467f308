"""A problem cut by how many layers the CPU leads: where it must lead, each number is a problem of its own.

Fixed layer devices on the host leave a relaxation that knows which layers these are; together the parts
are the whole problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.solver.problem import Option, Problem, Solution


@dataclass(frozen=True, slots=True)
class Part:
    """The placements whose first `count` layers, and no others, have the CPU as layer device."""

    count: int
    problem: Problem
    kept: tuple[tuple[int, ...], ...]  # by decision: the options of the whole problem that are left

    def whole(self, solution: Solution) -> Solution:
        """The same placement in the whole problem."""
        return Solution(tuple(kept[c] for kept, c in zip(self.kept, solution.choices, strict=True)))


def parts(problem: Problem) -> Iterator[Part]:
    """All parts that have a placement of each decision; the problem itself unless the CPU must lead."""
    every = tuple(tuple(range(len(d.options))) for d in problem.decisions)
    if not problem.host_leads:
        yield Part(0, problem, every)
        return
    layers = [i for i, decision in enumerate(problem.decisions) if decision.layer]
    for count in range(len(layers) + 1):
        lead = set(layers[:count])
        kept = tuple(
            tuple(
                j
                for j, option in enumerate(decision.options)
                if not decision.layer or problem.devices[option.entry].host == (i in lead)
            )
            for i, decision in enumerate(problem.decisions)
        )
        if all(kept):
            yield Part(count, _left(problem, kept), kept)


def _left(problem: Problem, kept: tuple[tuple[int, ...], ...]) -> Problem:
    options: dict[tuple[int, tuple[int, ...]], tuple[Option, ...]] = {}  # alike: shared
    for d, js in zip(problem.decisions, kept, strict=True):
        options.setdefault((id(d.options), js), tuple(d.options[j] for j in js))
    decisions = tuple(
        replace(d, options=options[id(d.options), js]) for d, js in zip(problem.decisions, kept, strict=True)
    )
    return replace(problem, decisions=decisions)
