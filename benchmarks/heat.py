"""Published routing numbers, computed again: `python -m benchmarks.heat [--data FOLDER]`.

Without `--data`: the three profiles in tests/data/heat. With it, what is found below the folder of:
mbolt/coactivation_*.json, eplb_deepseek_v3/*.json, misc/olmoe-1b-7b_layer0_routes.jsonl,
misc/qwen38-flash-next_coverage_curves.json (published by others, not all with a licence to pass on).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from planner.routing import cache_simulation as sim
from planner.routing import coverage, report
from planner.routing import expert_counts as heats
from planner.routing import trace as traces
from planner.routing.expert_counts import Heat
from planner.routing.formats import detect
from planner.routing.trace import Trace

HERE = Path(__file__).parent.parent / "tests" / "data" / "heat"
Line = tuple[str, str, str]  # what, published, here


def load(path: Path, source: str = "") -> Heat:
    """Heat of any known file, its parts renamed when a name is given."""
    heat = detect.read(path.read_bytes(), str(path)).heat
    return replace(heat, parts=tuple(replace(p, source=source or p.source) for p in heat.parts))


def own(heat: Heat, k: int) -> float:
    """In-sample coverage of the k hottest experts, mean of the layers."""
    return coverage.mean_curve(coverage.judge(heat, coverage.hot_order(heat)))[k]


def across(chosen: Heat, judged: Heat, k: int) -> float:
    """Coverage on one heat of what is hot in another."""
    return coverage.mean_curve(coverage.judge(judged, coverage.hot_order(chosen)))[k]


def committed() -> Iterator[Line]:
    """What the profiles of this repository say."""
    qwen = load(HERE / "qwen3-30b-a3b.csv")
    general, prompt = load(HERE / "gemma4-26b-a4b-general.csv"), load(HERE / "gemma4-26b-a4b-one-prompt.csv")
    yield "Qwen3-30B-A3B, top 25 %, own", "0.65", f"{own(qwen, 32):.4f}"
    yield "Gemma-4-26B-A4B, top 21 of 128, own", "0.595", f"{own(general, 21):.4f}"
    yield "the same from one prompt, own", "-", f"{own(prompt, 21):.4f}"
    yield "one prompt's set on twelve prompts", "-", f"{across(prompt, general, 21):.4f}"
    expected = coverage.mean_curve(coverage.curves(prompt))[21]
    yield "what atsplan expects from that prompt", "-", f"{expected:.4f}"


def collected(folder: Path) -> Iterator[Line]:
    """What more there is below a folder of collected data."""
    coder = folder / "mbolt" / "coactivation_qwen3-next-80b-a3b.json"
    if coder.exists():
        yield "Qwen3-Next-80B-A3B, top 25 %, own", "0.59", f"{own(load(coder), 128):.4f}"
    counts = sorted((folder / "eplb_deepseek_v3").glob("*.json"))
    if counts:
        yield from _drift([load(path, path.stem) for path in counts])
    routes = folder / "misc" / "olmoe-1b-7b_layer0_routes.jsonl"
    if routes.exists():
        trace = detect.read(routes.read_bytes(), str(routes)).trace
        assert trace is not None
        yield from _policies("OLMoE layer 0", trace, {})
    curves = folder / "misc" / "qwen38-flash-next_coverage_curves.json"
    if curves.exists():
        yield from _flash_next(json.loads(curves.read_text()))


def _drift(workloads: list[Heat]) -> Iterator[Line]:
    """DeepSeek-V3: chosen on some workloads, judged on the one left out."""
    judged = report.report(heats.merge(workloads), 0.25)
    table = np.array(judged.transfer)
    quarter = next(i for i in judged.intervals if i.resident == 0.25)
    others = table[~np.eye(len(table), dtype=bool)]
    n = f"{len(workloads)} workloads"
    yield f"DeepSeek-V3, top 25 %, own, {n}", "-", f"{np.diag(table).min():.3f}..{np.diag(table).max():.3f}"
    yield "chosen on one, judged on another", "-", f"{others.min():.3f}..{others.max():.3f}"
    yield "chosen on all others", "-", f"{quarter.value:.3f} ({quarter.low:.3f}..{quarter.high:.3f})"


def _flash_next(published: dict[str, list[float]]) -> Iterator[Line]:
    """Published curves only: what hot experts add to the stock rule at the same bytes."""
    rows = ("budget_gib", "coverage_hot_count", "coverage_n_cpu_moe_rule", "coverage_random")
    for gib, hot, rule, chance in zip(*(published[row] for row in rows), strict=True):
        yield (
            f"Qwen3.8-Flash-Next, {gib} GiB, over --n-cpu-moe",
            f"{hot:.2f} / {rule:.2f}",
            f"lift {hot / rule:.2f}",
        )
        assert hot >= chance


# Hit rates published for 16 layers, top-8, 289 tokens, by experts held in a layer.
COLIBRI = {"lru": (0.277, 0.537, 0.684, 0.794), "lfu": (0.327, 0.500, 0.643, 0.762)}
HELD = (8, 16, 24, 32)


def drifting_trace(
    steps: int,
    layers: int,
    n_expert: int,
    k: int,
    drift: float = 0.06,
    skew: float = 0.6,
    stick: float = 0.1,
    seed: int = 1,
) -> Trace:
    """Routing of a text whose topic drifts.

    The score of an expert is its fixed Zipf rank, a slow random walk, and noise; each chosen expert
    stays for the next token with probability `stick`. The defaults come nearest to the published rates.
    """
    rng = np.random.default_rng(seed)
    rows: list[traces.Row] = []
    for layer in range(layers):
        fixed = np.log(rng.permutation(1 / np.arange(1, n_expert + 1) ** skew))
        topic = rng.normal(size=n_expert)
        chosen = np.zeros(0, dtype=int)
        for step in range(steps):
            topic = topic * np.sqrt(1 - drift) + rng.normal(size=n_expert) * np.sqrt(drift)
            score = rng.gumbel(size=n_expert) + fixed + topic
            score[chosen[rng.random(len(chosen)) < stick]] += 9
            chosen = np.argsort(-score)[:k]
            rows.append((0, True, step, layer, tuple(int(i) for i in chosen)))
    rows.sort(key=lambda row: (row[2], row[3]))
    return traces.make("", n_expert, ["drift"], rows)


def _policies(name: str, trace: Trace, published: Mapping[str, tuple[float, ...]]) -> Iterator[Line]:
    demand = sim.one_by_one(sim.demand_of(trace))
    for policy in ("lru", "lfu", "belady"):
        rates = [sim.replay(demand, sim.POLICIES[policy], slots).hit_rate for slots in HELD]
        there = " ".join(f"{rate:.3f}" for rate in published.get(policy, ())) or "-"
        yield f"{name}, {policy}, {HELD} held", there, " ".join(f"{rate:.3f}" for rate in rates)


def speed() -> Iterator[Line]:
    """CPU seconds of one replay of 200 steps x 48 layers x 10 ids of 512."""
    trace = drifting_trace(200, 48, 512, 10)
    for shared, slots in ((False, 64), (True, 64 * 48)):
        demand = sim.demand_of(trace, per_layer=not shared)
        for policy in sim.POLICIES.values():
            began = time.process_time()
            sim.replay(demand, policy, slots)
            where = "one cache" if shared else "a cache a layer"
            yield f"replay, {policy.name}, {where}", "2 s", f"{time.process_time() - began:.2f} s"


def main() -> None:
    """Print a table: what, as published, as computed here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    args = parser.parse_args()
    lines = list(committed())
    lines += collected(args.data) if args.data else []
    lines += _policies("16 layers, drifting topic", drifting_trace(289, 16, 64, 8), COLIBRI)
    lines += speed()
    print("| what | published | here |\n|---|---|---|")
    for line in lines:
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
