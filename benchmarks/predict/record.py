"""The whole record of predictions against measurements: every public set and every visit to an H200.

    python -m benchmarks.predict --all [--runs] [--json]

On an H200 the operators were timed and a generated model calibrated; its other placements, and the cells of
later visits, are predicted. Of a public set one run is fitted and the rest predicted; sets whose runs differ
in the batch of their prompts alone are a part of their own. And of the same sets nothing is fitted: what a
named machine alone is worth. Intervals hold 80 % if they are honest; below each table is by how much the
other machines would widen them, and what they then hold of the one left out.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import generated_models
from benchmarks.predict import judge, replay
from benchmarks.predict.measure import workload_of
from planner.machine.host_memory import HostMemory
from planner.machine.profile import Profile, from_text
from planner.model import inventory as inventories
from planner.plan.engine_rules import layers_by_ngl
from planner.workload import Workload
from profiler.whole_model import published
from profiler.whole_model.calibrate import Run, machine
from profiler.whole_model.placements import Placement, movable

ROOT = Path(__file__).resolve().parents[2]
_MISS = 10  # 2 / (1 - 0.8): what a run outside the interval costs, in units of the distance to it
_FAMILIES = {
    "qwen3moe": "mixture",
    "qwen35moe": "GDN mixture",
    "gpt-oss": "sliding window",
    "dense": "dense",
}
H200, VISITS, ONE, NONE = "H200, calibrated", "H200, later visits", "one run fitted", "nothing fitted"
BATCHES = "one run fitted, prompts in batches of another size"


@dataclass(frozen=True, slots=True)
class Entry:
    """One time predicted and measured."""

    part: str
    set: str  # of one machine
    family: str
    placement: str
    prompt: bool
    what: str
    predicted_ns: int
    measured_ns: int
    error_ppm: int

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_ns / self.measured_ns - 1

    @property
    def miss(self) -> float:
        """Distance of the logarithms, over the half-width of the interval."""
        return abs(math.log(self.predicted_ns / self.measured_ns)) / math.log1p(self.error_ppm / 1e6)

    def score(self) -> float:
        """Interval score, relative to the measured time: the width, and ten times what a miss misses by."""
        factor = 1 + self.error_ppm / 1e6
        low, high = self.predicted_ns / factor, self.predicted_ns * factor
        beyond = max(low - self.measured_ns, self.measured_ns - high, 0)
        return (high - low + _MISS * beyond) / self.measured_ns


def entries() -> list[Entry]:
    """Everything that was ever measured and may be predicted."""
    return [*calibrated(), *visits(), *public(1), *public(0)]


def calibrated() -> Iterator[Entry]:
    """Placements of the two calibrated models that the fit had not seen."""
    for name in ("h200-moe", "h200-dense"):
        folder = ROOT / "benchmarks" / "data" / name
        profile = from_text((folder / "profile.yaml").read_text(), "profile.yaml")
        path = next(folder.glob("*.inventory.yaml"))
        table = inventories.from_text(path.read_text(), path.name)
        rows = judge.read_rows(folder / "runs.csv", table.name)
        seen = {r.placement.layer_devices + r.placement.moved for r in rows if r.kind == "calibration"}
        load = workload_of(512, 24)
        # Without any layer on the GPU the engine repacks host weights: other kernels, not of this comparison.
        used = [r for r in rows if r.kind == "calibration" and set(r.placement.layer_devices) != {"CPU"}]
        made = machine(
            table,
            load,
            profile.model_copy(update={"calibrations": ()}),
            [Run(r.placement, r.decode_ns) for r in used],
        )
        held = [r for r in rows if r.placement.layer_devices + r.placement.moved not in seen]
        points = [
            published.Point(table, r.placement, load, r.prefill_ns if prompt else r.decode_ns, prompt)
            for r in held
            for prompt in (False, True)
        ]
        kind = "mixture" if name.endswith("moe") else "dense"
        yield from _entries(H200, name, kind, made, points)


def visits() -> Iterator[Entry]:
    """Cells of the GPU benchmark, by a profile that another visit made."""
    profile = from_text((ROOT / "plans" / "inputs" / "h200.profile.yaml").read_text(), "h200.profile.yaml")
    for path in sorted((ROOT / "benchmarks" / "results").glob("h200-*.json")):
        runs = json.loads(path.read_text()).get("runs", [])  # of slots that follow there are none
        for model in generated_models.MODELS:
            rows = [r for r in runs if r["model"] == model]
            points = [point for row in rows for point in _cell(model, row)]
            family = {"qwen35moe": "GDN mixture", "gpt-oss": "sliding window", "dense": "dense"}.get(
                model, "mixture"
            )
            yield from _entries(VISITS, f"{path.stem} {model}", family, profile, points)


def _cell(model: str, row: Mapping[str, object]) -> Iterator[published.Point]:
    """The times of a run by a rule of the stock engine; contenders of other kinds are not placements."""
    table = generated_models.inventory(model)
    layers, units = table.number("block_count"), movable(table)
    words = str(row["setting"]).split()
    if words[:1] == ["--n-cpu-moe"]:
        ngl, moved = layers + 1, units[: int(words[1])]
    elif words[:1] == ["-ngl"]:
        ngl, moved = min(int(words[1]), layers + 1), ()
    else:
        return
    placement = Placement(" ".join(words[:2]), layers_by_ngl(layers, ngl, [("CUDA0", 1)]), moved)
    memory = HostMemory.PINNED if "--no-mmap" in words else HostMemory.MAPPED
    load = Workload(n_ctx=1280, prompt=512, depth=0)
    decode, prefill = row["decode"], row["prefill"]
    assert isinstance(decode, list) and isinstance(prefill, list)
    times = [each["median_ns"] for each in decode if each["depth"] == 0]
    if times:
        yield published.Point(table, placement, load, min(times), False, memory)
    for each in prefill:
        if each["prompt"] == 512:
            yield published.Point(table, placement, load, each["median_ns"], True, memory)


def public(used: int) -> Iterator[Entry]:
    """Published runs, with one run of each set fitted or none."""
    for found in replay.replay_all(used):
        family = replay.SETUPS[found.name].family
        part = (BATCHES if found.name in replay.BY_BATCH else ONE) if used else NONE
        for o in found.outcomes:
            yield Entry(
                part,
                found.name,
                family,
                o.placement,
                o.prompt,
                o.point.label,
                o.predicted_ns,
                o.measured_ns,
                o.error_ppm,
            )


def _entries(
    part: str, name: str, family: str, profile: Profile, points: Sequence[published.Point]
) -> Iterator[Entry]:
    for point, told in zip(points, published.predict(profile, points), strict=True):
        if point.ns:
            yield Entry(
                part,
                name,
                family,
                _kind(point.placement),
                point.prompt,
                point.placement.name,
                told.ns,
                point.ns,
                told.error_ppm,
            )


def _kind(placement: Placement) -> str:
    if not placement.sensible:
        return "random"
    if "CPU" in placement.layer_devices:
        return "-ngl"
    return "--n-cpu-moe" if placement.moved else "all on the GPU"


@dataclass(frozen=True, slots=True)
class Summary:
    """Absolute relative errors of a group, and how its intervals did."""

    times: int
    median: float
    p90: float
    worst: float
    coverage: float  # of the 80 % intervals
    half_width: float  # median
    score: float  # mean interval score

    @classmethod
    def of(cls, group: Sequence[Entry]) -> Summary:
        """Of at least one entry."""
        errors = sorted(abs(e.error) for e in group)
        p90 = statistics.quantiles(errors, n=10, method="inclusive")[8] if len(errors) > 1 else errors[0]
        return cls(
            len(group),
            statistics.median(errors),
            p90,
            errors[-1],
            sum(e.miss <= 1 for e in group) / len(group),
            statistics.median(e.error_ppm / 1e6 for e in group),
            statistics.mean(e.score() for e in group),
        )


def unseen(group: Sequence[Entry]) -> tuple[float, float]:
    """Coverage when each machine's intervals are scaled to hold 80 % of the others', and that factor."""
    factors, inside = [], 0
    for name in dict.fromkeys(e.set for e in group):
        others = sorted(e.miss for e in group if e.set != name)
        if not others:
            return Summary.of(group).coverage, 1.0
        factor = others[min(math.ceil(0.8 * len(others)), len(others)) - 1]
        factors.append(factor)
        inside += sum(e.miss <= factor for e in group if e.set == name)
    return inside / len(group), statistics.median(factors)


def tables(found: Sequence[Entry]) -> Iterator[str]:
    """The record as Markdown."""
    for part in dict.fromkeys(e.part for e in found):
        mine = [e for e in found if e.part == part]
        yield f"\n### {part}\n"
        yield "| | times | median | 90 % | worst | in the interval | half-width | interval score |"
        yield "|---|---|---|---|---|---|---|---|"
        groups: tuple[tuple[str, Callable[[Entry], str]], ...] = (
            ("all", lambda e: "all"),
            ("", lambda e: "prompts" if e.prompt else "tokens"),
            ("", lambda e: e.family),
            ("", lambda e: e.placement),
            ("set ", lambda e: e.set),
        )
        for prefix, key in groups:
            for name in sorted({key(e) for e in mine}):
                label = name if not prefix.strip() or prefix == "all" else f"{prefix}{name}"
                yield _row(label, Summary.of([e for e in mine if key(e) == name]))
        coverage, factor = unseen(mine)
        yield (
            f"\nLeft out one by one: scaled by what the others ask for (x{factor:.2f} in the middle), "
            f"intervals hold {coverage:.0%} of a machine's runs."
        )
        worst = max(mine, key=lambda e: abs(e.error))
        yield (
            f"Worst: {worst.set}, {worst.what}, {'prompt' if worst.prompt else 'token'} of "
            f"{worst.measured_ns / 1e6:.1f} ms, predicted {worst.error:+.0%}."
        )


def _row(label: str, s: Summary) -> str:
    return (
        f"| {label} | {s.times} | {s.median:.1%} | {s.p90:.1%} | {s.worst:.1%} | {s.coverage:.0%} "
        f"| ±{s.half_width:.1%} | {s.score:.2f} |"
    )


def left_out() -> Iterator[str]:
    """Public runs that are not predicted, and sets that are not expected to fit."""
    for name, why in replay.NOT_REPLAYED.items():
        yield f"{name}: {why}"
    for found in replay.replay_all(1):
        for p in found.left_out:
            yield f"{found.name}: {p.label}: {p.status}"
        if replay.SETUPS[found.name].unexplained:
            yield f"{found.name}: {replay.SETUPS[found.name].unexplained}"


def readme_rows(found: Iterable[Entry]) -> dict[str, str]:
    """What README.md says of predictions, by the beginning of its row."""
    rows = {}
    listed = list(found)
    for part, label in (
        (H200, "Predicted against measured, H200, placements the calibration never saw"),
        (VISITS, "Predicted against measured, later visits to an H200, by the profile of another visit"),
        (ONE, "Other people's published runs, one run of a set fitted, the rest predicted"),
        (BATCHES, "Prompts in batches of 16 to 2048 tokens, one size fitted, the other sizes predicted"),
        (NONE, "The same with nothing fitted, on an assumed machine"),
    ):
        words = []
        if all(e.part != part for e in listed):
            continue
        for prompt in (False, True):
            mine = [e for e in listed if e.part == part and e.prompt is prompt]
            if not mine:
                continue
            s = Summary.of(mine)
            what = "prompts" if prompt else "tokens"
            words.append(
                f"{s.times} {what}: median {s.median:.1%}, 90 % within {s.p90:.1%}, worst {s.worst:.1%}, "
                f"{s.coverage:.0%} inside ±{s.half_width:.0%}".replace("%", " %").replace("  ", " ")
            )
        rows[label] = "; ".join(words)
    return rows


def show(found: Sequence[Entry], runs: bool) -> None:
    """Print the record."""
    for line in tables(found):
        print(line)
    print("\nNot predicted, or not expected to fit:")
    for line in left_out():
        print(f"  {line}")
    for e in sorted(found, key=lambda e: -abs(e.error)) if runs else ():
        what = "prompt" if e.prompt else "token"
        print(
            f"  {e.part}, {e.set}, {e.what}: {what} {e.measured_ns / 1e6:.2f} ms, predicted "
            f"{e.predicted_ns / 1e6:.2f} ({e.error:+.1%}, ±{e.error_ppm / 1e4:.1f} %)"
        )
