"""Damaged files of every format: an answer or one line, and nothing else. tests/fuzz.py says how."""

from __future__ import annotations

import time

import fuzz
import fuzz_targets
import pytest
from click.testing import CliRunner

from atsplan import main

MUTANTS = 4000
PROCESSES = 24
# Refused although nothing is damaged: what the command says of them is part of what is tried.
REFUSED = {("heat", "import", "model.gguf")}


def told(found: list[fuzz.Finding]) -> str:
    return "\n".join(f"{' '.join(f.command)}: {f.why}\n{f.line()[:2000]}" for f in found[:5])


@pytest.mark.parametrize(
    "index", range(len(fuzz_targets.TARGETS)), ids=[t.place for t in fuzz_targets.TARGETS]
)
def test_seeds_are_read(index: int) -> None:
    """Undamaged files are taken by every command: else damage would be tried on nothing."""
    target = fuzz_targets.TARGETS[index]
    with fuzz.ground() as ground:
        for command in target.commands:
            ground.lay(target, (fuzz_targets.DATA / "seeds" / target.seed).read_bytes())
            assert ground.wrong(command) == ""
            if not command[0].startswith("(") and command not in REFUSED:
                ground.lay(target, (fuzz_targets.DATA / "seeds" / target.seed).read_bytes())
                assert CliRunner().invoke(main, list(command)).exit_code == 0, command


def test_every_seed_is_fuzzed() -> None:
    used = {target.seed for target in fuzz_targets.TARGETS} | {
        s for t in fuzz_targets.TARGETS for s, _ in t.beside
    }
    assert used == {path.name for path in (fuzz_targets.DATA / "seeds").iterdir()}


def test_what_once_failed_does_not() -> None:
    with fuzz.ground() as ground:
        for index, data in fuzz.known():
            for command in fuzz_targets.TARGETS[index].commands:
                ground.lay(fuzz_targets.TARGETS[index], data)
                assert ground.wrong(command) == "", command


def test_damaged_files_are_answered_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    found = [one for one in fuzz.findings(20261130, range(MUTANTS)) if one]
    with capsys.disabled():
        print(f"\n{MUTANTS} mutants took {time.process_time() - began:.0f} s of CPU time")
    assert not found, told(found)


def test_damaged_files_as_real_processes() -> None:
    found = [one for one in fuzz.findings(20261201, range(PROCESSES), PROCESSES) if one]
    assert not found, told(found)


def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer sees a traceback, a hang and a file left behind when there is one."""
    from planner.model.gguf import reader

    def broken(path: object) -> None:
        raise IndexError("oops")

    monkeypatch.setattr(reader, "read_model", broken)
    with fuzz.ground() as ground:
        ground.lay(fuzz_targets.TARGETS[0], b"GGUF")
        assert "IndexError: oops" in ground.wrong(("inventory", "model.gguf"))

    def endless(path: object) -> None:
        while True:
            pass

    monkeypatch.setattr(reader, "read_model", endless)
    monkeypatch.setattr(fuzz, "CPU_SECONDS", 0.05)
    with fuzz.ground() as ground:
        ground.lay(fuzz_targets.TARGETS[0], b"GGUF")
        assert "CPU time" in ground.wrong(("inventory", "model.gguf"))
