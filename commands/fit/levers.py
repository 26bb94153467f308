"""Which lever brings what: placement, lanes, type of the KV cache, context; each planned, none guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from commands.shared.verdicts import best_stock
from planner.errors import AnswerIsNo
from planner.memory.kv_cache import KvTypeProblem

if TYPE_CHECKING:
    from planner.plan.plan import Plan
    from planner.plan.request import Request

_SHORTEST = 2048  # tokens: below, a context is no offer


@dataclass(frozen=True, slots=True)
class Lever:
    """One thing to change, and the time of a token before and after it, in ns; 0 where nothing fits."""

    name: str
    option: str
    before_ns: int
    after_ns: int

    @property
    def gain(self) -> float:
        """How many times as fast; 1 is nothing gained."""
        return self.before_ns / self.after_ns if self.before_ns and self.after_ns else 1.0


def levers(plan: Plan, slots: Plan | None, request: Request, make: Callable[[Request], Plan]) -> list[Lever]:
    """What each lever alone brings. `slots`: the plan with experts in slots, where one was made."""
    mine, stock = plan.predicted.tpot_ns, best_stock(plan)
    found = [Lever("placement", "solve, against the best stock rule", stock.tpot_ns, mine)] if stock else []
    if slots is not None:
        found.append(Lever("lanes", "solve --hybrid", mine, slots.predicted.tpot_ns))
    for name, option, asked in _changed(request):
        try:
            found.append(Lever(name, option, mine, make(asked).predicted.tpot_ns))
        except (AnswerIsNo, KvTypeProblem):  # the engine computes no such cache there, or has none
            continue
    return found


def _changed(request: Request) -> Iterator[tuple[str, str, Request]]:
    use = request.workload
    if (use.type_k, use.type_v) == ("f16", "f16"):
        smaller = use.model_copy(update={"type_k": "q8_0", "type_v": "q8_0"})
        yield "KV type", "--kv-type q8_0", replace(request, workload=smaller)
    half = use.n_ctx // 2
    if half >= max(_SHORTEST, use.needed_cells, use.depth):
        yield "context", f"-c {half}", replace(request, workload=use.model_copy(update={"n_ctx": half}))


def flags(plan: Plan) -> tuple[str, ...]:
    """Flags of the engine that the plan sets and a stock rule does not; their gain is in the plan's time."""
    from planner.plan.load_spec import pins_host_weights

    found = (
        ("--no-op-offload", not plan.op_offload),
        ("--no-repack", plan.repack is False),
        ("--no-mmap", pins_host_weights(plan)),
    )
    return tuple(flag for flag, is_set in found if is_set)
