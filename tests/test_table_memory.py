"""Tables of which single rows are read: a class of memory of their own, mapped and not counted as used."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from planning_models import MIB, findings, machine, moe, plan

from benchmarks.inputs.tensor_tables import Row, inventory_of
from planner.check.plan_alone import faults
from planner.errors import AnswerIsNo
from planner.machine.host_memory import HostMemory
from planner.memory.memory import Memory
from planner.model.ggml_types import tensor_bytes
from planner.model.inventory import Inventory
from planner.model.units import units_of
from planner.plan.load_spec import load_spec
from planner.plan.plan import DeviceUse, Plan, from_text, to_text
from planner.plan.plan_lines import device_lines
from rewriter.regions import regions

# Rows of an n-gram table of one layer and of a per-layer embedding, as published models have them.
NGRAMS, TOKENS = "blk.1.engram_embd.weight", "per_layer_token_embd.weight"
SHAPES = {NGRAMS: (256, 30_000_000), TOKENS: (160, 6_000_000)}


@cache
def model() -> Inventory:
    """A mixture of experts of 2.7 GiB beside tables of 4.5 GiB."""
    bare = moe()
    rows = [Row(t.name, t.type, t.shape, t.size_bytes) for t in bare.tensors]
    rows += [Row(name, "q4_0", shape, tensor_bytes("q4_0", shape)) for name, shape in SHAPES.items()]
    return inventory_of("tables", bare.architecture, dict(bare.hparams), rows)


@cache
def made(budget: str = "1500,CPU=3000", memory: HostMemory | None = None) -> Plan:
    return plan(model(), budget, host_memory=memory)


def tables_bytes() -> int:
    return sum(t.size_bytes for t in model().tensors if t.name in SHAPES)


def host(found: Plan) -> DeviceUse:
    return next(use for use in found.devices if use.kind == "cpu")


def test_mapped_tables_need_no_memory() -> None:
    assert tables_bytes() > 4 * 1024 * MIB > 3000 * MIB
    use = host(made())
    assert made().host_memory is HostMemory.MAPPED and load_spec(made()).use_mmap
    assert use.tables_bytes == tables_bytes() and use.used_bytes <= 3000 * MIB
    bare = plan(moe(), "1500,CPU=3000", host_memory=HostMemory.MAPPED)
    assert use.weights_bytes == host(bare).weights_bytes


def test_pinned_they_are_there_whole() -> None:
    with pytest.raises(AnswerIsNo, match="CPU needs"):
        made(memory=HostMemory.PINNED)
    use = host(made("1500", HostMemory.PINNED))
    assert use.tables_bytes is None and use.weights_bytes > tables_bytes()

    assert any("read into host memory whole" in n for n in made("1500", HostMemory.PINNED).notes)


def test_tables_alone_are_no_reason_to_pin() -> None:
    whole = made("20000")
    assert all(p.site.kind.value == "gpu" for p in whole.units if p.unit.startswith("blk.0"))
    assert whole.host_memory is HostMemory.MAPPED and host(whole).tables_bytes == tables_bytes()


def test_said_in_notes_and_lines_and_read_again() -> None:
    found = made()
    row = sum(tensor_bytes("q4_0", (shape[0],)) for shape in SHAPES.values())
    assert any(
        f"tables of {tables_bytes() >> 20} MiB stay mapped" in n and f"{row} bytes" in n for n in found.notes
    )
    assert any(
        f"mapped tables, not counted, {tables_bytes() / MIB:.0f}" in line for line in device_lines(found)
    )
    assert from_text(to_text(found), "plan.yaml") == found
    assert not [f for f in findings(found, model(), machine()) if f.severity.value == "error"]
    assert "tables_bytes" not in to_text(plan(moe(), "1500"))


def test_other_sizes_of_tables_than_the_units_have_are_found() -> None:
    found = made()
    assert not faults(found)
    uses = tuple(
        use.model_copy(update={"tables_bytes": use.tables_bytes - 32}) if use.tables_bytes else use
        for use in found.devices
    )
    (fault,) = faults(found.model_copy(update={"devices": uses}))[:1]
    assert fault.rule == "memory" and "mapped tables" in fault.message


def test_they_are_no_part_of_the_total() -> None:
    assert Memory(weights=5, tables=7).total == 5
    assert (Memory(tables=7) + Memory(tables=1)).tables == 8


def test_a_rewritten_file_has_them_behind_what_every_token_reads() -> None:
    found = regions(model(), made(), units_of(model()).units, str(Path("plan.yaml")))
    names = [region.name for region in found]
    assert names.index("tables") == names.index("cpu") + 1
    assert set(found[names.index("tables")].tensors) == set(SHAPES)
