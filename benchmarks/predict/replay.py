"""Published runs replayed: fit an assumed machine to one run of each set, predict the others.

    python -m benchmarks.predict.replay [--runs]

The figures in data/replay_runs.csv were typed from public reports. Hosts' memory rates are stated in none of
them; a card starts at the share of its vendor's memory rate that its generation reaches. Nothing else is
fitted than what `profiler.whole_model.published` fits for anyone. The run used is the one in the middle of
those that state most; with two, the fastest and the slowest. Runs that their authors mark as spilling or
thrashing are not predicted but named, and so are those that another run of the same placement contradicts
and those that need more than a card's whole memory by the planner's own count, as it would refuse them.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.predict.published_models import gemma_12b, gemma_e2b, llama_7b
from planner.constants import CPU
from planner.machine import presets
from planner.machine.host_memory import HostMemory
from planner.machine.profile import Device, Link, Profile
from planner.model import inventory as inventories
from planner.model.inventory import Inventory
from planner.plan.engine_rules import layers_by_ngl
from planner.workload import Workload
from profiler.whole_model import published
from profiler.whole_model.placements import Placement, movable

HERE = Path(__file__).resolve().parent.parent
INPUTS = HERE.parent / "plans" / "inputs"
BY_BATCH = ("ubatch 4090", "ubatch 3090")  # of one model, batches of 16 to 2048 tokens
LINEAR = ("S05c", "S12")  # sets that lie on a straight line: here 5 % is asked
# Memory rate of batch-1 kernels over the vendor's: 0.85 is what all descriptions assume. Before tensor cores:
# LLaMA 7B Q4_0 at 56.8 tokens/s on a P40, 217 of 346 GB/s (ggml-org/llama.cpp#4766); its prompts there, 934
# tokens/s, are 1.07 of the card's nominal 11.8 TFLOPS, which the rates of S07 and S12 follow.
_RECENT, _PASCAL = 0.85, 0.6
_MIDDLE = 64  # depth of the token in the middle of tg128
_OWN_MODELS = {"gemma-12b": gemma_12b, "gemma-e2b": gemma_e2b, "llama-7b": llama_7b}


@dataclass(frozen=True, slots=True)
class Setup:
    """What a set was measured on, as far as its report says."""

    model: str  # an inventory in plans/inputs, or one of published_models
    family: str
    machine: str  # a named machine whose links and host resemble it
    gpu_gb_per_s: int = 0  # vendor's figure; 0: the named machine's
    reached: float = _RECENT
    tflops: float = 0.0  # of products at prompts; 0: the named machine's
    link_gb_per_s: float = 0.0  # of copies to the card; 0: the named machine's
    unexplained: str = ""  # why the set is not expected to fit
    again: float = 0.0  # how far a run lies from the mean of its repetitions, where the report tells it


_35B, _MOE = "Qwen3.6-35B-A3B-q4_K", "GDN mixture"
SETUPS = {
    "S03": Setup(
        _35B,
        _MOE,
        "rtx3060-12gb-ddr4",
        448,
        unexplained="16 GB of host memory for a 16 GB file: paging",
        again=0.06,  # its table has -ngl 10 six times and -ngl 16 thirteen times: 7.9 and 5.4 %
    ),
    "S04": Setup("Qwen3-30B-A3B-Q4_K_M", "mixture", "rtx4090-ddr5", unexplained="its CPU was throttled"),
    "S05": Setup(_35B, _MOE, "rx9070xt-ddr5"),
    "S05c": Setup(_35B, _MOE, "rx9070xt-ddr5"),
    "S07": Setup(
        _35B,
        _MOE,
        "rtx3060-12gb-ddr4",
        120,
        _PASCAL,
        2.8,
        12.7,
        "its author states 20 % from run to run",
        0.2,
    ),
    "S09": Setup(
        _35B, _MOE, "rtx3060-12gb-ddr4", unexplained="-ngl runs attend on the CPU with a cache type of a fork"
    ),
    "S12": Setup("gemma-12b", "sliding window", "rtx3060-12gb-ddr4", 256, _PASCAL, 6.9, 12.7),
    "S12 depth": Setup("gemma-12b", "sliding window", "rtx3060-12gb-ddr4", 256, _PASCAL, 6.9, 12.7),
    "S14": Setup("gemma-e2b", "sliding window", "rtx4060-8gb-ddr5", 192),
    "S16": Setup("Qwen3-30B-A3B-Q4_K_M", "mixture", "rtx4060-8gb-ddr5", 448),
    "S24": Setup("llama-7b", "dense", "rtx4090-ddr5", 1008, tflops=64),
    "S26a": Setup(_35B, _MOE, "rtx4060ti-16gb-ddr5", 896),
    "S30": Setup("gpt-oss-120b-MXFP4", "sliding window", "rtx3090-rtx3060-ddr4"),
    "ubatch 4090": Setup(_35B, _MOE, "rtx4090-ddr5"),
    "ubatch 3090": Setup("gemma-4-26B-A4B-Q4_K_M", "sliding window", "rtx3090-rtx3060-ddr4"),
}


NOT_REPLAYED = {
    "S26b": "faster than its host's memory: 79 GB/s from two channels of DDR4; speculation is likely",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One published run; times are 0 where it states none."""

    ngl: int
    n_cpu_moe: int
    kv: str
    depth: int
    ms: float
    prompt: int
    ubatch: int
    prompt_ms: float
    status: str

    @property
    def label(self) -> str:
        moved = f" --n-cpu-moe {self.n_cpu_moe}" if self.n_cpu_moe else ""
        said = f"-ngl {self.ngl}{moved} kv {self.kv or 'f16'}"
        said += f" depth {self.depth}" if self.depth else ""
        return said + (f" prompt {self.prompt} ubatch {self.ubatch}" if self.prompt else "")

    @property
    def rank(self) -> float:
        """What runs of a set are ordered by."""
        return self.ms or self.prompt_ms


@dataclass(frozen=True, slots=True)
class Outcome:
    """One time predicted and measured."""

    point: Point
    prompt: bool
    predicted_ns: int
    measured_ns: int
    error_ppm: int  # of the predicted interval

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_ns / self.measured_ns - 1

    @property
    def placement(self) -> str:
        """What kind of placement it is."""
        if self.point.n_cpu_moe:
            return "--n-cpu-moe"
        return "-ngl" if self.point.ngl < 99 else "all on the GPU"


@dataclass(frozen=True, slots=True)
class Replay:
    """One set: the runs used, and what became of the others."""

    name: str
    used: tuple[Point, ...]
    profile: Profile  # fitted
    outcomes: tuple[Outcome, ...]
    left_out: tuple[Point, ...]

    @property
    def errors(self) -> tuple[tuple[Point, float], ...]:
        """Relative errors of the times of a token."""
        return tuple((o.point, o.error) for o in self.outcomes if not o.prompt)

    @property
    def median(self) -> float:
        return statistics.median(abs(e) for _, e in self.errors)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", action="store_true", help="print every run")
    options = parser.parse_args()
    for n_used in (1, 2):
        print(f"fitted to {n_used} run{'s' if n_used > 1 else ''} of each set")
        found = replay_all(n_used)
        for each in found:
            report(each, options.runs)
        errors = [abs(o.error) for each in found for o in each.outcomes]
        print(f"  all {len(errors)} times: median {statistics.median(errors):.1%}, worst {max(errors):.1%}")


def replay_all(n_used: int, names: Iterable[str] = tuple(SETUPS)) -> tuple[Replay, ...]:
    """Sets of the data file that have a setup; with two runs only where others are left."""
    points = read_points(HERE / "data" / "replay_runs.csv")
    enough = [name for name in names if sum(p.status == "ok" for p in points[name]) > n_used]
    return tuple(replay(name, SETUPS[name], points[name], n_used) for name in enough)


def read_points(path: Path) -> dict[str, list[Point]]:
    """Runs by set."""
    found: dict[str, list[Point]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            prompt, rate, rate_prompt = row["prompt"], row["tokens_per_s"], row["prompt_per_s"]
            point = Point(
                ngl=int(row["ngl"]),
                n_cpu_moe=int(row["n_cpu_moe"] or 0),
                kv=row["kv"],
                depth=int(row["depth"]),
                ms=1e3 / float(rate) if rate else 0.0,
                prompt=int(prompt or 0),
                ubatch=int(row["ubatch"] or 0),
                prompt_ms=1e3 * int(prompt) / float(rate_prompt) if rate_prompt else 0.0,
                status=row["status"],
            )
            found.setdefault(row["set"], []).append(point)
    return found


def replay(name: str, setup: Setup, points: Sequence[Point], n_used: int) -> Replay:
    """Fit the machine to the middle run, to the fastest and the slowest, or to none; predict the rest."""
    table, profile = inventory_of(setup.model), assumed(setup)
    good = sorted((p for p in points if p.status == "ok"), key=lambda p: p.rank)
    told = [p for p in good if _stated(p) == max(map(_stated, good))]
    used = ((), (told[len(told) // 2],), (told[0], told[-1]))[n_used]
    placements = placed(table, profile, good)
    times = {p: times_of(table, placements[p], p) for p in good}
    made = published.fitted(profile, [t for p in used for t in times[p]], setup.again) if used else profile
    others = [(p, t) for p in good if p not in used for t in times[p]]
    priced = published.predict(made, [t for _, t in others])
    outcomes = tuple(
        Outcome(p, t.prompt, e.ns, t.ns, e.error_ppm)
        for (p, t), e in zip(others, priced, strict=True)
        if not e.beyond
    )
    beyond = {
        p: replace(p, status=f"needs more than all of {e.beyond[0]}")
        for (p, _), e in zip(others, priced, strict=True)
        if e.beyond
    }
    left_out = (*beyond.values(), *(p for p in points if p.status != "ok"))
    return Replay(name, used, made, outcomes, left_out)


def _stated(point: Point) -> int:
    """How many times a run states."""
    return bool(point.ms) + bool(point.prompt_ms)


def times_of(table: Inventory, placement: Placement, point: Point) -> list[published.Point]:
    """The times that a run states."""
    kv = point.kv if point.kv in ("f16", "q8_0") else "f16"  # a fork's own types are priced as f16
    prompt = point.prompt or 512
    workload = Workload(
        n_ctx=max(4096, 2 * max(prompt, point.depth)),
        depth=point.depth or _MIDDLE,
        prompt=prompt,
        n_batch=max(2048, point.ubatch),
        n_ubatch=point.ubatch or 512,
        type_k=kv,
        type_v=kv,
    )
    stated = ((point.ms, False), (point.prompt_ms, True))
    return [
        published.Point(table, placement, workload, round(ms * 1e6), is_prompt, HostMemory.MAPPED)
        for ms, is_prompt in stated
        if ms
    ]


def placed(table: Inventory, profile: Profile, points: Sequence[Point]) -> dict[Point, Placement]:
    """What the engine does with the settings of each run."""
    gpu = next(d.name for d in profile.devices if d.kind == "gpu")
    layers, units = table.number("block_count"), movable(table)
    return {
        p: Placement(p.label, layers_by_ngl(layers, min(p.ngl, layers + 1), [(gpu, 1)]), units[: p.n_cpu_moe])
        for p in points
    }


def inventory_of(name: str) -> Inventory:
    """A model by the name that setups use."""
    if name in _OWN_MODELS:
        return _OWN_MODELS[name]()
    path = INPUTS / f"{name}.inventory.yaml"
    return inventories.from_text(path.read_text(), path.name)


def assumed(setup: Setup) -> Profile:
    """The named machine with one card, at the rates that are stated for it."""
    profile = presets.load(setup.machine)
    gpu = next(d.name for d in profile.devices if d.kind == "gpu")

    def device(d: Device) -> Device:
        if d.name != gpu or not setup.gpu_gb_per_s:
            return d
        rate = round(setup.gpu_gb_per_s * setup.reached * 1e9)
        flops = round(setup.tflops * 1e12) or d.flops_per_s
        return d.model_copy(update={"bandwidth_bytes_per_s": rate, "flops_per_s": flops})

    def link(li: Link) -> Link:
        if not setup.link_gb_per_s:
            return li
        return li.model_copy(update={"bandwidth_bytes_per_s": round(setup.link_gb_per_s * 1e9)})

    kept = {gpu, CPU}
    return profile.model_copy(
        update={
            "devices": tuple(device(d) for d in profile.devices if d.name in kept),
            "links": tuple(link(li) for li in profile.links if {li.source, li.target} <= kept),
        }
    )


def report(found: Replay, each: bool) -> None:
    """One set in a few lines."""
    errors = [abs(o.error) for o in found.outcomes]
    rates = ", ".join(f"{d.name} {d.bandwidth_bytes_per_s / 1e9:.0f} GB/s" for d in found.profile.devices)
    print(
        f"  {found.name}: {len(errors)} times, median {statistics.median(errors):.1%}, "
        f"worst {max(errors):.1%}; {rates} from {'; '.join(p.label for p in found.used) or 'nothing'}"
    )
    if len(found.used) == 1:
        if SETUPS[found.name].unexplained:
            print(f"    not expected to fit: {SETUPS[found.name].unexplained}")
        for point in found.left_out:
            print(f"    not predicted ({point.status}): {point.label}, {point.rank:.1f} ms")
    for o in found.outcomes if each else ():
        what = "prompt" if o.prompt else "token"
        print(
            f"    {o.point.label:54} {what:6} {o.measured_ns / 1e6:8.1f} ms, predicted {o.error:+.1%} "
            f"(±{o.error_ppm / 1e4:.1f} %)"
        )


if __name__ == "__main__":
    main()
