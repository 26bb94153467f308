"""Which lever brings what: placement, lanes, type of the KV cache, context; each planned, none guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from commands.shared.verdicts import best_stock
from planner.errors import AnswerIsNo, OptionProblem
from planner.memory.kv_cache import KvTypeProblem
from planner.model.inventory import Inventory
from planner.plan.plan import Plan
from planner.plan.request import Request

if TYPE_CHECKING:
    from commands.page.bars_figure import Bar

_WORTH = 1.05
_SHORTEST = 2048  # tokens: below, a context is no offer


@dataclass(frozen=True, slots=True)
class Lever:
    """One thing to change, and the time of a token before and after it, in ns; 0 where nothing fits."""

    name: str
    option: str
    costs: str  # what else it takes
    before_ns: int
    after_ns: int

    @property
    def same_use(self) -> bool:
        """Whether model, cache and context stay what they are."""
        return self.name in ("placement", "lanes")

    @property
    def gain(self) -> float:
        """How many times as fast; 1 is nothing gained."""
        return self.before_ns / self.after_ns if self.before_ns and self.after_ns else 1.0


Make = Callable[[Request, Inventory], Plan]


def levers(plan: Plan, slots: Plan | None, request: Request, inventory: Inventory, make: Make) -> list[Lever]:
    """What each lever alone brings. `slots`: the plan with experts in slots, where one was made."""
    mine, stock = plan.predicted.tpot_ns, best_stock(plan)
    found = [Lever("placement", "solve", "nothing", stock.tpot_ns, mine)] if stock else []
    if slots is not None:
        found.append(Lever("lanes", "solve --hybrid", "atsplan's device", mine, slots.predicted.tpot_ns))
    for name, option, costs, asked, model in _changed(request, inventory):
        try:
            found.append(Lever(name, option, costs, mine, make(asked, model).predicted.tpot_ns))
        except (AnswerIsNo, KvTypeProblem):  # the engine computes no such cache there, or has none
            continue
    return found


def lever_bars(found: Sequence[Lever]) -> tuple[Bar, ...]:
    """The levers for a page: tokens/s with each, its gain, and what else it takes."""
    from commands.page.bars_figure import Bar

    rates = [1e9 / max(lever.after_ns, 1) for lever in found]
    return tuple(
        Bar(lever.name, lever.option, rate, rate, rate, f"{lever.gain:.2f}x, costs {lever.costs}")
        for lever, rate in zip(found, rates, strict=True)
    )


def most(found: Sequence[Lever]) -> str:
    """In a sentence, what brings most of all, and what does with the same file and use."""
    if not found:
        return ""
    best = max(found, key=lambda lever: lever.gain)
    same = max((each for each in found if each.same_use), key=lambda lever: lever.gain, default=None)
    if best.gain < _WORTH:
        return "no lever brings 5 %: what a stock rule does is as good"
    if best.same_use:
        return f"most is gained by {best.name}: {best.gain:.2f}x ({best.option})"
    kept = f"{same.name}, {same.gain:.2f}x" if same and same.gain >= _WORTH else "nothing"
    return f"most is gained by {best.name}: {best.gain:.2f}x, at a price; by the same file and use: {kept}"


def _changed(request: Request, inventory: Inventory) -> Iterator[tuple[str, str, str, Request, Inventory]]:
    use = request.workload
    if smaller := _next_smaller(inventory):
        yield "quantisation", f"solve --quant .={smaller[0]}", "quality", request, smaller[1]
    if (use.type_k, use.type_v) == ("f16", "f16"):
        less = use.model_copy(update={"type_k": "q8_0", "type_v": "q8_0"})
        yield "KV type", "--kv-type q8_0", "hardly quality", replace(request, workload=less), inventory
    half = use.n_ctx // 2
    if half >= max(_SHORTEST, use.least_ctx, use.depth):
        shorter = replace(request, workload=use.model_copy(update={"n_ctx": half}))
        yield "context", f"-c {half}", "half the context", shorter, inventory


def _next_smaller(inventory: Inventory) -> tuple[str, Inventory] | None:
    """The first type in which the whole model is smaller by a tenth, and the model in it."""
    from planner.model.requantise import Rule, requantised
    from planner.passes.remedies import QUANTS

    for name in QUANTS:
        try:
            made = requantised(inventory, [Rule(".", name)])
        except OptionProblem:  # rows that are not whole blocks of it
            continue
        if made.size_bytes < 0.9 * inventory.size_bytes:
            return name, made
    return None
