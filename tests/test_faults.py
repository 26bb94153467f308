"""Engines, devices, hosts and people that go away: one line, the right exit code, nothing left behind."""

from __future__ import annotations

import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest
from click.testing import CliRunner
from engines import ENVIRONMENT, ROOT, python
from planning_models import real
from processes import alive, descendants, resident_bytes, until
from rpc_servers import moved, rpc_process, rpc_serving
from small_plans import cpu_plan, plan_for
from sparse_model import write_sparse

from atsplan import main
from planner.errors import EngineProblem
from planner.plan.load_spec import LoadSpec
from planner.plan.plan import Plan, to_text
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write
from runtime.child.ask import ask
from runtime.engine.libllama import Engine
from runtime.tools.llama_server import free_port
from runtime.worker import Ask, work

MIB = 2**20
LONG = Workload(n_ctx=8192, n_batch=64, n_ubatch=64)


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    return tmp_path / "plan.yaml"


def run_words(model: Path, plan: Path, *more: object) -> list[str]:
    """A generation that goes on for minutes."""
    words = ("run", model, "--plan", plan, "-p", "a", "-n", 8000, "--ignore-eos", "--raw", "--threads", 1)
    return [str(word) for word in (*words, *more)]


@contextmanager
def started(words: Sequence[str], **more: object) -> Iterator[subprocess.Popen[bytes]]:
    """A command that has begun to print; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "atsplan", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=ENVIRONMENT,
        **more,  # type: ignore[call-overload]
    )
    try:
        assert process.stdout is not None
        first = process.stdout.read(1)
        assert first, process.stderr and process.stderr.read().decode()
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def said(process: subprocess.Popen[bytes]) -> list[str]:
    """The rest of what a command says on stderr."""
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read()
    return process.stderr.read().decode().splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_generation_that_is_ended_leaves_no_process(
    dense_model: Path, plan_path: Path, number: signal.Signals
) -> None:
    plan_path.write_text(to_text(cpu_plan(dense_model, LONG)))
    with started(run_words(dense_model, plan_path)) as process:
        children = descendants(process.pid)
        assert children
        process.send_signal(number)
        assert process.wait(30) == 130
        assert said(process)[-1] == "atsplan: interrupted"
        assert until(lambda: not alive(children))


# A library that is interrupted while it is loaded, and says so in its own way, as extension modules do.
_AS_IT_LOADS = """
import os, signal, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "ortools":
            try:
                os.kill(os.getpid(), {interrupt}) if {interrupt} else None
                time.sleep(0.1)
            except KeyboardInterrupt:
                pass
            raise ImportError("initialization failed")
sys.meta_path.insert(0, Finder())
import atsplan
atsplan.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, 0])
def test_an_interrupt_that_a_library_makes_an_error_of_is_one(number: int) -> None:
    table = ROOT / "plans" / "inputs" / "Qwen3.5-0.8B-q8_0.inventory.yaml"
    words = ["fit", str(table), "--machine", "rtx4060-8gb-ddr5", "--no-levers"]
    code = _AS_IT_LOADS.replace("{interrupt}", str(int(number)))
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if number:
        assert (done.returncode, done.stdout) == (130, "")
        assert done.stderr == "atsplan: interrupted\n"
    else:  # what is wrong with an installation is not hidden
        assert done.returncode == 1 and "ImportError: initialization failed" in done.stderr


def test_a_closed_terminal_ends_everything_though_nothing_can_be_said(
    dense_model: Path, plan_path: Path
) -> None:
    plan_path.write_text(to_text(cpu_plan(dense_model, LONG)))
    with started(run_words(dense_model, plan_path)) as process:
        children = descendants(process.pid)
        assert process.stderr is not None and process.stdout is not None
        process.stderr.close()
        process.stdout.close()
        process.send_signal(signal.SIGHUP)
        process.wait(30)
        assert until(lambda: not alive(children))


def test_who_is_told_to_ignore_a_closed_terminal_goes_on(dense_model: Path, plan_path: Path) -> None:
    plan_path.write_text(to_text(cpu_plan(dense_model, LONG)))

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with started(run_words(dense_model, plan_path), preexec_fn=ignore) as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGHUP)
        assert process.stdout.read(200) and process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_server_that_is_ended_leaves_no_process(
    dense_model: Path, computing_server: Path, plan_path: Path, number: signal.Signals
) -> None:
    plan_path.write_text(to_text(cpu_plan(dense_model)))
    words = ["serve", str(dense_model), "--plan", str(plan_path), "--engine", str(computing_server)]
    with started([*words, "--port", str(free_port("127.0.0.1")), "--quiet"]) as process:
        children = descendants(process.pid)
        assert children
        process.send_signal(number)
        assert process.wait(60) == (-signal.SIGKILL if number is signal.SIGKILL else 130)
        assert until(lambda: not alive(children))


def remote_plan(model: Path, endpoint: str) -> Plan:
    return moved(plan_for(model, LONG), "CUDA0", f"RPC0[{endpoint}]")


def test_a_remote_host_that_dies_while_it_computes(
    moe_model: Path, computing_server: Path, plan_path: Path
) -> None:
    with rpc_process(computing_server) as (endpoint, host):
        plan_path.write_text(to_text(remote_plan(moe_model, endpoint)))
        with started(run_words(moe_model, plan_path, "--engine", computing_server)) as process:
            children = descendants(process.pid)
            host.kill()
            assert process.wait(60) == 3
            last = said(process)[-1]
            assert until(lambda: not alive(children))
    assert last.startswith(f"atsplan: engine {computing_server} (b")
    assert "the server of a remote device is gone (ended by SIGABRT)" in last


def test_a_remote_host_that_is_gone_since_the_plan(
    moe_model: Path, computing_server: Path, plan_path: Path
) -> None:
    with rpc_serving(computing_server) as endpoint:
        plan_path.write_text(to_text(remote_plan(moe_model, endpoint)))
    for command in ("run", "bench"):
        words = [command, str(moe_model), "--plan", str(plan_path), "--engine", str(computing_server)]
        done = CliRunner().invoke(main, [*words, *(("-p", "a") if command == "run" else ())])
        assert done.exit_code == 3, done.output
        assert f"{endpoint}: no RPC server answers" in done.stderr
        assert "start ggml-rpc-server there" in done.stderr and done.stderr.count("\n") == 1


def test_a_remote_host_that_dies_while_it_is_served(
    moe_model: Path, computing_server: Path, plan_path: Path
) -> None:
    with rpc_process(computing_server) as (endpoint, host):
        plan_path.write_text(to_text(remote_plan(moe_model, endpoint)))
        words = ["serve", str(moe_model), "--plan", str(plan_path), "--engine", str(computing_server)]
        port = free_port("127.0.0.1")
        with started([*words, "--port", str(port), "--quiet"]) as process:
            children = descendants(process.pid)
            host.kill()
            ask = Request(f"http://127.0.0.1:{port}/completion", b'{"prompt": "a", "n_predict": 4}')
            with pytest.raises(OSError):
                urlopen(ask, timeout=60).close()
            assert process.wait(60) == 3
            last = said(process)[-1]
            assert until(lambda: not alive(children))
    assert last.startswith("atsplan: engine llama-server: ")
    assert "the server of a remote device is gone (ended by SIGABRT)" in last


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_memory_of_a_remote_device_is_given_back(
    tmp_path: Path, computing_server: Path, plan_path: Path, number: signal.Signals
) -> None:
    """The device is a process of its own here, so its memory can be counted."""
    model = write(tmp_path / "large.gguf", SynthSpec("llama", n_embd=512, n_ff=2048, n_layers=6, type="q8_0"))
    with rpc_process(computing_server) as (endpoint, host):
        before = resident_bytes(host.pid)
        plan_path.write_text(to_text(remote_plan(model, endpoint)))
        with started(run_words(model, plan_path, "--engine", computing_server)) as process:
            held = resident_bytes(host.pid) - before
            process.send_signal(number)
            process.wait(30)
        assert held > 20 * MIB
        assert until(lambda: resident_bytes(host.pid) - before < held // 4)


def test_a_device_that_is_gone_since_the_plan(
    dense_model: Path, vulkan_engine: Path, plan_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_path.write_text(to_text(moved(plan_for(dense_model), "CUDA0", "Vulkan0")))
    words = ["run", str(dense_model), "--plan", str(plan_path), "--engine", str(vulkan_engine), "-p", "a"]
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "")
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 3, done.output
    assert "no device Vulkan0 on this machine (there is CPU)" in done.stderr
    assert done.stderr.count("\n") == 1


_DECODES = """
import resource
from pathlib import Path
from planner.plan.load_spec import LoadSpec
from planner.workload import Workload
from runtime.child.serve import serve
from runtime.engine.libllama import Engine
from runtime.session.session import Session

def work(request):
    spec = LoadSpec((), (), 0, (), Workload(n_ctx=2048, n_batch=1024, n_ubatch=1024), threads=1)
    with Session(Engine.find(), Path(request["model"]), spec) as session:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken, taken))
        session.generate([5] * 1000, 3, ignore_end=True)
    return {}

serve(work)
"""


def test_no_memory_at_the_first_decode(
    dense_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "decodes.py").write_text(_DECODES)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineProblem, match="no memory is left") as problem:
        ask("decodes", {"model": str(dense_model)}, "test")
    assert problem.value.exit_code == 3 and "\n" not in str(problem.value)


@contextmanager
def addresses(size_bytes: int) -> Iterator[None]:
    """Children started in the block get no more than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_no_memory_for_the_weights(tmp_path: Path) -> None:
    """18 GB of weights, read and not mapped, where 8 GiB may be had."""
    model = write_sparse(tmp_path / "m.gguf", real("Qwen3-30B-A3B-Q4_K_M"))
    spec = LoadSpec((), (), 0, (), LONG, use_mmap=False, use_extra_bufts=False, threads=1)
    with addresses(8 * 2**30), pytest.raises(EngineProblem, match="alloc") as problem:
        work(None, None, model, spec, [Ask((1,), 1)])
    assert problem.value.exit_code == 3 and "\n" not in str(problem.value)


def test_no_memory_for_this_program_is_the_machine_s_fault(tmp_path: Path, plan_path: Path) -> None:
    """The reader maps the whole file: 18 GB of addresses where there are 6 GiB."""
    model = write_sparse(tmp_path / "m.gguf", real("Qwen3-30B-A3B-Q4_K_M"))
    plan_path.write_text(to_text(cpu_plan(model)))
    with addresses(6 * 2**30):
        done = python("-m", "atsplan", "run", model, "--plan", plan_path, "-p", "a")
    assert done.returncode == 3, done.stderr
    assert done.stdout == "" and done.stderr == f"atsplan: {model}: Cannot allocate memory\n"


def test_python_without_memory_is_one_line_too(dense_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(path: Path) -> None:
        raise MemoryError

    monkeypatch.setattr("planner.model.gguf.reader.read_model", none_left)
    done = CliRunner().invoke(main, ["inventory", str(dense_model)])
    assert done.exit_code == 3 and done.stderr == "atsplan: no memory is left\n"


def test_a_model_changed_since_the_plan(moe_model: Path, tmp_path: Path, plan_path: Path) -> None:
    plan_path.write_text(to_text(cpu_plan(moe_model)))
    other = write(tmp_path / "other.gguf", SynthSpec("qwen3moe", types={"experts": "q5_K"}, skew=1.0))
    gone, folder = tmp_path / "gone.gguf", tmp_path / "folder"
    folder.mkdir()
    for model, part in ((other, "plan is for another model"), (gone, "gone.gguf"), (folder, "folder")):
        done = CliRunner().invoke(main, ["run", str(model), "--plan", str(plan_path), "-p", "a"])
        assert done.exit_code == 2, done.output
        assert done.stdout == "" and part in done.stderr and done.stderr.count("\n") == 1


def test_a_library_that_needs_a_newer_system(tmp_path: Path) -> None:
    """A real library with its demand on glibc raised, refused by the real loader."""
    library = next(Path(np.__file__).parent.rglob("_multiarray_umath*.so"))
    raised = tmp_path / "libllama.so"
    raised.write_bytes(newer_glibc(library.read_bytes()))
    with pytest.raises(EngineProblem, match=r"needs GLIBC_9\.\d+, this system has glibc") as problem:
        Engine.find(str(raised))
    assert "pip install xllamacpp" in str(problem.value) and "\n" not in str(problem.value)


def newer_glibc(data: bytes) -> bytes:
    """The ELF file with one of the versions of glibc it needs turned into one that is not there."""
    import re

    names = {m[0] for m in re.finditer(rb"GLIBC_2\.\d+(?=\0)", data)}
    name = max(names, key=lambda n: int(n.split(b".")[1]))
    wanted = name.replace(b"_2.", b"_9.")
    old, new = struct.pack("<I", elf_hash(name)), struct.pack("<I", elf_hash(wanted))
    assert data.count(old) >= 1
    return data.replace(name + b"\0", wanted + b"\0").replace(old, new)


def elf_hash(name: bytes) -> int:
    """The hash that version records hold beside the name (System V ABI)."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value
