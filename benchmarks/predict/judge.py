"""Predicted against measured decode and prefill: python -m benchmarks.predict.judge FOLDER

FOLDER comes from measure.py. The cost model is calibrated on the runs marked "calibration"
(and once more without any, to show what calibration is worth) and judged on the sensible and random
placements, which the fit never saw.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.predict.measure import workload_of
from planner.machine import profile as profiles
from planner.machine.profile import Profile
from planner.model import inventory as inventories
from planner.model.inventory import Inventory
from profiler.whole_model.calibrate import Run, machine, model
from profiler.whole_model.placements import Placement, Predictor

BRIEF = ("all on the GPU", "all moved", "every other moved")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured run; times in nanoseconds."""

    kind: str  # calibration, sensible, random
    placement: Placement
    decode_ns: int
    prefill_ns: int


@dataclass(frozen=True, slots=True)
class Error:
    """Predicted over measured, less one."""

    row: Row
    decode_ns: int
    prefill_ns: int

    @property
    def decode(self) -> float:
        return self.decode_ns / self.row.decode_ns - 1

    @property
    def prefill(self) -> float:
        return self.prefill_ns / self.row.prefill_ns - 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """How well one model was predicted; relative errors."""

    model: str
    stage: str
    profile: Profile
    errors: tuple[Error, ...]

    def summary(self) -> dict[str, float]:
        """Median and 90th percentile of the absolute errors, and the rank correlation."""
        decode = [abs(e.decode) for e in self.errors]
        return {
            "placements": len(self.errors),
            "decode_median": statistics.median(decode),
            "decode_p90": statistics.quantiles(decode, n=10, method="inclusive")[8],
            "decode_spearman": spearman([(e.decode_ns, e.row.decode_ns) for e in self.errors]),
            "prefill_median": statistics.median(abs(e.prefill) for e in self.errors),
        }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=24)
    parser.add_argument("--runs", action="store_true", help="print every run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    run(options.folder, (options.prompt, options.gen), options.runs, options.json)


def run(
    folder: Path, workload: tuple[int, int] = (512, 24), runs: bool = False, as_json: bool = False
) -> None:
    """Judge the models of one folder and print what came of it; `workload`: prompt and generated tokens."""
    profile = profiles.from_text((folder / "profile.yaml").read_text(), "profile.yaml")
    tables = {}
    for path in sorted(folder.glob("*.inventory.yaml")):
        table = inventories.from_text(path.read_text(), path.name)
        tables[table.name] = (table, read_rows(folder / "runs.csv", table.name))
    found = [v for table, rows in tables.values() if rows for v in judge(table, rows, profile, workload)]
    if as_json:
        print(json.dumps([{"model": v.model, "stage": v.stage, **v.summary()} for v in found]))
        return
    for verdict in found:
        report(verdict, runs)
    for table, rows in tables.values():
        noise(table.name, rows)


def judge(
    table: Inventory, rows: Sequence[Row], profile: Profile, workload: tuple[int, int]
) -> tuple[Verdict, ...]:
    """The held-out placements of one model, at three stages of calibration."""
    load = workload_of(*workload)
    known = {_bare(row) for row in rows if row.kind == "calibration"}
    held = [row for row in rows if _bare(row) not in known]
    # A placement measured twice, minutes apart, counts twice: the machine drifts.
    # Without any layer on the GPU the engine repacks host weights: other kernels, not of this comparison.
    seen = [r for r in rows if _bare(r) in known and set(r.placement.layer_devices) != {"CPU"}]
    runs = [Run(r.placement, r.decode_ns) for r in seen]
    brief = [run for run in runs if run.placement.name in BRIEF]
    bare = profile.model_copy(update={"calibrations": ()})
    whole = machine(table, load, bare, runs)
    stages = {
        "operators alone": bare,
        f"calibrated on {len(runs)} runs": whole,
        f"then on {len(brief)} runs of the model": model(table, load, whole, brief),
    }
    predictor = Predictor(table, load)
    verdicts = []
    for stage, used in stages.items():
        prices = predictor.evaluate_all(used, [row.placement for row in held])
        errors = [Error(r, e.decode_ns, e.prefill_ns) for r, e in zip(held, prices, strict=True)]
        verdicts.append(Verdict(table.name, stage, used, tuple(errors)))
    return tuple(verdicts)


def _bare(row: Row) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What makes two placements the same whatever they are called."""
    return row.placement.layer_devices, row.placement.moved


def read_rows(path: Path, model: str) -> list[Row]:
    """The runs of one model that were measured."""
    with path.open(newline="") as file:
        return [_row(line) for line in csv.DictReader(file) if line["model"] == model and line["decode_ns"]]


def _row(line: dict[str, str]) -> Row:
    placement = Placement(
        line["placement"],
        tuple(line["layer_devices"].split()),
        tuple(line["moved"].split()),
        line["kind"] != "random",
    )
    return Row(line["kind"], placement, int(line["decode_ns"]), int(line["prefill_ns"]))


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Rank correlation of pairs, ties by their mean rank."""
    first, second = (_ranks([pair[i] for pair in pairs]) for i in (0, 1))
    return statistics.correlation(first, second)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    last = {value: index for index, value in enumerate(ordered)}
    first = {value: index for index, value in reversed(list(enumerate(ordered)))}
    return [(first[value] + last[value]) / 2 for value in values]


def noise(model: str, rows: Sequence[Row]) -> None:
    """How far two measurements of one placement lie apart: no prediction can be better than that."""
    twice: dict[object, list[Row]] = {}
    for row in rows:
        twice.setdefault(_bare(row), []).append(row)
    for group in twice.values():
        if len(group) > 1:
            times = sorted(row.decode_ns for row in group)
            print(f"{model}: {group[0].placement.name} measured twice: {times[-1] / times[0] - 1:+.1%}")


def report(verdict: Verdict, each: bool) -> None:
    """A few lines on one model."""
    print(f"\n{verdict.model}: {verdict.stage}")
    for c in verdict.profile.calibrations[-1:]:
        scales = ", ".join(f"{name} x{ppm / 1e6:.2f}" for name, ppm in c.scale_ppm.items())
        small = ", ".join(f"{d.name} {d.op_overhead_ns / 1e3:.1f} us" for d in verdict.profile.devices)
        print(
            f"  {scales}, split {c.split_ns / 1e3:.1f} us, mixed {c.mixed_ns / 1e3:.0f} us, "
            f"token {c.token_ns / 1e3:.0f} us; small operators {small}; "
            f"worst of {c.runs} runs {c.residual_ppm / 1e4:.1f} %"
        )
    s = verdict.summary()
    print(
        f"  {s['placements']:.0f} placements: decode median {s['decode_median']:.1%}, "
        f"90th percentile {s['decode_p90']:.1%}, Spearman {s['decode_spearman']:.3f}; "
        f"prefill median {s['prefill_median']:.1%}"
    )
    for error in sorted(verdict.errors, key=lambda e: -abs(e.decode)) if each else ():
        row = error.row
        print(
            f"    {row.placement.name:22} decode {row.decode_ns / 1e6:8.2f} ms, predicted "
            f"{error.decode_ns / 1e6:8.2f} ({error.decode:+.1%}); prefill {row.prefill_ns / 1e6:8.1f} ms, "
            f"predicted {error.prefill_ns / 1e6:8.1f} ({error.prefill:+.1%})"
        )


if __name__ == "__main__":
    main()
