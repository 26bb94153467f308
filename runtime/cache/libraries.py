"""Libraries of ours in the cache folder: kept with their digests, loaded only while nobody has touched them.

A library runs with all rights of the user. One that the user named is the user's choice; one that this
program takes from its cache by itself must be what it put there: in a folder of the user's own that nobody
else may write, every file with the digest written down when it was kept, and no file beside them.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from planner.errors import MachineError
from runtime.cache.folder import cache_folder, digest_of, distrust, made, put_aside

RECORD = "SHA256SUMS"  # as `sha256sum --check` reads it
_LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>[^/\0\n]+)")
_MAX_RECORD_BYTES = 2**20
_READ_ONLY = 0o500


@dataclass(eq=False)
class UntrustedLibrary(MachineError):
    """A library in the cache that is not what was kept there."""

    path: str
    why: str

    def message(self) -> str:
        return f"{self.path}: {self.why}: not loaded; remove its folder, and it is made again"


def libraries_folder() -> Path:
    """Where libraries are kept, each with its own in a folder."""
    return cache_folder() / "libraries"


def keep(name: str, files: Iterable[Path]) -> Path:
    """Copy libraries into the cache as one folder, whole or not at all, with their digests; the folder.

    What was kept under that name before is put aside. Raises OSError.
    """
    folder = made(cache_folder(), private=True) / "libraries" / name
    made(folder.parent, private=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}.") as made_here:
        new = Path(made_here) / "new"
        new.mkdir(0o700)
        lines = []
        for file in files:
            copy = new / file.name
            shutil.copyfile(file, copy)
            copy.chmod(_READ_ONLY)
            lines.append(f"{digest_of(copy)}  {copy.name}\n")
        (new / RECORD).write_text("".join(sorted(lines)))
        (new / RECORD).chmod(0o400)
        if os.path.lexists(folder):
            put_aside(folder)
        new.rename(folder)
    return folder


def check(library: Path) -> None:
    """UntrustedLibrary for a library in the cache that may not be loaded; others are the user's choice."""
    cached = libraries_folder()
    folder = library.absolute().parent
    if cached not in (folder, *folder.parents):
        return
    try:
        why = _why_not(library, cached)
    except (OSError, UnicodeDecodeError) as problem:
        why = getattr(problem, "strerror", None) or "its digests cannot be read"
    if why:
        raise UntrustedLibrary(str(library), why)


def _why_not(library: Path, cached: Path) -> str:
    folder = library.absolute().parent
    for place in (folder, *folder.parents):
        if why := distrust(place, "folder"):
            return f"{place.name} {why}"
        if place == cached.parent:
            break
    record = _recorded(folder / RECORD)
    if record is None:
        return f"there are no digests beside it ({RECORD})"
    for name in sorted({file.name for file in folder.iterdir()} - {RECORD}):
        if name not in record:
            return f"{name} beside it was not kept there"
        if why := distrust(folder / name):
            return f"{name} {why}" if name != library.name else why
        if digest_of(folder / name) != record[name]:
            return f"{name} has changed since it was kept" if name != library.name else "has changed since"
    return "" if library.name in record else "was not kept there"


def _recorded(path: Path) -> dict[str, str] | None:
    """Digests by file name; None where they may not be believed."""
    if not os.path.lexists(path) or distrust(path) or path.stat().st_size > _MAX_RECORD_BYTES:
        return None
    found = dict(_lines(path.read_text(encoding="utf-8")))
    return found or None


def _lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if entry := _LINE.fullmatch(line):
            yield entry["name"], entry["digest"]
