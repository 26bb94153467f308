"""The cheapest placement under all limits, with a proven bound.

Three ways, quick ones first, each handing its best placement and bound to the next: the frontier search
along the chain, the counting relaxation, and CP-SAT on the whole problem. One worker, a fixed seed and
deterministic limits make the answer the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner import counts, frontier
from planner.exact_model import ExactModel
from planner.problem import Problem, Solution

_SHARES = {"count": 0.3, "arrange": 0.2, "exact": 0.5}  # of the time, for each use of CP-SAT


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop; deterministic seconds count work, not time, and the wall is only a safety net."""

    deterministic_s: float = 20.0
    wall_s: float = 60.0
    seed: int = 1

    def part(self, use: str) -> Limits:
        """The share of one of the ways."""
        return Limits(self.deterministic_s * _SHARES[use], self.wall_s * _SHARES[use], self.seed)


@dataclass(frozen=True, slots=True)
class Solved:
    """The answer of the solver; `solution` is None when there is none or none was found."""

    status: str  # optimal, feasible, infeasible, unknown
    solution: Solution | None
    objective_ns: int
    bound_ns: int


def solve(problem: Problem, hint: Solution | None = None, limits: Limits | None = None) -> Solved:
    """The cheapest placement that keeps every limit; `hint` is a placement that keeps them."""
    limits = limits or Limits()
    best = Solved("unknown", hint, price_of(problem, hint) if hint else 0, 0)
    if frontier.applies(problem) and frontier.simple(problem):
        best = _frontier(problem, best)
    if best.status == "unknown" and counts.applies(problem):
        best = _counted(problem, best, limits)
    return solve_cp(problem, best, limits) if best.status == "unknown" else best


def _frontier(problem: Problem, best: Solved) -> Solved:
    found = frontier.search(problem, best.solution, best.objective_ns)
    if found.solution is None:
        return Solved("infeasible", None, 0, 0) if found.proven else best
    return _judged(Solved("unknown", found.solution, found.objective_ns, found.bound_ns))


def _judged(solved: Solved) -> Solved:
    """Optimal when the bound is reached."""
    closed = solved.solution is not None and solved.bound_ns >= solved.objective_ns
    return Solved("optimal", solved.solution, solved.objective_ns, solved.objective_ns) if closed else solved


def _counted(problem: Problem, best: Solved, limits: Limits) -> Solved:
    """Raise the bound by the counting relaxation, then look for an order of layers that attains it."""
    from ortools.sat.python import cp_model

    relaxed = counts.CountModel(cp_model, problem)
    solver = _solver(cp_model, limits.part("count"))
    status = solver.solve(relaxed.model)
    if status == cp_model.INFEASIBLE:
        return Solved("infeasible", None, 0, 0)
    bound = max(best.bound_ns, int(solver.best_objective_bound))
    best = _judged(Solved(best.status, best.solution, best.objective_ns, bound))
    if best.status == "optimal" or status != cp_model.OPTIMAL:
        return best
    if frontier.applies(problem):
        focus = _focus(relaxed, solver)
        found = frontier.search(problem, best.solution, best.objective_ns, bound, focus)
        best = _judged(Solved(best.status, found.solution, found.objective_ns, bound))
    return best if best.status == "optimal" else _arranged(cp_model, problem, best, relaxed, solver, limits)


def _focus(relaxed: counts.CountModel, solver: Any) -> frontier.Focus:
    """Where the relaxation's optimum lies: the shares it pays, the mixed costs it pays or avoids."""
    paid = frozenset(
        i
        for i, (share, var) in enumerate(zip(relaxed.problem.shares, relaxed.used, strict=True))
        if not share.size_bytes or solver.boolean_value(var)
    )
    sides = [tuple(solver.boolean_value(v) for v in pair) for pair in relaxed.sides]
    return frontier.Focus(paid, tuple(2 if host and other else 1 if host else 0 for host, other in sides))


def _arranged(
    cp: Any, problem: Problem, best: Solved, relaxed: counts.CountModel, solver: Any, limits: Limits
) -> Solved:
    """Look for an order of layers with the relaxation's counts."""
    exact = ExactModel(cp, problem)
    exact.narrowed = True
    for alike, row in zip(relaxed.classes, relaxed.counts, strict=True):
        for j, count in enumerate(row):
            members = [exact.choose[i][j] for i in alike.members]
            exact.model.add(sum(members) == solver.value(count))
    return _run(cp, exact, best, limits.part("arrange"))


def solve_cp(problem: Problem, best: Solved | None = None, limits: Limits | None = None) -> Solved:
    """CP-SAT on the whole problem, from the best placement and bound known."""
    from ortools.sat.python import cp_model

    best = best or Solved("unknown", None, 0, 0)
    exact = ExactModel(cp_model, problem)
    if best.solution is not None:
        exact.hint(best.solution)
    found = _run(cp_model, exact, best, (limits or Limits()).part("exact"))
    if found.status == "unknown" and found.solution is not None:
        return Solved("feasible", found.solution, found.objective_ns, found.bound_ns)
    return found


def _run(cp: Any, exact: ExactModel, best: Solved, limits: Limits) -> Solved:
    """Solve a model from what is known; its own bound counts only when it has all placements."""
    if best.solution is not None:
        exact.model.add(exact.objective <= best.objective_ns)
    exact.model.add(exact.objective >= best.bound_ns)
    solver = _solver(cp, limits)
    status = solver.solve(exact.model)
    if status == cp.INFEASIBLE and best.solution is None and not exact.narrowed:
        return Solved("infeasible", None, 0, 0)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return best
    chosen = Solution(tuple(_index(solver, row) for row in exact.choose))
    own = best.bound_ns if exact.narrowed else int(solver.best_objective_bound)
    objective = round(solver.objective_value)
    bound = objective if status == cp.OPTIMAL and not exact.narrowed else max(own, best.bound_ns)
    return _judged(Solved("unknown", chosen, objective, bound))


def _solver(cp: Any, limits: Limits) -> Any:
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = limits.seed
    solver.parameters.max_deterministic_time = limits.deterministic_s
    solver.parameters.max_time_in_seconds = limits.wall_s
    solver.parameters.linearization_level = 2
    return solver


def _index(solver: Any, row: list[Any]) -> int:
    return next(j for j, var in enumerate(row) if solver.boolean_value(var))


def price_of(problem: Problem, solution: Solution) -> int:
    """The objective of a placement."""
    chosen = solution.chosen(problem)
    total = problem.price(problem.decode_ns, problem.prefill_ns)
    total += sum(problem.price(o.decode_ns, o.prefill_ns) for o in chosen)
    for edge in problem.edges:
        p, q = chosen[edge.source].exit, chosen[edge.target].entry
        total += problem.price(edge.decode_ns[p][q], edge.prefill_ns[p][q])
    for mixed in problem.mixed:
        options = [chosen[i] for i in mixed.decisions]
        if any(problem.on_host(mixed, o) for o in options) and any(
            problem.off_host(mixed, o) for o in options
        ):
            total += problem.price(mixed.decode_ns, mixed.prefill_ns)
    return total
