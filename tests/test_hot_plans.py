"""Hot experts in plans: routing without skew changes nothing, real skew buys time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

import atsplan
from planner.routing import expert_counts as heats
from planner.routing.expert_counts import Part, Phase

ROOT = Path(__file__).resolve().parent.parent
INVENTORY = ROOT / "plans" / "inputs" / "Qwen3-30B-A3B-Q4_K_M.inventory.yaml"
REAL = ROOT / "tests" / "data" / "heat" / "qwen3-30b-a3b.csv"


def solve(*more: object) -> dict[str, Any]:
    args = ["solve", INVENTORY, "--machine", "rtx4090-ddr5", "--budget", 10000, "--json", *more]
    result = CliRunner().invoke(atsplan.main, [str(a) for a in args])
    assert result.exit_code == 0, result.output
    plan: dict[str, Any] = json.loads(result.stdout)
    return plan


def striped(plan: dict[str, Any]) -> set[str]:
    return {unit["unit"] for unit in plan["units"] if unit["site"].startswith("stripe:")}


def test_flat_routing_changes_nothing_and_skew_buys_time(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    parts = [
        Part(
            f"prompt-{source}",
            Phase.DECODE,
            1000,
            {la: tuple(int(c) for c in rng.multinomial(8000, np.full(128, 1 / 128))) for la in range(48)},
        )
        for source in range(3)
    ]
    flat = tmp_path / "flat.csv"
    flat.write_text(heats.to_text(heats.make("", 128, 8, parts)))
    plain, useless, useful = solve(), solve("--heat", flat), solve("--heat", REAL)
    assert not striped(plain) and not striped(useless)
    assert useless["predicted"]["tpot_ns"] == plain["predicted"]["tpot_ns"]
    assert len(striped(useful)) > 10
    (said,) = [note for note in useless["notes"] if note.startswith("routing (--heat): ")]
    reported = CliRunner().invoke(atsplan.main, ["heat", "report", str(flat), "--json"])
    verdict = json.loads(reported.stdout)["verdict"]
    assert verdict.startswith("no exploitable skew") and said == f"routing (--heat): {verdict}"
    assert not any(note.startswith("routing") for note in plain["notes"])
    (note,) = [note for note in useful["notes"] if note.startswith("experts striped in")]
    assert note.startswith(f"experts striped in {len(striped(useful))} layers: loaded by atsplan run")
    assert useful["predicted"]["tpot_ns"] < 0.85 * plain["predicted"]["tpot_ns"]
    orders = {entry["layer"]: entry["order"] for entry in useful["experts"]}
    total = heats.from_text(REAL.read_text(), "x").total()
    for name in striped(useful):
        layer = int(name.split(".")[1])
        counts = [total[layer][e] for e in orders[layer]]
        assert counts == sorted(counts, reverse=True)


def on_cpu(plan: dict[str, Any]) -> list[int]:
    """Layers whose experts the CPU computes."""
    return [
        int(unit["unit"].split(".")[1])
        for unit in plan["units"]
        if unit["unit"].endswith(".experts") and unit["site"] == "cpu"
    ]


def test_layers_that_touch_few_experts_go_to_the_cpu_when_prompts_count(tmp_path: Path) -> None:
    """Late layers use 70 of 128 experts: streaming them for a prompt moves less. Decoding does not care."""
    rng = np.random.default_rng(2)
    parts = []
    for source in range(2):
        counts = {}
        for layer in range(48):
            used = 128 if layer < 24 else 70
            row = rng.multinomial(32_000, [1 / used] * used + [0] * (128 - used))
            counts[layer] = tuple(int(c) for c in row)
        parts.append(Part(f"prompt-{source}", Phase.PREFILL, 4000, counts))
    file = tmp_path / "late.csv"
    file.write_text(heats.to_text(heats.make("", 128, 8, parts)))
    asked = ("--heat", file, "--no-stripes", "-ub", 512, "--workload")
    reading, writing = solve(*asked, "prompt=4000,gen=1"), solve(*asked, "prompt=1,gen=500")
    assert min(on_cpu(reading)) >= 24
    assert any(layer < 24 for layer in on_cpu(writing))
