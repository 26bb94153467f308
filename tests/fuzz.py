"""The fuzzer: damages every format this program reads and gives the files to the commands that read them.

`python tests/fuzz.py --mutants 1000000` runs for hours; tests/test_fuzz.py runs a fixed few thousand. A
mutant is one seed file of tests/data/fuzz/seeds changed a few times: blindly, or with knowledge of what it
holds (words, numbers and lines of a text; entries of a GGUF header). A command may answer, or refuse in one
line with exit code 1, 2 or 3. It must not end in a traceback, take more than two seconds of CPU time or
500 MB, or leave a file behind that it was not asked for. What once failed is a line of
tests/data/fuzz/findings.txt, tried again at every run.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from click.testing import CliRunner

from planner.records import digest

DATA = Path(__file__).parent / "data" / "fuzz"
CPU_SECONDS = 2.0
GROWTH_BYTES = 500 << 20
SLOW_MACHINE = 4.0  # of CPU time, before a hang is believed: the clock of a shared machine counts waiting too
OUT = "out"  # where commands write: the only place
OUT_PLAN = f"{OUT}/plan.yaml"

# ---------------------------------------------------------------- what is tried


@dataclass(frozen=True)
class Target:
    """A format: its seed, where the mutant stands, the files beside it, and the commands that read it."""

    seed: str
    place: str
    beside: tuple[tuple[str, str], ...]  # (seed, place)
    commands: tuple[tuple[str, ...], ...]


_MODEL = ("model.gguf", "model.gguf")
_PLAN = ("plan.yaml", "plan.yaml")
_ORDER = ("order.yaml", "order.yaml")
INPUTS = (
    ("model.inventory.yaml", "inputs/Fuzz.inventory.yaml"),
    ("machine.profile.yaml", "inputs/rtx4060-8gb-ddr5.profile.yaml"),
)
# No command reads a journal without an engine: it is read as `atsplan profile` does.
READ_JOURNAL, JOURNAL_OF = "(journal)", "one machine"
JOURNAL = f"profile-{digest(JOURNAL_OF).removeprefix('sha256:')[:24]}.jsonl"
_CHECK = ("check", "--no-resolve", "plan.yaml")


def _routing(seed: str, *more: tuple[str, ...]) -> Target:
    commands = (("heat", "import", seed), ("heat", "import", seed, "--model", "moe.yaml"), *more)
    return Target(seed, seed, (("moe.inventory.yaml", "moe.yaml"),), commands)


def _trace(seed: str) -> Target:
    out = ("heat", "import", seed, "--trace", f"{OUT}/t.csv", "-o", f"{OUT}/h.csv")
    return _routing(seed, ("simulate", seed, "--policy", "lru"), out)


TARGETS = (
    Target(
        "model.gguf",
        "model.gguf",
        (_ORDER,),
        (
            ("inventory", "model.gguf"),
            ("inventory", "model.gguf", "--strict", "--json"),
            ("inventory", "model.gguf", "-o", f"{OUT}/m.yaml"),
            ("rewrite", "model.gguf", "--plan", "order.yaml", "-o", f"{OUT}/m.gguf"),
            ("heat", "import", "model.gguf"),
        ),
    ),
    *(
        Target(
            f"split-0000{n}-of-00002.gguf",
            f"split-0000{n}-of-00002.gguf",
            ((f"split-0000{3 - n}-of-00002.gguf", f"split-0000{3 - n}-of-00002.gguf"),),
            (("inventory", "."), ("inventory", "split-00002-of-00002.gguf", "--json")),
        )
        for n in (1, 2)
    ),
    Target(
        "rewritten.gguf",
        "rewritten.gguf",
        (_MODEL, _ORDER, ("rewritten.gguf.manifest.yaml", "rewritten.gguf.manifest.yaml")),
        (
            ("rewrite", "rewritten.gguf", "--undo", "-o", f"{OUT}/m.gguf"),
            ("rewrite", "rewritten.gguf", "--plan", "order.yaml", "-o", f"{OUT}/m.gguf"),
            ("verify", "model.gguf", "rewritten.gguf", "--plan", "order.yaml"),
            ("verify", "rewritten.gguf"),
            ("heat", "import", "heat.csv", "--permutation", "rewritten.gguf"),
        ),
    ),
    Target(
        "rewritten.gguf.manifest.yaml",
        "rewritten.gguf.manifest.yaml",
        (("rewritten.gguf", "rewritten.gguf"),),
        (("verify", "rewritten.gguf"),),
    ),
    Target(
        "plan.yaml",
        "plan.yaml",
        (*INPUTS, _MODEL, ("plan.yaml", "first.yaml")),
        (
            _CHECK,
            ("check", "--no-resolve", "--json", "--list", "plan.yaml"),
            ("fmt", "--check", "plan.yaml"),
            ("diff", "first.yaml", "plan.yaml"),
            ("explain", "plan.yaml"),
            ("export", "plan.yaml", "--model", "model.gguf"),
            ("rewrite", "model.gguf", "--plan", "plan.yaml", "-o", f"{OUT}/m.gguf"),
        ),
    ),
    Target("machine.profile.yaml", INPUTS[1][1], (_PLAN, INPUTS[0]), (_CHECK,)),
    Target(
        "machine.profile.yaml",
        "machine.yaml",
        (_MODEL,),
        (
            (
                "solve",
                "model.gguf",
                "--profile",
                "machine.yaml",
                "--budget",
                "1000",
                "--ctx",
                "512",
                "-o",
                OUT_PLAN,
            ),
        ),
    ),
    Target("model.inventory.yaml", INPUTS[0][1], (_PLAN, INPUTS[1]), (_CHECK,)),
    Target(
        "model.inventory.yaml",
        "model.yaml",
        (INPUTS[1],),
        (
            ("inventory", "model.yaml"),
            (
                "solve",
                "model.yaml",
                "--profile",
                INPUTS[1][1],
                "--budget",
                "1000",
                "--ctx",
                "512",
                "-o",
                OUT_PLAN,
            ),
        ),
    ),
    *map(_trace, ("positions.csv", "route_trace.csv", "topk.json", "demand.txt", "lines.jsonl", "trace.csv")),
    *map(_trace, ("route.bin", "longspear.bin")),
    *map(_routing, ("plain.csv", "choices.csv", "perf.json", "logical.json")),
    _routing("perms.json", ("heat", "import", "heat.csv", "--permutation", "perms.json")),
    Target("order.yaml", "order.yaml", (), (("heat", "import", "heat.csv", "--permutation", "order.yaml"),)),
    Target("journal.jsonl", JOURNAL, (), ((READ_JOURNAL,),)),
    *map(_routing, ("imatrix.gguf", "mbolt.gguf")),
    _routing("heat.csv", ("heat", "report", "heat.csv"), ("heat", "merge", "heat.csv", "heat.csv")),
)

# ---------------------------------------------------------------- damage

Dice = random.Random
EXTREMES = (0, 1, 3, 2**7, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
NUMBERS = (
    *map(str, EXTREMES),
    *("-1", "-0", "1e999", "1.5", "NaN", "inf", "-9223372036854775809", "9" * 40, "9" * 5000, "0x10", "012"),
    *("12:30", "1_000", "\u0663", "\u00b2", "", "null", "true", '"1"', "[]", "{}", "1e-7", ".5"),
)
WORDS = (
    *("", "~", "null", "yes", "2026-11-30", "!!binary dGlueQ==", "&a x", "*a", "<<", "=", "\t", "\u202e"),
    *(
        "blk.x.attn_q.weight",
        "blk.\u00b2.ffn_up_exps.weight",
        "blk.999999999.attention",
        "blk.511.ffn_up.weight",
    ),
    *(
        "'a\\n b'",
        '"\\x1b[2J"',
        '"\\0"',
        "../../x",
        "CPU",
        "cpu",
        "gpu:CUDA9",
        "stripe:CUDA0:99",
        "cache:CUDA0:0",
    ),
    *(
        "hybrid:CUDA0:3",
        "q4_K",
        "type99999",
        "0x0",
        "1x" * 20 + "1",
        "^(a+)+$",
        "^(((((((((((((((",
        "(?=a)",
        "x" * 9000,
    ),
    *("'(a|a)*b'", "'.*.*.*.*.*.*=x'", "[" * 50, "{a: " * 50, "- " * 50, "decode", "prefill", "expert_count"),
)
_TOKEN = re.compile(r"-?[0-9]+(?:\.[0-9]+)?|[A-Za-z_][\w.:/*-]*|'[^'\n]*'|\"[^\"\n]*\"")


def damaged(data: bytes, dice: Dice, others: Sequence[bytes]) -> bytes:
    """One to three changes, of the kind that the file's content invites."""
    if data.startswith(b"GGUF"):
        kinds: tuple[Callable[..., bytes], ...] = (_entry, _entry, _blind)
    elif b"\0" in data[:200]:
        kinds = (_blind,)
    else:
        kinds = (_token, _token, _line, _blind)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        kind = dice.choice(kinds)
        data = kind(data, dice, others)
    return data


def _blind(data: bytes, dice: Dice, others: Sequence[bytes]) -> bytes:
    made = bytearray(data)
    at = dice.randrange(min(len(made), 4096) or 1)
    match dice.randrange(8):
        case 0:
            made[at : at + 1] = bytes([dice.randrange(256)])
        case 1:
            made[at : at + 8] = struct.pack("<Q", dice.choice(EXTREMES))
        case 2:
            made[at : at + 4] = struct.pack("<I", dice.choice(EXTREMES) % 2**32)
        case 3:
            del made[dice.randrange(len(made) + 1) :]
        case 4:
            del made[at : at + dice.randint(1, 40)]
        case 5:
            made[at:at] = made[at : at + dice.randint(1, 40)] * dice.choice((1, 1, 2, 500))
        case 6:
            made[at : at + 1] = bytes([made[at] ^ 1 << dice.randrange(8)]) if at < len(made) else b""
        case _:
            other = dice.choice(others)
            start = dice.randrange(len(other) or 1)
            made[at:at] = other[start : start + dice.randint(1, 200)]
    return bytes(made)


def _token(data: bytes, dice: Dice, _: Sequence[bytes]) -> bytes:
    """A number or word becomes another."""
    text = data.decode("utf-8", "surrogateescape")
    tokens = list(_TOKEN.finditer(text))
    if not tokens:
        return data + dice.choice(WORDS).encode()
    token = dice.choice(tokens)
    new = dice.choice(NUMBERS if token[0].lstrip("-")[:1].isdigit() and dice.random() < 0.8 else WORDS)
    if dice.random() < 0.2:
        new = dice.choice(tokens)[0]
    return (text[: token.start()] + new + text[token.end() :]).encode("utf-8", "surrogateescape")


def _line(data: bytes, dice: Dice, _: Sequence[bytes]) -> bytes:
    """A line goes, comes twice or very often, moves, or is indented."""
    lines = data.split(b"\n")
    at, to = dice.randrange(len(lines)), dice.randrange(len(lines))
    match dice.randrange(6):
        case 0:
            del lines[at]
        case 1:
            lines[at:at] = [lines[at]]
        case 2:
            lines[at:at] = [lines[at]] * dice.choice((10, 3000))
        case 3:
            lines[at], lines[to] = lines[to], lines[at]
        case 4:
            lines[at] = b" " * dice.randint(1, 4) + lines[at]
        case _:
            lines.insert(at, lines[to])
    return b"\n".join(lines)


def _string(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _value(dice: Dice) -> bytes:
    """Type and value of a metadata entry."""
    number = dice.choice(EXTREMES)
    match dice.randrange(7):
        case 0:
            return struct.pack("<IQ", 10, number)
        case 1:
            return struct.pack("<II", 4, number % 2**32)
        case 2:
            return struct.pack("<If", 6, dice.choice((0.0, -1.0, 1e38, float("nan"), float("inf"))))
        case 3:
            return struct.pack("<I", 8) + _string(dice.choice(WORDS).encode())
        case 4:
            length = dice.choice((0, 1, 3, 600, 5000))
            return struct.pack("<IIQ", 9, 4, length) + struct.pack("<I", number % 2**32) * length
        case 5:
            return struct.pack("<II?", 9, 7, True)[:8] + struct.pack("<Q", 3) + b"\1\0\2"
        case _:
            return struct.pack("<Iq", 11, -1)


def _entry(data: bytes, dice: Dice, others: Sequence[bytes]) -> bytes:
    """An entry of the header, of metadata or tensors, changes, goes, or comes twice; counts follow."""
    from planner.errors import AtsplanError
    from planner.model.gguf.header import parse_header

    try:
        header = parse_header(data, "x")
    except AtsplanError:
        return _blind(data, dice, others)
    start = header.kvs[0].start if header.kvs else 24
    kvs = [data[kv.start : kv.end] for kv in header.kvs]
    infos = [data[info.start : info.end] for info in header.infos]
    which = dice.choice([entries for entries in (kvs, kvs, infos) if entries] or [kvs])
    at = dice.randrange(len(which) or 1)
    act = dice.randrange(6)
    if not which or act == 5:
        key = dice.choice(
            ("atsplan.source.alignment", "general.alignment", "split.count", "qwen3moe.block_count")
        )
        kvs = [raw for raw in kvs if key.encode() not in raw] + [_string(key.encode()) + _value(dice)]
    elif act == 0:
        del which[at]
    elif act == 1:
        which.append(which[at].replace(b"e", b"f", 1))
    elif which is kvs:
        kv = header.kvs[at]
        kvs[at] = data[kv.start : kv.value_start - 4] + _value(dice)
    else:
        infos[at] = _info(header.infos[at], dice)
    head = data[:8] + struct.pack("<QQ", len(infos), len(kvs)) + b"".join(kvs) + b"".join(infos)
    assert start == 24 or not header.kvs
    return head + bytes(-len(head) % header.alignment) + data[header.data_offset :]


def _info(info: object, dice: Dice) -> bytes:
    from planner.model.gguf.header import TensorInfo

    assert isinstance(info, TensorInfo)
    name, dims, kind, offset = info.name.encode(), list(info.dims), info.type, info.offset
    match dice.randrange(5):
        case 0:
            name = dice.choice(WORDS).encode()
        case 1:
            name = name.replace(
                b"blk.0", dice.choice((b"blk.x", b"blk.\xc2\xb2", b"blk.511", b"blk.99999999999", b"blk"))
            )
        case 2:
            dims[dice.randrange(len(dims) or 1) : 1] = [dice.choice(EXTREMES)]
        case 3:
            kind = dice.choice((0, 1, 8, 12, 39, 99, 2**31, *range(130, 160)))
        case _:
            offset = dice.choice(EXTREMES)
    return _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


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

    def line(self) -> str:
        """As findings.txt holds it: target seed, place, the data; the place says which target it is."""
        target = TARGETS[self.target]
        packed = base64.b64encode(zlib.compress(self.data, 9)).decode()
        return f"{target.seed} {target.place} {packed}"


@click.command()
def _read_journal() -> None:
    from profiler.journal import Journal

    assert all(isinstance(line, dict) for line in Journal(JOURNAL_OF, folder=Path.cwd()).lines)


class Ground:
    """A folder in which mutants are tried, one after the other, in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runner = CliRunner()

    def lay(self, target: Target, data: bytes) -> None:
        """Make the folder hold the mutant and what stands beside it, and nothing else."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.folder / OUT).mkdir()
        for seed, place in (*target.beside, ("heat.csv", "heat.csv")):
            self._put(place, (DATA / "seeds" / seed).read_bytes())
        self._put(target.place, data)

    def _put(self, place: str, data: bytes) -> None:
        path = self.folder / place
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)

    def wrong(self, command: Sequence[str]) -> str:
        """What is wrong with how a command takes the files; "" when nothing is."""
        from atsplan import main

        before, files = _peak_bytes(), _files(self.folder)
        signal.signal(signal.SIGPROF, _expired)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS * SLOW_MACHINE)
        try:
            if command == (READ_JOURNAL,):
                result = self._runner.invoke(_read_journal)
            else:
                result = self._runner.invoke(main, list(command))
        except Hang:
            return f"took more than {CPU_SECONDS * SLOW_MACHINE} s of CPU time"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            return "traceback: " + "".join(traceback.format_exception(result.exception)[-3:])
        grown = _peak_bytes() - before
        return self._judged(result.exit_code, result.stderr, files) or (
            f"took {grown >> 20} MiB" if grown > GROWTH_BYTES else ""
        )

    def wrong_process(self, command: Sequence[str]) -> str:
        """The same as a process of its own, its memory measured."""
        files = _files(self.folder)
        program = [sys.executable, "-P", "-c", CHILD, *command]
        try:
            done = subprocess.run(program, cwd=self.folder, capture_output=True, timeout=120)
        except subprocess.TimeoutExpired:
            return "did not end"
        *told, last = done.stderr.decode(errors="replace").splitlines() or [""]
        found = re.fullmatch(r"peak (\d+) cpu ([\d.]+)", last)
        if found is None:
            return f"died: {done.returncode} {last}"
        if int(found[1]) * 1024 > GROWTH_BYTES:
            return f"took {int(found[1]) >> 10} MiB"
        return self._judged(done.returncode, "\n".join(told), files)

    def _judged(self, code: int, said: str, files: set[str]) -> str:
        if code not in (0, 1, 2, 3):
            return f"exit code {code}"
        if "Traceback" in said or "no memory is left" in said:
            return said
        if code == 2 and len([line for line in said.splitlines() if line.startswith("atsplan")]) > 1:
            return f"more than a line: {said}"
        made = {name for name in _files(self.folder) - files if not name.endswith((".bad", ".bad"))}
        new = {name for name in made if code or not name.startswith(f"{OUT}/")}
        return f"exit code {code} left {', '.join(sorted(new))}" if new else ""


CHILD = """
import atexit, resource, sys
def tell():
    use = resource.getrusage(resource.RUSAGE_SELF)
    print(f"peak {use.ru_maxrss} cpu {use.ru_utime + use.ru_stime}", file=sys.stderr)
atexit.register(tell)
from atsplan import main
main()
"""


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---------------------------------------------------------------- campaign


def mutants(seed: int, count: int) -> Iterator[tuple[int, bytes, Dice]]:
    """Targets in turn with a damaged seed each; the same for the same seed."""
    seeds = [(DATA / "seeds" / target.seed).read_bytes() for target in TARGETS]
    for number in range(count):
        dice = random.Random(f"{seed}:{number}")
        index = number % len(TARGETS)
        yield index, damaged(seeds[index], dice, seeds), dice


def known() -> Iterator[tuple[int, bytes]]:
    """What once failed: the target and the data."""
    for line in (DATA / "findings.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            seed, place, packed = line.split()
            index = next(i for i, t in enumerate(TARGETS) if (t.seed, t.place) == (seed, place))
            yield index, zlib.decompress(base64.b64decode(packed))


@contextlib.contextmanager
def ground() -> Iterator[Ground]:
    """A folder of one's own, also as the current and the cache folder."""
    home, cache = Path.cwd(), os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Ground(Path(folder))
        finally:
            os.chdir(home)
    assert os.environ.get("XDG_CACHE_HOME") == cache


def findings(seed: int, count: int, processes: int = 0, every_command: bool = False) -> Iterator[Finding]:
    """Mutants that are taken wrongly; of each one command, or every one. The first `processes` really run."""
    with ground() as place:
        for number, (index, data, dice) in enumerate(mutants(seed, count)):
            target = TARGETS[index]
            chosen = target.commands if every_command else (dice.choice(target.commands),)
            for command in chosen:
                place.lay(target, data)
                why = (place.wrong_process if number < processes else place.wrong)(command)
                if why:
                    yield Finding(index, command, why, data)


def main() -> None:
    """The long mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--processes", type=int, default=0, help="How many of them run as processes of their own."
    )
    parser.add_argument("--keep", type=Path, help="Append what is found to this file.")
    asked = parser.parse_args()
    kinds: dict[str, int] = {}
    for found in findings(asked.seed, asked.mutants, asked.processes):
        kind = found.why.strip().splitlines()[-1][:100] + (
            found.why.splitlines()[-2] if "Error" in found.why else ""
        )
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] > 1:
            continue
        print(f"{' '.join(found.command)}\n{found.why}\n", flush=True)
        if asked.keep:
            with asked.keep.open("a") as file:
                file.write(found.line() + "\n")
    print(f"{asked.mutants} mutants, {sum(kinds.values())} findings of {len(kinds)} kinds")
    sys.exit(bool(kinds))


if __name__ == "__main__":
    main()
