"""Hosts whose weights may be paged from the file: the limit on all that no file holds.

A host's capacity then has room for all weights, so that placements can be compared; what caches and buffers
take must be in memory all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.cost.build_problem import Priced
from planner.memory.memory import Memory
from planner.solver.problem import Decision, Edge, Option, Problem, Solution


def over_resident(priced: Priced, solution: Solution) -> tuple[str, ...]:
    """Limits on unpaged bytes that a placement breaks, in words."""
    if not priced.resident:
        return ()
    held = priced.ledger.held(priced.problem, solution)
    devices = priced.problem.devices
    over = [
        f"{devices[d].device}: needs {held[d].unpaged} bytes besides paged weights, budget {limit}"
        for d, limit in priced.resident.items()
        if held[d].unpaged > limit
    ]
    parts = resident_of(priced, held)
    for pool, limit in priced.shared.items():
        members = [d for d, device in enumerate(devices) if device.pool == pool]
        if (needed := sum(parts[d].total for d in members)) > limit:
            names = " and ".join(devices[d].device for d in members)
            over.append(f"{names}: need {needed} bytes besides paged weights, their one memory has {limit}")
    return tuple(over)


def resident_of(priced: Priced, parts: Sequence[Memory]) -> tuple[Memory, ...]:
    """What must be in memory on each device: everything but the weights of a host that pages."""
    return tuple(replace(m, weights=0) if d in priced.resident else m for d, m in enumerate(parts))


def resident_problem(priced: Priced) -> Problem:
    """The problem in which only what must be in memory counts; a solution of it is one of the other."""
    problem, hosts = priced.problem, dict(priced.resident)
    if not hosts:
        return problem
    known: dict[int, tuple[Option, ...]] = {}  # decisions that are alike share their options

    def lean(decision: Decision) -> tuple[Option, ...]:
        if id(decision.options) not in known:
            known[id(decision.options)] = tuple(
                replace(o, memory=_lean(priced, decision, o, hosts)) for o in decision.options
            )
        return known[id(decision.options)]

    devices = tuple(
        replace(device, capacity_bytes=hosts[d]) if d in hosts else device
        for d, device in enumerate(problem.devices)
    )
    decisions = tuple(replace(d, options=lean(d)) for d in problem.decisions)
    pools = tuple(replace(pool, capacity_bytes=priced.pool_bytes(p)) for p, pool in enumerate(problem.pools))
    return replace(problem, devices=devices, decisions=decisions, pools=pools)


def least_resident(priced: Priced) -> tuple[int, Memory] | None:
    """A host that pages weights, and the least that it must hold beside them.

    The GPUs are as full as they may be, in memory of their own or one with the host. None where no host
    pages, or where not even the GPUs have a placement.
    """
    from planner.solver.solve import Limits, solve  # not for those who only ask what is resident

    problem = priced.problem
    host = next(iter(priced.resident), None)
    if host is None:
        return None

    def priced_by_host(decision: Decision) -> Decision:
        sizes = (priced.ledger.of(decision, option)[host].unpaged for option in decision.options)
        pairs = zip(decision.options, sizes, strict=True)
        return replace(
            decision, options=tuple(replace(o, decode_ns=size >> 10, prefill_ns=0) for o, size in pairs)
        )

    zero = tuple((0,) * len(problem.devices) for _ in problem.devices)
    asked = replace(
        problem,
        decisions=tuple(map(priced_by_host, problem.decisions)),
        edges=tuple(Edge(e.source, e.target, zero, zero) for e in problem.edges),
        mixed=(),
        decode_ns=0,
        prefill_ns=0,
    )
    found = solve(asked, None, Limits(2.0)).solution
    if found is None:
        return None
    return host, replace(priced.ledger.held(problem, found)[host], weights=0)


def _lean(priced: Priced, decision: Decision, option: Option, hosts: dict[int, int]) -> tuple[int, ...]:
    held = priced.ledger.of(decision, option)
    return tuple(held[d].unpaged if d in hosts else size for d, size in enumerate(option.memory))
