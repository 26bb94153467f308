"""How near experts in slots come to what the machine allows, cell by cell, from the recorded runs:

    python -m benchmarks.hybrid.bound [RESULTS.jsonl]

The bound of a token is the time of the same model wholly in VRAM, and the bytes of the experts that it
chooses and that have no slot, over CPU and bus together. Those bytes are replayed: the measured tokens
are a stream of known habits, and the slots hold what `hybrid_contender` put there. Two rates of the
CPU are told apart: what all cores read of host memory in that visit, and what the kernels reached.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.rounds.hybrid_contender import hot_orders, is_usual, slots_of
from benchmarks.rounds.live import WARM_UP
from benchmarks.rounds.paired import Journal
from planner.plan.load_spec import HYBRID_BANKS
from planner.site import GUESTS
from profiler.routed.codes import chosen_by_code
from profiler.routed.presets import PRESETS
from profiler.routed.stream import codes_of

RESULTS = Path(__file__).resolve().parents[1] / "results"
LANES = RESULTS / "h200-2026-11-30-lanes.jsonl"
# Runs of the same models wholly in VRAM, on machines of this kind, the same day.
WHOLE = tuple(
    RESULTS / f"h200-2026-11-30-{name}.jsonl" for name in ("hybrid", "lanes-fewer-slots", "prompts")
)
OURS = "all_lanes"
DEPTH, GEN = 512, 64  # of benchmarks.rounds.experts
Q4_K = 4.5 / 8  # bytes a weight
# GB/s that the kernels of the CPU lane read alone (docs/findings-hybrid.md: 77 on such a machine).
KERNELS = 77.0


@dataclass(frozen=True, slots=True)
class Share:
    """One cell; times in ms, rates in GB/s."""

    cell: str
    measured: float
    whole: float
    hits: float  # share of the choices whose expert has a slot
    cold_mb: float  # a token
    cpu: float
    link: float

    @property
    def bound(self) -> float:
        """Milliseconds that CPU and bus together would need at all the rates of the machine."""
        return self.whole + self.cold_mb / (self.cpu + self.link)

    @property
    def bound_of_kernels(self) -> float:
        """The same where the CPU reads as its kernels do."""
        return self.whole + self.cold_mb / (KERNELS + self.link)

    @property
    def share(self) -> float:
        """Of the measured time."""
        return self.bound / self.measured

    @property
    def share_of_kernels(self) -> float:
        """Of the measured time."""
        return self.bound_of_kernels / self.measured


def shares(path: Path = LANES) -> list[Share]:
    """Every cell of a journal that has runs of ours of the usual use, in its order."""
    records = Journal(path).records()
    machines = {r["visit"]: r["machine"] for r in records if r["kind"] == "visit"}
    runs = [r for r in records if r["kind"] == "run" and r["contender"] == OURS and is_usual(r["factors"])]
    return [
        _share([r for r in runs if r["cell"] == cell], machines)
        for cell in dict.fromkeys(r["cell"] for r in runs)
    ]


def _share(runs: Sequence[Mapping[str, Any]], machines: Mapping[str, Mapping[str, Any]]) -> Share:
    factors = runs[0]["factors"]
    preset = str(factors["preset"])
    spec, habits = PRESETS[preset].spec("large"), PRESETS[preset].habits
    k = slots_of(factors["residency"] / 100, habits.n_expert, spec.n_layers, GUESTS, HYBRID_BANKS)
    hits = fmean(_hits(preset, spec.n_layers, k, int(r["round"]) + 1) for r in runs)
    expert = 3 * spec.n_embd * int(spec.n_ff_exp or 0) * Q4_K
    machine = [machines[r["visit"]] for r in runs]
    return Share(
        cell=str(runs[0]["cell"]),
        measured=median(r["decode_ns"] for r in runs) / 1e6,
        whole=whole_ms(spec.n_layers),
        hits=hits,
        cold_mb=(1 - hits) * habits.n_used * spec.n_layers * expert / 1e6,
        cpu=fmean(m["cpu_gb_s"] for m in machine),
        link=fmean(m["link_gb_s"] for m in machine),
    )


def _hits(preset: str, layers: int, k: int, seed: int) -> float:
    """Share of a round's choices that have slots, for the tokens that are timed."""
    habits = PRESETS[preset].habits
    codes = codes_of(habits, DEPTH + GEN + WARM_UP, 2000 + seed)[DEPTH + WARM_UP :]
    chosen, orders = _chosen(preset, layers), hot_orders(preset, layers)
    return float(
        np.mean([np.isin(chosen[layer][codes], orders[layer][:k]).mean() for layer in range(layers)])
    )


@cache
def _chosen(preset: str, layers: int) -> Any:
    return chosen_by_code(PRESETS[preset].habits, layers)


@cache
def whole_ms(layers: int) -> float:
    """A token of a model of so many layers with everything in VRAM: median of all runs of that day."""
    return float(
        median(
            record["decode_ns"] / 1e6
            for path in WHOLE
            for record in Journal(path).records()
            if record["kind"] == "run"
            and record["contender"] == "all in VRAM"
            and PRESETS[record["factors"]["preset"]].spec("large").n_layers == layers
        )
    )


def table(found: Iterable[Share]) -> str:
    """Markdown, as it stands in docs/findings-hybrid.md."""
    heads = ["cell", "in VRAM alone", "choices with slots", "cold bytes", "CPU + bus, GB/s", "bound"]
    heads += ["measured", "share", f"share at {KERNELS:.0f} GB/s"]
    rows = [heads, ["---"] * len(heads), *map(_row, found)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(one: Share) -> list[str]:
    figures = [f"{one.whole:.2f} ms", f"{one.hits:.3f}", f"{one.cold_mb:.0f} MB"]
    figures += [f"{one.cpu:.0f} + {one.link:.0f}", f"{one.bound:.2f} ms", f"{one.measured:.2f} ms"]
    return [one.cell, *figures, *(f"{100 * part:.0f} %" for part in (one.share, one.share_of_kernels))]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "journal", nargs="?", type=Path, default=LANES, help="One of benchmarks.rounds.experts."
    )
    print(table(shares(parser.parse_args().journal)))


if __name__ == "__main__":
    main()
