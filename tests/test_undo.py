"""Going back to the original: to the last byte, or told what is missing; damaged records are named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from gguf_bytes import ARR, STR, U32, U64, T, arch, f32, gguf, kv, save
from hand_plans import hand_plan

import atsplan
from planner.errors import FileProblem
from planner.model.gguf.reader import ModelFile, read_model
from planner.model.units import Unit
from profiler.synth.synth import SynthSpec, write
from rewriter.rewrite import RewriteOptions, rewrite
from rewriter.stamp import read_stamp
from rewriter.verify import NotFaithful, verify

TAIL = b"\x00signature \xff" * 9
IS_BACK = "the header is the original's, byte for byte\n"


def run(*args: object) -> Result:
    return CliRunner().invoke(atsplan.main, [str(a) for a in args])


def tensors(opaque: bool = False) -> list[T]:
    made = [f32("token_embd.weight", *range(8)), f32("blk.0.attn_q.weight", *range(9))]
    made += [T("blk.0.ffn_up.weight", (64,), 153, b"o" * 41)] if opaque else []
    return [*made, f32("output.weight", *range(5))]


def model(folder: Path, tail: bytes = b"", opaque: bool = False) -> ModelFile:
    data = gguf([arch(), kv("llama.block_count", U32, 1)], tensors(opaque))
    return read_model(save(folder, data + tail))


def far(unit: Unit) -> str:
    """An order of the file other than the source's: the last unit first."""
    return "gpu:CUDA0" if unit.name in ("output", "blk.0.attn") else "cpu"


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("options", [{}, {"shard_by_device": True}, {"alignment": 4096}])
def test_bytes_behind_the_last_tensor_come_back(
    tmp_path: Path, opaque: bool, options: dict[str, object]
) -> None:
    source = model(tmp_path, TAIL, opaque)
    site: Callable[[Unit], str] = far if not opaque else (lambda u: "cpu" if "ffn" in u.name else "gpu:CUDA0")
    made = rewrite(source, hand_plan(source, site), tmp_path / "o.gguf", RewriteOptions(**options))  # type: ignore[arg-type]
    assert made.files[-1].read_bytes().endswith(TAIL)
    other = hand_plan(source)
    twice = rewrite(read_model(made.files[0]), other, tmp_path / "t.gguf", RewriteOptions())
    direct = rewrite(source, other, tmp_path / "d.gguf", RewriteOptions())
    assert twice.files[0].read_bytes() == direct.files[0].read_bytes()
    for n, path in enumerate((made.files[0], twice.files[0])):
        back = tmp_path / f"back{n}.gguf"
        done = run("rewrite", path, "--undo", "-o", back)
        assert done.exit_code == 0 and IS_BACK in done.stdout and "not back" not in done.stderr
        assert back.read_bytes() == source.paths[0].read_bytes()


def test_undo_to_a_shard_s_name_is_one_file(tmp_path: Path) -> None:
    source = model(tmp_path)
    out = rewrite(source, hand_plan(source, far), tmp_path / "o.gguf", RewriteOptions()).files[0]
    done = run("rewrite", out, "--undo", "-o", tmp_path / "b-00001-of-00002.gguf")
    assert done.exit_code == 0 and IS_BACK in done.stdout
    assert (tmp_path / "b.gguf").read_bytes() == source.paths[0].read_bytes()


def test_a_tail_that_differs_is_found(tmp_path: Path) -> None:
    source = model(tmp_path, TAIL)
    plan = hand_plan(source, far)
    out = rewrite(source, plan, tmp_path / "o.gguf", RewriteOptions()).files[0]
    for data in (out.read_bytes()[:-1] + b"x", out.read_bytes()[:-3]):
        (tmp_path / "x.gguf").write_bytes(data)
        with pytest.raises(NotFaithful, match="behind the last tensor differ"):
            verify(source, [tmp_path / "x.gguf"], plan)


def test_what_was_cut_off_since_is_said(tmp_path: Path) -> None:
    source = model(tmp_path, TAIL)
    out = rewrite(source, hand_plan(source, far), tmp_path / "o.gguf", RewriteOptions()).files[0]
    out.write_bytes(out.read_bytes()[: -len(TAIL)])
    done = run("rewrite", out, "--undo", "-o", tmp_path / "back.gguf")
    assert done.exit_code == 0
    assert f"{len(TAIL)} bytes behind the original's last tensor are not back" in done.stderr


def test_a_file_of_an_older_rewriter_says_what_it_cannot_know(tmp_path: Path) -> None:
    source = model(tmp_path)
    out = rewrite(source, hand_plan(source, far), tmp_path / "o.gguf", RewriteOptions()).files[0]
    out.write_bytes(out.read_bytes().replace(b"atsplan.source.trailing", b"atsplan.source.trailinX"))
    done = run("rewrite", out, "--undo", "-o", tmp_path / "back.gguf")
    assert done.exit_code == 0 and "if there were any, are not back" in done.stderr


def test_padding_that_is_not_zero_is_counted_as_lost(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", SynthSpec("llama", n_layers=1, n_vocab=301))
    data = bytearray(path.read_bytes())
    held = sorted(read_model(path).inventory.tensors, key=lambda t: t.offset)
    gaps = (a.offset + a.size_bytes for a, b in pairwise(held) if b.offset - a.offset - a.size_bytes >= 3)
    end = next(gaps)
    data[end : end + 3] = b"abc"
    source = read_model(save(tmp_path, bytes(data)))
    (tmp_path / "p.yaml").write_text(plan_text(source))
    done = run("rewrite", source.paths[0], "--plan", tmp_path / "p.yaml", "-o", tmp_path / "o.gguf")
    assert done.exit_code == 0 and "3 bytes are not carried" in done.stderr
    back = run("rewrite", tmp_path / "o.gguf", "--undo", "-o", tmp_path / "back.gguf")
    assert back.exit_code == 0 and "3 bytes of the original are not back" in back.stderr
    data[end : end + 3] = bytes(3)
    assert (tmp_path / "back.gguf").read_bytes() == bytes(data)


def plan_text(source: ModelFile) -> str:
    from planner.plan.plan import to_text

    return to_text(hand_plan(source, far))


def test_ends_of_shards_are_counted_as_lost(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", SynthSpec("llama", n_layers=1, shard_tensors=8))
    path = max(tmp_path.glob("m-*.gguf"))
    path.write_bytes(path.read_bytes() + b"12345")
    source = read_model(path)
    (tmp_path / "p.yaml").write_text(plan_text(source))
    done = run("rewrite", path, "--plan", tmp_path / "p.yaml", "-o", tmp_path / "o.gguf")
    assert done.exit_code == 0 and "5 bytes are not carried" in done.stderr, done.output
    back = run("rewrite", tmp_path / "o.gguf", "--undo", "-o", tmp_path / "back.gguf", "--json")
    assert "5 bytes of the original are not back" in back.stderr and "header differs" in back.stderr
    assert IS_BACK not in back.output and back.stdout.rstrip().endswith("}")


def stamped(folder: Path, **changes: bytes) -> Path:
    """A file with a record of a rewrite, entries of it exchanged or added by name."""
    digest = "sha256:" + "0" * 64
    entries = {
        "plan_digest": kv("atsplan.plan_digest", STR, digest),
        "header": kv("atsplan.source.header_digest", STR, digest),
        "table": kv("atsplan.source.table_digest", STR, digest),
        "order": kv("atsplan.source.order", ARR, (U32, [2, 0, 1])),
        "alignment": kv("atsplan.source.alignment", U32, 0),
        "size": kv("atsplan.source.size", U64, 0),
    }
    kvs = [arch(), kv("llama.block_count", U32, 1), *{**entries, **changes}.values()]
    return save(folder, gguf(kvs, tensors()))


def u32s(key: str, values: Sequence[int]) -> bytes:
    return kv(key, ARR, (U32, list(values)))


DAMAGED = {
    "alignment 3": {"alignment": kv("atsplan.source.alignment", U32, 3)},
    "alignment 2147483648": {"alignment": kv("atsplan.source.alignment", U32, 2**31)},
    "alignment is no number of bytes": {"alignment": kv("atsplan.source.alignment", STR, "32")},
    "size is no number of bytes": {"size": kv("atsplan.source.size", U64, 2**63)},
    "size 7 is less than the 88 bytes": {"size": kv("atsplan.source.size", U64, 7)},
    "trailing is no number of bytes": {"trailing": kv("atsplan.source.trailing", 6, float("nan"))},
    "lost is no number of bytes": {"lost": kv("atsplan.source.lost", 5, -1)},
    "order is not a permutation": {"order": u32s("atsplan.source.order", [0, 0, 1])},
    "order has 2 entries": {"order": u32s("atsplan.source.order", [0, 1])},
    "header_digest is not a digest": {"header": kv("atsplan.source.header_digest", STR, "sha256:x")},
    "source.header_digest is not a digest": {"header": kv("atsplan.source.header_digest", U32, 1)},
    "plan_digest is not a digest": {"plan_digest": kv("atsplan.plan_digest", STR, "\n\x1b[31m")},
    "names no layer": {"experts": u32s("atsplan.experts." + "9" * 5000, [0, 1])},
    "experts.0 is not a permutation": {"experts": kv("atsplan.experts.0", ARR, (6, [0.0, 1.0]))},
}


@pytest.mark.parametrize("why", DAMAGED)
def test_a_damaged_record_is_refused_by_name(tmp_path: Path, why: str) -> None:
    path = stamped(tmp_path, **DAMAGED[why])
    with pytest.raises(FileProblem, match=why):
        read_stamp(read_model(path))
    (tmp_path / "p.yaml").write_text(plan_text(read_model(path)))
    before = sorted(p.name for p in tmp_path.iterdir())
    for words in (["--undo"], ["--plan", tmp_path / "p.yaml"]):
        done = run("rewrite", path, *words, "-o", tmp_path / "o.gguf")
        assert done.exit_code == 2 and why in done.stderr and done.stderr.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_record_that_is_whole_is_read(tmp_path: Path) -> None:
    stamp = read_stamp(read_model(stamped(tmp_path)))
    assert stamp is not None and stamp.source_order == (2, 0, 1) and stamp.source_trailing is None


def test_an_output_that_the_first_reader_refuses_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever makes a file unreadable is found before it gets its name."""
    source = model(tmp_path)
    monkeypatch.setattr("rewriter.rewrite.DEFAULT_ALIGNMENT", 3)
    with pytest.raises(NotFaithful):
        rewrite(source, hand_plan(source, far), tmp_path / "o.gguf", RewriteOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
