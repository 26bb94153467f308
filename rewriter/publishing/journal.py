"""What a publication is about to do, written down before its first step: enough to finish or undo it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field

from planner.errors import FileProblem
from planner.files import regular, sync_folder
from planner.model.gguf.half_published import JOURNAL
from planner.model.gguf.shards import output_name, parse_name
from planner.records import Record, digest, dump, load

OLD = "old"  # folder of what is replaced, beside the journal
MANIFEST_SUFFIX = ".manifest.yaml"


_END_BYTES = 64 << 10
_MOST_BYTES = 64 << 20


class Known(Record):
    """A file by name and what tells it from another of that name.

    Not by its inode: a folder may have been copied, or lie on a file system that numbers anew.
    """

    name: str
    size_bytes: int = Field(ge=0)
    ends: str  # digest of its first and last bytes; of where it leads, for a link


class Journal(Record):
    """One publication: files in order of shards, the manifest, and everything they replace."""

    schema_: int = Field(1, alias="schema", ge=1, le=1)
    output: str
    files: tuple[Known, ...] = Field(min_length=1)
    manifest: Known | None = None
    replaced: tuple[Known, ...] = ()


def belongs(name: str, output: str) -> bool:
    """Whether a file name is one that a rewrite to `output` could have made."""
    own = name in (output, output + MANIFEST_SUFFIX) or output_name(name) == output
    return own and "/" not in name and "\0" not in name


def is_first(name: str) -> bool:
    """Whether it is the file that readers of a model open."""
    shard = parse_name(name)
    return shard is None or shard.number == 1


def known(path: Path) -> Known:
    """A file as it is now; links are not followed."""
    if path.is_symlink():
        return Known(name=path.name, size_bytes=0, ends=digest("link", str(path.readlink())))
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_END_BYTES)
        file.seek(max(size - _END_BYTES, 0))
        tail = file.read(_END_BYTES)
    return Known(name=path.name, size_bytes=size, ends=digest(head.hex(), tail.hex()))


def looks_like(path: Path, expected: Known) -> bool:
    """Whether such a file is at `path`."""
    if not os.path.lexists(path) or not (path.is_symlink() or path.is_file()):
        return False
    return known(path) == expected.model_copy(update={"name": path.name})


def write_journal(folder: Path, journal: Journal) -> None:
    """Write it whole, to the disk, the names in `folder` with it."""
    write_synced(folder / "journal.new", dump(journal).encode())
    (folder / "journal.new").rename(folder / JOURNAL)
    sync_folder(folder)


def write_synced(path: Path, data: bytes) -> None:
    """A new file of these bytes, on the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        start = 0
        while start < len(data):
            start += os.write(handle, data[start:])
        os.fsync(handle)
    finally:
        os.close(handle)


def read_journal(folder: Path) -> Journal:
    """The journal of a hidden folder; FileProblem when it speaks of anything but files of its output."""
    path = folder / JOURNAL
    try:
        with regular(path) as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise FileProblem(str(path), "is larger than any journal")
        journal = load(text.decode(), Journal, str(path))
    except UnicodeDecodeError:
        raise FileProblem(str(path), "is not a text file") from None
    except OSError as problem:
        raise FileProblem(str(path), problem.strerror or str(problem)) from None
    for name in _names(journal):
        if not belongs(name, journal.output):
            raise FileProblem(str(path), f"names {name!a}, which is no file of {journal.output!a}")
    if (folder / OLD).is_symlink():
        raise FileProblem(str(folder / OLD), "is a link")
    return journal


def _names(journal: Journal) -> Iterable[str]:
    yield from (each.name for each in (*journal.files, *journal.replaced))
    if journal.manifest is not None:
        yield journal.manifest.name
