"""Stripes against llama.cpp's own rules at equal measured VRAM, on models of real size.

    python -m benchmarks.gpu.equal_vram --engine BUILD_FOLDER --out benchmarks/results/MACHINE.json

Needs an NVIDIA GPU, 64 GiB of host memory, and disk for one model at a time. Every configuration runs
in a child process; each result is written as soon as it is there.
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu import contenders, generated_models, predicted, report, solver_plans
from benchmarks.gpu.link import busy
from planner.errors import AtsplanError
from planner.machine.profile import Profile, from_text
from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from planner.plan.plan import Plan
from planner.workload import Workload
from runtime.bench.rivals import same_load
from runtime.child.ask import ask
from runtime.load.dry_run import to_json
from runtime.load.load_params import usable_cores

CHILD_S = 240
IDLE_THREADS = (4, 1)  # where the CPU computes nothing, more of them only disturb
Json = dict[str, Any]


@dataclass(slots=True)
class Bench:
    """One run of the benchmark: what to measure, and the results so far."""

    engine: Path
    out: Path
    ends: float  # time.monotonic() after which nothing new is started
    prompts: list[int]
    depths: list[int]
    threads: list[int]
    gen: int
    results: list[Json] = field(default_factory=list)
    header: Json = field(default_factory=dict)
    routing: Json = field(default_factory=dict)  # traced choices by layer
    profile: Profile | None = None
    ours: tuple[str, ...] = report.OURS

    def run(self, cell: Json, model: Path, one: contenders.Contender, **changes: Any) -> Json | None:
        """Measure one contender; None when it failed, which is recorded too."""
        cpu = one.name == "ngl" or any(buffer == "CPU" for _, buffer in one.spec.overrides)
        request = {
            "engine": str(self.engine),
            "model": str(model),
            "spec": to_json(one.spec),
            "threads": self.threads if cpu else list(IDLE_THREADS),
            "prompts": self.prompts,
            "depths": self.depths,
            "gen": self.gen,
            **changes,
        }
        row = {**cell, "contender": one.name, "setting": one.setting}
        started = time.monotonic()
        try:
            row |= ask("benchmarks.gpu.run", request, str(self.engine), CHILD_S)
        except AtsplanError as problem:
            row["failed"] = str(problem)
        row["wall_s"] = round(time.monotonic() - started, 1)
        if "choices" not in row:
            self.results.append(row)
            click.echo(report.line(row), err=True)
        self.save()
        return None if "failed" in row else row

    def repeat(self, cell: Json, one: contenders.Contender, twin: str) -> Json:
        """The measurement of `twin` in the same cell under another name."""
        keys = ("model", "routing", "residency")
        same = [r for r in self.results if all(r[k] == cell[k] for k in keys) and r["contender"] == twin]
        row = {**same[-1], "contender": one.name, "setting": one.setting, "same_load_as": twin}
        self.results.append(row)
        click.echo(f"{one.name} [{one.setting}] is {twin}", err=True)
        self.save()
        return row

    def save(self) -> None:
        """Write what is there."""
        self.out.write_text(json.dumps({**self.header, "runs": self.results}, indent=1))
        predicted.write_routing(self.out.with_suffix(".routing.csv"), self.routing)

    @property
    def over(self) -> bool:
        return time.monotonic() > self.ends


@click.command()
@click.option("--engine", type=click.Path(exists=True, path_type=Path), required=True, help="Build folder.")
@click.option(
    "--folder", type=click.Path(path_type=Path), default=Path("/tmp/atsplan-gpu"), show_default=True
)
@click.option("--models", default="qwen3moe", show_default=True)
@click.option("--routing", default="strong,moderate,uniform", show_default=True)
@click.option(
    "--residency", default="50,25,75,10", show_default=True, help="Percent of expert bytes in VRAM."
)
@click.option("--prompts", default="512", show_default=True)
@click.option("--depths", default="0", show_default=True)
@click.option("--threads", default="16,12", show_default=True, help="Tried where the CPU computes.")
@click.option("--gen", default=48, show_default=True)
@click.option("--rules", default="n-cpu-moe,fit,ngl", show_default=True)
@click.option(
    "--profile", type=click.Path(exists=True, path_type=Path), help="Of this machine: adds the solver."
)
@click.option("--ours", default=",".join(report.OURS), show_default=True, help="Which of our own.")
@click.option("--busy-link", is_flag=True, help="Other copies use the bus all the time.")
@click.option("--keep", is_flag=True, help="Leave the models in --folder.")
@click.option("--minutes", default=60.0, show_default=True, help="Start nothing new after this.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(
    engine: Path,
    folder: Path,
    models: str,
    routing: str,
    residency: str,
    prompts: str,
    depths: str,
    threads: str,
    gen: int,
    rules: str,
    profile: Path | None,
    ours: str,
    busy_link: bool,
    keep: bool,
    minutes: float,
    out: Path,
) -> None:
    """Measure and write JSON, then print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        engine,
        out,
        time.monotonic() + 60 * minutes,
        _numbers(prompts),
        _numbers(depths),
        _numbers(threads),
        gen,
    )
    bench.header = machine(engine)
    bench.ours = tuple(ours.split(","))
    bench.profile = from_text(profile.read_text(), str(profile)) if profile else None
    bench.header["busy_link"] = busy_link
    with busy(str(engine), contenders.GPU) if busy_link else nullcontext():
        for name in models.split(","):
            one_model(bench, name, folder, routing.split(","), _numbers(residency), rules.split(","))
            if not keep:
                generated_models.path(name, folder).unlink()
    click.echo(report.table(bench.results))


def one_model(
    bench: Bench, name: str, folder: Path, levels: list[str], residency: list[int], rules: list[str]
) -> None:
    """All routings of one model; a dense one has none."""
    model = generated_models.make(name, folder)
    dense = not generated_models.MODELS[name].n_expert
    for level in ["no"] if dense else levels:
        generated_models.set_routing(model, level)
        one_routing(bench, name, model, level, residency, rules)


def one_routing(
    bench: Bench, name: str, model: Path, level: str, residency: list[int], rules: list[str]
) -> None:
    """All budgets of one model with one routing."""
    inventory = read_model(model).inventory
    shape = contenders.shape_of(inventory)
    cells = max([*bench.prompts, *(d + len(bench.threads) * (bench.gen + 4) for d in bench.depths), 1024])
    work = Workload(n_ctx=cells + 256, prompt=bench.prompts[0], depth=bench.depths[0])
    whole = contenders.whole(shape, work)
    cell: Json = {"model": name, "routing": level, "residency": 100}
    full = bench.run(cell, model, whole)
    traced = {"choices": {}} if shape.dense else bench.run(cell, model, whole, coverage=2048)
    if full is None or traced is None:
        return
    if traced["choices"]:
        bench.routing[f"{name} {level}"] = traced["choices"]
    for percent in residency:
        if bench.over:
            click.echo("time is over", err=True)
            return
        budget = full["vram_bytes"] - int((1 - percent / 100) * shape.expert_bytes)
        cell |= {
            "residency": percent,
            "budget_bytes": budget,
            "coverage": coverage(traced["choices"], percent / 100),
            "whole_ns": full["decode"][0]["median_ns"],
        }
        rivals = stock(bench, cell, model, shape, work, full, rules)
        own(bench, cell, model, inventory, work, full, traced["choices"], rivals)


def own(
    bench: Bench,
    cell: Json,
    model: Path,
    inventory: Inventory,
    work: Workload,
    full: Json,
    choices: dict[str, list[int]],
    rivals: list[contenders.Contender],
) -> None:
    """Stripes of one width, and with a profile the solver's plans; logits are compared with whole VRAM's.

    A plan that loads what one of the `rivals` loads is that rule: another load of it would measure the noise.
    """
    entries: list[tuple[contenders.Contender, Plan | None]] = []
    if "stripes" in bench.ours and choices:
        one_width = contenders.stripes(contenders.shape_of(inventory), work, cell["residency"] / 100)
        entries.append((one_width, None))
    if bench.profile is not None:
        sizes = cell["budget_bytes"], full["vram_bytes"]
        entries += [
            solver_plans.solve(inventory, bench.profile, *sizes, work, choices, allowed)
            for allowed, name in ((True, "plan"), (False, "plan without stripes"))
            if name in bench.ours
        ]
    for one, plan in entries:
        twin = next(
            (r.name for r in rivals if same_load(inventory, r.spec, replace(one.spec, threads=0))), ""
        )
        found = bench.repeat(cell, one, twin) if twin else bench.run(cell, model, one)
        row = bench.results[-1]
        if found is not None and not twin:
            row["identical"] = found["digests"] == full["digests"]
        if plan is not None:
            row["predicted"] = {"tpot_ns": plan.predicted.tpot_ns, "prefill_ns": plan.predicted.prefill_ns}
            row["baselines"] = [b.model_dump() for b in plan.baselines]
        bench.save()


def stock(
    bench: Bench,
    cell: Json,
    model: Path,
    shape: contenders.Shape,
    work: Workload,
    full: Json,
    rules: list[str],
) -> list[contenders.Contender]:
    """The rules of llama.cpp under one budget, measured."""
    share, budget = cell["residency"] / 100, cell["budget_bytes"]
    found: list[contenders.Contender] = []
    if "n-cpu-moe" in rules:
        found.append(contenders.n_cpu_moe(shape, work, share))
    if "fit" in rules:
        margin = (full["free_bytes"] - budget) // 2**20
        try:
            found.append(contenders.fit(bench.engine, model, shape, work, margin))
        except (subprocess.SubprocessError, StopIteration) as problem:
            click.echo(f"fit: {problem}", err=True)
    if "ngl" in rules:
        fixed = full["vram_bytes"] - sum(shape.layer_bytes)
        found.append(contenders.n_gpu_layers(shape, work, budget, fixed))
    return [one for one in found if bench.run(cell, model, one) is not None]


def coverage(choices: dict[str, list[int]], share: float) -> float:
    """Share of traced choices that fall on the first `share` of the experts, over all layers.

    A dense model, with no choices, uses every row.
    """
    if not choices:
        return share
    hot = sum(sum(row[: int(share * len(row) + 1e-9)]) for row in choices.values())
    return round(hot / sum(sum(row) for row in choices.values()), 4)


def machine(engine: Path) -> Json:
    """What the results belong to."""
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max",
        "--format=csv,noheader",
    ]
    gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    cpu = next((s for s in Path("/proc/cpuinfo").read_text().splitlines() if s.startswith("model name")), "")
    from runtime.engine.libllama import Engine

    # The label of a build is its folder; version and commit are the library's own words.
    build = Engine.find(str(engine)).build
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": gpu,
        "cpu": cpu.partition(":")[2].strip(),
        "cores": usable_cores(),
        "system": platform.platform(terse=True),
        "engine": f"llama {build.version} ggml {build.commit}",
    }


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
