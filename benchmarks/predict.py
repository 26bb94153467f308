"""Predicted against measured decode and prefill: python benchmarks/predict.py FOLDER

FOLDER comes from predict_measure.py. The cost model is calibrated on the runs marked "calibration"
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

from predict_measure import workload_of

from planner import inventory as inventories
from planner import profile as profiles
from planner.inventory import Inventory
from planner.profile import Calibration, Profile
from profiler.calibrate import Run, fit
from profiler.placements import Placement, Predictor


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
    calibration: Calibration | None
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
    profile = profiles.from_text((options.folder / "profile.yaml").read_text(), "profile.yaml")
    tables = {}
    for path in sorted(options.folder.glob("*.inventory.yaml")):
        table = inventories.from_text(path.read_text(), path.name)
        tables[table.name] = (table, read_rows(options.folder / "runs.csv", table.name))
    workload = (options.prompt, options.gen)
    found = [v for name in tables for v in judge(*tables[name], profile, workload)]
    if options.json:
        print(
            json.dumps(
                [{"model": v.model, "calibrated": v.calibration is not None, **v.summary()} for v in found]
            )
        )
        return
    for verdict in found:
        report(verdict, options.runs)


def judge(
    table: Inventory, rows: Sequence[Row], profile: Profile, workload: tuple[int, int]
) -> tuple[Verdict, Verdict]:
    """The held-out placements of one model, without and with whole-model calibration."""
    load = workload_of(*workload)
    seen = [Run(row.placement, row.decode_ns) for row in rows if row.kind == "calibration"]
    calibration = fit(table, load, profile, seen, table.table_digest())
    names = {row.placement for row in rows if row.kind == "calibration"}
    held = [
        row for row in rows if row.kind != "calibration" and _bare(row) not in {_bare_of(p) for p in names}
    ]
    bare = profile.model_copy(update={"calibrations": ()})
    fitted = profile.model_copy(update={"calibrations": (calibration,)})
    predictor = Predictor(table, load)
    verdicts = []
    for used, known in ((bare, None), (fitted, calibration)):
        prices = predictor.evaluate_all(used, [row.placement for row in held])
        errors = [Error(r, e.decode_ns, e.prefill_ns) for r, e in zip(held, prices, strict=True)]
        verdicts.append(Verdict(table.name, known, tuple(errors)))
    return verdicts[0], verdicts[1]


def _bare(row: Row) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return _bare_of(row.placement)


def _bare_of(placement: Placement) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return placement.layer_devices, placement.moved


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


def report(verdict: Verdict, each: bool) -> None:
    """A few lines on one model."""
    calibration = verdict.calibration
    print(f"\n{verdict.model}: {'calibrated' if calibration else 'operators alone'}")
    if calibration:
        scales = ", ".join(f"{name} x{ppm / 1e6:.2f}" for name, ppm in calibration.scale_ppm.items())
        print(
            f"  {scales}, split {calibration.split_ns / 1e3:.1f} us, "
            f"mixed {calibration.mixed_ns / 1e3:.0f} us, "
            f"token {calibration.token_ns / 1e3:.0f} us; worst of {calibration.runs} runs "
            f"{calibration.residual_ppm / 1e4:.1f} %"
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
