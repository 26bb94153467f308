"""The fuzzer: damages every format this program reads and gives the files to the commands that read them.

`python tests/fuzz.py --mutants 1000000` runs for some hours; tests/test_fuzz.py runs a fixed few thousand.
Mutants have numbers and each is the same in every run: ranges (`--first`) can be tried by several processes,
and a run that was ended goes on where it was (`--progress`). A mutant is one seed file of
tests/data/fuzz/seeds changed a few times: blindly, or with knowledge of what it holds (words, numbers and
lines of a text; entries of a GGUF header). A command may answer, in a text that a parser of its format reads
as ours, or refuse in one line with exit code 1, 2 or 3. It must not end in a traceback, take more than two
seconds of CPU time or 500 MB, print what moves a cursor, change what it read, or leave a file behind that it
was not asked for. What once failed is a line of tests/data/fuzz/findings.txt, tried again at every run.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import gc
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import click
from click.testing import CliRunner, Result
from fuzz_damage import Dice, damaged
from fuzz_outputs import output_fault
from fuzz_targets import DATA, JOURNAL_OF, OUT, READ_DIGESTS, READ_JOURNAL, TARGETS, Target

CPU_SECONDS = 2.0
GROWTH_BYTES = 500 << 20
START_SECONDS = 2.0  # of CPU time at most, that a process of its own takes to import everything
FREEZE = 1000  # mutants between two looks at what has been imported
SAVE = 500  # mutants between two notes of how far a long run is
MEMORY_FOLDER = Path("/dev/shm")  # where it is there: mutants need no disk

# ---------------------------------------------------------------- trial


class Hang(BaseException):
    """A command that used up its time."""


def _expired(number: int, frame: object) -> None:
    raise Hang


@dataclass(frozen=True)
class Finding:
    """What went wrong with one mutant."""

    target: int
    command: tuple[str, ...]
    why: str
    data: bytes

    @property
    def kind(self) -> str:
        """The same for mutants that fail in the same way, as far as can be told."""
        lines = self.why.strip().splitlines()
        place = next((line.strip() for line in reversed(lines) if line.strip().startswith("File ")), "")
        return f"{re.sub('[0-9]+', 'N', lines[-1])[:100]} {place}"

    def line(self) -> str:
        """As findings.txt holds it: target seed, place, the data; the place says which target it is."""
        target = TARGETS[self.target]
        packed = base64.b64encode(zlib.compress(self.data, 9)).decode()
        return f"{target.seed} {target.place} {packed}"


@click.command()
def _read_journal() -> None:
    from profiler.journal import Journal

    assert all(isinstance(line, dict) for line in Journal(JOURNAL_OF, folder=Path.cwd()).lines)


@click.command()
def _read_digests() -> None:
    from runtime.cache.libraries import UntrustedLibrary, check, libraries_folder

    try:
        check(libraries_folder() / "engine" / "libllama.so")
    except UntrustedLibrary as problem:
        sys.exit(problem.exit_code)


_OWN = {READ_JOURNAL: _read_journal, READ_DIGESTS: _read_digests}
_State = dict[str, tuple[int, int]]  # by path: size, and time of the last change


class Ground:
    """A folder in which mutants are tried, one after the other, in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runner = CliRunner(env={"XDG_CACHE_HOME": str(folder)})
        self._laid: dict[str, bytes] = {}
        self._state: _State = {}

    def lay(self, target: Target, data: bytes) -> None:
        """Make the folder hold the mutant and what stands beside it, and nothing else."""
        wanted = {place: seed(name) for name, place in (*target.beside, ("heat.csv", "heat.csv"))}
        wanted[target.place] = data
        if set(wanted) != set(self._laid) or _state(self.folder) != self._state:
            for entry in os.scandir(self.folder):
                shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else Path(entry).unlink()
            (self.folder / OUT).mkdir()
            self._laid = {}
        for place, content in wanted.items():
            if self._laid.get(place) != content:
                path = self.folder / place
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        self._laid, self._state = wanted, _state(self.folder)

    def wrong(self, command: Sequence[str]) -> str:
        """What is wrong with how a command takes the files; "" when nothing is."""
        _forget_peak()
        before = _peak_bytes()
        signal.signal(signal.SIGPROF, _expired)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            result = self._invoke(command)
        except Hang:
            return f"took more than {CPU_SECONDS} s of CPU time"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            return "traceback: " + "".join(traceback.format_exception(result.exception)[-3:])
        grown = _peak_bytes() - before
        return self._judged(command, result.exit_code, result.stderr, result.stdout) or (
            f"took {grown >> 20} MiB" if grown > GROWTH_BYTES else ""
        )

    def _invoke(self, command: Sequence[str]) -> Result:
        from atsplan import main

        own = _OWN.get(command[0])
        return self._runner.invoke(own) if own else self._runner.invoke(main, list(command))

    def wrong_process(self, command: Sequence[str]) -> str:
        """The same as a process of its own, its memory and time measured."""
        if command[0] in _OWN:
            return self.wrong(command)
        program = [sys.executable, "-P", "-c", CHILD, *command]
        try:
            done = subprocess.run(program, cwd=self.folder, capture_output=True, timeout=300)
        except subprocess.TimeoutExpired:
            return "did not end"
        *told, last = done.stderr.decode(errors="replace").splitlines() or [""]
        found = re.fullmatch(r"peak (\d+) cpu ([\d.]+)", last)
        if found is None:
            return f"died: {done.returncode} {last}"
        if int(found[1]) * 1024 > GROWTH_BYTES:
            return f"took {int(found[1]) >> 10} MiB"
        if float(found[2]) > CPU_SECONDS + START_SECONDS:
            return f"took {found[2]} s of CPU time"
        return self._judged(command, done.returncode, "\n".join(told), done.stdout.decode(errors="replace"))

    def _judged(self, command: Sequence[str], code: int, said: str, answered: str) -> str:
        if code not in (0, 1, 2, 3):
            return f"exit code {code}"
        if "Traceback" in said or "no memory is left" in said:
            return said
        if code == 2 and len([line for line in said.splitlines() if line.startswith("atsplan")]) > 1:
            return f"more than a line: {said}"
        if odd := [letter for letter in said + answered if not letter.isprintable() and letter != "\n"]:
            return f"printed {odd[0]!a}"
        now = _state(self.folder)
        if changed := [name for name in self._state if now.get(name) != self._state[name] and code]:
            return (
                "" if _put_aside(changed, now) else f"exit code {code} changed {', '.join(sorted(changed))}"
            )
        made = {name for name in now.keys() - self._state.keys() if not name.endswith(".bad")}
        answers = code == 0 or command[0] == "check"  # whose reports are of what is refused, too
        new = {name for name in made if not (answers and name.startswith(f"{OUT}/"))}
        if new:
            return f"exit code {code} left {', '.join(sorted(new))}"
        return output_fault(command, answered, self.folder) if answers else ""


CHILD = """
import atexit, resource, sys
def tell():
    use = resource.getrusage(resource.RUSAGE_SELF)
    print(f"peak {use.ru_maxrss} cpu {use.ru_utime + use.ru_stime}", file=sys.stderr)
atexit.register(tell)
from atsplan import main
main()
"""


@cache
def seed(name: str) -> bytes:
    """The bytes of a seed file."""
    return (DATA / "seeds" / name).read_bytes()


def _put_aside(changed: Sequence[str], now: _State) -> bool:
    return all(f"{name}.bad" in now for name in changed)


def _state(folder: Path) -> _State:
    found: _State = {}
    left = [str(folder)]
    while left:
        for entry in os.scandir(left.pop()):
            if entry.is_dir(follow_symlinks=False):
                left.append(entry.path)
            status = entry.stat(follow_symlinks=False)
            changed = (0, 0) if entry.is_dir(follow_symlinks=False) else (status.st_size, status.st_mtime_ns)
            found[entry.path[len(str(folder)) + 1 :]] = changed
    return found


def _forget_peak() -> None:
    """Let the system count this process's peak from now on, where it can."""
    with contextlib.suppress(OSError), Path("/proc/self/clear_refs").open("w") as file:
        file.write("5")


def _peak_bytes() -> int:
    with contextlib.suppress(OSError), Path("/proc/self/status").open() as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---------------------------------------------------------------- campaign


def mutants(run: int, numbers: Iterable[int]) -> Iterator[tuple[int, bytes, Dice]]:
    """Targets in turn with a damaged seed each; the same for the same run and number."""
    seeds = [seed(target.seed) for target in TARGETS]
    for number in numbers:
        dice = random.Random(f"{run}:{number}")
        index = number % len(TARGETS)
        yield index, damaged(seeds[index], dice, seeds), dice


def known() -> Iterator[tuple[int, bytes]]:
    """What once failed: the target and the data."""
    for line in (DATA / "findings.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, place, packed = line.split()
            index = next(i for i, t in enumerate(TARGETS) if (t.seed, t.place) == (name, place))
            yield index, zlib.decompress(base64.b64decode(packed))


@contextlib.contextmanager
def ground() -> Iterator[Ground]:
    """A folder of one's own, also as the current and the cache folder."""
    home, cache = Path.cwd(), os.environ.get("XDG_CACHE_HOME")
    memory = MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        os.chdir(folder)
        try:
            yield Ground(Path(folder))
        finally:
            os.chdir(home)
    assert os.environ.get("XDG_CACHE_HOME") == cache


def findings(run: int, numbers: Sequence[int], processes: int = 0) -> Iterator[Finding | None]:
    """What each mutant did wrong, None for nothing; of each one command. The first `processes` really run.

    A hang is one only when it comes twice.
    """
    with ground() as place:
        for done, (index, data, dice) in enumerate(mutants(run, numbers)):
            if done % FREEZE == FREEZE - 1:
                gc.collect()
                gc.freeze()  # what is imported by now stays: no collection looks at it again
            command = dice.choice(TARGETS[index].commands)
            for again in (False, True):
                place.lay(TARGETS[index], data)
                why = (place.wrong_process if done < processes else place.wrong)(command)
                if again or "CPU time" not in why:
                    break
            yield Finding(index, command, why, data) if why else None


# ---------------------------------------------------------------- long mode


@dataclass
class Progress:
    """How far a range of mutants has been tried, in a file so that another run goes on from there."""

    seed: int
    first: int
    mutants: int
    done: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    cpu_seconds: float = 0.0

    def resumed(self, path: Path | None) -> Progress:
        """As the file says; the file of another range is refused."""
        if path is None or not path.exists():
            return self
        found = Progress(**json.loads(path.read_text()))
        if (found.seed, found.first, found.mutants) != (self.seed, self.first, self.mutants):
            sys.exit(f"{path}: of seed {found.seed}, {found.mutants} mutants from {found.first}")
        return found

    def save(self, path: Path | None) -> None:
        """Replace the file as a whole."""
        if path is not None:
            new = path.with_name(f"{path.name}.new")
            new.write_text(json.dumps(asdict(self)) + "\n")
            new.replace(path)

    def text(self) -> str:
        """Mutants by format, and what was found."""
        tried = Counter(TARGETS[n % len(TARGETS)].seed for n in range(self.first, self.first + self.done))
        counts = "".join(f"  {count:8} {name}\n" for name, count in sorted(tried.items()))
        kinds = "".join(f"  {count:8} {kind}\n" for kind, count in sorted(self.kinds.items()))
        return (
            f"{counts}{kinds}{self.done} mutants of {self.mutants}, {self.cpu_seconds:.0f} s of CPU time, "
            + (f"{sum(self.kinds.values())} findings of {len(self.kinds)} kinds")
        )


def campaign(state: Progress, processes: int, keep: Path | None, progress: Path | None) -> None:
    """Try what is left of a range; SIGTERM and SIGINT end it after the mutant at hand."""
    ended: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: ended.append(number))
    earlier = state.cpu_seconds - time.process_time()
    left = range(state.first + state.done, state.first + state.mutants)
    for found in findings(state.seed, left, max(0, processes - state.done)):
        state.done += 1
        if found is not None:
            state.kinds[found.kind] = state.kinds.get(found.kind, 0) + 1
            if state.kinds[found.kind] == 1:
                print(f"{' '.join(found.command)}\n{found.why}\n", flush=True)
                if keep:
                    with keep.open("a") as file:
                        file.write(found.line() + "\n")
        state.cpu_seconds = earlier + time.process_time()
        if ended or found is not None or state.done % SAVE == 0:
            state.save(progress)
        if ended:
            break
    state.save(progress)


def main() -> None:
    """The long mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="The number of the first of them.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--processes", type=int, default=0, help="How many of them run as processes of their own."
    )
    parser.add_argument("--keep", type=Path, help="Append what is found to this file.")
    parser.add_argument("--progress", type=Path, help="Where to note how far it is, and to go on from.")
    asked = parser.parse_args()
    keep, progress = (path and path.absolute() for path in (asked.keep, asked.progress))
    state = Progress(asked.seed, asked.first, asked.mutants).resumed(progress)
    campaign(state, asked.processes, keep, progress)
    print(state.text())
    sys.exit(bool(state.kinds))


if __name__ == "__main__":
    main()
