"""What runs beside the model, as a command line says it: projector, draft model, the memory of others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from commands.shared.models import load_inventory
from planner.constants import CPU
from planner.errors import OptionProblem

if TYPE_CHECKING:
    from commands.solve.options import SolveOptions
    from planner.machine.profile import Profile
    from planner.memory.reserves import Extras

_RATE = re.compile(r"0(\.[0-9]+)?|\.[0-9]+|1(\.0*)?")


def first_gpu(profile: Profile, budgets: Mapping[str, int]) -> str:
    """The device of what names none; the CPU where there is no GPU."""
    return next((d.name for d in profile.devices if d.kind != "cpu" and d.name in budgets), CPU)


def extras_of(asked: SolveOptions, profile: Profile, budgets: Mapping[str, int]) -> Extras:
    """The files beside the model, read, and the memory of other users; OptionProblem for bad options."""
    from planner.machine.budgets import EVERY, parse_reserve
    from planner.memory.reserves import Extras

    kept = {} if asked.reserve is None else dict(parse_reserve(asked.reserve))
    gpus = [d.name for d in profile.devices if d.kind != "cpu" and d.name in budgets]
    every = kept.pop(EVERY, 0)
    for name in kept:
        if name not in budgets:
            raise OptionProblem(
                "--reserve", asked.reserve or "", f"{name} has no budget; there are {', '.join(budgets)}"
            )
    kept = {name: kept.get(name, every) for name in gpus} | {n: s for n, s in kept.items() if n not in gpus}
    if asked.eyes != "auto" and asked.mmproj is None:
        raise OptionProblem("--mmproj-device", asked.eyes, "needs --mmproj")
    return Extras(
        mmproj=load_inventory(asked.mmproj) if asked.mmproj else None,
        mmproj_device=CPU if asked.eyes == "cpu" else "",
        draft=load_inventory(asked.draft) if asked.draft else None,
        reserved={name: size for name, size in kept.items() if size},
    )


def accept_rate(asked: SolveOptions) -> int | None:
    """Share of drafted tokens that are right, in ppm; None where the draft length is not to be chosen.

    Raises OptionProblem for a rate that is none.
    """
    from planner.passes.settings_to_try import PUBLISHED_PPM

    if asked.accept is None:
        return None
    if asked.draft is None and not asked.mtp:
        raise OptionProblem("--draft-accept", asked.accept, "needs --draft or --mtp")
    if asked.accept == "auto":
        return PUBLISHED_PPM
    if not _RATE.fullmatch(asked.accept):
        raise OptionProblem("--draft-accept", asked.accept, "expected a rate from 0 to 1, or auto")
    return round(float(asked.accept) * 10**6)
