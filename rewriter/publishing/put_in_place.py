"""Staged files get their names, all of them or none, whatever interrupts it.

Steps: the journal is written; the manifest and the first file of an older set go out of sight, so that no
reader can take what follows for a whole set; the other files get their names; the first file gets its
name. From then on the new set is what readers see, and an interrupted publication is completed; before, it
is undone. A single file replaces another by one rename: one of the two is always there.
"""

from __future__ import annotations

import filecmp
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from planner.errors import MachineError
from planner.files import place_new, sync_folder
from planner.model.gguf.half_published import JOURNAL
from rewriter.publishing.journal import OLD, Journal, is_first, known, looks_like, read_journal, write_journal


@dataclass(eq=False)
class Unfinished(MachineError):
    """A publication that could neither be completed nor undone."""

    folder: str
    why: str

    def message(self) -> str:
        return f"{self.folder}: holds files that could not be put in place: {self.why}"


def put_in_place(
    folder: Path, parent: Path, output: str, files: list[str], manifest: str, replaced: list[str]
) -> None:
    """Give the files staged in `folder` their names in `parent`, which the caller has locked.

    `files` in shard order; `manifest` may be ""; `replaced` are names there that go. On an error, and on
    Ctrl-C, everything is as before; FileExistsError when a name was taken meanwhile.
    """
    journal = Journal(
        output=output,
        files=tuple(known(folder / name) for name in files),
        manifest=known(folder / manifest) if manifest else None,
        replaced=tuple(known(parent / name) for name in replaced),
    )
    work = _Publication(folder, parent, journal)
    try:
        (folder / OLD).mkdir()
        write_journal(folder, journal)
        sync_folder(parent)
        work.begin()
        work.complete()
    except BaseException:
        work.undo()
        raise
    work.close()


def recover(folder: Path, parent: Path) -> str:
    """Complete or undo what a killed run began; a sentence that says which. The caller has locked `parent`.

    Raises FileProblem for a journal that cannot be trusted, Unfinished when files stand in the way.
    """
    journal = read_journal(folder)
    work = _Publication(folder, parent, journal)
    if work.committed:
        work.complete()
        work.close()
        return f"{parent / journal.output}: an interrupted rewrite was completed"
    work.undo()
    return f"{parent / journal.output}: an interrupted rewrite was undone"


class _Publication:
    """The steps of one publication; each may be repeated."""

    def __init__(self, folder: Path, parent: Path, journal: Journal) -> None:
        self.folder, self.parent, self.journal = folder, parent, journal
        self.old = {each.name: each for each in journal.replaced}
        self.new = {each.name: each for each in journal.files}
        if journal.manifest is not None:
            self.new[journal.manifest.name] = journal.manifest
        self.first = journal.files[0].name
        names = {each.name for each in journal.files}
        self.models = [name for name in self.old if name.endswith(".gguf")]
        self.swapped = len(names) == 1 and self.first in self.old  # by one rename: never missing
        self.hidden = [name for name in self.old if name not in self.models]
        self.hidden += [name for name in self.models if is_first(name) and not self._is_swapped(name)]
        self.obsolete = [name for name in self.models if name not in names and name not in self.hidden]

    def _is_swapped(self, name: str) -> bool:
        return self.swapped and name == self.first

    @property
    def committed(self) -> bool:
        """Whether the first file is the new one."""
        return self._is_new(self.first)

    def _is_new(self, name: str) -> bool:
        """Whether the new file has its name: it looks like it, and is not still where it was staged."""
        staged, target = self.folder / name, self.parent / name
        if not looks_like(target, self.new[name]):
            return False
        other = self.old.get(name) != self.new[name]
        return other or not staged.exists() or staged.samefile(target)

    def begin(self) -> None:
        """Everything up to the moment from which readers see the new set."""
        for name in self.hidden:
            self._away(name)
        for known_file in reversed(self.journal.files[1:]):
            self._put(known_file.name)
        sync_folder(self.parent)
        self._put(self.first)

    def complete(self) -> None:
        """What is left once the first file is in place."""
        for name in self.obsolete:
            self._away(name)
        if self.journal.manifest is not None:
            self._put(self.journal.manifest.name)
        sync_folder(self.parent)

    def undo(self) -> None:
        """Everything as it was before, the first file last; Unfinished when that cannot be."""
        if not self.swapped:
            self._take_back(self.first)
        order = sorted(self.old, key=lambda name: (name in self.hidden, not name.endswith(".gguf")))
        blocked = [name for name in order if not self._restore(name)]
        for name in self.new.keys() - self.old.keys():
            self._take_back(name)
        sync_folder(self.parent)
        if blocked:
            raise Unfinished(str(self.folder), f"{blocked[0]} is another file now")
        self.close()

    def close(self) -> None:
        """The publication is over: the folder may go."""
        (self.folder / JOURNAL).unlink(missing_ok=True)
        sync_folder(self.folder)

    def _put(self, name: str) -> None:
        """The new file to its name; what is replaced there is kept in the folder."""
        staged, target = self.folder / name, self.parent / name
        if self._is_new(name):
            staged.unlink(missing_ok=True)
            return
        if name not in self.old or name in self.hidden:
            place_new(staged, target)
        elif self._kept(name):
            staged.replace(target)
        else:
            self._away(name)
            place_new(staged, target)

    def _kept(self, name: str) -> bool:
        """Whether the old file has a second name in the folder, so that it can be replaced in one step."""
        target, kept = self.parent / name, self.folder / OLD / name
        if target.is_symlink() or not looks_like(target, self.old[name]):
            return False
        with suppress(OSError):
            os.link(target, kept)
        return os.path.lexists(kept) and _same_file(kept, target)

    def _away(self, name: str) -> None:
        """An old file out of sight, into the folder; nothing when it is no longer there."""
        target, kept = self.parent / name, self.folder / OLD / name
        if not looks_like(target, self.old[name]):
            return
        if os.path.lexists(kept):  # two names of one file: a rename would do nothing
            target.unlink()
        else:
            target.rename(kept)

    def _restore(self, name: str) -> bool:
        """The old file back to its name; False when another one is there."""
        target, kept = self.parent / name, self.folder / OLD / name
        if not os.path.lexists(kept):
            return True  # it never left
        if os.path.lexists(target) and _same_file(kept, target):
            kept.unlink()
        elif name in self.new and self._is_new(name):
            kept.replace(target)
        else:
            try:
                place_new(kept, target)
            except FileExistsError:
                return False
            except OSError:  # a full disk may have no room for a second name, but for this one it had
                kept.rename(target)
        return True

    def _take_back(self, name: str) -> None:
        """A new file away from its name."""
        staged, target = self.folder / name, self.parent / name
        if not self._is_new(name):
            if staged.exists() and _is_placeholder(target):
                target.unlink()
        elif staged.exists():
            target.unlink()
        else:
            target.rename(staged)


def _same_file(path: Path, other: Path) -> bool:
    """One file under two names, or a copy of it; links are not followed."""
    a, b = path.lstat(), other.lstat()
    if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino):
        return True
    return path.is_file() and other.is_file() and filecmp.cmp(path, other, shallow=False)


def _is_placeholder(path: Path) -> bool:
    """An empty file: what reserves a name where the file system has no links."""
    try:
        return path.is_file() and not path.is_symlink() and path.stat().st_size == 0
    except OSError:
        return False
