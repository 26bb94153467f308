"""Writes generated models whose routing follows published figures, and times that.

    python -m benchmarks.inputs.write_presets --folder /tmp/models                     all presets, large
    python -m benchmarks.inputs.write_presets --folder /tmp/models strong --check     and simulate the figures
    python -m benchmarks.inputs.write_presets --reroute /tmp/models/strong.gguf moderate

One line a file: bytes, seconds, GB/s, and with --check every figure as asked and as found. Presets of equal
sizes (uniform, strong and moderate; 128 experts, 4096 codes) need one file: --reroute changes its routing in
place, in a second or two.
Needs numpy and gguf beside this project's own code.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from profiler.routed import fit, model, stream, trace_figures
from profiler.routed.presets import PRESETS, Preset


def written(name: str, folder: Path, size: str) -> Path:
    """Write a preset's model and say how long it took."""
    preset = PRESETS[name]
    start = time.perf_counter()
    path = model.write(folder / f"{name}.gguf", preset.spec(size), preset.habits)
    seconds = time.perf_counter() - start
    n_bytes = path.stat().st_size
    print(
        f"{path}: {n_bytes / 1e9:.2f} GB in {seconds:.1f} s, {n_bytes / seconds / 1e9:.2f} GB/s", flush=True
    )
    return path


def checked(preset: Preset) -> str:
    """The figures of a stream through the routers, each beside what was asked."""
    found = fit.simulate(preset.habits, preset.asked, seed=2).flat()
    return "  " + ", ".join(f"{k} {found[k]:.3f} (asked {v:.3f})" for k, v in preset.asked.flat().items())


def engine_says(preset: Preset, path: Path) -> str:
    """The same, from the experts that the engine chose."""
    from profiler.routed import traced  # all of the project, where writing needs little

    ids = stream.ids_of(preset.habits, fit.TOKENS, 2)
    chosen = traced.trace(path, ids, preset.habits.n_expert)
    topics = preset.habits.topic_of(ids - stream.FIRST_ID)
    found = trace_figures.measure(chosen, preset.habits.n_expert, preset.asked, topics).flat()
    worst = max(abs(found[key] - value) for key, value in preset.asked.flat().items())
    told = ", ".join(f"{k} {v:.3f} → {found[k]:.3f}" for k, v in preset.asked.flat().items())
    return f"  engine, asked → found: {told}; largest difference {worst:.3f}"


def main() -> None:
    """Write, or reroute."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("presets", nargs="*", help=f"default: all of {', '.join(PRESETS)}")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/atsplan-models"))
    parser.add_argument("--size", choices=("small", "large"), default="large")
    parser.add_argument("--check", action="store_true", help="Simulate the figures too.")
    parser.add_argument("--trace", action="store_true", help="Trace them with the engine (small models).")
    parser.add_argument("--delete", action="store_true", help="Remove each file once it is written.")
    parser.add_argument("--reroute", type=Path, help="Change this file instead of writing one.")
    args = parser.parse_args()
    unknown = [name for name in args.presets if name not in PRESETS]
    if unknown or (args.reroute and len(args.presets) != 1):
        sys.exit(f"{', '.join(unknown) or '--reroute'}: give one or more of {', '.join(PRESETS)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.presets or PRESETS:
        if args.reroute:
            start = time.perf_counter()
            model.reroute(args.reroute, PRESETS[name].habits)
            print(f"{args.reroute} routes as {name} after {time.perf_counter() - start:.1f} s", flush=True)
        else:
            path = written(name, args.folder, args.size)
        if args.trace:
            print(engine_says(PRESETS[name], args.reroute or path), flush=True)
        if args.delete and not args.reroute:
            path.unlink()
        if args.check:
            print(checked(PRESETS[name]), flush=True)


if __name__ == "__main__":
    main()
