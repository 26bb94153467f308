"""The table of how near experts in slots come to the bound is that of the recorded runs and of the replay."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from engines import ROOT

from benchmarks.hybrid import bound
from benchmarks.predict.slots import rows
from benchmarks.rounds.hybrid_contender import hot_orders, is_usual, slots_of
from benchmarks.rounds.live import WARM_UP
from benchmarks.rounds.paired import Journal
from planner.machine.presets import load
from planner.plan.load_spec import HYBRID_BANKS
from planner.site import GUESTS
from profiler.routed.codes import chosen_by_code
from profiler.routed.presets import PRESETS
from profiler.routed.stream import codes_of

PAGE = (ROOT / "docs" / "findings-hybrid.md").read_text(encoding="utf-8")
CELLS = ("base", "residency=25", "preset=strong", "preset=moderate", "preset=uniform")


def row(cell: str) -> list[float]:
    """The numbers of a cell's row in the page's table of the bound."""
    (line,) = re.findall(rf"^\| {re.escape(cell)} \|.* MB \|.*$", PAGE, re.MULTILINE)
    return [float(number) for number in re.findall(r"(?<![=\w.])\d+(?:\.\d+)?", line.split("|", 2)[2])]


@pytest.mark.parametrize("cell", CELLS)
def test_the_bound_follows_from_the_runs(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, hits, cold, cpu, link, limit, measured, share, of_kernels = row(cell)
    # Replaying all layers takes half a minute: the hits are taken from the page here, and looked at below.
    monkeypatch.setattr(bound, "_hits", lambda *_: hits)
    found = next(one for one in bound.shares() if one.cell == cell)
    assert found.whole == pytest.approx(whole, abs=0.006)
    assert found.measured == pytest.approx(measured, abs=0.006)
    assert found.cold_mb == pytest.approx(cold, rel=0.005)
    assert (round(found.cpu), round(found.link)) == (cpu, link)
    assert found.bound == pytest.approx(limit, abs=0.02)
    assert found.bound == pytest.approx(whole + cold / (cpu + link), abs=0.02)
    assert 100 * found.share == pytest.approx(share, abs=1)
    assert 100 * found.share_of_kernels == pytest.approx(of_kernels, abs=1)


@pytest.mark.parametrize("other", [{"seqs": 4}, {"depth": 8192}])
def test_cells_of_another_use_have_no_share_and_no_prediction(other: dict[str, int], tmp_path: Path) -> None:
    """Neither formula is for them: several sequences, or a deep cache."""
    record = next(r for r in Journal(bound.LANES).records() if r["kind"] == "run")
    usual, path = {**record["factors"], "seqs": 1, "depth": None}, tmp_path / "runs.jsonl"
    assert is_usual(record["factors"]) and is_usual(usual)
    path.write_text(json.dumps({**record, "contender": bound.OURS, "factors": usual | other}) + "\n")
    assert bound.shares(path) == []
    assert list(rows(Journal(path).records(), load("rtx4090-ddr5"))) == []


def test_hits_are_those_of_the_stream() -> None:
    """Two layers of one cell, choice by choice."""
    layers, k = 2, slots_of(0.5, 128, 32, GUESTS, HYBRID_BANKS)
    chosen = chosen_by_code(PRESETS["strong"].habits, layers)
    orders = hot_orders("strong", layers)
    n = bound.DEPTH + bound.GEN + WARM_UP
    codes = codes_of(PRESETS["strong"].habits, n, 2001)[-bound.GEN :]
    hot = [[e in orders[layer][:k] for e in chosen[layer][code]] for layer in range(layers) for code in codes]
    assert bound._hits("strong", layers, k, 1) == pytest.approx(np.mean(hot))
    assert np.mean(hot) == pytest.approx(row("preset=strong")[1], abs=0.05)


def test_the_share_asked_for_is_said_to_be_missed() -> None:
    records = Journal(bound.LANES).records()
    assert {r["cell"] for r in records if r["kind"] == "run"} == set(CELLS)
    assert max(row(cell)[-1] for cell in CELLS) < 80
    assert "Asked were 80 %: missed." in PAGE
