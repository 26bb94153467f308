"""Files that commands write: never over a model or another kind of file, links and devices as they are."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from atsplan import main
from commands.shared.console import replacing
from planner.errors import FileProblem
from planner.file_kinds import kind_of
from planner.files import try_lock
from planner.quoting import utf8

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "plans/inputs/Qwen3.5-0.8B-q8_0.inventory.yaml"
PROFILE = ROOT / "plans/inputs/rtx4060-8gb-ddr5.profile.yaml"
HEAT = ROOT / "plans/inputs/Qwen3-30B-A3B.heat.csv"
PLAN = next((ROOT / "plans").glob("*.yaml"))


def solve(output: Path) -> Result:
    return CliRunner().invoke(
        main, ["solve", str(TABLE), "--profile", str(PROFILE), "--budget", "3000", "-o", str(output)]
    )


def test_kinds_are_told_by_their_beginning() -> None:
    kinds = {TABLE: "inventory", PROFILE: "profile", HEAT: "heat file", PLAN: "plan"}
    assert {path: kind_of(path.read_text()) for path in kinds} == kinds
    assert kind_of("# trace: 1\n# model:\n") == "routing trace"
    assert (kind_of(""), kind_of("services:\n  a: b\n")) == ("", "")


@pytest.mark.parametrize(
    ("source", "why"), [(PROFILE, "a profile"), (TABLE, "an inventory"), (HEAT, "a heat file")]
)
def test_a_plan_does_not_replace_another_kind(tmp_path: Path, source: Path, why: str) -> None:
    target = tmp_path / "x.yaml"
    target.write_bytes(source.read_bytes())
    result = solve(target)
    assert result.exit_code == 2
    assert result.stderr == f"atsplan: {target}: is {why}: not replaced by anything else\n"
    assert target.read_bytes() == source.read_bytes()
    assert list(tmp_path.iterdir()) == [target]


def test_a_plan_does_not_replace_a_model(tmp_path: Path, dense_model: Path) -> None:
    target = tmp_path / "m.gguf"
    target.write_bytes(dense_model.read_bytes())
    result = solve(target)
    assert (result.exit_code, result.stderr) == (2, f"atsplan: {target}: is a model file: not replaced\n")
    assert target.read_bytes() == dense_model.read_bytes()


def test_a_picture_does_not_replace_a_model(tmp_path: Path, dense_model: Path) -> None:
    target = tmp_path / "m.svg"
    target.write_bytes(dense_model.read_bytes())
    result = CliRunner().invoke(main, ["explain", str(PLAN), "--plot", str(target)])
    assert (result.exit_code, result.stderr) == (2, f"atsplan: {target}: is a model file: not replaced\n")


def test_a_plan_replaces_a_plan_through_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    target.write_bytes(PLAN.read_bytes())
    link.symlink_to(target)
    assert solve(link).exit_code == 0
    assert link.is_symlink()
    assert kind_of(target.read_text()) == "plan"
    assert target.read_bytes() != PLAN.read_bytes()


def test_what_appears_while_it_is_written_is_judged_too(tmp_path: Path) -> None:
    """Decided when the file gets its name: a model that came meanwhile stays, a plan is replaced."""
    for text, replaced in (("GGUF", False), ("measured: 1\nschema: 1\n", False), (PLAN.read_text(), True)):
        target = tmp_path / "x.yaml"
        try:
            with replacing(target, "plan") as file:
                file.write(b"new")
                target.write_text(text)
        except FileProblem as problem:
            assert "not replaced" in str(problem)
        assert target.read_text() == ("new" if replaced else text)
        assert list(tmp_path.iterdir()) == [target]
        target.unlink()


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left, busy = tmp_path / ".x.yaml.atsplan-abc", tmp_path / ".x.yaml.atsplan-def"
    left.write_text("half")
    busy.write_text("at work")
    handle = try_lock(busy)
    assert handle is not None
    try:
        assert solve(tmp_path / "x.yaml").exit_code == 0
        assert sorted(p.name for p in tmp_path.iterdir()) == [busy.name, "x.yaml"]
    finally:
        os.close(handle)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("step", ["fsync", "link", "chmod"])
def test_a_disk_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, step: str
) -> None:
    target = tmp_path / "x.yaml"
    before = {} if step == "link" else {"x.yaml": PLAN.read_bytes()}
    for name, data in before.items():
        (tmp_path / name).write_bytes(data)

    def fails(*args: object, **more: object) -> None:
        raise OSError(number, os.strerror(number))

    real = getattr(os, step)
    monkeypatch.setattr(os, step, fails)
    result = solve(target)
    monkeypatch.setattr(os, step, real)
    assert result.exit_code == 2
    assert result.stderr == f"atsplan: {target}: cannot write here: {os.strerror(number)}\n"
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_folder_that_vanishes_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    gone = pytest.raises(FileProblem, match="cannot write here: No such file or directory")
    with gone, replacing(folder / "x.yaml", "plan") as file:
        file.write(b"new")
        shutil.rmtree(folder)


def test_a_pipe_is_written_to_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        result = solve(pipe)
        assert (result.exit_code, result.stderr.splitlines()[0]) == (0, f"wrote {pipe}")
        assert kind_of(os.read(reader, 1 << 16).decode()) == "plan"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_rewrite_does_not_replace_a_pipe(tmp_path: Path, dense_model: Path) -> None:
    plan, pipe = tmp_path / "p.yaml", tmp_path / "o.gguf"
    os.mkfifo(pipe)
    machine = ["--profile", str(PROFILE), "--budget", "3000"]
    assert CliRunner().invoke(main, ["solve", str(dense_model), *machine, "-o", str(plan)]).exit_code == 0
    arguments = ["rewrite", str(dense_model), "--plan", str(plan), "-o", str(pipe), "--force"]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stderr) == (2, f"atsplan: {pipe}: is not a regular file\n")
    assert pipe.is_fifo()


def test_one_kind_given_for_another_is_said() -> None:
    result = CliRunner().invoke(main, ["explain", str(PROFILE)])
    assert result.stderr == f"atsplan: {PROFILE}:1: is a profile, a plan is needed\n"
    result = CliRunner().invoke(main, ["solve", str(TABLE), "--profile", str(PLAN)])
    assert result.stderr == f"atsplan: {PLAN}:1: is a plan, a profile is needed\n"


def test_a_model_given_for_a_text_is_not_read_whole(tmp_path: Path) -> None:
    large = tmp_path / "m.gguf"
    with large.open("wb") as file:
        file.write(b"GGUF" + bytes(4))
        file.truncate(1 << 40)
    result = CliRunner().invoke(main, ["explain", str(large)])
    assert (result.exit_code, result.stderr) == (
        2,
        f"atsplan: {large}: is a model file, a plan is needed\n",
    )


def test_names_in_no_encoding(tmp_path: Path, dense_model: Path) -> None:
    """Bytes that are not UTF-8 in a path are escapes of the shell in the command that is recorded."""
    model, target = (
        Path(os.fsdecode(os.fsencode(tmp_path) + name)) for name in (b"/\xff.gguf", b"/\xfe.yaml")
    )
    model.symlink_to(dense_model)
    arguments: list[str | Path] = ["solve", model, "--profile", PROFILE, "--budget", "3000", "-o", target]
    done = subprocess.run(
        [sys.executable, ROOT / "atsplan.py", *arguments],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "/\\377.gguf'" in target.read_text(encoding="utf-8")
    assert utf8("ü\udcff") == "ü\\udcff"


@pytest.mark.parametrize(
    "arguments",
    [
        ["solve", TABLE, "--profile", PROFILE, "-o"],
        ["sweep", TABLE, "--profile", PROFILE, "--budgets", "500:900:200", "--plot"],
        ["explain", PLAN, "--plot"],
        ["check", PLAN, "--junit"],
        ["export", PLAN, "-o"],
        ["inventory", TABLE, "-o"],
        ["profile", TABLE, "-o"],
        ["heat", "trace", "missing.gguf", "--text", "x", "-o"],
        ["heat", "import", HEAT, "-o"],
    ],
)
def test_a_target_that_cannot_be_is_told_before_any_work(tmp_path: Path, arguments: list[str | Path]) -> None:
    target = tmp_path / "no" / "x.svg"
    result = CliRunner().invoke(main, [*map(str, arguments), str(target)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"atsplan: {target}: cannot write here: there is no folder {target.parent}\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["solve", TABLE, "--time-limit", "nan"], "nan is not a finite number"),
        (["heat", "merge", HEAT, "-w", "nan"], "nan is not a finite number"),
        (["heat", "merge", HEAT, "-w", "inf"], "inf is not in the range"),
        (["heat", "merge", HEAT, "-w", "1e300"], "1e+300 is not in the range"),
        (["profile", "--seconds", "inf"], "inf is not a finite number"),
        (["heat", "trace", "m.gguf", "--temp", "inf"], "inf is not a finite number"),
    ],
)
def test_numbers_are_numbers(arguments: list[str | Path], why: str) -> None:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert why in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["check", PLAN, "--no-resolve", "--heat"], ["diff", PLAN, PLAN, "--model"], ["fmt"]]
)
def test_a_file_given_by_hand_is_read(tmp_path: Path, arguments: list[str | Path]) -> None:
    """Also where nothing asks for it: a wrong name is not passed over."""
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(main, [*map(str, arguments), str(tmp_path / "empty")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(tmp_path / "empty") in result.stderr and result.stderr.count("\n") == 1


# Commands that print tables and those that print texts.
TALKATIVE = (
    ("machines",),
    ("inventory", str(TABLE)),
    ("heat", "report", str(HEAT)),
    ("fit", str(TABLE), "--machine", "rtx4060-8gb-ddr5", "--no-levers"),
    ("solve", str(TABLE), "--machine", "rtx4060-8gb-ddr5"),
    ("diff", str(PLAN), str(PLAN), "--json"),
    ("heat", "import", str(HEAT)),
)


@pytest.mark.parametrize("words", TALKATIVE, ids=lambda words: words[0])
def test_a_reader_that_goes_away_is_no_failure(words: tuple[str, ...]) -> None:
    """As `| head -1` with pipefail: status 1 would say that the answer is no."""
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-m", "atsplan", *words], stdout=theirs, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Broken pipe" not in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_lead_nowhere(closed: str, tmp_path: Path) -> None:
    """What is printed must not end in a file that got the number of a stream."""
    made = tmp_path / "plan.yaml"
    command = f'exec "$@" {closed}'
    words = [sys.executable, "-m", "atsplan", "solve", TABLE, "--machine", "rtx4060-8gb-ddr5", "-o", made]
    done = subprocess.run(
        ["sh", "-c", command, "sh", *map(str, words)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert kind_of(made.read_text()) == "plan" and "placement" not in made.read_text()


@pytest.mark.parametrize(
    "words",
    [("explain",), ("export",), ("fmt",), ("check",), ("diff", str(PLAN)), ("fit", str(TABLE), "--profile")],
    ids=lambda words: words[0],
)
def test_a_model_given_for_another_file_is_told_what_is_needed(words: tuple[str, ...]) -> None:
    model = ROOT / "tests" / "data" / "tiny-moe.gguf"
    result = CliRunner().invoke(main, [*words, str(model)])
    needed = "profile" if "--profile" in words else "plan"
    assert result.exit_code == 2 and f"is a model file, a {needed} is needed" in result.output


def test_a_reference_is_named_as_it_was_typed() -> None:
    result = CliRunner().invoke(main, ["inventory", "https://example.org/a/model.gguf"])
    assert result.exit_code == 2
    assert result.stderr.startswith("atsplan: https://example.org/a/model.gguf: lies elsewhere")
