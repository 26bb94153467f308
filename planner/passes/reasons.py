"""Why a unit is where it is, in a few words that are true."""

from __future__ import annotations

from planner.model.units import BOUND, Kind, Unit
from planner.site import ON_CPU, SiteKind, sites
from planner.solver.problem import Decision, Option, Problem


def reason(problem: Problem, decision: Decision, option: Option, index: int, unit: Unit) -> str:
    """A short reason for the site of `unit`, the `index`-th of its decision."""
    if not decision.layer:
        return "looked up on the host, one row a token"
    home = problem.devices[option.entry].device
    site = sites(option.sites)[index]
    apart = site == ON_CPU and not problem.devices[option.entry].host
    if unit.kind in BOUND or unit.kind is Kind.NEXTN or (unit.kind is Kind.OUTPUT and not apart):
        return _home_reason(problem, decision, option, unit, home)
    if site.kind is SiteKind.STRIPE:
        return f"{site.amount} hottest of {unit.experts} experts on {home}, the others across the bus"
    if site.kind is SiteKind.HYBRID:
        return (
            f"{site.amount} of {unit.experts} experts in slots of {home}, the others by CPU and bus beside it"
        )
    if site.kind is SiteKind.CACHE:
        return f"read through the engine's expert cache on {home}"
    if site == ON_CPU and problem.devices[option.entry].host:
        return "its layer is on the CPU"
    other = _elsewhere(decision, option, index)
    if other is None:
        return "no other place"
    delta = (other.decode_ns - option.decode_ns) / 1000
    if site == ON_CPU:
        return f"frees {unit.size_bytes >> 20} MiB of {home} for {-delta:.0f} us a token"
    return f"saves {delta:.0f} us a token against the CPU" if delta >= 0 else "keeps the graph whole"


def _home_reason(problem: Problem, decision: Decision, option: Option, unit: Unit, home: str) -> str:
    kept = {Kind.ATTENTION: "owns the layer's KV cache", Kind.RECURRENT: "owns the layer's state"}
    if problem.devices[option.entry].host:
        others = [o.decode_ns for o in decision.options if not problem.devices[o.entry].host]
        if not others:
            return "no other place"
        saved = (option.decode_ns - min(others)) / 1000
        if saved <= 0:
            return "as fast here as on a GPU"
        return f"a GPU would save {saved:.0f} us a token here"
    return kept.get(unit.kind, f"layer device {home}")


def _elsewhere(decision: Decision, option: Option, index: int) -> Option | None:
    """The option that differs only in the site of one unit."""
    for other in decision.options:
        rest = [i for i in range(len(option.sites)) if i != index]
        there = sites(other.sites)[index]
        alike = (other.entry, other.away) == (option.entry, option.away)
        same = alike and all(other.sites[i] == option.sites[i] for i in rest)
        if same and there != option.sites[index] and not there.divided:
            return other
    return None
