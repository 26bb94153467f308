"""Bars of figures with the interval in which each may lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commands.page.elements import Node, element, percent
from commands.shared.console import mib
from commands.shared.verdicts import rates

if TYPE_CHECKING:
    from planner.plan.plan import Plan

_HEIGHT = 22
_MIDDLE = _HEIGHT / 2
_CAP = 5


@dataclass(frozen=True, slots=True)
class Bar:
    """One contender: a rate in tokens/s, from `low` to `high`."""

    name: str
    setting: str
    rate: float
    low: float
    high: float
    beside: str = ""  # what else is said of it
    chosen: bool = False


def predicted_bars(plan: Plan, hybrid: Plan | None = None) -> list[Bar]:
    """The plan, and the stock rules that fit, fastest first, each with the predictions' error."""
    used = sum(use.used_bytes for use in plan.devices if use.kind != "cpu")
    p = plan.predicted
    found = [_bar("this plan", p.status, p.tpot_ns, p.error_ppm, _beside(p.prefill_ns, used), True)]
    if hybrid is not None:
        h, more = hybrid.predicted, sum(u.used_bytes for u in hybrid.devices if u.kind != "cpu")
        found.append(
            _bar("hybrid", "solve --hybrid", h.tpot_ns, h.error_ppm, _beside(h.prefill_ns, more), True)
        )
    for rule in sorted((b for b in plan.baselines if b.feasible), key=lambda b: b.tpot_ns):
        said = _beside(rule.prefill_ns, rule.vram_bytes)
        found.append(_bar(rule.name, rule.setting, rule.tpot_ns, p.error_ppm, said))
    return found


def _beside(prefill_ns: int, vram_bytes: int) -> str:
    return f"prompt {prefill_ns / 1e6:.0f} ms, {mib(vram_bytes)} of GPU memory"


def _bar(name: str, setting: str, tpot_ns: int, error_ppm: int, beside: str, chosen: bool = False) -> Bar:
    return Bar(name, setting, *rates(tpot_ns, error_ppm), beside, chosen)


def bars(found: Sequence[Bar], unit: str = "tokens/s") -> Node:
    """The bars on one scale, which ends where the highest interval does."""
    most = max((bar.high for bar in found), default=1) or 1
    return element("div", *(_row(bar, most, unit) for bar in found), class_="bars")


def _row(bar: Bar, most: float, unit: str) -> Node:
    drawing = element("svg", width="100%", height=_HEIGHT, aria_hidden="true")
    kind = "bar chosen" if bar.chosen else "bar"
    drawing.append(element("rect", y=3, width=percent(bar.rate / most), height=_HEIGHT - 6, class_=kind))
    low, high = percent(bar.low / most), percent(min(bar.high / most, 0.998))
    if bar.low < bar.high:
        drawing.append(element("line", x1=low, x2=high, y1=_MIDDLE, y2=_MIDDLE, class_="whisker"))
        for at in (low, high):
            cap = {"x1": at, "x2": at, "y1": _MIDDLE - _CAP, "y2": _MIDDLE + _CAP}
            drawing.append(element("line", class_="whisker", **cap))
    between = f" ({bar.low:.1f}–{bar.high:.1f})" if bar.low < bar.high else ""
    head = element(
        "p",
        element("strong", bar.name),
        " ",
        element("code", bar.setting) if bar.setting else None,
        element("span", element("b", f"{bar.rate:.1f}"), f" {unit}{between}", class_="figure"),
        class_="row-head",
    )
    beside = element("p", bar.beside, class_="beside") if bar.beside else None
    return element("div", head, drawing, beside, class_="bar-row")
