"""The header parser on files written out as bytes."""

from __future__ import annotations

import struct

import pytest
from gguf_bytes import ARR, BOOL, F32, I32, STR, U8, U32, U64, T, arch, gguf, info, kv, text

from planner.errors import FileProblem
from planner.model.gguf.header import parse_header

LITERAL = (
    b"GGUF\x03\x00\x00\x00"
    b"\x01\x00\x00\x00\x00\x00\x00\x00"  # one tensor
    b"\x02\x00\x00\x00\x00\x00\x00\x00"  # two key-values
    b"\x14\x00\x00\x00\x00\x00\x00\x00general.architecture\x08\x00\x00\x00"
    b"\x05\x00\x00\x00\x00\x00\x00\x00llama"
    b"\x11\x00\x00\x00\x00\x00\x00\x00llama.block_count\x04\x00\x00\x00\x07\x00\x00\x00"
    b"\x01\x00\x00\x00\x00\x00\x00\x00w\x02\x00\x00\x00"
    b"\x04\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00"  # 4 x 2
    b"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"  # f32 at offset 0
)


def test_a_header_reads_as_the_format_says() -> None:
    header = parse_header(LITERAL, "m")
    assert (header.version, header.alignment, header.end, header.data_offset) == (3, 32, 143, 160)
    assert [(kv.key, kv.value) for kv in header.kvs] == [
        ("general.architecture", "llama"),
        ("llama.block_count", 7),
    ]
    assert LITERAL[header.kvs[1].start : header.kvs[1].end].endswith(b"\x07\x00\x00\x00")
    (tensor,) = header.infos
    assert (tensor.name, tensor.dims, tensor.type, tensor.offset) == ("w", (4, 2), 0, 0)
    assert (tensor.start, tensor.end) == (102, 143)


def test_the_encoder_of_the_tests_agrees_with_the_literal() -> None:
    made = gguf([arch(), kv("llama.block_count", U32, 7)], [T("w", (4, 2), 0, bytes(32))])
    assert made[:143] == LITERAL


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        (kv("k", BOOL, True), True),
        (kv("k", F32, 0.5), 0.5),
        (kv("k", U64, 2**63), 2**63),
        (kv("k", STR, ""), ""),
        (kv("k", ARR, (I32, [])), ()),
        (kv("k", ARR, (STR, ["a", "b"])), None),  # left in the file
        (kv("k", ARR, (U8, [1, 2, 3])), (1, 2, 3)),
        (kv("k", ARR, (U8, [0] * 5000)), None),
    ],
)
def test_values_are_decoded_or_left_in_the_file(entry: bytes, value: object) -> None:
    (found,) = parse_header(gguf([entry]), "m").kvs
    assert found.value == value
    assert found.end - found.start == len(entry)


def test_empty_arrays_keep_their_element_type() -> None:
    (found,) = parse_header(gguf([kv("k", ARR, (STR, []))]), "m").kvs
    assert (found.element, found.length) == (STR, 0)


def test_long_strings_stay_in_the_file() -> None:
    (found,) = parse_header(gguf([kv("k", STR, "x" * 2_000_000)]), "m").kvs
    assert (found.value, found.length) == (None, 2_000_000)


@pytest.mark.parametrize("version", [2, 3])
def test_versions_two_and_three_are_read(version: int) -> None:
    assert parse_header(gguf([arch()], version=version), "m").version == version


def head(tensors: int, kvs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, kvs)


BAD = {
    "empty": (b"", "empty file"),
    "html": (b"\n<!DOCTYPE html><html>", "an HTML page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "an LFS pointer"),
    "json": (b'{"error": "no such model"}', "JSON text"),
    "html-comment": (b"\n<!-- moved --><html>", "an HTML page"),
    "text": (b"Entry not found", "text, 'Entry not found': a failed download?"),
    "xml": (b"<Error><Code>AccessDenied</Code></Error>", "text, '<Error><Code>AccessDenied"),
    "plan": (b"schema: 2\ncommand: atsplan solve\n", "is a plan, a model is needed"),
    "heat": (b"# heat: 1\n", "is a heat file, a model is needed"),
    "zeros": (bytes(4096), "it starts with zeros, as downloads do that have not ended"),
    "gzip": (b"\x1f\x8b\x08" + bytes(40), "a gzip archive"),
    "pickle": (b"\x80\x02}q" + bytes(40), "a Python pickle"),
    "zip": (b"PK\x03\x04" + bytes(40), "zip archive"),
    "safetensors": (struct.pack("<Q", 40) + b'{"a":{}}', "a safetensors file"),
    "old": (b"tjgg" + bytes(40), "an old GGML file"),
    "other": (b"\x7fELF\x02\x01\x01\x00", "it starts with 7f 45 4c 46 02 01 01 00"),
    "cut-magic": (b"GG", "it starts with 'GG'"),
    "version-1": (head(0, 0, 1), "unsupported GGUF version 1"),
    "version-4": (head(0, 0, 4), "unsupported GGUF version 4"),
    "version-0": (head(0, 0, 0), "unsupported GGUF version 0"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "big-endian-magic": (b"FUGG" + bytes(20), "big-endian"),
    "cut-count": (head(0, 0)[:20], "truncated header: the key-value count needs 8 bytes at byte 16"),
    "tensors-lie": (head(1000, 0), "1000 tensors announced"),
    "kvs-lie": (head(0, 1000), "1000 key-values announced"),
    "tensors-absurd": (head(2**63, 0), "more than the 65536 this"),
    "kvs-absurd": (head(0, 2**64 - 1), "more than the 65536"),
    "key-length": (head(0, 1) + struct.pack("<Q", 2**63) + bytes(40), "more than the 65535"),
    "empty-key": (gguf([kv("", U8, 1)]), "empty key"),
    "key-not-utf8": (gguf([kv(b"\xff\xfe", U8, 1)]), "a key is not UTF-8"),
    "value-type": (head(0, 1) + text("k") + struct.pack("<I", 13) + bytes(9), "k has unknown value type 13"),
    "string-length": (head(0, 1) + text("k") + struct.pack("<IQ", STR, 2**62), "k needs 4611686018427387904"),
    "element-type": (head(0, 1) + text("k") + struct.pack("<IIQ", ARR, 99, 0), "unknown element type 99"),
    "nested": (
        head(0, 1) + text("k") + struct.pack("<IIQ", ARR, ARR, 1) + bytes(12),
        "arrays inside an array",
    ),
    "array-length": (
        head(0, 1) + text("k") + struct.pack("<IIQ", ARR, U8, 2**63),
        "k needs 9223372036854775808",
    ),
    "strings-many": (head(0, 1) + text("k") + struct.pack("<IIQ", ARR, STR, 2**63), "no room for them"),
    "strings-long": (
        head(0, 1) + text("k") + struct.pack("<IIQQ", ARR, STR, 1, 2**40),
        "the strings of k run past the end",
    ),
    "same-key": (gguf([kv("k", U8, 1), kv("k", U8, 1)]), "key k appears twice"),
    "same-tensor": (gguf([], [T("w", (8,), 0, bytes(32))] * 2), "tensor w appears twice"),
    "tensor-no-name": (gguf([], [T("", (8,), 0, bytes(32))]), "empty tensor name"),
    "five-dims": (gguf([], [T("w", (1,) * 5, 0, bytes(4))]), "w has 5 dimensions"),
    "dims-lie": (head(1, 0) + text("w") + struct.pack("<I", 2**32 - 1) + bytes(30), "4294967295 dimensions"),
    "dim-zero": (gguf([], [T("w", (8, 0), 0, b"")]), "w of shape 8x0 has no values"),
    "dims-wrap": (gguf([], [T("w", (2**32, 2**32), 0, b"")]), "has too many values"),
    "cut-info": (gguf([], [T("w", (8,), 0, b"")])[:50], "truncated header: "),
    "alignment-zero": (gguf([kv("general.alignment", U32, 0)]), "general.alignment 0 is not a power of two"),
    "alignment-odd": (gguf([kv("general.alignment", U32, 48)]), "general.alignment 48 is not a power"),
    "alignment-type": (gguf([kv("general.alignment", U64, 32)]), "not a 32-bit unsigned integer"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_broken_header_is_one_line_that_says_what(case: str) -> None:
    data, message = BAD[case]
    with pytest.raises(FileProblem) as problem:
        parse_header(data, "m.gguf")
    line = str(problem.value)
    assert message in line
    assert line.startswith("m.gguf: ") and "\n" not in line and len(line) < 300


def test_messages_are_distinct() -> None:
    lines = set()
    for data, _ in BAD.values():
        with pytest.raises(FileProblem) as problem:
            parse_header(data, "m")
        lines.add(str(problem.value))
    assert len(lines) >= len(BAD) - 2  # two kinds of big-endian, and of HTML, read the same


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("m.gguf.part1of2", "join the parts with cat"),
        ("m.gguf-split-a", "join the parts with cat"),
        ("m.gguf-split-b", "join the parts with cat"),
        ("m.gguf.001", "join the parts with cat"),
        ("m.gguf.aa", "join the parts with cat"),
        ("m.gguf.part", "a download that has not ended"),
        ("m.gguf.incomplete", "a download that has not ended"),
        ("m.gguf.crdownload", "a download that has not ended"),
    ],
)
def test_pieces_of_files_are_known_by_their_names(name: str, advice: str) -> None:
    with pytest.raises(FileProblem, match=advice):
        parse_header(bytes(range(64)), name)


@pytest.mark.parametrize("length", [10, 24, 60])
def test_the_first_piece_of_a_file_is_known_too(length: int) -> None:
    with pytest.raises(FileProblem, match=r"truncated header.*join the parts with cat"):
        parse_header(LITERAL[:length], "m.gguf.part1of3")


def test_control_characters_in_names_do_not_break_the_line() -> None:
    data = gguf([], [T("w\n\x1b[31m" + "x" * 500, (0,), 0, b"")])
    with pytest.raises(FileProblem) as problem:
        parse_header(data, "m")
    assert "\n" not in str(problem.value) and "\x1b" not in str(problem.value)


def test_a_cut_at_every_byte_of_the_header_is_reported() -> None:
    for end in range(len(LITERAL)):
        with pytest.raises(FileProblem):
            parse_header(LITERAL[:end], "m")


def test_a_scalar_without_dimensions_is_read() -> None:
    data = head(1, 0) + info("s", (), 0, 0) + bytes(100)
    assert parse_header(data, "m").infos[0].dims == ()
