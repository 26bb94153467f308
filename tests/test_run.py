"""atsplan run: plans for another machine run here; what goes wrong is one line with its exit code."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from engines import ROOT
from small_plans import HERE, plan_for
from terminals import on_a_terminal

from atsplan import main
from planner.plan.override_match import placed
from planner.plan.plan import from_text, to_text
from planner.workload import Workload

Run = Callable[..., Result]


@pytest.fixture
def plan_path(moe_model: Path, tmp_path: Path) -> Path:
    """A plan file for the small mixture of experts."""
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan_for(moe_model)))
    return path


@pytest.fixture
def run() -> Run:
    """Call `atsplan run` in this process."""

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(main, ["run", *map(str, arguments), "--threads", "1"])

    return call


def fails(result: Result, code: int, *parts: str) -> None:
    """The command ended with this code and one line that has these parts."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("atsplan:")]
    assert len(lines) == 1
    for part in parts:
        assert part in lines[0]


def test_text_on_stdout_and_speed_beside_the_prediction_on_stderr(
    run: Run, moe_model: Path, plan_path: Path
) -> None:
    result = run(moe_model, "--plan", plan_path, *HERE, "-p", "The cat", "-n", 6, "--ignore-eos", "--raw")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("\n")
    assert "tokens/s; the plan's times are for none, not for this machine" in result.stderr


def test_a_load_is_seen_where_somebody_watches_and_goes_before_the_text(
    moe_model: Path, plan_path: Path
) -> None:
    """On a terminal of its own; a bar that comes at once, as after two seconds of work."""
    seen = on_a_terminal("run", moe_model, "--plan", plan_path, *HERE, "-p", "a", "-n", 4, "--raw")
    assert seen.status == 0 and re.search(r"loading .*\d+ of \d+ MiB", seen.screen), seen.screen
    assert "loading" not in seen.screen[seen.screen.index("prompt: ") :] and "loading" not in seen.out


def test_json(run: Run, moe_model: Path, plan_path: Path) -> None:
    arguments = (moe_model, "--plan", plan_path, *HERE, "-p", "The cat", "-n", 6, "--ignore-eos", "--json")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert len(report["tokens"]) == 6
    assert report["tpot_ns"] == report["decode_ns"] // 5
    assert report["predicted_tpot_ns"] == 2_000_000
    assert report["memory"]["CPU"]["model"] > 0
    assert report["device_map"] == {"CUDA0": "CPU"}
    assert report["engine"].startswith("xllamacpp")
    assert json.loads(run(*arguments).stdout)["tokens"] == report["tokens"]


def test_a_rewritten_file_runs_by_the_plan_of_its_source(
    run: Run, moe_model: Path, plan_path: Path, tmp_path: Path
) -> None:
    rewritten = tmp_path / "out.gguf"
    made = CliRunner().invoke(
        main, ["rewrite", str(moe_model), "--plan", str(plan_path), "-o", str(rewritten)]
    )
    assert made.exit_code == 0, made.output
    assert rewritten.read_bytes() != moe_model.read_bytes()
    tokens = [
        json.loads(
            run(model, "--plan", plan_path, *HERE, "-p", "a", "-n", 5, "--ignore-eos", "--json").stdout
        )["tokens"]
        for model in (moe_model, rewritten)
    ]
    assert tokens[0] == tokens[1]


def test_a_device_that_is_not_here(run: Run, moe_model: Path, plan_path: Path) -> None:
    fails(run(moe_model, "--plan", plan_path, "-p", "a"), 3, "no device CUDA0", "--device-map CUDA0=CPU")


def test_a_plan_for_another_model(run: Run, dense_model: Path, plan_path: Path) -> None:
    fails(run(dense_model, "--plan", plan_path, *HERE, "-p", "a"), 2, "plan is for another model", "synth")


def test_a_model_changed_since_the_plan(run: Run, moe_model: Path, plan_path: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(moe_model.read_bytes()[:-5000])
    fails(run(changed, "--plan", plan_path, *HERE, "-p", "a"), 2, "truncated")


def test_a_plan_that_promises_another_placement(
    run: Run, moe_model: Path, plan_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A build whose loader puts a weight elsewhere: the plan is right, the engine is told something else.
    monkeypatch.setattr(
        "planner.plan.engine_rules.placed", lambda i, o: {**placed(i, o), "blk.0.attn_q.weight": "Vulkan0"}
    )
    result = run(moe_model, "--plan", plan_path, *HERE, "-p", "a", "-n", 2)
    fails(result, 3, "blk.0.attn_q.weight was loaded into CPU, the plan says Vulkan0")


@pytest.mark.parametrize(
    ("options", "code", "part"),
    [
        (("--device-map", "CUDA7=CPU", "-p", "a"), 2, "the plan does not use CUDA7"),
        (("--device-map", "CUDA0", "-p", "a"), 2, "write it as CUDA0=CPU"),
        # What to give names the plan's device, not the missing one in its place.
        (("--device-map", "CUDA0=CUDA7", "-p", "a"), 3, "give --device-map CUDA0=CPU"),
        ((*HERE, "-p", "  "), 2, "is empty"),
        ((*HERE, "-p", "a", "--engine", "/nowhere"), 3, "no such file or folder"),
        ((*HERE, "-p", "a b " * 300), 2, "do not fit the context of 256"),
        ((*HERE, "-p", "a", "--engine", "/proc/version"), 3, "not a library"),
    ],
)
def test_wrong_options(
    run: Run, moe_model: Path, plan_path: Path, options: tuple[str, ...], code: int, part: str
) -> None:
    fails(run(moe_model, "--plan", plan_path, *options), code, part)


def test_a_plan_over_its_budget_is_refused_before_loading(
    run: Run, dense_model: Path, vulkan_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    text = to_text(plan_for(dense_model)).replace("CUDA0", "Vulkan0")
    plan = from_text(text, "plan")
    small = plan.devices[0].model_copy(update={"budget_bytes": 2**20, "weights_bytes": 0})
    path = tmp_path / "small.yaml"
    path.write_text(to_text(plan.model_copy(update={"devices": (small, *plan.devices[1:])})))
    result = run(dense_model, "--plan", path, "-p", "a", "--engine", vulkan_engine)
    fails(result, 2, "Vulkan0: weights of 0 bytes, its units hold")
    tight = plan.devices[0].model_copy(update={"budget_bytes": 2**20, "compute_bytes": 0})
    path.write_text(to_text(plan.model_copy(update={"devices": (tight, *plan.devices[1:])})))
    result = run(dense_model, "--plan", path, "-p", "a", "--engine", vulkan_engine)
    fails(result, 3, "Vulkan0: the engine needs", "the plan's budget is 1.0 MiB")


def test_host_weights_read_instead_of_mapped(run: Run, moe_model: Path, plan_path: Path) -> None:
    base = (moe_model, "--plan", plan_path, *HERE, "-p", "a", "-n", 4, "--ignore-eos", "--json")
    mapped, read = (json.loads(run(*base, *more).stdout) for more in ((), ("--no-mmap",)))
    assert mapped["tokens"] == read["tokens"]


def test_smoke_crosses_the_offload_threshold_and_a_ubatch(run: Run, moe_model: Path, plan_path: Path) -> None:
    result = run(moe_model, "--plan", plan_path, *HERE, "--smoke")
    assert result.exit_code == 0, result.output
    assert [line.split()[2] for line in result.stdout.splitlines()] == ["4", "40", "152"]


def test_memory_that_is_not_there(moe_model: Path, tmp_path: Path, run: Run) -> None:
    # 64 GiB of KV cache: seen by the dry run, and failing in the engine when nobody looks.
    vast = plan_for(moe_model, Workload(n_ctx=2**25, n_batch=64, n_ubatch=64))
    path = tmp_path / "vast.yaml"
    path.write_text(to_text(vast))
    fails(run(moe_model, "--plan", path, *HERE, "-p", "a"), 3, "CPU: needs", "end what holds it")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "atsplan", "run", str(moe_model), "--plan", str(path), *HERE),
            "-p",
            "a",
            "--no-check",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        preexec_fn=limit_memory,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("atsplan: engine")
    assert re.search("alloc|memory", lines[0])


def limit_memory() -> None:
    """Let this process and its children have 8 GiB of addresses."""
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))


def test_an_interrupted_generation_ends_with_130_and_no_child(moe_model: Path, tmp_path: Path) -> None:
    plan = plan_for(moe_model, Workload(n_ctx=8192, n_batch=64, n_ubatch=64))
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan))
    command = [
        *(sys.executable, "-m", "atsplan", "run", str(moe_model), "--plan", str(path), *HERE),
        "-p",
        "a",
    ]
    process = subprocess.Popen(
        [*command, "-n", "8000", "--ignore-eos", "--raw", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1)  # the first text has come
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert process.stderr.read().decode().splitlines()[-1] == "atsplan: interrupted"
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    process.stdout.close()
    process.stderr.close()
