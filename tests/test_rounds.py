"""Paired rounds: what is measured, what survives an interruption, and how often the interval is right."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from engines import ROOT

from benchmarks.rounds.paired import (
    BadJournal,
    Bench,
    Cell,
    Contender,
    Journal,
    Session,
    cells,
    compare,
    interval,
    table,
    turned,
    whole_rounds,
)
from planner.errors import EngineProblem

MIB = 2**20


@dataclass
class Clockwork(Session):
    """A contender whose times are known: `base` times what the machine does in that round."""

    base: float
    drift: Callable[[int], float]
    log: list[str]
    name: str
    vram: int = 100 * MIB
    opened: int = field(default=0)

    def __enter__(self) -> Clockwork:
        self.log.append(f"open {self.name}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None
    ) -> None:
        self.log.append(f"close {self.name}")

    def measure(self, round_: int) -> dict[str, Any]:
        self.log.append(f"{round_} {self.name}")
        return {"decode_ns": round(self.base * self.drift(round_) * 1e6), "vram_bytes": self.vram}


def contenders(
    log: list[str], drift: Callable[[int], float] = lambda _: 1.0, **bases: float
) -> list[Contender]:
    def one(name: str, base: float) -> Contender:
        return Contender(name, lambda cell: Clockwork(base, drift, log, name))

    return [one(name, base) for name, base in bases.items()]


def journal(folder: Path) -> Journal:
    made = Journal(folder / "runs.jsonl")
    made.begin({"cpu": "here"})
    return made


BASE = Cell("base", {"residency": 50})


def test_cells_vary_one_factor_at_a_time() -> None:
    found = cells({"model": "a", "residency": 50}, residency=[25, 50, 10], model=["b"])
    assert [cell.name for cell in found] == ["base", "residency=25", "residency=10", "model=b"]
    assert found[3].factors == {"model": "b", "residency": 50}
    with pytest.raises(ValueError, match="colour"):
        cells({"model": "a"}, colour=["red"])


def test_a_drifting_machine_does_not_touch_the_ratio(tmp_path: Path) -> None:
    """Everything gets slower threefold over the rounds; paired, the ratio is 2 all the same."""
    log: list[str] = []
    mine = journal(tmp_path)
    both = contenders(log, lambda index: 1.3**index, ours=2.0, theirs=4.0)
    assert Bench(mine, both).run([BASE])
    found = compare(mine.records(), "base", "ours", "theirs", "decode_ns")
    assert found is not None and found.rounds == 5 and found.equal_vram
    assert found.low <= 2.0 <= found.high and found.high - found.low < 1e-5
    unpaired = [r["decode_ns"] for r in mine.records() if r.get("contender") == "ours"]
    assert max(unpaired) > 2.5 * min(unpaired)


def test_contenders_alternate_and_load_once(tmp_path: Path) -> None:
    log: list[str] = []
    Bench(journal(tmp_path), contenders(log, a=1, b=1, c=1), rounds=4).run([BASE])
    assert log[:3] == ["open a", "open b", "open c"] and log[-3:] == ["close c", "close b", "close a"]
    order = [[entry.split()[1] for entry in log[3:-3] if entry.startswith(f"{i} ")] for i in range(4)]
    assert all(sorted(names) == ["a", "b", "c"] for names in order)
    assert len({names[0] for names in order}) > 1 and order[0] != order[1]


def test_each_goes_first_equally_often() -> None:
    three = contenders([], a=1, b=1, c=1)
    first = [turned(three, index)[0].name for index in range(6)]
    assert sorted(first) == ["a", "a", "b", "b", "c", "c"]


def test_without_room_for_all_each_is_loaded_for_its_run(tmp_path: Path) -> None:
    log: list[str] = []
    Bench(journal(tmp_path), contenders(log, a=1, b=1), rounds=2, together=False).run([BASE])
    assert log.count("open a") == log.count("close a") == 2
    opened = 0
    for entry in log:
        opened += entry.startswith("open") - entry.startswith("close")
        assert opened <= 1


_INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from benchmarks.rounds.paired import Bench, Cell, Contender, Journal, Session

class Slow(Session):
    def __init__(self, name): self.name = name
    def __exit__(self, *_): pass
    def measure(self, round_):
        if self.name == "b" and round_ == 2 and sys.argv[2] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"decode_ns": 1000 * (round_ + 1) * (2 if self.name == "b" else 1), "vram_bytes": 1}

journal = Journal(Path(sys.argv[1]))
journal.begin({"visit": sys.argv[2]})
made = [Contender(name, lambda cell, name=name: Slow(name)) for name in "ab"]
print(Bench(journal, made).run([Cell("base", {})]))
"""


def visit(path: Path, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(_INTERRUPTED), str(path), how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)


def test_a_killed_visit_loses_nothing_and_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert visit(path, "die").returncode == -signal.SIGKILL
    before = path.read_bytes()
    kept = whole_rounds(Journal(path).records(), "base", ("a", "b"))
    assert len(kept) == 2
    with path.open("ab") as handle:
        handle.write(b'{"visit":"1","kind":"run","cell":"ba')  # as a full disk or a lost machine leaves it
    done = visit(path, "finish")
    assert done.stdout.strip() == "True", done.stderr
    assert path.read_bytes().startswith(before)  # appended, never rewritten
    records = Journal(path).records()
    assert [r["machine"]["visit"] for r in records if r["kind"] == "visit"] == ["die", "finish"]
    whole = whole_rounds(records, "base", ("a", "b"))
    assert len(whole) == 5 and all(one["a"]["visit"] == one["b"]["visit"] for one in whole)
    # The broken round was run again as a whole: its lonely half is there, but counts for nothing.
    assert len([r for r in records if r.get("contender") == "a"]) == 6
    found = compare(records, "base", "a", "b", "decode_ns")
    assert found is not None and found.rounds == 5 and math.isclose(found.mean, 2.0)
    again = path.read_bytes()
    assert visit(path, "finish").stdout.strip() == "True"
    assert path.read_bytes().startswith(again) and path.read_bytes().count(b'"run"') == again.count(b'"run"')


def test_rounds_of_two_machines_are_never_paired(tmp_path: Path) -> None:
    mine = journal(tmp_path)
    Bench(mine, contenders([], ours=1.0), rounds=5).run([BASE])
    mine.begin({"cpu": "elsewhere"})
    Bench(mine, contenders([], theirs=9.0), rounds=5).run([BASE])
    assert compare(mine.records(), "base", "ours", "theirs", "decode_ns") is None


def test_what_holds_for_a_cell_is_written_into_its_records(tmp_path: Path) -> None:
    inside: list[str] = []

    @contextmanager
    def within(cell: Cell) -> Iterator[dict[str, Any]]:
        inside.append(f"in {cell.name}")
        yield {"cores": cell.factors["cores"]}
        inside.append(f"out {cell.name}")

    mine = journal(tmp_path)
    both = cells({"cores": 16}, cores=[4])
    assert Bench(mine, contenders([], a=1.0), rounds=1, within=within).run(both)
    assert [(r["cell"], r["cores"]) for r in mine.records()[1:]] == [("base", 16), ("cores=4", 4)]
    assert inside == ["in base", "out base", "in cores=4", "out cores=4"]


def test_time_that_is_over_ends_between_runs(tmp_path: Path) -> None:
    log: list[str] = []
    assert not Bench(journal(tmp_path), contenders(log, a=1), ends=time.monotonic() - 1).run([BASE])
    assert log == []


def test_a_failure_is_recorded_and_spoils_no_other(tmp_path: Path) -> None:
    def broken(cell: Cell) -> Session:
        raise EngineProblem("build", "out of memory")

    log: list[str] = []
    mine = journal(tmp_path)
    three = [*contenders(log, ours=1.0, theirs=3.0), Contender("broken", broken)]
    assert Bench(mine, three).run([BASE])
    failed = [r for r in mine.records() if r["kind"] == "failed"]
    assert len(failed) == 5 and "out of memory" in failed[0]["why"]
    found = compare(mine.records(), "base", "ours", "theirs", "decode_ns")
    assert found is not None and found.rounds == 5
    assert compare(mine.records(), "base", "ours", "broken", "decode_ns") is None
    assert "out of memory" not in table(mine.records(), "ours", ["decode_ns"])


def test_more_vram_than_the_rival_is_no_comparison(tmp_path: Path) -> None:
    mine = journal(tmp_path)
    greedy = Contender("ours", lambda cell: Clockwork(1.0, lambda _: 1.0, [], "ours", vram=104 * MIB))
    Bench(mine, [greedy, *contenders([], theirs=2.0)]).run([BASE])
    found = compare(mine.records(), "base", "ours", "theirs", "decode_ns")
    assert found is not None and not found.equal_vram
    text = table(mine.records(), "ours", ["decode_ns"])
    assert "more VRAM than the rival" in text and "2.00×" not in text


def test_the_interval_holds_the_truth_in_95_of_100_cases() -> None:
    """Log-normal noise on each run, shared machine drift in each round; 4000 benchmarks of five rounds."""
    draw = random.Random(5)
    truth, inside, n = math.log(1.3), 0, 4000
    for _ in range(n):
        logs = []
        for _ in range(5):
            drift = draw.gauss(0, 0.5)
            ours, theirs = drift + draw.gauss(0, 0.05), drift + truth + draw.gauss(0, 0.05)
            logs.append(theirs - ours)
        _, low, high = interval(logs)
        inside += low <= truth <= high
    assert 0.94 < inside / n < 0.96


def test_one_round_proves_nothing() -> None:
    assert interval([0.5]) == (0.5, -math.inf, math.inf)


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"visit":"1","kind":"visit","machine":{}}\nnot json\n')
    with pytest.raises(BadJournal, match=r"runs\.jsonl line 2"):
        Journal(path).records()
    path.write_text(json.dumps([1]) + "\n")
    with pytest.raises(BadJournal, match="line 1"):
        Journal(path).records()


def test_loaded_models_take_turns_over_the_same_stream(tmp_path: Path) -> None:
    """The real engine in two processes, which read the same tokens and find the same logits."""
    from benchmarks.rounds import visit
    from benchmarks.rounds.live import Live, Work
    from planner.plan.load_spec import LoadSpec
    from planner.workload import Workload
    from profiler.routed import model
    from profiler.routed.presets import PRESETS

    preset = PRESETS["gpt-oss"]
    path = model.write(tmp_path / "m.gguf", preset.spec("small"), preset.habits)
    spec = LoadSpec((), (), 0, (), Workload(n_ctx=256, n_batch=64, n_ubatch=64), threads=1)
    work = Work(prompts=(100,), depth=20, gen=6)
    made = [Contender(name, lambda cell: Live("", path, spec, work)) for name in ("ours", "theirs")]
    made.append(Contender("broken", lambda cell: Live("", tmp_path / "none.gguf", spec, work)))
    mine = Journal(tmp_path / "runs.jsonl")
    mine.begin(visit.facts("", "host"))
    assert Bench(mine, made, rounds=2).run([BASE])
    records = mine.records()
    machine = records[0]["machine"]
    assert machine["cpu_gb_s"] > 0 and machine["link_gb_s"] > 0 and machine["engine"].startswith("llama ")
    runs = [r for r in records if r["kind"] == "run"]
    assert len(runs) == 4 and len({r["digest"] for r in runs}) == 1
    assert all(r["decode_ns"] > 0 and r["prefill100_ns"] > 0 and r["vram_bytes"] == 0 for r in runs)
    assert "none.gguf" in next(r["why"] for r in records if r["kind"] == "failed")
    found = compare(records, "base", "ours", "theirs", "prefill100_ns")
    assert found is not None and found.rounds == 2 and found.low < found.mean < found.high
