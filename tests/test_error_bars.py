"""Error bars: they follow from what a prediction stands on, and are wider where less was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planner.cost import error_bar, evidence
from planner.machine import presets
from planner.machine import profile as profiles
from planner.machine.profile import Profile
from planner.model import inventory as inventories
from planner.model.inventory import Inventory
from planner.workload import Workload
from profiler.whole_model import published
from profiler.whole_model.placements import Placement, Predictor, movable

ROOT = Path(__file__).parent.parent
WORK = Workload(n_ctx=2048, depth=524)
FOLDER = ROOT / "benchmarks" / "data" / "h200-moe"


@pytest.fixture(scope="module")
def table() -> Inventory:
    path = next(FOLDER.glob("*.inventory.yaml"))
    return inventories.from_text(path.read_text(), path.name)


@pytest.fixture(scope="module")
def measured() -> Profile:
    """The profile of an H200, with the calibration that its generated model gave."""
    path = ROOT / "plans" / "inputs" / "h200.profile.yaml"
    return profiles.from_text(path.read_text(), path.name)


def half(table: Inventory) -> Placement:
    units = movable(table)
    return Placement("half moved", ("CUDA0",) * (table.number("block_count") + 1), units[: len(units) // 2])


def test_parts_add_up_to_the_predicted_times(table: Inventory, measured: Profile) -> None:
    for profile in (measured, presets.load("rtx4090-ddr5")):
        found = Predictor(table, WORK).explain_all(profile, [half(table)])[0]
        assert sum(part.ns for part in found.token) == found.tpot_ns
        assert sum(part.ns for part in found.prompt) == found.prefill_ns
        assert sum(evidence.by_basis(found.token).values()) == 10**6
        percents = re.findall(r"(\d+) % ", evidence.in_words(evidence.by_basis(found.token)))
        assert sum(map(int, percents)) == 100


def test_deleted_measurements_widen_the_bar_and_are_named(table: Inventory, measured: Profile) -> None:
    some = tuple(t for t in measured.timings if t.op != "MUL_MAT_ID")
    profiles_ = [measured, *(measured.model_copy(update={"timings": kept}) for kept in (some, ()))]
    whole, less, none = (Predictor(table, WORK).explain_all(p, [half(table)])[0] for p in profiles_)
    assert whole.error_ppm < less.error_ppm < none.error_ppm
    assert not evidence.unmeasured(whole.token)
    named = [what for what, _ in evidence.unmeasured(less.token)]
    assert named and all(what.startswith("MUL_MAT_ID q4_K") for what in named)
    assert any(what.startswith("MUL_MAT q4_K") for what, _ in evidence.unmeasured(none.token))
    shares = [evidence.by_basis(each.token).get(evidence.MEASURED, 0) for each in (whole, less, none)]
    assert shares == sorted(shares, reverse=True)


def test_wider_measurements_make_a_wider_bar(table: Inventory, measured: Profile) -> None:
    wide = tuple(t.model_copy(update={"spread_ns": t.time_ns // 2}) for t in measured.timings)
    found = [
        Predictor(table, WORK).explain_all(profile, [half(table)])[0].error_ppm
        for profile in (measured, measured.model_copy(update={"timings": wide}))
    ]
    assert found[0] < found[1]


def test_a_card_filled_to_the_brim_is_less_certain(table: Inventory, measured: Profile) -> None:
    found = Predictor(table, WORK).explain_all(measured, [half(table)])[0]
    small = tuple(
        d.model_copy(update={"memory_bytes": found.memory["CUDA0"]}) if d.name == "CUDA0" else d
        for d in measured.devices
    )
    full = Predictor(table, WORK).explain_all(measured.model_copy(update={"devices": small}), [half(table)])[
        0
    ]
    assert full.error_ppm > found.error_ppm
    assert full.prefill_error_ppm > 2 * found.prefill_error_ppm  # what a batch needs is moved to and fro
    assert (full.tpot_ns, full.prefill_ns) == (found.tpot_ns, found.prefill_ns)


def test_planted_figures_come_back_and_what_is_unknown_stays_wide(table: Inventory) -> None:
    """Runs of a machine whose CPU has half the assumed memory rate, and whose bus a third."""
    assumed = presets.load("rtx4090-ddr5")
    devices = tuple(
        d.model_copy(update={"bandwidth_bytes_per_s": d.bandwidth_bytes_per_s // 2}) if d.kind == "cpu" else d
        for d in assumed.devices
    )
    links = tuple(
        li.model_copy(update={"bandwidth_bytes_per_s": li.bandwidth_bytes_per_s // 3}) for li in assumed.links
    )
    real = assumed.model_copy(update={"devices": devices, "links": links})
    units, gpu = movable(table), ("CUDA0",) * (table.number("block_count") + 1)
    moved = [Placement(f"{n} moved", gpu, units[:n]) for n in (0, 8, 16, 24)]
    bare = [published.Point(table, p, WORK, 1, prompt) for p in moved for prompt in (False, True)]
    told = published.predict(real, bare)
    points = [
        published.Point(table, b.placement, WORK, t.ns, b.prompt) for b, t in zip(bare, told, strict=True)
    ]
    made = published.fitted(assumed, points[2:6])
    again = published.predict(made, points)
    off = [abs(a.ns / p.ns - 1) for a, p in zip(again, points, strict=True)]
    assert max(off[2:]) < 0.03 and all(o * 10**6 < a.error_ppm for o, a in zip(off, again, strict=True))
    before = published.predict(assumed, points)
    assert min(abs(b.ns / p.ns - 1) for b, p in zip(before[2:], points[2:], strict=True)) > 0.25
    assert all(a.error_ppm < b.error_ppm for a, b in zip(again, before, strict=True))
    text = profiles.to_text(made)
    assert profiles.to_text(profiles.from_text(text, "again")) == text
    known = error_bar.covariances(made)
    assert known["memory CPU", "memory CPU"] < error_bar.doubt("memory CPU", assumed) ** 2 / 10


def test_runs_that_lie_apart_widen_what_is_fitted_to_them_and_move_nothing(table: Inventory) -> None:
    assumed = presets.load("rtx4090-ddr5")
    points = [published.Point(table, half(table), WORK, 20_000_000, prompt) for prompt in (False, True)]
    calm, wild = (published.fitted(assumed, points, again) for again in (0.0, 0.1))
    for one, two in zip(published.predict(calm, points), published.predict(wild, points), strict=True):
        assert one.ns == two.ns and two.error_ppm > 120_000 > one.error_ppm
    assert [d.figure for d in wild.doubts or ()] == [*(d.figure for d in calm.doubts or ()), error_bar.AGAIN]


def test_attention_is_doubted_where_its_share_is_not_that_of_the_fitted_run(table: Inventory) -> None:
    assumed = presets.load("rtx4090-ddr5")
    gpu = Placement("gpu", ("CUDA0",) * (table.number("block_count") + 1))
    deep = Workload(n_ctx=16384, prompt=16384, n_ubatch=512)
    made = published.fitted(assumed, [published.Point(table, gpu, WORK, 60_000_000, True)])
    near, far = (
        published.predict(made, [published.Point(table, gpu, work, 1, True)])[0] for work in (WORK, deep)
    )
    figure = f"{evidence.ATTENTION} CUDA0"
    assert far.shares[figure] > 5 * near.shares[figure]
    assert far.error_ppm > 2 * near.error_ppm


def test_percentages_of_what_a_time_stands_on_add_up() -> None:
    thirds = {"measured": 333_333, "scaled": 333_333, "assumed": 333_334}
    assert evidence.in_words(thirds) == "33 % measured, 33 % scaled, 34 % assumed"
    assert evidence.in_words({"measured": 999_000, "assumed": 1_000}) == "100 % measured, <1 % assumed"
    parts = [evidence.Part("timed", basis, 1, str(n)) for n, basis in enumerate(thirds)]
    assert sorted(evidence.by_basis(parts).values()) == [333_333, 333_333, 333_334]
    assert evidence.by_basis([]) == {}
