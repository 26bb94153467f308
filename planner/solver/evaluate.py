"""The price of a placement, recomputed in plain loops; shares no code with the solver and is what counts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from planner.solver.problem import Option, Problem, Solution


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a placement costs and which limits it breaks."""

    decode_ns: int
    prefill_ns: int
    objective_ns: int
    memory: tuple[int, ...]  # bytes per device, shares included
    splits: int  # changes of device that are priced, and one
    runs: int  # runs of equal layer device
    compute_ns: int  # decode: operators, and changes of device inside a layer
    edges_ns: int  # decode: hand-overs between decisions
    mixed_ns: int  # decode: fixed costs of a mixed graph
    violations: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        return not self.violations


def evaluate(problem: Problem, solution: Solution) -> Evaluation:
    """Cost parts and violated limits of a complete placement."""
    chosen = solution.chosen(problem)
    edges = _edges(problem, chosen)
    mixed = _mixed(problem, chosen)
    compute = problem.decode_ns + sum(o.decode_ns for o in chosen)
    decode = compute + edges[0] + mixed[0]
    prefill = problem.prefill_ns + sum(o.prefill_ns for o in chosen) + edges[1] + mixed[1]
    memory = memory_of(problem, chosen)
    return Evaluation(
        decode_ns=decode,
        prefill_ns=prefill,
        objective_ns=problem.decode_weight * decode + problem.prefill_weight * prefill,
        memory=memory,
        splits=_splits(chosen),
        runs=_runs(_entries(problem, chosen)),
        compute_ns=compute,
        edges_ns=edges[0],
        mixed_ns=mixed[0],
        violations=(*_over(problem, memory), *_structure(problem, chosen)),
    )


def memory_of(problem: Problem, chosen: tuple[Option, ...]) -> tuple[int, ...]:
    """Bytes per device: every chosen option, and each share that any of them asks for, once."""
    memory = [0] * len(problem.devices)
    for option in chosen:
        for device, size in enumerate(option.memory):
            memory[device] += size
    for index in sorted({s for option in chosen for s in option.shares}):
        memory[problem.shares[index].device] += problem.shares[index].size_bytes
    return tuple(memory)


def _edges(problem: Problem, chosen: tuple[Option, ...]) -> tuple[int, int]:
    decode = prefill = 0
    for edge in problem.edges:
        source, target = chosen[edge.source].exit, chosen[edge.target].entry
        decode += edge.decode_ns[source][target]
        prefill += edge.prefill_ns[source][target]
    return decode, prefill


def _mixed(problem: Problem, chosen: tuple[Option, ...]) -> tuple[int, int]:
    decode = prefill = 0
    for mixed in problem.mixed:
        kinds = [
            problem.devices[device].kind == "cpu"
            for index in mixed.decisions
            for device in {
                chosen[index].entry,
                chosen[index].entry if mixed.layers_only else chosen[index].exit,
            }
        ]
        if any(kinds) and not all(kinds):
            decode += mixed.decode_ns
            prefill += mixed.prefill_ns
    return decode, prefill


def _splits(chosen: tuple[Option, ...]) -> int:
    changes = sum(a.exit != b.entry for a, b in itertools.pairwise(chosen))
    return 1 + changes + sum(o.splits for o in chosen)


def _entries(problem: Problem, chosen: tuple[Option, ...]) -> list[int]:
    """Layer devices in order."""
    return [o.entry for o, d in zip(chosen, problem.decisions, strict=True) if d.layer]


def _runs(values: list[int]) -> int:
    return 1 + sum(a != b for a, b in itertools.pairwise(values))


def _falls_back(problem: Problem, before: int, entry: int) -> bool:
    """Whether the CPU takes over as layer device from another one."""
    return problem.devices[entry].host and not problem.devices[before].host


def _over(problem: Problem, memory: tuple[int, ...]) -> list[str]:
    found = []
    pools = [0] * len(problem.pools)
    for device, used in zip(problem.devices, memory, strict=True):
        if used > device.capacity_bytes:
            found.append(f"{device.device}: needs {used} bytes, budget {device.capacity_bytes}")
        if device.pool >= 0:
            pools[device.pool] += used
    for pool, used in zip(problem.pools, pools, strict=True):
        if used > pool.capacity_bytes:
            found.append(f"{pool.name}: needs {used} bytes together, has {pool.capacity_bytes}")
    return found


def _structure(problem: Problem, chosen: tuple[Option, ...]) -> list[str]:
    found = []
    asked = {s for option in chosen for s in option.shares}
    for group in problem.exclusive:
        both = [problem.shares[s].name for s in group if s in asked]
        if len(both) > 1:
            found.append(f"{' and '.join(both)} exclude each other")
    entries = _entries(problem, chosen)
    if problem.max_runs and _runs(entries) > problem.max_runs:
        found.append(f"{_runs(entries)} runs of layers, the engine takes {problem.max_runs}")
    if problem.host_leads and any(_falls_back(problem, a, b) for a, b in itertools.pairwise(entries)):
        found.append("the CPU is the layer device of a layer after one of a GPU")
    whole = all(o.whole for o, d in zip(chosen, problem.decisions, strict=True) if d.layer)
    if problem.contiguous and (_runs(entries) > len(set(entries)) or not whole):
        found.append("not contiguous")
    return found
