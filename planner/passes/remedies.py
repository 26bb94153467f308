"""What would make a refused plan possible: contexts and KV types that were tried and fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from planner.errors import AnswerIsNo
from planner.passes.case import Case
from planner.passes.largest_context import bisect, fits, with_context
from planner.passes.refusal import Infeasible
from planner.passes.settings_to_try import projector_places
from planner.plan.engine_settings import EngineSettings
from planner.workload import Workload

_SMALLER = "q8_0"
_UNTRIED = ("--ctx", "--kv-type")


def with_remedies(refusal: AnswerIsNo, case: Case, start: EngineSettings) -> AnswerIsNo:
    """The refusal with contexts and KV types that fit, and hold the use, in place of those only named."""
    request = case.request
    moves = request.extra_models is not None and request.extra_models.projector_moves
    if request.lowest_ctx or moves or not isinstance(refusal, Infeasible):
        return refusal
    others = tuple(h for h in refusal.hints if not h.startswith(_UNTRIED))
    if len(others) == len(refusal.hints):
        return refusal  # what lacks is not the cache's
    settings = next(projector_places(case, start))
    lowest = min(request.workload.needed_cells, request.workload.n_ctx)

    def tried(work: Workload) -> int:
        """The largest context that fits, 0 for none."""

        def at(n_ctx: int) -> bool:
            return fits(case, settings, with_context(work, n_ctx))

        if not at(lowest):
            return 0
        return bisect(at, lowest, work.n_ctx)

    return replace(refusal, hints=(*_found(request.workload, tried), *others))


def _found(workload: Workload, tried: Callable[[Workload], int]) -> Iterator[str]:
    if shorter := tried(workload):
        yield f"--ctx {shorter} (fits)"
    if workload.type_k == _SMALLER or not workload.flash_attn:
        return
    found = tried(workload.model_copy(update={"type_k": _SMALLER, "type_v": _SMALLER}))
    if found >= workload.n_ctx:
        yield f"--kv-type {_SMALLER} (fits)"
    elif found > shorter:
        yield f"--kv-type {_SMALLER} --ctx {found} (fits)"
