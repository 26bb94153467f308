"""What fills each device, GPUs and host memory alike, against its budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commands.page.elements import Node, element, percent
from commands.page.map_figure import swatch
from commands.shared.console import mib

if TYPE_CHECKING:
    from planner.plan.plan import DeviceUse, Plan

_PARTS = (
    ("weights", "weights_bytes"),
    ("KV cache", "kv_bytes"),
    ("state", "state_bytes"),
    ("compute buffers", "compute_bytes"),
    ("MoE cache", "cache_bytes"),
    ("reserve", "reserve_bytes"),
)
_HEIGHT = 26


def memory_stacks(plan: Plan) -> Node:
    """One stack a device, its parts named with their sizes below it."""
    return element("div", *(_stack(use) for use in plan.devices), class_="memory")


def _stack(use: DeviceUse) -> Node:
    whole = max(use.budget_bytes, use.used_bytes, 1)
    drawing = element("svg", width="100%", height=_HEIGHT, aria_hidden="true")
    drawing.append(element("rect", width=percent(1), height=_HEIGHT, class_="free"))
    marks, start = [], 0
    for label, field in _PARTS:
        size = getattr(use, field)
        if size:
            name = f"part-{field.removesuffix('_bytes')}"
            part = {"x": percent(start / whole), "width": percent(size / whole), "height": _HEIGHT}
            drawing.append(element("rect", element("title", f"{label}: {mib(size)}"), class_=name, **part))
            marks.append(element("li", swatch(name), f"{label} {mib(size)}"))
        start += size
    if use.tables_bytes:
        marks.append(element("li", f"beside it lookup tables {mib(use.tables_bytes)}, mapped, read by rows"))
    at = percent(use.budget_bytes / whole)
    drawing.append(element("line", x1=at, x2=at, y1=0, y2=_HEIGHT, class_="limit"))
    left = max(use.budget_bytes - use.used_bytes, 0)
    marks.append(element("li", swatch("free"), f"free {mib(left)}"))
    kind = "host memory" if use.kind == "cpu" else "GPU memory"
    used = f"{mib(use.used_bytes)} of {mib(use.budget_bytes)}"
    head = element("p", element("strong", use.name), f" {kind}: {used}", class_="row-head")
    return element("div", head, drawing, element("ul", *marks, class_="legend"), class_="stack")
