"""Experts that exceed the memory: every way to load them at equal VRAM, in paired rounds, cell by cell.

    python -m benchmarks.rounds.experts --engine FOLDER --journal results.jsonl --minutes 25
    python -m benchmarks.rounds.experts --journal results.jsonl --report

CELLS is the one list of what is compared. The journal is appended to; the same command goes on where a
visit ended. `--ours MODULE:FUNCTION` adds a contender: FUNCTION(Setup) returns the Live session to measure.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import contenders as rules
from benchmarks.rounds import visit
from benchmarks.rounds.consumer import CompetingStream, Pacer, conditions
from benchmarks.rounds.live import Live, Work
from benchmarks.rounds.paired import Bench, Cell, Contender, Journal, Session, cells, table
from planner.model.gguf.reader import read_model
from planner.model.inventory import Inventory
from planner.workload import Workload
from profiler.routed import model
from profiler.routed.presets import PRESETS
from runtime.engine.libllama import Engine

BASE: dict[str, Any] = {
    "preset": "qwen3-30b",
    "residency": 50,
    "cores": None,
    "link": None,
    "prompt": 512,
    "ubatch": 512,
    "depth": None,  # as the command line says
    "seqs": 1,  # that arrive together
}
_PRESETS = ("strong", "moderate", "uniform", "olmoe", "gpt-oss")
CELLS = cells(
    BASE,
    residency=[25, 10, 75],
    preset=_PRESETS,
    cores=[8, 4],
    link=[25.0, 12.0],
    prompt=[4096],
    depth=[8192],
    seqs=[4, 8],
)
# Each routing and shape with less, or more, in VRAM too.
CELLS += [Cell(f"preset={name},residency=25", {**BASE, "preset": name, "residency": 25}) for name in _PRESETS]
CELLS += [Cell("preset=strong,residency=75", {**BASE, "preset": "strong", "residency": 75})]
OVERHEAD_BYTES = 1200 * 2**20  # head, caches, buffers and a layer's copy for prompts, beside the layers
# Long prompts at the batch that suits them.
LONG = {**BASE, "prompt": 4096, "ubatch": 2048}
CELLS += [Cell("long", LONG), Cell("long,residency=25", {**LONG, "residency": 25})]
CELLS += [Cell("long,link=25.0", {**LONG, "link": 25.0})]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a contender is given to load."""

    engine: str
    path: Path
    inventory: Inventory
    cell: Cell
    device: str  # "": none, all on the CPU
    work: Work

    @property
    def share(self) -> float:
        """Of the expert bytes in VRAM."""
        return float(self.cell.factors["residency"]) / 100

    @property
    def workload(self) -> Workload:
        """Room for the prompt, and for the stream that is decoded."""
        work, prompt = self.work, int(self.cell.factors["prompt"])
        cells = max(prompt, work.depth + work.gen + 64)
        ubatch = int(self.cell.factors["ubatch"])
        return Workload(
            n_ctx=-(-cells // 256) * 256 * work.seqs,
            prompt=prompt,
            depth=work.depth,
            n_seq=work.seqs,
            n_ubatch=ubatch,
            n_batch=max(ubatch, 2048),
        )

    def live(self, one: rules.Contender, environment: Mapping[str, str] | None = None) -> Live:
        """A session of a rule, on this cell's device."""
        overrides = tuple((what, self.device if to == rules.GPU else to) for what, to in one.spec.overrides)
        spec = replace(one.spec, devices=(self.device,), overrides=overrides)
        if not self.device:
            spec = replace(spec, devices=(), tensor_split=(), n_gpu_layers=0)
        return Live(self.engine, self.path, spec, self.work, environment or {})


Maker = Callable[[Setup], Session]


def all_in_vram(setup: Setup) -> Session:
    """The bound: no rival, since it holds everything."""
    return setup.live(rules.whole(rules.shape_of(setup.inventory), setup.workload))


def n_cpu_moe(setup: Setup) -> Session:
    """The engine's rule for experts: those of the first layers on the CPU."""
    return setup.live(rules.n_cpu_moe(rules.shape_of(setup.inventory), setup.workload, setup.share))


def n_gpu_layers(setup: Setup) -> Session:
    """The engine's rule for layers: as many whole ones as the same bytes hold."""
    shape = rules.shape_of(setup.inventory)
    budget = sum(shape.layer_bytes) - int((1 - setup.share) * shape.expert_bytes)
    return setup.live(rules.n_gpu_layers(shape, setup.workload, budget, 0))


def fit(setup: Setup) -> Session:
    """What llama.cpp's own fitting chooses for the bytes that `n-cpu-moe` is given."""
    shape, own = rules.shape_of(setup.inventory), Engine.find(setup.engine).ggml
    free_bytes = own.device(setup.device).free_bytes
    held = sum(shape.layer_bytes) + OVERHEAD_BYTES - int((1 - setup.share) * shape.expert_bytes)
    margin_mib = max(free_bytes - held, 0) // 2**20
    return setup.live(rules.fit(Path(setup.engine), setup.path, shape, setup.workload, margin_mib))


RIVALS: Mapping[str, Maker] = {
    "all in VRAM": all_in_vram,
    "n-cpu-moe": n_cpu_moe,
    "ngl": n_gpu_layers,
    "fit": fit,
}


@dataclass(slots=True)
class Models:
    """Model files of presets, one for each size: a preset of equal size is made by rerouting."""

    folder: Path
    size: str
    _inventories: dict[Path, Inventory]

    def ready(self, name: str) -> tuple[Path, Inventory]:
        """The file of a preset, routing as the preset does, and its tensor table."""
        preset = PRESETS[name]
        spec, codes = preset.spec(self.size), preset.habits.n_codes
        path = self.folder / f"{spec.name or spec.arch}-{preset.habits.n_expert}-{codes}.gguf"
        if not path.exists():
            model.write(path, spec, preset.habits)
        elif model.habits_of(path) != preset.habits:
            model.reroute(path, preset.habits)
        if path not in self._inventories:
            self._inventories[path] = read_model(path).inventory
        return path, self._inventories[path]


def contenders(
    models: Models, engine: str, device: str, work: Work, makers: Mapping[str, Maker]
) -> list[Contender]:
    """Each maker as a contender of any cell."""

    def opened(make: Maker, cell: Cell) -> Session:
        path, inventory = models.ready(str(cell.factors["preset"]))
        prompt, seqs = (int(cell.factors[name]) for name in ("prompt", "seqs"))
        depth = work.depth if cell.factors["depth"] is None else int(cell.factors["depth"])
        own = replace(work, prompts=(prompt,), depth=depth, seqs=seqs)
        return make(Setup(engine, path, inventory, cell, device, own))

    return [Contender(name, lambda cell, make=make: opened(make, cell)) for name, make in makers.items()]  # type: ignore[misc]


def around(pacer: Pacer) -> Callable[[Cell], Any]:
    """A cell's cores and link, for all its contenders."""

    @contextmanager
    def within(cell: Cell) -> Iterator[Mapping[str, Any]]:
        with conditions(cell.factors["cores"], cell.factors["link"], pacer) as now:
            print(f"{cell.name}: {now.said()}", file=sys.stderr, flush=True)
            yield now.record()

    return within


def plugged(place: str) -> Maker:
    """A maker by its MODULE:FUNCTION."""
    module, _, name = place.partition(":")
    found: Maker = getattr(importlib.import_module(module), name)
    return found


def report(journal: Journal, ours: str) -> str:
    """The ratios of all cells, decode and prompts."""
    records = journal.records()
    measures = dict.fromkeys(key for r in records for key in r if key.endswith("_ns"))
    return table(records, ours, list(measures))


def _names(listed: str) -> list[str]:
    """Names of cells; those of several factors hold commas themselves."""
    return listed.split(";" if ";" in listed else ",")


def main() -> None:
    """Measure what the journal lacks, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--report", action="store_true", help="Only print what is there.")
    parser.add_argument("--engine", default="", help="Build folder; default: the embedded engine.")
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--link", default="cuda:0", help="cuda:N, or host.")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/atsplan-models"))
    parser.add_argument("--size", choices=("small", "large"), default="large")
    parser.add_argument("--cells", help="Some of the list, by name: one,another or one;with,factors")
    parser.add_argument("--contenders", default=",".join(RIVALS))
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=MODULE:FUNCTION")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gen", type=int, default=64)
    parser.add_argument("--depth", type=int, default=512)
    parser.add_argument("--minutes", type=float, default=25.0, help="Start no round after this.")
    args = parser.parse_args()
    journal = Journal(args.journal)
    makers = {name: RIVALS[name] for name in args.contenders.split(",")}
    makers |= {name: plugged(place) for name, _, place in (one.partition("=") for one in args.ours)}
    if not args.report:
        ends = time.monotonic() + 60 * args.minutes
        args.folder.mkdir(parents=True, exist_ok=True)
        journal.begin(visit.facts(args.engine, args.link))
        models = Models(args.folder, args.size, {})
        made = contenders(models, args.engine, args.device, Work((), args.depth, args.gen), makers)
        wanted = [cell for cell in CELLS if not args.cells or cell.name in _names(args.cells)]

        def tell(text: str) -> None:
            print(text, file=sys.stderr, flush=True)

        bench = Bench(journal, made, args.rounds, ends, tell=tell, within=around(CompetingStream(args.link)))
        tell("all measured" if bench.run(wanted) else "time is over: the same command goes on")
    print(report(journal, next(reversed(makers))))


if __name__ == "__main__":
    main()
