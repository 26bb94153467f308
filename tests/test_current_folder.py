"""What lies in the folder where a command is started is data: nothing of it is run, no answer changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
import traps
from engines import ENVIRONMENT, ROOT

from atsplan import COMMANDS
from runtime.child.environment import cleaned, environment, import_path, python
from runtime.tools.llama_server import free_port

MODEL = ROOT / "tests" / "data" / "tiny-moe.gguf"
CONSOLE = Path(sys.executable).parent / "atsplan"
ON_CPU = ("--device-map", "CUDA0=CPU", "--threads", "1", "--other-machine")
LOAD = ("--plan", "plan.yaml", *ON_CPU)

SAME, MADE, TIMED = "its output is the same anywhere", "its files are", "it says how long things take"

# Every command, in an order in which each finds its files.
CHAIN: tuple[tuple[str, str], ...] = (
    ("inventory moe.gguf -o inventory.yaml", SAME),
    ("profile moe.gguf --seconds 1 --no-calibration --ubatch 32 --depth 0 --threads 1", TIMED),
    (
        "heat trace moe.gguf --text ant --text hat -n 4 --temp 0 --no-cost --trace t.csv -o h.csv",
        SAME,
    ),
    ("heat import t.csv -o imported.csv", SAME),
    ("heat merge h.csv h.csv -o merged.csv", SAME),
    ("heat report h.csv --map map.png --curves curves.svg", SAME),
    ("heat export h.csv --to perms", SAME),
    ("simulate t.csv --slots 2", SAME),
    ("solve moe.gguf --machine rtx4060-8gb-ddr5 --budget 600 --ctx 256 -o plan.yaml", SAME),
    ("sweep moe.gguf --machine rtx4060-8gb-ddr5 --budgets 500:600:100 --ctx 256 --plot sweep.svg", SAME),
    ("explain plan.yaml --model moe.gguf --plot plan.svg", SAME),
    ("machines rtx4060-8gb-ddr5", SAME),
    ("fit moe.gguf --machine rtx4060-8gb-ddr5 -c 256", SAME),
    ("check plans --model moe.gguf --no-resolve", SAME),
    ("diff plan.yaml plan.yaml", SAME),
    ("refine plan.yaml --measured bench.json --model moe.gguf", SAME),
    ("fmt --check plan.yaml", SAME),
    ("export plan.yaml", SAME),
    ("rewrite moe.gguf --plan plan.yaml -o planned.gguf", MADE),
    ("verify moe.gguf planned.gguf --plan plan.yaml", TIMED),
    (" ".join(("run planned.gguf -p ant -n 8 --raw", *LOAD)), SAME),
    (" ".join(("bench planned.gguf --against all-cpu --rounds 1 --prompts 8 -n 2", *LOAD)), TIMED),
    ("doctor", TIMED),
)


def atsplan(folder: Path, line: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    program = [str(CONSOLE)] if CONSOLE.exists() else [sys.executable, str(ROOT / "atsplan.py")]
    return subprocess.run(
        [*program, *line.split()],
        cwd=folder,
        env=dict(variables),
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose search paths have empty and relative entries, as careless shells make them."""
    inherited = {
        name: value for name, value in ENVIRONMENT.items() if name not in ("PYTHONPATH", "ATSPLAN_ENGINE")
    }
    return inherited | {
        "PATH": f".:lib::{os.environ['PATH']}:",
        "LD_LIBRARY_PATH": f":lib;{os.environ.get('LD_LIBRARY_PATH', '')}",
        "GGML_BACKEND_PATH": "libggml-cpu-trap.so",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }


@pytest.fixture(scope="module")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with a model and traps, and the file that tells which of them sprang."""
    base = tmp_path_factory.mktemp("trapped")
    folder, log = base / "work", base / "sprung"
    folder.mkdir()
    traps.lay(folder, log, traps.imported_by_children())
    _files(folder)
    return folder, log


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without traps."""
    folder = tmp_path_factory.mktemp("clean")
    _files(folder)
    return folder


def _files(folder: Path) -> None:
    """A model, and what llama-bench says of it."""
    shutil.copy(MODEL, folder / "moe.gguf")
    tests = [{"n_prompt": 0, "n_gen": 16, "samples_ns": [16_000_000] * 5}]
    (folder / "bench.json").write_text(json.dumps(tests))


def sprung(log: Path) -> set[str]:
    return set(log.read_text().splitlines()) if log.exists() else set()


def test_the_traps_work(trapped: tuple[Path, Path], tmp_path: Path) -> None:
    """Without what this is about, each kind of trap springs."""
    folder, log = trapped
    here = {"PATH": ".", "LD_LIBRARY_PATH": "."}
    subprocess.run([sys.executable, "-c", "import json"], cwd=folder, check=True)
    code = "import ctypes; ctypes.CDLL('libllama.so')"
    subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, env=here, capture_output=True, check=False)
    subprocess.run(["gcc"], cwd=folder, env=here, check=True)
    assert {"module json", "program gcc"} <= sprung(log)
    assert "a library" in sprung(log) or not shutil.which("cc")
    log.unlink()


def test_every_command_is_deaf_to_its_folder(
    trapped: tuple[Path, Path], clean: Path, variables: dict[str, str]
) -> None:
    folder, log = trapped
    for line, kind in CHAIN:
        there = atsplan(folder, line, variables)
        assert sprung(log) == set(), line
        assert (there.returncode, "Traceback" in there.stderr) == (0, False), (line, there.stderr)
        if kind != TIMED:
            here = atsplan(clean, line, variables)
            assert here.returncode == 0, (line, here.stderr)
            assert here.stdout == there.stdout or kind == MADE, line
        if line.startswith("solve"):  # enough plans for `check` to share them out over processes
            for place in (folder, clean):
                (place / "plans").mkdir()
                for number in range(10):
                    shutil.copy(place / "plan.yaml", place / "plans" / f"{'ab'[number % 2]}--{number}.yaml")
    made = {path.name for path in clean.iterdir() if path.is_file()}
    assert {name for name in made if (folder / name).read_bytes() != (clean / name).read_bytes()} == set()


def test_the_demonstration_is_deaf_to_its_folder(
    trapped: tuple[Path, Path], variables: dict[str, str]
) -> None:
    folder, log = trapped
    done = atsplan(folder, "demo --small --seconds 1", variables)
    assert (done.returncode, sprung(log)) == (0, set()), done.stderr


def test_all_commands_are_among_them() -> None:
    assert {line.split()[0] for line, _ in CHAIN} | {"demo", "serve"} == set(COMMANDS)


@pytest.mark.parametrize("given", [True, False])
def test_a_server_is_deaf_to_its_folder(
    given: bool, trapped: tuple[Path, Path], clean: Path, variables: dict[str, str], computing_server: Path
) -> None:
    """llama-server itself loads any libggml-*.so of the current folder; found on PATH it is no other."""
    folder, log = trapped
    if not (folder / "plan.yaml").exists():
        line = "solve moe.gguf --machine rtx4060-8gb-ddr5 --budget 600 --ctx 256 -o plan.yaml"
        assert atsplan(folder, line, variables).returncode == 0
    port = free_port("127.0.0.1")
    more = ("--engine", str(computing_server)) if given else ("--no-check",)
    command = [str(CONSOLE), "serve", "moe.gguf", *LOAD, *more, "--port", str(port), "--log-file", "said.log"]
    path = variables if given else variables | {"PATH": f".:{computing_server}:{variables['PATH']}"}
    process = subprocess.Popen(command, cwd=folder, env=path, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"http://127.0.0.1:{port}")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/props", timeout=30) as answer:
            assert json.load(answer)["model_path"] == str(folder / "moe.gguf")
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert sprung(log) == set()
    assert (folder / "said.log").stat().st_size > 0  # paths that the user gave are those of this folder


def test_the_file_itself_is_deaf_to_its_folder(trapped: tuple[Path, Path], variables: dict[str, str]) -> None:
    folder, log = trapped
    command = [sys.executable, str(ROOT / "atsplan.py"), "run", "--help"]
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=60, check=True
    )
    assert "Load MODEL by its plan" in done.stdout and sprung(log) == set()


def test_the_system_s_engine_is_not_looked_for_here(
    trapped: tuple[Path, Path], variables: dict[str, str]
) -> None:
    folder, log = trapped
    code = "from runtime.engine import locate; print(list(locate._system()))"
    clean_variables = cleaned(variables)[0] | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        python("-c", code),
        cwd=folder,
        env=clean_variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "work" not in done.stdout and sprung(log) == set()


_SYSTEM_ENGINE = """
import ctypes.util
from runtime.engine import locate
from runtime.engine.libllama import Engine
from runtime.load import engine_fit
ctypes.util.find_library = {"llama": "libllama.so.0"}.get  # as the cache of a system's loader says
locate._package = lambda *_: iter(())
engine = Engine.find()
print(engine.path, engine.build.stated, engine_fit.supported(engine), locate.find(None).folder)
"""


def test_the_companions_of_a_system_s_engine_are_not_looked_for_here(
    trapped: tuple[Path, Path], variables: dict[str, str], computing_server: Path
) -> None:
    folder, log = trapped
    clean = cleaned(variables)[0] | {"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(computing_server)}
    command = python("-c", _SYSTEM_ENGINE)
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    path, _, fit, beside = done.stdout.split()
    assert (path, fit, beside) == (str(computing_server / "libllama.so.0"), "True", "None")
    assert sprung(log) == set()


@pytest.mark.parametrize(
    ("name", "value", "left", "told"),
    [
        ("PATH", "/usr/bin:/bin", "/usr/bin:/bin", 0),
        ("PATH", ":/usr/bin::.:/bin:", "/usr/bin:/bin", 0),
        ("PATH", "node_modules/.bin:/bin", "/bin", 1),
        ("PATH", "", None, 0),
        ("LD_LIBRARY_PATH", "/a;;/b:c", "/a:/b", 1),
        ("LD_LIBRARY_PATH", "$ORIGIN/../lib:$LIB", "$ORIGIN/../lib", 1),
        ("PYTHONPATH", ":", None, 0),
        ("GGML_BACKEND_PATH", "x.so", None, 1),
        ("GGML_BACKEND_PATH", "/x.so", "/x.so", 0),
        ("XDG_CACHE_HOME", "cache", None, 1),
        ("ATSPLAN_ENGINE", "build", "build", 0),  # named for this program: the user's choice
    ],
)
def test_only_absolute_paths_lead_to_code(name: str, value: str, left: str | None, told: int) -> None:
    kept, sentences = cleaned({name: value, "HOME": "."})
    assert (kept.get(name), len(sentences), kept["HOME"]) == (left, told, ".")
    assert cleaned(kept) == (kept, ())


def test_children_find_modules_where_this_program_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "relative", str(tmp_path), "/a:b", *sys.path])
    assert not {"", "relative", str(tmp_path), "/a:b"} & set(import_path())
    assert str(ROOT) in import_path()
    for entry in environment()["PYTHONPATH"].split(os.pathsep):
        assert Path(entry).is_absolute()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # spelt out: the user named it
    assert str(tmp_path) in import_path()
    monkeypatch.chdir(ROOT)  # a checkout that is the current folder
    monkeypatch.setattr(sys, "path", [""])
    assert import_path() == [str(ROOT)]
