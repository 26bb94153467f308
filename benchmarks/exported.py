"""Exported commands held to their plans: a real llama-server started with exactly the line, by buffer.

    python -m benchmarks.exported --engine FOLDER [--only NAME] [-o TABLE.md]

Each case generates a small model, solves it for a machine of one GPU, exports the plan for the stock server,
starts that server with the exported words (and a log level), and compares what it prints of every buffer
with the plan: weights, KV caches, recurrent states, compute buffers, cells of a slot, and what host memory
holds. Software Vulkan does (GGML_VK_VISIBLE_DEVICES=0). Exit code 1 where a buffer differs by more than its
margin.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from click.testing import CliRunner

from benchmarks.projector import WINDOWS, Eyes, write_projector
from planner.constants import CELL_STEP, MIB
from planner.plan.plan import Plan, from_text
from profiler.synth.synth import SynthSpec, write
from runtime.tools.llama_server import find_program, serving

GPU = "Vulkan0"
PRINTED = 0.0051  # MiB: what printing two digits leaves unsaid of one buffer
_SIZE = re.compile(r"(\S+)\s+(model|KV|RS|compute|output) buffer size =\s*([0-9.]+) MiB")
_CONTEXT = re.compile(r"llama_context: n_ctx +=")
_EYES = re.compile(r"load_hparams: model size: +([0-9.]+) MiB")
_SEES = re.compile(r"reserve_compute_meta: +(\S+) compute buffer size = +([0-9.]+) MiB")
_SLOT = re.compile(r"new slot, n_ctx = ([0-9]+)")
_HOST = re.compile(r"CPU.*|.*_Host")


@dataclass(frozen=True, slots=True)
class Case:
    """A model, what is asked of it, and what runs beside it."""

    name: str
    spec: SynthSpec
    asked: tuple[str, ...] = ()
    draft: SynthSpec | None = None
    eyes: Eyes | None = None  # a vision projector beside it


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of buffer of one device: what the server printed, what the plan holds, in MiB."""

    case: str
    device: str
    item: str
    server: float
    plan: float
    less: float  # by how much the server may lie below the plan
    more: float  # and above it

    @property
    def held(self) -> bool:
        return self.plan - self.less <= self.server <= self.plan + self.more


@dataclass(slots=True)
class Said:
    """What a server printed of its buffers, in MiB; compute buffers by context, the last one counts."""

    sizes: dict[tuple[str, str], float] = field(default_factory=dict)
    buffers: dict[tuple[str, str], int] = field(default_factory=dict)
    compute: dict[tuple[int, str], float] = field(default_factory=dict)
    slots: list[int] = field(default_factory=list)
    eyes: dict[str, float] = field(default_factory=dict)  # of a projector: "" its weights, by buffer the rest


_WHOLE, _HALF = ("--no-cpu",), ("--pin", "blk.[01].*=cpu", "--pin", "blk.[23].*=gpu")
_EXPERTS = ("--pin", "*.experts=cpu", "--pin", "*.attention=gpu")
_EYES_ON_CPU = (*_WHOLE, "--mmproj-device", "cpu")
_Q8, _ALONE = ("--kv-type", "q8_0"), ("--machine", "cpu-only-ddr5")


def _model(arch: str, **more: int) -> SynthSpec:
    return SynthSpec(arch, **{"n_vocab": 4096, "n_embd": 256, **more})  # type: ignore[arg-type]


def _experts(arch: str, **more: int) -> SynthSpec:
    return _model(arch, **{"n_ff_exp": 256, "n_expert": 8, **more})


def _slots(count: int) -> tuple[str, ...]:
    return ("--workload", f"seqs={count}")


CASES = (
    Case("dense", _model("llama"), _WHOLE),
    Case("dense-half", _model("llama"), _HALF),
    Case("dense-q8-slots", _model("qwen3"), (*_WHOLE, *_Q8, *_slots(2))),
    Case("dense-cpu", _model("llama"), _ALONE),
    Case("tied", _model("gemma3", n_layers=6), _WHOLE),
    Case("sliding-half", _experts("gpt-oss"), _HALF),
    Case("shared-kv", _model("gemma4", n_layers=6), _WHOLE),
    Case("shared-kv-slots", _model("gemma4", n_layers=6), (*_WHOLE, *_slots(4))),
    Case("moe", _experts("qwen3moe"), _WHOLE),
    Case("moe-experts-cpu", _experts("qwen3moe"), _EXPERTS),
    Case("moe-cpu-slots", _experts("qwen3moe"), (*_ALONE, *_slots(2))),
    Case("latent", _experts("deepseek2"), _WHOLE),
    Case("gdn-slots", _experts("qwen35moe"), (*_WHOLE, *_slots(2))),
    Case("gdn-experts-cpu", _experts("qwen35moe"), _EXPERTS),
    Case("gdn-cpu", _model("qwen35"), _ALONE),
    Case("mamba", _experts("nemotron_h_moe"), _WHOLE),
    Case("mtp", _experts("qwen35moe", n_nextn=1), (*_WHOLE, *_Q8, "--mtp")),
    Case("mtp-slots", _model("qwen35", n_nextn=1), (*_WHOLE, "--mtp", *_slots(2))),
    Case("mtp-chosen", _model("qwen35", n_nextn=1), (*_WHOLE, "--mtp", "--draft-accept", "0.95")),
    Case("mtp-cpu", _model("qwen35", n_nextn=1), (*_ALONE, "--mtp")),
    Case("draft", _model("llama"), (*_WHOLE, *_Q8), _model("llama", n_layers=1)),
    Case("draft-gdn", _model("qwen35"), _WHOLE, _model("qwen35")),
    Case("projector", _experts("qwen3moe"), _EXPERTS, eyes=Eyes()),
    Case("projector-cpu", _model("llama"), _EYES_ON_CPU, eyes=Eyes()),
    Case(
        "projector-narrow", _model("gemma3", n_layers=6), (*_WHOLE, *_slots(3)), eyes=Eyes("qwen2vl_merger")
    ),
    Case("projector-windows-cpu", _model("qwen3"), _EYES_ON_CPU, eyes=Eyes(WINDOWS, layers=4)),
    Case(
        "projector-layers",
        _model("qwen3"),
        _WHOLE,
        eyes=Eyes("qwen3vl_merger", 256, layers=3, deepstack=(0,)),
    ),
    Case(
        "projector-layers-cpu",
        _model("qwen3"),
        _EYES_ON_CPU,
        eyes=Eyes("qwen3vl_merger", layers=4, deepstack=(0, 1, 2)),
    ),
)
SUBSET = (
    "projector",
    "projector-windows",
    "projector-layers-cpu",
    "mtp",
    "draft-gdn",
    "shared-kv",
)  # what every CI run tries


def rows_of(case: Case, engine: Path, folder: Path) -> list[Row]:
    """The rows of a case; the server is started and ended. Raises what the commands and it say."""
    model = write(folder / "model.gguf", case.spec)
    words = ["-c", "4096", "--ubatch", "128"]
    if _ALONE[0] not in case.asked:
        words += ["--profile", str(_machine(folder)), "--budget", "2000"]
    beside: list[str] = []
    if case.draft is not None:
        beside = ["--draft", str(write(folder / "draft.gguf", case.draft))]
    if case.eyes:
        beside += ["--mmproj", str(write_projector(folder / "eyes.gguf", case.spec.n_embd or 0, case.eyes))]
    path = folder / "plan.yaml"
    _run("solve", model, *words, *case.asked, *beside, "-o", path)
    plan = from_text(path.read_text(), str(path))
    line = _run("export", path, "--model", model, "--inventory", model, *beside)
    told = shlex.split(line, comments=True)
    assert told[0] == "llama-server", line
    log: list[str] = []
    # A log level is all that is added: it is what makes the server print its buffers.
    with serving(find_program(str(engine)), [*told[1:], "--verbosity", "4"], on_line=log.append) as server:
        server.get("/props")
    return [*_rows(case.name, plan, said_of(log))]


def said_of(log: Iterable[str]) -> Said:
    """What a server's log says of its buffers."""
    said, contexts = Said(), 0
    for line in log:
        contexts += bool(_CONTEXT.search(line))
        if slot := _SLOT.search(line):
            said.slots.append(int(slot[1]))
        if eyes := _EYES.search(line):
            said.eyes[""] = float(eyes[1])
        if sees := _SEES.search(line):
            said.eyes[sees[1]] = float(sees[2])
            continue
        if (found := _SIZE.search(line)) is None:
            continue
        device = "CPU" if _HOST.fullmatch(found[1]) else found[1]
        if found[2] == "compute":
            said.compute[contexts, found[1]] = float(found[3])  # reserved again: the new one replaces it
            continue
        key = (device, found[2])
        said.sizes[key] = said.sizes.get(key, 0.0) + float(found[3])
        said.buffers[key] = said.buffers.get(key, 0) + 1
    for (_, buffer), size in said.compute.items():
        key = ("CPU" if _HOST.fullmatch(buffer) else buffer, "compute")
        said.sizes[key] = said.sizes.get(key, 0.0) + size
        said.buffers[key] = said.buffers.get(key, 0) + 1
    return said


def _rows(case: str, plan: Plan, said: Said) -> Iterable[Row]:
    uses = {use.name: use for use in plan.devices}
    for device in dict.fromkeys((*uses, *(name for name, _ in said.sizes))):
        lines = {r.name: r.size_bytes for r in plan.constraints.reserves if r.device == device}
        use = uses.get(device)
        held = {
            # The server counts what it maps as well: tables of which a plan holds nothing.
            "model": (use.weights_bytes + (use.tables_bytes or 0) if use else 0) + lines.get("draft", 0),
            "KV": (use.kv_bytes if use else 0) + lines.get("draft KV", 0),
            "RS": (use.state_bytes if use else 0)
            + sum(lines.get(name, 0) for name in ("draft state", "draft roll-back", "MTP state")),
            "compute": (use.compute_bytes if use else 0)
            + lines.get("draft compute", 0)
            + lines.get("MTP compute", 0)
            + lines.get("MTP inputs", 0)
            + lines.get("draft inputs", 0),
        }
        held["model"] += lines.get("draft embedding", 0)
        for item, size in held.items():
            server, planned = said.sizes.get((device, item), 0.0), size / MIB
            if item == "compute" and device == "CPU":
                server += said.sizes.get((device, "output"), 0.0)
            if server or planned:
                less, more = _margin(item, device, planned, said.buffers.get((device, item), 1))
                yield Row(case, device, item, server, planned, less, more)
    yield from _seen(case, plan, said)
    cells = -(-(plan.workload.n_ctx // plan.workload.n_seq) // CELL_STEP) * CELL_STEP
    for slot in said.slots:
        yield Row(case, "", "cells of a slot", slot, cells, 0, 0)


def _seen(case: str, plan: Plan, said: Said) -> Iterable[Row]:
    """What a projector takes: its weights, the buffer of its device, and the picture in host memory."""
    for line in plan.constraints.reserves:
        planned = line.size_bytes / MIB
        if line.name == "projector":
            yield Row(case, line.device, line.name, said.eyes[""], planned, 0.02 * planned, PRINTED)
        if line.name in ("projector compute", "projector inputs"):
            server = said.eyes.get(line.device, 0.0)
            less = 0.6 * planned if line.device == GPU else PRINTED  # Vulkan orders operators anew
            yield Row(case, line.device, line.name, server, planned, less, PRINTED)


def _margin(item: str, device: str, planned: float, buffers: int) -> tuple[float, float]:
    """MiB that a server may lie below and above a plan.

    Caches and states are equal as printed. Weights of a GPU are rounded up by its alignment, which the plan
    counts. A compute buffer is an upper estimate; the host's is shared with what the plan does not divide.
    """
    printed = PRINTED * buffers
    match item:
        case "KV" | "RS":
            return printed, printed
        case "model":
            return printed + 0.02 * planned, printed + 0.002 * planned
    return 0.7 * planned, printed + 0.03 * planned + 4.0


def _machine(folder: Path) -> Path:
    """A profile of one GPU with the name that it has here."""
    from planner.machine import presets
    from planner.machine.profile import to_text

    path = folder / "machine.yaml"
    path.write_text(to_text(presets.load("rtx4090-ddr5")).replace("CUDA0", GPU))
    return path


def _run(*words: object) -> str:
    from atsplan import main

    done = CliRunner().invoke(main, [str(word) for word in words])
    if done.exit_code:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


def table(rows: Sequence[Row]) -> str:
    """Markdown: one line a buffer."""
    lines = ["| case | device | buffer | server MiB | plan MiB | |", "|---|---|---|---|---|---|"]
    for row in rows:
        digits = 0 if row.item.startswith("cells") else 2
        verdict = _verdict(row)
        lines.append(
            f"| {row.case} | {row.device} | {row.item} | {row.server:.{digits}f} | {row.plan:.{digits}f} "
            f"| {verdict} |"
        )
    return "\n".join(lines) + "\n"


def _verdict(row: Row) -> str:
    if not row.held:
        return "**differs**"
    if abs(row.server - row.plan) <= 2 * PRINTED:
        return "equal"
    return f"{100 * (row.plan - row.server) / max(row.server, PRINTED):+.0f} %"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", required=True, type=Path, help="folder of a llama-server")
    parser.add_argument("--only", action="append", default=[], help="a case, again for more")
    parser.add_argument("-o", "--output", type=Path, help="write the table here")
    asked = parser.parse_args(arguments)
    os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
    found: list[Row] = []
    failed: Mapping[str, str] = {}
    for case in CASES:
        if asked.only and case.name not in asked.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                found += rows_of(case, asked.engine, Path(folder))
            except Exception as problem:  # the others still count
                failed = {**failed, case.name: str(problem)}
        print(case.name, failed.get(case.name, "done"), file=sys.stderr)
    text = table(found)
    if asked.output:
        asked.output.write_text(text)
    else:
        print(text)
    return 1 if failed or not all(row.held for row in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
