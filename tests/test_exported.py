"""A real llama-server, started with exactly the exported line, holds what the plan says, buffer by buffer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.exported import CASES, GPU, SUBSET, Row, rows_of, said_of, table


@pytest.mark.parametrize("case", [c for c in CASES if c.name in SUBSET], ids=lambda case: case.name)
def test_the_server_takes_what_the_plan_says(
    case: object, vulkan_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    assert case in CASES
    rows = rows_of(CASES[CASES.index(case)], vulkan_engine, tmp_path)
    told = {(row.device, row.item) for row in rows}
    assert {
        (GPU, "model"),
        (GPU, "KV"),
        (GPU, "compute"),
        ("CPU", "compute"),
        ("", "cells of a slot"),
    } <= told
    assert [row for row in rows if not row.held] == [], table(rows)


def test_a_difference_is_a_difference() -> None:
    """Half a state more than planned, a compute buffer beyond its margin."""
    assert Row("x", GPU, "RS", 1.5, 1.5, 0.01, 0.01).held
    assert not Row("x", GPU, "RS", 1.5, 1.0, 0.01, 0.01).held
    assert "**differs**" in table([Row("x", GPU, "compute", 30, 20, 14, 5)])


def test_buffers_are_read_from_a_log() -> None:
    """Of two reservations of one context the second counts; host buffers of any name are the CPU's."""
    said = said_of(
        [
            "load_tensors:   CPU_Mapped model buffer size =     0.53 MiB",
            "llama_context: n_ctx         = 1024",
            "llama_kv_cache:    Vulkan0 KV buffer size =     0.27 MiB",
            "sched_reserve:    Vulkan0 compute buffer size =     0.98 MiB",
            "sched_reserve: Vulkan_Host compute buffer size =     0.28 MiB",
            "llama_context: n_ctx         = 1024",
            "llama_kv_cache:    Vulkan0 KV buffer size =     0.27 MiB",
            "sched_reserve:    Vulkan0 compute buffer size =     0.66 MiB",
            "sched_reserve:    Vulkan0 compute buffer size =     0.60 MiB",
            "slot   load_model: id  0 | task -1 | new slot, n_ctx = 1024",
        ]
    )
    assert said.slots == [1024]
    assert said.sizes == pytest.approx(
        {
            ("CPU", "model"): 0.53,
            (GPU, "KV"): 0.54,
            (GPU, "compute"): 1.58,
            ("CPU", "compute"): 0.28,
        }
    )
