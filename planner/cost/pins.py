"""User pins: `blk.0.*=gpu`, `blk.*.ffn_down_exps.weight=cpu`, matched by unit or tensor name."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from planner.errors import OptionProblem
from planner.model.units import Kind, Unit
from planner.plan.request import Pin

OPTION = "--pin"
_LOOKED_UP = frozenset({Kind.EMBEDDING, Kind.LOOKUP})
_SITES = ("gpu", "cpu", "stripe", "cache")


def parse_pin(text: str) -> Pin:
    """A pin from `PATTERN=SITE`; SITE is cpu, gpu, gpu:DEVICE, DEVICE, stripe or cache."""
    pattern, equals, site = text.rpartition("=")
    if not equals or not pattern.strip() or not site.strip():
        raise OptionProblem(OPTION, text, "expected PATTERN=SITE, for example 'blk.0.*=gpu'")
    return Pin(pattern.strip(), site.strip())


def pinned(
    pins: Sequence[Pin], units: Sequence[Unit], devices: Sequence[str], idle: Sequence[Unit] = ()
) -> dict[str, str]:
    """The site each pinned unit must have; `idle` are units that are not loaded.

    Raises OptionProblem for a pattern that matches nothing, a site that does not exist, a unit pinned
    to two sites, and a table that the engine keeps on the host pinned elsewhere.
    """
    found: dict[str, str] = {}
    for pin in pins:
        site = _site(pin, devices)
        matched = [unit for unit in units if matches(pin.pattern, unit)]
        if not matched:
            raise OptionProblem(OPTION, f"{pin.pattern}={pin.site}", _nothing(pin.pattern, idle))
        for unit in matched:
            if unit.kind in _LOOKED_UP and site != "cpu":
                why = f"{unit.name} stays in host memory, where the engine looks its rows up"
                raise OptionProblem(OPTION, f"{pin.pattern}={pin.site}", why)
            if found.setdefault(unit.name, site) != site:
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


def agrees(site: str, wanted: str) -> bool:
    """Whether a site is what a pin asks for."""
    return site == wanted or (":" not in wanted and site.split(":")[0] == wanted)


def _site(pin: Pin, devices: Sequence[str]) -> str:
    head, _, device = pin.site.partition(":")
    if pin.site in devices:
        return "cpu" if pin.site == "CPU" else f"gpu:{pin.site}"
    if head not in _SITES or (device and device not in devices and device.rpartition(":")[0] not in devices):
        known = ", ".join((*_SITES, *devices))
        raise OptionProblem(OPTION, f"{pin.pattern}={pin.site}", f"no such site; there are {known}")
    return pin.site
