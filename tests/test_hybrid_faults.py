"""Commands with experts in slots, ended in the middle: one line, the exit code, nothing left behind."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from engines import ENVIRONMENT, ROOT
from processes import alive, descendants, until
from sparse_model import write_sparse

from planner.errors import EngineProblem
from planner.model.gguf.reader import read_model
from planner.model.inventory import Tensor
from planner.plan.plan import from_text, to_text
from profiler.synth.synth import SynthSpec, write
from runtime.hybrid import build
from runtime.hybrid.device import HybridDevice
from runtime.session.hybrid import HybridSession
from runtime.tools.hybrid_script import settings_folder
from runtime.tools.llama_server import free_port

PINS = ("--pin", "blk.*.attention=gpu", "--pin", "blk.*.experts=hybrid")
ASKED = ("--machine", "rtx4090-ddr5", "--budget", "2000", "--ctx", "512", "--ubatch", "64")
GENERATION = ("-p", "a", "-n", "400", "--ignore-eos", "--raw")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and a plan with five slots in each layer."""
    build.library()  # its first build takes longer than what is waited for here
    folder = tmp_path_factory.mktemp("ended")
    spec = SynthSpec("qwen3moe", n_layers=2, n_embd=512, n_expert=16, n_ff_exp=1024, skew=1.0)
    model, path = write(folder / "moe.gguf", spec), folder / "plan.yaml"
    words = ["solve", model, *ASKED, "--workload", "prompt=64,gen=64", "--hybrid", *PINS, "-o", path]
    done = subprocess.run(command(*words), capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stderr
    text = path.read_text()
    for amount in {p.site.amount for p in from_text(text, str(path)).units if p.site.divided}:
        text = text.replace(f"hybrid:CUDA0:{amount}", "hybrid:CUDA0:5")
    path.write_text(to_text(from_text(text, str(path))))
    return model, path


def command(*words: object) -> list[str]:
    return [sys.executable, str(ROOT / "atsplan.py"), *map(str, words)]


def words_of(name: str, planned: tuple[Path, Path], node: Path, server: Path) -> list[str]:
    model, plan = planned
    there = (name, model, "--plan", plan, "--device-map", "CUDA0=Vulkan0")
    if name == "serve":
        port = free_port("127.0.0.1")
        return command(*there, "--engine", server, "--port", port, "--quiet", "--no-check")
    if name == "bench":
        return command(*there, "--engine", node, "--against", "all-cpu", "--prompts", 20)
    return command(*there, "--engine", node, *GENERATION)


def maps_of(pid: int) -> str:
    """Files that the programs below have mapped."""
    found = ""
    for child in descendants(pid):
        with suppress(OSError):
            found += Path(f"/proc/{child}/maps").read_text()
    return found


@pytest.mark.parametrize(
    ("name", "in_load", "number"),
    [
        ("run", True, signal.SIGINT),
        ("run", False, signal.SIGKILL),
        ("bench", True, signal.SIGTERM),
        ("serve", True, signal.SIGTERM),
        ("serve", False, signal.SIGKILL),
    ],
)
def test_an_end_in_the_middle(
    name: str,
    in_load: bool,
    number: signal.Signals,
    planned: tuple[Path, Path],
    node_engine: Path,
    vulkan_engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the model is loaded, and once it has said something or listens."""
    process = subprocess.Popen(
        words_of(name, planned, node_engine, vulkan_engine),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        assert until(lambda: "/hybrid" in maps_of(process.pid), 60) if in_load else process.stdout.read(1)
        children = descendants(process.pid)
        assert children and "/dev/shm/" not in maps_of(process.pid)  # memory that would outlive them
        process.send_signal(number)
        assert process.wait(30) == (-number if number is signal.SIGKILL else 130)
        said = process.stderr.read().decode().splitlines()
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()
    assert number is signal.SIGKILL or said[-1] == "atsplan: interrupted"
    assert until(lambda: not alive(children))
    # What was killed cannot clean up after itself: the next one does.
    assert len(list(tmp_path.iterdir())) == (1 if name == "serve" and number is signal.SIGKILL else 0)
    for left in tmp_path.iterdir():
        os.utime(left, (0, 0))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with settings_folder() as first, settings_folder() as second:
        assert {first, second} == set(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def test_host_memory_that_is_refused_is_one_line(
    planned: tuple[Path, Path], node_engine: Path, tmp_path: Path
) -> None:
    """Experts of 13 GB, none of which is on the disk, in programs that may have 8."""
    small = read_model(planned[0]).inventory
    experts = (t for t in small.tensors if "_exps" in t.name)
    larger = {t.name: t.model_copy(update=_times(t, 256)) for t in experts}
    tensors = tuple(larger.get(t.name, t) for t in small.tensors)
    length = {"expert_feed_forward_length": 256 * small.number("expert_feed_forward_length")}
    vast = small.model_copy(update={"tensors": tensors, "hparams": {**small.hparams, **length}})
    model, plan = write_sparse(tmp_path / "vast.gguf", vast), tmp_path / "plan.yaml"
    done = subprocess.run(
        command("solve", model, *ASKED[:2], "--budget", 22000, *ASKED[4:], "--hybrid", *PINS, "-o", plan),
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    there = ("--plan", plan, "--device-map", "CUDA0=Vulkan0", "--engine", node_engine)
    done = subprocess.run(
        command("run", model, *there, "-p", "a", "--no-check"),
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (8 * 2**30, 8 * 2**30)),
    )
    assert done.returncode == 3, done.stderr
    (line,) = done.stderr.splitlines()
    assert re.search(r"hybrid experts: no \d+ MiB of host memory for experts$", line)


def _times(tensor: Tensor, n: int) -> dict[str, object]:
    """The same with so many times the hidden values of each expert."""
    hidden = 0 if "down" in tensor.name else 1
    shape = tuple(size * n if i == hidden else size for i, size in enumerate(tensor.shape))
    return {"shape": shape, "size_bytes": n * tensor.size_bytes}


def test_a_server_that_is_told_to_divide_tensors_is_one_line(
    planned: tuple[Path, Path], vulkan_engine: Path
) -> None:
    words = [*words_of("serve", planned, vulkan_engine, vulkan_engine), "--", "-sm", "tensor"]
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.returncode == 3
    assert "--split-mode tensor divides tensors over devices" in done.stderr.splitlines()[-1]


@dataclass
class Stopped:
    """What a session asks of a device of its own."""

    faults: int
    fault: str


def test_a_fault_of_an_earlier_step_is_not_told_again() -> None:
    """One that comes in the step is, the same one a second time too."""
    session = HybridSession.__new__(HybridSession)
    device = Stopped(1, "expert 8 was chosen of 8")
    session.wrapped = {"CUDA0": cast(HybridDevice, device)}
    told = []
    for came in (0, 1, 1, 0):
        with pytest.raises(EngineProblem) as problem, session._named():
            device.faults += came
            raise EngineProblem("engine", "could not decode")
        told.append(problem.value.why)
    ours = f"hybrid experts: {device.fault}"
    assert told == ["could not decode", ours, ours, "could not decode"]
