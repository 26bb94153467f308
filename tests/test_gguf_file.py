"""Sizes from offsets, truncation, shards: the reader on files of every kind of damage."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_bytes import ARR, F32, I32, STR, U16, U32, T, arch, f32, gguf, info, kv, save, shard

from planner.errors import FileProblem, InputError
from planner.model.ggml_types import FORK_TYPES, TYPES, tensor_bytes
from planner.model.gguf.reader import TruncatedTensor, read_model
from planner.model.gguf.shards import ShardProblems
from planner.model.layers import layers_of
from planner.model.sliding_window import sliding_layers
from planner.model.units import units_of

W1, W2 = f32("a.weight", *range(10)), f32("b.weight", 1.0)


def why(path: Path) -> str:
    with pytest.raises(InputError) as problem:
        read_model(path)
    line = str(problem.value)
    assert "\n" not in line
    return line


def test_sizes_leave_padding_out(tmp_path: Path) -> None:
    model = read_model(save(tmp_path, gguf([arch()], [W1, W2])))
    assert [(t.name, t.size_bytes, t.shape) for t in model.inventory.tensors] == [
        ("a.weight", 40, (10,)),
        ("b.weight", 4, (1,)),
    ]
    first, second = model.inventory.tensors
    assert second.offset - first.offset == 64


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_other_alignments(tmp_path: Path, alignment: int) -> None:
    kvs = [arch(), kv("general.alignment", U32, alignment)]
    model = read_model(save(tmp_path, gguf(kvs, [W1, W2], alignment=alignment)))
    assert [t.size_bytes for t in model.inventory.tensors] == [40, 4]
    assert model.inventory.shards[0].alignment == alignment
    assert all(t.offset % alignment == 0 for t in model.inventory.tensors)


@pytest.mark.parametrize("kind", [4, 31, 43, 142, 159, 9999])
def test_unknown_types_are_opaque_bytes_of_their_gap(tmp_path: Path, kind: int) -> None:
    # Like a fork's 4-byte header per row: 2 rows of 4 + 136 bytes.
    odd = T("odd.weight", (256, 2), kind, bytes(range(140)) * 2)
    model = read_model(save(tmp_path, gguf([arch()], [W1, odd, W2])))
    tensor = model.inventory.tensor("odd.weight")
    assert (tensor.type, tensor.size_bytes) == (f"type{kind}", 288)
    assert f"1 tensor of unknown type{kind}" in " ".join(model.notes)


@pytest.mark.parametrize(
    ("kind", "name", "needed"),
    [(144, "iq4_ks", 2 * 140), (157, "iq2_kl", 2 * 88), (335, "iq2_bn_r4", 2 * 68)],
)
def test_a_fork_type_without_its_row_headers_is_damage(
    tmp_path: Path, kind: int, name: str, needed: int
) -> None:
    """What tools leave that compute sizes without the bytes in front of each row."""
    whole, cut = (T("odd.weight", (256, 2), kind, bytes(size)) for size in (needed, needed // 32 * 32))
    model = read_model(save(tmp_path, gguf([arch()], [whole, W2])))
    assert model.inventory.tensor("odd.weight").size_bytes == -(-needed // 32) * 32
    assert f"1 tensor of type{kind} ({name} of ik_llama.cpp)" in model.notes[0]
    line = why(save(tmp_path, gguf([arch()], [cut, W2])))
    assert f"damaged: tensor odd.weight needs {needed} bytes, the next one starts after" in line
    line = why(save(tmp_path, gguf([arch()], [W2, cut])))
    assert f"truncated: tensor odd.weight lacks {needed % 32} bytes" in line


def test_fork_types_are_not_the_engine_s() -> None:
    assert not FORK_TYPES.keys() & TYPES.keys()
    assert not {kind.name for kind in FORK_TYPES.values()} & {kind.name for kind in TYPES.values()}


def test_an_unknown_type_at_the_end_reaches_to_the_end_of_the_file(tmp_path: Path) -> None:
    odd = T("odd.weight", (256, 2), 153, bytes(280))
    model = read_model(save(tmp_path, gguf([arch()], [W1, odd], tail=False)))
    assert model.inventory.tensor("odd.weight").size_bytes == 280


def test_a_known_type_in_too_small_a_gap_is_damage(tmp_path: Path) -> None:
    short = T("short.weight", (256, 2), 12, bytes(256))  # q4_K needs 288
    line = why(save(tmp_path, gguf([arch()], [short, W2])))
    assert "damaged: tensor short.weight needs 288 bytes, the next one starts after 256" in line


def test_a_hole_behind_a_known_type_is_carried(tmp_path: Path) -> None:
    wide = T("wide.weight", (256, 2), 12, bytes(352))
    model = read_model(save(tmp_path, gguf([arch()], [wide, W2])))
    assert model.inventory.tensor("wide.weight").size_bytes == 352
    assert "1 tensor longer than type and shape say, wide.weight first" in model.notes[0]


def test_overlap_and_misalignment_are_damage(tmp_path: Path) -> None:
    def table(*offsets: int) -> bytes:
        infos = b"".join(info(f"t{n}", (8,), 0, offset) for n, offset in enumerate(offsets))
        head = b"GGUF" + struct.pack("<IQQ", 3, len(offsets), 1) + arch() + infos
        return head + bytes(-len(head) % 32) + bytes(96)

    assert "needs 32 bytes, the next one starts after 0" in why(save(tmp_path, table(0, 0)))
    assert "at offset 40, not a multiple of 32" in why(save(tmp_path, table(0, 40)))


def test_tensors_are_listed_in_data_order(tmp_path: Path) -> None:
    infos = info("late", (8,), 0, 32) + info("early", (8,), 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 1) + arch() + infos
    model = read_model(save(tmp_path, head + bytes(-len(head) % 32) + bytes(64)))
    assert [t.name for t in model.inventory.tensors] == ["early", "late"]


def test_a_row_that_is_not_whole_blocks_is_damage(tmp_path: Path) -> None:
    line = why(save(tmp_path, gguf([arch()], [T("w", (100, 2), 12, bytes(288))])))
    assert "a row of 100 values is not whole q4_K blocks of 256" in line


@pytest.mark.parametrize(("cut", "missing", "others"), [(1, 1, 0), (4, 4, 0), (68, 40, 1), (44, 16, 1)])
def test_truncated_data_names_the_tensor_and_the_bytes(
    tmp_path: Path, cut: int, missing: int, others: int
) -> None:
    data = gguf([arch()], [W1, W2], tail=False)
    path = save(tmp_path, data[: len(data) - cut])
    with pytest.raises(TruncatedTensor) as problem:
        read_model(path)
    found = problem.value
    assert found.tensor == ("a.weight" if others else "b.weight")
    assert (found.missing_bytes, found.others) == (missing, others)
    assert f"lacks {missing} byte" in str(found)


def test_a_truncated_unknown_type_is_noticed(tmp_path: Path) -> None:
    data = gguf([arch()], [W1, T("odd", (8,), 153, bytes(64))], tail=False)
    assert "tensor odd lacks" in why(save(tmp_path, data[:-64]))


def test_every_truncation_of_a_whole_file_is_an_error(tmp_path: Path) -> None:
    data = gguf([arch()], [W1, W2], tail=False)
    for end in range(len(data)):
        why(save(tmp_path, data[:end]))


def test_trailing_bytes_are_noted(tmp_path: Path) -> None:
    model = read_model(save(tmp_path, gguf([arch()], [W1]) + b"garbage"))
    assert model.inventory.tensors[0].size_bytes == 40
    assert model.notes == ("m.gguf: 7 bytes after the last tensor",)


def test_a_raw_part_of_a_file_is_explained(tmp_path: Path) -> None:
    data = gguf([arch()], [W1])
    assert "join the parts with cat" in why(save(tmp_path, data[:-32], "m.gguf.part1of2"))
    assert "join the parts with cat" in why(save(tmp_path, data[-32:], "m.gguf.part2of2"))
    assert "join the parts with cat" in why(save(tmp_path, data[-32:], "m.gguf-split-ab"))


def test_a_model_without_dense_names_is_not_damaged(tmp_path: Path) -> None:
    experts = T("blk.0.ffn_up_exps.weight", (8, 4, 2), 0, bytes(256))
    assert read_model(save(tmp_path, gguf([arch()], [experts]))).inventory.tensors[0].shape == (8, 4, 2)


def test_a_file_without_architecture_is_refused(tmp_path: Path) -> None:
    assert "no general.architecture" in why(save(tmp_path, gguf([], [W1])))


def test_hyperparameters_lose_their_prefix(tmp_path: Path) -> None:
    kvs = [
        arch("qwen3moe"),
        kv("general.name", STR, "Tiny"),
        kv("qwen3moe.block_count", U32, 4),
        kv("qwen3moe.attention.head_count_kv", ARR, (I32, [2, 0, 2, 0])),
        kv("qwen3moe.rope.scale", F32, float("nan")),
        kv("tokenizer.ggml.tokens", ARR, (STR, ["a"] * 7)),
        kv("other.block_count", U32, 9),
    ]
    inventory = read_model(save(tmp_path, gguf(kvs, [W1]))).inventory
    assert inventory.name == "Tiny"
    assert inventory.hparams == {
        "attention.head_count_kv": (2, 0, 2, 0),
        "block_count": 4,
        "vocab_size": 7,
    }


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (kv("llama.block_count", U32, 2**32 - 1), "block_count is 4294967295"),
        (kv("llama.block_count", U32, 513), "block_count is 513"),
        (kv("llama.block_count", STR, "four"), "block_count is four"),
        (kv("llama.attention.head_count", ARR, (I32, [4, -1])), "attention.head_count is -1"),
        (kv("llama.embedding_length", F32, 8.0), "embedding_length is 8.0"),
    ],
)
def test_counts_that_cannot_be(tmp_path: Path, entry: bytes, message: str) -> None:
    assert message in why(save(tmp_path, gguf([arch(), entry], [W1])))


def test_more_experts_used_than_there_are(tmp_path: Path) -> None:
    counts = [kv("llama.expert_count", U32, 8), kv("llama.expert_used_count", U32, 40)]
    assert "damaged: a token uses 40 of 8 experts" in why(save(tmp_path, gguf([arch(), *counts], [W1])))


def test_digits_of_other_scripts_are_no_layer_numbers(tmp_path: Path) -> None:
    name = "blk.\u0669\u0669\u0669\u0669\u0669\u0669.attn_q.weight"
    model = read_model(save(tmp_path, gguf([arch()], [T(name, (8,), 0, bytes(32))]))).inventory
    assert layers_of(model).n_all == 0
    assert units_of(model).unknown == (name,)


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [("minimax-01", "full_attention_interval", 0), ("gemma3", "attention.sliding_window_pattern", -2)],
)
def test_periods_that_cannot_be_do_no_harm(tmp_path: Path, model: str, key: str, value: int) -> None:
    entries = [
        arch(model),
        kv(f"{model}.{key}", I32, value),
        kv(f"{model}.attention.sliding_window", U32, 64),
    ]
    path = save(tmp_path, gguf([*entries, kv(f"{model}.block_count", U32, 6)], [W1]))
    inventory = read_model(path).inventory
    assert layers_of(inventory).n_main == 6
    assert sum(sliding_layers(inventory, 6)) == (5 if model == "gemma3" else 0)


def test_a_layer_that_cannot_be(tmp_path: Path) -> None:
    assert "no possible layer" in why(
        save(tmp_path, gguf([arch()], [f32("blk.99999999.attn_q.weight", 1.0)]))
    )


def test_the_header_digest_does_not_depend_on_weights_or_name(tmp_path: Path) -> None:
    one = read_model(save(tmp_path, gguf([arch()], [f32("w", 1.0)]), "a.gguf")).inventory
    two = read_model(save(tmp_path, gguf([arch()], [f32("w", 2.0)]), "b.gguf")).inventory
    three = read_model(save(tmp_path, gguf([arch()], [f32("v", 2.0)]), "c.gguf")).inventory
    assert one.header_digest == two.header_digest != three.header_digest


def parts(folder: Path) -> list[Path]:
    return [
        shard(folder, 0, 3, 3, [f32("a", 1.0)]),
        shard(folder, 1, 3, 3, [f32("b", 2.0)]),
        shard(folder, 2, 3, 3, [f32("c", 3.0)]),
    ]


def test_shards_are_found_from_any_entry(tmp_path: Path) -> None:
    files = parts(tmp_path)
    entries = [*files, tmp_path, tmp_path / "m-*.gguf", tmp_path / "m-0000?-of-00003.gguf"]
    for entry in entries:
        model = read_model(entry)
        assert model.paths == tuple(files)
        assert [(t.name, t.shard) for t in model.inventory.tensors] == [("a", 0), ("b", 1), ("c", 2)]
        assert model.inventory.name == "m"
    assert "m-00002-of-00003.gguf is not the first shard" in read_model(files[1]).notes[0]


def test_a_first_shard_without_tensors(tmp_path: Path) -> None:
    first = shard(tmp_path, 0, 2, 1, [])
    shard(tmp_path, 1, 2, 1, [f32("a", 1.0)])
    assert [t.shard for t in read_model(first).inventory.tensors] == [1]


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    files = parts(tmp_path)
    files[1].unlink()
    files[2].unlink()
    line = why(files[0])
    assert "missing shard m-00002-of-00003.gguf; missing shard m-00003-of-00003.gguf" in line
    assert "the shard is missing" in why(files[1])


def test_the_missing_first_shard_is_named_from_another(tmp_path: Path) -> None:
    files = parts(tmp_path)
    files[0].unlink()
    assert "missing shard m-00001-of-00003.gguf" in why(files[2])


def test_every_problem_of_a_set_is_told_at_once(tmp_path: Path) -> None:
    parts(tmp_path)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    (tmp_path / "m-00003-of-00003.gguf").write_text("<html>")
    with pytest.raises(ShardProblems) as problem:
        read_model(tmp_path / "m-00001-of-00003.gguf")
    assert problem.value.problems == (
        "missing shard m-00002-of-00003.gguf",
        "m-00003-of-00003.gguf: not a GGUF but an HTML page: the download failed",
    )


def test_a_truncated_shard_names_the_tensor(tmp_path: Path) -> None:
    files = parts(tmp_path)
    files[1].write_bytes(files[1].read_bytes()[:-32])
    assert "m-00002-of-00003.gguf: truncated: tensor b lacks 4 bytes" in why(files[0])


Change = Callable[[Path], object]
FOREIGN: dict[str, tuple[Change, str]] = {
    "same-number": (lambda d: shutil.copy(d / "m-00002-of-00003.gguf", d / "m-00003-of-00003.gguf"),
                    "both say split.no 1"),
    "other-count": (lambda d: shard(d, 1, 3, 4, [f32("b", 2.0)]), "belongs to a model of 4 tensors"),
    "repeated": (lambda d: shard(d, 1, 3, 3, [f32("a", 2.0)]), "both hold tensor a"),
    "too-many": (lambda d: shard(d, 1, 3, 3, [f32("b", 2.0), f32("x", 2.0)]), "the shards hold 4"),
    "no-keys": (lambda d: save(d, gguf([], [f32("b", 2.0)]), "m-00002-of-00003.gguf"), "split.no missing"),
    "other-model": (
        lambda d: save(
            d,
            gguf(
                [arch("gemma3"), kv("split.no", U16, 1), kv("split.count", U16, 3),
                 kv("split.tensors.count", I32, 3)],
                [f32("b", 2.0)],
            ),
            "m-00002-of-00003.gguf",
        ),
        "general.architecture gemma3, the first shard llama",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_shard_is_named(tmp_path: Path, case: str) -> None:
    parts(tmp_path)
    change, message = FOREIGN[case]
    change(tmp_path)
    assert message in why(tmp_path / "m-00001-of-00003.gguf")


def quantised(layer: int, kind: int, block_bytes: int) -> list[T]:
    names = (f"blk.{layer}.attn_q.weight", f"blk.{layer}.ffn_up.weight")
    return [
        f32(f"blk.{layer}.attn_norm.weight", 1.0),
        *(T(n, (32, 1), kind, bytes(block_bytes)) for n in names),
    ]


def test_a_shard_of_another_quantisation_is_named(tmp_path: Path) -> None:
    """Same names, other sizes: only the types tell."""
    q4, q8 = (2, 18), (8, 34)
    for index in range(3):
        types = q8 if index == 1 else q4
        tensors = [t for layer in (2 * index, 2 * index + 1) for t in quantised(layer, *types)]
        shard(tmp_path, index, 3, 18, tensors)
    line = why(tmp_path)
    assert line.endswith("m-00002-of-00003.gguf is of another quantisation: weights of q8_0, expected q4_0")


def test_shards_of_mixed_types_are_one_model(tmp_path: Path) -> None:
    """A last layer of its own type, and types that vary within shards."""
    q4, q8 = (2, 18), (8, 34)
    shard(tmp_path, 0, 3, 12, [*quantised(0, *q8), *quantised(1, *q4)])
    shard(tmp_path, 1, 3, 12, quantised(2, *q4))
    shard(tmp_path, 2, 3, 12, quantised(3, *q8))
    assert len(read_model(tmp_path).inventory.tensors) == 12


def test_a_name_that_contradicts_the_file(tmp_path: Path) -> None:
    first = parts(tmp_path)[0]
    other = first.rename(tmp_path / "m-00001-of-00004.gguf")
    assert "the name says 4 shards, split.count in the file 3" in why(other)
    alone = save(tmp_path, gguf([arch()], [W1]), "x-00001-of-00002.gguf")
    assert "the name says 2 shards, split.count in the file 0" in why(alone)
    assert "shard 3 of 2 cannot be" in why(save(tmp_path, gguf([arch()], [W1]), "x-00003-of-00002.gguf"))


def test_shards_joined_with_cat_are_recognised(tmp_path: Path) -> None:
    files = parts(tmp_path)
    joined = b"".join(path.read_bytes() for path in files)
    assert "one of 3 shards under a name without" in why(save(tmp_path, files[0].read_bytes(), "r.gguf"))
    assert "joined with cat" in why(save(tmp_path, joined, "joined.gguf"))
    files[0].write_bytes(joined)
    assert "joined with cat" in why(files[0])


def test_a_folder_of_several_models_is_ambiguous(tmp_path: Path) -> None:
    assert "no .gguf file there" in why(tmp_path)
    save(tmp_path, gguf([arch()], [W1]), "a.gguf")
    save(tmp_path, gguf([arch("clip")], [W1]), "mmproj-a.gguf")
    assert read_model(tmp_path).paths == (tmp_path / "a.gguf",)
    save(tmp_path, gguf([arch("clip")], [W1]), "a.MMPROJ-f16.gguf")
    save(tmp_path, gguf([arch("imatrix")], [W1]), "imatrix_a.gguf")
    assert read_model(tmp_path).paths == (tmp_path / "a.gguf",)
    save(tmp_path, gguf([arch()], [W1]), "b.gguf")
    assert "holds 2 models, name one: a.gguf, b.gguf" in why(tmp_path)


def test_what_is_not_a_file(tmp_path: Path) -> None:
    assert "no such file" in why(tmp_path / "absent.gguf")
    assert "not a regular file" in why(Path("/dev/null"))
    (tmp_path / "m-00001-of-00002.gguf").symlink_to(tmp_path / "gone")
    assert "a link that leads nowhere" in why(tmp_path / "m-00001-of-00002.gguf")


def test_links_to_shards_are_followed_by_their_own_names(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    for path in parts(tmp_path):
        blob = path.rename(tmp_path / "blobs" / str(hash(path.name)))
        path.symlink_to(blob)
    assert len(read_model(tmp_path / "m-00002-of-00003.gguf").paths) == 3


def test_a_large_vocabulary_costs_no_objects(tmp_path: Path) -> None:
    import tracemalloc

    raw = b"".join(struct.pack("<Q5s", 5, b"token") for _ in range(260_000))
    tokens = struct.pack("<Q", 21) + b"tokenizer.ggml.tokens" + struct.pack("<IIQ", ARR, STR, 260_000) + raw
    path = save(tmp_path, gguf([arch(), tokens], [W1]))
    read_model(path)  # what is imported on the way is no cost of the vocabulary
    tracemalloc.start()
    model = read_model(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert model.inventory.hparams["vocab_size"] == 260_000
    assert peak < 1 << 20


def test_known_types_have_the_sizes_gguf_py_knows() -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    # gguf-py still has the older layout of q8_1, which is never stored.
    for number in set(GGMLQuantizationType) - {GGMLQuantizationType.Q8_1}:
        block, size = GGML_QUANT_SIZES[number]
        assert (TYPES[number].block, TYPES[number].bytes) == (block, size), number
        assert TYPES[number].name.lower() == number.name.lower()
    assert tensor_bytes("q4_K", (512, 3, 2)) == 2 * 144 * 6


def test_known_types_are_those_of_the_engine() -> None:
    import ctypes

    from runtime.engine.libllama import Engine

    lib = Engine.find(None).lib
    lib.ggml_type_name.restype = ctypes.c_char_p
    lib.ggml_blck_size.restype = ctypes.c_int64
    lib.ggml_type_size.restype = ctypes.c_size_t
    for number, kind in TYPES.items():
        found = (lib.ggml_type_name(number).decode(), lib.ggml_blck_size(number), lib.ggml_type_size(number))
        assert found == (kind.name, kind.block, kind.bytes)


ENGINE_LOADS = {
    "plain": ([W1, W2], b"", True),
    "trailing bytes": ([W1, W2], b"garbage", True),
    "hole": ([T("wide.weight", (256, 2), 12, bytes(352)), W2], b"", False),
    "unknown type": ([T("odd.weight", (256, 2), 153, bytes(288)), W2], b"", False),
}


@pytest.mark.parametrize("case", ENGINE_LOADS)
def test_what_the_notes_say_of_the_engine_is_so(tmp_path: Path, case: str) -> None:
    import ctypes

    from runtime.engine.libllama import Engine

    class Params(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))

    tensors, tail, loads = ENGINE_LOADS[case]
    path = save(tmp_path, gguf([arch()], tensors) + tail)
    lib = Engine.find(None).lib
    lib.gguf_init_from_file.restype = ctypes.c_void_p
    lib.gguf_init_from_file.argtypes = [ctypes.c_char_p, Params]
    lib.gguf_free.argtypes = [ctypes.c_void_p]
    found = lib.gguf_init_from_file(str(path).encode(), Params(True, None))
    assert bool(found) == loads
    assert any("llama.cpp" in note for note in read_model(path).notes) != loads
    if found:
        lib.gguf_free(found)


def test_problems_are_input_errors() -> None:
    assert issubclass(TruncatedTensor, InputError) and issubclass(ShardProblems, InputError)
    assert FileProblem("x", "y").exit_code == 2
