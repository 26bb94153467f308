"""Two hosts over llama.cpp's RPC: the guide's commands, true times, and a host that goes away.

The hosts are network namespaces with servers of their own where this may make them (root and iproute2),
else further addresses of the loopback device: no network between, everything else the same.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from engines import ENVIRONMENT, ROOT, python
from hand_plans import with_uses
from processes import alive, descendants, until
from rpc_servers import moved, rpc_process
from small_plans import plan_for

from planner.model.gguf.reader import read_model
from planner.model.units import Kind, units_of
from planner.plan.overrides import overrides_of
from planner.plan.plan import LayerRange, Plan, from_text, to_text
from planner.site import Site
from planner.workload import Workload

GUIDE = ROOT / "docs" / "guides" / "two-hosts.md"
LONG = Workload(n_ctx=8192, n_batch=64, n_ubatch=64)
HOSTS = 2


@dataclass(frozen=True, slots=True)
class Host:
    """An address with a server's device behind it, and the server."""

    endpoint: str
    server: subprocess.Popen[bytes]


def _ip(*words: object) -> bool:
    tool = shutil.which("ip")
    done = tool and subprocess.run([tool, *map(str, words)], capture_output=True, check=False).returncode == 0
    return bool(done)


@contextmanager
def _namespace(number: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Address of a host and how to start something there: a namespace at the end of a cable of its own."""
    name, net = f"atsplan-{os.getpid()}-{number}", f"10.201.{(os.getpid() * HOSTS + number) % 250}"
    cable = f"ats{os.getpid() % 10**6}n{number}"
    made = (
        _ip("netns", "add", name)
        and _ip("link", "add", cable, "type", "veth", "peer", "name", "host", "netns", name)
        and _ip("addr", "add", f"{net}.1/24", "dev", cable)
        and _ip("link", "set", cable, "up")
        and _ip("-n", name, "addr", "add", f"{net}.2/24", "dev", "host")
        and _ip("-n", name, "link", "set", "host", "up")
    )
    try:
        if made:
            yield f"{net}.2", ("ip", "netns", "exec", name)
        else:
            yield f"127.0.0.{2 + number}", ()
    finally:
        _ip("link", "del", cable)
        _ip("netns", "del", name)


@pytest.fixture
def hosts(computing_server: Path) -> Iterator[list[Host]]:
    """Two hosts, each with a server."""
    with ExitStack() as stack:
        found = []
        for number in range(HOSTS):
            address, within = stack.enter_context(_namespace(number))
            endpoint, server = stack.enter_context(rpc_process(computing_server, 1, address, within))
            found.append(Host(endpoint, server))
        yield found


def over(model: Path, hosts: list[Host]) -> Plan:
    """A plan by hand: the first two layers on one host, the rest on the other, the embedding here."""
    file, plan = read_model(model), plan_for(model, LONG)
    units = [u for u in units_of(file.inventory).units if u.kind is not Kind.FOREIGN]
    blocks = max(u.layer or 0 for u in units) + 1
    homes = ["CUDA0"] * 2 + ["CUDA1"] * (blocks - 1)
    names = [f"RPC{n}[{host.endpoint}]" for n, host in enumerate(hosts)]
    placed = tuple(
        line.model_copy(update={"site": Site.on(homes[-1 if unit.layer is None else unit.layer])})
        if line.site == Site.on("CUDA0")
        else line
        for line, unit in zip(plan.units, units, strict=True)
    )
    ranges = (LayerRange(first=0, last=1, device="CUDA0"), LayerRange(first=2, last=blocks, device="CUDA1"))
    overrides = overrides_of(file.inventory, units, [line.site for line in placed], homes)
    changed = {"units": placed, "layers": ranges, "overrides": overrides, "devices": ()}
    made = with_uses(plan.model_copy(update=changed), file.inventory)
    return moved(moved(made, "CUDA0", names[0]), "CUDA1", names[1])


def test_a_host_that_is_cut_off_in_the_middle_is_one_line(
    hosts: list[Host], dense_model: Path, computing_server: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(over(dense_model, hosts)))
    words = ["run", dense_model, "--plan", path, "--engine", computing_server]
    forever = ["-p", "a", "-n", 8000, "--ignore-eos", "--raw", "--threads", 1]
    command = [sys.executable, "-m", "atsplan", *map(str, [*words, *forever])]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.read(1), process.stderr.read()
        children = descendants(process.pid)
        hosts[1].server.kill()
        told = process.stderr.read().decode().splitlines()
        assert process.wait(60) == 3
    assert "the server of a remote device is gone" in told[-1] and told[-1].startswith("atsplan: engine ")
    assert until(lambda: not alive(children)) and hosts[0].server.poll() is None
    assert [each.name for each in tmp_path.iterdir()] == ["plan.yaml"]
    again = python("-m", "atsplan", *words, "-p", "a", "-n", 1)
    assert again.returncode == 3 and again.stderr.count("\n") == 1
    assert f"{hosts[1].endpoint}: no RPC server answers" in again.stderr


_TIMES = """
import sys
from runtime.engine.libllama import Engine
from runtime.engine import rpc
from planner.machine.op_time import Case
from profiler.operators import device_figures, measure
engine, name = Engine.find(sys.argv[1]), sys.argv[2]
rpc.register(engine, [name])
ggml, case = engine.ggml, Case("MUL_MAT", "q4_K", (2048, 2048), 32)
for device in measure.wanted(ggml, [name]):
    place = next(p for p in measure.places(ggml, [device]) if p.device == ggml.plan_name(device))
    with device_figures.bench(ggml, device, place, 1, 16 << 20, 0) as at:
        print(device.kind, at.measure(case, 0.05).best_ns)
"""


def test_times_of_a_remote_device_last_until_it_has_computed(
    hosts: list[Host], computing_server: Path
) -> None:
    """The server takes a graph and is asked for the result: sending alone would take a thousandth."""
    done = python("-c", _TIMES, computing_server, f"RPC0[{hosts[0].endpoint}]")
    times = {kind: int(ns) for kind, ns in map(str.split, done.stdout.splitlines())}
    assert len(times) == 2, done.stderr
    assert max(times.values()) < 50 * min(times.values()), times


def guide_commands(engine: Path, endpoint: str) -> list[list[str]]:
    """The commands of the guide for two hosts, for this engine and that server."""
    (block,) = re.findall(r"^```sh\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    text = block.replace("10.0.0.2:50052", endpoint).replace("./llama.cpp/build/bin", str(engine))
    return [shlex.split(line) for line in text.splitlines() if line.startswith("atsplan ")]


def test_the_guide_s_commands_run_between_two_hosts(
    hosts: list[Host], dense_model: Path, computing_server: Path, tmp_path: Path
) -> None:
    """As they stand there, the profile in short; the plan may use remote memory only, or it would not."""
    (tmp_path / "model.gguf").symlink_to(dense_model)
    short = {
        "profile": ["--seconds", "1", "--no-calibration"],
        "solve": ["--no-cpu"],
        "run": ["-p", "a", "-n", "4"],
    }
    commands = guide_commands(computing_server, hosts[0].endpoint)
    assert [words[1] for words in commands] == ["profile", "solve", "run"]
    for words in commands:
        line = [sys.executable, "-m", "atsplan", *words[1:], *short[words[1]]]
        environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    plan = from_text((tmp_path / "plan.yaml").read_text(), "plan.yaml")
    assert {f"RPC0[{hosts[0].endpoint}]"} == {each.device for each in plan.layers}
    assert plan.machine.measured and "decode: 4 tokens" in done.stderr
