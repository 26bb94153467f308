"""The inventories of real models under plans/inputs, and the tables they come from."""

from __future__ import annotations

import re
import runpy
from functools import cache
from pathlib import Path

import pytest

from benchmarks.inputs.tensor_tables import inventory_of, read_table
from planner.errors import FieldProblem
from planner.memory.compute_buffer import compute_bytes
from planner.memory.kv_cache import kv_bytes, state_bytes
from planner.model.inventory import Inventory, from_text, to_text
from planner.model.layers import KNOWN, layers_of
from planner.model.structure import structure_of
from planner.model.units import Kind, units_of
from planner.workload import Workload

INPUTS = Path(__file__).parent.parent / "plans" / "inputs"
FILES = sorted(INPUTS.glob("*.inventory.yaml"))


@cache
def read(name: str) -> Inventory:
    path = INPUTS / f"{name}.inventory.yaml"
    return from_text(path.read_text(), str(path))


def test_there_are_real_models_of_many_architectures() -> None:
    assert len(FILES) >= 16
    assert len({read(f.name.removesuffix(".inventory.yaml")).architecture for f in FILES}) >= 9


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name.removesuffix(".inventory.yaml"))
def test_every_tensor_has_its_unit(path: Path) -> None:
    model = read(path.name.removesuffix(".inventory.yaml"))
    assert to_text(model) == path.read_text()
    assert model.architecture in KNOWN
    table = units_of(model)
    assert table.unknown == ()
    assert sum(unit.size_bytes for unit in table.units) == model.size_bytes
    assert sorted(n for unit in table.units for n in unit.tensors) == sorted(t.name for t in model.tensors)
    check_caches(model)
    check_experts(model)


def check_caches(model: Inventory) -> None:
    """KV only where there are keys and values, state only where there is a recurrent mixer."""
    layers, work = layers_of(model), Workload()
    tensors = {t.name for t in model.tensors}
    for n, size in enumerate(kv_bytes(structure_of(model), work)):
        keys = {f"blk.{n}.attn_k.weight", f"blk.{n}.attn_kv_a_mqa.weight"} & tensors
        assert (size > 0) == bool(keys)
    for n, size in enumerate(state_bytes(structure_of(model), work)):
        assert (size > 0) == (f"blk.{n}.ssm_out.weight" in tensors)
        assert layers.attention[n] + layers.recurrent[n] <= 1


def check_experts(model: Inventory) -> None:
    """Experts are counted from tensors and agree with what the file states."""
    units = [unit for unit in units_of(model).units if unit.kind is Kind.EXPERTS]
    assert bool(units) == ("expert_count" in model.hparams)
    for unit in units:
        assert (unit.experts, unit.used) == (model.number("expert_count"), model.number("expert_used_count"))
        assert unit.active_bytes * unit.experts == unit.size_bytes * unit.used


@pytest.mark.parametrize(
    ("name", "attention", "recurrent", "experts", "nextn"),
    [
        ("Qwen3.6-35B-A3B-q4_K", 10, 30, 40, 0),
        ("Qwen3.6-27B-q4_K", 16, 48, 0, 0),
        ("Qwen3-Next-80B-A3B-Q4_K_M", 12, 36, 48, 0),
        ("Nemotron-3-Nano-30B-A3B-Q4_K_M", 6, 23, 23, 0),
        ("GLM-4.5-q4_K", 92, 0, 89, 1),
        ("GLM-4.7-Flash-q4_K", 47, 0, 46, 0),
        ("Kimi-K2-Thinking-q4_K", 61, 0, 60, 0),
        ("DeepSeek-V3.1-Terminus-q4_K", 61, 0, 58, 0),
    ],
)
def test_layers_of_known_models(name: str, attention: int, recurrent: int, experts: int, nextn: int) -> None:
    model = read(name)
    layers = layers_of(model)
    units = units_of(model).units
    assert sum(layers.attention) == attention
    assert sum(layers.recurrent) == recurrent
    assert sum(unit.kind is Kind.EXPERTS for unit in units) == experts
    assert layers.n_nextn == nextn


def test_totals_that_others_have_published() -> None:
    assert read("Qwen3-30B-A3B-Q4_K_M").size_bytes == 18550716416
    assert round(read("gpt-oss-120b-MXFP4").size_bytes / 2**30, 2) == 59.02
    assert round(read("Llama-3.1-70B-Q4_K_M").size_bytes / 2**30, 2) == 39.59


def test_a_table_gives_its_sizes_or_has_them_computed() -> None:
    rows = read_table("name,ne,type,bytes\na.weight,256x2,q4_k,\nb.weight,8,weird7,99\n", "t.csv")
    assert [(r.type, r.size_bytes) for r in rows] == [("q4_K", 288), ("weird7", 99)]
    model = inventory_of("m", "llama", {"block_count": 1}, rows)
    assert [t.offset for t in model.tensors] == [0, 288]
    assert from_text(to_text(model), "m") == model


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("name,type\na,f32\n", 1, "ne"),
        ("name,ne,type\na.weight,256x2,iq9_z\n", 2, "unknown type iq9_z"),
        ("name,ne,type\na.weight,256x2,f32\nb.weight,12x,f32\n", 3, "b.weight"),
        ("name,ne,type\na.weight,100,q4_K\n", 2, "a.weight"),
    ],
)
def test_a_bad_table_is_refused_at_its_line(text: str, line: int, what: str) -> None:
    with pytest.raises(FieldProblem, match=what) as caught:
        read_table(text, "t.csv")
    assert caught.value.line == line


@pytest.mark.parametrize(
    "name", ["Qwen3.6-35B-A3B-q4_K", "gemma-4-26B-A4B-Q4_K_M", "DeepSeek-V3.1-Terminus-q4_K"]
)
def test_more_of_anything_never_takes_less_memory(name: str) -> None:
    """What fits at a context fits at every smaller one; the same for batches."""
    model = read(name)

    def total(**changed: int) -> int:
        work = Workload(**{"n_ctx": 8192, "n_seq": 2, "n_ubatch": 256, **changed})
        return (
            sum(kv_bytes(structure_of(model), work))
            + sum(state_bytes(structure_of(model), work))
            + compute_bytes(structure_of(model), work)
        )

    for key, values in (
        ("n_ctx", range(256, 8192, 256)),
        ("n_ubatch", (16, 32, 64, 512, 2048)),
    ):
        sizes = [total(**{key: value}) for value in values]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("value", ["abc", "-3", "1.5", "[4, -1]", "9999999999999"])
@pytest.mark.parametrize("key", ["attention.head_count", "full_attention_interval", "block_count"])
def test_a_hyperparameter_that_is_no_count_is_refused_at_its_line(key: str, value: str) -> None:
    path = INPUTS / "Qwen3.5-0.8B-q8_0.inventory.yaml"
    lines = path.read_text().split("\n")
    number = next(n for n, line in enumerate(lines) if line.startswith(f"  {key}:"))
    lines[number] = f"  {key}: {value}"
    with pytest.raises(FieldProblem, match=key) as caught:
        from_text("\n".join(lines), "x.yaml")
    assert caught.value.line == number + 1


def test_more_experts_used_than_there_are_is_refused_at_its_line() -> None:
    text = (INPUTS / "Qwen3-30B-A3B-Q4_K_M.inventory.yaml").read_text()
    text = text.replace("expert_used_count: 8", "expert_used_count: 129")
    line = text[: text.index("expert_used_count")].count("\n") + 1
    with pytest.raises(FieldProblem, match="a token uses 129 of 128 experts") as caught:
        from_text(text, "x.yaml")
    assert caught.value.line == line


def test_the_page_beside_the_inventories_names_each_and_its_origin() -> None:
    made = runpy.run_path(str(INPUTS.parent.parent / "benchmarks" / "inputs" / "make_inputs.py"))
    assert (INPUTS / "README.md").read_text() == made["notes"]()
    assert {source.name for source in made["SOURCES"]} == {
        f.name.removesuffix(".inventory.yaml") for f in FILES
    }


@pytest.mark.parametrize("size", [0, 64])
def test_a_tensor_smaller_than_its_type_and_shape_is_refused_by_name(size: int) -> None:
    text = (INPUTS / "Qwen3-30B-A3B-Q4_K_M.inventory.yaml").read_text()
    for name in ("token_embd.weight", "blk.3.ffn_down_exps.weight"):
        start = text.index(f"name: {name},")
        line = text[start : text.index("\n", start)]
        short = re.sub(r"size_bytes: \d+", f"size_bytes: {size}", line)
        with pytest.raises(
            FieldProblem, match=rf"tensor {name}.* holds {size} bytes, its type and shape need"
        ):
            from_text(text.replace(line, short), "model.yaml")
