"""atsplan inventory, as a person calls it."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from gguf_bytes import STR, U32, T, arch, gguf, info, kv
from sparse_model import write_sparse

from atsplan import main
from benchmarks.inputs.tensor_tables import Row, inventory_of
from planner.model.gguf.header import parse_header
from planner.model.gguf.reader import read_model
from planner.model.inventory import from_text, to_text
from profiler.synth.synth import SynthSpec, write

INPUTS = Path(__file__).parent.parent / "plans" / "inputs"


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["inventory", *map(str, arguments)])


def test_a_real_model_at_a_glance() -> None:
    answer = call(INPUTS / "Qwen3.6-35B-A3B-q4_K.inventory.yaml")
    assert answer.exit_code == 0
    for words in (
        "qwen35moe, 19.79 GiB in 733 tensors",
        "40 main, 10 attention, 30 recurrent, 40 experts",
        "experts: 256 in each of 40 layers, 8 used per token",
        "KV cache: 20.0 MiB per 1024 tokens",
        "recurrent state: 62.8 MiB per sequence",
    ):
        assert words in answer.stdout


def test_a_small_model_has_a_size(dense_model: Path) -> None:
    assert re.search(r"llama, [1-9] MiB in \d+ tensors", call(dense_model).stdout)


def test_json_counts_everything(moe_model: Path) -> None:
    answer = call(moe_model, "--json")
    found = json.loads(answer.stdout)
    assert found["size_bytes"] == sum(role["size_bytes"] for role in found["roles"])
    assert found["tensors"] == sum(role["tensors"] for role in found["roles"])
    assert found["active_bytes"] == sum(role["active_bytes"] for role in found["roles"]) + found["tied_bytes"]
    assert found["experts"] == [
        {"layers": 4, "experts": 8, "used": 2, "expert_bytes": found["experts"][0]["expert_bytes"]}
    ]
    assert found["unknown"] == []


def test_the_inventory_file_is_canonical_and_reads_back(moe_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "inventory.yaml"
    answer = call(moe_model, "-o", target)
    assert answer.exit_code == 0
    text = target.read_text()
    model = from_text(text, str(target))
    assert to_text(model) == text
    assert model == read_model(moe_model).inventory
    assert json.loads(call(target, "--json").stdout) == json.loads(call(moe_model, "--json").stdout)
    assert [p.name for p in tmp_path.iterdir()] == ["inventory.yaml"]


def test_a_split_model_from_any_of_its_files(split_model: Path) -> None:
    answers = {call(path, "--json").stdout for path in [*split_model.parent.glob("*.gguf")]}
    assert len(answers) == 1
    assert json.loads(answers.pop())["files"] > 1


def test_draft_and_projector_beside_the_model(moe_model: Path, dense_model: Path) -> None:
    answer = call(moe_model, "--draft", dense_model)
    assert "draft synth-llama: weights" in answer.stdout
    assert (
        json.loads(call(moe_model, "--draft", dense_model, "--json").stdout)["extras"][0]["kind"] == "draft"
    )


def test_a_projector_is_counted_with_its_compute_buffer(moe_model: Path, tmp_path: Path) -> None:
    hparams = {"vision.embedding_length": 64, "vision.feed_forward_length": 256}
    sizes = {"vision.image_size": 224, "vision.patch_size": 14}
    rows = [Row("v.blk.0.attn_q.weight", "f16", (64, 64), 8192), Row("mm.0.weight", "f16", (64, 256), 32768)]
    path = write_sparse(tmp_path / "mmproj.gguf", inventory_of("mmproj", "clip", {**hparams, **sizes}, rows))
    found = json.loads(call(moe_model, "--mmproj", path, "--json").stdout)["extras"]
    assert found[0]["size_bytes"] == 8192 + 32768
    assert found[0]["compute_bytes"] == 4 * 16**2 * (256 + 2 * 64) + 4 * 3 * 224**2
    assert "mmproj" in call(moe_model, "--mmproj", path).stdout


def test_an_architecture_we_do_not_know_is_said(tmp_path: Path) -> None:
    text = (INPUTS / "Qwen3-4B-Instruct-2507-q4_K.inventory.yaml").read_text()
    path = tmp_path / "odd.yaml"
    path.write_text(text.replace("architecture: qwen3\n", "architecture: frobnicate\n"))
    answer = call(path)
    assert answer.exit_code == 0
    assert "architecture frobnicate" in answer.stderr


def test_what_a_person_should_know_goes_to_stderr(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", SynthSpec("glm4moe", n_nextn=1))
    answer = call(model)
    assert "NextN blocks are loaded only on request" in answer.stderr
    assert "NextN blocks are" not in answer.stdout
    assert "1 nextn" in answer.stdout


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "none.gguf", "none.gguf"),
        (lambda folder: _file(folder / "text.gguf", b"hello world, no model"), "text.gguf"),
        (lambda folder: _file(folder / "odd.yaml", b"schema: 1\nname: x\n"), "odd.yaml"),
    ],
)
def test_what_is_no_model_is_one_line_and_exit_code_2(make, words: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    answer = call(make(tmp_path))
    assert answer.exit_code == 2
    assert words in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1
    assert answer.stdout == ""


def test_an_output_folder_that_is_not_there_leaves_nothing(moe_model: Path, tmp_path: Path) -> None:
    answer = call(moe_model, "-o", tmp_path / "missing" / "inventory.yaml")
    assert answer.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_what_the_reader_noticed_is_said(tmp_path: Path, split_model: Path) -> None:
    second = sorted(split_model.parent.glob("*.gguf"))[1]
    assert "is not the first shard: starting from" in call(second).stderr
    whole = gguf([arch()], [T("a.weight", (8,), 0, bytes(32)), T("output.weight", (8,), 999, bytes(40))])
    assert "1 tensor of unknown type999" in call(_file(tmp_path / "odd.gguf", whole)).stderr
    longer = gguf([arch()], [T("output.weight", (8,), 0, bytes(32))]) + bytes(7)
    assert "7 bytes after the last tensor" in call(_file(tmp_path / "longer.gguf", longer)).stderr


def test_names_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    entries = [arch("od\x1b[31md"), kv("general.name", STR, "two\nlines")]
    path = _file(tmp_path / "m.gguf", gguf(entries, [T("x\n.weight", (8,), 0, bytes(32))]))
    answer = call(path)
    assert answer.exit_code == 0
    assert "\x1b" not in answer.output
    assert answer.stdout.startswith("two\\nlines: od\\x1b[31md, ")
    absent = call(tmp_path / "no\nfile.gguf")
    assert absent.exit_code == 2
    assert len(absent.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("blk.0.attn_q.weight", "blk.999999999.attn_q.weight", "blk.999999999.attn_q.weight: belongs to no"),
        ("blk.0.attn_q.weight", "blk.1.attn_q.weight", "blk.1.attn_q.weight: appears twice"),
        ("2560x4096", "2560x0", "has a shape that cannot be"),
        ("2560x4096", "2x2x2x2x2", "has a shape that cannot be"),
        ("shard: 0, offset: 0}", "shard: 3, offset: 0}", "token_embd.weight: lies in shard 3 of 1"),
    ],
)
def test_tensors_of_an_inventory_file_that_cannot_be(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = (INPUTS / "Qwen3-4B-Instruct-2507-q4_K.inventory.yaml").read_text()
    answer = call(_file(tmp_path / "odd.yaml", text.replace(old, new).encode()))
    assert answer.exit_code == 2
    assert words in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_an_output_that_is_a_folder_is_named(moe_model: Path, tmp_path: Path) -> None:
    answer = call(moe_model, "-o", tmp_path)
    assert answer.exit_code == 2
    assert answer.stderr == f"atsplan: {tmp_path}: is a folder, a file is needed\n"
    assert list(tmp_path.iterdir()) == []


def _file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (T("output.weight", (8,), 999, bytes(40)), "tensor type type999 is not known"),
        (T("v.patch_embd.weight", (8,), 0, bytes(32)), "1 tensor (v.patch_embd.weight) is not of the text"),
        (T("blk.0.mystery.weight", (8,), 0, bytes(32)), "blk.0.mystery.weight is not recognised"),
    ],
)
def test_strict_refuses_what_is_not_known(tmp_path: Path, tensor: T, why: str) -> None:
    plain = write(tmp_path / "p.gguf", SynthSpec("llama", n_layers=1, n_embd=32, head_dim=32, tied=True))
    data = plain.read_bytes()
    header = parse_header(data, "p.gguf")
    end = len(data) - header.data_offset
    entry = info(tensor.name, tensor.dims, tensor.kind, end)
    count = struct.pack("<Q", len(header.infos) + 1)
    head = data[:8] + count + data[16 : header.end] + entry
    body = data[header.data_offset :] + tensor.payload
    path = _file(tmp_path / "m.gguf", head + bytes(-len(head) % header.alignment) + body)
    result = call(path, "--strict")
    assert (result.exit_code, result.stdout) == (1, "")
    assert why in result.stderr.splitlines()[-1]
    assert call(path).exit_code == 0
    assert call(plain, "--strict").exit_code == 0


def test_strict_refuses_what_the_engine_refuses(tmp_path: Path) -> None:
    part = [T("blk.0.attn_q.weight", (8, 8), 0, bytes(256))]
    keys = [arch(), kv("llama.block_count", U32, 1)]
    keys += [kv("llama.vocab_size", U32, 8), kv("tokenizer.ggml.model", STR, "none")]
    path = _file(tmp_path / "m.gguf", gguf(keys, part))
    result = call(path, "--strict")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "stock llama.cpp would not load it: llama.context_length is missing" in result.stderr
    told = call(path)
    assert told.exit_code == 0 and "note: stock llama.cpp would not load it" in told.stderr
