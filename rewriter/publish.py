"""Output files appear whole or not at all: a staging folder beside them, then renames."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from planner.errors import FileProblem, MachineError

_SLACK_BYTES = 16 << 20  # left free on the disk: file system metadata, other programs


@dataclass(eq=False)
class DiskFull(MachineError):
    """Not enough room for the output."""

    folder: str
    needed_bytes: int
    free_bytes: int

    def message(self) -> str:
        needed, free = self.needed_bytes / 2**20, self.free_bytes / 2**20
        return f"{self.folder}: {needed:.0f} MiB needed, {free:.0f} MiB free"


def refuse_overwrite(targets: Sequence[Path], sources: Sequence[Path], force: bool, in_place: bool) -> None:
    """FileProblem when an output is an input, by whatever name or link, or exists already."""
    for target in targets:
        if any(_same(target, source) for source in sources):
            if not in_place:
                raise FileProblem(str(target), "is the model itself: write elsewhere, or say --in-place")
        elif (target.exists() or target.is_symlink()) and not force:
            raise FileProblem(str(target), "exists already: --force replaces it")
        if target.is_dir():
            raise FileProblem(str(target), "is a folder")
        if target.exists() and not target.is_file():
            raise FileProblem(str(target), "is not a regular file")


def check_space(folder: Path, needed_bytes: int) -> None:
    """DiskFull unless the file system of `folder` has room."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as problem:
        raise FileProblem(str(folder), problem.strerror or str(problem)) from None
    if needed_bytes + _SLACK_BYTES > free:
        raise DiskFull(str(folder), needed_bytes + _SLACK_BYTES, free)


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`, locked while in use and removed at the end, whatever happens.

    What a killed run left behind is removed first.
    """
    _remove_stale(out)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(out), dir=out.parent))
    except OSError as problem:
        raise FileProblem(str(out), f"cannot write here: {problem.strerror}") from None
    try:
        lock = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # file systems without locks: a leftover is then kept, never a live run
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(pairs: Sequence[tuple[Path, Path]]) -> None:
    """Rename staged files to their names, the first pair last: it is the one that readers open."""
    done: list[Path] = []
    try:
        for staged, target in reversed(pairs):
            fresh = not target.exists()
            staged.replace(target)
            if fresh:
                done.append(target)
        _sync_folder(pairs[0][1].parent)
    except BaseException:
        for target in done:
            target.unlink(missing_ok=True)
        raise


def _same(target: Path, source: Path) -> bool:
    try:
        return target.samefile(source)
    except OSError:
        return False


def _prefix(out: Path) -> str:
    return f".{out.name}.atsplan-"


def _remove_stale(out: Path) -> None:
    if not out.parent.is_dir():
        raise FileProblem(str(out), f"no such folder {out.parent}")
    for folder in out.parent.iterdir():
        if folder.name.startswith(_prefix(out)) and folder.is_dir() and not folder.is_symlink():
            _remove_unlocked(folder)


def _remove_unlocked(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # another run is at work there
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot sync a folder
            os.fsync(handle)
    finally:
        os.close(handle)
