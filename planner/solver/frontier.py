"""Exact search along the chain of decisions: Pareto labels of cost and memory, pruned by a Lagrangian bound.

Layers of a model are alike, so thousands of placements cost the same and a branching solver cannot
close the last per mille of its gap. Labels merge what is alike: after each decision only placements
survive that no other beats in cost and in every memory. A label dies when its cost and the Lagrangian
relaxation of the rest cannot beat the best placement known; what is left is a proof.

Costs paid once (shares, mixed graphs) are enumerated outside, as scenarios; the bound discards most of
them unseen. Everything is integer except the multipliers, whose rounding only weakens the bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from planner.solver.capacities import Bools, Floats, binding, grain_of, share_memory, share_sets, with_modes
from planner.solver.labels import NEVER, Ints, Labels, joined, pareto
from planner.solver.problem import Problem, Solution
from planner.solver.relaxation import LEAST, Bound, Relaxation
from planner.solver.stages import FORBIDDEN, stages_of

BEAM = 2_000  # labels of the first, unproven pass
MOST = 100_000  # labels of the proving pass; beyond that the proof is given up
WORK = 40_000_000  # labels made in all, some seconds; then the proof is given up
# The same with several memories, where the pass only looks for a placement that attains a known bound.
MOST_MANY, WORK_MANY = 20_000, 3_000_000
_STEPS = 150  # of the subgradient, with several memories


@dataclass(frozen=True, slots=True)
class Found:
    """The best placement and a lower bound on all placements; equal when proven."""

    solution: Solution | None
    objective_ns: int
    bound_ns: int
    proven: bool


@dataclass(frozen=True, slots=True)
class Scenario:
    """Which options are allowed when these shares are paid and each mixed cost is paid or avoided."""

    allowed: tuple[Bools, ...]
    fixed_ns: int
    capacity: Ints  # what is left of each memory
    relaxed: Relaxation


@dataclass(frozen=True, slots=True)
class Focus:
    """The one scenario to look at: shares that may be paid; of mixed costs 2 is paid, 0 and 1 avoided."""

    paid: frozenset[int]
    modes: tuple[int, ...]


def applies(problem: Problem) -> bool:
    """Whether the edges are exactly the chain and no rule looks at more than neighbours."""
    chain = [(i, i + 1) for i in range(len(problem.decisions) - 1)]
    return [(e.source, e.target) for e in problem.edges] == chain and not problem.contiguous


def simple(problem: Problem) -> bool:
    """Whether at most one memory limits the placement: the proof is then quick."""
    return len(binding(problem)) < 2


def search(
    problem: Problem,
    incumbent: Solution | None,
    incumbent_ns: int,
    bound_ns: int = 0,
    focus: Focus | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Found:
    """The optimum, or the best found and a bound when there are too many labels.

    `incumbent` is a feasible placement and its objective, None and any number without one. A known
    lower bound ends the search when it is attained; a search with a `focus` proves nothing itself. Once
    `stop` says so the search ends with what it has; it looks for one placement in any case.
    """
    assert applies(problem)
    start = incumbent_ns if incumbent else NEVER
    found = _Search(problem, incumbent, start, bound_ns, focus, stop, limit_runs=False).run()
    if found.solution is None or not problem.max_runs or _turns(problem, found.solution) < problem.max_runs:
        return found
    return _Search(problem, incumbent, start, bound_ns, focus, stop, limit_runs=True).run()


def _turns(problem: Problem, solution: Solution) -> int:
    """Changes of the layer device along the chain."""
    pairs = zip(problem.decisions, solution.chosen(problem), strict=True)
    entries = [option.entry for decision, option in pairs if decision.layer]
    return sum(a != b for a, b in itertools.pairwise(entries))


class _Search:
    """The state of one search: arrays, the best placement so far, the smallest bound seen."""

    def __init__(
        self,
        problem: Problem,
        incumbent: Solution | None,
        incumbent_ns: int,
        bound_ns: int,
        focus: Focus | None,
        stop: Callable[[], bool],
        *,
        limit_runs: bool,
    ) -> None:
        self.problem, self.bound_ns, self.focus, self.stop = problem, bound_ns, focus, stop
        self.memories = binding(problem)
        self.turns = (problem.max_runs - 1,) if limit_runs else ()
        self.ports = sorted({(o.entry, o.exit) for _, _, o in problem.all_options()})
        self.stages = stages_of(problem, self.memories, self.ports, limit_turns=limit_runs)
        self.best, self.best_ns = incumbent, incumbent_ns
        self.grain = grain_of(problem)
        self.near = LEAST  # the multiplier of the last scenario, near that of the next
        self.work, self.most = (WORK, MOST) if len(self.memories) < 2 else (WORK_MANY, MOST_MANY)

    def run(self) -> Found:
        scenarios = list(self._scenarios())
        quick = [(s.relaxed.bound(np.zeros(len(s.capacity))).value, n, s) for n, s in enumerate(scenarios)]
        rough = self._multipliers(scenarios[-1]) if scenarios else np.zeros(0)
        ranked = sorted((max(v, s.relaxed.bound(rough).value), n, s) for v, n, s in quick if v < NEVER)
        bound, proven = NEVER, self.focus is None
        for value, _, scenario in ranked:
            if self._beaten(value) or self.best_ns <= self.bound_ns:
                break
            if self.best is not None and self.stop():
                bound, proven = min(bound, self._up(value)), False
                break
            low, done = self._scenario(scenario)
            bound, proven = min(bound, low), proven and done
        bound = self.bound_ns if self.focus else min(bound, self.best_ns)
        return Found(self.best, self.best_ns if self.best else 0, bound if self.best else 0, proven)

    def _beaten(self, value: float) -> bool:
        """Whether a bound says that nothing better than the best lies there."""
        return self._up(value) >= self.best_ns

    def _up(self, value: float) -> int:
        """The least multiple of the grain not below a bound, rounding errors of floats allowed for."""
        if value >= NEVER:
            return NEVER
        return math.ceil((value - 1e-9 * abs(value) - 1e-3) / self.grain) * self.grain

    def _scenario(self, scenario: Scenario) -> tuple[int, bool]:
        """Search one scenario; its lower bound and whether it is closed."""
        best = scenario.relaxed.bound(self._multipliers(scenario))
        if self._beaten(best.value):
            return self._up(best.value), True
        bounds = [best, *(scenario.relaxed.bound(best.multipliers * f) for f in (0.7, 1.4))]
        for most in (BEAM, self.most):
            complete = self._labels(scenario, bounds, most)
            if self._beaten(best.value):
                return self._up(best.value), True
            if complete:
                return self.best_ns, True
        return self._up(best.value), False

    def _scenarios(self) -> Iterator[Scenario]:
        problem = self.problem
        focus = self.focus
        for paid in [focus.paid] if focus else share_sets(problem, self.memories):
            sizes = share_memory(problem, self.memories, paid)
            capacity = np.array([m.capacity for m in self.memories], dtype=np.int64) - sizes
            if (capacity < 0).any():
                continue
            capacity = np.concatenate([capacity, np.array(self.turns, dtype=np.int64)])
            options = {id(d.options): d.options for d in problem.decisions}  # many have the same
            paying = {k: np.array([set(o.shares) <= paid for o in mine]) for k, mine in options.items()}
            within = [paying[id(d.options)] for d in problem.decisions]
            every = itertools.product((0, 1, 2), repeat=len(problem.mixed))
            for modes in [focus.modes] if focus else every:
                allowed, fixed = with_modes(problem, within, modes)
                if all(a.any() for a in allowed):
                    yield Scenario(tuple(allowed), fixed, capacity, self._relaxed(allowed, fixed, capacity))

    def _relaxed(self, allowed: list[Bools], fixed_ns: int, capacity: Ints) -> Relaxation:
        devices = len(self.problem.devices)
        return Relaxation(self.stages, allowed, self.ports, devices, fixed_ns, capacity)

    def _multipliers(self, scenario: Scenario) -> Floats:
        """Near-optimal multipliers: of one memory where its dual is highest, else by subgradients."""
        if not len(scenario.capacity):
            return np.zeros(0)
        if len(scenario.capacity) == 1:
            return self._one_multiplier(scenario)
        return self._many_multipliers(scenario)

    def _one_multiplier(self, scenario: Scenario) -> Floats:
        """The best multiplier; the placement found on the way may be the best so far."""
        top = scenario.relaxed.top(self.near)
        if top.fits is not None:
            self.near = top.multiplier or self.near
            if top.fits.cost < min(self.best_ns, FORBIDDEN):
                self.best_ns, self.best = top.fits.cost, Solution(top.fits.choices)
        return np.array([top.multiplier])

    def _many_multipliers(self, scenario: Scenario) -> Floats:
        now = best = np.zeros(len(scenario.capacity))
        at = scenario.relaxed.bound(best)
        value, size = at.value, 1.0
        target = float(self.bound_ns or self.best_ns) if self.best else abs(value) * 1.5 + 1.0
        for _ in range(_STEPS):
            over = (scenario.relaxed.walk(at).memory - scenario.capacity).astype(float)
            norm = float((over * over).sum())
            if norm == 0.0:
                break
            now = np.maximum(now + size * max(target - at.value, abs(target) * 1e-6) / norm * over, 0.0)
            at = scenario.relaxed.bound(now)
            if at.value > value:
                value, best = at.value, now
            else:
                size *= 0.93
        return best

    def _labels(self, scenario: Scenario, bounds: list[Bound], most: int) -> bool:
        """One pass over the chain; improves the best. True when no label was dropped for their number."""
        start = np.zeros(1, dtype=np.int64)
        empty = np.zeros((len(scenario.capacity), 1), dtype=np.int64)
        front = Labels(start + scenario.fixed_ns, empty, start, start, start)
        history: list[Labels] = []
        complete = True
        for i, stage in enumerate(self.stages):
            self.work -= front.size * len(stage.cost)
            if (self.work < 0 and most > BEAM) or (self.best is not None and self.stop()):
                return False
            made = self._expand(scenario, bounds, i, front)
            parts = [pareto(made.take(made.port == port)) for port in range(len(self.ports))]
            front = joined(parts)
            if not front.size:
                return complete
            if front.size > most:
                complete = False
                keep = np.argsort(_estimate(scenario, bounds[0], i + 1, front), kind="stable")[:most]
                front = front.take(np.sort(keep))
            history.append(front)
        self._finish(history)
        return complete

    def _expand(self, scenario: Scenario, bounds: list[Bound], i: int, front: Labels) -> Labels:
        """Every label with every option, those that may still beat the best."""
        stage, options = self.stages[i], np.flatnonzero(scenario.allowed[i])
        entry = stage.entry[options, None]
        memory = front.memory[:, None] + stage.memory[:, options, None] + stage.turns[:, front.port, entry]
        cost = front.cost + stage.before[front.port, entry] + stage.cost[options, None]
        fits = (memory <= scenario.capacity[:, None, None]).all(axis=0)
        n, parent = np.nonzero(fits)
        made = Labels(cost[fits], memory[:, fits], stage.port[options[n]], parent, options[n])
        limit = self.best_ns - self.grain + 1e-9 * abs(self.best_ns) + 1e-3
        for bound in bounds:
            made = made.take(_estimate(scenario, bound, i + 1, made) <= limit)
        return made

    def _finish(self, history: list[Labels]) -> None:
        last = history[-1]
        at = int(last.cost.argmin())
        if int(last.cost[at]) >= min(self.best_ns, FORBIDDEN):
            return
        self.best_ns = int(last.cost[at])
        choices = []
        for front in reversed(history):
            choices.append(int(front.choice[at]))
            at = int(front.parent[at])
        self.best = Solution(tuple(reversed(choices)))


def _estimate(scenario: Scenario, bound: Bound, i: int, labels: Labels) -> Floats:
    """A lower bound on every completion of each label."""
    value: Floats = labels.cost + bound.suffix[i][labels.port]
    for m, multiplier in enumerate(bound.multipliers):
        value = value + multiplier * (labels.memory[m] - scenario.capacity[m])
    return value
