"""How many tokens of a prompt are computed at once, where that is not stated: `-ub auto`.

Host weights are read, or cross the bus, once for every batch of a prompt: larger batches read them less often
and take more compute memory, which is then lost to weights. So each size has its own best placement.
A context that is to be as large as possible keeps the smallest: that memory is the cache's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from commands.shared.console import ms, planning, say
from commands.solve.options import UBATCH_AUTO, SolveOptions
from commands.solve.request import Inputs, inputs_of
from planner.errors import AnswerIsNo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.plan.plan import Plan

SIZES = (512, 1024, 2048, 4096, 8192)
Way = tuple[SolveOptions, Inputs]  # with a size, and what they ask for
_WORTH = 100  # a larger batch is to save a hundredth of a request


def smallest_batch(asked: SolveOptions) -> SolveOptions:
    """The same with the first size, where the size is left to be chosen."""
    if asked.ubatch != UBATCH_AUTO:
        return asked
    return replace(asked, ubatch=min(SIZES[0], asked.batch or SIZES[0]))


def sizes_of(asked: SolveOptions) -> list[Way]:
    """The options with each size that is worth trying, and what they ask for; with the stated one alone."""
    least = smallest_batch(asked)
    first = inputs_of(least)
    if asked.ubatch != UBATCH_AUTO:
        return [(least, first)]
    most = 0 if asked.ctx == "max" or asked.ctx_min else asked.batch or SIZES[-1]
    more = [size for size in worth_trying(first.request.workload.prompt)[1:] if size <= most]
    larger = [replace(asked, ubatch=size) for size in more]
    return [(least, first), *((one, replace(inputs_of(one), deadline=first.deadline)) for one in larger)]


def worth_trying(prompt: int) -> tuple[int, ...]:
    """The sizes up to the first that holds the prompt."""
    return tuple(size for n, size in enumerate(SIZES) if not n or SIZES[n - 1] < prompt)


def best_of(plans: Sequence[Plan]) -> Plan:
    """The plan of the smallest size that is not a hundredth of a request slower than the best."""
    best = min(plan.predicted.objective_ns for plan in plans)
    return next(plan for plan in plans if _WORTH * plan.predicted.objective_ns <= (_WORTH + 1) * best)


def solved(asked: SolveOptions, share: float = 1, *, advise: bool = True) -> tuple[Inputs, Plan]:
    """The plan of a command line, with what it was made from; `share` of the time may be used.

    `advise`: a refusal says what was tried and fits. Raises what the first size is refused for where all are.
    """
    ways = sizes_of(asked)
    if len(ways) == 1:
        (inputs,) = (inputs for _, inputs in ways)
        with planning("planning", inputs.deadline.left_s) as watch:
            return inputs, inputs.within(share).plan(advise=advise, watch=watch)
    from planner.passes.refusal import OutOfTime

    found: list[tuple[Inputs, Plan]] = []
    refusal: AnswerIsNo | None = None
    told: list[str] = []
    for number, (_, inputs) in enumerate(ways):
        part = inputs.within(share / (len(ways) - number))
        size = inputs.request.workload.n_ubatch
        try:
            with planning(f"batches of {size}", inputs.deadline.left_s) as watch:
                found.append((inputs, part.plan(advise=advise and not number, watch=watch)))
            told.append(f"{size}: {ms(found[-1][1].predicted.objective_ns)}")
        except AnswerIsNo as no:
            refusal = refusal or no
            told.append(f"{size}: {'no time' if isinstance(no, OutOfTime) else 'does not fit'}")
    if not found:
        assert refusal is not None
        raise refusal
    plan = best_of([plan for _, plan in found])
    say(f"prompts in batches of {plan.workload.n_ubatch}; time of a request by size: {', '.join(told)}")
    return next(inputs for inputs, made in found if made is plan), plan
