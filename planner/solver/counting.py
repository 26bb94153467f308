"""A relaxation that counts: how many layers of each kind take each option, whatever their order.

Layers that look alike to the solver become one integer variable per option; of their order it only
knows how often two kinds meet. The model is tiny, its optimum a lower bound on every placement, and often
the cost of one.

Where the CPU must lead, a problem is cut by how many layers it leads: fixed layer devices on the host leave
a relaxation that knows which layers these are. Together the parts are the whole problem.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.solver.problem import Decision, Option, Problem, Solution

Port = tuple[int, int]  # the devices that an option begins and ends on


@dataclass(frozen=True, slots=True)
class Alike:
    """Decisions that the solver cannot tell apart but for their place in the chain."""

    members: tuple[int, ...]
    first: bool
    last: bool


def classes(problem: Problem) -> tuple[Alike, ...]:
    """Decisions by kind; the two ends of the chain stand alone."""
    found: dict[object, list[int]] = defaultdict(list)
    end = len(problem.decisions) - 1
    for i, decision in enumerate(problem.decisions):
        mixed = tuple(i in m.decisions for m in problem.mixed)
        found[decision.options, decision.layer, mixed, i == 0, i == end].append(i)
    return tuple(Alike(tuple(rows), rows[0] == 0, rows[0] == end) for rows in found.values())


def applies(problem: Problem) -> bool:
    """Whether all decisions of the chain hand over at the same prices."""
    chain = [e for e in problem.edges if e.target == e.source + 1]
    prices = {(e.decode_ns, e.prefill_ns) for e in chain}
    return len(chain) == len(problem.decisions) - 1 and len(prices) <= 1


class CountModel:
    """The relaxation as a CP-SAT model; `cp` is the module ortools.sat.python.cp_model."""

    def __init__(self, cp: Any, problem: Problem) -> None:
        self.problem, self.classes = problem, classes(problem)
        self.model = cp.CpModel()
        self.used = [self.model.new_bool_var(f"share{s}") for s in range(len(problem.shares))]
        self.counts = [
            [self.model.new_int_var(0, len(c.members), "") for _ in self._decision(c).options]
            for c in self.classes
        ]
        self.sides: list[tuple[Any, Any]] = []  # for each mixed cost: whether the host, and another, is used
        self.cost: list[Any] = [problem.price(problem.decode_ns, problem.prefill_ns)]
        for alike, row in zip(self.classes, self.counts, strict=True):
            self.model.add(sum(row) == len(alike.members))
            self._options(alike, row)
        for group in problem.exclusive:
            self.model.add_at_most_one([self.used[s] for s in group])
        self._flows()
        self._mixed()
        self._capacities()
        self.objective = sum(self.cost)
        self.model.minimize(self.objective)

    def _decision(self, alike: Alike) -> Decision:
        return self.problem.decisions[alike.members[0]]

    def _options(self, alike: Alike, row: list[Any]) -> None:
        for count, option in zip(row, self._decision(alike).options, strict=True):
            self.cost.append(count * self.problem.price(option.decode_ns, option.prefill_ns))
            for share in option.shares:
                self.model.add(count <= len(alike.members) * self.used[share])
            if self.problem.contiguous and self._decision(alike).layer and not option.whole:
                self.model.add(count == 0)

    def _flows(self) -> None:
        """How often a decision of one kind, at one port, stands before one of another kind, at another port.

        A port is the pair of devices that an option begins and ends on. Every decision but the last has one
        successor, every one but the first one predecessor, and the chain says how often kinds meet.
        """
        if not self.problem.edges:
            return
        edge = next(e for e in self.problem.edges if e.target == e.source + 1)
        pairs = {
            (a, b, p, q): self.model.new_int_var(0, met, "")
            for (a, b), met in self._meetings().items()
            for p in self._ports(a)
            for q in self._ports(b)
            if not self._falls_back(a, b, p, q)
        }
        before: dict[object, list[Any]] = defaultdict(list)
        for (a, b, p, q), var in pairs.items():
            before[a, b].append(var)
            before["out", a, p].append(var)
            before["in", b, q].append(var)
            price = self.problem.price(edge.decode_ns[p[1]][q[0]], edge.prefill_ns[p[1]][q[0]])
            if price:
                self.cost.append(var * price)
        for (a, b), met in self._meetings().items():
            self.model.add(sum(before[a, b]) == met)
        for n, alike in enumerate(self.classes):
            for port in self._ports(n):
                here = sum(self._at_port(n, port))
                if not alike.last:
                    self.model.add(sum(before["out", n, port]) == here)
                if not alike.first:
                    self.model.add(sum(before["in", n, port]) == here)
        self._turns(pairs)

    def _turns(self, pairs: Mapping[tuple[int, int, Port, Port], Any]) -> None:
        """Changes of the layer device: limited, and one at least into every device that is not the first."""
        problem, total = self.problem, len(self.problem.decisions)
        layer = [self._decision(c).layer for c in self.classes]
        turns = [(q[0], v) for (a, b, p, q), v in pairs.items() if p[0] != q[0] and layer[a] and layer[b]]
        if problem.max_runs:
            self.model.add(sum(var for _, var in turns) <= problem.max_runs - 1)
        first = {o.entry for o in problem.decisions[0].options}
        for d in set(range(len(problem.devices))) - first:
            taken = [
                v
                for n in range(len(self.classes))
                for p in self._ports(n)
                if p[0] == d
                for v in self._at_port(n, p)
            ]
            entered = [v for (_, _, p, q), v in pairs.items() if q[0] == d != p[0]]
            if taken:
                used = self.model.new_bool_var(f"entered{d}")
                for count in taken:
                    self.model.add(count <= total * used)
                self.model.add(sum(entered) >= used)

    def _meetings(self) -> Counter[tuple[int, int]]:
        """How often a decision of one kind is followed by one of another."""
        kind = {m: n for n, alike in enumerate(self.classes) for m in alike.members}
        return Counter((kind[i], kind[i + 1]) for i in range(len(self.problem.decisions) - 1))

    def _ports(self, n: int) -> list[Port]:
        return sorted({(o.entry, o.exit) for o in self._decision(self.classes[n]).options})

    def _at_port(self, n: int, port: Port) -> list[Any]:
        options = self._decision(self.classes[n]).options
        return [v for v, o in zip(self.counts[n], options, strict=True) if (o.entry, o.exit) == port]

    def _falls_back(self, a: int, b: int, p: Port, q: Port) -> bool:
        """Whether the CPU would take over as layer device, where that is forbidden."""
        both = self._decision(self.classes[a]).layer and self._decision(self.classes[b]).layer
        host = [d.host for d in self.problem.devices]
        return self.problem.host_leads and both and host[q[0]] and not host[p[0]]

    def _mixed(self) -> None:
        problem = self.problem
        for m, mixed in enumerate(problem.mixed):
            host, other = (self.model.new_bool_var(f"{side}{m}") for side in ("host", "other"))
            self.sides.append((host, other))
            both = self.model.new_bool_var(f"mixed{m}")
            for alike, row in zip(self.classes, self.counts, strict=True):
                if alike.members[0] not in mixed.decisions:
                    continue
                for count, option in zip(row, self._decision(alike).options, strict=True):
                    if problem.on_host(mixed, option):
                        self.model.add(count <= len(alike.members) * host)
                    if problem.off_host(mixed, option):
                        self.model.add(count <= len(alike.members) * other)
            self.model.add_bool_or([both, ~host, ~other])
            self.cost.append(both * problem.price(mixed.decode_ns, mixed.prefill_ns))

    def _capacities(self) -> None:
        problem = self.problem
        loads: list[list[Any]] = [[] for _ in problem.devices]
        for alike, row in zip(self.classes, self.counts, strict=True):
            for count, option in zip(row, self._decision(alike).options, strict=True):
                for load, size in zip(loads, option.memory, strict=True):
                    if size:
                        load.append(count * size)
        for share, var in zip(problem.shares, self.used, strict=True):
            loads[share.device].append(var * share.size_bytes)
        for device, load in zip(problem.devices, loads, strict=True):
            self.model.add(sum(load) <= device.capacity_bytes)
        for p, pool in enumerate(problem.pools):
            together = [
                t for d, load in zip(problem.devices, loads, strict=True) if d.pool == p for t in load
            ]
            self.model.add(sum(together) <= pool.capacity_bytes)


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
