"""Output files appear whole or not at all: a hidden folder beside them, then their names in one go."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from planner.errors import AtsplanError, FileProblem, MachineError
from planner.file_kinds import kind_of, named
from planner.files import locked, regular, try_lock
from planner.model.gguf.half_published import JOURNAL, staging_prefix
from planner.model.gguf.shards import output_name
from rewriter.manifest import MOST_BYTES, Manifest, from_text
from rewriter.publishing.journal import belongs
from rewriter.publishing.put_in_place import put_in_place, recover

_SLACK_BYTES = 16 << 20  # left free on the disk: file system metadata, other programs
_TAKEN = "exists already: --force replaces it"


@dataclass(eq=False)
class DiskFull(MachineError):
    """Not enough room for the output."""

    folder: str
    needed_bytes: int
    free_bytes: int

    def message(self) -> str:
        needed, free = self.needed_bytes / 2**20, self.free_bytes / 2**20
        return f"{self.folder}: {needed:.0f} MiB needed, {free:.0f} MiB free"


@dataclass(frozen=True, slots=True)
class Output:
    """What is to be published, and what it may replace."""

    files: tuple[Path, ...]  # in shard order
    manifest: Path  # goes also when no new one comes: it speaks of other bytes
    sources: tuple[Path, ...] = ()  # files of the model that is read: never replaced but in place
    force: bool = False
    in_place: bool = False

    @property
    def name(self) -> str:
        """The name its shards are numbered from."""
        return output_name(self.files[0].name)


def replaced_by(output: Output) -> tuple[Path, ...]:
    """The files that publishing would replace: of these names, or of the earlier output of the same name.

    FileProblem when one of them is an input, by whatever name or link, may not be replaced, or is no file.
    """
    found = [path for path in (*output.files, output.manifest) if os.path.lexists(path)]
    for path in found:
        _refuse_kind(path)
        if _is_source(path, output):
            if not (output.in_place and path in output.files):
                raise FileProblem(str(path), "is the model itself: write elsewhere, or say --in-place")
        elif not (output.force or (path == output.manifest and _speaks_of(path, output))):
            raise FileProblem(str(path), _TAKEN)
    if output.manifest in found:
        _refuse_other_text(output.manifest)
        found += _earlier(output)
    return tuple(found)


def _refuse_kind(path: Path) -> None:
    if path.is_dir():
        raise FileProblem(str(path), "is a folder")
    if path.exists() and not path.is_file():
        raise FileProblem(str(path), "is not a regular file")


def _refuse_other_text(manifest: Path) -> None:
    kind = kind_of(_text_of(manifest))
    if kind not in ("", "manifest"):
        raise FileProblem(str(manifest), f"is {named(kind)}: not replaced by a manifest")


def _text_of(path: Path) -> str:
    try:
        with regular(path) as file:
            return file.read(MOST_BYTES).decode(errors="replace")
    except (OSError, FileProblem):
        return ""


def _manifest_of(path: Path) -> Manifest | None:
    text = _text_of(path)
    if kind_of(text) != "manifest":
        return None
    with suppress(AtsplanError):
        return from_text(text, str(path))
    return None


def _speaks_of(path: Path, output: Output) -> bool:
    """Whether a manifest is of the model that is rewritten in place, and so goes with it."""
    manifest = _manifest_of(path) if output.in_place else None
    return manifest is not None and [f.file for f in manifest.files] == [p.name for p in output.files]


def _earlier(output: Output) -> list[Path]:
    """Other files of the earlier output, as its manifest lists them: shards of another number."""
    manifest = _manifest_of(output.manifest)
    names = [file.file for file in manifest.files] if manifest else []
    own = {path.name for path in output.files}
    found = [
        output.manifest.with_name(name)
        for name in dict.fromkeys(names)
        if name not in own and name.endswith(".gguf") and belongs(name, output.name)
    ]
    found = [path for path in found if path.is_file() and not path.is_symlink()]
    for path in found:
        if _is_source(path, output):
            raise FileProblem(str(path), "is the model itself, and of the output to replace: write elsewhere")
    return found


def _is_source(path: Path, output: Output) -> bool:
    return any(_same(path, source) for source in output.sources)


def _same(target: Path, source: Path) -> bool:
    try:
        return target.samefile(source)
    except OSError:
        return False


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

    What a killed run left behind is completed, undone or removed first. A folder that holds files which
    could not be put back stays.
    """
    recover_all(out)
    with ExitStack() as held:
        # Made and locked while nobody looks for leftovers: an unlocked folder is taken for one.
        with locked(out.parent):
            try:
                folder = Path(tempfile.mkdtemp(prefix=staging_prefix(output_name(out.name)), dir=out.parent))
            except OSError as problem:
                raise FileProblem(str(out), f"cannot write here: {problem.strerror}") from None
            held.callback(_remove_unless_unfinished, folder)
            held.enter_context(locked(folder))  # file systems without locks: a leftover is then kept
        yield folder


def _remove_unless_unfinished(folder: Path) -> None:
    if not (folder / JOURNAL).exists():
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, output: Output, manifest: bool) -> tuple[Path, ...]:
    """Give the files staged in `folder` their names; returns what went with an earlier output.

    Whether a name is free is decided now, not when the work began. FileProblem when it is not, and when it
    was taken in this very moment; then, and on any error, everything is as before.
    """
    parent = output.manifest.parent
    names = [path.name for path in output.files]
    with locked(parent):
        replaced = replaced_by(output)
        try:
            put_in_place(
                folder,
                parent,
                output.name,
                names,
                output.manifest.name if manifest else "",
                [path.name for path in replaced],
            )
        except FileExistsError as problem:
            taken = problem.filename2 or problem.filename or output.files[0]
            raise FileProblem(str(taken), _TAKEN) from None
    new = {*output.files, output.manifest}
    return tuple(path for path in replaced if path not in new)


def recover_all(out: Path) -> list[str]:
    """Complete or undo what killed runs left of an output; sentences that say what was done."""
    parent = out.parent
    if not parent.is_dir():
        raise FileProblem(str(out), f"no such folder {parent}")
    prefix, said = staging_prefix(output_name(out.name)), []
    with locked(parent):
        for folder in sorted(parent.iterdir()):
            if folder.name.startswith(prefix) and folder.is_dir() and not folder.is_symlink():
                said += _recover_unlocked(folder, parent)
    return said


def _recover_unlocked(folder: Path, parent: Path) -> list[str]:
    handle = try_lock(folder)
    if handle is None:
        return []  # another run is at work there
    try:
        said = []
        if (folder / JOURNAL).exists():
            said.append(recover(folder, parent))
        shutil.rmtree(folder, ignore_errors=True)
        return said
    finally:
        os.close(handle)
