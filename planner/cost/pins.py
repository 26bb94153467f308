"""User pins: `blk.0.*=gpu`, `blk.*.ffn_down_exps.weight=cpu`, matched by unit or tensor name."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import OptionProblem
from planner.model.units import Kind, Unit
from planner.plan.request import Pin
from planner.site import ON_CPU, NoSite, Site, SiteKind

OPTION = "--pin"
_LOOKED_UP = frozenset({Kind.EMBEDDING, Kind.LOOKUP})


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a pin asks for: one site, or any of a kind."""

    what: Site | SiteKind

    def admits(self, site: Site) -> bool:
        """Whether a site is what the pin asks for."""
        return self.what in (site, site.kind)


def parse_pin(text: str) -> Pin:
    """A pin from `PATTERN=SITE`; SITE is cpu, gpu, gpu:DEVICE, DEVICE, stripe or cache."""
    pattern, equals, site = text.rpartition("=")
    if not equals or not pattern.strip() or not site.strip():
        raise OptionProblem(OPTION, text, "expected PATTERN=SITE, for example 'blk.0.*=gpu'")
    return Pin(pattern.strip(), site.strip())


def pinned(
    pins: Sequence[Pin], units: Sequence[Unit], devices: Sequence[str], idle: Sequence[Unit] = ()
) -> dict[str, Wanted]:
    """What each pinned unit must have; `idle` are units that are not loaded.

    Raises OptionProblem for a pattern that matches nothing, a site that does not exist, a unit pinned
    to two sites, and a table that the engine keeps on the host pinned elsewhere.
    """
    found: dict[str, Wanted] = {}
    for pin in pins:
        wanted = _wanted(pin, devices)
        matched = [unit for unit in units if matches(pin.pattern, unit)]
        if not matched:
            raise OptionProblem(OPTION, f"{pin.pattern}={pin.site}", _nothing(pin.pattern, idle))
        for unit in matched:
            if unit.kind in _LOOKED_UP and not wanted.admits(ON_CPU):
                why = f"{unit.name} stays in host memory, where the engine looks its rows up"
                raise OptionProblem(OPTION, f"{pin.pattern}={pin.site}", why)
            if found.setdefault(unit.name, wanted) != wanted:
                raise OptionProblem(OPTION, f"{pin.pattern}={pin.site}", f"{unit.name} is pinned twice")
    return found


def matches(pattern: str, unit: Unit) -> bool:
    """Whether a glob matches the unit's name or one of its tensors."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in (unit.name, *unit.tensors))


def _nothing(pattern: str, idle: Sequence[Unit]) -> str:
    """Why a pattern matches nothing that is placed."""
    for unit in idle:
        if matches(pattern, unit):
            return f"{unit.name} is not loaded{' without --mtp' if unit.kind is Kind.NEXTN else ''}"
    return "matches no tensor of this model"


def _wanted(pin: Pin, devices: Sequence[str]) -> Wanted:
    """What a pin asks for: a whole site, or any site of a kind."""
    if pin.site in devices:
        return Wanted(Site.on(pin.site))
    if pin.site in tuple(SiteKind):
        kind = SiteKind(pin.site)
        return Wanted(ON_CPU if kind is SiteKind.CPU else kind)
    try:
        site = Site.parse(pin.site)
    except NoSite:
        site = None
    if site is None or site.device not in devices:
        known = ", ".join((*SiteKind, *devices))
        raise OptionProblem(OPTION, f"{pin.pattern}={pin.site}", f"no such site; there are {known}")
    return Wanted(site)
