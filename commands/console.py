"""Printing and files for the commands: results on stdout, progress and messages on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from planner.errors import FileProblem

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table


def say(text: str) -> None:
    """A message for the person at the terminal."""
    click.echo(text, err=True)


def out(text: str) -> None:
    """A result."""
    click.echo(text)


def out_json(data: Any) -> None:
    """A result for a program."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def table(*columns: str, title: str = "") -> Table:
    """A rich table with right-aligned columns after the first."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(title=title or None, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    return made


def out_table(made: Table) -> None:
    """A table on stdout, as wide as the terminal or, in a pipe, as it needs."""
    import sys

    from rich.console import Console

    width = None if sys.stdout.isatty() else 160
    Console(file=sys.stdout, width=width, highlight=False).print(made)


def progress() -> Progress:
    """A progress bar on stderr; shows bytes per second and time left when the unit is bytes."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def mib(size_bytes: int) -> str:
    """Bytes as MiB with thin grouping: `12 606 MiB`."""
    return f"{size_bytes / 2**20:,.0f} MiB".replace(",", " ")


def ms(time_ns: int) -> str:
    """Nanoseconds as milliseconds."""
    return f"{time_ns / 1e6:.2f} ms"


def read_text(path: Path) -> str:
    """Text of a small file; FileProblem when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileProblem(str(path), "no such file") from None
    except IsADirectoryError:
        raise FileProblem(str(path), "is a folder, a file is needed") from None
    except UnicodeDecodeError:
        raise FileProblem(str(path), "not a text file") from None
    except OSError as problem:
        raise FileProblem(str(path), problem.strerror or str(problem)) from None


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file in the same folder, synced and renamed over `path` on success, else removed."""
    if path.is_dir():
        raise FileProblem(str(path), "is a folder, a file is needed")
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as problem:
        raise FileProblem(str(path), f"cannot write here: {problem.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
