"""The record of predictions: what README.md says of it is what the program finds, and the goals hold."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.predict import published_models, record, replay
from benchmarks.predict.record import Entry, Summary

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def found() -> list[Entry]:
    """What an H200, its later visits and one run of each public set predict; the rest takes as long again."""
    return [*record.calibrated(), *record.visits(), *record.public(1)]


def test_readme_says_what_the_record_says(found: list[Entry]) -> None:
    readme, measured = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/measured.md")
    )
    rows = {label: f"| {label} | {words} |" for label, words in record.readme_rows(found).items()}
    assert sum(row in readme for row in rows.values()) == 1
    for label, row in rows.items():
        assert row in measured, f"python -m benchmarks.predict --all --readme: {label}"


def test_published_runs_are_predicted_from_one_of_their_set(found: list[Entry]) -> None:
    mine = [e for e in found if e.part == record.ONE]
    summary = Summary.of(mine)
    assert summary.times >= 70 and len({e.set for e in mine}) >= 12
    assert summary.median <= 0.03 and summary.p90 <= 0.1 and summary.worst <= 0.25
    assert Summary.of([e for e in mine if not e.prompt]).worst <= 0.12
    assert 0.7 <= summary.coverage <= 0.9
    assert 0.7 <= record.unseen(mine)[0] <= 0.9
    assert summary.half_width <= 1.5 * summary.median and summary.score <= 0.24
    visits = [e for e in found if e.part == record.VISITS]
    assert Summary.of([e for e in visits if e.prompt]).worst <= 0.15
    for part in (record.H200, record.VISITS):
        for prompt in (False, True):
            coverage = Summary.of([e for e in found if e.part == part and e.prompt is prompt]).coverage
            assert coverage >= 0.7 and (coverage <= 0.9 or part == record.VISITS)


def test_a_run_that_cannot_fit_is_named_by_the_planner_s_own_count() -> None:
    found = {one.name: one for one in replay.replay_all(1, ("S05", "S05c", "S30"))}
    beyond = [p.label for one in found.values() for p in one.left_out if "Vulkan0" in p.status]
    assert beyond == ["-ngl 99 --n-cpu-moe 8 kv f16 prompt 512 ubatch 512"]  # 16.5 of 16 GiB
    assert any("--n-cpu-moe 8" in line and "more than all" in line for line in record.left_out())
    assert len(found["S30"].outcomes) == 3  # 93 % of a card is predicted


def test_batches_of_another_size_are_a_part_of_their_own(found: list[Entry]) -> None:
    mine = [e for e in found if e.part == record.BATCHES]
    assert len(mine) == 11 and {e.set for e in mine} == set(replay.BY_BATCH)
    assert all(e.prompt for e in mine) and Summary.of(mine).worst <= 0.36
    assert any("other size" in row or "another size" in row for row in record.readme_rows(found))


def test_tables_made_from_published_sizes_are_what_the_engine_printed_of_the_files() -> None:
    big, small = published_models.gemma_12b(), published_models.gemma_e2b()
    assert Counter(t.type for t in big.tensors) == {"f32": 338, "q4_K": 284, "q6_K": 45}
    assert len(small.tensors) == 601 and sum(t.type == "f32" for t in small.tensors) == 353
    assert sum(t.size_bytes for t in small.tensors) / 2**30 == pytest.approx(2.97, abs=0.01)
    on_gpu = {36: 5312, 38: 5579, 40: 5819, 42: 6076, 44: 6341}  # MiB of S12's report, by -ngl
    for ngl, mib in on_gpu.items():
        held = {"token_embd", *(f"blk.{layer}" for layer in range(49 - ngl, 48))}
        found = sum(t.size_bytes for t in big.tensors if _block(t.name) in held)
        assert found / 2**20 == pytest.approx(mib, abs=1)


def _block(name: str) -> str:
    """The layer of a tensor, or what else it is."""
    first, second, *_ = name.split(".")
    return f"{first}.{second}" if first == "blk" else first


def test_a_miss_costs_ten_times_its_distance() -> None:
    inside = Entry("p", "s", "f", "-ngl", False, "x", 100, 105, 100_000)
    outside = Entry("p", "s", "f", "-ngl", False, "x", 100, 220, 100_000)
    width = 100 * 1.1 - 100 / 1.1
    assert inside.miss < 1 < outside.miss
    assert inside.score() == pytest.approx(width / 105)
    assert outside.score() == pytest.approx((width + 10 * (220 - 110)) / 220)


def test_the_machine_left_out_does_not_widen_its_own_interval() -> None:
    sure = [Entry("p", "one", "f", "-ngl", False, str(n), 100, 104, 50_000) for n in range(5)]
    wild = [Entry("p", "two", "f", "-ngl", False, str(n), 100, 200, 50_000) for n in range(5)]
    coverage, factor = record.unseen([*sure, *wild])
    assert coverage == 0.5 and factor > 1
