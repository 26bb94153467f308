"""A refusal for want of memory as data: what each device needs and lacks, what was tried and fits."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.errors import AnswerIsNo


def refusal_data(refusal: AnswerIsNo) -> dict[str, Any]:
    """The refusal for a program: `tested` ways out were planned with and fit, `untested` only free memory."""
    from planner.passes.refusal import Infeasible
    from planner.passes.remedies import tried

    data: dict[str, Any] = {"feasible": False, "error": str(refusal)}
    if not isinstance(refusal, Infeasible):
        return data
    return {
        **data,
        "why": refusal.why,
        "needs": [
            {
                "device": need.device,
                "budget_bytes": need.budget_bytes,
                "needed_bytes": need.total_bytes,
                "shortage_bytes": max(need.total_bytes - need.budget_bytes, 0),
                **{f"{part}_bytes": size for part, size in asdict(need.memory).items()},
            }
            for need in refusal.needs
        ],
        "tested": [tried(hint) for hint in refusal.hints if tried(hint)],
        "untested": [hint for hint in refusal.hints if not tried(hint)],
    }
