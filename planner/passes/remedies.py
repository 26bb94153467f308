"""What would make a refused plan possible: contexts and KV types that were tried and fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from planner.machine.profile import Profile
from planner.model.inventory import Inventory
from planner.passes.largest_context import bisect, fits
from planner.passes.refusal import Infeasible
from planner.plan.request import SolveOptions
from planner.workload import Workload

_SMALLER = "q8_0"
_UNTRIED = ("--ctx", "--kv-type")


def with_remedies(
    refusal: Infeasible,
    inventory: Inventory,
    profile: Profile,
    budgets: Mapping[str, int],
    workload: Workload,
    options: SolveOptions,
    lowest: int,
) -> Infeasible:
    """The refusal with contexts (from `lowest` on) and KV types that fit in place of those only named."""
    others = tuple(h for h in refusal.hints if not h.startswith(_UNTRIED))
    if len(others) == len(refusal.hints):
        return refusal  # what lacks is not the cache's

    def tried(work: Workload) -> int:
        """The largest context that fits, 0 for none."""

        def at(n_ctx: int) -> bool:
            return fits(inventory, profile, budgets, work, options, n_ctx)

        if not at(lowest):
            return 0
        return bisect(at, lowest, work.n_ctx)

    return replace(refusal, hints=(*_found(workload, tried), *others))


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
