"""export and serve: what stock tools are told, held to the real llama-server."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from engines import ENVIRONMENT, ROOT, python, server_help
from hand_plans import experts_on_cpu, hand_plan, with_uses
from small_plans import SMALL, plan_for, server_plan, with_experts

from atsplan import main
from planner.errors import EngineProblem
from planner.model.gguf.reader import read_model
from planner.plan.load_spec import LoadSpec, load_spec
from planner.plan.overrides import escape
from planner.plan.plan import Override, to_text
from runtime.engine.libllama import Engine
from runtime.stripes.widths import widths
from runtime.tools.export import FORMATS, arguments
from runtime.tools.llama_server import find_program, free_port, serving
from runtime.tools.options import ENVIRONMENT as VARIABLES
from runtime.tools.options import Inexpressible, options, stock

EXPERTS = (r"^blk\.(?:1|3)\.(?:ffn_down_exps|ffn_gate_exps|ffn_up_exps)\.weight$", "CPU")


def spec(devices: tuple[str, ...], split: tuple[int, ...], *overrides: tuple[str, str]) -> LoadSpec:
    """A spec of as many layers as the split has."""
    return LoadSpec(devices, split, sum(split), overrides, SMALL)


def test_one_device() -> None:
    assert arguments(stock(spec(("CUDA0",), (5,), EXPERTS), 4), "m.gguf") == [
        *("--model", "m.gguf", "--device", "CUDA0", "--n-gpu-layers", "5"),
        *("--override-tensor", f"{EXPERTS[0]}=CPU"),
        *(
            "--fit",
            "off",
            "--ctx-size",
            "256",
            "--parallel",
            "1",
            "--batch-size",
            "64",
            "--ubatch-size",
            "64",
        ),
        *("--flash-attn", "on", "--cache-type-k", "f16", "--cache-type-v", "f16", "--load-mode", "mmap"),
    ]


def test_cpu_only_and_two_devices() -> None:
    assert options(stock(LoadSpec((), (), 0, (), SMALL), 4), "m")[1:3] == [
        ("--device", "none"),
        ("--n-gpu-layers", "0"),
    ]
    two = dict(options(stock(spec(("CUDA0", "CUDA1"), (2, 3)), 4), "m"))
    assert (two["--device"], two["--tensor-split"]) == ("CUDA0,CUDA1", "2,3")


def test_projector_draft_and_speculative_head() -> None:
    placed = stock(spec(("CUDA0",), (5,)), 4)
    found = dict(options(replace(placed, mmproj="p.gguf", draft="d.gguf"), "m"))
    assert (found["--mmproj"], found["--model-draft"]) == ("p.gguf", "d.gguf")
    assert found["--cache-type-k-draft"] == found["--cache-type-k"]
    mtp = replace(placed.spec, workload=SMALL.model_copy(update={"mtp": True}))
    assert dict(options(replace(placed, spec=mtp), "m"))["--spec-type"] == "draft-mtp"
    assert found["--spec-type"] == "draft-simple"  # or the draft model is loaded and never asked
    assert "--spec-type" not in dict(options(placed, "m"))


def test_every_option_is_one_the_server_knows(server_engine: Path) -> None:
    help_text = server_help(server_engine)
    known = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", help_text))
    assert set(VARIABLES) - known == {"--moe-cache-mib"}  # that server is older
    assert "--cache-ram" in known  # the server's alone
    embedded = Engine.find(None).path.read_bytes()
    assert b"--moe-cache-mib\0" in embedded and b"LLAMA_ARG_MOE_CACHE_MIB\0" in embedded
    named = set(re.findall(r"env: (LLAMA_ARG_\w+)", help_text))
    # The parser takes the negated name of a switch as well, and does not list it.
    assert {name for name in VARIABLES.values() if "_NO_" not in name} - named == {"LLAMA_ARG_MOE_CACHE_MIB"}


def test_remote_devices_are_registered_first() -> None:
    placed = stock(spec(("RPC0[h:50052]", "CUDA0"), (2, 3), ("^a$", "RPC0[h:50052]")), 4)
    assert options(placed, "m")[0] == ("--rpc", "h:50052")
    found = dict(options(placed, "m"))
    assert found["--device"] == "RPC0,CUDA0"
    assert found["--override-tensor"] == "^a$=RPC0[h:50052]"


def test_layers_of_the_cpu_between_device_layers() -> None:
    placed = stock(spec(("CUDA0", "CPU", "CUDA0"), (2, 1, 2), EXPERTS), 4)
    assert not placed.exact
    assert "KV cache and state of layer 2 move" in placed.notes[0]
    assert (placed.devices, placed.spec.n_gpu_layers) == (("CUDA0",), 5)
    assert placed.spec.overrides == (EXPERTS, (r"^blk\.(?:2)\..*$", "CPU"))


def test_a_head_on_the_cpu() -> None:
    placed = stock(spec(("CUDA0", "CPU"), (4, 1)), 4)
    assert "output head" in placed.notes[0]
    assert placed.spec.overrides == ((r"^(?:output|output_norm|token_embd)\.weight$", "CPU"),)


def test_stripes_become_host_experts() -> None:
    striped = stock(spec(("CUDA0",), (5,), ("^a$", "stripe:CUDA0:4")), 4)
    assert striped.spec.overrides == (("^a$", "CPU"),)
    assert "1 striped tensors" in striped.notes[0]


def test_the_tools_take_a_cache_size() -> None:
    cached = stock(LoadSpec(("CUDA0",), (5,), 5, (EXPERTS,), SMALL, cache_bytes=3 * 2**20), 4)
    assert cached.exact and ("--moe-cache-mib", "3") in options(cached, "m")


def test_more_entries_than_the_tools_split_over() -> None:
    devices = tuple(f"CUDA{n % 2}" for n in range(16))
    placed = stock(spec(devices, (1,) * 16), 15)
    assert len(placed.devices) <= 15
    assert sum(placed.spec.tensor_split) == 16


@pytest.mark.parametrize("pattern", [r"^blk\.\d{1,2}\.", "a=b"])
def test_patterns_that_the_parser_would_cut(pattern: str) -> None:
    with pytest.raises(Inexpressible, match="breaks --override-tensor"):
        stock(spec(("CUDA0",), (5,), (pattern, "CPU")), 4)


def test_formats_agree(moe_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan_for(moe_model)))

    def text(form: str) -> str:
        done = CliRunner().invoke(main, ["export", str(path), "--model", "/m/moe.gguf", "--format", form])
        assert done.exit_code == 0, done.output
        return done.stdout

    data = json.loads(text("json"))
    for form in ("llama-server", "llama-cli"):
        assert shlex.split(text(form).splitlines()[-1]) == [form, *data["arguments"]]
    variables = dict(line.split("=", 1) for line in text("env").splitlines() if not line.startswith("#"))
    assert variables == data["environment"]
    preset = dict(line.split(" = ", 1) for line in text("preset").splitlines() if " = " in line)
    assert {f"--{k}": v for k, v in preset.items()} == {
        option: data["environment"][name] for option, name in VARIABLES.items() if name in data["environment"]
    }
    service = yaml.safe_load(text("docker-compose"))["services"]["llama"]
    inside = [part.replace("$$", "$") for part in service["command"]]
    assert inside[: len(data["arguments"])] == ["--model", "/models/moe.gguf", *data["arguments"][2:]]
    assert service["volumes"] == [{"type": "bind", "source": "/m", "target": "/models", "read_only": True}]
    compile(text("llama-cpp-python"), "export.py", "exec")
    assert set(FORMATS) == {
        "llama-server",
        "llama-cli",
        "llama-bench",
        "json",
        "env",
        "preset",
        "docker-compose",
        "llama-cpp-python",
        "llama-swap",
    }


def test_exact_refuses_what_cannot_be_said(moe_model: Path, tmp_path: Path) -> None:
    made = hand_plan(read_model(moe_model), lambda unit: "cpu" if unit.layer == 2 else experts_on_cpu(unit))
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(made))
    done = CliRunner().invoke(main, ["export", str(path), "--exact"])
    assert done.exit_code == 1
    assert "no stock tool can load this plan" in done.stderr


def test_the_nearest_plan_is_legal_and_priced(tmp_path: Path) -> None:
    inventory = ROOT / "plans" / "inputs" / "Qwen3-30B-A3B-Q4_K_M.inventory.yaml"
    path = tmp_path / "plan.yaml"
    pins = ["--pin", "blk.5.*=cpu", "--pin", "blk.20.*=cpu"]
    solved = [
        "solve",
        str(inventory),
        "--machine",
        "rtx4060-8gb-ddr5",
        "--budget",
        "7000",
        "--workload",
        "prompt=16",  # longer prompts are streamed, and then no CPU layer stands after a GPU layer
        *pins,
        "-o",
        str(path),
    ]
    made = CliRunner().invoke(main, solved)
    assert made.exit_code == 0, made.output
    done = CliRunner().invoke(main, ["export", str(path), "--inventory", str(inventory), "--format", "json"])
    assert done.exit_code == 0, done.output
    assert "KV cache and state of layers 5, 20 move" in done.stderr
    priced = re.search(r"predicted ([\d.]+) ms a token, the plan itself ([\d.]+) ms", done.stderr)
    assert priced and 0.5 < float(priced[1]) / float(priced[2]) < 2
    data = json.loads(done.stdout)
    given = dict(zip(data["arguments"][::2], data["arguments"][1::2], strict=True))
    assert (given["--device"], given["--n-gpu-layers"]) == (
        "CUDA0",
        "47",
    )  # 48 layers and the head, 2 on the CPU
    assert not data["exact"]


@pytest.mark.parametrize("runs", [(), ((0, 1, "CPU"), (2, 4, "Vulkan0")), ((0, 4, "CPU"),)])
def test_exported_command_lines_start_the_real_server(
    moe_model: Path,
    vulkan_engine: Path,
    runs: tuple[tuple[int, int, str], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    placed = stock(load_spec(server_plan(moe_model, *runs)), 4)
    assert placed.exact
    listed = [*arguments(placed, str(moe_model)), "--no-warmup", "--verbose"]
    log: list[str] = []
    with serving(find_program(str(vulkan_engine)), listed, on_line=log.append, timeout_s=120) as server:
        assert server.get("/health") == {"status": "ok"}
    text = "\n".join(log)
    for layer in range(5):
        device = next(d for a, b, d in (runs or ((0, 4, "Vulkan0"),)) if a <= layer <= b)
        assert f"layer {layer:3d} assigned to device {device}" in text
    for line in log:
        if "_exps.weight" in line and "buffer type overridden" in line:
            assert line.endswith(("to CPU", "to CPU_REPACK", "to Vulkan_Host"))
    assert sum("_exps.weight" in line and "buffer type overridden" in line for line in log) == 12


def test_the_real_server_answers_with_everything_on_the_device(
    moe_model: Path, vulkan_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    placed = stock(load_spec(server_plan(moe_model, experts="Vulkan0")), 4)
    listed = [*arguments(placed, str(moe_model)), "--no-warmup", "--verbose"]
    with serving(find_program(str(vulkan_engine)), listed, timeout_s=120) as server:
        assert server.get("/health") == {"status": "ok"}
        pid = server.process.pid
        sizes = [
            m for line in server.log if (m := re.search(r"Vulkan0 model buffer size = +([\d.]+) MiB", line))
        ]
    file = read_model(moe_model).inventory
    planned = file.size_bytes - file.tensor("token_embd.weight").size_bytes
    assert sum(float(m[1]) for m in sizes) == pytest.approx(planned / 2**20, abs=0.05)
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_environment_starts_the_real_server(
    moe_model: Path, vulkan_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = stock(load_spec(server_plan(moe_model, experts="Vulkan0")), 4)
    for option, value in options(placed, str(moe_model)):
        monkeypatch.setenv(VARIABLES[option], value or "true")
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    with serving(find_program(str(vulkan_engine)), ["--no-warmup"], timeout_s=120) as server:
        props = server.get("/props")
    assert props["model_path"] == str(moe_model)
    assert props["default_generation_settings"]["n_ctx"] == 256


def test_a_server_that_fails_says_why(server_engine: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF nothing")
    with (
        pytest.raises(EngineProblem) as problem,
        serving(find_program(str(server_engine)), ["--model", str(bad), "--device", "none"], timeout_s=60),
    ):
        pass
    assert "ended with status" in str(problem.value)
    with (
        pytest.raises(EngineProblem, match=r"invalid argument|error"),
        serving(find_program(str(server_engine)), ["--no-such-option"], timeout_s=60),
    ):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_serve_leaves_no_server_behind(
    moe_model: Path, vulkan_engine: Path, tmp_path: Path, number: signal.Signals
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(server_plan(moe_model, experts="Vulkan0")))
    command = [*(sys.executable, "-m", "atsplan", "serve", str(moe_model)), "--plan", str(path)]
    command += ["--engine", str(vulkan_engine), "--port", "0"]
    command[-1] = str(free_port("127.0.0.1"))
    process = subprocess.Popen(
        [*command, "--no-warmup"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    url = process.stdout.readline().split(" ")[0]
    assert url, process.stderr and process.stderr.read()
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        assert json.load(answer)["data"]
    process.send_signal(number)
    process.wait(30)
    if number is signal.SIGINT:
        assert process.returncode == 130
    deadline = time.monotonic() + 30
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
        except OSError:
            break
        assert time.monotonic() < deadline, "the server is still there"
        time.sleep(0.05)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def test_stripes_are_served_by_the_engine_s_own_library(
    moe_model: Path, vulkan_engine: Path, tmp_path: Path
) -> None:
    """Here there is no CUDA device: the server of stripes is started and refuses them itself."""
    plan = server_plan(moe_model, experts="Vulkan0")
    names = [f"blk.{n}.ffn_{part}_exps.weight" for n in (0, 2) for part in ("gate", "up", "down")]
    striped = tuple(
        Override(pattern=f"^{escape(name)}$", buffer="stripe:Vulkan0:3", tensors=1) for name in names
    )
    sites = with_experts(plan, "stripe:Vulkan0:3", (0, 2))
    changed = {"overrides": striped, "units": sites}
    plan = with_uses(plan.model_copy(update=changed), read_model(moe_model).inventory)
    assert widths(read_model(moe_model).inventory, load_spec(plan)) == {"Vulkan0": dict.fromkeys(names, 3)}
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan))
    command = ("serve", moe_model, "--plan", path, "--engine", vulkan_engine)
    done = python("-m", "atsplan", *command, "--port", free_port("127.0.0.1"), "--no-check", "--quiet")
    assert done.returncode == 3, done.stderr
    assert "Vulkan" in done.stderr and "CUDA is needed" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("atsplan:")]) == 1


def test_python_code_says_what_the_binding_has_no_option_for(moe_model: Path) -> None:
    from dataclasses import replace

    from runtime.tools.export import export

    plan = server_plan(moe_model)
    many = plan.workload.model_copy(update={"n_seq": 4, "mtp": True})
    spec = replace(load_spec(plan.model_copy(update={"workload": many})), use_extra_bufts=False)
    text = export(plan, replace(stock(spec, 4), mmproj="eyes.gguf"), "m.gguf", "llama-cpp-python")
    for what in ("vision projector", "NextN", "4 sequences", "no repacking"):
        assert "# llama-cpp-python cannot be told: " in text and what in text
    compile(text, "exported", "exec")
    plain = export(plan, stock(load_spec(plan), 4), "m.gguf", "llama-cpp-python")
    assert "cannot be told" not in plain
