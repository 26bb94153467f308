"""`atsplan fmt`: plan files in canonical form, so that diffs show decisions and nothing else."""

from __future__ import annotations

from pathlib import Path

import click

from commands.console import read_text, say, write_text


@click.command("fmt", epilog="Exit code 1 with --check when a file is not canonical.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--check", "only_check", is_flag=True, help="Change nothing, say which files would change.")
def command(paths: tuple[Path, ...], only_check: bool) -> None:
    """Rewrite plan files (or all plans of a folder) in canonical form; comments are not kept."""
    from planner.plan import from_text, to_text

    changed = 0
    for path in plan_files(paths):
        text = read_text(path)
        canonical = to_text(from_text(text, str(path)))
        if canonical == text:
            continue
        changed += 1
        say(f"{path}: {'not canonical' if only_check else 'rewritten'}")
        if not only_check:
            write_text(path, canonical)
    if changed and only_check:
        raise SystemExit(1)


def plan_files(paths: tuple[Path, ...]) -> list[Path]:
    """The files named, and every *.yaml directly inside the folders named, in sorted order."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in path.glob("*.yaml") if p.is_file())
        else:
            found.append(path)
    return found
