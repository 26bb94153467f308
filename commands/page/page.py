"""Pages of plans, sweeps and measurements: sections put together into one file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from commands.page.bars_figure import Bar, bars, predicted_bars
from commands.page.elements import Node, document, element
from commands.page.map_figure import placement_map
from commands.page.memory_figure import memory_stacks
from commands.page.patterns import patterns
from commands.page.words import term
from commands.shared.console import mib, ms, say, write_text
from commands.shared.paste import pasted
from commands.shared.verdicts import doubt, gain, rates, verdict

if TYPE_CHECKING:
    from planner.memory.server_memory import Kept
    from planner.model.inventory import Inventory
    from planner.passes.predict import Breakdown
    from planner.plan.plan import Plan

_SLICES = 8


@dataclass(frozen=True, slots=True)
class View:
    """A plan and what a command knows beside it."""

    plan: Plan
    n_experts: int = 0  # of a layer; 0 where no inventory is at hand
    command: str = ""  # to paste
    hybrid: Plan | None = None
    larger: Plan | None = None  # with 1 GiB more on the device that limits it
    parts: Breakdown | None = None
    server: Kept | None = None  # what llama-server keeps besides; None where no inventory is at hand
    facts: tuple[str, ...] = ()  # sentences of the command's own
    measured: tuple[tuple[str, tuple[Bar, ...]], ...] = field(default=())  # by prompt
    levers: tuple[Bar, ...] = ()  # what each change by itself would bring


def write_page(path: Path, text: str) -> None:
    """Write a page, and say where."""
    write_text(path, text)
    say(f"wrote {path}")


def view_of(
    plan: Plan,
    inventory: Inventory | None,
    model: Path | None = None,
    plan_path: Path | None = None,
    words: tuple[str, ...] = (),
) -> View:
    """A plan with the command to paste; `inventory`, where it is at hand, tells the experts of a layer and
    what a server keeps besides.
    """
    from planner.check.explain import kept_of

    text, notes = pasted(plan, inventory, model, words, plan_path)
    facts = tuple(f"Not expressible by a stock tool: {note}." for note in notes)
    n_experts = inventory.number("expert_count") if inventory else 0
    server = kept_of(plan, inventory) if inventory else None
    return View(plan, n_experts, text.strip(), facts=facts, server=server)


def plan_page(view: View) -> str:
    """The page of one plan."""
    plan = view.plan
    return document(
        _title(plan),
        [patterns(), _header(view), element("main", *sections(view), class_="one"), _footer(plan)],
    )


def _title(plan: Plan) -> str:
    return f"{plan.model.name} on {plan.machine.name}"


def _header(view: View) -> Node:
    plan = view.plan
    rate, low, high = rates(plan.predicted.tpot_ns, plan.predicted.error_ppm)
    return element(
        "header",
        element("p", "atsplan", class_="brand"),
        element("h1", plan.model.name),
        element("p", "on ", element("strong", plan.machine.name), " ", badge(plan), class_="machine"),
        element(
            "p",
            element("b", f"{rate:.1f}"),
            element("span", f" tokens/s predicted, between {low:.1f} and {high:.1f}"),
            class_="headline",
        ),
        element("p", f"{_sentence(verdict(plan))} {_sentence(gain(plan))}", class_="verdict"),
        *(element("p", fact) for fact in view.facts),
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def badge(plan: Plan) -> Node:
    """Whether the machine was measured: an assumed one is marked wherever it is named."""
    if plan.machine.measured:
        return element("span", "measured", class_="badge measured")
    return element("span", "assumed, not measured", class_="badge assumed")


def sections(view: View, key: str = "paste") -> list[Node]:
    """The cards of one plan; `key` names its command within the page."""
    plan = view.plan
    beside = [_card("What fills the memory", memory_stacks(plan), _memory_words())]
    if view.levers:
        beside.insert(0, _card("Which lever brings what", bars(view.levers), _lever_words()))
    found = [
        *(_card(f"Measured, prompt of {prompt}", bars(each)) for prompt, each in view.measured),
        _card("Predicted speed", bars(predicted_bars(plan, view.hybrid)), _proof(plan, view.hybrid)),
        element("div", *beside, class_="column"),
        _card("Where everything lives", placement_map(plan, view.n_experts), _map_words()),
        _card("Where the time of a token goes", bars(_slices(view), "ms")),
    ]
    last = [*([_command(view.command, key)] if view.command else []), _why(view)]
    return [*found, element("div", *last, class_="column")]


def _card(heading: str, *parts: Node | None) -> Node:
    return element("section", element("h2", heading), *parts, class_="card")


def _proof(plan: Plan, hybrid: Plan | None) -> Node:
    p, use = plan.predicted, plan.workload
    return element(
        "p",
        f"A token at depth {use.depth} of a context of {use.n_ctx}; a ",
        term("request"),
        f" of {use.prompt} tokens with {use.gen} of answer takes {ms(p.objective_ns)}, ",
        term("bound"),
        f" {ms(p.bound_ns)}, ",
        term("gap"),
        f" {p.gap_ppm / 1e4:.2f} %. Bars end at the prediction, lines show where it may lie. A ",
        term("stock rule"),
        f" has the same memory. {_sentence(doubt(plan, hybrid))}",
        class_="words",
    )


def _lever_words() -> Node:
    return element(
        "p",
        "Each by itself, planned anew for this machine; gains do not add up. Lanes: ",
        term("hybrid"),
        " experts, computed by GPU, CPU and bus at once.",
        class_="words",
    )


def _map_words() -> Node:
    return element(
        "p",
        "Each column is a layer, each cell a ",
        term("unit"),
        " at its ",
        term("site"),
        "; the last row is the ",
        term("layer device"),
        ". ",
        term("hybrid", "Hybrid"),
        " and ",
        term("stripe", "striped"),
        " experts are divided.",
        class_="words",
    )


def _memory_words() -> Node:
    return element(
        "p",
        "The upright line is the ",
        term("budget"),
        "; the ",
        term("reserve"),
        " is the driver's and what else was asked for; the ",
        term("state"),
        " is that of recurrent layers.",
        class_="words",
    )


def _slices(view: View) -> list[Bar]:
    from planner.check.explain import slices

    found = slices(view.plan, view.parts)
    times = [(part.what, part.units, part.time_ns / 1e6) for part in found[:_SLICES] if part.time_ns > 0]
    rest = sum(part.time_ns for part in found[_SLICES:]) / 1e6
    times += [(f"{len(found) - _SLICES} smaller parts", 0, rest)] if rest > 0 else []
    return [Bar(what, f"{n} units" if n > 1 else "", t, t, t) for what, n, t in times]


def _command(text: str, key: str) -> Node:
    return _card(
        "To paste",
        element("pre", element("code", text, id=key), tabindex=0),
        element("button", "Copy", type="button", class_="copy", data_copies=key),
        element("span", class_="copied", role="status"),
    )


def _why(view: View) -> Node:
    from planner.check.explain import sentences

    told = [element("li", line) for line in sentences(view.plan, view.larger, view.parts, view.server)]
    notes = [element("li", note) for note in view.plan.notes]
    return _card(
        "In sentences",
        element("details", element("summary", "Why this plan"), element("ul", *told)),
        element("details", element("summary", "Notes"), element("ul", *notes)) if notes else None,
    )


def _footer(plan: Plan) -> Node:
    size = mib(plan.model.size_bytes)
    made = element("p", "Made by ", element("code", plan.command)) if plan.command else None
    about = element(
        "p", f"{plan.model.architecture}, {plan.model.tensors} tensors, {size}; atsplan {plan.version}"
    )
    return element("footer", made, about)
