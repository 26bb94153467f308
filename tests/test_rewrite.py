"""The rewrite command: whole outputs or none, refusals in one line, undo to the last byte."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from gguf_bytes import ARR, STR, U32, T, arch, f32, gguf, kv, save
from hand_plans import hand_plan

import atsplan
from planner.model.gguf.reader import ModelFile, read_model
from planner.plan.plan import Plan, to_text
from planner.site import Site
from rewriter import stream
from rewriter.publishing import publish
from rewriter.rewrite import RewriteOptions, decide, rewrite

ROOT = Path(__file__).resolve().parent.parent
ORDERS = dict.fromkeys(range(4), (5, 1, 0, 7, 2, 6, 3, 4))


def run(*args: object) -> Result:
    return CliRunner().invoke(atsplan.main, [str(a) for a in args])


def refused(result: Result, *words: str, code: int = 2) -> None:
    """One line on stderr with these words, no traceback."""
    assert result.exit_code == code, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("atsplan: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), result.stderr
    assert "Traceback" not in result.output


@pytest.fixture
def here(tmp_path: Path, moe_model: Path) -> Path:
    """A folder with a model, a plan, and a plan that reorders experts."""
    (tmp_path / "m.gguf").write_bytes(moe_model.read_bytes())
    model = read_model(tmp_path / "m.gguf")
    put_plan(tmp_path / "p.yaml", hand_plan(model))
    put_plan(tmp_path / "x.yaml", hand_plan(model, experts=ORDERS))
    return tmp_path


def put_plan(path: Path, plan: Plan) -> Path:
    path.write_text(to_text(plan))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_rewrite_verify_undo(here: Path) -> None:
    made = run("rewrite", here / "m.gguf", "--plan", here / "x.yaml", "-o", here / "o.gguf")
    assert made.exit_code == 0 and "verified" in made.output and "rare ties" in made.output
    proof = run("verify", here / "m.gguf", here / "o.gguf", "--plan", here / "x.yaml")
    assert proof.exit_code == 0 and "weights byte-exact under the recorded permutation" in proof.output
    back = run("rewrite", here / "o.gguf", "--undo", "-o", here / "back.gguf")
    assert "the header is the original's, byte for byte" in back.output
    assert (here / "back.gguf").read_bytes() == (here / "m.gguf").read_bytes()


def test_an_output_is_checked_against_its_manifest_alone(here: Path) -> None:
    out = here / "s.gguf"
    args = ["rewrite", here / "m.gguf", "--plan", here / "x.yaml", "-o", out, "--shard-by-device"]
    assert run(*args).exit_code == 0
    (here / "m.gguf").unlink()
    shard = here / "s-00002-of-00002.gguf"
    alone = run("verify", shard)
    assert alone.exit_code == 0 and "under the recorded permutation" in alone.output
    data = bytearray(shard.read_bytes())
    data[-40] ^= 1
    shard.write_bytes(data)
    refused(run("verify", shard), "has other bytes", code=1)
    (here / "s.gguf.manifest.yaml").unlink()
    refused(run("verify", shard), "s.gguf.manifest.yaml: no such file: give the file to compare with too")


def test_a_manifest_never_speaks_of_other_bytes(here: Path) -> None:
    args = ["rewrite", here / "m.gguf", "--plan", here / "p.yaml", "-o", here / "o.gguf", "--force"]
    assert run(*args).exit_code == 0 and "o.gguf.manifest.yaml" in names(here)
    assert run(*args, "--no-verify").exit_code == 0 and "o.gguf.manifest.yaml" not in names(here)


def test_the_same_inputs_give_the_same_bytes(here: Path) -> None:
    for name in ("a", "b"):
        (here / name).mkdir()
        assert (
            run("rewrite", here / "m.gguf", "--plan", here / "x.yaml", "-o", here / name / "o.gguf").exit_code
            == 0
        )
    for name in ("o.gguf", "o.gguf.manifest.yaml"):
        assert (here / "a" / name).read_bytes() == (here / "b" / name).read_bytes()


def test_a_rewrite_of_a_rewrite_is_a_rewrite_of_the_source(here: Path) -> None:
    source = read_model(here / "m.gguf")
    plan, other = hand_plan(source, experts=ORDERS), hand_plan(source, lambda u: "cpu", {2: ORDERS[2][::-1]})
    rewrite(source, plan, here / "1.gguf", RewriteOptions(alignment=256))
    rewrite(read_model(here / "1.gguf"), other, here / "2.gguf", RewriteOptions())
    rewrite(source, other, here / "direct.gguf", RewriteOptions())
    assert (here / "2.gguf").read_bytes() == (here / "direct.gguf").read_bytes()


def test_undo_of_shards_and_alignment(here: Path) -> None:
    source = read_model(here / "m.gguf")
    options = RewriteOptions(alignment=4096, shard_by_device=True)
    report = rewrite(source, hand_plan(source, experts=ORDERS), here / "s.gguf", options)
    assert [path.name for path in report.files] == ["s-00001-of-00002.gguf", "s-00002-of-00002.gguf"]
    assert run("rewrite", here / "s-00002-of-00002.gguf", "--undo", "-o", here / "back.gguf").exit_code == 0
    assert (here / "back.gguf").read_bytes() == (here / "m.gguf").read_bytes()


def test_undo_of_what_was_never_rewritten(here: Path) -> None:
    refused(run("rewrite", here / "m.gguf", "--undo", "-o", here / "o.gguf"), "nothing to undo")


@pytest.mark.parametrize("link", [os.link, os.symlink, None], ids=["hard link", "symbolic link", "itself"])
def test_the_model_is_never_the_output(here: Path, link: object) -> None:
    out = here / "m.gguf"
    if callable(link):
        out = here / "o.gguf"
        link(here / "m.gguf", out)
    before = (here / "m.gguf").read_bytes()
    for force in ((), ("--force",)):
        refused(
            run("rewrite", here / "m.gguf", "--plan", here / "p.yaml", "-o", out, *force),
            "is the model itself",
        )
    assert (here / "m.gguf").read_bytes() == before


def test_a_shard_of_the_model_is_never_the_output(tmp_path: Path, split_model: Path) -> None:
    for path in read_model(split_model).paths:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    model = read_model(tmp_path)
    plan = hand_plan(model, lambda u: "cpu" if u.experts else f"gpu:CUDA{(u.layer or 0) % 2}")
    put_plan(tmp_path / "p.yaml", plan)
    before = names(tmp_path)
    args = ["--plan", tmp_path / "p.yaml", "-o", tmp_path / "moe.gguf", "--shard-by-device", "--force"]
    refused(run("rewrite", tmp_path, *args), "moe-00001-of-00003.gguf", "is the model itself")
    assert names(tmp_path) == before


def test_an_existing_output_needs_force(here: Path) -> None:
    (here / "o.gguf").write_text("precious")
    args = ["rewrite", here / "m.gguf", "--plan", here / "p.yaml", "-o", here / "o.gguf"]
    refused(run(*args), "exists already")
    assert (here / "o.gguf").read_text() == "precious"
    assert run(*args, "--force").exit_code == 0


def test_in_place(here: Path) -> None:
    before = (here / "m.gguf").read_bytes()
    result = run("rewrite", here / "m.gguf", "--plan", here / "x.yaml", "--in-place")
    assert result.exit_code == 0 and "will be replaced" in result.stderr
    assert (here / "m.gguf").read_bytes() != before
    assert run("rewrite", here / "m.gguf", "--plan", here / "x.yaml", "--in-place").exit_code == 0
    assert run("rewrite", here / "m.gguf", "--undo", "-o", here / "back.gguf").exit_code == 0
    assert (here / "back.gguf").read_bytes() == before
    for extra in (["-o", here / "z.gguf"], ["--no-verify"], ["--shard-by-device"]):
        assert run("rewrite", here / "m.gguf", "--plan", here / "x.yaml", "--in-place", *extra).exit_code == 2


def test_in_place_never_loses_what_it_does_not_understand(here: Path) -> None:
    with (here / "m.gguf").open("ab") as file:
        file.write(b"something else")
    before = (here / "m.gguf").read_bytes()
    result = run("rewrite", here / "m.gguf", "--plan", here / "p.yaml", "--in-place")
    refused(result, "--in-place", "behind the last tensor would be lost")
    assert (here / "m.gguf").read_bytes() == before


def test_a_plan_for_another_model(here: Path, dense_model: Path) -> None:
    plan = put_plan(here / "d.yaml", hand_plan(read_model(dense_model)))
    result = run("rewrite", here / "m.gguf", "--plan", plan, "-o", here / "o.gguf")
    refused(result, "d.yaml", "the plan is for another model", "tensor table sha256:")
    assert "o.gguf" not in names(here)


def test_a_plan_for_the_same_table_with_another_header(here: Path) -> None:
    plan = hand_plan(read_model(here / "m.gguf"))
    other = plan.model_copy(update={"model": plan.model.model_copy(update={"header_digest": "sha256:0"})})
    put_plan(here / "h.yaml", other)
    refused(
        run("rewrite", here / "m.gguf", "--plan", here / "h.yaml", "-o", here / "o.gguf"), "header sha256:0"
    )


def test_a_plan_with_units_or_sites_that_cannot_be(here: Path) -> None:
    model = read_model(here / "m.gguf")
    made = hand_plan(model)
    away = tuple(p.model_copy(update={"site": Site.parse("gpu:Vulkan9")}) for p in made.units)
    put_plan(here / "p.yaml", made.model_copy(update={"units": away}))
    refused(run("rewrite", here / "m.gguf", "--plan", here / "p.yaml", "-o", here / "o.gguf"), "gpu:Vulkan9")


def test_a_read_only_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object, **more: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", denied)  # the tests may run as root
    result = run("rewrite", here / "m.gguf", "--plan", here / "p.yaml", "-o", here / "o.gguf")
    refused(result, "o.gguf", "cannot write here: Permission denied")


def test_a_folder_that_is_not_there(here: Path) -> None:
    result = run("rewrite", here / "m.gguf", "--plan", here / "p.yaml", "-o", here / "no" / "o.gguf")
    refused(result, "no")


def test_a_full_disk_is_foreseen(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(here)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    result = run("rewrite", here / "m.gguf", "--plan", here / "p.yaml", "-o", here / "o.gguf")
    refused(result, "MiB needed, 1 MiB free", code=3)


def test_a_disk_that_fills_up_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    before = names(here)
    result = run("rewrite", here / "m.gguf", "--plan", here / "p.yaml", "-o", here / "o.gguf")
    refused(result, "writing failed: No space left on device", code=3)
    assert names(here) == before


def test_without_kernel_copies_the_bytes_are_the_same(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_model(here / "m.gguf")
    plan = hand_plan(model, experts=ORDERS)
    rewrite(model, plan, here / "kernel.gguf", RewriteOptions())

    def unsupported(*args: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", unsupported)
    monkeypatch.setattr(stream, "BUFFER_BYTES", 5000)
    rewrite(model, plan, here / "buffer.gguf", RewriteOptions())
    assert (here / "kernel.gguf").read_bytes() == (here / "buffer.gguf").read_bytes()


def test_a_result_that_is_not_faithful_is_not_published(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def flips(handle: int, data: memoryview) -> int:
        wrong = bytearray(data)
        wrong[-1] ^= 1
        return write(handle, wrong)

    monkeypatch.setattr(os, "write", flips)
    monkeypatch.setattr(stream, "KERNEL_COPY_BYTES", 1 << 40)
    before = names(here)
    result = run("rewrite", here / "m.gguf", "--plan", here / "p.yaml", "-o", here / "o.gguf")
    refused(result, "not a faithful rewrite", "has other bytes", code=1)
    assert names(here) == before


@pytest.mark.parametrize("phase", ["writing", "verifying"])
def test_an_interrupt_leaves_nothing(here: Path, phase: str) -> None:
    """A real Ctrl-C in a real process, sent when the phase has begun."""
    script = (
        "import sys, time; from pathlib import Path\n"
        "import atsplan; from rewriter import rewrite\n"
        "def told(what, done, total):\n"
        f"    if what == {phase!r}: print('begun', flush=True); time.sleep(1)\n"
        "real = rewrite.carry_out\n"
        "rewrite.carry_out = lambda *a: real(*a[:5], told)\n"
        "atsplan.main()\n"
    )
    before = names(here)
    args = ["rewrite", "m.gguf", "--plan", "x.yaml", "-o", "o.gguf"]
    child = subprocess.Popen(
        [sys.executable, "-c", script, *args],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    time.sleep(0.1)  # let the call reach its sleep
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in errors, errors
    assert names(here) == before


def test_what_a_killed_run_left_is_removed_next_time(here: Path) -> None:
    left = here / ".o.gguf.atsplan-abc"
    left.mkdir()
    (left / "o.gguf").write_text("half")
    assert run("rewrite", here / "m.gguf", "--plan", here / "p.yaml", "-o", here / "o.gguf").exit_code == 0
    assert not left.exists()


def test_a_run_at_work_is_left_alone(here: Path) -> None:
    with publish.staging(here / "o.gguf") as folder:
        (folder / "o.gguf").write_text("half")
        assert (
            run("rewrite", here / "m.gguf", "--plan", here / "p.yaml", "-o", here / "o.gguf").exit_code == 0
        )
        assert (folder / "o.gguf").read_text() == "half"


def test_a_dry_run_writes_nothing(here: Path) -> None:
    before = names(here)
    args = ["rewrite", here / "m.gguf", "--plan", here / "p.yaml", "-o", here / "o.gguf", "--dry-run"]
    found = json.loads(run(*args, "--json").stdout)
    assert list(found["regions"]) == ["gpu:CUDA0", "cpu"] and "o.gguf" in run(*args).stdout
    assert names(here) == before
    size = found["files"][0]["size_bytes"]
    assert run(*args[:-1]).exit_code == 0 and (here / "o.gguf").stat().st_size == size


@pytest.mark.parametrize(
    ("option", "value"),
    [("--alignment", "48"), ("--alignment", "-32"), ("--alignment", "4"), ("--shard-size", "0"),
     ("--shard-size", "nan"), ("--shard-size", "1e9"), ("-o", "out.bin")],
)  # fmt: skip
def test_options_that_make_no_sense(here: Path, option: str, value: str) -> None:
    args = ["rewrite", here / "m.gguf", "--plan", here / "p.yaml", "-o", here / "o.gguf", option, value]
    assert run(*args).exit_code == 2
    assert "o.gguf" not in names(here)


def unusual(folder: Path, alignment: int = 32, tail: bool = True) -> ModelFile:
    """Opaque types, odd metadata, foreign tensors: what a rewriter must carry as it is."""
    kvs = [
        arch("llama"),
        kv("llama.block_count", U32, 1),
        kv("empty.array", ARR, (STR, [])),
        kv("odd.floats", 6, float("nan")),
        *([kv("general.alignment", U32, alignment)] if alignment != 32 else []),
        kv("zz.text", STR, "\x00\n\u2028"),
    ]
    tensors = [
        f32("token_embd.weight", *range(64)),
        T("blk.0.attn_q.weight", (256, 2), 153, os.urandom(280 + alignment * 2)),
        T("blk.0.ffn_up.weight", (256, 2), 12, os.urandom(288)),
        f32("v.patch_embd.weight", 1.0, 2.0),
        T("output.weight", (256, 2), 9999, os.urandom(300)),
    ]
    return read_model(save(folder, gguf(kvs, tensors, alignment=alignment, tail=tail)))


@pytest.mark.parametrize("alignment", [8, 32, 4096])
@pytest.mark.parametrize("tail", [True, False])
def test_opaque_types_and_odd_metadata_survive(tmp_path: Path, alignment: int, tail: bool) -> None:
    source = unusual(tmp_path, alignment, tail)
    plan = hand_plan(source, lambda unit: "gpu:CUDA0" if unit.name == "output" else "cpu")
    out, back = tmp_path / "o.gguf", tmp_path / "b.gguf"
    rewrite(source, plan, out, RewriteOptions())
    made = read_model(out)
    assert made.inventory.table_digest() == source.inventory.table_digest()
    assert made.inventory.tensors[0].name == "output.weight"  # first now, followed by padding
    assert {t.name: t.size_bytes for t in made.inventory.tensors} == {
        t.name: t.size_bytes for t in source.inventory.tensors
    }
    assert run("rewrite", out, "--undo", "-o", back).exit_code == 0
    assert back.read_bytes() == source.paths[0].read_bytes()


def test_foreign_tensors_are_never_dropped(tmp_path: Path) -> None:
    source = unusual(tmp_path)
    work = decide(source, hand_plan(source), "o.gguf", RewriteOptions(), "plan")
    assert work.regions[-1].name == "unplaced" and work.regions[-1].tensors == ("v.patch_embd.weight",)


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (slice(0, 0), "empty file"),
        (slice(0, 100), "truncated header"),
        (slice(0, -100), "truncated: tensor"),
        (slice(1, None), "not a GGUF file"),
    ],
)
def test_damaged_models_end_in_one_line(here: Path, cut: slice, words: str) -> None:
    (here / "m.gguf").write_bytes((here / "m.gguf").read_bytes()[cut])
    before = names(here)
    args = ["rewrite", here / "m.gguf", "--plan", here / "p.yaml", "-o", here / "o.gguf"]
    refused(run(*args), "m.gguf: ", words)
    refused(run("verify", here / "m.gguf", here / "m.gguf"), words)
    assert names(here) == before


def test_a_plan_that_is_no_plan_names_its_line(here: Path) -> None:
    (here / "p.yaml").write_text((here / "p.yaml").read_text() + "typo: 1\n")
    result = run("rewrite", here / "m.gguf", "--plan", here / "p.yaml", "-o", here / "o.gguf")
    refused(result, "p.yaml:", "typo")


def test_split_metadata_follows_the_files(tmp_path: Path, split_model: Path) -> None:
    source = read_model(split_model)
    one = rewrite(source, hand_plan(source), tmp_path / "one.gguf", RewriteOptions()).files
    assert all(not kv.key.startswith("split.") for kv in read_model(one[0]).headers[0].header.kvs)
    size = source.inventory.size_bytes * 2 // 3
    two = rewrite(source, hand_plan(source), tmp_path / "two.gguf", RewriteOptions(shard_bytes=size)).files
    assert [p.name for p in two] == ["two-00001-of-00002.gguf", "two-00002-of-00002.gguf"]
    made = read_model(two[1])
    assert made.inventory.table_digest() == source.inventory.table_digest()
    assert [h.header.number("split.no") for h in made.headers] == [0, 1]
    again = rewrite(made, hand_plan(source), tmp_path / "again.gguf", RewriteOptions()).files
    assert again[0].read_bytes() == one[0].read_bytes()
