"""What experts in slots cost on a machine: found again from runs that were made up, and from real ones."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planning_models import machine, moe, plan, real

from benchmarks.predict.slots import rows, table
from benchmarks.rounds.paired import Journal
from planner.constants import CPU, PPM
from planner.cost.hybrid_slots import Lanes, binomial, expected_ns, lanes_of, staged_ppm, step_ns
from planner.cost.unit_time import Prices
from planner.machine.profile import Profile, SlotCosts, from_text, to_text
from planner.model.structure import structure_of
from planner.model.units import Kind, Unit, units_of
from planner.workload import Workload
from profiler import host
from profiler.journal import Journal as Kept
from profiler.session import Found, Request, Watcher
from profiler.synth import synth
from profiler.whole_model import slots
from profiler.whole_model.slots import GEN, LAYERS, Shape, config, costs_of, shape_of
from runtime.hybrid import build
from runtime.hybrid.build import HybridRefused

SHAPE = Shape(2048, 768, 64, 8, "q4_K")
TRUE = Lanes(
    gpu_ns=12_000, pair_ns=40_000, upload_ns=55_000, guests=2, sync_ns=33_000,
    beside_ns=60_000, pair_start_ns=6_000, upload_start_ns=8_000,
)  # fmt: skip
OTHER_NS = 20_000  # of a layer, beside its experts
COSTS = SlotCosts(
    device="CUDA0", type="q4_K", expert_bytes=2_654_208, sync_ns=33_000, pair_ns=40_000, beside_ns=60_000,
    pair_start_ns=6_000, upload_ns=55_000, upload_start_ns=8_000, staged_bytes_per_s=20 * 10**9,
)  # fmt: skip


def made_up(way: str, missing: float, shape: Shape = SHAPE) -> dict[str, Any]:
    """What runs of a machine with these lanes say, a choice missing with the same chance as every other."""
    lanes = {
        "all": TRUE,
        "cut": replace(TRUE, guests=0),
        "cpu": replace(TRUE, guests=0),
        "bus": replace(TRUE, guests=shape.n_used, pair_ns=10**9, beside_ns=10**9),
        "both": TRUE,
        "ahead": replace(TRUE, guests=0, ahead_ns=17_000, joined_ns=4_000),
        "joined": replace(TRUE, guests=0, ahead_ns=17_000, joined_ns=4_000),
    }[way]
    chances = binomial(shape.n_used, missing / shape.n_used)
    by_cpu, cpu_ns = 0.0, 0.0
    for misses, chance in enumerate(chances):
        ways = range(min(misses, lanes.guests) + 1)
        _, brought = min((_took(lanes, misses, b), b) for b in ways)
        pairs = misses - brought
        each = lanes.beside_ns if brought else lanes.pair_ns
        by_cpu += chance * pairs
        cpu_ns += chance * (pairs * each + (lanes.pair_start_ns if pairs else 0))
    layer = expected_ns(lanes, shape.n_used, missing) if way != "all" else lanes.gpu_ns
    steps = GEN * LAYERS
    return {
        "decode_ns": LAYERS * (OTHER_NS + layer),
        "prompt_ns": 10**8 if way == "all" else 2 * 10**8,
        "cpu": round(steps * by_cpu),
        "uploaded": round(steps * (missing - by_cpu)),
        "cpu_ns": round(steps * cpu_ns),
        "expert_bytes": 2_654_208,
        "device_ns": TRUE.gpu_ns,
        "cpu_start_ns": TRUE.pair_start_ns,
        "bus_start_ns": TRUE.upload_start_ns,
    }


def _took(lanes: Lanes, misses: int, brought: int) -> int:
    only = replace(lanes, guests=brought, upload_ns=lanes.upload_ns if brought else 10**12)
    each = lanes.beside_ns if brought else lanes.pair_ns
    cpu = (misses > brought) * lanes.pair_start_ns + (misses - brought) * each
    bus = brought and only.upload_start_ns + brought * only.upload_ns + only.gpu_ns
    return max(lanes.gpu_ns, cpu, bus)


def test_the_costs_that_made_the_runs_are_found_again() -> None:
    missing = {"all": 0.0, "cut": 0.125, "cpu": 4.0, "bus": 4.0, "both": 4.0, "ahead": 0.125, "joined": 4.0}
    found = costs_of({way: made_up(way, m) for way, m in missing.items()}, "CUDA0", SHAPE)
    assert found is not None
    assert found.ahead_ns == pytest.approx(17_000, abs=300) and found.joined_ns == pytest.approx(
        4_000, abs=300
    )
    assert found.sync_ns == pytest.approx(TRUE.sync_ns, rel=0.05)
    assert found.pair_ns == pytest.approx(TRUE.pair_ns, rel=0.02)
    assert found.upload_ns == pytest.approx(TRUE.upload_ns, rel=0.05)
    # Steps in which nothing was brought count among those beside the bus: they are few.
    assert TRUE.pair_ns < found.beside_ns <= TRUE.beside_ns * 1.01
    assert found.residual_ppm < 0.1 * PPM
    cold = LAYERS * 32 * 2_654_208
    assert found.staged_bytes_per_s == pytest.approx(cold / 0.2, rel=1e-6)
    lines = {way: made_up(way, m) for way, m in missing.items() if way != "bus"}
    assert costs_of(lines, "CUDA0", SHAPE) is None
    assert costs_of({**lines, "bus": {"skipped": "no memory"}}, "CUDA0", SHAPE) is None
    lines = {way: made_up(way, m) for way, m in missing.items() if way != "joined"}
    less = costs_of(lines, "CUDA0", SHAPE)
    assert less == found.model_copy(update={"ahead_ns": None, "joined_ns": None})


@pytest.mark.parametrize("used", [1, 2, 4])
def test_of_few_choices_a_token_too(used: int) -> None:
    """Of one choice there is one without a slot or none: the lane's own start tells it from a pair."""
    shape = Shape(2048, 768, 64, used, "q4_K")
    missing = {"all": 0.0, "cut": used / 64, "cpu": used / 2, "bus": used / 2, "both": used / 2}
    found = costs_of({way: made_up(way, m, shape) for way, m in missing.items()}, "CUDA0", shape)
    assert found is not None
    assert found.pair_ns == pytest.approx(TRUE.pair_ns, rel=0.05)
    assert found.sync_ns == pytest.approx(TRUE.sync_ns, rel=0.06)
    assert found.pair_start_ns == pytest.approx(TRUE.pair_start_ns, abs=3_000)
    assert found.upload_ns == pytest.approx(TRUE.upload_ns, rel=0.06)


@pytest.mark.parametrize(("way", "field"), [("cpu", "cpu"), ("bus", "uploaded"), ("both", "expert_bytes")])
def test_a_lane_that_had_nothing_to_do_tells_nothing(way: str, field: str) -> None:
    missing = {"all": 0.0, "cut": 0.125, "cpu": 4.0, "bus": 4.0, "both": 4.0}
    lines = {way: made_up(way, m) for way, m in missing.items()}
    lines[way][field] = 0
    assert costs_of(lines, "CUDA0", SHAPE) is None


def test_an_interrupted_profile_keeps_them(tmp_path: Path) -> None:
    """Read again as whole by the next start; a way that failed is tried again."""
    line = {"kind": "slots", "of": ["CUDA0"], "key": "cpu", **made_up("cpu", 4.0)}
    first = Kept("slots", folder=tmp_path)
    for each in (line, {"kind": "slots", "of": ["CUDA0"], "key": "bus", "skipped": "no answer within 5 s"}):
        first.add(each)
    again = Kept("slots", folder=tmp_path)
    assert again.damage == "" and again.lines == first.lines
    damaged = Kept("other", folder=tmp_path)
    damaged.add({name: value for name, value in line.items() if name != "cpu_ns"})
    assert "without cpu_ns" in Kept("other", folder=tmp_path).damage


def test_every_way_is_decoded_by_a_real_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded engine's CPU device wrapped: its times say nothing, what became of the choices does."""
    for name, value in (("PROMPT", 48), ("GEN", 12), ("PROMPTS", 1), ("LAYERS", 2)):
        monkeypatch.setattr(slots, name, value)
    shape = Shape(256, 256, 8, 2, "q4_K")
    path = synth.write(tmp_path / "slots.gguf", shape.spec)
    ways = list(slots.WAYS)
    lines = {line["key"]: line for line in slots.run(path, ways, "CPU", shape, 2, None, 120.0)}
    assert [line.get("skipped") for line in lines.values()] == [None] * 7
    choices = 12 * 2 * 2
    assert {way: lines[way]["hits"] + lines[way]["cpu"] + lines[way]["uploaded"] for way in ways} == (
        dict.fromkeys(ways, choices)
    )
    assert lines["all"]["hits"] == choices and lines["cut"]["hits"] > lines["cpu"]["hits"]
    assert lines["cpu"]["uploaded"] == lines["cut"]["uploaded"] == 0 < lines["cpu"]["cpu"]
    assert lines["bus"]["cpu"] == 0 < lines["bus"]["uploaded"]
    assert lines["ahead"]["uploaded"] == lines["joined"]["uploaded"] == 0
    assert [lines[way]["hits"] for way in ("ahead", "joined")] == [
        lines[way]["hits"] for way in ("cut", "cpu")
    ]
    found = costs_of(lines, CPU, shape)
    assert found is not None and found.expert_bytes == 3 * 256 * 256 * 144 // 256
    assert found.pair_ns > 1 and found.beside_ns >= found.pair_ns


def test_one_that_ends_the_child_is_told_and_the_rest_left() -> None:
    lines = list(slots.run(Path("nowhere.gguf"), ["all", "cut"], "CPU", SHAPE, 1, None, 60.0))
    assert [line["key"] for line in lines] == ["all", "cut"] and all("skipped" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("Qwen3-30B-A3B-Q4_K_M", Shape(2048, 768, 58, 8, "q4_K")),
        ("gpt-oss-20b-MXFP4", Shape(2880, 2880, 13, 4, "mxfp4")),
    ],
)
def test_the_experts_that_are_measured_have_the_models_shape(name: str, wanted: Shape) -> None:
    found = shape_of(real(name))
    assert found == wanted
    size = LAYERS * found.n_expert * slots.expert_bytes(found)
    assert size <= 1.01 * slots.ALL_BYTES or found.n_expert == 2 * found.n_used


@pytest.mark.parametrize(
    ("seconds", "free", "library", "wanted"),
    [
        (4.0, 2**36, "", "give --seconds 17"),
        (60.0, 2**28, "", "MiB of experts do not fit into 256 MiB"),
        (60.0, 2**36, "no compiler", "no compiler"),
    ],
)
def test_what_keeps_them_from_being_measured_is_said(
    seconds: float, free: int, library: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the rest of the profile is not lost: a note, no error."""

    def built() -> Path:
        raise HybridRefused(library)

    monkeypatch.setattr(build, "library", built)
    monkeypatch.setattr(build, "available", lambda: "")
    monkeypatch.setattr(host, "memory_bytes", lambda: (2**36, 2**36))
    gpu = machine().device("CUDA0").model_copy(update={"free_bytes": free})
    found = Found(Kept("slots", folder=tmp_path), machine().fingerprint, (), 0.0)
    monkeypatch.setattr(Found, "devices", property(lambda self: (gpu,)))
    monkeypatch.setattr(Found, "threads", property(lambda self: 2))
    request = Request(None, (), 2, seconds, False, "", "")
    watch = Watcher(*[lambda *_: None] * 5)
    costs, notes = slots.measured(found, real("Qwen3-30B-A3B-Q4_K_M"), request, watch, tmp_path)
    assert costs == () and len(notes) == 1 and wanted in notes[0] and "CUDA0" in notes[0]
    assert not (tmp_path / "slots.gguf").exists()


def test_no_experts_no_measurement() -> None:
    assert shape_of(real("Llama-3.1-70B-Q4_K_M")) is None


def test_settings_say_who_takes_what() -> None:
    assert config("cpu", SHAPE)["bus_bytes_us"] == config("bus", SHAPE)["cpu_bytes_us"] == slots.NEVER
    assert config("all", SHAPE)["slots"] == 64 and config("bus", SHAPE)["guests"] == 8
    assert len({config(way, SHAPE)["name"] for way in slots.WAYS}) == 7


def prices(profile: Profile) -> tuple[Prices, Unit]:
    model = moe()
    unit = next(u for u in units_of(model).units if u.kind is Kind.EXPERTS)
    return Prices(structure_of(model), profile, Workload()), unit


def test_measured_costs_price_a_plan_by_bytes() -> None:
    told = machine().model_copy(update={"slots": (COSTS,)})
    assert from_text(to_text(told), "x") == told
    at, unit = prices(told)
    gpu, host = told.device("CUDA0"), told.device(CPU)
    each = at.moved_bytes(unit) // unit.experts
    found = lanes_of(at, unit, gpu, host, 2)
    assert (found.sync_ns, found.pair_start_ns, found.upload_start_ns) == (33_000, 6_000, 8_000)
    assert found.pair_ns == 40_000 * each // COSTS.expert_bytes
    assert found.beside_ns == 60_000 * each // COSTS.expert_bytes
    assert staged_ppm(at, unit, "CUDA0") > PPM  # 20 GB/s are less than this link's copies
    slower = told.model_copy(update={"slots": (COSTS.model_copy(update={"sync_ns": 90_000}),)})
    model, pinned = moe(), "1500"
    fast, slow = (plan(model, pinned, on=one, hybrid=True) for one in (told, slower))
    assert fast.predicted.tpot_ns < slow.predicted.tpot_ns


def test_without_them_the_bus_takes_its_part_of_the_memory_that_the_cpu_reads() -> None:
    at, unit = prices(machine())
    found = lanes_of(at, unit, machine().device("CUDA0"), machine().device(CPU), 2)
    link = next(li for li in machine().links if li.source == CPU)
    share = link.bandwidth_bytes_per_s / machine().device(CPU).bandwidth_bytes_per_s
    assert found.beside_ns == pytest.approx(found.pair_ns * (1 + share), rel=0.2)
    # One memory feeds both: of few misses the CPU alone takes hardly longer.
    assert step_ns(replace(found, guests=0), 4) <= 1.1 * step_ns(replace(found, guests=4), 4)


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/h200-2026-11-30-slots.jsonl"
_ROW = re.compile(
    r"^\| ([\w=]+) \| ([\w-]+) \| ([\d.]+) ms \| ([\d.]+) ms \| ([+-][\d.]+)% \|$", re.MULTILINE
)


def page_rows() -> dict[tuple[str, str], tuple[float, float, float]]:
    """Predicted and measured milliseconds and the error in percent, as the findings show them."""
    text = (ROOT / "docs/findings-hybrid.md").read_text(encoding="utf-8")
    return {(m[1], m[2]): (float(m[3]), float(m[4]), float(m[5])) for m in _ROW.finditer(text)}


def test_what_was_predicted_and_measured_is_what_the_findings_say() -> None:
    """One cell whose routing takes no time to draw; the command that stands there computes the others."""
    profile = RESULTS.with_suffix(".profile.yaml")
    records = [r for r in Journal(RESULTS).records() if r.get("cell") == "preset=uniform"]
    shown = table(list(rows(records, from_text(profile.read_text(), str(profile))))).splitlines()[2:4]
    text = (ROOT / "docs/findings-hybrid.md").read_text()
    assert len(shown) == 2 and all(line in text for line in shown)


def test_measured_columns_and_what_is_said_of_all_rows() -> None:
    runs = [r for r in Journal(RESULTS).records() if r["kind"] == "run" and r["contender"] != "told more"]
    found = page_rows()
    assert found.keys() == {(r["cell"], r["contender"]) for r in runs}
    for (cell, name), (told, seen, error) in found.items():
        times = [r["decode_ns"] / 1e6 for r in runs if (r["cell"], r["contender"]) == (cell, name)]
        assert seen == pytest.approx(statistics.median(times), abs=0.006)
        assert error == pytest.approx(100 * (told / seen - 1), abs=0.15)
    measured = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    ours, rule = (
        [abs(row[2]) for (_, name), row in found.items() if name == which]
        for which in ("all_lanes", "n-cpu-moe")
    )
    wanted = [statistics.median(ours), max(ours), statistics.median(rule), max(rule)]
    said = re.search(
        r"off by ([\d.]+) % in the middle, ([\d.]+) % at worst; "
        r"`--n-cpu-moe` there ([\d.]+) % and ([\d.]+) %",
        measured,
    )
    assert said and list(map(float, said.groups())) == pytest.approx(wanted, abs=0.06)  # of rounded errors


def test_the_costs_that_the_findings_name_are_those_of_the_profile() -> None:
    profile = RESULTS.with_suffix(".profile.yaml")
    (costs,) = from_text(profile.read_text(), str(profile)).slots or ()
    text = " ".join((ROOT / "docs/findings-hybrid.md").read_text(encoding="utf-8").split())
    times = (costs.sync_ns, costs.pair_ns, costs.beside_ns, costs.pair_start_ns, costs.upload_ns)
    layer, pair, beside, start, upload = (f"{ns / 1e3:.0f} µs" for ns in times)
    size, rate = f"{costs.expert_bytes / 2**20:.1f} MiB", f"{costs.staged_bytes_per_s / 1e9:.0f} GB/s"
    assert f"{layer} a layer, {pair} an expert of {size} by the CPU and {beside} beside the bus" in text
    assert f"({start} to begin), {upload} by the bus, prompts brought at {rate}, " in text
    assert f"half with both {costs.residual_ppm / 1e4:.1f} % off" in text
