"""The wheel and the sdist: the same bytes for the same tree, what the program reads, nothing more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from engines import ROOT

from commands.demo import LARGER, ROUTING

PACKAGES = ("commands", "planner", "profiler", "rewriter", "runtime")
FILES = ("atsplan.py", "pyproject.toml", "README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", ".gitignore")
PACKED = (LARGER, ROUTING)
INPUTS = tuple(f"plans/inputs/{name}" for name in PACKED)  # read from there in a checkout
# Of archives without a prebuilt library, and of all that is installed: some tenth more than they are.
MOST_BYTES = {".whl": 1_100_000, ".gz": 850_000}
MOST_INSTALLED = 3_000_000


def built(folder: Path, stamp: int) -> dict[str, bytes]:
    """Both archives of a copy of the tree whose files are of that time."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
    (source / "plans" / "inputs").mkdir(parents=True)
    for name in (*FILES, *INPUTS):
        shutil.copy(ROOT / name, source / name)
    for path in source.rglob("*"):
        os.utime(path, (stamp, stamp))
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name: path.read_bytes() for path in sorted((folder / "dist").iterdir())}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    first, second = built(folder / "a", 1_700_000_000), built(folder / "b", 1_800_000_000)
    assert len(first) == 2 and first == second
    return folder / "a" / "dist"


def test_two_builds_are_the_same_and_small(archives: Path) -> None:
    sizes = {path.suffix: path.stat().st_size for path in archives.iterdir()}
    assert {suffix: size for suffix, size in sizes.items() if size > MOST_BYTES[suffix]} == {}
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        assert sum(entry.file_size for entry in wheel.infolist()) < MOST_INSTALLED


def test_the_wheel_holds_what_the_program_reads(archives: Path) -> None:
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        for name, source in zip(PACKED, INPUTS, strict=True):
            assert wheel.read(f"commands/{name}") == (ROOT / source).read_bytes()
    kept = {name for name in names if ".dist-info/" not in name}
    known = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and "prebuilt" not in path.parts
    }
    assert kept == known | {"atsplan.py", *(f"commands/{name}" for name in PACKED)}
    assert {"commands/page/page.css", "planner/machine/cards.yaml", "planner/py.typed"} <= kept


def test_the_demo_finds_its_model_in_a_wheel(archives: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    code = "from commands import demo; print(demo.packed(demo.LARGER).resolve())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()) == (tmp_path / "commands" / LARGER).resolve()


def test_a_wheel_can_be_made_from_the_sdist(archives: Path) -> None:
    with tarfile.open(next(archives.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "LICENSE", "CHANGELOG.md", "atsplan.py"} <= names
    outside = {name for name in names if name.startswith(("tests/", "plans/", "benchmarks/"))}
    assert outside == set(INPUTS)
