"""The cache folder, files of ours in it, and what makes one that is found there not ours."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from pathlib import Path

_PRIVATE = 0o700
_PIECE_BYTES = 2**20
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Where this program keeps what it may lose: below XDG_CACHE_HOME, which counts only when absolute."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "atsplan"


def made(folder: Path, private: bool = False) -> Path:
    """The folder, made for this user alone where it is missing; `private`: also where it is there already.

    Raises OSError.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(_PRIVATE, exist_ok=True)
    elif private and folder.stat().st_mode & _OTHERS_WRITE:
        folder.chmod(_PRIVATE)
    return folder


def distrust(path: Path, kind: str = "file") -> str:
    """Why a file (or "folder") is not to be read as ours; "" when it may be. Raises OSError for none there.

    Ours is a real one, of this user or of root, that nobody else may write.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link"
    if not (stat.S_ISDIR if kind == "folder" else stat.S_ISREG)(found.st_mode):
        return f"is no {kind}"
    if os.name == "posix" and found.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user ({found.st_uid})"
    if found.st_mode & _OTHERS_WRITE:
        return f"may be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def put_aside(path: Path) -> str:
    """Move what cannot be used out of the way, over what was put aside before; what became of it."""
    aside = path.with_name(f"{path.name}.bad")
    with contextlib.suppress(OSError):
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside)
        elif path.is_dir() and not path.is_symlink():
            aside.unlink(missing_ok=True)
        path.replace(aside)
        return f"put aside as {aside.name}"
    with contextlib.suppress(OSError):
        path.unlink()
        return "removed"
    return "left as it is"


def digest_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal. Raises OSError."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            total.update(piece)
    return total.hexdigest()
