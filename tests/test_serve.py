"""atsplan serve: requests answered by a real llama-server as placed by the plan; ports, signals, drafts."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import ENVIRONMENT, ROOT, python
from rpc_servers import moved, rpc_serving
from small_plans import server_plan

from commands.shared.extra_models import draft_fields, missing_files, projector_fields
from planner.errors import AtsplanError
from planner.plan.load_spec import load_spec, map_devices
from planner.plan.plan import Plan, Projector, Speculation, to_text
from runtime.stripes import server as striped_server
from runtime.tools.llama_server import NoPort, Server, free_port, spelt
from runtime.tools.llama_server import serving as started
from runtime.worker import Ask, work

MODEL = ROOT / "tests" / "data" / "tiny-moe.gguf"  # trained: its tokens are text
PROMPT = list(range(40, 48))
HERE = ("--device-map", "Vulkan0=CPU")


@contextmanager
def serving(plan: Plan, folder: Path, engine: Path, *more: str) -> Iterator[tuple[str, Any]]:
    """A running `atsplan serve`; its URL and process. What it logged is in process.log afterwards."""
    path = folder / "plan.yaml"
    path.write_text(to_text(plan))
    port = str(free_port("127.0.0.1"))
    command = [sys.executable, "-m", "atsplan", "serve", str(MODEL), "--plan", str(path), "--port", port]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--engine", str(engine), "--threads", "1", "--no-warmup", *more],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=ENVIRONMENT,
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split(" ")[0]
            assert url, (folder / "log").read_text()
            yield url, process
        finally:
            process.terminate()
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()


def complete(url: str, n: int) -> Any:
    """The answer of /completion to the prompt, greedily."""
    asked = {"prompt": PROMPT, "n_predict": n, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/completion", json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def plan_on(device: str) -> Plan:
    """The experts on the CPU, everything else on a device."""
    return moved(server_plan(MODEL), "Vulkan0", device)


@pytest.mark.parametrize("where", ["CPU", "RPC"])
def test_a_request_is_answered_as_run_answers_it(where: str, computing_server: Path, tmp_path: Path) -> None:
    with rpc_serving(computing_server) as endpoint:
        plan = plan_on(f"RPC0[{endpoint}]" if where == "RPC" else "Vulkan0")
        here = HERE if where == "CPU" else ()
        with serving(plan, tmp_path, computing_server, *here) as (url, _):
            with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
                assert json.load(answer) == {"status": "ok"}
            served = complete(url, 6)
        spec = load_spec(plan)
        spec = replace(map_devices(spec, {"Vulkan0": "CPU"}) if here else spec, threads=1)
        asked = [Ask(tuple(PROMPT), 6, ignore_end=True)]
        alone = work(str(computing_server), None, MODEL, spec, asked).timings[0]
    assert served["tokens_evaluated"] == len(PROMPT)
    assert len(served["content"]) > 0
    assert served["tokens"] == list(alone.tokens)


def test_the_server_library_in_this_process_answers_as_the_program_does(computing_server: Path) -> None:
    words = ["-m", str(MODEL), "-ngl", "0", "-c", "256", "--threads", "1", "--no-warmup"]
    inside = Path(sys.executable), striped_server.command(computing_server, {}, words)
    answers = []
    for program, arguments in (inside, (computing_server / "llama-server", words)):
        with started(program, arguments) as server:
            answers.append(complete(server.url, 6)["tokens"])
    assert len(answers[0]) == 6 and answers[0] == answers[1]


def test_load_mode_is_spelt_as_the_build_knows_it(computing_server: Path) -> None:
    words = ["-m", "m.gguf", "--load-mode", "none", "--port", "1"]
    assert spelt(Path(sys.executable), words) == words
    assert spelt(computing_server / "llama-server", words) in (
        words,
        ["-m", "m.gguf", "--no-mmap", "--port", "1"],
    )


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ("--load-mode --cache-ram", ["--load-mode", "none", "--cache-ram", "5"]),
        ("--load-mode", ["--load-mode", "none"]),
        ("--mmap", ["--no-mmap"]),
    ],
)
def test_options_that_a_build_lacks_are_spelt_anew_or_left_out(
    tmp_path: Path, known: str, told: list[str]
) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\necho '{known}'\n")
    program.chmod(0o755)
    assert spelt(program, ["--load-mode", "none", "--cache-ram", "5"]) == told


def test_a_draft_and_what_more_is_given_reach_the_server(computing_server: Path, tmp_path: Path) -> None:
    more = ("--draft", str(MODEL), "--spec-draft-n-max", "3", "--alias", "tiny")
    with serving(plan_on("Vulkan0"), tmp_path, computing_server, *HERE, *more) as (url, _):
        complete(url, 9)
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            assert json.load(answer)["data"][0]["id"] == "tiny"
    said = re.findall(r"draft acceptance.*", (tmp_path / "log").read_text())
    assert said and "= 1.0000" in said[0]


def test_term_ends_it_and_its_server(computing_server: Path, tmp_path: Path) -> None:
    with serving(plan_on("Vulkan0"), tmp_path, computing_server, *HERE) as (url, process):
        tasks = Path(f"/proc/{process.pid}/task")
        children = [c for task in tasks.iterdir() for c in (task / "children").read_text().split()]
        assert children
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{child}").exists() for child in children):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=2)
    assert (tmp_path / "log").read_text().splitlines()[-1] == "atsplan: interrupted"


def test_a_port_in_use_is_one_line_before_anything_else(computing_server: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan_on("Vulkan0")))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = python("-m", "atsplan", "serve", MODEL, "--plan", path, "--port", port)
        with pytest.raises(NoPort):
            free_port("127.0.0.1", port)
    assert done.returncode == 3 and done.stdout == ""
    assert done.stderr == (
        f"atsplan: cannot listen on 127.0.0.1, port {port}: Address already in use: see --host and --port\n"
    )
    assert free_port("127.0.0.1", port) == port


def test_addresses() -> None:
    with pytest.raises(AtsplanError, match="cannot listen on no such host, port 0"):
        free_port("no such host")
    assert Server(None, "::1", 80).url == "http://[::1]:80"  # type: ignore[arg-type]
    assert Server(None, "127.0.0.1", 80).url == "http://127.0.0.1:80"  # type: ignore[arg-type]


def test_files_beside_the_model_must_be_there(computing_server: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan_on("Vulkan0")))
    for option in ("--mmproj", "--draft"):
        given = (*HERE, "--engine", computing_server, option, tmp_path / "none.gguf")
        port = free_port("127.0.0.1")
        done = python("-m", "atsplan", "serve", MODEL, "--plan", path, *given, "--port", port)
        assert (done.returncode, done.stderr) == (2, f"atsplan: {tmp_path / 'none.gguf'}: no such file\n")


def test_projector_and_draft_follow_the_plan_or_its_gpus() -> None:
    plan = plan_on("CUDA0")
    on_gpu, cpu = load_spec(plan), map_devices(load_spec(plan), {"CUDA0": "CPU"})
    assert projector_fields(plan, {}, on_gpu, "") == draft_fields(plan, {}, on_gpu, "") == {}
    assert projector_fields(plan, {}, on_gpu, "p") == {"mmproj": "p", "mmproj_on_cpu": False}
    # The tools would take any GPU there is.
    assert projector_fields(plan, {}, cpu, "p") == {"mmproj": "p", "mmproj_on_cpu": True}
    assert draft_fields(plan, {}, on_gpu, "d") == {"draft": "d", "draft_device": "CUDA0"}
    assert draft_fields(plan, {}, cpu, "d") == {"draft": "d", "draft_device": "CPU"}
    known = plan.model_copy(
        update={
            "projector": Projector(name="eyes", device="CPU"),
            "speculation": Speculation(draft="d", device="CUDA1", accept_ppm=600_000, tokens=3, draft_ns=1),
        }
    )
    assert projector_fields(known, {}, on_gpu, "p")["mmproj_on_cpu"] is True
    assert draft_fields(known, {}, on_gpu, "d") == {"draft": "d", "draft_device": "CUDA1", "draft_tokens": 3}
    assert draft_fields(known, {"CUDA1": "CPU"}, on_gpu, "d")["draft_device"] == "CPU"
    assert len(missing_files(known, False, False)) == 2 and missing_files(known, True, True) == []
    own = plan.model_copy(
        update={"speculation": Speculation(draft="", device="", accept_ppm=1, tokens=2, draft_ns=0)}
    )
    assert draft_fields(own, {}, on_gpu, "") == {"draft": "", "draft_device": "", "draft_tokens": 2}
