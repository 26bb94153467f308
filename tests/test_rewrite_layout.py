"""Layout as bytes: what a rewritten file looks like, segment by segment and written out whole."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from gguf_bytes import ARR, STR, U32, U64, T, arch, gguf, info, kv, save
from hand_plans import hand_plan

from planner.errors import FileProblem
from planner.model.ggml_types import TYPES, tensor_bytes
from planner.model.gguf.reader import ModelFile, read_model
from planner.model.units import Unit
from rewriter.experts import gathers
from rewriter.layout import Copy, Gather, Layout, Literal, Request, Zeros, file_names, make_layout
from rewriter.regions import regions
from rewriter.rewrite import RewriteOptions, output_name, rewrite
from rewriter.stamp import plan_digest
from rewriter.stream import write_file

A = T("a", (10,), 0, bytes(range(1, 41)))
B = T("b", (4, 2), 0, bytes(range(100, 132)))
ODD = T("o", (7,), 153, b"opaque!")


def lay(model: ModelFile, *files: tuple[str, ...], **more: object) -> Layout:
    values = {"alignment": 32, "keep_alignment_key": True, "stamp": (), "moves": {}, **more}
    return make_layout(model, Request(files=files, name="o.gguf", **values))  # type: ignore[arg-type]


def build(model: ModelFile, layout: Layout, folder: Path) -> list[bytes]:
    made = []
    for file in layout.files:
        write_file(file, model.paths, folder / file.name, lambda _: None)
        made.append((folder / file.name).read_bytes())
        assert len(made[-1]) == file.size_bytes
    return made


@pytest.fixture
def source(tmp_path: Path) -> ModelFile:
    kvs = [arch(), kv("empty", ARR, (STR, [])), kv("z", U32, 7)]
    return read_model(save(tmp_path, gguf(kvs, [A, B])))


def test_an_unchanged_order_is_the_same_file(source: ModelFile, tmp_path: Path) -> None:
    (made,) = build(source, lay(source, ("a", "b")), tmp_path)
    assert made == source.paths[0].read_bytes()


def test_another_order_is_the_file_the_encoder_writes(source: ModelFile, tmp_path: Path) -> None:
    (made,) = build(source, lay(source, ("b", "a")), tmp_path)
    assert made == gguf([arch(), kv("empty", ARR, (STR, [])), kv("z", U32, 7)], [B, A])


def test_metadata_is_copied_as_one_span(source: ModelFile) -> None:
    (file,) = lay(source, ("b", "a")).files
    kinds = [type(segment) for segment in file.segments]
    assert kinds == [Literal, Copy, Literal, Zeros, Copy, Copy, Zeros]
    assert file.padding_bytes == 24  # behind a; the header's own padding is not counted


def test_new_entries_follow_the_old_ones(source: ModelFile, tmp_path: Path) -> None:
    (made,) = build(source, lay(source, ("a", "b"), stamp=(kv("own", U32, 1),)), tmp_path)
    assert made == gguf([arch(), kv("empty", ARR, (STR, [])), kv("z", U32, 7), kv("own", U32, 1)], [A, B])


def test_an_alignment_is_added_at_the_end(source: ModelFile, tmp_path: Path) -> None:
    (made,) = build(source, lay(source, ("a", "b"), alignment=128), tmp_path)
    kvs = [arch(), kv("empty", ARR, (STR, [])), kv("z", U32, 7), kv("general.alignment", U32, 128)]
    assert made == gguf(kvs, [A, B], alignment=128)


def test_an_alignment_is_changed_in_its_place(tmp_path: Path) -> None:
    kvs = [kv("general.alignment", U32, 64), arch()]
    model = read_model(save(tmp_path, gguf(kvs, [A, B], alignment=64)))
    (made,) = build(model, lay(model, ("a", "b"), alignment=256), tmp_path)
    assert made == gguf([kv("general.alignment", U32, 256), arch()], [A, B], alignment=256)
    (tmp_path / "o.gguf").unlink()
    (made,) = build(model, lay(model, ("a", "b"), alignment=32, keep_alignment_key=False), tmp_path)
    assert made == gguf([arch()], [A, B])


def test_shards_carry_their_own_keys(source: ModelFile, tmp_path: Path) -> None:
    first, second = build(source, lay(source, ("b",), ("a",), alignment=64), tmp_path)
    split = [[kv("split.no", 2, n), kv("split.count", 2, 2), kv("split.tensors.count", 5, 2)] for n in (0, 1)]
    align = kv("general.alignment", U32, 64)
    kvs = [arch(), kv("empty", ARR, (STR, [])), kv("z", U32, 7), align]
    assert first == gguf([*kvs, *split[0]], [B], alignment=64)
    assert second == gguf([align, *split[1]], [A], alignment=64)


def test_an_opaque_size_is_recorded_when_padding_would_hide_it(tmp_path: Path) -> None:
    model = read_model(save(tmp_path, gguf([arch()], [A, ODD], tail=False)))
    (made,) = build(model, lay(model, ("o", "a")), tmp_path)
    assert made == gguf([arch(), kv("atsplan.size.o", U64, 7)], [ODD, A])
    again = read_model(tmp_path / "o.gguf")
    assert again.inventory.tensor("o").size_bytes == 7


def test_slices_are_gathered(source: ModelFile, tmp_path: Path) -> None:
    layout = lay(source, ("a", "b"), moves={"b": (1, 0)})
    (gather,) = (s for s in layout.files[0].segments if isinstance(s, Gather))
    assert (gather.slice_bytes, gather.length) == (16, 32)
    (made,) = build(source, layout, tmp_path)
    swapped = T("b", (4, 2), 0, B.payload[16:] + B.payload[:16])
    assert made == gguf([arch(), kv("empty", ARR, (STR, [])), kv("z", U32, 7)], [A, swapped])


def test_a_scalar_keeps_its_missing_dimensions(tmp_path: Path) -> None:
    head = b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") * 2
    head += arch() + info("s", (), 0, 0)
    data = head + bytes(-len(head) % 32) + b"\x00\x00\x80\x3f" + bytes(28)
    model = read_model(save(tmp_path, data))
    assert build(model, lay(model, ("s",)), tmp_path) == [data]


def test_names_of_outputs() -> None:
    assert file_names("o.gguf", 1) == ("o.gguf",)
    assert file_names("o.gguf", 2) == ("o-00001-of-00002.gguf", "o-00002-of-00002.gguf")
    assert output_name("o-00001-of-00003.gguf") == "o.gguf"


def test_every_type_survives_alone_and_by_expert(tmp_path: Path) -> None:
    """Three dimensions, every known block layout: identical bytes, and slices that move whole."""
    dice = random.Random(3)
    tensors = [T("blk.0.ffn_gate_inp.weight", (256, 4), 0, os.urandom(4096))]
    suffixes = [f"ffn_{part}_exps" for part in ("gate", "up", "down", "gate_up")]
    for number, kind in TYPES.items():
        for layer, suffix in enumerate(suffixes[: 2 + number % 3]):
            shape = (256, 3, 4)
            payload = dice.randbytes(tensor_bytes(kind.name, shape))
            tensors.append(T(f"blk.{number * 10 + layer}.{suffix}.weight", shape, number, payload))
    model = read_model(save(tmp_path, gguf([arch("qwen3moe")], tensors)))
    assert {t.type for t in model.inventory.tensors} == {kind.name for kind in TYPES.values()}
    out = tmp_path / "o.gguf"
    rewrite(model, hand_plan(model), out, RewriteOptions(alignment=512))
    made = {t.name: t for t in read_model(out).inventory.tensors}
    data = out.read_bytes()
    for tensor in tensors:
        found = made[tensor.name]
        assert found.shape == tensor.dims
        assert data[found.offset : found.offset + found.size_bytes] == tensor.payload


def test_regions_and_their_order(moe_model: Path) -> None:
    model = read_model(moe_model)
    sites = {0: "cpu", 1: "stripe:CUDA0:2", 2: "cache:CUDA0:250000", 3: "gpu:CUDA1"}

    def site(unit: Unit) -> str:
        return sites[unit.layer or 0] if unit.experts else "gpu:CUDA0"

    from planner.model.units import units_of

    units = units_of(model.inventory).units
    found = regions(model.inventory, hand_plan(model, site), units, "p")
    assert [r.name for r in found] == ["gpu:CUDA0", "gpu:CUDA1", "stripe:CUDA0", "cache:CUDA0", "cpu"]
    assert all("blk.1.ffn" in name for name in found[2].tensors)
    layers = [int(n.split(".")[1]) for n in found[0].tensors if n.startswith("blk.")]
    assert layers == sorted(layers)
    wrong = hand_plan(model).model_copy(update={"units": hand_plan(model).units[:1] * 1})
    renamed = wrong.units[0].model_copy(update={"unit": "blk.77.experts"})
    with pytest.raises(FileProblem, match=r"unit blk.77.experts is not in the model"):
        regions(model.inventory, wrong.model_copy(update={"units": (renamed,)}), units, "p")


def test_the_plan_digest_is_that_of_its_text(moe_model: Path) -> None:
    plan = hand_plan(read_model(moe_model))
    assert plan_digest(plan) == plan_digest(plan.model_copy())
    assert plan_digest(plan) != plan_digest(plan.model_copy(update={"command": "other"}))


def test_moves_of_nothing(moe_model: Path) -> None:
    assert gathers(read_model(moe_model).inventory, {}, {}) == {}
