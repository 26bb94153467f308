"""Plans with experts in slots, loaded by the commands through the native device on a software GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from functools import cache
from pathlib import Path

import pytest
from engines import ENVIRONMENT
from processes import until

from planner.plan.load_spec import Unloadable, load_spec
from planner.plan.plan import Plan, from_text, to_text
from planner.site import SiteKind
from profiler.synth.synth import SynthSpec, write
from runtime.hybrid.device import read_blocks
from runtime.load.dry_run import from_json, to_json
from runtime.tools.llama_server import free_port

EXPERTS = 16
ROOT = Path(__file__).resolve().parents[1]
PINS = ("--pin", "blk.*.attention=gpu")
ASKED = ("--machine", "rtx4090-ddr5", "--budget", "2000", "--ctx", "512", "--ubatch", "64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # As small as its experts can be: the software GPU computes, and compiles, by the size of a matrix.
    spec = SynthSpec("qwen3moe", n_layers=3, n_embd=256, n_expert=EXPERTS, n_ff_exp=256, skew=1.0)
    return write(tmp_path_factory.mktemp("slots") / "moe.gguf", spec)


def atsplan(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "atsplan.py"), *map(str, words)],
        capture_output=True,
        text=True,
        errors="replace",
        env=ENVIRONMENT,
        timeout=300,
        check=False,
    )


@cache
def solved(model: Path, experts: str) -> str:
    """The text of the planner's own plan with all experts at a kind of site."""
    use = ("--workload", "prompt=64,gen=64", "--hybrid", *PINS, "--pin", f"blk.*.experts={experts}")
    path = model.with_name(f"{experts}.yaml")
    done = atsplan("solve", model, *ASKED, *use, "-o", path)
    assert done.returncode == 0, done.stderr
    return path.read_text()


def planned(model: Path, path: Path, experts: str) -> Plan:
    """That plan, written to `path`."""
    path.write_text(solved(model, experts))
    return from_text(path.read_text(), str(path))


def with_slots(plan: Plan, count: int) -> Plan:
    """The same with fewer slots in every layer."""
    text = to_text(plan)
    for amount in {p.site.amount for p in plan.units if p.site.kind is SiteKind.HYBRID}:
        text = text.replace(f"hybrid:CUDA0:{amount}", f"hybrid:CUDA0:{count}")
    return from_text(text, "plan.yaml")


def test_a_planned_model_runs_with_the_tokens_of_the_device_alone(
    model: Path, node_engine: Path, tmp_path: Path
) -> None:
    slots, whole = tmp_path / "slots.yaml", tmp_path / "whole.yaml"
    plan = planned(model, slots, "hybrid")
    assert sum(p.site.kind is SiteKind.HYBRID for p in plan.units) == 3
    slots.write_text(to_text(with_slots(plan, 5)))
    planned(model, whole, "gpu")
    there = ("--device-map", "CUDA0=Vulkan0", "--engine", node_engine, "-p", "Once upon a time", "-n", "12")
    answers = [atsplan("run", model, "--plan", path, *there) for path in (slots, whole)]
    for done in answers:
        assert done.returncode == 0, done.stderr
    assert answers[0].stdout == answers[1].stdout


def test_a_rewritten_file_has_the_same_experts_in_its_slots(
    model: Path, node_engine: Path, tmp_path: Path
) -> None:
    """Hot experts lie first there; slots are named by original ids, and the load proves them."""
    path, out = tmp_path / "plan.yaml", tmp_path / "out.gguf"
    plan = with_slots(planned(model, path, "hybrid"), 5)
    turned = tuple(e.model_copy(update={"order": e.order[7:] + e.order[:7]}) for e in plan.experts)
    path.write_text(to_text(plan.model_copy(update={"experts": turned})))
    assert atsplan("rewrite", model, "--plan", path, "-o", out).returncode == 0
    there = ("--device-map", "CUDA0=Vulkan0", "--engine", node_engine, "-p", "Once upon a time", "-n", "12")
    first, second = (atsplan("run", file, "--plan", path, *there) for file in (model, out))
    assert first.returncode == second.returncode == 0, (first.stderr, second.stderr)
    assert first.stdout == second.stdout


def test_slots_without_an_order_are_not_loaded(model: Path, tmp_path: Path) -> None:
    plan = planned(model, tmp_path / "plan.yaml", "hybrid")
    with pytest.raises(Unloadable, match="slots and no order"):
        load_spec(plan.model_copy(update={"experts": ()}))


def test_the_experts_in_slots_travel_to_the_child(model: Path, tmp_path: Path) -> None:
    spec = load_spec(planned(model, tmp_path / "plan.yaml", "hybrid"))
    assert [(layer, n) for layer, n, _ in spec.residents] == [(layer, EXPERTS) for layer in range(3)]
    assert from_json(to_json(spec)) == spec


SHIM = """#!{python}
import os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from runtime.tools.llama_server import spelt
program = Path({program!r})
os.execv(program, [str(program), *spelt(program, sys.argv[1:]), "--port", {port!r}])
"""


def test_the_exported_script_starts_an_unpatched_server_with_these_slots(
    model: Path, vulkan_engine: Path, tmp_path: Path
) -> None:
    plan = with_slots(planned(model, tmp_path / "plan.yaml", "hybrid"), 5)
    (tmp_path / "plan.yaml").write_text(to_text(plan))
    report, port = tmp_path / "report.json", str(free_port("127.0.0.1"))
    mapped = ("--device-map", "CUDA0=Vulkan0", "--model", model, "--threads", "2")
    done = atsplan("export", tmp_path / "plan.yaml", *mapped)
    assert done.returncode == 0, done.stderr
    assert "--device HYBRID0" in done.stdout and "=HYBRID0_EXPERTS" in done.stdout
    script = done.stdout.replace("device Vulkan0\n", f"device Vulkan0\nreport {report}\n")
    shims = {
        "llama-server": SHIM.format(
            python=sys.executable, root=str(ROOT), program=str(vulkan_engine / "llama-server"), port=port
        ),
        "atsplan": f'#!/bin/sh\nexec {sys.executable} {ROOT / "atsplan.py"} "$@"\n',
    }
    for name, text in shims.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    paths = {"PATH": f"{tmp_path}:{ENVIRONMENT['PATH']}", "LD_LIBRARY_PATH": str(vulkan_engine)}
    server = subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path, env={**ENVIRONMENT, **paths}, start_new_session=True
    )
    try:
        assert until(lambda: server.poll() is not None or healthy(port), 240)
        asked = json.dumps({"prompt": [5, 9, 14], "n_predict": 4, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/completion", asked, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["tokens_predicted"] == 4
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
    held = {block.block: set(block.resident) for block in read_blocks(report.read_text())}
    assert held == {e.layer: set(e.order[:5]) for e in plan.experts}


def healthy(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_other_formats_and_stock_get_the_nearest_placement(model: Path, tmp_path: Path) -> None:
    planned(model, tmp_path / "plan.yaml", "hybrid")
    for words in (("--stock",), ("--format", "json")):
        done = atsplan("export", tmp_path / "plan.yaml", "--model", model, "--inventory", model, *words)
        assert done.returncode == 0 and "HYBRID" not in done.stdout, done.stderr
