"""Files are canonical, strict, and name the line of what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from yaml._yaml import CParser

from planner import yaml_reader
from planner.errors import FieldProblem
from planner.machine.profile import Calibration, Profile
from planner.model.inventory import Inventory, Shard, Tensor, from_text, to_text
from planner.plan.plan import Plan
from planner.records import Record, digest, dump, load
from planner.yaml_reader import Lines, read
from rewriter.manifest import Manifest

TINY = Inventory(
    name="tiny",
    architecture="llama",
    header_digest="",
    hparams={"block_count": 1, "eps": 1e-6, "flag": True, "heads": (4, 0), "theta": 1e6, "kind": "none"},
    shards=(Shard(file="tiny.gguf", size_bytes=96, data_offset=32, alignment=32),),
    tensors=(Tensor(name="output.weight", type="f32", shape=(4, 4), size_bytes=64, shard=0, offset=32),),
)

TEXT = """\
schema: 1
name: tiny
architecture: llama
header_digest: ''
hparams:
  block_count: 1
  eps: 1.0e-06
  flag: true
  heads: [4, 0]
  theta: 1000000.0
  kind: none
shards:
- {file: tiny.gguf, size_bytes: 96, data_offset: 32, alignment: 32}
tensors:
- {name: output.weight, type: f32, shape: 4x4, size_bytes: 64, shard: 0, offset: 32}
"""


def test_text_is_canonical_both_ways() -> None:
    assert to_text(TINY) == TEXT
    assert from_text(TEXT, "x") == TINY
    assert to_text(from_text(TEXT, "x")) == TEXT


@pytest.mark.parametrize(
    ("old", "new", "line", "part"),
    [
        ("schema: 1", "schema: 2", 1, "schema: 2 was written by a newer atsplan; this one reads up to 1"),
        ("schema: 1", "schema: 0", 1, "schema"),
        ("schema: 1", "schema: '1'", 1, "schema"),
        ("block_count: 1", "block_count: 012", 6, "plain decimal"),
        ("block_count: 1", "block_count: 12:30", 6, "plain decimal"),
        ("block_count: 1", "block_count: 0x10", 6, "plain decimal"),
        ("block_count: 1", "block_count: 1_000", 6, "plain decimal"),
        ("size_bytes: 64", "size_bytes: 1e-07", 15, "tensors[0].size_bytes"),
        ("size_bytes: 64", "size_bytes: -1", 15, "greater than or equal to 0"),
        ("size_bytes: 64", "size_bytes: 64.5", 15, "integer"),
        ("size_bytes: 64", "size_bytes: true", 15, "integer"),
        ("shape: 4x4", "shape: 4*4", 15, "2048x768x128"),
        ("name: tiny\n", "name: tiny\nname: other\n", 3, "twice"),
        ("name: tiny\n", "", 1, "name: is missing"),
        ("name: tiny\n", "name: tiny\nnmae: x\n", 3, "nmae: unknown key"),
        ("name: tiny\n", "name: [tiny\n", 3, "not YAML"),
        ("name: tiny\n", "\tname: tiny\n", 2, "a tab: YAML is indented with spaces"),
        ("name: tiny\n", "name: !!python/object:os.system x\n", 2, "not YAML"),
        ("name: tiny\n", "name: !!binary dGlueQ==\n", 2, "tags such as tag:yaml.org,2002:binary"),
        ("name: tiny\n", "name: !!str tiny\n", 2, "tags such as tag:yaml.org,2002:str"),
        ("name: tiny\n", "name: 2026-11-30\n", 2, "write 2026-11-30 in quotes"),
        ("name: tiny\n", "name: 2026-11-30 12:30:00\n", 2, "write 2026-11-30 12:30:00 in quotes"),
        ("name: tiny\n", "name: =\n", 2, "write = in quotes"),
        ("name: tiny\n", "name: &n tiny\n", 2, "name: YAML aliases"),
        ("name: tiny\n", "&n name: tiny\n", 2, "name: YAML aliases"),
        ("hparams:\n", "hparams:\n  <<: {a: 1}\n", 6, "hparams.<<"),
        ("eps: 1.0e-06", "eps: 1_0.5", 7, "plain decimal number"),
        ("eps: 1.0e-06", "eps: .inf", 7, "plain decimal number"),
        ("eps: 1.0e-06", "eps: .nan", 7, "plain decimal number"),
        ("eps: 1.0e-06", "eps: 1.0e+999", 7, "larger than any number"),
        ("block_count: 1", f"block_count: {'9' * 5000}", 6, "a number of 5000 digits"),
        ("block_count: 1", f"block_count: {'[' * 40}", 6, "more than 16 levels"),
        ("kind: none\n", "kind: none\n---\nmore: 1\n", 12, "another document"),
    ],
)
def test_faults_name_the_line(old: str, new: str, line: int, part: str) -> None:
    with pytest.raises(FieldProblem) as caught:
        from_text(TEXT.replace(old, new, 1), "tiny.yaml")
    assert caught.value.line == line
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "just words", "- a\n- b", "\0", "a: &x [*x]", "? [a]\n: b"])
def test_texts_that_are_no_record_are_refused(text: str) -> None:
    with pytest.raises(FieldProblem):
        from_text(text, "x.yaml")


LETTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
WORDS = st.sampled_from(
    ("", "~", "null", "yes", "Off", "=", "<<", "1", "-0", "012", "0x1F", "1_0", "12:30", "1e3", "1.0e+3")
) | st.sampled_from(
    (".5", "2026-11-30", "2026-11-30 at noon", "- a", "a: b", "#", "a #b", "!x", "&a", "*a", ".nan", "0b1")
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = SCALARS | LETTERS | WORDS
KEYS = LETTERS | WORDS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=5), st.sampled_from([None, False, True]))
def test_what_yaml_writes_is_read_as_yaml_reads_it(value: dict[str, Any], flow: bool | None) -> None:
    text = yaml.dump(
        value, Dumper=yaml.CSafeDumper, sort_keys=False, default_flow_style=flow, allow_unicode=True
    )
    assert read(text, "x") == value == yaml.load(text, Loader=yaml.CSafeLoader)


TEXTS = st.text(st.sampled_from(list("ab1.-:,[]{}'\"#&*!|>%~\n  ")), max_size=40)


@settings(max_examples=500, deadline=None)
@given(TEXTS)
def test_a_parser_without_libyaml_answers_the_same(text: str) -> None:
    def answer(parser: Any) -> tuple[Any, int]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(yaml_reader, "_parser", parser)
            try:
                return read(text, "x"), 0
            except FieldProblem as problem:
                return None, problem.line

    first, second = answer(CParser), answer(yaml.SafeLoader)
    assert first[0] == second[0]


def test_committed_files_are_read_as_yaml_reads_them() -> None:
    files = sorted(Path(__file__).parent.parent.glob("plans/**/*.yaml"))
    assert len(files) > 80
    for file in files[::7]:
        text = file.read_text()
        assert read(text, str(file)) == yaml.load(text, Loader=yaml.CSafeLoader)


def test_lines_finds_values_and_nearest_parents() -> None:
    lines = Lines(TEXT)
    assert [lines.of("hparams", "eps"), lines.of("tensors", 0, "shape"), lines.of("hparams", "none")] == [
        7,
        15,
        5,
    ]


def test_one_line_is_found_as_among_all() -> None:
    files = sorted(Path(__file__).parent.parent.glob("plans/**/*.yaml"))
    for text in [TEXT, *(file.read_text() for file in files[::29])]:
        lines = Lines(text)
        lines.of()
        places = [*_places(read(text, "x"))]
        for where in places[:: max(len(places) // 40, 7)]:  # each is a reading of the whole text
            for wanted in (where, (*where, "none", 3), (*where, 10**6)):
                assert Lines(text).of(*wanted) == lines.of(*wanted)


def _places(value: Any, where: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield where
    for step, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from _places(inner, (*where, step))


def test_digest_separates_its_parts() -> None:
    assert digest("ab", "c") != digest("a", "bc")


def test_table_digest_ignores_file_order_and_nothing_else() -> None:
    second = TINY.tensors[0].model_copy(update={"name": "a", "offset": 96})
    one = TINY.model_copy(update={"tensors": (*TINY.tensors, second)})
    two = TINY.model_copy(update={"tensors": (second, *TINY.tensors), "header_digest": "other"})
    assert one.table_digest() == two.table_digest() != TINY.table_digest()
    bigger = one.model_copy(update={"hparams": {**one.hparams, "block_count": 2}})
    assert bigger.table_digest() != one.table_digest()


def test_defaults_and_maps_survive_the_round_trip() -> None:
    record = Calibration(model="", split_ns=50_000, mixed_ns=0, token_ns=1, scale_ppm={"CPU": 1_000_000})
    assert load(dump(record), Calibration, "x") == record


def unbounded(schema: Any, where: str = "") -> Iterator[str]:
    """Places of a JSON Schema that take whole numbers without end."""
    if isinstance(schema, list):
        for index, each in enumerate(schema):
            yield from unbounded(each, f"{where}[{index}]")
    elif isinstance(schema, dict):
        if schema.get("type") == "integer" and not {"maximum", "exclusiveMaximum"} & schema.keys():
            yield where
        for key, each in schema.items():
            yield from unbounded(each, f"{where}.{key}")


@pytest.mark.parametrize("kind", [Plan, Profile, Inventory, Manifest])
def test_every_number_has_an_upper_bound(kind: type[Record]) -> None:
    assert list(unbounded(kind.model_json_schema())) == []
