"""What an interrupted profile had measured, kept outside the output folder so that the next run continues."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from planner.records import digest

Line = dict[str, Any]
MAX_AGE_S = 24 * 3600  # a machine changes: an older beginning is not continued


class Journal:
    """Lines of the measuring process in the user's cache folder, one file a machine, engine and request.

    Each line stands behind its own digest, so that a damaged one is told before anything rests on it.
    """

    def __init__(self, *identity: str, folder: Path | None = None) -> None:
        name = digest(*identity).removeprefix("sha256:")[:24]
        self.path = (folder or _cache_folder()) / f"profile-{name}.jsonl"
        self.damaged: Path | None = None  # where a journal that cannot be believed was put
        self.lines = self._read()

    def add(self, line: Line) -> None:
        """Keep a line; a folder that cannot be written only costs the continuation."""
        self.lines.append(line)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_signed(line) + "\n")
        except OSError:
            return

    def forget(self) -> None:
        """Begin anew: what is known belongs to something else."""
        self.finish()
        self.lines = []

    def finish(self) -> None:
        """The profile is complete: forget."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> list[Line]:
        try:
            if time.time() - self.path.stat().st_mtime > MAX_AGE_S:
                return []
            data = self.path.read_bytes()
        except OSError:
            return []
        # The last line may be half written: an interruption is what a journal is for.
        whole = data.split(b"\n")[:-1]
        lines = [line for raw in whole if (line := _line(raw)) is not None]
        if len(lines) < len(whole):
            self._put_aside()
            return []
        return lines

    def _put_aside(self) -> None:
        """What something else wrote to is not continued, and kept for whoever wonders."""
        self.damaged = self.path.with_suffix(".damaged")
        try:
            self.path.replace(self.damaged)
        except OSError:
            self.damaged = self.path


def _signed(line: Line) -> str:
    text = json.dumps(line)
    return f"{_mark(text)} {text}"


def _line(raw: bytes) -> Line | None:
    """A line as it was written; None for any other."""
    mark, _, text = raw.decode(errors="replace").partition(" ")
    return dict(json.loads(text)) if mark == _mark(text) else None


def _mark(text: str) -> str:
    return digest(text).removeprefix("sha256:")[:16]


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "atsplan"
