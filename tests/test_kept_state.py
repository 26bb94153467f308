"""What this program keeps between runs: damage of every kind heals with one line, nothing bad is loaded."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from engines import missing

from atsplan import main
from commands import demo
from planner.machine.profile import from_text
from profiler import runner, session
from profiler.journal import Journal, Line
from runtime.cache import libraries
from runtime.cache.folder import cache_folder, distrust, put_aside
from runtime.cache.libraries import RECORD, UntrustedLibrary, check, keep
from runtime.engine import locate
from runtime.engine.libllama import Engine
from runtime.hybrid import build, device

Damage = Callable[[Path], None]


def _truncated(path: Path) -> None:
    text = path.read_bytes()
    lines = text.split(b"\n")
    path.write_bytes(b"\n".join(lines[:3]) + b"\n" + lines[3][:20] + b"\n" + b"\n".join(lines[4:]))


def _a_bit_flipped(path: Path) -> None:
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 1
    path.write_bytes(text)


def _a_digit_changed(path: Path) -> None:
    path.write_text(path.read_text().replace('"memory_bytes": ', '"memory_bytes": 1', 1))


def _nul_bytes(path: Path) -> None:
    """As some file systems leave them after a power failure."""
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2] + bytes(size - size // 2 - 1) + b"\n")


def _a_line_missing(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]))


def _a_line_twice(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3] + lines[2:]))


def _garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 20)


def _nothing_but_lines(path: Path) -> None:
    path.write_bytes(b"\n\n\n")


def _plain_json(path: Path) -> None:
    """What a former version wrote."""
    path.write_text('{"kind": "machine", "facts": {}}\n{"kind": "ca{"kind": "case", "key": "a"}\n')


def _a_folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def _a_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _a_dead_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


def _a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _writable_by_all(path: Path) -> None:
    path.chmod(0o666)


def _of_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, 12345)


def _unreadable(path: Path) -> None:
    if not os.geteuid():
        pytest.skip("root reads everything")
    path.chmod(0)


def _enormous(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(2**40)  # sparse


DAMAGES: tuple[Damage, ...] = (
    *(_truncated, _a_bit_flipped, _a_digit_changed, _nul_bytes, _a_line_missing, _a_line_twice, _garbage),
    *(_nothing_but_lines, _plain_json, _a_folder, _a_link, _a_dead_link, _a_pipe, _writable_by_all),
    *(_of_another_user, _unreadable, _enormous),
)


@pytest.fixture(scope="module")
def figures() -> tuple[Line, ...]:
    """What a real child says of this machine."""
    return (*runner.figures(None, (), 1, 0.01), {"kind": "link-end", "load": 0.1})


def journal_of(folder: Path, figures: tuple[Line, ...]) -> Journal:
    made = Journal("m", folder=folder)
    made.add({"kind": "machine", "facts": {"cpu": "x"}})
    for line in figures:
        made.add(line)
    made.add({"kind": "case", "key": "a", "skipped": "why"})
    made.add({"kind": "run", "key": "b", "model": "sha256:0", "decode_ns": [1, 2], "paged_bytes": 0})
    made.add({"kind": "stream", "device": "CPU", "bytes_per_s": 1, "slowed": []})
    made.add({"kind": "heat", "events": 2})
    return made


def test_a_whole_journal_is_continued(tmp_path: Path, figures: tuple[Line, ...]) -> None:
    first = journal_of(tmp_path, figures)
    again = Journal("m", folder=tmp_path)
    assert (again.lines, again.damage) == (json.loads(json.dumps(first.lines)), "")
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o600


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_an_interruption_at_any_byte_loses_its_line_only(cut: int, tmp_path: Path) -> None:
    first = Journal("m", folder=tmp_path)
    for n in range(5):
        first.add({"kind": "case", "key": str(n), "skipped": "why"})
    text = first.path.read_bytes()
    os.truncate(first.path, min(cut, len(text)))
    again = Journal("m", folder=tmp_path)
    whole = text[:cut].count(b"\n")
    assert (again.damage, len(again.lines)) == ("", max(whole - 1, 0))
    again.add({"kind": "case", "key": "new", "skipped": "why"})
    third = Journal("m", folder=tmp_path)
    assert (third.damage, third.lines) == ("", again.lines)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_journal_is_put_aside(damage: Damage, tmp_path: Path, figures: tuple[Line, ...]) -> None:
    path = journal_of(tmp_path, figures).path
    damage(path)
    found = Journal("m", folder=tmp_path)
    assert found.lines == []
    assert found.damage.startswith(f"{path}: ") and "\n" not in found.damage
    assert f"put aside as {path.name}.bad" in found.damage
    assert os.path.lexists(f"{path}.bad") and not os.path.lexists(path)
    found.add({"kind": "case", "key": "new", "skipped": "why"})
    again = Journal("m", folder=tmp_path)
    assert (again.damage, [line["key"] for line in again.lines]) == ("", ["new"])
    damage(journal_of(tmp_path / "more", figures).path)  # and once more, over what was put aside before
    assert Journal("m", folder=tmp_path / "more").damage


def test_a_journal_that_stays_in_the_way_costs_the_continuation_only(tmp_path: Path) -> None:
    path = Journal("m", folder=tmp_path).path
    path.mkdir()
    (tmp_path / f"{path.name}.bad").mkdir()
    mount = tmp_path / "kept"
    path.rename(mount)
    path.symlink_to(mount)
    tmp_path.chmod(0o500)
    try:
        found = Journal("m", folder=tmp_path)
        found.add({"kind": "case", "key": "new", "skipped": "why"})
        found.finish()
        assert found.damage and [line["key"] for line in found.lines] == ["new"]
    finally:
        tmp_path.chmod(0o700)


def _sealed(lines: list[object]) -> bytes:
    """Lines with right checksums, whatever they say."""
    total, out = 0, b""
    for line in lines:
        text = json.dumps(line).encode()
        total = zlib.crc32(text, total)
        out += b"%08x %s\n" % (total, text)
    return out


HEAD = {"kind": "journal", "schema": 1}
CPU = {"kind": "device", "name": "CPU", "device_kind": "cpu", "stream_bytes_per_s": 1}


@pytest.mark.parametrize(
    "lines",
    [
        [{"kind": "journal", "schema": 2}, {"kind": "machine", "facts": {}}],
        [{"kind": "machine", "facts": {}}],
        [HEAD, {"kind": "machine", "facts": "x"}],
        [HEAD, {"kind": "machine"}],
        [HEAD, {"kind": "dream"}],
        [HEAD, {}],
        [HEAD, []],
        [HEAD, 7],
        [HEAD, {"kind": "case", "key": "a"}],
        [HEAD, {"kind": "case", "key": "a", "time_ns": "1", "spread_ns": 1, "samples": 1}],
        [HEAD, {"kind": "run", "key": "a", "model": "m", "decode_ns": 3, "paged_bytes": 0}],
        [HEAD, {"kind": "engine", "text": "e"}, CPU],
        [HEAD, {"kind": "link-end", "load": 0.1}],
        [HEAD, {"kind": "engine", "text": "e"}, CPU, {"kind": "link-end", "load": 0.1}],
        [HEAD, {"kind": "stream", "device": "CUDA0", "bytes_per_s": 1, "slowed": []}],
        [HEAD, {"kind": "place", "place": {"nowhere": 1}}],
    ],
)
def test_whole_lines_of_another_program_are_put_aside(lines: list[object], tmp_path: Path) -> None:
    path = Journal("m", folder=tmp_path).path
    path.write_bytes(_sealed(lines))
    path.chmod(0o600)
    found = Journal("m", folder=tmp_path)
    assert found.lines == [] and "put aside" in found.damage


def test_an_old_journal_is_forgotten_without_a_word(tmp_path: Path) -> None:
    path = Journal("m", folder=tmp_path).path
    path.write_bytes(_sealed([HEAD]))
    path.chmod(0o600)
    os.utime(path, (0, time.time() - 10**6))
    assert Journal("m", folder=tmp_path).damage == "" and not path.exists()


# What a journal does with each kind of damage is tested above, without measuring.
@pytest.mark.parametrize("damage", [_garbage, _a_folder])
def test_a_profile_after_damage_is_made_anew_with_one_line(
    damage: Damage, dense_model: Path, tmp_path: Path
) -> None:
    """The same command, end to end."""
    cache = tmp_path / "cache"
    request = session.Request(None, (), 1, 1.0, False, "", "")
    identity = map(str, (request.engine, request.devices, request.threads))
    path = Journal(*identity, folder=cache / "atsplan").path
    path.parent.mkdir(parents=True)
    path.write_bytes(_sealed([HEAD, *({"kind": "case", "key": str(n), "skipped": "why"} for n in range(9))]))
    path.chmod(0o600)
    damage(path)
    out = tmp_path / "profile.yaml"
    words = ["profile", str(dense_model), "-o", str(out), "--seconds", "1", "--no-calibration"]
    more = ["--ubatch", "32", "--depth", "0", "--threads", "1"]
    done = CliRunner(env={"XDG_CACHE_HOME": str(cache)}).invoke(main, [*words, *more])
    assert done.exit_code == 0, done.output
    said = [line for line in done.stderr.splitlines() if "put aside" in line]
    assert len(said) == 1 and str(path) in said[0]
    assert from_text(out.read_text(), "").timings
    assert not os.path.lexists(path)


# The model that the demonstration has fetched.

MODEL_DAMAGES: dict[str, tuple[Damage, str]] = {
    "a byte changed": (_a_bit_flipped, "has changed"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), "has changed"),
    "empty": (lambda path: os.truncate(path, 0), "has changed"),
    "garbage": (_garbage, "has changed"),
    "a folder": (_a_folder, "is no file"),
    "a link": (_a_link, "is no file"),
    "a dead link": (_a_dead_link, "is no file"),
    "a pipe": (_a_pipe, "is no file"),
    "truncated, without digest": (lambda path: _without_digest(path, 1000), "is damaged"),
    "empty, with a digest of NUL bytes": (lambda path: _without_digest(path, 0, bytes(64)), "is damaged"),
}


def _without_digest(path: Path, size: int, record: bytes = b"") -> None:
    os.truncate(path, size)
    path.with_name(f"{path.name}.sha256").write_bytes(record)


@pytest.mark.parametrize("name", MODEL_DAMAGES)
def test_a_damaged_model_of_the_demonstration_is_not_used(
    name: str, dense_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(dense_model, path)
    for _ in range(2):  # as a former version left it, then with its digest
        assert demo.damage(path) == ""
    change, why = MODEL_DAMAGES[name]
    change(path)
    assert why in demo.damage(path)


# Libraries in the cache.


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The embedded engine as a library of ours."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engine = next(locate.installed()).path
    (tmp_path / "helper.so").write_bytes(b"helper")
    return keep("engine", [engine, tmp_path / "helper.so"]) / engine.name


def test_a_library_that_was_kept_is_loaded(kept: Path) -> None:
    check(kept)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o500
    assert subprocess.run(["sha256sum", "--check", RECORD], cwd=kept.parent, check=True, capture_output=True)
    assert Engine.find(str(kept)).path == kept
    assert {path.name for path in kept.parent.parent.iterdir()} == {"engine"}


def _edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.chmod(0o700)
    path.write_bytes(change(path.read_bytes()))
    path.chmod(0o500)


LIBRARY_DAMAGES: dict[str, tuple[Damage, str]] = {
    "a byte changed": (lambda p: _edit(p, lambda b: b[:-1] + bytes([b[-1] ^ 1])), "has changed since"),
    "truncated": (lambda p: _edit(p, lambda b: b[:1000]), "has changed since"),
    "a neighbour changed": (
        lambda p: _edit(p.with_name("helper.so"), lambda b: b"x"),
        "helper.so has changed",
    ),
    "a neighbour more": (
        lambda p: p.with_name("libggml-x.so").touch(),
        "libggml-x.so beside it was not kept",
    ),
    "no record": (lambda p: p.with_name(RECORD).unlink(), "no digests"),
    "an empty record": (lambda p: _edit(p.with_name(RECORD), lambda b: b""), "no digests"),
    "a record of NUL bytes": (lambda p: _edit(p.with_name(RECORD), lambda b: bytes(len(b))), "no digests"),
    "no text": (lambda p: _edit(p.with_name(RECORD), lambda b: b"\xff\xfe" + b), "cannot be read"),
    "a record of others": (
        lambda p: _edit(p.with_name(RECORD), lambda b: b.replace(b"0", b"1")),
        "has changed",
    ),
    "a link as record": (lambda p: _a_link(p.with_name(RECORD)), "no digests"),
    "a link": (lambda p: _moved_away(p), "is a symbolic link"),
    "writable by all": (lambda p: p.chmod(0o777), "may be written by others"),
    "a folder writable by the group": (lambda p: p.parent.chmod(0o770), "engine may be written by others"),
    "all libraries writable": (lambda p: p.parent.parent.chmod(0o777), "libraries may be written by others"),
    "the cache writable": (lambda p: cache_folder().chmod(0o777), "atsplan may be written by others"),
    "a linked folder": (lambda p: _linked_folder(p.parent), "engine is a symbolic link"),
    "of another user": (_of_another_user, "belongs to another user"),
    "a folder of another user": (lambda p: _of_another_user(p.parent), "belongs to another user"),
}


def _moved_away(path: Path) -> None:
    elsewhere = cache_folder().parent / "elsewhere.so"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _linked_folder(folder: Path) -> None:
    elsewhere = cache_folder().parent / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)


@pytest.mark.parametrize("name", LIBRARY_DAMAGES)
def test_a_library_that_somebody_touched_is_refused_in_one_line(name: str, kept: Path) -> None:
    damage, why = LIBRARY_DAMAGES[name]
    damage(kept)
    with pytest.raises(UntrustedLibrary, match=why) as caught:
        Engine.find(str(kept))
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)
    done = CliRunner().invoke(main, ["doctor", "--engine", str(kept)])
    assert (done.exit_code, done.stderr) == (3, f"atsplan: {caught.value}\n")


def test_a_native_library_that_was_touched_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not next(build.compilers(), None):
        missing("no C++ compiler is here", build.REMEDY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # A library of the same functions that does nothing is built in a moment.
    sources = tmp_path / "sources"
    sources.mkdir()
    names = "".join(f"SHOWN int {name}() {{ return {device._VERSION}; }}\n" for name in device._PROTOTYPES)
    shown = '#define SHOWN extern "C" __attribute__((visibility("default")))\n'
    (sources / "all.cpp").write_text(shown + names)
    monkeypatch.setattr(build, "SOURCES", sources)
    made = build.library()
    assert build.library() == made
    _edit(made, lambda code: code[: len(code) // 2])
    with pytest.raises(UntrustedLibrary, match="has changed"):
        device.load(made)
    assert build.library() == made
    assert device.load(made).atsplan_hybrid_version() == device._VERSION
    assert {path.name for path in made.parent.parent.iterdir()} == {
        made.parent.name,
        f"{made.parent.name}.bad",
    }


def test_what_was_kept_before_makes_room(kept: Path, tmp_path: Path) -> None:
    for content in (b"1", b"2", b"3"):
        (tmp_path / "helper.so").write_bytes(content)
        folder = keep("engine", [tmp_path / "helper.so"])
        assert (folder / "helper.so").read_bytes() == content
    assert {path.name for path in folder.parent.iterdir()} == {"engine", "engine.bad"}


def test_a_library_that_the_user_named_is_the_users_choice(tmp_path: Path) -> None:
    copy = tmp_path / "libllama.so"
    shutil.copy(next(locate.installed()).path, copy)
    copy.chmod(0o777)
    check(copy)


def test_a_cache_folder_that_is_relative_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert cache_folder() == Path.home() / ".cache" / "atsplan"
    assert libraries.libraries_folder().is_absolute()


def test_what_is_not_there_is_no_question_of_trust(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        distrust(tmp_path / "none")
    assert put_aside(tmp_path / "none") == "left as it is"
