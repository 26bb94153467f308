"""Published runs replayed: calibrate on one point of each set, predict the others.

    python -m benchmarks.predict.replay [--runs]

The figures in data/replay_runs.csv were typed from public reports; the host's memory rate is stated in
none of them, so the calibrating point (the one in the middle) fits mostly the CPU's scale; the card
starts at 0.85 of its vendor's memory rate. With two points (the ends) both scales are known. Points that
their authors mark as spilling or thrashing are not predicted but named.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.machine import presets
from planner.machine.profile import Profile
from planner.model import inventory as inventories
from planner.model.ggml_types import tensor_bytes
from planner.model.inventory import Inventory, Shard, Tensor
from planner.plan.engine_rules import layers_by_ngl
from planner.workload import Workload
from profiler.whole_model.calibrate import Parameter, solve
from profiler.whole_model.placements import Placement, Predictor, movable

HERE = Path(__file__).resolve().parent.parent
INPUTS = HERE.parent / "plans" / "inputs"
HOST_SIGMA, CARD_SIGMA = 2.0, 0.3  # how far a scale may lie from 1: memory is not stated, cards are
LINEAR = ("S05c", "S12")  # sets that lie on a straight line: here 5 % is asked
_PPM = 10**6


@dataclass(frozen=True, slots=True)
class Setup:
    """What a set was measured on, as far as its report says."""

    model: str  # an inventory in plans/inputs, or gemma-12b
    machine: str  # a named machine whose links and host resemble it
    gpu_gb_per_s: int  # vendor's figure; 0: the named machine's
    unexplained: str = ""  # why the set is not expected to fit


SETUPS = {
    "S05c": Setup("Qwen3.6-35B-A3B-q4_K", "rx9070xt-ddr5", 0),
    "S05": Setup(
        "Qwen3.6-35B-A3B-q4_K",
        "rx9070xt-ddr5",
        0,
        "the card is nearly full at 8 and 16: spill begins unmarked",
    ),
    "S12": Setup("gemma-12b", "rtx3060-12gb-ddr4", 256),
    "S12 depth": Setup("gemma-12b", "rtx3060-12gb-ddr4", 256, "attention of this card at depth is not known"),
    "S09": Setup(
        "Qwen3.6-35B-A3B-q4_K",
        "rtx3060-12gb-ddr4",
        0,
        "two rules, one fork: -ngl runs compute attention on the CPU",
    ),
    "S07": Setup("Qwen3.6-35B-A3B-q4_K", "rtx3060-12gb-ddr4", 120, "its author states 20 % from run to run"),
    "S03": Setup(
        "Qwen3.6-35B-A3B-q4_K", "rtx3060-12gb-ddr4", 448, "16 GB of host memory for a 16 GB file: paging"
    ),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One published run."""

    ngl: int
    n_cpu_moe: int
    kv: str
    depth: int
    ms: float
    status: str

    @property
    def label(self) -> str:
        moved = f" --n-cpu-moe {self.n_cpu_moe}" if self.n_cpu_moe else ""
        return f"-ngl {self.ngl}{moved} kv {self.kv or 'f16'}" + (
            f" depth {self.depth}" if self.depth else ""
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """One set: the point used, and relative errors of the others."""

    name: str
    used: tuple[Point, ...]
    scales: Mapping[str, float]
    errors: tuple[tuple[Point, float], ...]
    left_out: tuple[Point, ...]

    @property
    def median(self) -> float:
        return statistics.median(abs(e) for _, e in self.errors)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", action="store_true", help="print every point")
    options = parser.parse_args()
    for n_used in (1, 2):
        print(f"calibrated on {n_used} point{'s' if n_used > 1 else ''} of each set")
        found = replay_all(n_used)
        for each in found:
            report(each, options.runs)
        errors = [abs(e) for each in found for _, e in each.errors]
        linear = [abs(e) for each in found if each.name in LINEAR for _, e in each.errors]
        print(f"  all {len(errors)} points: median {statistics.median(errors):.1%}, worst {max(errors):.1%}")
        print(f"  linear sets ({', '.join(LINEAR)}): median {statistics.median(linear):.1%}")


def replay_all(n_used: int, names: Iterable[str] = tuple(SETUPS)) -> tuple[Replay, ...]:
    """Sets of the data file that have a setup; with two points only where others are left."""
    points = read_points(HERE / "data" / "replay_runs.csv")
    enough = [name for name in names if sum(p.status == "ok" for p in points[name]) > n_used]
    return tuple(replay(name, SETUPS[name], points[name], n_used) for name in enough)


def read_points(path: Path) -> dict[str, list[Point]]:
    """Points by set."""
    found: dict[str, list[Point]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            point = Point(
                ngl=int(row["ngl"]),
                n_cpu_moe=int(row["n_cpu_moe"] or 0),
                kv=row["kv"],
                depth=int(row["depth"]),
                ms=1e3 / float(row["tokens_per_s"]),
                status=row["status"],
            )
            found.setdefault(row["set"], []).append(point)
    return found


def replay(name: str, setup: Setup, points: Sequence[Point], n_used: int) -> Replay:
    """Fit the devices' scales to the middle point, or to the fastest and the slowest; predict the rest."""
    table = gemma_12b() if setup.model == "gemma-12b" else _inventory(setup.model)
    profile = _profile(setup)
    good = sorted((p for p in points if p.status == "ok"), key=lambda p: p.ms)
    used = (good[len(good) // 2],) if n_used == 1 else (good[0], good[-1])
    by_point = dict(zip(good, _lines(table, profile, good), strict=True))
    scales = _fit([by_point[p] for p in used], used)
    others = [p for p in good if p not in used]
    errors = [(p, by_point[p].at(scales) / p.ms - 1) for p in others]
    return Replay(name, used, scales, tuple(errors), tuple(p for p in points if p.status != "ok"))


@dataclass(frozen=True, slots=True)
class Line:
    """Milliseconds a token as a straight line in the devices' scales."""

    fixed: float
    slopes: Mapping[str, float]

    def at(self, scales: Mapping[str, float]) -> float:
        """Milliseconds at some scales."""
        return self.fixed + sum(scales[name] * slope for name, slope in self.slopes.items())


def _lines(table: Inventory, profile: Profile, points: Sequence[Point]) -> list[Line]:
    """What the planner's price of each point is made of."""
    names = [d.name for d in profile.devices]
    fixed = _priced(table, profile, points, "")
    slopes = {name: _priced(table, profile, points, name) for name in names}
    return [Line(fixed[i], {name: slopes[name][i] - fixed[i] for name in names}) for i in range(len(points))]


def _priced(table: Inventory, profile: Profile, points: Sequence[Point], device: str) -> list[float]:
    """Milliseconds a token when the operators of one device count, and those of no other."""
    ppm = {d.name: _PPM if d.name == device else 0 for d in profile.devices}
    calibration = profile.calibrations[0].model_copy(update={"scale_ppm": ppm})
    scaled = profile.model_copy(update={"calibrations": (calibration,)})
    found: dict[Point, float] = {}
    placements = _placements(table, profile, points)
    for depth in sorted({p.depth for p in points}):
        here = [p for p in points if p.depth == depth]
        predictor = Predictor(table, Workload(n_ctx=32768, depth=depth, prompt=0, gen=1))
        evaluated = predictor.evaluate_all(scaled, [placements[p] for p in here])
        found |= {p: e.decode_ns / 1e6 for p, e in zip(here, evaluated, strict=True)}
    return [found[p] for p in points]


def _fit(lines: Sequence[Line], points: Sequence[Point]) -> dict[str, float]:
    """The likeliest scales; a card is better known than the host's memory."""
    import numpy as np

    names = list(lines[0].slopes)
    design = np.array([[line.slopes[name] for name in names] for line in lines])
    measured = np.array([p.ms for p in points])
    fixed = np.array([line.fixed for line in lines])
    priors = [Parameter(n, 1.0, HOST_SIGMA if n == "CPU" else CARD_SIGMA) for n in names]
    values = solve(design, measured - fixed, measured * 0.01, priors)
    return dict(zip(names, values.tolist(), strict=True))


def _placements(table: Inventory, profile: Profile, points: Sequence[Point]) -> dict[Point, Placement]:
    gpu = next(d.name for d in profile.devices if d.kind == "gpu")
    layers, units = table.number("block_count"), movable(table)
    return {
        p: Placement(p.label, layers_by_ngl(layers, min(p.ngl, layers + 1), [(gpu, 1)]), units[: p.n_cpu_moe])
        for p in points
    }


def _inventory(name: str) -> Inventory:
    path = INPUTS / f"{name}.inventory.yaml"
    return inventories.from_text(path.read_text(), path.name)


def _profile(setup: Setup) -> Profile:
    profile = presets.load(setup.machine)
    if not setup.gpu_gb_per_s:
        return profile
    rate = setup.gpu_gb_per_s * 85 * 10**7
    devices = tuple(
        d.model_copy(update={"bandwidth_bytes_per_s": rate}) if d.kind == "gpu" else d
        for d in profile.devices
    )
    return profile.model_copy(update={"devices": devices})


def gemma_12b() -> Inventory:
    """Gemma 12B from its published sizes: 48 layers of 3840, 16 heads of 256, 8 of them for KV, FFN 15360."""
    tensors = [_tensor("token_embd.weight", "q6_K", (3840, 262144))]
    for layer in range(48):
        shapes = {
            "attn_q": (3840, 4096),
            "attn_k": (3840, 2048),
            "attn_v": (3840, 2048),
            "attn_output": (4096, 3840),
        }
        shapes |= {"ffn_gate": (3840, 15360), "ffn_up": (3840, 15360), "ffn_down": (15360, 3840)}
        tensors += [_tensor(f"blk.{layer}.{stem}.weight", "q4_K", shape) for stem, shape in shapes.items()]
        tensors += [_tensor(f"blk.{layer}.{n}.weight", "f32", (3840,)) for n in ("attn_norm", "ffn_norm")]
    tensors.append(_tensor("output_norm.weight", "f32", (3840,)))
    hparams = {
        "block_count": 48,
        "embedding_length": 3840,
        "feed_forward_length": 15360,
        "vocab_size": 262144,
    }
    heads = {"attention.head_count": 16, "attention.head_count_kv": 8, "attention.key_length": 256}
    return Inventory(
        name="gemma-12b",
        architecture="gemma3",
        header_digest="",
        hparams={**hparams, **heads, "attention.value_length": 256, "attention.sliding_window": 1024},
        shards=(Shard(file="", size_bytes=0, data_offset=0, alignment=32),),
        tensors=tuple(tensors),
    )


def _tensor(name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name=name, type=kind, shape=shape, size_bytes=tensor_bytes(kind, shape), shard=0, offset=0)


def report(found: Replay, each: bool) -> None:
    """One set in a few lines."""
    setup = SETUPS[found.name]
    worst = max((abs(e) for _, e in found.errors), default=0.0)
    scales = ", ".join(f"{name} x{scale:.2f}" for name, scale in found.scales.items())
    print(
        f"  {found.name}: {len(found.errors)} points, median {found.median:.1%}, worst {worst:.1%}; "
        f"{scales} from {'; '.join(p.label for p in found.used)}"
    )
    if len(found.used) == 1:
        if setup.unexplained:
            print(f"    cannot be explained by the model: {setup.unexplained}")
        for point in found.left_out:
            print(f"    not predicted ({point.status}): {point.label}, {point.ms:.1f} ms")
    for point, error in found.errors if each else ():
        print(f"    {point.label:42} {point.ms:7.1f} ms, predicted {error:+.1%}")


if __name__ == "__main__":
    main()
