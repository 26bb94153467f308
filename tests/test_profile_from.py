"""atsplan profile --from: results of stock llama-bench become the figures of an assumed machine."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import atsplan
from planner.errors import FieldProblem, FileProblem
from planner.machine import presets
from planner.machine.profile import from_text
from planner.model import inventory as inventories
from profiler.whole_model import llama_bench, published

ROOT = Path(__file__).resolve().parent.parent
INVENTORY = ROOT / "benchmarks" / "data" / "h200-moe" / "generated-moe-24x64.inventory.yaml"
TABLE = """
| model | size | params | backend | ngl | n_cpu_moe | threads | n_ubatch | mmap | test | t/s |
| ----- | ---: | -----: | ------- | --: | --------: | ------: | -------: | ---: | ---: | --: |
| moe   | 4 GiB | 7 B   | CUDA    |  99 |         0 |      16 |      512 |    0 | pp512 | 9000.10 ± 12.0 |
| moe   | 4 GiB | 7 B   | CUDA    |  99 |        24 |      16 |      512 |    0 | tg128 | 61.54 ± 1.0 |
| moe   | 4 GiB | 7 B   | CUDA    |  99 |        24 |      16 |      512 |    0 | tg128 @ d4096 | 48.2 ± 1.0 |
| moe   | 4 GiB | 7 B   | CUDA    |  12 |         0 |      16 |      512 |    0 | pp512+tg128 | 48.2 ± 1.0 |

build: 86a9c79 (5000)
"""


def rows_of(machine: str, factor: float) -> list[dict[str, Any]]:
    """Rows as a machine would give them whose times are `factor` times those of a named one."""
    table = inventories.from_text(INVENTORY.read_text(), INVENTORY.name)
    base: dict[str, Any] = {"n_gpu_layers": 99, "n_ubatch": 512, "use_mmap": False, "avg_ts": 1.0}
    made = [
        base | test | {"n_cpu_moe": moved}
        for moved in (4, 12, 20, 24)
        for test in ({"n_prompt": 512, "n_gen": 0}, {"n_prompt": 0, "n_gen": 128})
    ]
    found = llama_bench.read(json.dumps(made), "x").rows
    profile = presets.load(machine)
    told = published.predict(profile, llama_bench.points(found, table, profile))
    for row, line, priced in zip(made, found, told, strict=True):
        tokens = line.workload.prompt if line.prompt else 1
        row["avg_ts"] = tokens * 1e9 / (priced.ns * factor)
    return made


def test_both_forms_are_read_and_rows_of_other_kinds_are_said() -> None:
    found = llama_bench.read(TABLE, "pasted.md")
    assert [(r.n_cpu_moe, r.prompt, r.workload.depth, r.rate) for r in found.rows] == [
        (0, True, 0, 9000.1),
        (24, False, 64, 61.54),
        (24, False, 4160, 48.2),
    ]
    assert found.notes == ("row 4 is left out: neither a prompt alone nor tokens alone",)
    assert not found.rows[0].mapped
    split = {"n_prompt": 0, "n_gen": 16, "avg_ts": 3.0, "n_gpu_layers": 9, "tensor_split": "1.00/2.00"}
    plain = {**split, "tensor_split": "0.00"}
    notes = llama_bench.read(json.dumps([split, plain]), "x.json").notes
    assert notes == ("row 1 is left out: tensor_split is not fitted",)


def test_rows_that_cannot_both_be_right_are_named() -> None:
    row = {"n_prompt": 0, "n_gen": 128, "n_gpu_layers": 99, "n_cpu_moe": 48, "avg_ts": 12.74}
    slower, full = {**row, "avg_ts": 6.85}, {**row, "n_cpu_moe": 8, "avg_ts": 5.0}
    first, second, third = llama_bench.read(json.dumps([row, slower, full]), "x.json").notes
    assert "contradict each other: the same settings" in first and "12.74" in first and "6.85" in first
    assert "slower" in second + third and "less on the CPU" in second + third


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "[1, 2]",
        "{",
        '[{"avg_ts": "x", "n_prompt": 5}]',
        '[{"avg_ts": 1, "n_prompt": -5, "n_gen": 1}]',
        "| test | t/s |\n| --- | --- |\n| pp512 | fast |\n",
        "[" * 100_000,
    ],
)
def test_what_is_no_result_is_refused_in_one_line(text: str) -> None:
    with pytest.raises((FileProblem, FieldProblem)) as refused:
        llama_bench.read(text, "file.json")
    assert "file.json" in str(refused.value) and "\n" not in str(refused.value)


def predicted(*machine: str) -> dict[str, Any]:
    words = ["solve", str(INVENTORY), *machine, "--budget", "2GiB", "--json"]
    found: dict[str, Any] = json.loads(CliRunner().invoke(atsplan.main, words).stdout)["predicted"]
    return found


def test_a_slower_machine_is_found_and_its_plans_are_surer(tmp_path: Path) -> None:
    bench, out = tmp_path / "bench.json", tmp_path / "fitted.yaml"
    bench.write_text(json.dumps(rows_of("rtx4090-ddr5", 1.6)))
    words = ["profile", str(INVENTORY), "--from", str(bench), "--machine", "rtx4090-ddr5", "-o", str(out)]
    done = CliRunner().invoke(atsplan.main, words)
    assert done.exit_code == 0, done.output
    assert "now known from these runs: " in done.stderr and "memory CPU" in done.stderr
    made, before = from_text(out.read_text(), "fitted.yaml"), presets.load("rtx4090-ddr5")
    rate = made.device("CPU").bandwidth_bytes_per_s / before.device("CPU").bandwidth_bytes_per_s
    assert 1 / 1.8 < rate < 1 / 1.4
    assert not made.measured and made.calibrations[0].runs == 8
    plans = [predicted(*how) for how in (("--profile", str(out)), ("--machine", "rtx4090-ddr5"))]
    assert plans[0]["error_ppm"] < plans[1]["error_ppm"] / 3
    assert plans[0]["basis_ppm"]["measured"] > 400_000 and "measured" not in plans[1]["basis_ppm"]


def test_a_model_is_needed(tmp_path: Path) -> None:
    bench = tmp_path / "bench.md"
    bench.write_text(TABLE)
    done = CliRunner().invoke(atsplan.main, ["profile", "--from", str(bench), "--machine", "rtx4090-ddr5"])
    assert done.exit_code == 2 and "name the MODEL that was run" in done.output
    alone = CliRunner().invoke(atsplan.main, ["profile", "--machine", "rtx4090-ddr5"])
    assert alone.exit_code == 2 and "is for --from" in alone.output


def told_of(rows: list[dict[str, Any]], machine: str) -> llama_bench.Results:
    table = inventories.from_text(INVENTORY.read_text(), INVENTORY.name)
    return llama_bench.read(json.dumps(rows), "x.json").of(table, presets.load(machine), "x.json")


SIZE = sum(t.size_bytes for t in inventories.from_text(INVENTORY.read_text(), INVENTORY.name).tensors)
PROMPT, TOKEN = {"n_prompt": 512, "n_gen": 0, "avg_ts": 900.0}, {"n_prompt": 0, "n_gen": 128, "avg_ts": 60.0}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_size": 2 * SIZE}, "its model has"),
        ({"gpu_info": "NVIDIA A, NVIDIA B"}, "it ran on 2 GPUs, the machine has 1"),
        ({"devices": "CUDA0/CUDA1"}, "it ran on 2 GPUs, the machine has 1"),
        ({"backends": "CPU", "n_prompt": 512, "n_gen": 0}, "the CPU alone computed its prompt (CPU)"),
        ({"n_threads": 4, "n_cpu_moe": 5}, "4 threads, where other rows have 16"),
        ({"flash_attn": False}, "it is without flash attention, where other rows are with it"),
    ],
)
def test_a_row_of_another_model_or_machine_is_left_out_and_said(changes: dict[str, Any], why: str) -> None:
    of_it = {"model_size": SIZE, "backends": "CUDA", "gpu_info": "NVIDIA A", "n_threads": 16}
    base = {**TOKEN, **of_it, "n_gpu_layers": 99, "flash_attn": True, "n_cpu_moe": 5}
    found = told_of([base, {**base, "avg_ts": 61.0}, {**base, **changes}], "rtx4090-ddr5")
    assert [row.number for row in found.rows] == [1, 2]
    assert len(found.notes) == 1 and found.notes[0].startswith(f"row 3 is left out: {why}")
    if not {"n_threads", "flash_attn"} & set(changes):
        with pytest.raises(FileProblem, match="no row is of this model on this machine"):
            told_of([{**base, **changes}], "rtx4090-ddr5")


def test_a_build_without_a_gpu_computes_all_layers_on_the_cpu() -> None:
    """It says ngl 99 all the same."""
    table = inventories.from_text(INVENTORY.read_text(), INVENTORY.name)
    row = {**TOKEN, "backends": "BLAS,CPU", "n_gpu_layers": 99}
    for machine in ("rtx4090-ddr5", "cpu-only-ddr5"):
        found = told_of([row], machine)
        (point,) = llama_bench.points(found.rows, table, presets.load(machine))
        assert set(point.placement.layer_devices) == {"CPU"}
    assert len(told_of([{**row, **PROMPT}], "cpu-only-ddr5").rows) == 1
    with pytest.raises(FileProblem, match="it ran on a GPU"):
        told_of([{**row, "backends": "Vulkan"}], "cpu-only-ddr5")


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, {"CUDA0": 13, "CUDA1": 12}),
        ({"gpu_info": "A, B", "split_mode": "layer"}, {"CUDA0": 13, "CUDA1": 12}),
        ({"gpu_info": "A"}, {"CUDA0": 25}),
        ({"gpu_info": "A, B", "split_mode": "none"}, {"CUDA0": 25}),
        ({"gpu_info": "A, B", "devices": "CUDA1"}, {"CUDA1": 25}),
    ],
)
def test_layers_are_dealt_to_the_gpus_that_a_row_ran_on(
    changes: dict[str, Any], counts: dict[str, int]
) -> None:
    table = inventories.from_text(INVENTORY.read_text(), INVENTORY.name)
    found = told_of([{**TOKEN, "n_gpu_layers": 99, **changes}], "2x-rtx4060ti-16gb")
    (point,) = llama_bench.points(found.rows, table, presets.load("2x-rtx4060ti-16gb"))
    assert Counter(point.placement.layer_devices) == counts


def test_a_row_a_line_is_read_too() -> None:
    lines = "\n".join(json.dumps({**row, "n_gpu_layers": 99}) for row in (PROMPT, TOKEN))
    assert len(llama_bench.read(lines + "\n", "x.jsonl").rows) == 2


def test_a_step_that_goes_too_far_is_taken_again_shorter() -> None:
    """A faster rate makes a product bound by memory: from there its slope leads nowhere."""
    table = inventories.from_text(INVENTORY.read_text(), INVENTORY.name)
    profile = presets.load("rtx4090-ddr5")
    rows = [{**PROMPT, "n_gpu_layers": 99}, {**TOKEN, "n_gpu_layers": 99, "n_depth": 4096}]
    found = told_of(rows, "rtx4090-ddr5").rows
    points = llama_bench.points(found, table, profile)
    told = published.predict(profile, points)
    wanted = [replace(p, ns=round(e.ns / f)) for p, e, f in zip(points, told, (1.5, 0.7), strict=True)]
    after = published.predict(published.fitted(profile, wanted), wanted)
    assert [e.ns / p.ns for p, e in zip(wanted, after, strict=True)] == pytest.approx([1, 1], abs=0.2)


def test_rows_that_no_figures_explain_are_refused(tmp_path: Path) -> None:
    rows = rows_of("rtx4090-ddr5", 1.0)
    for number, row in enumerate(rows):
        row["avg_ts"] *= 30 if number % 2 else 1 / 30
    bench, out = tmp_path / "bench.json", tmp_path / "fitted.yaml"
    bench.write_text(json.dumps(rows))
    words = ["profile", str(INVENTORY), "--from", str(bench), "--machine", "rtx4090-ddr5", "-o", str(out)]
    done = CliRunner().invoke(atsplan.main, words)
    assert done.exit_code == 2 and "no figures of rtx4090-ddr5 explain these rows" in done.output
    assert not out.exists()
