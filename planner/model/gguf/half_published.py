"""Outputs that a rewrite was putting in place when it was killed: how a reader recognises them.

Several files cannot get their names at once. While they do, a hidden folder beside them holds a journal
and what they replace; a set of shards in that state lacks its first one, so no reader takes it for whole.
"""

from __future__ import annotations

from pathlib import Path

from planner import quoting

JOURNAL = "journal.yaml"
_MARK = ".atsplan-"


def staging_prefix(output: str) -> str:
    """How the names of hidden folders begin that belong to the output `o.gguf`."""
    return f".{output}{_MARK}"


def half_published(folder: Path, output: str = "") -> str:
    """What to tell who cannot read an output in `folder`, any output without a name; else ""."""
    try:
        found = sorted(path for path in folder.iterdir() if _journal_of(path, output))
    except OSError:
        return ""
    if not found:
        return ""
    name = output or found[0].name[1:].rpartition(_MARK)[0]
    command = quoting.shell(["atsplan", "rewrite", str(folder / name), "--recover"])  # people paste it
    return (
        f"a rewrite was interrupted while it put {name} in place: "
        f"`{command}` completes it or brings the old files back"
    )


def _journal_of(path: Path, output: str) -> bool:
    mine = path.name.startswith(staging_prefix(output)) if output else _MARK in path.name[1:]
    own = mine and path.name.startswith(".") and not path.is_symlink()  # of ours none is a link
    return own and (path / JOURNAL).is_file()
