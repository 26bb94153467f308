"""A relaxation that counts: how many layers of each kind take each option, whatever their order.

Layers that look alike to the solver become one integer variable per option; hand-overs become total
flows between devices. The model is tiny, its optimum a lower bound on every placement, and often the
cost of one: order matters only where changing device between two layers does.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from planner.problem import Decision, Problem


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
        """Every decision but the last hands over, every one but the first receives."""
        if not self.problem.edges:
            return
        devices, n = range(len(self.problem.devices)), len(self.problem.decisions)
        flow = {(p, q): self.model.new_int_var(0, n, f"flow{p}.{q}") for p in devices for q in devices}
        # Devices that data reaches otherwise than by a hand-over: where the chain starts, inside a layer.
        reached = {o.exit for o in self.problem.decisions[0].options}
        reached |= {o.exit for _, _, o in self.problem.each_option() if o.exit != o.entry}
        for d in devices:
            given = self._counting(lambda o, d=d: o.exit == d, lambda c: not c.last)
            taken = self._counting(lambda o, d=d: o.entry == d, lambda c: not c.first)
            self.model.add(sum(flow[d, q] for q in devices) == sum(given))
            self.model.add(sum(flow[p, d] for p in devices) == sum(taken))
            if d not in reached and taken:  # a device in use is entered from another at least once
                entered = self.model.new_bool_var(f"entered{d}")
                for count in taken:
                    self.model.add(count <= n * entered)
                self.model.add(sum(flow[p, d] for p in devices if p != d) >= entered)
        edge = next(e for e in self.problem.edges if e.target == e.source + 1)
        for (p, q), amount in flow.items():
            price = self.problem.price(edge.decode_ns[p][q], edge.prefill_ns[p][q])
            if price:
                self.cost.append(amount * price)

    def _counting(self, option_is: Any, class_is: Any) -> list[Any]:
        return [
            count
            for alike, row in zip(self.classes, self.counts, strict=True)
            if class_is(alike)
            for count, option in zip(row, self._decision(alike).options, strict=True)
            if option_is(option)
        ]

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
