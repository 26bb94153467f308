"""What runs beside the model, as a command line says it: projector, draft model, the memory of others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from commands.shared.console import read_text
from commands.shared.models import load_inventory
from planner.constants import CPU, PPM
from planner.errors import OptionProblem

if TYPE_CHECKING:
    from commands.solve.options import SolveOptions
    from planner.drafts.acceptance import Acceptance
    from planner.machine.profile import Profile
    from planner.memory.reserves import Extras
    from planner.plan.request import ExtraModels

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
        draft=load_inventory(asked.draft, planned=True) if asked.draft else None,
        ngrams=asked.ngrams,
        reserved={name: size for name, size in kept.items() if size},
    )


def acceptance(asked: SolveOptions) -> ExtraModels:
    """Who drafts and what is known of its tokens; no rate where the draft length is not to be chosen.

    Raises OptionProblem for a rate that is none, and drafts of two kinds; NoAcceptance for a file that
    tells nothing of drafts.
    """
    from planner.memory.reserves import Extras
    from planner.plan.request import ExtraModels

    kinds = {"--draft": asked.draft is not None, "--mtp": asked.mtp, "--ngram": asked.ngrams}
    named = [name for name, given in kinds.items() if given]
    if asked.ngrams and len(named) > 1:
        raise OptionProblem("--ngram", "", f"one kind of draft at a time: there is {named[0]} too")
    if asked.accept is not None and not named:
        raise OptionProblem("--draft-accept", asked.accept, "needs --draft, --mtp or --ngram")
    nothing = ExtraModels(Extras(), "")
    if asked.accept is None and not asked.ngrams:
        return nothing
    text = asked.accept if asked.accept is not None else "auto"
    found = _acceptance(text, asked.ngrams)
    return replace(nothing, accept_ppm=found.each_ppm, accepted_ppm=found.by_position)


def _acceptance(text: str, ngrams: bool) -> Acceptance:
    from planner.drafts.acceptance import Acceptance, by_rates
    from planner.drafts.server_texts import acceptance_in
    from planner.passes.settings_to_try import PUBLISHED_PPM

    if text == "auto":
        if ngrams:
            why = "n-grams are right as often as a text repeats itself: give a rate, or a log of the server"
            raise OptionProblem("--draft-accept", text, why)
        return Acceptance(PUBLISHED_PPM)
    rates = text.split(",")
    if all(_RATE.fullmatch(rate) for rate in rates):
        shares = [round(float(rate) * PPM) for rate in rates]
        if shares != sorted(shares, reverse=True):
            why = "shares of steps that accept 1, 2, … tokens at least never rise"
            raise OptionProblem("--draft-accept", text, why)
        return by_rates(shares)
    if not Path(text).is_file():
        why = "expected a rate from 0 to 1, rates by position, auto, or a file"
        raise OptionProblem("--draft-accept", text, why)
    return acceptance_in(read_text(Path(text)), text)
