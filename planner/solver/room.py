"""Whether there is room for a placement at all, whatever it costs: how many layers take each option.

Where nothing is paid for, the order of layers matters to two rules only: the CPU leads, and the engine takes
so many runs of layers. So numbers are asked for, of each kind of layer, and then laid out, device after
device, the CPU first. Numbers alone are a relaxation: where there are none there is no placement. What is
laid out is one when `evaluate` says so; with `stretches` the numbers are such that a device leads one run.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from planner.solver.evaluate import evaluate
from planner.solver.problem import Decision, Option, Problem, Solution


@dataclass(frozen=True, slots=True)
class _Kind:
    """Decisions with the same ways to be placed."""

    members: tuple[int, ...]
    options: tuple[tuple[int, Option], ...]  # with their numbers, one of those that take the same
    layer: bool


def _kinds(problem: Problem) -> list[_Kind]:
    known: dict[int, tuple[tuple[int, Option], ...]] = {}  # decisions that are alike share their options
    members: dict[object, list[int]] = defaultdict(list)
    found: dict[object, tuple[tuple[int, Option], ...]] = {}
    for i, decision in enumerate(problem.decisions):
        if id(decision.options) not in known:
            known[id(decision.options)] = _different(decision)
        options = known[id(decision.options)]
        key = tuple((j, _taken(option)) for j, option in options), decision.layer
        members[key].append(i)
        found[key] = options
    return [_Kind(tuple(rows), found[key], problem.decisions[rows[0]].layer) for key, rows in members.items()]


def _taken(option: Option) -> tuple[object, ...]:
    """All of an option that some limit looks at."""
    return option.entry, option.memory, option.shares, option.whole


def _different(decision: Decision) -> tuple[tuple[int, Option], ...]:
    """The first of the options that take the same."""
    found = {_taken(option): (j, option) for j, option in reversed(list(enumerate(decision.options)))}
    return tuple(sorted(found.values(), key=lambda each: each[0]))


class RoomModel:
    """The numbers as a CP-SAT model; `cp` is the module ortools.sat.python.cp_model."""

    def __init__(self, cp: Any, problem: Problem, *, stretches: bool = False) -> None:
        self.problem, self.kinds = problem, _kinds(problem)
        devices = len(problem.devices)
        self.order = sorted(range(devices), key=lambda d: (not problem.devices[d].host, d))
        hosts = sum(d.host for d in problem.devices)
        self.model = cp.CpModel()
        self.used = [self.model.new_bool_var("") for _ in problem.shares]
        self.counts = [[self.model.new_int_var(0, len(k.members), "") for _ in k.options] for k in self.kinds]
        for kind, row in zip(self.kinds, self.counts, strict=True):
            self.model.add(sum(row) == len(kind.members))
            for count, (_, option) in zip(row, kind.options, strict=True):
                for share in option.shares:
                    self.model.add(count <= len(kind.members) * self.used[share])
                if problem.contiguous and kind.layer and not option.whole:
                    self.model.add(count == 0)
        for group in problem.exclusive:
            self.model.add_at_most_one([self.used[s] for s in group])
        self._capacities()
        for first in range(1, devices) if stretches else [hosts] if problem.host_leads else []:
            self._lead(frozenset(self.order[:first]))

    def _capacities(self) -> None:
        problem = self.problem
        loads: list[list[Any]] = [[] for _ in problem.devices]
        for kind, row in zip(self.kinds, self.counts, strict=True):
            for count, (_, option) in zip(row, kind.options, strict=True):
                for load, size in zip(loads, option.memory, strict=True):
                    if size:
                        load.append(count * size)
        for share, var in zip(problem.shares, self.used, strict=True):
            if share.size_bytes:
                loads[share.device].append(var * share.size_bytes)
        limits = [([load], d.capacity_bytes) for d, load in zip(problem.devices, loads, strict=True)]
        for p, pool in enumerate(problem.pools):
            members = [load for d, load in zip(problem.devices, loads, strict=True) if d.pool == p]
            limits.append((members, pool.capacity_bytes))
        for members, capacity in limits:
            self.model.add(sum(term for load in members for term in load) <= capacity)

    def _lead(self, devices: frozenset[int]) -> None:
        """Some first layers, and no others, have these as layer device: how many of each kind follows."""
        layers = [i for i, decision in enumerate(self.problem.decisions) if decision.layer]
        ends = [self.model.new_bool_var("") for _ in range(len(layers) + 1)]
        self.model.add_exactly_one(ends)
        for kind, row in zip(self.kinds, self.counts, strict=True):
            if not kind.layer:
                continue
            mine, before, led = set(kind.members), 0, []
            for layer, end in zip(layers, ends[1:], strict=True):
                before += layer in mine
                led.append(before * end)
            here = [count for count, (_, o) in zip(row, kind.options, strict=True) if o.entry in devices]
            self.model.add(sum(here) == sum(led))

    def laid_out(self, numbers: list[list[int]]) -> Solution | None:
        """A placement in which so many decisions of each kind take each of its options; None where the order
        breaks a rule.
        """
        problem, choices = self.problem, [0] * len(self.problem.decisions)
        for kind, row in zip(self.kinds, numbers, strict=True):
            taken = [(option, j) for n, (j, option) in zip(row, kind.options, strict=True) for _ in range(n)]
            taken.sort(key=lambda each: (self.order.index(each[0].entry), each[1]))
            for i, (_, j) in zip(kind.members, taken, strict=True):
                choices[i] = j
        found = Solution(tuple(choices))
        return found if evaluate(problem, found).feasible else None
