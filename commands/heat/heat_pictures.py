"""Pictures of heat: layers x experts, and coverage curves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from commands.shared.pictures import pyplot, save

if TYPE_CHECKING:
    from planner.routing.expert_counts import Heat
    from planner.routing.report import Report


def heat_map(heat: Heat, path: Path) -> None:
    """Share of each layer's choices by expert, times the number of experts: 1 is uniform, log colours."""
    plots = pyplot()
    total = heat.total()
    rows = np.array([total[layer] for layer in heat.layers], dtype=float)
    ratio = rows / rows.sum(axis=1, keepdims=True) * heat.n_expert
    figure, axes = plots.subplots(figsize=(9, max(2.5, min(9, 0.14 * len(rows) + 1.6))), layout="constrained")
    image = axes.imshow(
        np.log2(np.clip(ratio, 1 / 16, 16)),
        aspect="auto",
        cmap="RdBu_r",
        vmin=-4,
        vmax=4,
        interpolation="nearest",
    )
    axes.set(xlabel="expert, by id", ylabel="layer", title="How often the router chose each expert")
    step = max(1, len(rows) // 16)
    axes.set_yticks(range(0, len(rows), step), [str(la) for la in heat.layers[::step]])
    bar = figure.colorbar(image, ax=axes, ticks=[-4, -2, 0, 2, 4])
    bar.ax.set_yticklabels(["≤ 1/16", "1/4", "uniform", "4 ×", "≥ 16 ×"])
    save(figure, path)


def coverage_curves(heat: Heat, judged: Report, path: Path) -> None:
    """Expected coverage of each layer (thin) and their mean, against whole layers on the device."""
    from planner.routing.coverage import curves

    plots = pyplot()
    figure, axes = plots.subplots(figsize=(6.5, 5), layout="constrained")
    share = np.linspace(0, 1, heat.n_expert + 1)
    for number, curve in enumerate(curves(heat).values()):
        label = "" if number else "each layer"
        axes.plot(share, curve, color="tab:blue", alpha=0.15, linewidth=0.7, label=label)
    axes.plot(share, judged.curve, color="tab:blue", linewidth=2, label="hot experts, mean of the layers")
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", label="whole layers")
    held = [entry.resident for entry in judged.intervals]
    middle = np.array([entry.value for entry in judged.intervals])
    low = middle - np.array([entry.low for entry in judged.intervals])
    high = np.array([entry.high for entry in judged.intervals]) - middle
    if (low + high).any():
        axes.errorbar(
            held, middle, [low, high], fmt="o", color="tab:blue", capsize=3, label="95 % over sources"
        )
    several = len(judged.sources) > 1
    title = "Coverage on sources not seen" if several else "Coverage expected from a single source"
    axes.set(xlabel="resident share of the experts", ylabel="share of choices served", title=title)
    axes.set(xlim=(0, 1), ylim=(0, 1.005))
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    save(figure, path)
