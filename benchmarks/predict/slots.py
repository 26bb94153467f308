"""Experts in slots, predicted and measured: python -m benchmarks.predict.slots JOURNAL PROFILE

JOURNAL is one of benchmarks.rounds.experts, PROFILE of the same visit (`atsplan profile` of one of its
models, with what experts in slots cost). No cell's own runs go into a prediction. Routing is the preset's:
the experts hottest on one stream have slots, another stream says how many choices these serve.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import contenders as rules
from benchmarks.gpu.generated_models import inventory_of
from benchmarks.rounds.hybrid_contender import SEEN, hot_orders, is_usual, slots_of
from benchmarks.rounds.paired import Journal
from benchmarks.rounds.planned_contender import plan_for
from planner.constants import CPU
from planner.cost import hybrid_slots
from planner.cost.unit_time import Prices
from planner.machine.profile import Profile, from_text
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.model.units import Kind, units_of
from planner.plan.load_spec import HYBRID_BANKS
from planner.site import GUESTS
from planner.workload import Workload
from profiler.routed import codes, stream
from profiler.routed.model import complete
from profiler.routed.presets import PRESETS
from profiler.whole_model.placements import Placement, Predictor

_OTHER_SEED = 78  # a stream that the slots were not chosen on


@dataclass(frozen=True, slots=True)
class Row:
    """A contender's decode in one cell."""

    cell: str
    contender: str
    predicted_ns: int
    measured_ns: int  # median of the rounds

    @property
    def error(self) -> float:
        return self.predicted_ns / self.measured_ns - 1


def rows(records: list[dict[str, Any]], profile: Profile) -> Iterator[Row]:
    """Every cell that asks for no other machine than the one that was profiled, nor for another use."""
    times: dict[tuple[str, str], list[int]] = defaultdict(list)
    factors: dict[str, dict[str, Any]] = {}
    for record in records:
        if record["kind"] != "run" or not is_usual(record["factors"]):
            continue
        if not (record["factors"]["cores"] or record["factors"]["link"]):
            times[record["cell"], record["contender"]].append(record["decode_ns"])
            factors[record["cell"]] = record["factors"]
    for (cell, name), measured in times.items():
        predicted = predict(factors[cell], name, profile)
        if predicted:
            yield Row(cell, name, predicted, round(statistics.median(measured)))


def predict(factors: dict[str, Any], name: str, profile: Profile) -> int:
    """Nanoseconds of a token; 0 for a contender that is not priced here."""
    preset, share = str(factors["preset"]), float(factors["residency"]) / 100
    inventory = model_of(preset)
    shape = rules.shape_of(inventory)
    work = Workload(n_ctx=1280, depth=544, prompt=int(factors["prompt"]), n_ubatch=int(factors["ubatch"]))
    gpu = next(d.name for d in profile.devices if d.kind == "gpu")
    if name == "plan":
        asked = Workload(n_ctx=768, depth=512, prompt=work.prompt, n_ubatch=work.n_ubatch, n_batch=2048)
        return plan_for(profile, inventory, preset, share, asked, gpu).predicted.tpot_ns
    full = (gpu,) * (shape.n_layers + 1)
    predictor = Predictor(inventory, work)
    if name in ("n-cpu-moe", "all in VRAM"):
        on_cpu = rules.layers_on_cpu(shape, share) if name == "n-cpu-moe" else 0
        moved = tuple(f"blk.{layer}.experts" for layer in shape.moe_layers[:on_cpu])
        return predictor.evaluate(profile, Placement(name, full, moved)).decode_ns
    if name != "all_lanes":
        return 0
    found = predictor.evaluate(profile, Placement("all", full)).decode_ns
    prices = Prices(structure_of(inventory), profile, work)
    at = profile.device(gpu), profile.device(CPU), GUESTS
    k = slots_of(share, shape.n_experts, len(shape.moe_layers), GUESTS, HYBRID_BANKS)
    for unit in units_of(inventory).units:
        if unit.kind is Kind.EXPERTS:
            lanes = hybrid_slots.lanes_of(prices, unit, *at)
            missing = unit.used * (1.0 - served(preset, shape.n_layers)[unit.layer or 0][k])
            found += hybrid_slots.expected_ns(lanes, unit.used, missing) - lanes.gpu_ns
    return found


@cache
def model_of(preset: str) -> Inventory:
    """The tensor table of a preset's large model, from its specification alone."""
    one = PRESETS[preset]
    return inventory_of(complete(one.spec("large"), one.habits), f"{preset}.gguf")


@cache
def served(preset: str, layers: int) -> tuple[tuple[float, ...], ...]:
    """By layer: share of the choices that the k experts hottest on another stream serve."""
    habits = PRESETS[preset].habits
    chosen = codes.chosen_by_code(habits, layers)
    drawn = stream.codes_of(habits, SEEN, _OTHER_SEED)
    found = []
    for layer, order in enumerate(hot_orders(preset, layers)):
        count = np.bincount(chosen[layer][drawn].ravel(), minlength=habits.n_expert)
        share = np.concatenate([[0.0], np.cumsum(count[list(order)]) / count.sum()])
        found.append(tuple(share.tolist()))
    return tuple(found)


def table(found: list[Row]) -> str:
    """Markdown, and how far off the middle and the worst are."""
    lines = ["| cell | contender | predicted | measured | error |", "|---|---|---|---|---|"]
    for row in found:
        ms = f"{row.predicted_ns / 1e6:.2f} ms | {row.measured_ns / 1e6:.2f} ms"
        lines.append(f"| {row.cell} | {row.contender} | {ms} | {row.error:+.1%} |")
    for name in dict.fromkeys(row.contender for row in found):
        errors = [abs(row.error) for row in found if row.contender == name]
        middle, worst = statistics.median(errors), max(errors)
        lines.append(f"\n{name}: {len(errors)} cells, median {middle:.1%}, worst {worst:.1%}")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("journal", type=Path)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--visits", help="Some of the journal's, with commas between.")
    given = parser.parse_args()
    profile = from_text(given.profile.read_text(), str(given.profile))
    wanted = given.visits.split(",") if given.visits else []
    records = [r for r in Journal(given.journal).records() if not wanted or r["visit"] in wanted]
    print(table(list(rows(records, profile))))


if __name__ == "__main__":
    main()
