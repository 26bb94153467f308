"""Slots filled by another routing than the plan's: a named profile of a heat file, given at load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from commands.shared.console import read_text, say
from planner.errors import OptionProblem
from planner.model.routed_layers import moe_shape

if TYPE_CHECKING:
    from commands.shared.plan_job import Job
    from planner.routing.expert_counts import Heat


def seeded(job: Job, given: str | None) -> Job:
    """The job with the hottest experts of FILE[:NAME] in its slots, as many in each layer as the plan has.

    Layers that the heat has not seen keep the plan's. Raises OptionProblem for a plan without slots,
    NoProfile for a name that is not in the file, WrongModel.
    """
    from planner.routing.expert_counts import heat_of_model, hottest

    if given is None:
        return job
    if not job.spec.residents:
        raise OptionProblem("--heat", given, "fills slots, and the plan has none (solve --hybrid)")
    path, heat = _profile(given)
    order = hottest(heat_of_model(heat, moe_shape(job.file.inventory), str(path)))
    residents = tuple(
        (layer, n, order[layer][: len(experts)] if layer in order else experts)
        for layer, n, experts in job.spec.residents
    )
    changed = sum(
        len(set(new) - set(old))
        for (_, _, old), (_, _, new) in zip(job.spec.residents, residents, strict=True)
    )
    say(
        f"slots by {given}: {changed} of {sum(len(each[2]) for each in residents)} experts are not the plan's"
    )
    return replace(job, spec=replace(job.spec, residents=residents))


def _profile(given: str) -> tuple[Path, Heat]:
    """The heat that FILE or FILE:NAME means."""
    from planner.routing.expert_counts import from_text, profile

    whole = Path(given)
    file, _, name = given.rpartition(":")
    if whole.exists() or not file:
        return whole, from_text(read_text(whole), given)
    path = Path(file)
    return path, profile(from_text(read_text(path), file), name, file)
