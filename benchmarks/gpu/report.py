"""Results of the GPU benchmark as lines, a table and a picture."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Clock = Callable[[Json, int], int]
STOCK = ("n-cpu-moe", "fit", "ngl")
OURS = ("stripes", "plan", "plan without stripes")


def decode_ns(row: Json, depth: int) -> int:
    """Best decode time over the thread counts tried."""
    return min((int(d["median_ns"]) for d in row["decode"] if d["depth"] == depth), default=0)


def prefill_ns(row: Json, prompt: int) -> int:
    """Median time of a prompt."""
    return next((int(p["median_ns"]) for p in row["prefill"] if p["prompt"] == prompt), 0)


def line(row: Json) -> str:
    """One run."""
    head = f"{row['model']} {row['routing']} {row['residency']}% {row['contender']} [{row['setting']}]"
    if "failed" in row:
        return f"{head}: {row['failed']}"
    decode = " ".join(
        f"d{d['depth']}/t{d['threads']} {d['median_ns'] / 1e6:.2f}±{d['iqr_ns'] / 2e6:.2f}"
        for d in row["decode"]
    )
    prefill = " ".join(f"p{p['prompt']} {p['median_ns'] / 1e6:.0f}" for p in row["prefill"])
    over = row["vram_bytes"] - row.get("budget_bytes", row["vram_bytes"])
    return (
        f"{head}: {row['vram_bytes'] / 2**20:.0f} MiB ({over / 2**20:+.0f}) load {row['load_s']} s "
        f"decode {decode} prefill {prefill} wall {row['wall_s']}"
    )


def cells(rows: Iterable[Json]) -> dict[tuple[str, str, int], list[Json]]:
    """Runs that worked, by model, routing and residency."""
    found: dict[tuple[str, str, int], list[Json]] = defaultdict(list)
    for row in rows:
        if "failed" not in row and row["residency"] < 100:
            found[row["model"], row["routing"], row["residency"]].append(row)
    return found


def compare(rows: list[Json]) -> list[Json]:
    """One record per cell and measure: the best stock rule and its time, then ours by name."""
    made = []
    for (model, routing, residency), runs in cells(rows).items():
        stock = [r for r in runs if r["contender"] in STOCK]
        ours = [r for r in runs if r["contender"] in OURS]
        if not ours or not stock:
            continue
        for what, clock, at in dict.fromkeys(m for row in runs for m in _measures(row)):
            timed = [(clock(r, at), r["contender"]) for r in stock if clock(r, at)]
            mine = {r["contender"]: clock(r, at) for r in ours if clock(r, at)}
            if timed and mine:
                made.append(
                    {
                        "cell": (model, routing, residency),
                        "coverage": runs[0]["coverage"],
                        "measure": f"{what}@{at}",
                        "stock": min(timed),
                        "ours": mine,
                    }
                )
    return made


def _measures(row: Json) -> list[tuple[str, Clock, int]]:
    depths = dict.fromkeys(d["depth"] for d in row["decode"])
    prompts = dict.fromkeys(p["prompt"] for p in row["prefill"])
    return [*(("decode", decode_ns, d) for d in depths), *(("prefill", prefill_ns, p) for p in prompts)]


def table(rows: list[Json]) -> str:
    """Markdown: a line a cell and measure, times in milliseconds, ratios of stock over ours."""
    records = compare(rows)
    names = [name for name in OURS if any(name in r["ours"] for r in records)]
    head = ["model", "routing", "in VRAM", "coverage", "measure", "best stock rule, ms", *names]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in sorted(records, key=lambda r: (r["measure"], r["cell"])):
        model, routing, residency = r["cell"]
        time, rule = r["stock"]
        parts = [model, routing, f"{residency} %", f"{r['coverage']:.2f}", r["measure"]]
        parts.append(f"{time / 1e6:.1f} ({rule})")
        for name in names:
            ns = r["ours"].get(name, 0)
            parts.append(f"{ns / 1e6:.1f} ({time / ns:.2f}×)" if ns else "")
        lines.append("| " + " | ".join(parts) + " |")
    return "\n".join(lines)


def plot(rows: list[Json], path: Path) -> None:
    """Decode time against measured VRAM, a panel a model and routing, a line a contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [r for r in rows if "failed" not in r and decode_ns(r, 0)]
    panels = list(dict.fromkeys((r["model"], r["routing"]) for r in shown))
    colours = {name: f"C{i}" for i, name in enumerate((*STOCK, *OURS, "all in VRAM"))}
    figure, axes = plt.subplots(1, len(panels), figsize=(3.1 * len(panels), 3.4), squeeze=False, sharey=True)
    for axis, (model, routing) in zip(axes[0], panels, strict=True):
        for name, colour in colours.items():
            points = sorted(
                (r["vram_bytes"] / 2**30, decode_ns(r, 0) / 1e6)
                for r in shown
                if (r["model"], r["routing"], r["contender"]) == (model, routing, name)
            )
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, color=colour)
        axis.set(title=f"{model}, {routing}", xlabel="VRAM, GiB", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0][0].set(ylabel="decode, ms per token")
    labelled = dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True))
    figure.legend(labelled.values(), labelled.keys(), frameon=False, ncols=len(labelled), loc="lower center")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    data = json.loads(source.read_text())
    print(table(data["runs"]))
    plot(data["runs"], source.with_suffix(".png"))
