"""Of placements that cost the same the one with the fewest runs of layers: layers of one device together.

Layers with equal options may change places. Where one hands over to the CPU, the next may follow on any
device for the same price: the solver is indifferent, a person who reads the plan is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from planner.solver.evaluate import Evaluation, evaluate
from planner.solver.problem import Option, Problem, Solution

_MOST_DEVICES = 5  # orders of more are too many to try


def break_ties(problem: Problem, solution: Solution) -> Solution:
    """A placement of the same price, or less, with as few runs as reordering equal layers gives."""
    if sum(not d.host for d in problem.devices) < 2 or len(problem.devices) > _MOST_DEVICES:
        return solution
    best, found = solution, evaluate(problem, solution)
    for other in _orders(problem, solution):
        judged = evaluate(problem, other)
        if judged.feasible and _rank(judged) < _rank(found):
            best, found = other, judged
    return best


def _rank(found: Evaluation) -> tuple[int, int]:
    return found.objective_ns, found.runs


def _orders(problem: Problem, solution: Solution) -> Iterator[Solution]:
    """Equal layers sorted by device, in every order of the devices, split layers first or last in each."""
    groups: dict[tuple[Option, ...], list[int]] = {}
    for index, decision in enumerate(problem.decisions):
        if decision.layer:
            groups.setdefault(decision.options, []).append(index)
    for order in itertools.permutations(range(len(problem.devices))):
        for sign in (1, -1):
            yield Solution(tuple(_sorted(problem, solution, list(groups.values()), order, sign)))


def _sorted(
    problem: Problem, solution: Solution, groups: Sequence[list[int]], order: tuple[int, ...], sign: int
) -> list[int]:
    choices = list(solution.choices)
    for members in groups:
        options = problem.decisions[members[0]].options
        chosen = sorted(
            (solution.choices[i] for i in members),
            key=lambda j: (order.index(options[j].entry), sign * (options[j].exit != options[j].entry), j),
        )
        for index, choice in zip(members, chosen, strict=True):
            choices[index] = choice
    return choices
