"""Placements of few stretches of layers: the best with one a device, and of equals the one with the fewest.

Of the first the host's stretch comes first. Where a device is left, what it holds is done with: of its memory
only whether it fits mattered. So labels need the memory of one device at a time, and hosts', and a search
takes seconds, whatever the number of GPUs. Placements that come back to a device are left out: they have more
pieces, and rarely pay.

Layers with equal options may change places. Where one hands over to the CPU, the next may follow on any
device for the same price: the solver is indifferent, a person who reads the plan is not.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.solver.capacities import binding
from planner.solver.evaluate import Evaluation, evaluate
from planner.solver.frontier import applies
from planner.solver.problem import Edge, Option, Problem, Solution

MOST = 64  # labels of one state; the cheapest are kept
_MOST_DEVICES = 5  # orders of more are too many to try


@dataclass(frozen=True, slots=True)
class _State:
    """What decides which options may follow, and what they cost."""

    exit: int
    device: int  # of the stretch; -1: none yet
    left: int  # devices that had theirs, as bits
    paid: int  # shares, as bits
    sides: tuple[tuple[bool, bool], ...]  # of each mixed cost: touched on the host, and off it


@dataclass(frozen=True, slots=True)
class _Label:
    cost: int
    memory: tuple[int, ...]  # of each that may not suffice; 0 where a device is done with
    choice: int
    before: _Label | None


def best_stretches(
    problem: Problem, below_ns: int | None = None, stop: Callable[[], bool] = lambda: False
) -> Solution | None:
    """The cheapest such placement, below `below_ns` if given; None where none is found, or `stop` says so."""
    if not applies(problem):
        return None
    return _Search(problem).run(below_ns, stop)


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.memories = problem, binding(problem)
        self.edges: dict[int, Edge] = {edge.target: edge for edge in problem.edges}
        rest = 0
        self.rest = [0] * (len(problem.decisions) + 1)  # the least that decisions from here on cost
        for i in reversed(range(len(problem.decisions))):
            rest += min((self._price(o) for o in problem.decisions[i].options), default=0)
            self.rest[i] = rest

    def run(self, below_ns: int | None, stop: Callable[[], bool]) -> Solution | None:
        problem = self.problem
        begins = problem.price(problem.decode_ns, problem.prefill_ns)
        nothing = _State(-1, -1, 0, 0, ((False, False),) * len(problem.mixed))
        front = {nothing: [_Label(begins, (0,) * len(self.memories), -1, None)]}
        for i in range(len(problem.decisions)):
            if stop():
                return None
            made: dict[_State, list[_Label]] = defaultdict(list)
            for state, labels in front.items():
                self._extend(i, state, labels, made, below_ns)
            front = {state: _kept(labels) for state, labels in made.items()}
        ends = sorted((label for labels in front.values() for label in labels), key=lambda x: x.cost)
        for label in ends:
            if evaluate(problem, solution := _solution(label)).feasible:
                return solution
        return None

    def _price(self, option: Option) -> int:
        return self.problem.price(option.decode_ns, option.prefill_ns)

    def _extend(
        self,
        i: int,
        state: _State,
        labels: list[_Label],
        made: dict[_State, list[_Label]],
        below_ns: int | None,
    ) -> None:
        decision, edge = self.problem.decisions[i], self.edges.get(i)
        for j, option in enumerate(decision.options):
            after = self._after(i, state, option)
            if after is None:
                continue
            cost = self._price(option) + self._mixed_ns(state, after)
            if edge is not None and state.exit >= 0:
                ns = (edge.decode_ns[state.exit][option.entry], edge.prefill_ns[state.exit][option.entry])
                cost += self.problem.price(*ns)
            added = self._added(state, after, option)
            closed = self._closed(state, after)
            for label in labels:
                total = label.cost + cost
                if below_ns is not None and total + self.rest[i + 1] >= below_ns:
                    continue
                held = tuple(
                    (0 if m in closed else old) + more
                    for m, (old, more) in enumerate(zip(label.memory, added, strict=True))
                )
                if all(size <= memory.capacity for size, memory in zip(held, self.memories, strict=True)):
                    made[after].append(_Label(total, held, j, label))

    def _after(self, i: int, state: _State, option: Option) -> _State | None:
        """The state behind an option; None where it does not go on or begin a stretch."""
        device, left = state.device, state.left
        if self.problem.decisions[i].layer and option.entry != device:
            first = device < 0
            if not first and (self.problem.devices[option.entry].host or left >> option.entry & 1):
                return None
            device, left = option.entry, left | (0 if first else 1 << device)
        paid = state.paid
        for share in option.shares:
            paid |= 1 << share
        for group in self.problem.exclusive:
            if sum(paid >> share & 1 for share in group) > 1:
                return None
        sides = tuple(
            (host or self.problem.on_host(mixed, option), off or self.problem.off_host(mixed, option))
            if i in mixed.decisions
            else (host, off)
            for mixed, (host, off) in zip(self.problem.mixed, state.sides, strict=True)
        )
        return _State(option.exit, device, left, paid, sides)

    def _mixed_ns(self, state: _State, after: _State) -> int:
        """Costs of a mixed graph that are paid from here on."""
        return sum(
            self.problem.price(mixed.decode_ns, mixed.prefill_ns)
            for mixed, before, now in zip(self.problem.mixed, state.sides, after.sides, strict=True)
            if all(now) and not all(before)
        )

    def _added(self, state: _State, after: _State, option: Option) -> tuple[int, ...]:
        """Bytes of an option, and of the shares that it is the first to ask for, in each memory."""
        sizes = list(option.memory)
        for n, share in enumerate(self.problem.shares):
            if (after.paid & ~state.paid) >> n & 1:
                sizes[share.device] += share.size_bytes
        return tuple(sum(sizes[d] for d in memory.devices) for memory in self.memories)

    def _closed(self, state: _State, after: _State) -> frozenset[int]:
        """Memories of a GPU that is left, which nothing later draws on."""
        if after.device == state.device or state.device < 0 or self.problem.devices[state.device].host:
            return frozenset()
        return frozenset(m for m, memory in enumerate(self.memories) if memory.devices == (state.device,))


def _kept(labels: list[_Label]) -> list[_Label]:
    """Those that no other beats in cost and every memory."""
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda x: (x.cost, x.memory)):
        if len(kept) == MOST:
            break
        if not any(all(a <= b for a, b in zip(one.memory, label.memory, strict=True)) for one in kept):
            kept.append(label)
    return kept


def _solution(label: _Label) -> Solution:
    choices: list[int] = []
    at: _Label | None = label
    while at is not None and at.choice >= 0:
        choices.append(at.choice)
        at = at.before
    return Solution(tuple(reversed(choices)))


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
