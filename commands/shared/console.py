"""Printing and files for the commands: results on stdout, progress and messages on stderr."""

from __future__ import annotations

import contextlib
import io
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from planner import quoting
from planner.errors import FileProblem
from planner.file_kinds import kind_of, named
from planner.files import lock, place_new, regular, sync_folder, try_lock, why_not

if TYPE_CHECKING:
    from rich.progress import Progress

    from runtime.child.taken_in import LoadProgress

PICTURE = "picture"
TEXT_BYTES = 256 << 20  # no plan, profile or text of prompts is larger
_HEAD_BYTES = 4096
_CELL_LETTERS = 400
_PIPE_LETTERS = 80
_BAR_LETTERS = 20  # beside it a terminal of 80 has room for what is done, the rate and the time
_SHOWN_AFTER_S = 2.0
_RATED_S = 0.2  # a rate of less says nothing
_LOADING, _READY = "loading", "getting ready"
COMPILING = "compiling the device for experts in slots, this once"


@dataclass(slots=True)
class Table:
    """Rows of texts under a head; each text is data, whatever it holds."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        """One more row; cells that are missing stay empty."""
        self.rows.append(cells)


def say(text: str) -> None:
    """A message for the person at the terminal, on one line."""
    click.echo(quoting.message(text), err=True)


def next_step(*words: str | Path) -> None:
    """Name the command that a person may want to give next, as a shell takes it, on stderr."""
    say(f"next: {quoting.shell(map(str, words))}")


def again(*more: str) -> tuple[str, ...]:
    """The command line as it was given, with more options."""
    import sys

    return ("atsplan", *sys.argv[1:], *more)


def without(words: Sequence[str], valued: Sequence[str], flags: Sequence[str]) -> list[str]:
    """A command line without some options; each of `valued` goes with its value, `--name=value` too."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip or word.partition("=")[0] in valued:
            skip = not skip and "=" not in word
        elif word not in flags:
            kept.append(word)
    return kept


def out(text: str) -> None:
    """One line of a result."""
    click.echo(quoting.message(text))


def out_text(text: str) -> None:
    """A result of several lines."""
    click.echo(quoting.document(text), nl=not text.endswith("\n"))


def out_piece(text: str) -> None:
    """The next piece of a text that a model writes, at once."""
    import sys

    click.echo(quoting.running(text), nl=False)
    sys.stdout.flush()


def out_json(data: Any) -> None:
    """A result for a program."""
    out_text(quoting.json_text(data))


def table(*columns: str) -> Table:
    """A table whose columns after the first are aligned to the right."""
    return Table(columns)


def out_table(made: Table) -> None:
    """A table on stdout, within the terminal or, in a pipe, 80 letters (COLUMNS, where it is set).

    Columns without a figure leave. Where that is not enough, MiB moves to the head and cells go on below at
    their blanks, never within a word: a table whose words have no room is wider.
    """
    import shutil
    import sys

    from rich import table
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    from commands.shared.table_layout import fitted

    class Pipe(Console):
        """Like every other output where the reader goes away: rich would end this program with status 1."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    asked = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    width = shutil.get_terminal_size().columns if asked else _PIPE_LETTERS
    head = [quoting.short(name) for name in made.columns]
    rows = [[quoting.short(cell, _CELL_LETTERS) for cell in row] for row in made.rows]
    layout = fitted(head, rows, width, cell_len)
    shown = table.Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, (name, room) in enumerate(zip(layout.head, layout.widths, strict=True)):
        justify = "left" if index == 0 else "right"
        shown.add_column(Text(name), justify=justify, width=room, overflow="fold")  # type: ignore[arg-type]
    for row in layout.rows:
        shown.add_row(*map(Text, row))
    Pipe(file=sys.stdout, width=max(width, layout.total), highlight=False).print(shown)


def progress() -> Progress:
    """A progress bar on stderr, where somebody watches for two seconds; `rate` is a field of each task."""
    import threading

    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
    from rich.table import Column
    from rich.text import Text

    class Late(Progress):
        """A display that comes when the work takes long enough for a person to wonder."""

        def __enter__(self) -> Late:
            self.timer = threading.Timer(_SHOWN_AFTER_S, self.start)
            self.timer.daemon = True
            self.timer.start()
            return self

        def __exit__(self, *problem: object) -> None:
            self.timer.cancel()
            self.timer.join()  # a start that is under way comes before the end
            self.stop()

    class Words(ProgressColumn):
        """A text of the task: data, whatever it holds."""

        def __init__(self, of: Callable[[Task], str]) -> None:
            super().__init__(Column(no_wrap=True))
            self.of = of

        def render(self, task: Task) -> Text:
            return Text(quoting.short(self.of(task)))

    console = Console(stderr=True)
    return Late(
        Words(lambda task: task.description),
        BarColumn(_BAR_LETTERS),
        Words(lambda task: str(task.fields["rate"])),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # elsewhere it would leave an empty line
    )


@contextlib.contextmanager
def planning(
    what: str, left_s: Callable[[], float] = lambda: math.inf
) -> Iterator[Callable[[int, int], None]]:
    """A bar for plans; it is told of the problems solved and expected. `left_s`: until the deadline."""

    class Left:
        """What is known of the end, as of now: the display asks again and again."""

        done, total = 0, 0

        def __str__(self) -> str:
            told = [f"{self.done} of some {self.total} problems"] if self.total else []
            left = left_s()
            if math.isfinite(left):
                told.append(f"at most {left:.0f} s")
            return ", ".join(told)

    with progress() as bar:
        shown = Left()
        task = bar.add_task(what, total=None, rate=shown)

        def watch(done: int, total: int) -> None:
            shown.done, shown.total = done, total
            bar.update(
                task, completed=done, total=total or None, description=what if total else "what would fit"
            )

        yield watch


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """A bar for work of which nothing tells how far it is."""
    with progress() as bar:
        bar.add_task(what, total=None, rate="")
        yield


Told = Callable[[str, int, int], None]  # what is done, bytes of it so far, bytes in all; 0: not known


def told_bytes(bar: Progress) -> Told:
    """A line of a bar for work on bytes, one phase after the other, with the rate since the phase began.

    It leaves when a phase without a name is told.
    """
    import time

    line, phase, began, before = [bar.add_task("", visible=False, rate="")], "", 0.0, 0

    def told(what: str, done: int, total: int) -> None:
        nonlocal phase, began, before
        anew = what != phase
        if anew:
            phase, began, before = what, time.monotonic(), done
            # A new line, no reset: a total that is known stays when rich is given None.
            bar.remove_task(line.pop())
            line.append(bar.add_task(what, total=total or None, rate="", visible=bool(what)))
        seconds = time.monotonic() - began
        rate = f", {mib(round((done - before) / seconds))}/s" if seconds > _RATED_S else ""
        there = f"{_thin(done / 2**20)} of {mib(total)}" if total else mib(done)
        bar.update(line[0], completed=done, total=total or None, rate=there + rate if done or total else "")
        if anew:
            bar.refresh()  # a short phase is seen too

    return told


@contextlib.contextmanager
def counted() -> Iterator[Told]:
    """A bar of work on bytes; none where nobody watches, or where the work is a part of what has a bar."""
    import sys

    if sys.stderr.isatty():
        from runtime.child.pool import at_work

        if not at_work():
            with progress() as bar:
                yield told_bytes(bar)
                return
    yield lambda what, done, total: None


@contextlib.contextmanager
def loading(size_bytes: int) -> Iterator[LoadProgress]:
    """A bar while files of that size are loaded, which leaves when it is over, before a text is written."""
    with contextlib.ExitStack() as shown:
        told = shown.enter_context(counted())
        told(_LOADING, 0, 0)  # of how much is said when the first bytes are
        yield _load(told, size_bytes, shown.close)


def loads(bar: Progress, size_bytes: int) -> LoadProgress:
    """One line more of a bar, while files of that size are loaded, again and again."""
    told = told_bytes(bar)
    return _load(told, size_bytes, lambda: told("", 0, 0))


def _load(told: Told, size_bytes: int, over: Callable[[], None]) -> LoadProgress:
    from runtime.child.taken_in import LoadProgress

    return LoadProgress(
        compiling=lambda: told(COMPILING, 0, 0),
        taken=lambda taken: told(*_loaded(taken, size_bytes)),
        over=over,
    )


def _loaded(taken: int, size_bytes: int) -> tuple[str, int, int]:
    """What is told of a load; how long the engine takes when it has all bytes, nothing tells."""
    return (_LOADING, taken, size_bytes) if taken < size_bytes else (_READY, 0, 0)


def mib(size_bytes: int) -> str:
    """Bytes as MiB with thin grouping: `12 606 MiB`."""
    return f"{_thin(size_bytes / 2**20)} MiB"


def _thin(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ")


def ms(time_ns: int) -> str:
    """Nanoseconds as milliseconds."""
    return f"{time_ns / 1e6:.2f} ms"


def read_text(path: Path, wanted: str = "text file") -> str:
    """Text of a small file; FileProblem when it cannot be read, or is a model and not what is `wanted`.

    Pipes and devices are read where the path itself names one, as `<(...)` of a shell does, and not behind a
    name in a folder: nobody may ever fill them.
    """
    given = path.is_absolute() and path.parts[1] in ("dev", "proc")
    try:
        with path.open("rb") if given else regular(path) as file:
            head = file.read(_HEAD_BYTES)
            if b"\0" in head:  # told before gigabytes are read
                a_model = f"a model file, {named(wanted)} is needed"
                what = a_model if head.startswith(b"GGUF") else "not a text file"
                raise FileProblem(str(path), f"is {what}")
            text = head + file.read(TEXT_BYTES)
            if len(text) > TEXT_BYTES:
                raise FileProblem(str(path), f"is larger than {mib(TEXT_BYTES)}")
            return io.TextIOWrapper(io.BytesIO(text), encoding="utf-8").read()
    except UnicodeDecodeError:
        raise FileProblem(str(path), "is not a text file") from None
    except OSError as problem:
        raise FileProblem(str(path), why_not(problem)) from None


def check_target(path: Path, kind: str) -> None:
    """FileProblem where a file of another kind (planner.file_kinds; PICTURE; "") must not be written over.

    Only a file of the same kind is ever replaced, and a model never.
    """
    if path.is_dir():
        raise FileProblem(str(path), "is a folder, a file is needed")
    old = _head(path)
    if old.startswith(b"GGUF"):
        raise FileProblem(str(path), "is a model file: not replaced")
    if b"\0" in old and kind != PICTURE:
        raise FileProblem(str(path), "is not a text file: not replaced")
    was = kind_of(old.decode(errors="replace"))
    if was not in ("", kind):
        raise FileProblem(str(path), f"is {named(was)}: not replaced by anything else")
    if not path.exists() and not path.parent.is_dir():
        raise FileProblem(str(path), f"cannot write here: there is no folder {path.parent}")


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all; it may replace a text of its own kind only."""
    check_target(path, kind_of(text))
    with replacing(path, kind_of(text)) as file:
        file.write(quoting.utf8(text).encode())


@contextlib.contextmanager
def replacing(path: Path, kind: str) -> Iterator[IO[bytes]]:
    """A temporary file in the same folder, synced and renamed to `path` on success, else removed.

    A file that appears at `path` meanwhile is replaced only where `check_target` would let it.
    A link stays a link: what it leads to is replaced. A device or pipe is written to as it is.
    """
    try:
        with _straight(path) if path.exists() and not path.is_file() else _renamed(path, kind) as file:
            yield file
    except OSError as problem:
        raise FileProblem(str(path), f"cannot write here: {problem.strerror or problem}") from None


@contextlib.contextmanager
def _straight(path: Path) -> Iterator[IO[bytes]]:
    with path.open("wb") as file:
        yield file


@contextlib.contextmanager
def _renamed(path: Path, kind: str) -> Iterator[IO[bytes]]:
    path = Path(os.path.realpath(path))
    prefix = f".{path.name[:200]}.atsplan-"
    _sweep(path.parent, prefix)
    descriptor, temporary = tempfile.mkstemp(prefix=prefix, dir=path.parent)
    staged = Path(temporary)
    try:
        with os.fdopen(descriptor, "wb") as file:
            lock(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
            staged.chmod(0o666 & ~_umask())
            _put(staged, path, kind)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def _put(staged: Path, path: Path, kind: str) -> None:
    """The finished file to its name; what came there meanwhile is judged as what was there before."""
    try:
        place_new(staged, path)
    except FileExistsError:
        check_target(path, kind)
        staged.replace(path)
    sync_folder(path.parent)


def _sweep(folder: Path, prefix: str) -> None:
    """Remove what killed runs left of the same output; a file that a run still writes is locked."""
    for path in folder.iterdir():
        if path.name.startswith(prefix) and path.is_file() and not path.is_symlink():
            handle = try_lock(path)
            if handle is not None:
                path.unlink(missing_ok=True)
                os.close(handle)


def _head(path: Path) -> bytes:
    """How a regular file begins; nothing for everything else."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
