"""The native library of hybrid experts: the wheel's, one built here before, or built now.

A library is known by the digest of the sources and options it was built from. It is kept in the user's cache
folder (runtime.cache.libraries), and loaded only while nobody has touched it there.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from planner.errors import MachineError
from runtime.cache import libraries
from runtime.child import process
from runtime.child.environment import environment, python

SOURCES = Path(__file__).parent / "native"
PREBUILT = Path(__file__).parent / "prebuilt"
COMPILER = "CXX"  # environment variable that names one
_OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-DNDEBUG")
# In one file, types that hold what another file keeps for itself are what g++ alone warns of.
_WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-warning-option", "-Wno-subobject-linkage")
# The engine may bring another C++ runtime: ours stays inside.
_GNU_RUNTIME = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL")
_OLDEST_GLIBC = "2.17"
_LIMIT_S = 1200  # ziglang builds its own C++ runtime first
_NAME = "hybrid.so"
REMEDY = "install a C++ compiler (apt-get install g++) or pip install ziglang"


@dataclass(eq=False)
class HybridRefused(MachineError):
    """Hybrid experts cannot be had here."""

    why: str

    def message(self) -> str:
        return f"hybrid experts: {self.why}"


def library(options: Sequence[str] = ()) -> Path:
    """The library for this machine, built if need be; `options` are more for the compiler (tests).

    Raises HybridRefused with what to install, UntrustedLibrary where the cache is not the user's alone.
    """
    digest = source_digest(options)
    ready = prebuilt(digest)
    if ready is not None:
        return ready
    made = _kept(digest)
    if not intact(made):
        _build(digest, options)
    libraries.check(made)
    return made


def built() -> bool:
    """Whether `library` would give one at once."""
    digest = source_digest()
    return bool(prebuilt(digest)) or intact(_kept(digest))


def available() -> str:
    """Why the library cannot be had; "" when it can. Builds nothing."""
    return "" if built() or next(compilers(), None) else REMEDY


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
        libraries.check(path)
    except libraries.UntrustedLibrary:
        return False
    return path.is_file()


def _kept(digest: str) -> Path:
    return libraries.libraries_folder() / f"hybrid-{digest}" / _NAME


def compilers(target: str = "") -> Iterator[tuple[str, ...]]:
    """Commands that compile C++ here, best first; for a `target` (x86_64, aarch64) only what can make it."""
    if not target:
        named = os.environ.get(COMPILER)
        for name in ([named] if named else []) + ["g++", "clang++", "c++"]:
            if found := shutil.which(name, path=environment().get("PATH", os.defpath)):
                yield found, *_GNU_RUNTIME
    if find_spec("ziglang") is not None:
        machine = target or {"arm64": "aarch64", "AMD64": "x86_64"}.get(
            platform.machine(), platform.machine()
        )
        target = f"{machine}-linux-gnu.{_OLDEST_GLIBC}"
        yield tuple(python("-m", "ziglang", "c++", "-target", target))


def command(compiler: Sequence[str], source: Path, target: Path, options: Sequence[str] = ()) -> list[str]:
    """The command line that builds the library from the one file that `joined` writes."""
    # What follows -Wl and -static belongs to linking, where the order matters to no compiler tried.
    return [*compiler, *_OPTIONS, *_WARNINGS, *options, f"-I{SOURCES}", str(source), "-o", str(target)]


def joined(folder: Path) -> Path:
    """A file that includes every source: compiled together they take a third of the time."""
    source = folder / "hybrid.cpp"
    # By name alone: a path with odd letters is nothing to spell in C++, and the compiler is told the folder.
    names = sorted(path.name for path in SOURCES.glob("*.cpp"))
    source.write_text("".join(f'#include "{name}"\n' for name in names), encoding="utf-8")
    return source


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
        with tempfile.TemporaryDirectory() as scratch:
            fault = _compile(command((*compiler, "-s"), joined(Path(scratch)), target))
        if fault:
            raise HybridRefused(f"{machine}: {fault}")
        made.append(target)
    return made


def _machine() -> str:
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())


def _build(digest: str, options: Sequence[str]) -> None:
    faults = []
    for compiler in compilers():
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch) / _NAME
            if fault := _compile(command(compiler, joined(Path(scratch)), made, options)):
                faults.append(f"{' '.join(compiler[:4])}: {fault}")
                continue
            if intact(_kept(digest)):
                return  # another process was faster, and may be loading it
            try:
                libraries.keep(_kept(digest).parent.name, [made])
            except OSError as problem:
                raise HybridRefused(f"{problem.filename or _kept(digest)}: {problem.strerror}") from None
            return
    raise HybridRefused(f"the native library cannot be built: {'; '.join(faults)}" if faults else REMEDY)


def _compile(line: Sequence[str]) -> str:
    """What went wrong, or ""."""
    try:
        status, text = process.run(line, _LIMIT_S, Path(line[-1]).parent)
    except (OSError, process.TimedOut) as problem:
        return str(problem)
    if status == 0:
        return ""
    said = [line for line in text.splitlines() if "error" in line] or text.splitlines()
    return said[0] if said else f"exit {status}"


if __name__ == "__main__":
    print(*prebuild(sys.argv[1:] or ("x86_64", "aarch64")), sep="\n")
