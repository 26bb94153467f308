"""Names that stand for no file: pipes, devices, loops and endless files, given to every command that reads.

Each is refused in one line, and nothing waits for it: a folder of a stranger may hold a named pipe.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import fuzz_targets
import pytest
from click.testing import CliRunner

from atsplan import main
from commands.shared import console
from planner.errors import FileProblem
from planner.files import regular
from rewriter.publishing.journal import read_journal

MACHINE = "--machine rtx4060-8gb-ddr5 --budget 1000 --ctx 512"
ODD = ("pipe", "loop", "zeros", "terminal", "memory", "folder", "missing", "endless", "empty/within", "")
PATIENCE_S = 120  # by the clock: what waits for a pipe takes no CPU time
COMMANDS = (
    "inventory @",
    "inventory model.gguf --mmproj @",
    "inventory model.gguf --draft @",
    "fit @ --machine rtx4060-8gb-ddr5",
    "fit model.gguf --profile @",
    "solve @ MACHINE",
    "solve model.gguf --profile @",
    "solve moe.yaml MACHINE --heat @",
    "solve moe.yaml MACHINE --cache @",
    "solve model.gguf MACHINE --draft @",
    "solve model.gguf MACHINE --mmproj @",
    "check plan.yaml --no-resolve --model @",
    "check plan.yaml --no-resolve --profile @",
    "diff plan.yaml @",
    "diff plan.yaml plan.yaml --model @",
    "fmt @",
    "explain @",
    "explain plan.yaml --model @",
    "export @",
    "export plan.yaml --inventory @",
    "export plan.yaml --profile @",
    "rewrite @ --plan order.yaml -o o.gguf",
    "rewrite model.gguf --plan @ -o o.gguf",
    "rewrite @ --undo -o o.gguf",
    "verify @",
    "verify model.gguf @",
    "verify @ rewritten.gguf --plan order.yaml",
    "verify model.gguf rewritten.gguf --plan @",
    "heat import @",
    "heat import heat.csv --model @",
    "heat import heat.csv --permutation @",
    "heat merge heat.csv @",
    "heat report @",
    "heat export @ --to perms",
    "heat trace model.gguf --prompts @",
    "simulate @",
    "simulate trace.csv --hot @",
    "simulate trace.csv --model @",
    "machines @",
    "run model.gguf --plan @",
    "serve model.gguf --plan @",
    "bench model.gguf --plan @",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good files, and names that are none."""
    made = tmp_path_factory.mktemp("odd")
    for source in (fuzz_targets.DATA / "seeds").iterdir():
        shutil.copy(source, made / source.name)
    shutil.copy(made / "moe.inventory.yaml", made / "moe.yaml")
    (made / "inputs").mkdir()
    for name, place in fuzz_targets.INPUTS:
        shutil.copy(fuzz_targets.DATA / "seeds" / name, made / place)
    os.mkfifo(made / "pipe")
    (made / "loop").symlink_to("loop")
    (made / "zeros").symlink_to("/dev/zero")
    (made / "terminal").symlink_to("/dev/tty")
    (made / "memory").symlink_to("/proc/self/mem")
    (made / "folder").mkdir()
    (made / "empty").touch()
    with (made / "endless").open("wb") as file:
        file.write(b"schema: 1\n")
        file.truncate(2**40)  # sparse
    return made


@pytest.fixture
def patience() -> Iterator[None]:
    """A test that waits for a pipe fails."""

    def over(number: int, frame: object) -> None:
        raise TimeoutError("waits")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(PATIENCE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("line", COMMANDS)
def test_no_command_waits_for_what_is_no_file(
    line: str, folder: Path, patience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    for odd in ODD:
        words = [odd if w == "@" else w for w in line.replace("MACHINE", MACHINE).split(" ")]
        done = CliRunner().invoke(main, words)
        assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exception)
        said = [text for text in done.stderr.splitlines() if text.startswith("atsplan")]
        if words[0] == "check" and done.exit_code == 2 and not said:  # a finding like any other
            said = [text for text in done.stdout.splitlines() if re.fullmatch(r".*:1: .* \[\w+\]", text)]
        assert (done.exit_code, len(said)) in ((1, 1), (2, 1), (0, 0), (1, 0)), (words, done.output)
        assert done.exit_code or odd in ("folder", ""), words  # a folder without models, or this one
        assert sorted(folder.iterdir()) == before, words


@pytest.mark.parametrize("odd", ["pipe", "zeros", "terminal", "loop", "endless"])
def test_plans_of_a_folder_are_files(odd: str, folder: Path, tmp_path: Path, patience: None) -> None:
    """`check` of a folder, as a gate of pull requests: it says what it did not read."""
    shutil.copytree(folder / "inputs", tmp_path / "inputs")
    shutil.copy(folder / "plan.yaml", tmp_path / "plan.yaml")
    (tmp_path / "other.yaml").symlink_to(folder / odd)
    done = CliRunner().invoke(main, ["check", str(tmp_path), "--no-resolve"])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert (
        f"{tmp_path / 'other.yaml'}:1: " in done.stdout and "2 plans checked, 1 with findings" in done.stderr
    )


def test_a_text_that_a_shell_hands_over_is_read(tmp_path: Path) -> None:
    """`atsplan fmt <(git show HEAD:plan.yaml)` names a pipe by its number."""
    reading, writing = os.pipe()
    os.write(writing, b"schema: 1\n")
    os.close(writing)
    try:
        assert console.read_text(Path(f"/dev/fd/{reading}")) == "schema: 1\n"
    finally:
        os.close(reading)


def test_texts_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.yaml"
    path.write_text("a" * 5000)
    assert len(console.read_text(path)) == 5000
    monkeypatch.setattr(console, "TEXT_BYTES", 4999)
    with pytest.raises(FileProblem, match="is larger than"):
        console.read_text(path)


def test_journals_of_a_publication_are_files(tmp_path: Path, patience: None) -> None:
    os.mkfifo(tmp_path / "journal.yaml")
    with pytest.raises(FileProblem, match="is not a regular file"):
        read_journal(tmp_path)
    with pytest.raises(FileProblem), regular(tmp_path / "journal.yaml"):
        pass


NUMBERS = (
    "9" * 5000,
    "99999999999999999999",
    "\uff11\uff12",
    "\u00b2",
    "-1",
    "NaN",
    "1e400",
    "1e300",
    "",
    "0x10",
    "1_000",
)


@pytest.mark.parametrize("number", NUMBERS, ids=range(len(NUMBERS)))
@pytest.mark.parametrize(
    "line",
    [
        "fit model.gguf --machine rtx4060-8gb-ddr5 --ctx @",
        "fit model.gguf --machine rtx4060-8gb-ddr5 --budget @",
        "solve model.gguf --machine rtx4060-8gb-ddr5 --budget 1000 --ctx @",
        "solve model.gguf --machine rtx4060-8gb-ddr5 --budget 1000 --ctx 512 -ngl @",
        "solve model.gguf --machine rtx4060-8gb-ddr5 --ctx 512 --reserve @",
        "solve model.gguf --machine rtx4060-8gb-ddr5 --ctx 512 --workload gen=@",
        "sweep model.gguf --machine rtx4060-8gb-ddr5 --ctx 512 --budgets 1:@:1",
        "simulate trace.csv --slots @",
        "simulate trace.csv --upload @",
        "simulate trace.csv --fixed-ms @ --miss-ms @ --json",
        "simulate trace.csv --half-life @",
        "heat export heat.csv --to moe-layer-perf --budget @",
    ],
)
def test_numbers_of_a_command_line_are_taken_or_refused_in_one_line(
    line: str, number: str, folder: Path, patience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(main, [w.replace("@", number) for w in line.split(" ")])
    assert isinstance(done.exception, SystemExit | None), done.exception
    assert done.exit_code in (0, 2) and len(done.stderr) < 9000


def test_a_library_whose_name_is_no_text_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = ["solve", "model.gguf", *MACHINE.split(" "), "--fit", "\udcff"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code in (2, 3) and isinstance(done.exception, SystemExit), done.output
