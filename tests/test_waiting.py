"""What a person sees who waits: how far it is and what time is left, on a terminal, after two seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engines import ROOT
from hybrid_plans import slotted_plan
from processes import until
from small_plans import plan_for, server_plan
from terminals import on_a_terminal

from commands.shared import console
from planner.plan.plan import to_text
from planner.routing.formats import detect
from runtime.child.taken_in import taken_bytes, taking_in
from runtime.tools.llama_server import free_port

MODEL = ROOT / "tests" / "data" / "tiny-moe.gguf"
HERE = ("--device-map", "CUDA0=CPU")
MIB = 2**20
_SIMULATE = ("simulate", "--policy", "static", "--slots", "4")  # every policy and size takes a minute
_LEFT = r"\d:\d\d:\d\d|-:--:--"  # as a bar shows the time that is left


def routing(rows: int) -> str:
    """A routing trace of so many tokens of two layers."""
    head = "# trace: 1\n# experts: 8\n# source: one\nsource,phase,step,layer,ids\n"
    return head + "".join(f"0,decode,{n},{la},{n % 7} 7\n" for n in range(rows) for la in (0, 1))


FORMATS = {
    "trace.csv": routing(9000),
    "positions.csv": "".join(f"{n},{la},{n % 7},7,3\n" for n in range(9000) for la in (0, 1)),
    "demand.log": "".join(f"step={n} layer={la} ids={n % 7},7\n" for n in range(9000) for la in (0, 1)),
    "route.csv": "turn,phase,step,layer,slot,expert\n"
    + "".join(f"0,1,{n},0,{slot},{slot + n % 3}\n" for n in range(9000) for slot in (0, 4)),
    "counts.csv": "layer,expert,count\n" + "".join(f"{n % 9},{n % 8},1\n" for n in range(9000)),
    "route.jsonl": "".join(
        json.dumps({"type": "route", "req_id": 1, "token_idx": n, "layer": 0, "topk_ids": [n % 7, 7]}) + "\n"
        for n in range(9000)
    ),
    "topk.json": json.dumps(
        {
            "schema": "glm52-routing-trace-export/v2",
            "routing": {"n_expert_per_layer": 8, "k": 2},
            "conditional": {"prompts": [{"start_row": 0, "end_row": 9, "prefill_rows": 2}]},
            "layers": {str(la): {"executed_topk": [[1, 2]] * 9} for la in range(4)},
        }
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_reader_of_routing_says_how_far_it_is(name: str) -> None:
    told: list[float] = []
    found = detect.read(FORMATS[name].encode(), name, heard=told.append)
    assert found.heat.parts and len(told) >= 3
    assert told == sorted(told) and told[-1] == 1.0 and any(0 < share < 1 for share in told)


@pytest.mark.parametrize("words", [("heat", "import"), ("heat", "report"), _SIMULATE])
def test_a_large_file_of_routing_is_watched(words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(routing(60_000))
    seen = on_a_terminal(*words, path)
    assert seen.status == 0, seen.screen
    told = re.findall(rf"reading trace\.csv .*?(\d+) of (\d+) MiB.*?({_LEFT})", seen.screen)
    assert told and {int(whole) for _, whole, _ in told} == {round(path.stat().st_size / MIB)}
    assert "MiB" not in seen.screen.splitlines()[-1] and "reading" not in seen.out
    piped = subprocess.run(
        [sys.executable, "-m", "atsplan", *words, path], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "reading" not in piped.stdout + piped.stderr and "\x1b" not in piped.stdout + piped.stderr


def test_what_is_done_at_once_shows_no_bar(tmp_path: Path) -> None:
    """On a terminal, by the program's own patience: two seconds."""
    assert console._SHOWN_AFTER_S == 2.0
    path = tmp_path / "trace.csv"
    path.write_text(routing(100))
    seen = on_a_terminal("heat", "import", path, at_once=False)
    assert seen.status == 0 and "reading" not in seen.screen and "━" not in seen.screen


_TAKES = """
import mmap, os, sys
with open(sys.argv[1], "rb") as file:
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if sys.argv[2] == "mapped" else None
    print("open", flush=True)
    for at in range(0, os.path.getsize(sys.argv[1]), 1 << 20):
        sys.stdin.readline()
        sum(data[at : at + (1 << 20) : 4096]) if data else file.read(1 << 20)
        print(at, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell")
@pytest.mark.parametrize("how", ["mapped", "read"])
def test_what_a_process_takes_in_is_seen_from_outside(how: str, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(24 * MIB))
    told: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-c", _TAKES, path, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        with taking_in(child.pid, told.append, 0.01):
            for whole in (8, 24):
                while (told[-1] if told else 0) < (whole - 1) * MIB:
                    child.stdin.write(b"\n")
                    child.stdout.readline()
                    time.sleep(0.01)
                assert told[-1] < (whole + 4) * MIB  # what the kernel reads ahead into a mapping
        child.stdin.close()
    assert told == sorted(told) and taken_bytes(child.pid) is None
    many = len(told)
    assert not until(lambda: len(told) > many, 0.1), "nothing is told when the block is over"


def test_a_load_has_a_rate_and_then_gets_ready() -> None:
    """By figures of a process; the engine does not say how long it takes when it has all bytes."""
    assert console._loaded(MIB, 4 * MIB) == ("loading", MIB, 4 * MIB)
    assert console._loaded(4 * MIB, 4 * MIB) == console._loaded(5 * MIB, 4 * MIB) == ("getting ready", 0, 0)
    with console.progress() as bar:
        told = console.told_bytes(bar)
        for done in (1, 2):
            told("loading", done * MIB, 4 * MIB)
        (task,) = bar.tasks
        assert (task.description, task.completed, task.total) == ("loading", 2 * MIB, 4 * MIB)
        assert str(task.fields["rate"]).startswith("2 of 4 MiB") and task.visible
        told("getting ready", 0, 0)
        (task,) = bar.tasks
        assert (task.description, task.total, task.fields["rate"]) == ("getting ready", None, "")
        told("", 0, 0)
        assert not bar.tasks[0].visible


def test_a_race_shows_its_loads(moe_model: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(to_text(plan_for(moe_model)))
    short = ("--against", "all-cpu", "--rounds", 1, "--prompts", 8, "-n", 2, "--json")
    seen = on_a_terminal("bench", moe_model, "--plan", plan, *HERE, *short)
    assert seen.status == 0, seen.screen
    size = round(moe_model.stat().st_size / MIB)
    assert re.search(r"bench .*round 1 of 1", seen.screen)
    assert re.search(rf"loading .* of {size} MiB.*({_LEFT})", seen.screen), seen.screen
    assert json.loads(seen.out)["contenders"][0]["name"] == "plan"


def test_a_server_that_loads_is_watched(computing_server: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(to_text(server_plan(MODEL)))
    where = ("--device-map", "Vulkan0=CPU", "--engine", computing_server, "--port", free_port("127.0.0.1"))
    seen = on_a_terminal("serve", MODEL, "--plan", plan, *where, "--quiet", until="OpenAI-compatible")
    assert seen.status == 130, seen.screen
    size = round(MODEL.stat().st_size / MIB)
    assert re.search(rf"loading .*of {size} MiB|getting ready", seen.screen), seen.screen
    assert seen.screen.splitlines()[-1] == "atsplan: interrupted" and "loading" not in seen.out


def without_device(folder: Path) -> dict[str, str]:
    """Variables of who has no device for experts in slots yet; the compiler takes its time and fails."""
    compiler = folder / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\n/bin/sleep 0.5\necho error: none >&2\nexit 1\n")
    compiler.chmod(0o755)
    return {"PATH": str(compiler.parent), "XDG_CACHE_HOME": str(folder / "cache")}


def test_compiling_the_device_is_seen(tmp_path: Path) -> None:
    """What is wrong is said once, and not by the bar."""
    seen = on_a_terminal("doctor", "--native", more=without_device(tmp_path))
    assert seen.status == 3 and "compiling the device" in seen.screen, seen.screen
    assert seen.screen.count("the native library cannot be built") == 1 and seen.out == ""


def test_a_device_that_is_compiled_first_is_not_taken_for_a_slow_load(
    moe_model: Path, vulkan_engine: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(to_text(slotted_plan(moe_model, tmp_path, 4)))
    here = ("--device-map", "CUDA0=Vulkan0", "--engine", vulkan_engine, "--no-check")
    for words in (("run", "-p", "a", "-n", 2), ("serve", "--port", free_port("127.0.0.1"))):
        folder = tmp_path / str(words[0])
        folder.mkdir()
        load = (words[0], moe_model, "--plan", plan, *here, *words[1:])
        seen = on_a_terminal(*load, more=without_device(folder))
        assert seen.status == 3 and "compiling the device" in seen.screen, seen.screen
        assert "loading" not in seen.screen[seen.screen.index("compiling") :] and seen.out.strip() == ""


def test_a_plan_solved_again_for_stock_tools_is_watched(tmp_path: Path) -> None:
    plan = ROOT / "plans" / "Qwen3-30B-A3B-Q4_K_M+hybrid--rtx4060-8gb-ddr5.yaml"
    seen = on_a_terminal("export", plan, "--stock")
    assert seen.status == 0 and "llama-server" in seen.out
    assert re.search(rf"(what would fit|for stock tools) .*({_LEFT})", seen.screen), seen.screen
    assert "for stock tools" not in seen.out


def test_plans_priced_again_are_counted(tmp_path: Path) -> None:
    (tmp_path / "inputs").symlink_to(ROOT / "plans" / "inputs")
    for path in sorted((ROOT / "plans").glob("Qwen3-30B-A3B-Q4_K_M--rtx*.yaml"))[:2]:
        (tmp_path / path.name).write_text(path.read_text())
    seen = on_a_terminal("fmt", "--reprice", tmp_path)
    assert seen.status == 0 and re.search(rf"plans .*({_LEFT})", seen.screen), seen.screen
