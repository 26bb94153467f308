"""Putting outputs in place: killed or failed at every step, there is the old set or the new one, whole."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from gguf_bytes import ARR, STR, arch, f32, gguf, kv, save
from hand_plans import hand_plan

import atsplan
from planner.errors import AtsplanError, FileProblem, InputError
from planner.files import place_new
from planner.model.gguf.reader import ModelFile, read_model
from planner.model.gguf.shards import ShardProblems, parse_name, shard_file
from planner.model.units import Unit
from planner.plan.plan import Plan, to_text
from profiler.synth.synth import SynthSpec, write
from rewriter.rewrite import RewriteOptions, rewrite

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("rename", "replace", "link", "unlink", "rmdir", "mkdir", "fsync", "write", "open")
Files = dict[str, bytes]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: these tests write to the disk thousands of times."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="atsplan-test-", dir=shm) as folder:
        yield Path(folder)


def run(*args: object) -> Result:
    return CliRunner().invoke(atsplan.main, [str(a) for a in args])


def small(folder: Path) -> ModelFile:
    """Nine tensors in four units of their own size: every shard of every plan differs from every other."""
    kvs = [arch("llama"), kv("llama.block_count", 4, 3), kv("tokens", ARR, (STR, ["a", "b"]))]
    tensors = [f32("token_embd.weight", *range(8))]
    for n in range(3):
        tensors += [
            f32(f"blk.{n}.attn_q.weight", *range(9 + n)),
            f32(f"blk.{n}.ffn_up.weight", *range(20 + n)),
        ]
    tensors += [f32("output_norm.weight", 1.0), f32("output.weight", *range(2))]
    return read_model(save(folder, gguf(kvs, tensors)))


def loadable(folder: Path) -> ModelFile:
    """A model that the engine loads: the command takes no other."""
    return read_model(write(folder / "m.gguf", SynthSpec("llama", n_layers=3, n_embd=64, n_ff=64)))


def by_layer(*devices: str) -> Callable[[Unit], str]:
    """Layers dealt to devices in turn; everything else on the CPU."""
    return lambda unit: "cpu" if unit.layer is None else devices[unit.layer % len(devices)]


# By the number of files they give with one file for each kind of memory.
SITES = {
    1: lambda unit: "cpu",
    19: lambda unit: "gpu:CUDA0",
    2: by_layer("gpu:CUDA0", "cpu"),
    20: by_layer("cpu", "gpu:CUDA0"),
    3: by_layer("gpu:CUDA0", "gpu:CUDA1", "cpu"),
}
PAIRS = [(2, 20), (3, 2), (2, 3), (1, 2), (2, 1), (1, 19), (0, 1), (0, 2), (0, 3)]
OPTIONS = RewriteOptions(shard_by_device=True, force=True)


def contents(folder: Path) -> Files:
    """All files of the output in a folder; hidden folders apart."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def published(source: ModelFile, plan: Plan, folder: Path) -> Files:
    folder.mkdir()
    rewrite(source, plan, folder / "o.gguf", OPTIONS)
    return contents(folder)


def visible(folder: Path) -> Iterator[Files]:
    """Every set that a reader who knows names alone would load: its first file and all that it counts."""
    for path in folder.iterdir():
        name = parse_name(path.name)
        if path.is_file() and path.suffix == ".gguf" and (name is None or name.number == 1):
            count = name.count if name else 1
            names = [shard_file(name.prefix, n + 1, count) for n in range(count)] if name else [path.name]
            if all((folder / each).is_file() for each in names):
                yield {each: (folder / each).read_bytes() for each in names}


def models(files: Files) -> Files:
    return {name: data for name, data in files.items() if name.endswith(".gguf")}


def check_whole(folder: Path, old: Files, new: Files) -> None:
    """Whatever can be read is the old set or the new one, by names alone and to this program."""
    for found in visible(folder):
        assert found in (models(old), models(new)), sorted(found)
    for path in folder.glob("*.gguf"):
        try:
            model = read_model(path)
        except InputError as problem:
            assert "missing" in str(problem) and "--recover" in str(problem)
            continue
        assert {p.name: p.read_bytes() for p in model.paths} in (models(old), models(new))
    manifest = folder / "o.gguf.manifest.yaml"
    if manifest.exists() and (folder / next(iter(models(new)))).exists():
        assert list(visible(folder)) in ([models(old)], [models(new)])


@contextmanager
def at_step(n: int, action: Callable[[], None]) -> Iterator[list[str]]:
    """Call `action` before the n-th operation on the file system; the operations so far are in the list."""
    real = {name: getattr(os, name) for name in STEPS}
    done: list[str] = []

    def counted(name: str) -> Callable[..., object]:
        def step(*args: object, **more: object) -> object:
            if threading.current_thread() is threading.main_thread() and _writes(name, args):
                done.append(name)
                if len(done) == n + 1:
                    action()
            return real[name](*args, **more)

        return step

    for name in STEPS:
        setattr(os, name, counted(name))
    try:
        yield done
    finally:
        for name in STEPS:
            setattr(os, name, real[name])


def _writes(name: str, args: tuple[object, ...]) -> bool:
    """A read does not change what is there."""
    return name != "open" or bool(int(args[1]) & os.O_CREAT)  # type: ignore[call-overload]


def killed_at(n: int, work: Callable[[], object]) -> bool:
    """Do `work` in a child that is killed before its n-th operation; False when it ended before."""
    child = os.fork()
    if child == 0:
        try:
            with at_step(n, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def laid_out(folder: Path, files: Files) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_killed_at_every_step_the_set_is_old_or_new(tmp_path: Path, before: int, after: int) -> None:
    source = small(tmp_path)
    plan = hand_plan(source, SITES[after])
    old = published(source, hand_plan(source, SITES[before]), tmp_path / "old") if before else {}
    new = published(source, plan, tmp_path / "new")
    assert len(models(new)) == after % 18 and not set(old.values()) & set(new.values())
    seen = set()
    for n in itertools.count():
        folder = laid_out(tmp_path / str(n), old)
        out = folder / "o.gguf"
        if not killed_at(n, lambda out=out: rewrite(source, plan, out, OPTIONS)):  # type: ignore[misc]
            break
        check_whole(folder, old, new)
        again = laid_out(tmp_path / f"{n} again", {})
        again.rmdir()
        subprocess.run(["cp", "-a", folder, again], check=True)
        assert run("rewrite", folder / "o.gguf", "--recover").exit_code == 0
        assert contents(folder) in (old, new)
        seen.add(contents(folder) == new)
        assert not [path for path in folder.iterdir() if path.is_dir()]
        rewrite(source, plan, again / "o.gguf", OPTIONS)
        assert contents(again) == new and not [path for path in again.iterdir() if path.is_dir()]
    assert n > 20 and seen == {False, True}


@pytest.mark.parametrize(("before", "after"), PAIRS)
@pytest.mark.parametrize(
    "kind", [OSError(28, "No space left on device"), PermissionError(13, "Denied"), None]
)
def test_an_error_at_any_step_leaves_the_old_set_or_the_new(
    tmp_path: Path, before: int, after: int, kind: OSError | None
) -> None:
    source = small(tmp_path)
    plan = hand_plan(source, SITES[after])
    old = published(source, hand_plan(source, SITES[before]), tmp_path / "old") if before else {}
    new = published(source, plan, tmp_path / "new")

    def fail() -> None:
        raise kind or KeyboardInterrupt

    for n in itertools.count():
        folder = laid_out(tmp_path / str(n), old)
        try:
            with at_step(n, fail) as done:
                rewrite(source, plan, folder / "o.gguf", OPTIONS)
            if len(done) <= n:
                break
        except (AtsplanError, KeyboardInterrupt) as problem:
            assert "\n" not in str(problem)
            assert contents(folder) in (old, new)
        rewrite(source, plan, folder / "o.gguf", OPTIONS)
        assert contents(folder) == new and len(list(folder.iterdir())) == len(new)
    assert n > 20


def test_undone_while_it_is_undone(tmp_path: Path) -> None:
    """Killed in the steps that follow an error: still the old set or the new one after all."""
    source = small(tmp_path)
    plan = hand_plan(source, SITES[20])
    old = published(source, hand_plan(source, SITES[2]), tmp_path / "old")
    new = published(source, plan, tmp_path / "new")
    real, tried = os.link, 0
    for n in itertools.count():
        folder = laid_out(tmp_path / str(n), old)

        def work(folder: Path = folder) -> None:
            def refused(*args: object, **more: object) -> None:
                if str(args[1]).endswith("manifest.yaml"):
                    raise OSError(28, "No space left on device")
                real(*args, **more)  # type: ignore[arg-type]

            os.link = refused
            with pytest.raises(AtsplanError):
                rewrite(source, plan, folder / "o.gguf", OPTIONS)

        if not killed_at(n, work):
            break
        tried += 1
        check_whole(folder, old, new)
        assert run("rewrite", folder / "o.gguf", "--recover").exit_code == 0
        assert contents(folder) in (old, new)
    assert tried > 20 and contents(folder) == old


def test_shards_of_two_rewrites_are_refused(tmp_path: Path) -> None:
    source = small(tmp_path)
    made = {n: published(source, hand_plan(source, SITES[n]), tmp_path / f"{n}") for n in (2, 20)}
    name = "o-00002-of-00002.gguf"
    mixed = laid_out(tmp_path / "mixed", {**made[2], name: made[20][name]})
    with pytest.raises(ShardProblems, match="is of another rewrite than the first shard"):
        read_model(mixed)
    plan = tmp_path / "p.yaml"
    plan.write_text(to_text(hand_plan(source, SITES[2])))
    first = mixed / "o-00001-of-00002.gguf"
    for command in (
        ["inventory", first, "--strict"],
        ["verify", first],
        ["verify", source.paths[0], first],
        ["run", first, "--plan", plan, "-p", "a"],
    ):
        result = run(*command)
        assert result.exit_code == 2 and "another rewrite" in result.stderr, result.output


def test_a_name_taken_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    """The file appears after everything was checked, while the output is being written."""
    source, out = small(tmp_path), tmp_path / "o.gguf"
    for taken in (out, tmp_path / "o.gguf.manifest.yaml"):

        def appears(what: str, done: int, total: int, taken: Path = taken) -> None:
            taken.write_text("precious")

        with pytest.raises(FileProblem, match="exists already: --force replaces it") as problem:
            rewrite(source, hand_plan(source), out, RewriteOptions(), appears)
        assert problem.value.path == str(taken)
        assert contents(tmp_path) == {"m.gguf": source.paths[0].read_bytes(), taken.name: b"precious"}
        taken.unlink()


def test_a_name_taken_in_the_last_moment_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last look and the step itself: the file system decides."""
    source, name = small(tmp_path), "o-00001-of-00003.gguf"
    before = contents(tmp_path)
    real = os.link

    def late(staged: Path, target: Path) -> None:
        if target.name == name:
            target.write_text("precious")
        real(staged, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(FileProblem, match=f"{name}: exists already"):
        rewrite(source, hand_plan(source, SITES[3]), tmp_path / "o.gguf", replace(OPTIONS, force=False))
    assert contents(tmp_path) == {**before, name: b"precious"}
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.parametrize("sites", [1, 3])
def test_of_two_rewrites_to_one_name_one_wins(tmp_path: Path, sites: int) -> None:
    source = loadable(tmp_path)
    plans = []
    for name, each in (("a", SITES[sites]), ("b", by_layer("gpu:CUDA1", "gpu:CUDA0", "cpu"))):
        (tmp_path / f"{name}.yaml").write_text(to_text(hand_plan(source, each)))
        plans.append(tmp_path / f"{name}.yaml")
    wins = []
    for round_ in range(2):
        folder = tmp_path / str(round_)
        folder.mkdir()
        words = [
            sys.executable,
            str(ROOT / "atsplan.py"),
            "rewrite",
            str(source.paths[0]),
            "--shard-by-device",
        ]
        running = [
            subprocess.Popen(
                [*words, "--plan", str(plan), "-o", str(folder / "o.gguf")],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            for plan in plans
        ]
        said = [process.communicate(timeout=120)[1] for process in running]
        codes = [process.returncode for process in running]
        assert sorted(codes) == [0, 2], said
        loser = codes.index(2)
        assert "exists already: --force replaces it" in said[loser]
        assert (
            run(
                "verify", source.paths[0], next(iter(folder.glob("*.gguf"))), "--plan", plans[1 - loser]
            ).exit_code
            == 0
        )
        assert run("verify", next(iter(sorted(folder.glob("*.gguf"))))).exit_code == 0
        assert not [path for path in folder.iterdir() if path.is_dir()]
        wins.append(1 - loser)
    assert len(wins) == 2


def test_where_links_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without hard links: names are still taken, never overwritten."""

    def unsupported(*args: object, **more: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    source = small(tmp_path)
    monkeypatch.setattr(os, "link", unsupported)
    old = published(source, hand_plan(source, SITES[2]), tmp_path / "out")
    rewrite(source, hand_plan(source, SITES[20]), tmp_path / "out" / "o.gguf", OPTIONS)
    assert set(old) == set(contents(tmp_path / "out")) and old != contents(tmp_path / "out")
    (tmp_path / "a").write_text("a")
    with pytest.raises(FileExistsError):
        place_new(tmp_path / "a", source.paths[0])


def test_an_earlier_output_goes_as_a_whole(tmp_path: Path) -> None:
    source = loadable(tmp_path)
    (tmp_path / "p.yaml").write_text(to_text(hand_plan(source, SITES[2])))
    out = tmp_path / "out"
    published(source, hand_plan(source, SITES[3]), out)
    (out / "o-00009-of-00009.gguf").write_text("of somebody else")
    args = [
        "rewrite",
        source.paths[0],
        "--plan",
        tmp_path / "p.yaml",
        "-o",
        out / "o.gguf",
        "--shard-by-device",
    ]
    refused = run(*args)
    assert refused.exit_code == 2 and "o.gguf.manifest.yaml: exists already" in refused.stderr
    done = run(*args, "--force")
    assert done.exit_code == 0 and "o-00001-of-00003.gguf: removed with the earlier output" in done.stderr
    names = [f"o-0000{n}-of-00002.gguf" for n in (1, 2)]
    assert sorted(contents(out)) == [*names, "o-00009-of-00009.gguf", "o.gguf.manifest.yaml"]


def test_the_model_never_goes_with_an_earlier_output(tmp_path: Path) -> None:
    source = small(tmp_path)
    rewrite(source, hand_plan(source), tmp_path / "o.gguf", RewriteOptions())
    made = read_model(tmp_path / "o.gguf")
    before = contents(tmp_path)
    with pytest.raises(FileProblem, match="is the model itself"):
        rewrite(made, hand_plan(source, SITES[2]), tmp_path / "o.gguf", OPTIONS)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("text", ["command: a\nschema: 1\n", "GGUF"])
def test_what_is_no_manifest_is_not_replaced_by_one(tmp_path: Path, text: str) -> None:
    source, manifest = small(tmp_path), tmp_path / "o.gguf.manifest.yaml"
    manifest.write_text(text)
    with pytest.raises(FileProblem, match="exists already"):
        rewrite(source, hand_plan(source), tmp_path / "o.gguf", RewriteOptions())
    if text.startswith("command"):
        with pytest.raises(FileProblem, match="is a plan: not replaced by a manifest"):
            rewrite(source, hand_plan(source), tmp_path / "o.gguf", RewriteOptions(force=True))
    assert manifest.read_text() == text


def test_a_journal_from_a_stranger_moves_nothing_else(tmp_path: Path) -> None:
    source = small(tmp_path)
    folder = tmp_path / ".o.gguf.atsplan-x"
    (folder / "old").mkdir(parents=True)
    (folder / "old" / "m.gguf").write_text("evil")
    for name in ("../m.gguf", "m.gguf", "/etc/passwd"):
        known = f"{{name: {name}, size_bytes: 4, ends: x}}"
        (folder / "journal.yaml").write_text(
            f"schema: 1\noutput: o.gguf\nfiles:\n- {known}\nreplaced:\n- {known}\n"
        )
        result = run("rewrite", tmp_path / "o.gguf", "--recover")
        assert result.exit_code == 2 and "which is no file of 'o.gguf'" in result.stderr
        assert source.paths[0].read_bytes()[:4] == b"GGUF"
    (folder / "journal.yaml").write_bytes(b"\xff\xfe")
    result = run("rewrite", tmp_path / "o.gguf", "--recover")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1


def test_files_that_stand_in_the_way_of_undoing_are_kept(tmp_path: Path) -> None:
    """After a kill somebody put another file there: both are kept, and it is said where."""
    source = small(tmp_path)
    plan = hand_plan(source, SITES[20])
    old = published(source, hand_plan(source, SITES[2]), tmp_path / "old")
    name = "o-00001-of-00002.gguf"
    for n in itertools.count():
        folder = laid_out(tmp_path / str(n), old)
        assert killed_at(n, lambda out=folder / "o.gguf": rewrite(source, plan, out, OPTIONS))  # type: ignore[misc]
        if not (folder / name).exists():
            break
    (folder / name).write_text("precious")
    result = run("rewrite", folder / "o.gguf", "--recover")
    assert result.exit_code == 3 and f"{name} is another file now" in result.stderr
    assert (folder / name).read_text() == "precious"
    (hidden,) = (path for path in folder.iterdir() if path.is_dir())
    assert (hidden / "old" / name).read_bytes() == old[name]
    (folder / name).unlink()
    assert run("rewrite", folder / "o.gguf", "--recover").exit_code == 0
    assert contents(folder) == old


def test_a_name_in_a_command_to_paste_is_one_word(tmp_path: Path) -> None:
    name = "a; touch canary; $(touch canary) '.gguf"
    hidden = tmp_path / f".{name}.atsplan-x"
    hidden.mkdir()
    (hidden / "journal.yaml").write_text("x")
    said = run("inventory", tmp_path).stderr
    found = re.search(r"`(atsplan .* --recover)`", said)
    assert found is not None
    assert shlex.split(found[1]) == ["atsplan", "rewrite", str(tmp_path / name), "--recover"]


def test_a_link_is_no_interrupted_rewrite(tmp_path: Path) -> None:
    """For the one that tells of them as for the one that recovers."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "journal.yaml").write_text("x")
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / ".o.gguf.atsplan-x").symlink_to(tmp_path / "elsewhere")
    assert "interrupted" not in run("inventory", folder).stderr
    assert "no interrupted rewrite" in run("rewrite", folder / "o.gguf", "--recover").stdout


def test_nothing_to_recover(tmp_path: Path) -> None:
    result = run("rewrite", tmp_path / "o.gguf", "--recover")
    assert (result.exit_code, result.stdout) == (
        0,
        f"{tmp_path / 'o.gguf'}: no interrupted rewrite was found\n",
    )
