"""The native library of hybrid experts: the wheel's, one built here before, or built now.

A library is known by the digest of the sources and options it was built from. It is built into the user's
cache folder, which nobody else may write to, and loaded only while its own digest is the recorded one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from planner.errors import MachineError

SOURCES = Path(__file__).parent / "native"
PREBUILT = Path(__file__).parent / "prebuilt"
COMPILER = "CXX"  # environment variable that names one
_OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-DNDEBUG")
_WARNINGS = ("-Wall", "-Wextra", "-Werror")
# The engine may bring another C++ runtime: ours stays inside.
_GNU_RUNTIME = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL")
_OLDEST_GLIBC = "2.17"
_LIMIT_S = 300
REMEDY = "install a C++ compiler (apt-get install g++) or pip install ziglang"


@dataclass(eq=False)
class HybridRefused(MachineError):
    """Hybrid experts cannot be had here."""

    why: str

    def message(self) -> str:
        return f"hybrid experts: {self.why}"


def library(options: Sequence[str] = ()) -> Path:
    """The library for this machine, built if need be; `options` are more for the compiler (tests).

    Raises HybridRefused with what to install.
    """
    digest = source_digest(options)
    ready = prebuilt(digest)
    if ready is not None:
        return ready
    folder = cache_folder()
    made = folder / f"{digest}.so"
    if not intact(made):
        _build(made, options)
    return made


def available() -> str:
    """Why the library cannot be had; "" when it can. Builds nothing."""
    digest = source_digest()
    try:
        if prebuilt(digest) or intact(cache_folder() / f"{digest}.so"):
            return ""
    except HybridRefused as refused:
        return refused.why
    return "" if next(compilers(), None) else REMEDY


def source_digest(options: Sequence[str] = (), machine: str = "") -> str:
    """Of the sources, the compiler's options and the kind of machine ("": this): 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    digest.update(" ".join((*_OPTIONS, *options, sys.platform, machine or _machine())).encode())
    return digest.hexdigest()[:32]


def prebuilt(digest: str) -> Path | None:
    """The wheel's library when it was built from these very sources for this kind of machine."""
    path = PREBUILT / f"{digest}.so"
    return path if path.is_file() else None


def intact(path: Path) -> bool:
    """Whether a library is there and as it was built."""
    try:
        recorded = path.with_suffix(".sha256").read_text().strip()
        return recorded == hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return False


def cache_folder() -> Path:
    """The folder of built libraries, made if need be; HybridRefused unless it is the user's alone."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "atsplan" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as problem:
        raise HybridRefused(f"{folder}: {problem.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise HybridRefused(f"{folder} is not a folder")
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        raise HybridRefused(f"{folder} belongs to another user: set XDG_CACHE_HOME to a folder of your own")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise HybridRefused(f"{folder} can be written by others: chmod go-w {folder}")
    return folder


def compilers(target: str = "") -> Iterator[tuple[str, ...]]:
    """Commands that compile C++ here, best first; for a `target` (x86_64, aarch64) only what can make it."""
    if not target:
        named = os.environ.get(COMPILER)
        for name in ([named] if named else []) + ["g++", "clang++", "c++"]:
            if found := shutil.which(name):
                yield found, *_GNU_RUNTIME
    if find_spec("ziglang") is not None:
        machine = target or {"arm64": "aarch64", "AMD64": "x86_64"}.get(
            platform.machine(), platform.machine()
        )
        yield sys.executable, "-m", "ziglang", "c++", "-target", f"{machine}-linux-gnu.{_OLDEST_GLIBC}"


def command(compiler: Sequence[str], target: Path, options: Sequence[str] = ()) -> list[str]:
    """The command line that builds the library."""
    sources = sorted(str(path) for path in SOURCES.glob("*.cpp"))
    # What follows -Wl and -static belongs to linking, where the order matters to no compiler tried.
    return [*compiler, *_OPTIONS, *_WARNINGS, *options, *sources, "-o", str(target)]


def prebuild(machines: Sequence[str] = ("x86_64", "aarch64")) -> list[Path]:
    """Libraries for the wheel, for an old glibc; needs ziglang. Others in that folder are removed.

    Raises HybridRefused.
    """
    PREBUILT.mkdir(exist_ok=True)
    for old in PREBUILT.glob("*.so"):
        old.unlink()
    made = []
    for machine in machines:
        compiler = next(compilers(machine), None)
        if compiler is None:
            raise HybridRefused("pip install ziglang")
        target = PREBUILT / f"{source_digest(machine=machine)}.so"
        if fault := _compile(command((*compiler, "-s"), target)):
            raise HybridRefused(f"{machine}: {fault}")
        made.append(target)
    return made


def _machine() -> str:
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())


def _build(target: Path, options: Sequence[str]) -> None:
    faults = []
    for compiler in compilers():
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / "library.so"
            if fault := _compile(command(compiler, made, options)):
                faults.append(f"{' '.join(compiler[:4])}: {fault}")
                continue
            record = Path(scratch) / "record"
            record.write_text(hashlib.sha256(made.read_bytes()).hexdigest() + "\n")
            # The record last: a library without one is built again.
            made.replace(target)
            record.replace(target.with_suffix(".sha256"))
            return
    raise HybridRefused(f"the native library cannot be built: {'; '.join(faults)}" if faults else REMEDY)


def _compile(line: Sequence[str]) -> str:
    """What went wrong, or ""."""
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    if done.returncode == 0:
        return ""
    said = [text for text in done.stderr.splitlines() if "error" in text] or done.stderr.splitlines()
    return said[0] if said else f"exit {done.returncode}"


if __name__ == "__main__":
    print(*prebuild(sys.argv[1:] or ("x86_64", "aarch64")), sep="\n")
