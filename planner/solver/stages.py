"""The decisions of a chain as arrays, one entry an option."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.solver.capacities import Floats, Memory
from planner.solver.labels import Ints
from planner.solver.problem import Problem

FORBIDDEN = 2**52  # a hand-over that must not be: above every price, and its sums stay exact


@dataclass(frozen=True, slots=True)
class Stage:
    """One decision as arrays over its options, and the price of every hand-over into it."""

    cost: Ints
    memory: Ints  # (limits, options)
    entry: Ints
    port: Ints  # index of (entry, exit) among all such pairs
    before: Ints  # (port, entry device): the hand-over; zeros for the first decision
    turns: Ints  # (limits, port, entry device): 1 where the layer device changes and that is limited


def stage_of(
    problem: Problem, i: int, memories: list[Memory], ports: list[tuple[int, int]], *, limit_turns: bool
) -> Stage:
    """The `i`-th decision; with `limit_turns` the last limit counts changes of the layer device."""
    limits = len(memories) + limit_turns
    decision, devices = problem.decisions[i], problem.devices
    options = decision.options
    base = 0 if i else problem.price(problem.decode_ns, problem.prefill_ns)
    memory = np.zeros((limits, len(options)), dtype=np.int64)
    for m, limit in enumerate(memories):
        memory[m] = [sum(o.memory[d] for d in limit.devices) for o in options]
    before = np.zeros((len(ports), len(devices)), dtype=np.int64)
    turns = np.zeros((limits, len(ports), len(devices)), dtype=np.int64)
    if i:
        edge = problem.edges[i - 1]
        for n, (entry, out) in enumerate(ports):
            for q in range(len(devices)):
                before[n, q] = problem.price(edge.decode_ns[out][q], edge.prefill_ns[out][q])
                if not (decision.layer and problem.decisions[i - 1].layer):
                    continue
                if limit_turns:
                    turns[-1, n, q] = entry != q
                if problem.host_leads and devices[q].host and not devices[entry].host:
                    before[n, q] = FORBIDDEN
    return Stage(
        np.array([base + problem.price(o.decode_ns, o.prefill_ns) for o in options], dtype=np.int64),
        memory,
        np.array([o.entry for o in options]),
        np.array([ports.index((o.entry, o.exit)) for o in options]),
        before,
        turns,
    )


def stages_of(
    problem: Problem, memories: list[Memory], ports: list[tuple[int, int]], *, limit_turns: bool
) -> list[Stage]:
    """All decisions; those with the same options and hand-overs share one."""
    known: dict[tuple[object, ...], Stage] = {}
    found = []
    for i, decision in enumerate(problem.decisions):
        edge = (id(problem.edges[i - 1].decode_ns), id(problem.edges[i - 1].prefill_ns)) if i else ()
        key = (id(decision.options), decision.layer, bool(i) and problem.decisions[i - 1].layer, edge)
        if key not in known:
            known[key] = stage_of(problem, i, memories, ports, limit_turns=limit_turns)
        found.append(known[key])
    return found


def stage_over(stage: Stage, multipliers: Floats) -> Floats:
    total: Floats = stage.before.astype(np.float64)
    for m, multiplier in enumerate(multipliers):
        if multiplier:
            total = total + multiplier * stage.turns[m]
    return total


def stage_cost(stage: Stage, multipliers: Floats) -> Floats:
    total: Floats = stage.cost.astype(np.float64)
    for m, multiplier in enumerate(multipliers):
        total = total + multiplier * stage.memory[m]
    return total
