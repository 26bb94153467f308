"""The map of a plan: layers across, roles down, each cell in the colour and the pattern of its site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commands.page.elements import Node, element, percent
from commands.shared.console import mib
from planner.block_names import within_block
from planner.site import ON_CPU, Site, SiteKind

if TYPE_CHECKING:
    from planner.plan.plan import Placement, Plan

ROLES = ("attention", "recurrent", "router", "ffn", "experts", "layer")
CACHES = "KV, state"
_BAND = 24  # layers beside each other: wide enough to read on a telephone
_CELL = 22  # height of a row
_AXIS = 16
_GPU_CLASSES = 4


@dataclass(frozen=True, slots=True)
class Cell:
    """One unit of one layer."""

    layer: int
    role: str
    site: Site
    words: str


def placement_map(plan: Plan, n_experts: int) -> Node:
    """All layers in bands, a legend, and the units outside of layers as words.

    `n_experts`: of a layer; 0 where that is not known.
    """
    cells = list(_cells(plan, n_experts))
    rows = _rows(cells)
    last = max((cell.layer for cell in cells), default=0)
    gpus = gpus_of(plan)
    bands = [
        _band(first, min(first + _BAND, last + 1), rows, cells, gpus, n_experts)
        for first in range(0, last + 1, _BAND)
    ]
    told = element("p", "Point at a cell, or move with the arrow keys.", class_="told", aria_live="polite")
    return element(
        "div",
        element("div", *bands, class_="bands", tabindex=0, role="group", aria_label=_summary(cells)),
        told,
        _legend(cells, gpus, n_experts),
        _outside(plan, gpus),
        class_="map",
    )


def gpus_of(plan: Plan) -> list[str]:
    """The GPUs of a plan in its order, which is that of their colours."""
    return [use.name for use in plan.devices if use.kind != "cpu"]


def device_class(device: str, gpus: Sequence[str]) -> str:
    """The class of a device's colour and pattern."""
    return f"gpu{gpus.index(device) % _GPU_CLASSES}" if device in gpus else "cpu"


def _cells(plan: Plan, n_experts: int) -> Iterator[Cell]:
    owners = {n: each.device for each in plan.layers for n in range(each.first, each.last + 1)}
    holders = set()
    for placed in plan.units:
        block = within_block(placed.unit)
        if block is None:
            continue
        layer, part = block
        yield Cell(layer, part, placed.site, _words(placed, n_experts))
        if part in ("attention", "recurrent", "layer"):
            holders.add(layer)
    for layer in sorted(holders & set(owners)):
        site = Site.on(owners[layer])
        yield Cell(
            layer, CACHES, site, f"layer {layer}, KV cache or state: {owners[layer]}, the layer device"
        )


def _words(placed: Placement, n_experts: int) -> str:
    where = f"{placed.unit}: {site_words(placed.site, n_experts)}"
    took = f"{placed.time_ns / 1e3:.0f} µs a token, " if placed.time_ns else ""
    return f"{where}. {mib(placed.size_bytes)}, {took}{placed.why}"


def site_words(site: Site, n_experts: int = 0) -> str:
    """A site in words: whose memory holds the bytes, and who computes."""
    if site == ON_CPU:
        return "in host memory, the CPU computes"
    if site.kind is SiteKind.GPU:
        return f"on {site.device}"
    if site.kind is SiteKind.CACHE:
        return f"in host memory behind a cache on {site.device} of {site.amount / 1e4:g} % of the experts"
    of = f" of {n_experts}" if n_experts else ""
    kept = f"{site.amount}{of} experts on {site.device}, "
    if site.kind is SiteKind.HYBRID:
        return f"{kept}the others by {site.others} at the same time"
    return f"{kept}the others read across the bus"


def _rows(cells: Sequence[Cell]) -> list[str]:
    there = {cell.role for cell in cells}
    known = [role for role in ROLES if role in there]
    others = sorted(there - set(ROLES) - {CACHES})
    return [*known, *others, *([CACHES] if CACHES in there else [])]


def _band(
    first: int,
    end: int,
    rows: Sequence[str],
    cells: Sequence[Cell],
    gpus: Sequence[str],
    n_experts: int,
) -> Node:
    height = len(rows) * _CELL + _AXIS
    drawing = element("svg", width="100%", height=height, aria_hidden="true")
    for cell in cells:
        if first <= cell.layer < end:
            drawing.append(_cell(cell, cell.layer - first, rows.index(cell.role), gpus, n_experts))
    for layer in range(first, end, 4):
        # The first begins where the drawing does: on a telephone a cell is narrower than its number.
        at, anchor = (layer - first + 0.5, "middle") if layer > first else (0, "start")
        label = {"x": percent(at / _BAND), "y": height - 3, "text_anchor": anchor, "class_": "axis"}
        drawing.append(element("text", str(layer), **label))
    labels = [element("span", role) for role in rows]
    return element("div", element("div", *labels, class_="roles"), drawing, class_="band")


def _cell(cell: Cell, column: int, row: int, gpus: Sequence[str], n_experts: int) -> Node:
    made = element(
        "g",
        element("title", cell.words),
        class_="cell",
        data_layer=cell.layer,
        data_row=row,
        data_role=cell.role,
    )
    top = row * _CELL
    for name, start, share in _shares(cell.site, gpus, n_experts):
        made.append(
            element(
                "rect",
                x=percent(column / _BAND),
                y=f"{top + start * _CELL:g}",
                width=percent(1 / _BAND),
                height=f"{share * _CELL:g}",
                class_=name,
            )
        )
    frame = {"x": percent(column / _BAND), "y": top, "width": percent(1 / _BAND), "height": _CELL}
    made.append(element("rect", class_="frame", **frame))
    return made


def _shares(site: Site, gpus: Sequence[str], n_experts: int) -> list[tuple[str, float, float]]:
    """Class, start and height of the parts of a cell: what a GPU holds is at the bottom."""
    if not site.divided:
        return [(device_class(site.device, gpus), 0.0, 1.0)]
    share = (
        site.amount / 1e6 if site.kind is SiteKind.CACHE else site.amount / n_experts if n_experts else 0.5
    )
    kept = min(max(round(share, 3), 0.0), 1.0)
    above = "bus" if site.kind is SiteKind.STRIPE else "cpu"
    return [(above, 0.0, 1 - kept), (device_class(site.device, gpus), 1 - kept, kept)]


def _outside(plan: Plan, gpus: Sequence[str]) -> Node | None:
    """Embeddings, the output head and others that are of no layer."""
    found = [p for p in plan.units if within_block(p.unit) is None]
    marks = [
        element("li", swatch(device_class(p.site.device, gpus)), f"{p.unit} {_near(p)}", title=p.why)
        for p in found
    ]
    return element("ul", element("li", "Outside of layers:"), *marks, class_="legend") if found else None


def _near(placed: Placement) -> str:
    looked_up = placed.site == ON_CPU and not placed.time_ns
    return "in host memory, looked up there" if looked_up else site_words(placed.site)


def _legend(cells: Sequence[Cell], gpus: Sequence[str], n_experts: int) -> Node:
    kinds: Mapping[tuple[SiteKind, str], Site] = {(c.site.kind, c.site.device): c.site for c in cells}
    marks = []
    for (kind, device), _ in sorted(kinds.items()):
        name = device_class(device, gpus)
        if kind is SiteKind.CPU:
            marks.append((name, "in host memory, computed by the CPU"))
        elif kind is SiteKind.GPU:
            marks.append((name, f"on {device}, computed there"))
        else:
            amounts = sorted({c.site.amount for c in cells if (c.site.kind, c.site.device) == (kind, device)})
            between = "–".join(dict.fromkeys(map(str, (amounts[0], amounts[-1]))))
            of = f" of {n_experts}" if n_experts and kind is not SiteKind.CACHE else ""
            unit = "ppm of the experts" if kind is SiteKind.CACHE else f"{of} experts".strip()
            marks.append((name, f"{kind.value}: {between} {unit} on {device} (lower part of a cell)"))
            if kind is SiteKind.STRIPE:
                marks.append(("bus", "the other experts of stripes, read across the bus"))
            elif ("cpu", "in host memory, computed by the CPU") not in marks:
                marks.append(("cpu", "the other experts: CPU and bus"))
    return element("ul", *(element("li", swatch(name), words) for name, words in marks), class_="legend")


def swatch(name: str) -> Node:
    """A small square in the colour and pattern of a class."""
    square = element("rect", width="100%", height="100%", class_=name)
    return element("svg", square, class_="swatch", width=14, height=14, aria_hidden="true")


def _summary(cells: Sequence[Cell]) -> str:
    gpu = sum(1 for c in cells if c.role != CACHES and c.site.kind is SiteKind.GPU)
    cpu = sum(1 for c in cells if c.role != CACHES and c.site == ON_CPU)
    rest = sum(1 for c in cells if c.role != CACHES) - gpu - cpu
    divided = f", {rest} divided" if rest else ""
    return f"Map of layers and roles: {gpu} units on GPUs, {cpu} on the CPU{divided}. Arrow keys move."
