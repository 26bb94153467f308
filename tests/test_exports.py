"""Exports held to the tool itself: what the real server reads from presets, and where a tool has no words."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from engines import ENVIRONMENT, python
from hand_plans import with_uses
from hostile_texts import CRAFTED
from sample_plan import sample_plan
from small_plans import plan_for, server_plan, with_experts

from atsplan import main
from planner.model.gguf.reader import read_model
from planner.model.structure import structure_of
from planner.plan.engine_rules import tensor_devices
from planner.plan.load_spec import LoadSpec, load_spec
from planner.plan.plan import Override, Plan, to_text
from planner.plan.stock import MAX_SPLIT
from planner.workload import Workload
from runtime.tools.export import NotHeld, export, host_limits
from runtime.tools.llama_server import free_port
from runtime.tools.options import Stock, options, stock

RICH = Workload(n_ctx=512, n_batch=96, n_ubatch=64, n_seq=2, type_k="q8_0", type_v="q8_0", flash_attn=True)
EXPERTS = (r"^blk\.(?:1|3)\.(?:ffn_down_exps|ffn_up_exps)\.weight$", "CPU")


def rich() -> Stock:
    """Everything that options can say at once, as far as a machine without a GPU takes it."""
    spec = LoadSpec(
        devices=(),
        tensor_split=(),
        n_gpu_layers=0,
        overrides=(EXPERTS,),
        workload=RICH,
        use_mmap=False,
        use_extra_bufts=False,
        op_offload=False,
        swa_full=True,
        threads=3,
    )
    placed = stock(spec, 4)
    return replace(
        placed, mmproj="eyes.gguf", mmproj_on_cpu=True, draft="d.gguf", draft_device="CPU", draft_tokens=5
    )


def named(name: str) -> Plan:
    plan = sample_plan()
    return plan.model_copy(update={"model": plan.model.model_copy(update={"name": name})})


def listed(program: Path, preset: Path, folder: Path) -> list[dict[str, Any]]:
    """The models that a router server offers for a preset file."""
    port = free_port("127.0.0.1")
    process = subprocess.Popen(
        [str(program), "--models-preset", str(preset), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("w"),
        env={**ENVIRONMENT, "LD_LIBRARY_PATH": str(program.parent), "HOME": str(folder)},
        cwd=folder,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/models", timeout=5) as answer:
                    found: list[dict[str, Any]] = json.load(answer)["data"]
                    return found
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        process.terminate()
        process.wait(20)


def test_the_real_server_reads_every_option_of_a_preset(server_engine: Path, tmp_path: Path) -> None:
    placed, preset = rich(), tmp_path / "preset.ini"
    preset.write_text(export(named("Tiny [v2]: test"), placed, "/m/model.gguf", "preset"))
    (model,) = [
        m for m in listed(server_engine / "llama-server", preset, tmp_path) if m["source"] == "preset"
    ]
    assert model["id"] == "Tiny (v2)- test"
    given = model["status"]["args"]
    wanted = options(placed, "/m/model.gguf")
    assert len(wanted) >= 20
    for option, value in wanted:
        at = given.index(SHOWN_AS.get(option, option))
        assert not value or given[at + 1] == value, option


def test_the_real_server_takes_hostile_names_for_what_they_are(server_engine: Path, tmp_path: Path) -> None:
    """One model a section, each with the one path: no name begins another section or option."""
    preset, wanted = tmp_path / "preset.ini", {}
    for index, name in enumerate(CRAFTED):
        text = export(
            named(name), stock(LoadSpec((), (), 0, (), Workload()), 4), f"/m/{index}.gguf", "preset"
        )
        (section,) = re.findall(r"^\[(.*)\]$", text, re.MULTILINE)
        if section in wanted:  # names that differ only in what a section cannot hold
            continue
        wanted[section] = f"/m/{index}.gguf"
        with preset.open("ab") as file:
            file.write(text.encode())
    found = [m for m in listed(server_engine / "llama-server", preset, tmp_path) if m["source"] == "preset"]
    given = {m["id"]: m["status"]["args"] for m in found}
    assert {name: args[args.index("--model") + 1] for name, args in given.items()} == wanted
    assert len(wanted) > 30


SHOWN_AS = {"--spec-draft-device": "--device-draft", "--spec-draft-ngl": "--n-gpu-layers-draft"}


def test_compose_mounts_the_folder_of_every_file() -> None:
    placed = replace(rich(), mmproj="/eyes/e.gguf", draft="/m/d.gguf")
    found = yaml.safe_load(export(named("x"), placed, "/m/model.gguf", "docker-compose"))["services"]["llama"]
    assert [(v["type"], v["source"], v["target"], v["read_only"]) for v in found["volumes"]] == [
        ("bind", "/m", "/models", True),
        ("bind", "/eyes", "/models2", True),
    ]
    given = [word.replace("$$", "$") for word in found["command"]]
    inside = replace(placed, mmproj="/models2/e.gguf", draft="/models/d.gguf")
    expected = [w for pair in options(inside, "/models/model.gguf") for w in pair if w]
    assert given == [*expected, "--host", "0.0.0.0", "--port", "8080"]
    here = yaml.safe_load(
        export(named("x"), replace(rich(), mmproj="", draft=""), "m.gguf", "docker-compose")
    )
    assert [v["source"] for v in here["services"]["llama"]["volumes"]] == ["."]


@pytest.mark.parametrize(
    ("left_mib", "limit"), [(9216, []), (9215, ["--cache-ram", "8191"]), (4096, ["--cache-ram", "3072"]),
                            (500, ["--cache-ram", "0"]), (-20_000, ["--cache-ram", "0"])],
)  # fmt: skip
def test_the_server_s_cache_of_prompts_fits_beside_host_weights(left_mib: int, limit: list[str]) -> None:
    """Unless told the server takes 8 GiB of host memory that no plan counts; 1 GiB is left to all else."""
    host = sample_plan().devices[0].model_copy(update={"name": "CPU", "kind": "cpu"})
    host = host.model_copy(update={"budget_bytes": host.used_bytes + left_mib * 2**20})
    plan = named("x").model_copy(update={"devices": (host,)})
    assert host_limits(plan, rich()) == limit
    assert export(plan, rich(), "m.gguf", "llama-server").rstrip().endswith(" ".join(limit))
    assert "--cache-ram" not in export(plan, rich(), "m.gguf", "llama-cli")
    composed = yaml.safe_load(export(plan, rich(), "m.gguf", "docker-compose"))
    assert ("--cache-ram" in composed["services"]["llama"]["command"]) == bool(limit)


@pytest.mark.parametrize(
    ("left_mib", "each_mib", "limits"),
    [
        (30_000, 150, []),
        (12_000, 150, ["--cache-ram", "6176"]),
        (8_000, 150, ["--ctx-checkpoints", "23", "--cache-ram", "3526"]),
        (1_000, 150, ["--ctx-checkpoints", "0", "--cache-ram", "0"]),
    ],
)
def test_checkpoints_of_slots_fit_beside_host_weights(
    left_mib: int, each_mib: int, limits: list[str]
) -> None:
    host = sample_plan().devices[0].model_copy(update={"name": "CPU", "kind": "cpu"})
    host = host.model_copy(update={"budget_bytes": host.used_bytes + left_mib * 2**20})
    plan = named("x").model_copy(update={"devices": (host,)})
    placed = replace(rich(), checkpoint_bytes=each_mib * 2**20 // plan.workload.n_seq)
    assert host_limits(plan, placed) == limits


def test_an_entry_for_llama_swap_starts_the_server_on_its_port() -> None:
    entry = yaml.safe_load(export(named("a model"), rich(), "/m/a b.gguf", "llama-swap"))
    ((name, said),) = entry["models"].items()
    words = shlex.split(said["cmd"])
    line = shlex.split(export(named("a model"), rich(), "/m/a b.gguf", "llama-server"), comments=True)
    assert name == "a model" and words[: len(line)] == line
    assert words[len(line) :] == ["--host", "127.0.0.1", "--port", "${PORT}"]
    for path in ("/m/${PID}.gguf", "/m/\x1b.gguf"):
        with pytest.raises(NotHeld, match="llama-swap"):
            export(named("a model"), rich(), path, "llama-swap")


def test_environment_names_what_it_lacks_with_its_value() -> None:
    lines = export(named("x"), rich(), "m.gguf", "env").splitlines()
    assert "# as `docker run --env-file` reads it: no quotes, nothing escaped" in lines
    assert "LLAMA_ARG_NO_MMPROJ_OFFLOAD=1" in lines and "LLAMA_ARG_NO_REPACK=1" in lines
    lacking = [line for line in lines if line.startswith("# no variable")]
    assert lacking == [
        "# no variable says this, add the options: --spec-draft-device none --no-op-offload",
    ]


def test_patterns_that_parsers_cut_are_spelt_anew_where_the_model_is_known(
    tmp_path: Path, moe_model: Path
) -> None:
    ahead = r"^blk\.[1-3]\.ffn_(down|gate|up|=)_exps\.weight$"
    wide = (Override(pattern=ahead, buffer="CPU", tensors=9),)
    plan = plan_for(moe_model).model_copy(update={"overrides": wide})
    # The experts of the first layer on the device: no rule of the tools says that.
    units = with_experts(plan, "gpu:CUDA0", (0,))
    plan = with_uses(plan.model_copy(update={"units": units}), read_model(moe_model).inventory)
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan))
    alone = CliRunner().invoke(main, ["export", str(path)])
    assert alone.exit_code == 2 and "breaks --override-tensor" in alone.stderr
    assert "give --inventory to have it spelt anew" in alone.stderr
    known = CliRunner().invoke(main, ["export", str(path), "--inventory", str(moe_model), "--format", "json"])
    assert known.exit_code == 0, known.output
    data = json.loads(known.stdout)
    pattern = data["arguments"][data["arguments"].index("--override-tensor") + 1].removesuffix("=CPU")
    names = [t.name for t in read_model(moe_model).inventory.tensors]
    assert [n for n in names if re.search(pattern, n)] == [n for n in names if re.search(wide[0].pattern, n)]
    assert data["exact"]


_STAND_IN = '''
import ctypes as c, json, sys, types
from runtime.load import dry_run
from runtime.load import load_params
from runtime.engine.libllama import Engine
from planner.plan.load_spec import LoadSpec, load_spec
from planner.workload import Workload

engine = Engine.find(sys.argv[1])
package = types.ModuleType("llama_cpp")
package.llama_cpp = types.SimpleNamespace(_lib=engine.lib)
package.llama_model_default_params = engine.model_params


class Llama:
    """Loads as the package does: the default parameters, then its own arguments, by name."""

    def __init__(self, model_path, **given):
        params = package.llama_cpp.llama_model_default_params()
        params.n_gpu_layers = given.pop("n_gpu_layers")
        given.pop("use_mmap")
        params.load_mode, params.no_alloc = 0, True
        if engine.takes("use_mmap"):
            params.use_mmap = False
        with load_params.model(engine, model_path, params) as model:
            work = Workload(n_ctx=given["n_ctx"], n_batch=given["n_batch"], n_ubatch=given["n_ubatch"])
            spec = LoadSpec((), (), 0, (), work, threads=given["n_threads"] or 1)
            options = load_params.context_params(engine, spec, load_params.Kept())
            with load_params.context(engine, model, options) as context:
                found = dry_run.by_device(engine, dry_run.breakdown(engine, context))
        self.held = {name: sizes.model for name, sizes in found.items()}


package.Llama = Llama
sys.modules["llama_cpp"] = package
scope = {}
exec(sys.stdin.read(), scope)
print(json.dumps(scope["llm"].held))
'''


def test_the_python_script_places_what_the_plan_places(
    moe_model: Path, vulkan_engine: Path, tmp_path: Path
) -> None:
    """Run against the real library; of the binding only what the script touches is stood in for."""
    plan = server_plan(moe_model)
    placed = stock(replace(load_spec(plan), threads=1), 4)
    script = export(plan, placed, str(moe_model), "llama-cpp-python")
    done = python("-c", _STAND_IN, vulkan_engine, given=script)
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout)
    inventory = read_model(moe_model).inventory
    devices = tensor_devices(structure_of(inventory), load_spec(plan))
    wanted = sum(t.size_bytes for t in inventory.tensors if devices[t.name] == "Vulkan0")
    assert 0 <= held["Vulkan0"] - wanted < 4096 * len(inventory.tensors)


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        (("--tensor-split", ",".join("1" * MAX_SPLIT)), True),
        (("--tensor-split", ",".join("1" * (MAX_SPLIT + 1))), False),
        (("--override-tensor", r"^blk\.(?:1|3)\.(?:ffn_down_exps|ffn_up_exps)\.weight$=CPU"), True),
        (("--override-tensor", "^blk[.][0-9]{1,2}[.]=CPU"), False),
        (("--override-tensor", "^blk[.](?=0)=CPU"), False),
        (("--device", "CPU"), False),
    ],
)
def test_what_the_parser_takes_and_what_it_cuts(
    server_engine: Path, words: tuple[str, ...], taken: bool
) -> None:
    """Exports keep to the limits of the real parser, which reads all options before --version."""
    done = subprocess.run(
        [str(server_engine / "llama-server"), *words, "--version"],
        capture_output=True,
        env={**ENVIRONMENT, "LD_LIBRARY_PATH": str(server_engine)},
        timeout=60,
        check=False,
    )
    assert (done.returncode == 0) is taken, done.stderr.decode()
