"""One plan as a picture: where each unit of each layer lives, and what fills every device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.shared.pictures import pyplot, save
from planner.block_names import block_of, stem_of
from planner.constants import MAX_LAYERS
from planner.quoting import mathtext
from planner.site import Site, SiteKind

if TYPE_CHECKING:
    from planner.plan.plan import Plan

# Okabe-Ito colours: told apart by people with any colour vision, and in print by lightness.
_GPU = ("#0072B2", "#56B4E9", "#004466", "#88CCEE")
_CPU, _STRIPE, _CACHE, _NONE = "#E69F00", "#009E73", "#CC79A7", "#FFFFFF"
_PARTS = (
    ("weights", "weights_bytes", "#0072B2", ""),
    ("KV cache", "kv_bytes", "#009E73", "\\\\\\"),
    ("state", "state_bytes", "#F0E442", ".."),
    ("compute", "compute_bytes", "#E69F00", "///"),
    ("MoE cache", "cache_bytes", "#CC79A7", "xx"),
    ("reserve", "reserve_bytes", "#999999", "---"),
)
_ROWS = ("attention", "recurrent", "router", "ffn", "experts", "layer")


def draw_plan(plan: Plan, path: Path) -> None:
    """Write the picture; the suffix of `path` decides between PNG, SVG and PDF."""
    rows = max(len(plan.devices), 1)
    figure, (grid, bars) = pyplot().subplots(
        2, 1, figsize=(11, 3.9 + 0.7 * rows), height_ratios=(3, 0.4 + 0.6 * rows), layout="constrained"
    )
    _draw_grid(grid, plan)
    _draw_bars(bars, plan)
    figure.suptitle(mathtext(_title(plan)), fontsize=11)
    save(figure, path)


def _title(plan: Plan) -> str:
    found = plan.predicted
    best = min((b.tpot_ns for b in plan.baselines if b.feasible), default=0)
    against = f", best stock rule {best / 1e6:.2f} ms" if best else ""
    kind = "" if plan.machine.measured else " (assumed machine)"
    return f"{plan.model.name} on {plan.machine.name}{kind}: {found.tpot_ns / 1e6:.2f} ms a token{against}"


def _colour(site: Site, gpus: list[str]) -> str:
    if site.kind is SiteKind.GPU:
        return _GPU[gpus.index(site.device) % len(_GPU)] if site.device in gpus else _GPU[0]
    return {SiteKind.CPU: _CPU, SiteKind.STRIPE: _STRIPE, SiteKind.HYBRID: _STRIPE, SiteKind.CACHE: _CACHE}[
        site.kind
    ]


def _draw_grid(axes: Any, plan: Plan) -> None:
    from matplotlib.patches import Patch, Rectangle

    gpus = [use.name for use in plan.devices if use.kind != "cpu"]
    named = [(block_of(p.unit), stem_of(p.unit), p.site) for p in plan.units]
    cells = [(layer, row, site) for layer, row, site in named if layer is not None and layer < MAX_LAYERS]
    rows = [row for row in _ROWS if any(row == of for _, of, _ in cells)]
    last = max((layer for layer, _, _ in cells), default=0)
    for layer, row, site in cells:
        if row in rows:
            corner = (layer - 0.45, rows.index(row) - 0.42)
            axes.add_patch(Rectangle(corner, 0.9, 0.84, facecolor=_colour(site, gpus)))
    head = next((p.site for p in plan.units if p.unit == "output"), None)
    if head:
        corner = (last + 1.15, -0.42)
        axes.add_patch(Rectangle(corner, 0.9, len(rows) - 0.16, facecolor=_colour(head, gpus)))
        axes.text(last + 1.6, len(rows) - 0.45, "output", ha="center", va="top", fontsize=8)
    axes.set_xlim(-0.7, last + 2.4)
    axes.set_ylim(len(rows) - 0.3, -0.6)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(range(0, last + 1, 5 if last > 12 else 1))
    axes.set_xlabel("layer")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    kinds = dict.fromkeys(Site(site.kind, site.device) for _, _, site in cells)
    names = {site: _name(site) for site in kinds}
    marks = [Patch(facecolor=_colour(site, gpus), label=mathtext(name)) for site, name in names.items()]
    axes.legend(handles=marks, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(marks), frameon=False)


def _name(site: Site) -> str:
    """What a colour of the map stands for."""
    if site.kind is SiteKind.GPU:
        return f"on {site.device}"
    return {
        SiteKind.CPU: "in host memory, by the CPU",
        SiteKind.STRIPE: f"experts divided between {site.device} and the CPU",
        SiteKind.HYBRID: f"experts in slots of {site.device}, the others by CPU and bus",
        SiteKind.CACHE: f"experts cached on {site.device}",
    }[site.kind]


def _draw_bars(axes: Any, plan: Plan) -> None:
    devices = list(plan.devices)
    for row, use in enumerate(devices):
        left = 0.0
        for label, field, colour, hatch in _PARTS:
            size = getattr(use, field) / 2**20
            if size:
                look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
                axes.barh(row, size, left=left, label=label, height=0.6, **look)
            left += size
        budget = use.budget_bytes / 2**20
        axes.plot([budget, budget], [row - 0.42, row + 0.42], color="black", linewidth=2)
        axes.annotate("budget", (budget, row - 0.42), fontsize=8, ha="right", va="bottom")
    names = [f"{use.name} (host memory)" if use.kind == "cpu" else use.name for use in devices]
    axes.set_yticks(range(len(devices)), list(map(mathtext, names)))
    axes.set_ylim(len(devices) - 0.5, -0.75)
    axes.set_xlabel("MiB")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
