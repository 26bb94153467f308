"""The cheapest placement under all limits, with a proven bound.

Four ways, quick ones first, each handing its best placement and bound to the next: the frontier search along
the chain, the best with one stretch of layers a device, the counting relaxation, and CP-SAT on the whole
problem. One worker, a fixed seed and deterministic limits make the answer the same on every machine; a
deadline, if there is one, does not.

An answer that was not proven the best is bettered where it stands: parts of it are searched again. A search
of the whole that runs out of work may miss what one of a smaller problem finds, and a pin makes it smaller.
The parts are the same everywhere: all with the output head on one device, then stretches of the chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from planner.solver import counting, frontier
from planner.solver.capacities import binding, free_shares
from planner.solver.counting import Part, parts
from planner.solver.cp_sat import ExactModel
from planner.solver.deadline import Deadline
from planner.solver.problem import Problem, Solution
from planner.solver.room import RoomModel
from planner.solver.stretches import best_stretches

# A search of a problem for something below a price; and whether there is work left.
Search = Callable[[Problem, int], tuple[Solution | None, bool]]

_LEAST_S = 0.01  # CP-SAT takes no limit of zero for a limit
_SHARES = {"count": 0.3, "arrange": 0.2, "exact": 0.5, "near": 0.3}  # of the time, for each use of CP-SAT
_NEAR_SHARE, _NEAR_LEAST_S = 0.25, 0.1  # of the work that is left, for one part: the first may not take all


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop; deterministic seconds count work, not time: the same everywhere."""

    deterministic_s: float = 20.0
    wall_s: float = math.inf  # by the clock, for each use of CP-SAT
    seed: int = 1
    deadline: Deadline = field(default_factory=Deadline, compare=False)  # for all of it

    def part(self, use: str) -> Limits:
        """The share of one of the ways."""
        share = _SHARES[use]
        return replace(self, deterministic_s=self.deterministic_s * share, wall_s=self.wall_s * share)

    def work(self, deterministic_s: float) -> Limits:
        """The same with so much work."""
        return replace(self, deterministic_s=deterministic_s)


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
        best = _frontier(problem, best, limits)
    if best.status == "unknown" and not limits.deadline.over():
        best = _stretched(problem, best, limits)
    if best.status == "unknown" and counting.applies(problem) and not limits.deadline.over():
        best = _counted(problem, best, limits)
    found = solve_cp(problem, best, limits) if best.status == "unknown" else best
    if found.status == "feasible" and not limits.deadline.over():
        found = _bettered(problem, found, limits)
    if found.status not in ("optimal", "infeasible"):
        limits.deadline.ended.add("work")  # which the clock outweighs
    return found


def _stretched(problem: Problem, best: Solved, limits: Limits) -> Solved:
    """The best placement with one stretch of layers a device, where it is cheaper."""
    below = best.objective_ns if best.solution else None
    found = best_stretches(problem, below, limits.deadline.over)
    return best if found is None else Solved("unknown", found, price_of(problem, found), best.bound_ns)


def _bettered(problem: Problem, found: Solved, limits: Limits) -> Solved:
    """What the neighbours of a placement offer that was not proven the best."""
    from ortools.sat.python import cp_model as cp

    assert found.solution is not None
    clock = Clock(limits.part("near").deterministic_s)

    def search(narrowed: Problem, below_ns: int) -> tuple[Solution | None, bool]:
        exact = ExactModel(cp, narrowed)
        exact.model.add(exact.objective < below_ns)
        exact.model.add(exact.objective >= found.bound_ns)
        work = limits.work(max(clock.left_s * _NEAR_SHARE, _NEAR_LEAST_S))
        solver = _solver(cp, work)
        status = _within(cp, solver, exact.model, work)
        clock.left_s -= solver.response_proto.deterministic_time
        left = clock.left_s > 0 and not limits.deadline.over()
        if status not in (cp.OPTIMAL, cp.FEASIBLE):
            return None, left
        return Solution(tuple(_index(solver, row) for row in exact.choose)), left

    best = better(problem, found.solution, search)
    return _judged(replace(found, solution=best, objective_ns=price_of(problem, best)))


@dataclass(frozen=True, slots=True)
class _Part:
    """What is searched again: decisions `free`, of the last one only options on a device, if one is given."""

    free: range
    device: int = -1


def better(problem: Problem, start: Solution, search: Search) -> Solution:
    """The best of the neighbours of `start` that `search` finds before it has no work left."""
    best = start
    for part in _parts(problem):
        options = _left(problem, best, part)
        decisions = tuple(
            replace(d, options=tuple(d.options[j] for j in kept))
            for d, kept in zip(problem.decisions, options, strict=True)
        )
        found, more = search(replace(problem, decisions=decisions), price_of(problem, best))
        if found is not None:
            best = Solution(tuple(kept[c] for kept, c in zip(options, found.choices, strict=True)))
        if not more:
            break
    return best


def _parts(problem: Problem) -> Iterator[_Part]:
    n = len(problem.decisions)
    for device in sorted({option.entry for option in problem.decisions[-1].options}):
        yield _Part(range(n), device)
    for size in (max(n // 2, 1), max(n // 3, 1)):
        for first in range(0, n, max(size // 2, 1)):
            yield _Part(range(first, min(first + size, n)))


def _left(problem: Problem, best: Solution, part: _Part) -> list[tuple[int, ...]]:
    """The options that each decision keeps: all that are searched, or the one that it has."""
    found = []
    for i, (decision, choice) in enumerate(zip(problem.decisions, best.choices, strict=True)):
        ends = part.device >= 0 and i == len(problem.decisions) - 1
        every = range(len(decision.options))
        kept = [j for j in every if not ends or decision.options[j].entry == part.device]
        found.append(tuple(kept) if i in part.free else (choice,))
    return found


def any_placement(problem: Problem, limits: Limits | None = None) -> Solved:
    """Some placement that keeps every limit, whatever it costs, with its price and no bound.

    Infeasible where there is none; unknown where numbers of layers fit, but not in the orders that were
    tried, or the work allowed was not enough.
    """
    from ortools.sat.python import cp_model as cp

    limits = limits or Limits()
    for stretches in (False, True):
        room = RoomModel(cp, problem, stretches=stretches)
        solver = _solver(cp, limits)
        status = _within(cp, solver, room.model, limits)
        if status == cp.INFEASIBLE and not stretches:
            return Solved("infeasible", None, 0, 0)
        if status in (cp.OPTIMAL, cp.FEASIBLE):
            found = room.laid_out([[int(solver.value(v)) for v in row] for row in room.counts])
            if found is not None:
                return Solved("feasible", found, price_of(problem, found), 0)
    return Solved("unknown", None, 0, 0)


def _frontier(problem: Problem, best: Solved, limits: Limits) -> Solved:
    found = frontier.search(problem, best.solution, best.objective_ns, stop=limits.deadline.over)
    if found.solution is None:
        return Solved("infeasible", None, 0, 0) if found.proven else best
    # A search that was cut may count a cost of mixed graphs that its placement does not have.
    price = price_of(problem, found.solution)
    return _judged(Solved("unknown", found.solution, price, found.bound_ns))


def _judged(solved: Solved) -> Solved:
    """Optimal when the bound is reached."""
    closed = solved.solution is not None and solved.bound_ns >= solved.objective_ns
    return Solved("optimal", solved.solution, solved.objective_ns, solved.objective_ns) if closed else solved


def _counted(problem: Problem, best: Solved, limits: Limits) -> Solved:
    """Bound every part of the problem by the counting relaxation, then look for orders that attain it.

    Parts whose bound is not below the best placement are done with; what is left open bounds the answer.
    """
    from ortools.sat.python import cp_model

    clock = Clock(limits.part("count").deterministic_s)
    whole = _relaxed(cp_model, problem, None, clock, limits)
    if whole is None:
        return Solved("infeasible", None, 0, 0)
    best = _judged(Solved(best.status, best.solution, best.objective_ns, max(best.bound_ns, whole.bound_ns)))
    if best.status == "optimal" or whole.focus is None:
        return best
    best = _focused(problem, best, whole, limits)
    if best.status == "optimal":
        return best
    return _by_parts(cp_model, problem, best, clock, limits)


@dataclass(frozen=True, slots=True)
class Relaxed:
    """A solved counting relaxation; without a focus when it was not solved to its optimum."""

    bound_ns: int
    focus: frontier.Focus | None
    counts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # members of a kind, and how many take each


@dataclass
class Clock:
    """Deterministic seconds left to a use of CP-SAT."""

    left_s: float


def _relaxed(cp: Any, problem: Problem, below_ns: int | None, clock: Clock, limits: Limits) -> Relaxed | None:
    """The relaxation's optimum; None when nothing below `below_ns` exists."""
    relaxed = counting.CountModel(cp, problem)
    if below_ns is not None:
        relaxed.model.add(relaxed.objective < below_ns)
    work = limits.work(max(clock.left_s, 0.1))
    solver = _solver(cp, work)
    status = _within(cp, solver, relaxed.model, work)
    clock.left_s -= solver.response_proto.deterministic_time
    if status == cp.INFEASIBLE:
        return None
    bound = _bound_of(solver)
    if status != cp.OPTIMAL:
        return Relaxed(bound, None, ())
    found = tuple(
        (alike.members, tuple(int(solver.value(v)) for v in row))
        for alike, row in zip(relaxed.classes, relaxed.counts, strict=True)
    )
    return Relaxed(bound, _focus(relaxed, solver), found)


def _focused(problem: Problem, best: Solved, relaxed: Relaxed, limits: Limits) -> Solved:
    """The frontier search where the relaxation's optimum lies."""
    if not frontier.applies(problem) or relaxed.focus is None:
        return best
    found = frontier.search(
        problem,
        best.solution,
        best.objective_ns,
        relaxed.bound_ns,
        relaxed.focus,
        stop=limits.deadline.over,
    )
    price = price_of(problem, found.solution) if found.solution else 0
    return _judged(Solved(best.status, found.solution, price, best.bound_ns))


def _by_parts(cp: Any, problem: Problem, best: Solved, clock: Clock, limits: Limits) -> Solved:
    """Close part after part, the lowest bound first; what is not closed when time is up bounds the rest."""
    open_parts: list[tuple[int, int, Part, Relaxed]] = []
    for part in parts(problem):
        below = best.objective_ns if best.solution else None
        unknown = Relaxed(best.bound_ns, None, ())
        more = clock.left_s > 0 and not limits.deadline.over()
        found = _relaxed(cp, part.problem, below, clock, limits) if more else unknown
        if found is not None:
            open_parts.append((max(found.bound_ns, best.bound_ns), part.count, part, found))
    work = Clock(limits.part("arrange").deterministic_s)
    left: list[int] = []
    for bound, _, part, found in sorted(open_parts, key=lambda each: each[:2]):
        if best.solution is not None and bound >= best.objective_ns:
            break
        best, closed = _closed(cp, part, found, best, bound, work, limits)
        if not closed:
            left.append(bound)
    lowest = min(left, default=best.objective_ns)
    return _judged(Solved(best.status, best.solution, best.objective_ns, max(best.bound_ns, lowest)))


def _closed(
    cp: Any, part: Part, relaxed: Relaxed, best: Solved, bound: int, clock: Clock, limits: Limits
) -> tuple[Solved, bool]:
    """Search one part for something better than the best; whether nothing better is left in it."""
    for narrowed in (True, False):
        if clock.left_s <= 0 or (narrowed and not relaxed.counts) or limits.deadline.over():
            continue
        exact = ExactModel(cp, part.problem)
        if narrowed:
            for members, row in relaxed.counts:
                for j, count in enumerate(row):
                    exact.model.add(sum(exact.choose[i][j] for i in members) == count)
        if best.solution is not None:
            exact.model.add(exact.objective < best.objective_ns)
        exact.model.add(exact.objective >= bound)
        half = limits.work(clock.left_s / 2)
        solver = _solver(cp, half)
        status = _within(cp, solver, exact.model, half)
        clock.left_s -= solver.response_proto.deterministic_time
        if status in (cp.OPTIMAL, cp.FEASIBLE):
            chosen = Solution(tuple(_index(solver, row) for row in exact.choose))
            best = Solved(best.status, part.whole(chosen), round(solver.objective_value), best.bound_ns)
        done = status in (cp.OPTIMAL, cp.INFEASIBLE) and not narrowed
        if done or (best.solution is not None and bound >= best.objective_ns):
            return best, True
    return best, False


def _focus(relaxed: counting.CountModel, solver: Any) -> frontier.Focus:
    """Where the relaxation's optimum lies: the shares it pays, the mixed costs it pays or avoids."""
    paid = free_shares(relaxed.problem, binding(relaxed.problem)) | {
        i for i, var in enumerate(relaxed.used) if solver.boolean_value(var)
    }
    sides = [tuple(solver.boolean_value(v) for v in pair) for pair in relaxed.sides]
    return frontier.Focus(paid, tuple(2 if host and other else 1 if host else 0 for host, other in sides))


def solve_cp(problem: Problem, best: Solved | None = None, limits: Limits | None = None) -> Solved:
    """CP-SAT on the whole problem, from the best placement and bound known."""
    from ortools.sat.python import cp_model

    best, limits = best or Solved("unknown", None, 0, 0), limits or Limits()
    found = best
    if not (best.solution is not None and limits.deadline.over()):
        exact = ExactModel(cp_model, problem)
        if best.solution is not None:
            exact.hint(best.solution)
        found = _run(cp_model, exact, best, limits.part("exact"))
    if found.status == "unknown" and found.solution is not None:
        return Solved("feasible", found.solution, found.objective_ns, found.bound_ns)
    return found


def _run(cp: Any, exact: ExactModel, best: Solved, limits: Limits) -> Solved:
    """Solve a model from what is known."""
    if best.solution is not None:
        exact.model.add(exact.objective <= best.objective_ns)
    exact.model.add(exact.objective >= best.bound_ns)
    solver = _solver(cp, limits)
    status = _within(cp, solver, exact.model, limits)
    if status == cp.INFEASIBLE and best.solution is None:
        return Solved("infeasible", None, 0, 0)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return best
    chosen = Solution(tuple(_index(solver, row) for row in exact.choose))
    objective = round(solver.objective_value)
    bound = objective if status == cp.OPTIMAL else max(_bound_of(solver), best.bound_ns)
    return _judged(Solved("unknown", chosen, objective, bound))


def _solver(cp: Any, limits: Limits) -> Any:
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # Ctrl-C ends the program, not only the search
    solver.parameters.random_seed = limits.seed
    solver.parameters.max_deterministic_time = limits.deterministic_s
    wall_s = min(limits.wall_s, limits.deadline.left_s())
    if math.isfinite(wall_s):
        solver.parameters.max_time_in_seconds = max(wall_s, _LEAST_S)
    solver.parameters.linearization_level = 2
    return solver


def _within(cp: Any, solver: Any, model: Any, limits: Limits) -> Any:
    """The status of a search; the deadline learns when the clock cut it short, not the work allowed."""
    status = _searched(solver, model)
    timed = math.isfinite(min(limits.wall_s, limits.deadline.ends))
    done = status in (cp.OPTIMAL, cp.INFEASIBLE)
    if timed and not done and solver.response_proto.deterministic_time < limits.deterministic_s:
        limits.deadline.ended.add("clock")
    return status


def _bound_of(solver: Any) -> int:
    """The proven bound; of a search that was cut before it had one, zero."""
    bound = solver.best_objective_bound
    return max(int(bound), 0) if math.isfinite(bound) else 0


def _searched(solver: Any, model: Any) -> Any:
    """The status of a search that Ctrl-C ends at once: the library would not come back before its end."""
    with ThreadPoolExecutor(1) as pool:
        search = pool.submit(solver.solve, model)
        try:
            return search.result()
        except BaseException:
            solver.stop_search()
            raise


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
