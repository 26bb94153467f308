"""Giving finished files their names: what the file system decides at once, and what survives a power cut."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from planner.errors import FileProblem

_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EINVAL, errno.EXDEV}


def place_new(staged: Path, target: Path) -> None:
    """Move a finished file to a name that nothing has; FileExistsError when anything has it.

    The file system decides, at this moment: of two that want one name exactly one gets it.
    """
    try:
        os.link(staged, target)
    except FileExistsError:
        raise
    except OSError as problem:
        if problem.errno not in _NO_LINKS:
            raise
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # the name is ours now
        staged.replace(target)
        return
    staged.unlink()


@contextmanager
def regular(path: Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading; FileProblem for pipes and devices: they may never end, or begin.

    Raises OSError as `open` does.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise FileProblem(str(path), "is not a regular file")
        yield file


def why_not(problem: OSError) -> str:
    """Why a file cannot be opened or read, in the words of all messages."""
    if isinstance(problem, FileNotFoundError):
        return "no such file"
    if isinstance(problem, IsADirectoryError):
        return "is a folder, a file is needed"
    return problem.strerror or str(problem)


def sync_folder(folder: Path) -> None:
    """The names in a folder to the disk, where its file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def lock(handle: int) -> None:
    """Lock an open file or folder until it is closed; file systems without locks lock nothing."""
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone among the programs that lock this folder; file systems without locks lock nothing."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle)
        yield
    finally:
        os.close(handle)


def try_lock(path: Path) -> int | None:
    """A handle that holds the lock of a file or folder; None when another program has it, or none can."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
