"""Exports speak the options of the oldest build that a plan is for, and draft only where the plan does."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from engines import ENVIRONMENT, PORTABLE_BUILD, ROOT, missing

from atsplan import main
from planner.machine.engine_builds import EngineRange, range_of
from planner.memory.memory import Reserve
from planner.plan.load_spec import LoadSpec
from planner.plan.plan import Plan, Speculation, from_text, to_text
from planner.workload import Workload
from runtime.tools.llama_bench import words
from runtime.tools.options import Stock, options, stock

PLAN = ROOT / "plans" / "Qwen3-30B-A3B-Q4_K_M--rtx4060-8gb-ddr5.yaml"


def placed(least: int, use_mmap: bool, mtp: bool = False) -> Stock:
    work = Workload(type_k="q8_0", type_v="q8_0", mtp=mtp)
    spec = LoadSpec(("CUDA0",), (5,), 5, (), work, use_mmap=use_mmap)
    return replace(stock(spec, 4), least=least)


def plan_file(tmp_path: Path, **update: Any) -> Path:
    plan = from_text(PLAN.read_text(), str(PLAN)).model_copy(update=update)
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan))
    return path


def exported(path: Path, *more: str) -> tuple[str, str]:
    done = CliRunner().invoke(main, ["export", str(path), *more])
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


def test_the_spelling_is_that_of_the_oldest_build() -> None:
    for least in (0, 10434, 11549):
        assert ("--load-mode", "none") in options(placed(least, False), "m")
        assert ("--load-mode", "mmap") in options(placed(least, True), "m")
    old = dict(options(placed(10068, False), "m"))
    assert "--no-mmap" in old and "--load-mode" not in old
    assert not {"--no-mmap", "--mmap", "--load-mode"} & dict(options(placed(10068, True), "m")).keys()
    assert "-mmp 0" in " ".join(words(placed(10068, False), "m", 1, 1, 0))
    assert "-lm none" in " ".join(words(placed(0, False), "m", 1, 1, 0))


def test_the_older_server_takes_its_spelling_and_not_the_newer() -> None:
    if not (PORTABLE_BUILD / "llama-server").is_file():
        missing("the server of the older build is not here")

    def taken(each: Stock) -> bool:
        told = [
            w for pair in options(replace(each, spec=replace(each.spec, devices=())), "m") for w in pair if w
        ]
        done = subprocess.run(
            [str(PORTABLE_BUILD / "llama-server"), *told, "--version"],
            capture_output=True,
            env={**ENVIRONMENT, "LD_LIBRARY_PATH": str(PORTABLE_BUILD)},
            timeout=60,
            check=False,
        )
        return done.returncode == 0

    assert taken(placed(10068, False)) and taken(placed(10068, True))
    assert not taken(placed(10434, False))


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        (EngineRange(least=10068), "# for llama.cpp b10068 and later\n"),
        (EngineRange(least=10068, most=11000), "# for llama.cpp builds b10068 to b11000\n"),
    ],
)
def test_the_builds_of_the_plan_are_printed(engines: EngineRange, said: str, tmp_path: Path) -> None:
    path = plan_file(tmp_path, engines=engines)
    text, _ = exported(path)
    assert said in text and "--no-mmap" in text and "--load-mode" not in text
    for form in ("env", "docker-compose", "llama-cpp-python", "llama-bench"):
        assert said in exported(path, "--format", form)[0]
    assert "LLAMA_ARG_NO_MMAP=1\n" in exported(path, "--format", "env")[0]
    assert f"; {said[2:]}" in exported(path, "--format", "preset")[0]
    assert json.loads(exported(path, "--format", "json")[0])["engines"]["least"] == 10068
    assert "for llama.cpp" not in exported(PLAN)[0]
    assert "# its options are those of llama.cpp b10434 and later\n" in exported(PLAN)[0]
    assert "its options" not in exported(PLAN, "--format", "llama-cpp-python")[0]


def test_the_moe_cache_came_with_b11480() -> None:
    assert range_of("qwen3moe", ["CPU", "CUDA0"], cache=True, nextn=False) == EngineRange(least=11480)


@pytest.mark.parametrize("draft", ["small.gguf", ""])
def test_a_plan_that_drafts_nothing_is_exported_without_draft_options(draft: str, tmp_path: Path) -> None:
    none = Speculation(draft=draft, device="CUDA0", accept_ppm=100_000, tokens=0, draft_ns=1)
    path = plan_file(tmp_path, speculation=none)
    text, said = exported(path, "--draft", "d.gguf")
    assert "draft" not in text.splitlines()[-1] and "--spec" not in text.splitlines()[-1]
    assert "the plan decided to draft nothing" in said


def test_a_draft_that_the_plan_holds_no_memory_for_is_said(tmp_path: Path) -> None:
    _, said = exported(PLAN, "--draft", "d.gguf")
    assert "the plan holds no memory for a draft model" in said
    plan: Plan = from_text(PLAN.read_text(), str(PLAN))
    kept = plan.constraints.model_copy(
        update={"reserves": (Reserve(name="draft", device="CUDA0", size_bytes=1),)}
    )
    text, said = exported(plan_file(tmp_path, constraints=kept), "--draft", "d.gguf")
    assert "--model-draft d.gguf" in text and "no memory" not in said


def test_a_nextn_block_keeps_the_plan_s_cache_types_and_silence_where_nothing_is_drafted() -> None:
    told = dict(options(placed(0, True, mtp=True), "m"))
    assert told["--spec-type"] == "draft-mtp"
    assert (told["--cache-type-k-draft"], told["--cache-type-v-draft"]) == ("q8_0", "q8_0")
    silent = dict(options(replace(placed(0, True, mtp=True), drafts=False, draft_tokens=0), "m"))
    assert not any("draft" in option or "spec" in option for option in silent)
