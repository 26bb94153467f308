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
    """Lines of the measuring process in the user's cache folder, one file a machine, engine and request."""

    def __init__(self, *identity: str, folder: Path | None = None) -> None:
        name = digest(*identity).removeprefix("sha256:")[:24]
        self.path = (folder or _cache_folder()) / f"profile-{name}.jsonl"
        self.lines = self._read()

    def add(self, line: Line) -> None:
        """Keep a line; a folder that cannot be written only costs the continuation."""
        self.lines.append(line)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
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
            text = self.path.read_text(encoding="utf-8")
        except OSError:
            return []
        # The last line may be half written.
        whole = [line for line in text.split("\n")[:-1] if line.startswith("{") and line.endswith("}")]
        return [json.loads(line) for line in whole]


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "atsplan"
