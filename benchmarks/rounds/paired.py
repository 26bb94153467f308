"""One way to measure: contenders alternate in paired rounds, and every result is appended to a journal.

A *visit* is one stay on one machine; a *cell* is a set of factors; a *round* runs every contender of a cell
once, in an order that turns from round to round. Only rounds that one visit finished are compared: the
ratio of two contenders is the geometric mean over such rounds, with a 95 % interval by Student's t from
their log-ratios. Contenders whose measured VRAM differs are not compared.

The journal is JSON lines, appended and never rewritten. After an interruption the same call goes on: rounds
that are whole stay, a broken one is run again from its start.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import AtsplanError, InputError

Json = dict[str, Any]
ROUNDS = 5
VRAM_TOLERANCE = 0.02
# 0.975 quantiles of Student's t by degrees of freedom; above 30 the one of 30 is a little too wide.
_T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(eq=False)
class BadJournal(InputError):
    """A journal with a line that is not a record."""

    path: Path
    line: int

    def message(self) -> str:
        return f"{self.path} line {self.line}: not a JSON object"


@dataclass(frozen=True, slots=True)
class Cell:
    """What one comparison holds fixed."""

    name: str
    factors: Mapping[str, Any]


def cells(base: Mapping[str, Any], **varied: Iterable[Any]) -> list[Cell]:
    """The base cell, then each factor of `varied` changed alone, named `factor=value`."""
    found = [Cell("base", dict(base))]
    for factor, values in varied.items():
        if factor not in base:
            raise ValueError(f"{factor} is no factor of the base cell")
        found += [Cell(f"{factor}={v}", {**base, factor: v}) for v in values if v != base[factor]]
    return found


class Session(AbstractContextManager["Session"]):
    """A contender that is ready to measure; leaving it frees what it holds."""

    def measure(self, round_: int) -> Json:
        """One run: times in nanoseconds by measure's name, and `vram_bytes`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run a cell. `open` raises AtsplanError when it cannot; that is recorded as a failure."""

    name: str
    open: Callable[[Cell], Session]


@dataclass(slots=True)
class Journal:
    """An append-only file of records, `kind` visit, run or failed."""

    path: Path
    visit: str = ""

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record; it is on the disk when this returns."""
        line = json.dumps({"visit": self.visit, **record}, separators=(",", ":")).encode() + b"\n"
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            end = os.lseek(handle, 0, os.SEEK_END)
            if end and os.pread(handle, 1, end - 1) != b"\n":
                line = b"\n" + line  # the last visit ended in the middle of a line
            os.write(handle, line)
            os.fsync(handle)
        finally:
            os.close(handle)

    def begin(self, machine: Mapping[str, Any]) -> None:
        """Start a visit: what the machine is, and its CPU and link rates as found now."""
        known = sum(1 for record in self.records() if record["kind"] == "visit")
        self.visit = f"{known + 1}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
        self.append({"kind": "visit", "machine": dict(machine)})

    def records(self) -> list[Json]:
        """All records. A line that was cut off is passed over; raises BadJournal for any other damage."""
        if not self.path.exists():
            return []
        found = []
        for number, line in enumerate(self.path.read_text(errors="replace").split("\n"), start=1):
            try:
                record = json.loads(line) if line.strip() else None
            except json.JSONDecodeError:
                if _cut_off(line):
                    continue
                raise BadJournal(self.path, number) from None
            if record is not None:
                if not isinstance(record, dict) or "kind" not in record:
                    raise BadJournal(self.path, number)
                found.append(record)
        return found


def _cut_off(line: str) -> bool:
    """Whether a line is the beginning of a record, as an interruption leaves it."""
    head = '{"visit":'
    return (line.startswith(head) or head.startswith(line)) and not line.endswith("}")


@dataclass(slots=True)
class Bench:
    """Runs cells, contender by contender and round by round, until `ends` (of time.monotonic)."""

    journal: Journal
    contenders: Sequence[Contender]
    rounds: int = ROUNDS
    ends: float = math.inf
    together: bool = True  # keep all contenders of a cell loaded; False: load for each run
    tell: Callable[[str], None] = field(default=lambda text: None)
    # Around all of a cell, such as fewer cores: what it yields is written into each record of the cell.
    within: Callable[[Cell], AbstractContextManager[Mapping[str, Any]]] = field(
        default=lambda cell: nullcontext(dict[str, Any]())
    )

    def run(self, cells: Iterable[Cell]) -> bool:
        """Measure what the journal lacks; whether all of it is there now."""
        return all([self._cell(cell) for cell in cells])  # noqa: C419  # every cell, also after a late one

    def _cell(self, cell: Cell) -> bool:
        names = [one.name for one in self.contenders]
        done = len(whole_rounds(self.journal.records(), cell.name, names))
        if done >= self.rounds or time.monotonic() > self.ends:
            return done >= self.rounds
        with ExitStack() as stack:
            given = stack.enter_context(self.within(cell))
            alive = (
                {one.name: self._opened(stack, one, cell) for one in self.contenders} if self.together else {}
            )
            for index in range(done, self.rounds):
                if time.monotonic() > self.ends:
                    return False
                attempt = f"{index}.{time.time_ns()}"
                for one in turned(self.contenders, index):
                    self._one(cell, one, {"round": index, "attempt": attempt, **given}, alive)
        return True

    def _opened(self, stack: ExitStack, one: Contender, cell: Cell) -> Session | str:
        try:
            return stack.enter_context(one.open(cell))
        except AtsplanError as problem:
            return str(problem)

    def _one(
        self, cell: Cell, one: Contender, about: Mapping[str, Any], alive: Mapping[str, Session | str]
    ) -> None:
        record: Json = {"cell": cell.name, "factors": dict(cell.factors), "contender": one.name}
        record |= about
        with ExitStack() as stack:
            session = alive[one.name] if self.together else self._opened(stack, one, cell)
            try:
                if isinstance(session, str):
                    record |= {"kind": "failed", "why": session}
                else:
                    record |= {"kind": "run", **session.measure(record["round"])}
            except AtsplanError as problem:
                record |= {"kind": "failed", "why": str(problem)}
        self.journal.append(record)
        self.tell(line(record))


def turned(contenders: Sequence[Contender], index: int) -> list[Contender]:
    """The order of a round: turned by one each time, and backwards in every second."""
    start = index % len(contenders)
    order = [*contenders[start:], *contenders[:start]]
    return order[::-1] if index % 2 else order


def whole_rounds(records: Iterable[Json], cell: str, names: Sequence[str]) -> list[dict[str, Json]]:
    """Rounds of a cell that have a record of every contender named, from one visit and one attempt."""
    found: dict[tuple[str, str], dict[str, Json]] = {}
    for record in records:
        if record["kind"] != "visit" and record["cell"] == cell:
            found.setdefault((record["visit"], record["attempt"]), {})[record["contender"]] = record
    return [one for one in found.values() if all(name in one for name in names)]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of `theirs` over time of `ours`: above 1, ours is faster."""

    cell: str
    measure: str
    ours: str
    theirs: str
    mean: float
    low: float  # 95 % interval; 0 and infinity from a single round
    high: float
    rounds: int
    vram: tuple[int, int]  # largest measured bytes, ours and theirs

    @property
    def equal_vram(self) -> bool:
        """Whether ours took no more than theirs, but for VRAM_TOLERANCE."""
        return self.vram[0] <= self.vram[1] * (1 + VRAM_TOLERANCE)


def compare(records: Iterable[Json], cell: str, ours: str, theirs: str, measure: str) -> Ratio | None:
    """The ratio over all whole rounds in which both worked; None without any."""
    pairs = [
        (one[ours], one[theirs])
        for one in whole_rounds(records, cell, (ours, theirs))
        if all(one[name]["kind"] == "run" and measure in one[name] for name in (ours, theirs))
    ]
    if not pairs:
        return None
    mean, low, high = interval([math.log(b[measure] / a[measure]) for a, b in pairs])
    vram = (max(a.get("vram_bytes", 0) for a, _ in pairs), max(b.get("vram_bytes", 0) for _, b in pairs))
    return Ratio(cell, measure, ours, theirs, math.exp(mean), math.exp(low), math.exp(high), len(pairs), vram)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the 95 % interval of the mean by Student's t."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return mean, -math.inf, math.inf
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = _T975[min(n - 1, len(_T975)) - 1] * deviation / math.sqrt(n)
    return mean, mean - half, mean + half


def table(records: Sequence[Json], ours: str, measures: Sequence[str]) -> str:
    """Markdown: a line for each cell, measure and rival, with what is not comparable named so."""
    runs = [record for record in records if record["kind"] != "visit"]
    lines = ["| cell | measure | rival | ratio | 95 % | rounds | VRAM, MiB: ours, rival |", "|" + "---|" * 7]
    for cell in dict.fromkeys(record["cell"] for record in runs):
        names = dict.fromkeys(record["contender"] for record in runs if record["cell"] == cell)
        for measure in measures:
            for rival in names:
                found = compare(runs, cell, ours, rival, measure) if rival != ours else None
                if found is not None:
                    lines.append(_row(found))
    return "\n".join(lines)


def _row(r: Ratio) -> str:
    said = (
        (f"{r.mean:.2f}×", f"{r.low:.2f}–{r.high:.2f}") if r.equal_vram else ("more VRAM than the rival", "")
    )
    vram = ", ".join(f"{v / 2**20:.0f}" for v in r.vram)
    return f"| {r.cell} | {r.measure} | {r.theirs} | {said[0]} | {said[1]} | {r.rounds} | {vram} |"


def line(record: Mapping[str, Any]) -> str:
    """One run as text."""
    head = f"{record['cell']} round {record['round']} {record['contender']}"
    if record["kind"] == "failed":
        return f"{head}: {record['why']}"
    times = ", ".join(f"{k[:-3]} {v / 1e6:.2f} ms" for k, v in record.items() if k.endswith("_ns"))
    return f"{head}: {times}, {record.get('vram_bytes', 0) / 2**20:.0f} MiB"
