"""The native library under sanitizers, on the CPU backend of the engines: alone, and behind a slow device."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from engines import NODE_BUILD, ROOT, missing

from runtime.hybrid import build

SOURCES = ROOT / "tests" / "native"
DRIVER = "libcuda.so.1"  # in the place of CUDA's
SANITIZERS = {
    "memory": ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "threads": ("-O1", "-fsanitize=thread"),
}
TESTS = (
    "reads_settings",
    "knows_names",
    "divided_tensors_are_refused",
    "divides_choices",
    "shares_work",
    "any_layer_on_the_cpu",
    "any_layer_on_a_slow_device",
    "threads_and_changes",
    "models_come_and_go",
    "prompts_ahead",
    "prompts_of_many",
    "prompts_through_the_ring",
    "the_ring_is_measured",
    "few_experts_decide_nothing",
    "slots_are_filled_through_the_ring",
    "slots_follow",
    "prompts_while_slots_follow",
    "scores_are_kept",
    "paces_are_typical",
    "experts_come_on_demand",
    "begins_ahead",
    "plans_make_room",
    "guests_come_in_one_piece",
    "lanes_are_measured_again",
    "is_not_cut_where_all_is_resident",
    "memory_is_refused",
    "host_memory_is_refused",
    "pages_are_locked_meanwhile",
    "pages_are_locked_by_the_driver",
    "faults_are_returned",
    "guests_differ_by_layer",
    "reports_what_was_done",
    "orders_are_read",
    "orders_are_followed",
    "orders_are_refused",
)


@pytest.fixture(scope="module", params=SANITIZERS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' program, built with one kind of sanitizer."""
    compiler = next((c for c in build.compilers() if "ziglang" not in c), None)
    if compiler is None:
        missing("no C++ compiler with sanitizers: apt-get install g++")
    made: Path = tmp_path_factory.mktemp("native") / request.param
    # As one file they are compiled in a third of the time; what a file keeps for itself is then a warning.
    together = made.with_suffix(".cpp")
    sources = sorted((*build.SOURCES.glob("*.cpp"), *SOURCES.glob("*.cpp")))
    together.write_text("".join(f'#include "{path}"\n' for path in sources))
    options = ["-std=c++17", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror", "-Wno-subobject-linkage"]
    folders = [f"-I{build.SOURCES}", f"-I{SOURCES}"]
    more = SANITIZERS[request.param]
    line = [compiler[0], *options, *more, *folders, str(together), "-ldl", "-o", str(made)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    driver = [
        compiler[0],
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        str(SOURCES / "driver" / "cuda.cpp"),
    ]
    subprocess.run([*driver, "-o", str(made.parent / DRIVER)], check=True, timeout=100)
    return made


def run(program: Path, engine: Path, name: str, fails: bool = False) -> None:
    kernels = {"TRIAL_CPU_LIBRARY": "libggml-cpu-x64.so"} if engine == NODE_BUILD else {}
    # The same sixty random layers give the same sums with every sanitizer and engine: all of them are tried
    # where memory is watched, the first where threads are, and where only structs of the interface differ.
    few = engine == NODE_BUILD or program.name == "threads"
    kernels |= {"TRIAL_TURNS": "15"} if few else {}
    environment = {**os.environ, **kernels, "ASAN_OPTIONS": "detect_leaks=1", "OMP_NUM_THREADS": "1"}
    environment["TRIAL_DRIVER"] = str(program.parent / DRIVER)
    done = subprocess.run(
        [str(program), str(engine), name], capture_output=True, text=True, timeout=300, env=environment
    )
    assert (done.returncode != 0) == fails, (done.stdout + done.stderr)[-3000:]
    assert f"{name} {'failed' if fails else 'ok'}" in done.stdout


@pytest.mark.parametrize("name", TESTS)
def test_interface_version_2(name: str, program: Path, portable_engine: Path) -> None:
    run(program, portable_engine, name)


def test_a_chunk_that_is_refilled_early_is_seen(program: Path, portable_engine: Path) -> None:
    run(program, portable_engine, "a_chunk_is_refilled_early", fails=True)


@pytest.mark.parametrize(
    "name",
    [name for name in TESTS if any(word in name for word in ("layer", "threads", "prompts", "slots_follow"))],
)
def test_interface_version_3(name: str, program: Path) -> None:
    if not NODE_BUILD.is_dir():
        missing(f"no engine in {NODE_BUILD}")
    run(program, NODE_BUILD, name)
