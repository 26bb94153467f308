"""Rewriting and verifying against cp, sha256sum and mbolt, on one generated model.

    python benchmarks/rewrite.py --folder /tmp/bench --gib 2 [--mbolt VENV/bin/mbolt] [--json out.json]

Every contender runs in its own process, reads the same file with warm caches and writes to the same
folder; its private memory (RssAnon) is sampled while it runs, since the resident size of a program
that maps files is the size of the files. The page cache is flushed to the disk before each run. The
files are removed at the end. Needs three times the size on disk.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from hand_plans import hand_plan  # noqa: E402

from planner.model.gguf.reader import ModelFile, read_model  # noqa: E402
from planner.plan.plan import to_text  # noqa: E402
from profiler.synth.synth import SynthSpec, write  # noqa: E402

EXPERTS = 64
LAYER_BYTES = 177 << 20  # of the generated model
SAMPLE_S = 0.002
ATSPLAN = [sys.executable, str(ROOT / "atsplan.py")]


@dataclass(frozen=True)
class Contender:
    """A command and the files it makes."""

    name: str
    command: list[str]
    outputs: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One run: seconds of the process, seconds it reports itself, CPU seconds, peak private memory."""

    seconds: float
    reported: float
    cpu: float
    anon_mib: float


@dataclass(frozen=True)
class Result:
    """The best of several runs: on a shared machine the others measure the neighbours."""

    name: str
    seconds: float
    mib_per_s: int
    cpu_seconds: float  # of the process, user and system: what a busy machine changes least
    inner_mib_per_s: int  # by the time the program itself gives for its work, without its start; 0 unknown
    spread: float  # slowest over fastest
    anon_mib: int  # peak private memory of the process


def generate(folder: Path, gib: float) -> Path:
    """A qwen3moe model of random weights: 64 experts of q4_K a layer."""
    layers = max(1, round(gib * 2**30 / LAYER_BYTES))
    spec = SynthSpec(
        "qwen3moe",
        n_layers=layers,
        n_embd=2048,
        n_head=16,
        n_head_kv=4,
        head_dim=128,
        n_ff_exp=768,
        n_expert=EXPERTS,
        n_used=8,
        n_vocab=2048,
        types={"experts": "q4_K", "attention": "q8_0"},
    )
    return write(folder / "model.gguf", spec)


def write_plans(folder: Path, model: ModelFile) -> None:
    """Two plans, without and with another order of experts, and the same order for mbolt."""
    dice = random.Random(1)
    layers = model.inventory.number("block_count")
    orders = {n: tuple(dice.sample(range(EXPERTS), EXPERTS)) for n in range(layers)}
    (folder / "same.yaml").write_text(to_text(hand_plan(model)))
    (folder / "moved.yaml").write_text(to_text(hand_plan(model, experts=orders)))
    entries = [_mbolt_layer(layer, order) for layer, order in orders.items()]
    head: dict[str, Any] = {"n_layers": layers, "n_expert": EXPERTS, "n_tokens": 1000}
    head |= {"train_frac": 0.5, "train_tokens": 500}
    (folder / "perms.json").write_text(json.dumps({**head, "layers": entries}))


def _mbolt_layer(layer: int, order: Sequence[int]) -> dict[str, Any]:
    perms = {f"{kind}_perm": list(order) for kind in ("clique", "chain", "heat")}
    return {
        "layer": layer,
        **perms,
        "heat": [1.0] * EXPERTS,
        "heat_entropy_bits": 6.0,
        "max_entropy_bits": 6.0,
        "lift": {},
        "n_clusters": 0,
        "cluster_sizes": [],
        "top_cliques": [],
    }


def contenders(folder: Path, mbolt: str) -> Iterator[Contender]:
    """What is compared; the outputs are removed after each run."""
    model, copy, out = folder / "model.gguf", folder / "copy.gguf", folder / "out.gguf"
    rewrite = [*ATSPLAN, "rewrite", str(model), "-o", str(out), "--json", "--plan"]
    made = (out, folder / "out.gguf.manifest.yaml")
    yield Contender("cp", ["cp", str(model), str(copy)], (copy,))
    yield Contender("cp, then sync", _synced(["cp", str(model), str(copy)], copy), (copy,))
    for name in ("same", "moved"):
        label = "identity" if name == "same" else "experts moved"
        plan = str(folder / f"{name}.yaml")
        yield Contender(f"atsplan rewrite --no-verify, {label}", [*rewrite, plan, "--no-verify"], made)
        yield Contender(f"atsplan rewrite, {label}", [*rewrite, plan], made)
    if mbolt:
        command = [mbolt, str(model), str(folder / "perms.json"), "-o", str(out), "--layout", "chain"]
        yield Contender("mbolt 0.1.0 chain", command, (out,))
        yield Contender("mbolt 0.1.0 chain, then sync", _synced(command, out), (out,))
    yield Contender("sha256sum", ["sha256sum", str(model)])


def _synced(command: list[str], output: Path) -> list[str]:
    """The command, then its output flushed to the disk, as atsplan does."""
    return ["sh", "-c", f"{shlex.join(command)} && sync {shlex.quote(str(output))}"]


def verifier(folder: Path) -> Contender:
    """`atsplan verify` of an output that exists."""
    command = [*ATSPLAN, "verify", "--json", str(folder / "model.gguf"), str(folder / "kept.gguf")]
    return Contender("atsplan verify, experts moved", [*command, "--plan", str(folder / "moved.yaml")])


def measure(every: Sequence[Contender], size_bytes: int, runs: int) -> list[Result]:
    """Run all contenders in turn, several rounds."""
    samples: dict[str, list[Sample]] = {one.name: [] for one in every}
    for _ in range(runs):
        for one in every:
            _clean(one)
            os.sync()
            samples[one.name].append(_once(one))
            _clean(one)
    return [_best(one.name, samples[one.name], size_bytes / 2**20) for one in every]


def _clean(one: Contender) -> None:
    for path in one.outputs:
        path.unlink(missing_ok=True)


def _best(name: str, samples: list[Sample], mib: float) -> Result:
    seconds, work = min(s.seconds for s in samples), min(s.reported for s in samples)
    return Result(
        name=name,
        seconds=round(seconds, 3),
        mib_per_s=round(mib / seconds),
        cpu_seconds=round(min(s.cpu for s in samples), 3),
        inner_mib_per_s=round(mib / work) if work else 0,
        spread=round(max(s.seconds for s in samples) / seconds, 2),
        anon_mib=round(max(s.anon_mib for s in samples)),
    )


def _once(one: Contender) -> Sample:
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        started = time.monotonic()
        child = subprocess.Popen(one.command, stdout=said, stderr=errors)
        peak = 0
        while not (ended := os.wait4(child.pid, os.WNOHANG))[0]:
            peak = max(peak, _anon_kib(child.pid))
            time.sleep(SAMPLE_S)
        seconds = time.monotonic() - started
        child.returncode = os.waitstatus_to_exitcode(ended[1])
        for file in (said, errors):
            file.seek(0)
        if child.returncode:
            raise click.ClickException(f"{one.name}: {errors.read().decode()[-500:]}")
        cpu = ended[2].ru_utime + ended[2].ru_stime
        return Sample(seconds, _reported(said.read()), cpu, peak / 1024)


def _reported(text: bytes) -> float:
    try:
        found = json.loads(text)
    except ValueError:
        return 0.0
    return float(found.get("write_seconds", 0) + found.get("verify_seconds", 0) or found.get("seconds", 0))


def _anon_kib(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


@contextmanager
def _workplace(folder: Path) -> Iterator[Path]:
    inner = folder / "atsplan-bench-rewrite"
    inner.mkdir(parents=True)
    try:
        yield inner
    finally:
        shutil.rmtree(inner)


def _show(results: list[Result]) -> None:
    click.echo(f"{'':44}{'s':>8}{'MiB/s':>8}{'inner':>8}{'cpu s':>8}{'spread':>8}{'private MiB':>13}")
    for r in results:
        inner = r.inner_mib_per_s or ""
        click.echo(
            f"{r.name:44}{r.seconds:8.2f}{r.mib_per_s:8d}{inner:>8}{r.cpu_seconds:8.2f}{r.spread:8.2f}{r.anon_mib:13d}"
        )
    by_name = {r.name: r for r in results}
    copied, hashed = by_name["cp, then sync"].mib_per_s, by_name["sha256sum"].mib_per_s
    for label in ("identity", "experts moved"):
        ours = by_name[f"atsplan rewrite --no-verify, {label}"]
        click.echo(
            f"rewrite, {label}: {ours.mib_per_s / copied:.2f} of cp with sync, "
            f"{ours.inner_mib_per_s / copied:.2f} without the start of the program; "
            f"CPU time {ours.cpu_seconds / by_name['cp, then sync'].cpu_seconds:.2f} times cp's"
        )
    verified = by_name["atsplan verify, experts moved"]
    click.echo(
        f"verify: {verified.mib_per_s / hashed:.2f} of sha256sum, "
        f"{verified.inner_mib_per_s / hashed:.2f} without the start of the program; it reads both files"
    )


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Where to work.")
@click.option("--gib", type=float, default=2.0, help="Size of the generated model.")
@click.option("--runs", default=3)
@click.option("--mbolt", default="", help="The mbolt command, to compare with.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write the results here too.")
def main(folder: Path, gib: float, runs: int, mbolt: str, target: Path | None) -> None:
    """Measure, print, clean up."""
    with _workplace(folder) as here:
        model = generate(here, gib)
        size = model.stat().st_size
        write_plans(here, read_model(model))
        click.echo(f"model of {size / 2**20:.0f} MiB, {runs} runs each, load {os.getloadavg()[0]:.1f}")
        keep = [*ATSPLAN, "rewrite", str(model), "-o", str(here / "kept.gguf"), "--no-verify", "--plan"]
        subprocess.run([*keep, str(here / "moved.yaml")], check=True, stdout=subprocess.DEVNULL)
        results = measure([*contenders(here, mbolt), verifier(here)], size, runs)
    _show(results)
    if target is not None:
        target.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
