"""What the timings of a machine belong to: facts by name, and which of them no longer hold.

The kernel's patch level and the size of the memory do not count; the NUMA policy does, since it decides
which memory is read. Builds of the engine are judged by planner/machine/engine_builds.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.constants import CPU
from planner.errors import InputError
from planner.machine.profile import Fingerprint, Profile

Facts = Mapping[str, str]
_DRIVER = "driver"
_MACHINE = ("processor", "cores")


@dataclass(eq=False)
class AnotherMachine(InputError):
    """A plan whose timings were taken on another machine, or on this one under other circumstances."""

    path: str
    changes: tuple[str, ...]

    def message(self) -> str:
        return (
            f"{self.path}: its profile does not hold here: {'; '.join(self.changes)}: profile and solve "
            "again, or add --other-machine to load it all the same"
        )


def facts_of(profile: Profile, devices: Iterable[str]) -> dict[str, str]:
    """The facts behind a measured profile, its `devices` beside the CPU included; {} of an assumed one."""
    if not profile.measured:
        return {}
    far = [profile.device(name) for name in devices if name != CPU]
    return {**host_facts(profile.fingerprint), **{d.name: d.description for d in far}}


def host_facts(fingerprint: Fingerprint) -> dict[str, str]:
    """Facts that hold for the whole machine."""
    return {
        "processor": fingerprint.cpu,
        "cores": str(fingerprint.cores),
        _DRIVER: fingerprint.driver,
        "NUMA policy": fingerprint.numa,
    }


def differences(known: Facts, now: Facts) -> tuple[str, ...]:
    """Why timings of one machine do not hold on another; () when they do. Facts that one lacks count not."""
    return tuple(
        f"{name} was {known[name] or 'none'}, is {now[name] or 'none'}"
        for name in known
        if name in now and known[name] != now[name]
    )


def may_be_same(known: Facts, now: Facts) -> bool:
    """Whether two sets of host facts may be of one machine, at different times."""
    return all(known[n] == now[n] for n in _MACHINE) and bool(known[_DRIVER]) == bool(now[_DRIVER])
