"""Calibration: planted parameters come back; published and own measurements are predicted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.predict import judge, replay
from planner.machine import presets
from planner.machine import profile as profiles
from planner.machine.profile import Calibration
from planner.model import inventory as inventories
from planner.model.inventory import Inventory
from planner.model.units import units_of
from planner.workload import Workload
from profiler import host, session
from profiler.journal import Journal
from profiler.whole_model import calibrate, calibration_runs
from profiler.whole_model.calibrate import Parameter, Run, solve
from profiler.whole_model.placements import Placement, Predictor, calibrating, sensible, shuffled, spec_of

ROOT = Path(__file__).resolve().parent.parent
WORK = Workload(n_ctx=1024, depth=512, prompt=512, gen=24)
BASE = presets.load("rtx4090-ddr5")


@pytest.fixture(scope="module")
def table() -> Inventory:
    path = ROOT / "benchmarks" / "data" / "h200-moe" / "generated-moe-24x64.inventory.yaml"
    return inventories.from_text(path.read_text(), path.name)


def test_planted_parameters_predict_placements_that_the_fit_never_saw(table: Inventory) -> None:
    planted = Calibration(
        model="",
        split_ns=31_000,
        mixed_ns=700_000,
        token_ns=190_000,
        scale_ppm={"CUDA0": 1_150_000, "CPU": 880_000},
    )
    true = BASE.model_copy(update={"calibrations": (planted,)})
    placements = list(calibrating(table, ("CUDA0",), brief=False))
    evaluated = Predictor(table, WORK).evaluate_all(true, placements)
    runs = [Run(p, e.decode_ns) for p, e in zip(placements, evaluated, strict=True)]
    fitted = calibrate.machine(table, WORK, BASE, runs)
    assert fitted.calibrations[0].residual_ppm < 5_000
    held = list(shuffled(table, "CUDA0", 20, seed=5))
    for want, have in zip(
        Predictor(table, WORK).evaluate_all(true, held),
        Predictor(table, WORK).evaluate_all(fitted, held),
        strict=True,
    ):
        assert have.decode_ns == pytest.approx(want.decode_ns, rel=0.02)


def test_a_models_calibration_starts_from_the_machines(table: Inventory) -> None:
    known = Calibration(
        model="", split_ns=40_000, mixed_ns=900_000, token_ns=200_000, scale_ppm={"CPU": 900_000}
    )
    profile = BASE.model_copy(update={"calibrations": (known,)})
    full = Placement("all on the GPU", ("CUDA0",) * 25)
    measured = Predictor(table, WORK).evaluate(profile, full).decode_ns
    found = calibrate.model(table, WORK, profile, [Run(full, measured)])
    assert [c.model for c in found.calibrations] == ["", table.table_digest()]
    assert found.calibrations[1].residual_ppm < 2_000


def test_changes_of_device_that_no_run_had_are_not_free(table: Inventory) -> None:
    """A remote device is in no run of a whole model: the CPU alone says nothing of the way to it."""
    alone = Placement("all on the CPU", ("CPU",) * 25)
    time = Predictor(table, WORK).evaluate(BASE, alone).decode_ns
    made = calibrate.model(
        table, WORK, calibrate.machine(table, WORK, BASE, [Run(alone, time)]), [Run(alone, time)]
    )
    assert all(c.split_ns > 0 and c.mixed_ns > 0 for c in made.calibrations)
    cpu = presets.load("cpu-only-ddr5")
    (only,) = calibrate.machine(table, WORK, cpu, [Run(alone, time)]).calibrations
    assert only.split_ns == only.mixed_ns == 0  # of which there are none


def test_what_tokens_told_of_a_device_says_nothing_of_prompts(table: Inventory) -> None:
    full = Placement("all on the GPU", ("CUDA0",) * 25)
    found = []
    for ppm in (1_000_000, 1_300_000):
        known = Calibration(model="", split_ns=0, mixed_ns=0, token_ns=0, scale_ppm={"CUDA0": ppm})
        found.append(
            Predictor(table, WORK).evaluate(BASE.model_copy(update={"calibrations": (known,)}), full)
        )
    plain, scaled = found
    assert scaled.decode_ns == pytest.approx(1.3 * plain.decode_ns, rel=0.02)
    assert scaled.prefill_ns == pytest.approx(
        plain.prefill_ns, rel=0.02
    )  # but for the rounding of the search


def test_least_squares_is_never_negative_and_keeps_to_the_prior_when_told_nothing() -> None:
    parameters = [Parameter("a", 1.0, 0.5), Parameter("b", 3.0, 0.5)]
    silent = solve(np.zeros((1, 2)), np.zeros(1), np.ones(1), parameters)
    assert silent == pytest.approx([1.0, 3.0])
    pulled = solve(np.array([[1.0, 0.0]]), np.array([-5.0]), np.array([0.01]), parameters)
    assert pulled == pytest.approx([0.0, 3.0])


@pytest.mark.parametrize("name", ["h200-moe", "h200-dense"])
def test_placements_measured_on_an_h200_are_predicted(name: str) -> None:
    """Measured once, committed: the model that prices them today must still explain them."""
    folder = ROOT / "benchmarks" / "data" / name
    profile = profiles.from_text((folder / "profile.yaml").read_text(), "profile.yaml")
    path = next(folder.glob("*.inventory.yaml"))
    inventory = inventories.from_text(path.read_text(), path.name)
    rows = judge.read_rows(folder / "runs.csv", inventory.name)
    assert sum(row.kind == "random" for row in rows) >= 12
    alone, fitted, _ = judge.judge(inventory, rows, profile, (512, 24))
    summary = fitted.summary()
    assert summary["placements"] >= 18
    assert summary["decode_median"] <= 0.055
    assert summary["decode_p90"] <= 0.12
    assert summary["decode_spearman"] >= 0.97
    assert summary["decode_median"] < alone.summary()["decode_median"]
    assert summary["prefill_median"] <= 0.12


def test_published_linear_sets_are_predicted_from_one_point() -> None:
    for found in replay.replay_all(1, replay.LINEAR):
        assert found.median <= 0.05, found.name
        assert len(found.errors) >= 5


def test_published_points_that_spill_or_thrash_are_named_not_fitted() -> None:
    points = replay.read_points(ROOT / "benchmarks" / "data" / "replay_runs.csv")
    odd = {name: [p.status for p in group if p.status != "ok"] for name, group in points.items()}
    assert {name: found for name, found in odd.items() if found} == {
        "S05": ["spill"],
        "S07": ["contradicts", *["spill"] * 3],
        "S12": ["thrash"],
    }
    s12 = replay.replay_all(1, ["S12"])[0]
    assert [p.ngl for p in s12.left_out] == [44]
    assert all(p.status == "ok" for p, _ in s12.errors)


def test_spearman_is_that_of_ranks() -> None:
    assert judge.spearman([(1, 10), (2, 100), (3, 1000)]) == pytest.approx(1)
    assert judge.spearman([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)


def test_every_placement_is_told_to_the_engine_and_known_to_the_planner(table: Inventory) -> None:
    placements = [*sensible(table, "CUDA0"), *shuffled(table, "CUDA0", 12, seed=3)]
    evaluated = Predictor(table, WORK).evaluate_all(BASE, placements)
    for placement, evaluation in zip(placements, evaluated, strict=True):
        spec = spec_of(table, placement, WORK, threads=4)
        listed = [d for d, n in zip(spec.devices, spec.tensor_split, strict=True) for _ in range(n)]
        first = len(placement.layer_devices) - len(listed)
        assert ["CPU"] * first + listed == list(placement.layer_devices)
        assert evaluation.decode_ns > 0
    assert len({(p.layer_devices, p.moved) for p in placements}) == len(placements)


def test_all_on_the_cpu_needs_no_device(table: Inventory) -> None:
    spec = spec_of(table, Placement("cpu", ("CPU",) * 25), WORK, threads=4)
    assert (spec.devices, spec.tensor_split, spec.n_gpu_layers, spec.overrides) == ((), (), 0, ())


def test_a_model_that_no_run_of_ended_is_named_and_the_others_are_kept(table: Inventory) -> None:
    full = Placement("all on the GPU", ("CUDA0",) * 25)
    none = calibration_runs.Model(Path("slow.gguf"), table, (full,), 2, own=True)
    made = calibration_runs.Model(Path("made.gguf"), table, (full,), 1, own=False)
    run = Run(full, Predictor(table, calibration_runs.workload()).evaluate(BASE, full).decode_ns)
    found = calibration_runs.calibrated(BASE, [(made, [run]), (none, [])])
    assert [c.model for c in found.calibrations] == [""]
    assert any("no whole-model run of slow.gguf tells" in w for w in found.warnings)


def test_a_run_that_paged_is_named_and_not_fitted(table: Inventory) -> None:
    full = Placement("all on the GPU", ("CUDA0",) * 25)
    model = calibration_runs.Model(Path("large.gguf"), table, (full,), 2, own=True)
    found = calibration_runs.calibrated(BASE, [(model, [Run(full, 10**12, paged_bytes=9 << 30)])])
    assert found.calibrations == BASE.calibrations
    assert any("large.gguf (all on the GPU) read 9216 MiB from disk" in w for w in found.warnings)


def test_nothing_is_streamed_where_the_cpu_stands_in_the_device_list(table: Inventory) -> None:
    first = Placement("first", ("CPU",) * 3 + ("CUDA0",) * 22)
    after = Placement("after", ("CUDA0",) * 3 + ("CPU",) * 3 + ("CUDA0",) * 19)
    assert (first.streamed, after.streamed) == (True, False)
    assert Placement("moved", ("CUDA0",) * 25, ("blk.0.experts",)).streamed
    early, late = Predictor(table, WORK).evaluate_all(BASE, [first, after])
    assert late.prefill_ns > 2 * early.prefill_ns


def runs_within(table: Inventory, free_bytes: int, folder: Path) -> tuple[Placement, ...]:
    gpu = {"name": "CUDA0", "device_kind": "gpu", "description": "", "free_bytes": free_bytes}
    figures = {"memory_bytes": 2**40, "bandwidth_bytes_per_s": 1, "flops_per_s": 1, "op_overhead_ns": 1}
    found = session.Found(
        Journal("m", folder=folder), host.fingerprint(""), ({"kind": "device", **gpu, **figures},), 0.0
    )
    return calibration_runs.of_model(found, Path("m.gguf"), table).placements


def test_a_model_is_run_within_the_memory_there_is(
    table: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "memory_bytes", lambda: (2**40, 2**40))
    sizes = {u.name: u.size_bytes for u in units_of(table).units}
    rest = sum(size for name, size in sizes.items() if name.endswith(("experts", "token_embd")))
    roomy = runs_within(table, 100 * 2**30, tmp_path)
    assert [len(p.moved) for p in roomy] == [0, 24, 12]
    some, most, half = runs_within(table, 3 * 2**30, tmp_path)
    held = sum(sizes.values()) - sizes["token_embd"] - sum(sizes[name] for name in some.moved)
    room = round(0.85 * 3 * 2**30) - 2**29
    assert held <= room < held + sizes["blk.0.experts"]
    assert len(some.moved) < len(half.moved) < len(most.moved) == 24
    fixed = sum(sizes.values()) - rest
    (layers,) = runs_within(table, round((fixed * 0.6 + 2**29) / 0.85), tmp_path)
    assert layers.moved == ()
    assert set(layers.layer_devices[:2]) == {"CPU"} != {layers.layer_devices[-1]}
    assert runs_within(table, 2**28, tmp_path) == ()
    monkeypatch.setattr(host, "memory_bytes", lambda: (2**40, 2**30))  # all moved, they do not fit the host
    assert [len(p.moved) for p in runs_within(table, 100 * 2**30, tmp_path)] == [0]


def test_placements_of_a_software_gpu_are_told_apart_from_measurements() -> None:
    """Two loads of one placement lie further apart than a model could be wrong: the profile says so."""
    folder = ROOT / "benchmarks" / "data" / "lavapipe"
    profile = profiles.from_text((folder / "profile.yaml").read_text(), "profile.yaml")
    assert any(w.startswith("contended") for w in profile.warnings)
    assert any(w.startswith("unsteady") for w in profile.warnings)
    for path in sorted(folder.glob("*.inventory.yaml")):
        inventory = inventories.from_text(path.read_text(), path.name)
        rows = judge.read_rows(folder / "runs.csv", inventory.name)
        kinds = [row.kind for row in rows]
        assert kinds.count("random") >= 24
        assert kinds.count("sensible") >= 8
        alone, fitted, _ = judge.judge(inventory, rows, profile, (8, 4))
        assert fitted.summary()["decode_median"] < alone.summary()["decode_median"]
        assert (
            fitted.profile.calibrations[0].residual_ppm > calibration_runs.DOUBTFUL_PPM
        )  # it would be warned of
