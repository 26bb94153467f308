"""Measure what benchmarks/predict/judge.py judges: a profile of this machine, and runs of many placements.

Needs nothing but the engine: both models are generated. Writes profile.yaml, one inventory a model and
runs.csv into a folder, which `python -m benchmarks.predict.judge FOLDER` evaluates on any machine:

    python -m benchmarks.predict.measure FOLDER --engine BUILD --gpu CUDA0
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from planner.machine import profile as profiles
from planner.model import inventory as inventories
from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from planner.workload import Workload
from profiler import runner, session
from profiler.operators.cases import cases_of
from profiler.runner import Length
from profiler.synth import synth
from profiler.whole_model.placements import Placement, calibrating, sensible, shuffled, spec_of

Row = dict[str, object]
COLUMNS = (
    "model",
    "placement",
    "kind",
    "layer_devices",
    "moved",
    "decode_ns",
    "spread_ns",
    "prefill_ns",
    "skipped",
)
MODELS = {
    "moe": synth.SynthSpec(
        "qwen3moe", n_layers=24, n_embd=2048, n_head=32, n_head_kv=4, head_dim=128, n_expert=64, n_used=8,
        n_ff_exp=768, n_vocab=32000, type="q4_K", types={"output": "q6_K"}, name="generated-moe-24x64",
    ),
    "dense": synth.SynthSpec(
        "llama", n_layers=28, n_embd=3072, n_head=24, n_head_kv=8, head_dim=128, n_ff=8192, n_vocab=32000,
        type="q4_K", types={"output": "q6_K"}, name="generated-dense-28",
    ),
}  # fmt: skip
# A software GPU is some thousand times slower: the same shapes of graph, smaller.
SMALL = {
    "moe": replace(
        MODELS["moe"], n_layers=6, n_embd=256, n_head=4, n_head_kv=2, head_dim=64, n_expert=16, n_used=4,
        n_ff_exp=256, n_vocab=2048, name="generated-moe-6x16",
    ),
    "dense": replace(
        MODELS["dense"], n_layers=8, n_embd=256, n_head=4, n_head_kv=2, head_dim=64, n_ff=1024, n_vocab=2048,
        name="generated-dense-8",
    ),
}  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--engine", help="llama.cpp library or build folder")
    parser.add_argument("--gpu", default="CUDA0", help="the device beside the CPU")
    parser.add_argument("--small", action="store_true", help="small models, for software GPUs")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which models")
    parser.add_argument("--random", type=int, default=14, help="random placements a model")
    parser.add_argument("--seconds", type=float, default=50, help="aim for the operators")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=24)
    parser.add_argument("--depth", type=int, default=4096, help="deepest attention that is profiled")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU [default: find the best]")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the random placements")
    parser.add_argument("--folder", type=Path, help="for the models [default: temporary]")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        specs = {name: (SMALL if options.small else MODELS)[name] for name in options.models}
        paths = {name: folder / f"{name}.gguf" for name in specs}
        for name, path in paths.items():
            if not path.exists():
                synth.write(path, specs[name])
        tables = {name: read_model(path).inventory for name, path in paths.items()}
        say("models written")
        threads = _profile(options, list(tables.values()))
        with (options.out / "runs.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            for name, path in paths.items():
                _runs(options, path, tables[name], threads, lambda row: (writer.writerow(row), file.flush()))


def _profile(options: argparse.Namespace, tables: list[Inventory]) -> int:
    """Profile the machine for the models; returns the thread count it found best."""
    request = session.Request(
        engine=options.engine,
        devices=(options.gpu,),
        threads=options.threads,
        seconds=options.seconds,
        strict=False,
        name="",
        command="benchmarks/predict/measure.py",
    )
    watch = session.Watcher(
        stage=say,
        begin=lambda total, known: say(f"{total} cases, {known} known"),
        case=lambda line: None,
        run=say,
        note=say,
    )
    n_ubatch = min(options.prompt, 512)
    cases = [c for table in tables for c in cases_of(table, n_ubatch, max_depth=options.depth)]
    measured = session.measure(request, lambda _: cases, watch)
    measured.journal.finish()
    made = measured.profile
    (options.out / "profile.yaml").write_text(profiles.to_text(made))
    for table in tables:
        (options.out / f"{table.name}.inventory.yaml").write_text(inventories.to_text(table))
    say(f"profile: {len(made.timings)} timings, warnings: {'; '.join(made.warnings) or 'none'}")
    return made.device("CPU").threads


def _runs(
    options: argparse.Namespace, path: Path, table: Inventory, threads: int, write: Callable[[Row], object]
) -> None:
    drawn = {
        "calibration": tuple(calibrating(table, (options.gpu,), brief=False)),
        "sensible": sensible(table, options.gpu),
        "random": shuffled(table, options.gpu, options.random, options.seed),
    }
    kinds = {f"{kind}: {p.name}": (kind, p) for kind, group in drawn.items() for p in group}
    workload = workload_of(options.prompt, options.gen)
    specs = {key: spec_of(table, placement, workload, threads) for key, (_, placement) in kinds.items()}
    length = Length(options.prompt, options.gen, options.repeats)

    def keep(line: Row) -> None:
        say(f"{table.name}: {line['key']}: {line.get('skipped') or ''}")
        write(_row(table.name, *kinds[str(line["key"])], line))

    runner.whole_model(path, specs, options.engine, length, keep)


def workload_of(prompt: int, gen: int) -> Workload:
    """The workload that the runs measure: the depth is that of the middle token."""
    n_ubatch = min(prompt, 512)
    depth = prompt + gen // 2
    return Workload(n_ctx=prompt + 256, depth=depth, prompt=prompt, gen=gen, n_ubatch=n_ubatch)


def _row(model: str, kind: str, placement: Placement, line: Row) -> Row:
    row: Row = {
        "model": model,
        "placement": placement.name,
        "kind": kind,
        "layer_devices": " ".join(placement.layer_devices),
        "moved": " ".join(placement.moved),
        "skipped": line.get("skipped", ""),
    }
    times = line.get("decode_ns")
    prefill = line.get("prefill_ns")
    if isinstance(times, list) and isinstance(prefill, list):
        quarters = statistics.quantiles(times, n=4)
        row["decode_ns"] = round(statistics.median(times))
        row["spread_ns"] = round(quarters[2] - quarters[0])
        row["prefill_ns"] = round(statistics.median(prefill))
    return row


def say(text: str) -> None:
    """A message with the time."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
