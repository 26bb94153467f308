"""How many tokens of a prompt are computed at once, where that is left to be chosen: `-ub auto`.

Host weights are read, or cross the bus, once for every batch of a prompt: larger batches read them less often
and take more compute memory, which is then lost to weights. So each size has its own best placement.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from commands.shared.console import ms, planning, say
from commands.solve.options import UBATCH_AUTO, SolveOptions
from commands.solve.request import Inputs, inputs_of
from planner.errors import AnswerIsNo

if TYPE_CHECKING:
    from planner.plan.plan import Plan

SIZES = (512, 1024, 2048, 4096, 8192)
_WORTH = 100  # a larger batch is to save a hundredth of a request


def smallest_batch(asked: SolveOptions) -> SolveOptions:
    """The same with the first size, where the size is left to be chosen."""
    return replace(asked, ubatch=SIZES[0]) if asked.ubatch == UBATCH_AUTO else asked


def solved(asked: SolveOptions, share: float = 1, *, advise: bool = True) -> tuple[Inputs, Plan]:
    """The plan of a command line, with what it was made from; `share` of the time may be used.

    `advise`: a refusal says what was tried and fits. Raises what the first size is refused for where all are.
    """
    if asked.ubatch != UBATCH_AUTO:
        inputs = inputs_of(asked)
        with planning("planning", inputs.deadline.left_s) as watch:
            return inputs, inputs.within(share).plan(advise=advise, watch=watch)
    first = inputs_of(smallest_batch(asked))
    sizes = worth_trying(first.request.workload.prompt)
    found: list[tuple[int, Inputs, Plan]] = []
    refusal: AnswerIsNo | None = None
    for number, size in enumerate(sizes):
        inputs = inputs_of(replace(asked, ubatch=size)) if number else first
        inputs = replace(inputs, deadline=first.deadline)
        try:
            part = inputs.within(share / (len(sizes) - number))
            with planning(f"batches of {size}", inputs.deadline.left_s) as watch:
                found.append((size, inputs, part.plan(advise=advise and not number, watch=watch)))
        except AnswerIsNo as no:
            refusal = refusal or no
    if not found:
        assert refusal is not None
        raise refusal
    best = min(plan.predicted.objective_ns for _, _, plan in found)
    size, inputs, plan = next(
        one for one in found if _WORTH * one[2].predicted.objective_ns <= (_WORTH + 1) * best
    )
    told = ", ".join(f"{n}: {ms(made.predicted.objective_ns)}" for n, _, made in found)
    say(f"prompts in batches of {size}; time of a request by size: {told}")
    return inputs, plan


def worth_trying(prompt: int) -> tuple[int, ...]:
    """The sizes up to the first that holds the prompt."""
    return tuple(size for n, size in enumerate(SIZES) if not n or SIZES[n - 1] < prompt)
