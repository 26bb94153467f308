"""The engine's MoE cache: curves from traces, plans with a size, and the engine itself with that size."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from planning_models import findings, linked, machine, moe, plan, prompting, sites
from twin_devices import Ask, ask

from atsplan import main
from planner.check.consistency import Contradiction, check_agreement
from planner.cost.expert_cache import cached
from planner.model.gguf.reader import read_model
from planner.model.inventory import to_text as inventory_text
from planner.plan.known import Known
from planner.plan.load_spec import LoadSpec, load_spec, map_devices, plan_layer_devices
from planner.plan.plan import CachePoint, Plan, from_text, to_text
from planner.plan.request import Pin
from planner.plan.stock import stock_plan
from planner.routing import trace as traces
from planner.routing.cache_curve import hit_curve, lru_depths
from planner.routing.cache_simulation import POLICIES, Demand, demand_of, replay
from planner.site import ON_CPU
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write

MIB = 2**20
CURVE = tuple(
    CachePoint(share_ppm=share, hit_ppm=hits)
    for share, hits in {125_000: 700_000, 250_000: 850_000, 500_000: 950_000}.items()
)


def trace(n_layers: int, n_expert: int, n_used: int, steps: int = 60, drift: float = 0.1) -> traces.Trace:
    """Tokens whose experts stay the same for a while."""
    rng, rows = np.random.default_rng(1), []
    held = [rng.permutation(n_expert)[:n_used] for _ in range(n_layers)]
    for step in range(steps):
        for layer in range(n_layers):
            fresh = rng.random(n_used) < drift
            spare = rng.permutation(np.setdiff1d(np.arange(n_expert), held[layer]))
            held[layer] = np.where(fresh, spare[:n_used], held[layer])
            rows.append((0, True, step, layer, tuple(int(e) for e in held[layer])))
    return traces.make("", n_expert, ["chat"], rows)


def shared(made: traces.Trace) -> Demand:
    return demand_of(made, per_layer=False)


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


# Curves.


@pytest.mark.parametrize("drift", [0.05, 0.3, 0.9])
def test_one_pass_is_every_replay(drift: float) -> None:
    demand = shared(trace(3, 24, 4, drift=drift))
    depths = lru_depths(demand, 20)
    for slots in (4, 5, 9, 18, 36, 71, 72):
        assert (depths < slots).sum() == replay(demand, POLICIES["lru"], slots, after=20).hits.sum()


def test_a_curve_is_concave_and_holds_a_token_s_experts() -> None:
    curve = hit_curve(shared(trace(3, 24, 4)), 4, 20)
    points = [(0, 0), *((p.share_ppm, p.hit_ppm) for p in curve)]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points)]
    assert slopes == sorted(slopes, reverse=True) and min(slopes) > 0
    assert all(72 * p.share_ppm // 10**6 >= 4 for p in curve)


# Plans.


def test_a_plan_with_a_cache_agrees_with_itself_and_can_be_checked_again() -> None:
    model, profile = moe(), machine()
    made = plan(model, "1500", known=Known(cache=CURVE))
    chosen = cached(p.site for p in made.units)
    assert len(chosen) == 1 and made.constraints.cache == CURVE
    assert (
        made.devices[0].cache_bytes % MIB == 0 and load_spec(made).cache_bytes == made.devices[0].cache_bytes
    )
    assert findings(made, model, profile) == []
    check_agreement(made, model, "plan.yaml")
    assert to_text(from_text(to_text(made), "p")) == to_text(made)
    plain = plan(model, "1500")
    assert made.predicted.objective_ns < plain.predicted.objective_ns
    assert "cache" not in to_text(plain).split("devices:")[0]


def test_the_engine_caches_all_host_experts_or_none() -> None:
    """Layers cannot be left out of the cache, so no plan leaves one out."""
    model = moe()
    for budget in ("900", "1500", "2200"):
        made = plan(model, budget, known=Known(cache=CURVE))
        homes = plan_layer_devices(made)
        kinds = {
            site.partition(":")[0]
            for unit, site in sites(made, "experts").items()
            if homes[int(unit.split(".")[1])] == "CUDA0"
        }
        assert not {"cpu", "cache"} <= kinds
    pins = (Pin("blk.0.experts", "cpu"), Pin("blk.0.attention", "gpu"), Pin("blk.7.experts", "cache"))
    with pytest.raises(Exception, match="does not fit"):
        plan(model, "2200", pins=pins, known=Known(cache=CURVE))


def test_a_plan_that_says_otherwise_is_not_loaded() -> None:
    model = moe()
    made = plan(model, "1500", known=Known(cache=CURVE))
    units = [p.model_copy(update={"site": ON_CPU}) if p.unit == "blk.3.experts" else p for p in made.units]
    sizes = tuple(use.model_copy(update={"cache_bytes": 0}) for use in made.devices)
    for wrong, why in (({"units": tuple(units)}, "cache it as well"), ({"devices": sizes}, "MoE cache of 0")):
        with pytest.raises(Contradiction, match=why):
            check_agreement(made.model_copy(update=wrong), model, "plan.yaml")
    report = findings(made.model_copy(update={"units": tuple(units)}), model, machine())
    assert any("exclude each other" in f.message for f in report)


def test_the_nearest_plan_of_a_stock_tool_keeps_the_cache() -> None:
    made = plan(moe(), "1500", known=Known(cache=CURVE))
    assert sites(stock_plan(made), "experts") == sites(made, "experts")


@pytest.mark.parametrize("n_seq", [1, 8, 64])
def test_many_sequences_ask_for_more_experts_than_it_holds(n_seq: int) -> None:
    work = Workload(n_ctx=32768, n_seq=n_seq)
    made = plan(moe(), "1500", workload=work, known=Known(cache=CURVE))
    shares = cached(p.site for p in made.units)
    assert all(128 * site.amount // 10**6 >= min(8 * n_seq, 128) for site in shares)
    assert n_seq <= 32 or not shares


def test_without_copied_prompts_there_is_a_cache_all_the_same() -> None:
    """Decoding goes through it either way; prompts are then computed by the CPU."""
    pins = (Pin("*.experts", "cache"),)
    known = Known(cache=CURVE)
    made = plan(moe(), "1500", on=linked(1), workload=prompting(8192), pins=pins, known=known)
    assert not made.op_offload and len(sites(made, "experts")) == 8
    assert all(site.startswith("cache:") for site in sites(made, "experts").values())
    assert findings(made, moe(), linked(1)) == []


# The command line.


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "moe.inventory.yaml"
    path.write_text(inventory_text(moe()))
    return path


def test_from_a_trace_to_a_plan_that_every_command_reads(model: Path, tmp_path: Path) -> None:
    routed, path = tmp_path / "trace.csv", tmp_path / "plan.yaml"
    routed.write_text(traces.to_text(trace(8, 128, 8)))
    made = run("solve", model, "--machine", "rtx4090-ddr5", "--budget", "1500", "--cache", routed, "-o", path)
    assert made.exit_code == 0, made.output
    assert "choices that a MoE cache serves" in made.stderr and "MoE cache on CUDA0" in made.stderr
    saved = from_text(path.read_text(), str(path))
    assert saved.constraints.cache == hit_curve(shared(trace(8, 128, 8)), 8, 30)
    assert run("check", path, "--model", model).exit_code == 0
    assert run("fmt", "--check", path).exit_code == 0
    assert run("diff", path, path, "--model", model).exit_code == 0
    assert "through the engine's MoE cache" in run("explain", path, "--model", model).stdout
    told = run("export", path).stdout
    size = saved.devices[0].cache_bytes // MIB
    assert f"--moe-cache-mib {size} --no-repack" in told
    assert f"LLAMA_ARG_MOE_CACHE_MIB={size}" in run("export", path, "--format", "env").stdout
    assert f"a MoE cache ({size} MiB)" in run("export", path, "--format", "llama-cpp-python").stdout


def test_what_is_no_trace_is_refused(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text(traces.to_text(trace(8, 64, 8)))
    line = run("solve", model, "--machine", "rtx4090-ddr5", "--budget", "1500", "--cache", other)
    assert line.exit_code == 2 and "experts" in line.stderr and line.stdout == ""
    heat = Path(__file__).parent / "data" / "heat" / "qwen3-30b-a3b.csv"
    line = run("solve", model, "--machine", "rtx4090-ddr5", "--budget", "1500", "--cache", heat)
    assert line.exit_code == 2


def test_an_engine_without_a_cache_refuses_in_one_line(
    vulkan_engine: Path, moe_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")  # or llama.cpp leaves software devices out
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(cached_plan(moe_model, "Vulkan0")))
    line = run("run", moe_model, "--plan", path, "--engine", vulkan_engine, "-p", "x", "--raw")
    assert line.exit_code == 3 and "b11480 and later" in line.stderr
    assert len([text for text in line.stderr.splitlines() if text.startswith("atsplan: ")]) == 1


def cached_plan(path: Path, device: str) -> Plan:
    """A plan of the generated model with all experts behind a cache."""
    model, profile = read_model(path).inventory, machine("rtx4090-ddr5")
    pins = (Pin("*.experts", "cache"), Pin("blk.*.attention", "gpu"), Pin("output", "gpu"))
    work = Workload(n_ctx=256, prompt=16, gen=16, n_batch=64, n_ubatch=64)
    made = plan(
        model,
        "1000",
        on=profile,
        workload=work,
        pins=pins,
        known=Known(cache=(CachePoint(share_ppm=500_000, hit_ppm=800_000),)),
    )
    text = to_text(made).replace("CUDA0", device)
    return from_text(text, "plan.yaml")


# The engine.


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cache") / "model.gguf"
    return write(
        path, SynthSpec("qwen3moe", n_embd=256, n_ff_exp=256, n_expert=16, n_used=4, n_layers=4, coverage=0.8)
    )


def test_the_engine_holds_what_the_plan_says(layered: Path) -> None:
    """Bytes, slots and graph of b11549 on a twin device; the answer is the CPU's to the bit."""
    spec = load_spec(cached_plan(layered, "TWIN0"))
    prompt, more = tuple(range(3, 9)), tuple(range(20, 60))
    cpu = LoadSpec((), (), 0, (), spec.workload, use_extra_bufts=False)
    cached, alone = ask([Ask(layered, spec, prompt, more), Ask(layered, cpu, prompt, more)])
    assert not cached.problem, cached.problem
    assert cached.logits == alone.logits
    kv = sum(use.context for use in alone.memory.values())
    cache = cached.memory["TWIN0"].context - kv
    expert = sum(t.size_bytes for t in read_model(layered).inventory.tensors if "_exps." in t.name) // 64
    assert 32 * expert <= cache <= spec.cache_bytes  # half of 4 layers of 16, as planned
    assert cached.splits_decode == 2 + 4  # one more for each cached layer
    # What its statistics say is what the curve says for as many slots, but for the order inside a step.
    demand = shared(traces.make("", 16, ["a"], alone.routed))
    hits, misses = map(int, re.findall(r"(?:hits|misses) = ([0-9]+)", cached.said[0]))
    assert hits + misses == (demand.ids >= 0).sum() and hits > 100
    foreseen = int((lru_depths(demand) < cache // expert - 1).sum())
    assert abs(foreseen - hits) <= 0.02 * (hits + misses)


def test_the_engine_s_cache_needs_no_copied_prompts(layered: Path) -> None:
    spec = load_spec(cached_plan(layered, "TWIN0").model_copy(update={"op_offload": False}))
    (found,) = ask([Ask(layered, spec, tuple(range(3, 60)), tuple(range(20, 40)))])
    assert not found.problem and "hit rate" in found.said[0]


def test_on_the_cpu_alone_there_is_none(layered: Path) -> None:
    spec = map_devices(load_spec(cached_plan(layered, "TWIN0")), {"TWIN0": "CPU"})
    (found,) = ask([Ask(layered, spec, (3, 4))])
    assert not found.problem and not found.said


def test_sizes_of_a_plan_are_what_the_engine_counts(layered: Path) -> None:
    made = cached_plan(layered, "TWIN0")
    (found,) = ask([Ask(layered, load_spec(made))])
    use = next(use for use in made.devices if use.name == "TWIN0")
    assert found.memory["TWIN0"].total <= use.used_bytes
