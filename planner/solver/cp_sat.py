"""The placement problem as a CP-SAT model: one Boolean per option, hand-overs as unit flows."""

from __future__ import annotations

import itertools
from typing import Any

from planner.solver.problem import Edge, Problem, Solution


class ExactModel:
    """The CP-SAT model of one problem, built part by part; `cp` is ortools.sat.python.cp_model."""

    def __init__(self, cp: Any, problem: Problem) -> None:
        self.problem = problem
        self.model = cp.CpModel()
        self.choose = [
            [self.model.new_bool_var(f"{d.name}.{j}") for j in range(len(d.options))]
            for d in problem.decisions
        ]
        for row in self.choose:
            self.model.add_exactly_one(row)
        self.used = [self.model.new_bool_var(f"share{s}") for s in range(len(problem.shares))]
        self.cost: list[Any] = [problem.price(problem.decode_ns, problem.prefill_ns)]
        self._options()
        self._edges()
        self._mixed()
        self._capacities()
        self._runs()
        self._host_leads()
        self.objective = sum(self.cost)
        self.model.minimize(self.objective)

    def hint(self, solution: Solution) -> None:
        """Start the search from a known placement."""
        for row, chosen in zip(self.choose, solution.choices, strict=True):
            for j, var in enumerate(row):
                self.model.add_hint(var, j == chosen)

    def _options(self) -> None:
        problem = self.problem
        for i, j, option in problem.all_options():
            self.cost.append(self.choose[i][j] * problem.price(option.decode_ns, option.prefill_ns))
            for share in option.shares:
                self.model.add_implication(self.choose[i][j], self.used[share])
        for group in problem.exclusive:
            self.model.add_at_most_one([self.used[s] for s in group])

    def _at(self, index: int, device: int, *, entry: bool) -> list[Any]:
        """The options of a decision that start (or end) on a device."""
        options = self.problem.decisions[index].options
        return [
            var
            for var, option in zip(self.choose[index], options, strict=True)
            if (option.entry if entry else option.exit) == device
        ]

    def _edges(self) -> None:
        for e, edge in enumerate(self.problem.edges):
            self._edge(e, edge)

    def _edge(self, e: int, edge: Edge) -> None:
        """The hand-over as a unit flow from exit devices to entry devices: its linear relaxation is tight."""
        devices = range(len(self.problem.devices))
        sources = {p: self._at(edge.source, p, entry=False) for p in devices}
        targets = {q: self._at(edge.target, q, entry=True) for q in devices}
        flow = {
            (p, q): self.model.new_bool_var(f"edge{e}.{p}.{q}")
            for p in devices
            for q in devices
            if sources[p] and targets[q]
        }
        for p in devices:
            if sources[p]:
                self.model.add(sum(f for (s, _), f in flow.items() if s == p) == sum(sources[p]))
            if targets[p]:
                self.model.add(sum(f for (_, t), f in flow.items() if t == p) == sum(targets[p]))
        for (p, q), var in flow.items():
            price = self.problem.price(edge.decode_ns[p][q], edge.prefill_ns[p][q])
            if price:
                self.cost.append(var * price)

    def _mixed(self) -> None:
        problem = self.problem
        for m, mixed in enumerate(problem.mixed):
            host = self.model.new_bool_var(f"host{m}")
            other = self.model.new_bool_var(f"other{m}")
            both = self.model.new_bool_var(f"mixed{m}")
            for i in mixed.decisions:
                for var, option in zip(self.choose[i], problem.decisions[i].options, strict=True):
                    if problem.on_host(mixed, option):
                        self.model.add_implication(var, host)
                    if problem.off_host(mixed, option):
                        self.model.add_implication(var, other)
            self.model.add_bool_or([both, ~host, ~other])
            self.cost.append(both * problem.price(mixed.decode_ns, mixed.prefill_ns))

    def _capacities(self) -> None:
        problem = self.problem
        loads = [self._load(d) for d in range(len(problem.devices))]
        for device, load in zip(problem.devices, loads, strict=True):
            self.model.add(sum(load) <= device.capacity_bytes)
        for p, pool in enumerate(problem.pools):
            together = [
                term for d, load in zip(problem.devices, loads, strict=True) if d.pool == p for term in load
            ]
            self.model.add(sum(together) <= pool.capacity_bytes)

    def _load(self, device: int) -> list[Any]:
        terms = [
            self.choose[i][j] * option.memory[device]
            for i, j, option in self.problem.all_options()
            if option.memory[device]
        ]
        for share, var in zip(self.problem.shares, self.used, strict=True):
            if share.device == device:
                terms.append(var * share.size_bytes)
        return terms

    def _runs(self) -> None:
        problem = self.problem
        if not problem.max_runs and not problem.contiguous:
            return
        devices = range(len(problem.devices))
        starts: dict[int, list[Any]] = {d: [] for d in devices}
        layers = [i for i, decision in enumerate(problem.decisions) if decision.layer]
        for before, i in itertools.pairwise(layers):
            for d in devices:
                start = self.model.new_bool_var(f"start{i}.{d}")
                now, before_here = self._at(i, d, entry=True), self._at(before, d, entry=True)
                self.model.add(start >= sum(now) - sum(before_here))
                starts[d].append(start)
        if problem.max_runs:
            self.model.add(sum(s for row in starts.values() for s in row) <= problem.max_runs - 1)
        if problem.contiguous:
            self._contiguous(starts, layers[0])

    def _host_leads(self) -> None:
        """A layer has the CPU only when the layer before has it too."""
        if not self.problem.host_leads:
            return
        hosts = [d for d, device in enumerate(self.problem.devices) if device.host]
        layers = [i for i, decision in enumerate(self.problem.decisions) if decision.layer]
        for before, i in itertools.pairwise(layers):
            now, then = ([v for d in hosts for v in self._at(n, d, entry=True)] for n in (i, before))
            self.model.add(sum(now) <= sum(then))

    def _contiguous(self, starts: dict[int, list[Any]], first: int) -> None:
        for i, j, option in self.problem.all_options():
            if not option.whole and self.problem.decisions[i].layer:
                self.model.add(self.choose[i][j] == 0)
        for d, row in starts.items():
            self.model.add(sum(row) + sum(self._at(first, d, entry=True)) <= 1)
