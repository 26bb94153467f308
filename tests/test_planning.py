"""Plans for cases that public planners got wrong: budgets, several devices, contexts, pins, reserves."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from planning_models import MIB, dense, machine, moe, plan, priced, problem_of, real, sites, timed

from planner.cost.build_problem import UNFUSED
from planner.cost.layer_options import Chooser
from planner.cost.unit_time import state_case
from planner.errors import OptionProblem
from planner.machine.budgets import budgets_for, parse_budget, parse_reserve
from planner.machine.op_time import UNFUSED_DELTA_NET
from planner.machine.profile import OpTiming, Profile
from planner.memory.memory import Reserve
from planner.model.requantise import parse_rule, requantised, tensor_types
from planner.model.structure import structure_of
from planner.passes.case import Case
from planner.passes.largest_context import Keep, largest_context
from planner.passes.predict import predict
from planner.passes.refusal import Infeasible
from planner.plan.engine_rules import layers_by_ngl
from planner.plan.engine_settings import EngineSettings
from planner.plan.known import Known
from planner.plan.plan import CachePoint, Plan, to_text
from planner.plan.request import Pin, Request
from planner.site import ON_CPU, Site, SiteKind
from planner.solver.problem import Problem
from planner.workload import Workload

SKEWED = tuple(min(1.0, (k / 128) ** 0.15) for k in range(129))
UNIFORM = tuple(k / 128 for k in range(129))


def request_ns(made: Plan, tpot_ns: int, prefill_ns: int) -> int:
    return made.workload.gen * tpot_ns + prefill_ns


def sound(made: Plan) -> None:
    """Within every budget, never above a stock rule, and proven."""
    for use in made.devices:
        assert use.used_bytes <= use.budget_bytes, use
    for stock in made.baselines:
        if stock.feasible:
            assert made.predicted.objective_ns <= request_ns(made, stock.tpot_ns, stock.prefill_ns), stock
    assert made.predicted.bound_ns <= made.predicted.objective_ns


# What fits, and what to say when nothing does.


def test_pins_that_do_not_fit_are_refused_with_the_deficit() -> None:
    pinned = (Pin("*.experts", "cpu"), Pin("*.attention", "gpu"))
    with pytest.raises(Infeasible) as refusal:
        plan(moe(), "1000", workload=Workload(n_ctx=131072), pins=pinned, advise=True)
    (need,) = refusal.value.needs
    assert need.device == "CUDA0" and need.total_bytes > need.budget_bytes == 1000 * MIB
    assert refusal.value.exit_code == 1
    advised = re.search(r"--ctx (\d+) \(fits\)", str(refusal.value))
    assert advised and "q8_0" in str(refusal.value)
    assert plan(moe(), "1000", workload=Workload(n_ctx=int(advised[1])), pins=pinned)


def test_full_residency_wins_when_it_fits_and_is_left_alone() -> None:
    made = plan(moe(), "8000")
    assert set(sites(made).values()) == {"cpu", "gpu:CUDA0"}
    assert sites(made, "token_embd") == {"token_embd": "cpu"}
    assert made.overrides == () and made.predicted.status == "baseline"
    assert [r.device for r in made.layers] == ["CUDA0"]


@pytest.mark.parametrize("budget", ["700", "1500", "2600", "3300"])
def test_between_nothing_and_everything_no_stock_rule_is_faster(budget: str) -> None:
    sound(plan(moe(), budget))


def test_a_budget_too_small_for_anything_leaves_the_gpu_unopened() -> None:
    made = plan(moe(), "50")
    assert [use.name for use in made.devices] == ["CPU"]
    assert set(sites(made).values()) == {"cpu"}


def test_more_budget_and_less_context_never_hurt() -> None:
    costs = [plan(moe(), str(budget)).predicted.objective_ns for budget in range(600, 3600, 600)]
    assert costs == sorted(costs, reverse=True)
    contexts = [plan(moe(), "2000", workload=Workload(n_ctx=n)) for n in (2048, 32768, 131072)]
    by_context = [made.predicted.objective_ns for made in contexts]
    assert by_context == sorted(by_context)


def test_host_memory_is_a_limit_unless_paging_is_allowed() -> None:
    with pytest.raises(Infeasible, match=r"CPU needs|together need"):
        plan(moe(), "CUDA0=600,CPU=1000")
    made = plan(moe(), "CUDA0=600,CPU=1000", page=True)
    assert any("will page from disk" in note for note in made.notes)


def test_a_larger_ubatch_needs_a_larger_compute_buffer() -> None:
    small, large = (plan(moe(), "1500", workload=Workload(n_ubatch=n)) for n in (512, 2048))
    assert small.devices[0].compute_bytes < large.devices[0].compute_bytes
    sound(large)


def test_reserves_push_weights_off_and_are_itemised() -> None:
    reserve = Reserve(name="projector", device="CUDA0", size_bytes=900 * MIB)
    free = plan(moe(), "3400")
    held = plan(moe(), "3400", settings=EngineSettings(reserves=(reserve,)))
    assert held.devices[0].weights_bytes < free.devices[0].weights_bytes
    assert held.devices[0].reserve_bytes - free.devices[0].reserve_bytes == 900 * MIB
    assert any("projector" in note for note in free.notes)
    assert not any("projector" in note for note in held.notes)


def test_kv_grows_with_context_and_shrinks_with_its_type() -> None:
    def kv(**fields: object) -> int:
        made = plan(moe(), "6000", workload=Workload(**fields))
        return sum(use.kv_bytes for use in made.devices)

    assert kv(n_ctx=32768) == 8 * kv(n_ctx=4096)
    assert kv(type_k="q8_0", type_v="q8_0") < kv(n_ctx=4096)


def test_kv_types_without_kernels_keep_attention_off_the_gpu() -> None:
    made = plan(moe(), "8000", workload=Workload(type_k="q8_0", type_v="q4_0"))
    assert set(sites(made, ".attention").values()) == {"cpu"}


# Contexts.


def _roomy(budgets: Mapping[str, int]) -> Request:
    """A context that may shrink from 65536 to 8192, all of the model on GPUs."""
    return Request(budgets, Workload(n_ctx=65536), lowest_ctx=8192, no_cpu=True)


def test_context_shrinks_before_anything_spills() -> None:
    profile, model = machine(), moe()
    budgets = budgets_for(profile, parse_budget("3900"))
    found, keep = largest_context(Case(structure_of(model), profile, _roomy(budgets)), EngineSettings())
    assert 8192 <= found < 65536 and found % 256 == 0 and keep is Keep.ALL
    made = plan(model, "3900", workload=Workload(n_ctx=found), no_cpu=True)
    assert {p.unit for p in made.units if p.site == ON_CPU} == {"token_embd"}
    with pytest.raises(Infeasible):
        plan(model, "3900", workload=Workload(n_ctx=found + 256), no_cpu=True)


def test_not_even_the_floor_fits() -> None:
    budgets = budgets_for(machine(), parse_budget("600"))
    with pytest.raises(Infeasible, match="not even a context of 8192"):
        largest_context(Case(structure_of(moe()), machine(), _roomy(budgets)), EngineSettings())


def test_the_largest_context_may_spill_experts_but_not_the_cache() -> None:
    budgets = budgets_for(machine(), parse_budget("1500"))
    found, keep = largest_context(
        Case(structure_of(moe()), machine(), Request(budgets, Workload(n_ctx=131072), lowest_ctx=4096)),
        EngineSettings(),
    )
    assert keep is Keep.CACHE and found > 4096


# Several devices.


def test_one_fast_card_is_enough() -> None:
    slow = {"bandwidth_bytes_per_s": 100_000_000_000}
    made = plan(moe(), "CUDA0=8000,CUDA1=8000", on=machine("rtx3090-rtx3060-ddr4", CUDA1=slow))
    assert {use.name for use in made.devices} == {"CUDA0", "CPU"}
    assert [r.device for r in made.layers] == ["CUDA0"]


def test_every_card_is_checked_not_the_sum() -> None:
    made = plan(moe(16), "CUDA0=2400,CUDA1=1200", on=machine("2x-rtx4060ti-16gb"))
    sound(made)
    assert {use.name for use in made.devices} == {"CUDA0", "CUDA1", "CPU"}


def test_two_cards_are_both_filled_and_layers_stay_together() -> None:
    made = plan(moe(16), "CUDA0=2600,CUDA1=2300", on=machine("2x-rtx4060ti-16gb"))
    sound(made)
    layer = max(p.size_bytes for p in made.units)
    for use in made.devices:
        assert use.kind == "cpu" or use.budget_bytes - use.used_bytes < 1.5 * layer
    assert len([each for each in made.layers if each.first < 16]) <= 3  # the head may be elsewhere


def test_a_remote_device_is_priced_by_its_network() -> None:
    made = plan(moe(), "CUDA0=2000,RPC0=8000", on=machine("rtx4090-rpc"))
    sound(made)
    assert len(made.layers) <= 3


def test_five_cards_and_ninety_two_layers_end() -> None:
    profile = machine("2x-rtx4060ti-16gb")
    cards = [d for d in profile.devices if d.kind == "gpu"]
    five = tuple(cards[0].model_copy(update={"name": f"CUDA{n}"}) for n in range(5))
    cpu = tuple(d for d in profile.devices if d.kind == "cpu")
    many = profile.model_copy(update={"devices": (*five, *cpu)})
    sound(
        plan(
            moe(30, dense_first=3),
            "CUDA0=1600,CUDA1=1600,CUDA2=1600,CUDA3=1600,CUDA4=1000",
            on=many,
            limit_s=0.5,
        )
    )


def test_layers_of_very_different_size() -> None:
    made = plan(dense([16384, 512, 512, 12288, 512, 512, 8192, 512]), "260")
    sound(made)
    made = plan(moe(10, dense_first=3), "1500")
    sound(made)


def test_one_memory_counts_once() -> None:
    profile = machine("apu-unified", Vulkan0={"free_bytes": 120 * 2**30, "memory_bytes": 128 * 2**30})
    made = plan(moe(), "Vulkan0=24000", on=profile)
    (pool,) = [note for note in made.notes if "one memory" in note]
    ceiling = int(pool.split("at most ")[1].split()[0])
    assert ceiling * MIB < profile.device("CPU").free_bytes
    with pytest.raises(Infeasible):
        plan(moe(120), "Vulkan0=24000", on=profile)
    cached = Known(cache=(CachePoint(share_ppm=250_000, hit_ppm=700_000),))
    assert not any(
        p.site.kind is SiteKind.CACHE for p in plan(moe(), "Vulkan0=1500", on=profile, known=cached).units
    )


def test_a_tensor_above_the_largest_buffer_stays_on_the_host() -> None:
    limited = machine("rtx4090-ddr5", CUDA0={"max_alloc_bytes": 260 * MIB})
    model = requantised(moe(), [parse_rule("blk.3.ffn_down_exps=f16")])
    made = plan(model, "8000", on=limited, workload=Workload(n_ubatch=16))
    assert sites(made)["blk.3.experts"] == "cpu" and sites(made)["blk.2.experts"] == "gpu:CUDA0"
    longer = plan(model, "8000", on=limited)  # batches of 32 and more would copy it: no buffer holds that
    assert not longer.op_offload and sites(longer) == sites(made)


# Budgets as a person writes them.


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "nan", "inf", "1e3", "", "x", "=5", "CUDA0=", "1000000000000", "CUDA0=1,CUDA0=2", "1,2"],
)
def test_budgets_that_make_no_sense(text: str) -> None:
    with pytest.raises(OptionProblem):
        parse_budget(text)


def test_budgets_that_do() -> None:
    assert parse_budget("21500") == {"": 21500 * MIB}
    assert parse_budget("21.5GiB") == {"": 22016 * MIB}
    assert parse_budget("CUDA0=21500, CUDA1=8GB") == {"CUDA0": 21500 * MIB, "CUDA1": 8 * 10**9}
    assert parse_reserve("1024,CUDA0=0") == {"": 1024 * MIB, "CUDA0": 0}


def test_budgets_against_the_machine() -> None:
    two = machine("rtx3090-rtx3060-ddr4")
    assert list(budgets_for(two, {"CUDA1": MIB})) == ["CUDA1", "CPU"]
    for given in ({"CUDA9": MIB}, {"CUDA1": 2**40}, {"": 2**34}):
        with pytest.raises(OptionProblem):
            budgets_for(two, given)
    silent = machine("rtx4090-ddr5", CUDA0={"memory_bytes": 0, "free_bytes": 0})
    with pytest.raises(OptionProblem, match="give a budget"):
        budgets_for(silent, {})
    plain, hybrid = (budgets_for(machine(), {}, hybrid=h)["CUDA0"] for h in (False, True))
    assert hybrid < plain < machine().device("CUDA0").free_bytes
    remote = machine("rtx4090-rpc", **{"RPC0[10.0.0.2:50052]": {"memory_bytes": 0, "free_bytes": 0}})
    with pytest.raises(OptionProblem, match="name it"):
        budgets_for(remote, {"": 2**30})
    assert "RPC0[10.0.0.2:50052]" in budgets_for(remote, {"RPC0": 2**30})


# Pins.


def test_a_pinned_attention_takes_its_layer_along() -> None:
    made = plan(moe(), "8000", pins=(Pin("blk.2.attention", "cpu"),))
    assert {site for unit, site in sites(made).items() if unit.startswith("blk.2.")} == {"cpu"}
    assert "blk.2.attention=cpu" in made.constraints.pins


@pytest.mark.parametrize("pin", [Pin("blk.99.*", "cpu"), Pin("blk.0.*", "CUDA7"), Pin("*", "nowhere")])
def test_pins_that_mean_nothing(pin: Pin) -> None:
    with pytest.raises(OptionProblem):
        plan(moe(), "8000", pins=(pin,))


def test_a_unit_pinned_to_two_places() -> None:
    with pytest.raises(OptionProblem, match="twice"):
        plan(moe(), "8000", pins=(Pin("blk.0.*", "gpu"), Pin("*.experts", "cpu")))


def test_contiguous_keeps_layers_whole_and_in_one_run() -> None:
    made = plan(moe(), "2000", contiguous=True)
    assert made.overrides == () and len(made.layers) == 2


# Time.


def test_prompts_stream_only_where_the_bus_is_fast() -> None:
    def prefill(bandwidth: int, prompt: int) -> int:
        profile = machine()
        links = tuple(li.model_copy(update={"bandwidth_bytes_per_s": bandwidth}) for li in profile.links)
        devices = ("CUDA0",) * 9
        experts = {f"blk.{n}.experts": ON_CPU for n in range(8)}
        profile = profile.model_copy(update={"links": links})
        return predict(moe(), profile, Workload(prompt=prompt), devices, experts).prefill_ns

    assert prefill(3 * 10**9, 34) > 5 * prefill(50 * 10**9, 34)
    assert prefill(3 * 10**9, 31) == pytest.approx(prefill(50 * 10**9, 31), rel=0.05)  # below the threshold
    per_token = prefill(3 * 10**9, 4096) / 4096
    assert per_token < prefill(3 * 10**9, 512) / 512 * 1.1


def test_the_parts_of_a_prediction_add_up() -> None:
    experts = {f"blk.{n}.experts": ON_CPU for n in (1, 4)}
    found = predict(moe(), machine(), Workload(), ("CUDA0",) * 9, experts)
    parts = sum(found.units_ns.values()) + found.inside_ns + found.edges_ns + found.mixed_ns + found.token_ns
    assert found.tpot_ns == parts and found.mixed_ns > 0 and found.measured_ppm == 0


def test_active_experts_count_not_all() -> None:
    found = predict(moe(), machine(), Workload(), ("CUDA0",) * 9, {})
    whole = moe().size_bytes * 10**9 // machine().device("CUDA0").bandwidth_bytes_per_s
    assert found.units_ns["blk.0.experts"] < whole / 8 / 4


def test_late_layers_go_first_when_prompts_touch_fewer_of_their_experts() -> None:
    distinct = {n: 128.0 if n < 4 else 40.0 for n in range(8)}
    workload = Workload(n_ctx=8192, prompt=8000, gen=1)
    made = plan(moe(), "2200", workload=workload, known=Known(distinct=distinct))
    on_host = {int(u.split(".")[1]) for u, s in sites(made, ".experts").items() if s == "cpu"}
    assert on_host and on_host <= {4, 5, 6, 7}


def test_one_recurrent_layer_on_the_cpu_costs_all_of_them() -> None:
    model = real("Qwen3.6-35B-A3B-q4_K")
    n = model.number("block_count")

    def mixed(moved: int, sites: dict[str, Site]) -> int:
        devices = (*("CPU" if layer == moved else "CUDA0" for layer in range(n)), "CUDA0")
        return predict(model, machine(), Workload(), devices, sites).mixed_ns

    experts_only = mixed(-1, {"blk.0.experts": ON_CPU})
    assert mixed(3, {}) == experts_only  # layer 3 attends
    assert mixed(0, {}) > experts_only > 0


def test_that_cost_is_measured_where_the_profile_has_it_and_else_said_to_be_assumed() -> None:
    model, work = real("Qwen3.6-35B-A3B-q4_K"), Workload()
    fused = state_case(structure_of(model), 1)

    def case(op: str, ns: int) -> OpTiming:
        return timed(op, "f32", fused.shape, ns)

    def extra(profile: Profile) -> int:
        budgets = budgets_for(profile, parse_budget("8000"))
        problem = problem_of(model, profile, Request(budgets, work))
        return next(m.decode_ns for m in problem.mixed if m.name == UNFUSED)

    told = "assumed, not measured: a delta-net layer"
    timings = (case(fused.op, 9_000), case(UNFUSED_DELTA_NET, 109_000))
    known = machine().model_copy(update={"timings": timings})
    assert extra(known) == 30 * 100_000 != extra(machine())  # thirty such layers
    assert any(note.startswith(told) for note in plan(model, "8000").notes)
    assert not any(note.startswith(told) for note in plan(model, "8000", on=known).notes)
    assert not any(note.startswith(told) for note in plan(moe(), "2000").notes)


# Experts.


def test_hot_experts_are_striped_only_when_some_are_hot() -> None:
    def made(curve: tuple[float, ...], zero_copy: bool = True) -> Plan:
        profile = machine()
        if not zero_copy:
            links = tuple(li.model_copy(update={"zero_copy_bytes_per_s": 0}) for li in profile.links)
            profile = profile.model_copy(update={"links": links})
        return plan(moe(), "1800", on=profile, known=Known(curves=dict.fromkeys(range(8), curve)))

    striped, plain = made(SKEWED), made(SKEWED, zero_copy=False)
    assert any(site.startswith("stripe:CUDA0:") for site in sites(striped).values())
    assert not any(site.startswith("stripe") for site in sites(plain).values())
    assert striped.predicted.objective_ns < plain.predicted.objective_ns
    assert striped.predicted.objective_ns < made(UNIFORM).predicted.objective_ns
    sound(striped)


def test_striped_bytes_come_in_granules() -> None:
    made = plan(moe(), "1800", known=Known(curves=dict.fromkeys(range(8), SKEWED)))
    sound(made)
    assert made.predicted.gap_ppm == 0


def test_the_expert_cache_has_one_size_and_is_accounted() -> None:
    points = (
        CachePoint(share_ppm=125_000, hit_ppm=700_000),
        CachePoint(share_ppm=250_000, hit_ppm=850_000),
        CachePoint(share_ppm=500_000, hit_ppm=950_000),
    )
    made = plan(moe(), "1500", known=Known(cache=points))
    cached = {site for site in sites(made).values() if site.startswith("cache:")}
    assert len(cached) == 1 and made.devices[0].cache_bytes > 0
    sound(made)


def test_expert_biases_go_with_their_experts() -> None:
    model = real("gpt-oss-20b-MXFP4")
    made = plan(model, "3000", pins=(Pin("*.experts", "cpu"),))
    moved = {o.pattern.rpartition(".")[2]: o.tensors for o in made.overrides}
    assert moved == {"weight$": 72, "bias$": 72}  # of 24 layers, three each


# What if.


def test_other_types_of_the_same_tensors() -> None:
    before = moe()
    after = requantised(before, [parse_rule(r"ffn_.*_exps=iq2_xs")])
    assert after.size_bytes < before.size_bytes and len(after.tensors) == len(before.tensors)
    assert tensor_types(before, after).count("=iq2_xs\n") == 24
    assert plan(after, "1800").predicted.objective_ns < plan(before, "1800").predicted.objective_ns
    for rule in ("nothing=q8_0", "ffn_(=q8_0", "ffn=q99", "q8_0"):
        with pytest.raises(OptionProblem):
            requantised(before, [parse_rule(rule)])


def test_the_same_inputs_give_the_same_bytes() -> None:
    assert to_text(plan(moe(), "2000")) == to_text(plan(moe(), "2000"))


# Stock rules, counted as the engine counts.


@pytest.mark.parametrize(("ngl", "on_gpu"), [(0, 0), (1, 1), (2, 2), (28, 28), (29, 29), (30, 29)])
def test_the_last_layers_go_first_and_the_head_is_one_of_them(ngl: int, on_gpu: int) -> None:
    devices = layers_by_ngl(28, ngl, [("CUDA0", 1)])
    assert len(devices) == 29 and devices.count("CUDA0") == on_gpu
    assert list(devices) == sorted(devices)  # CPU before CUDA0: offloaded from the end


def test_speculative_blocks_count_as_layers() -> None:
    model = real("Qwen3.6-27B-q4_K")
    table = [t for t in model.tensors if t.name.startswith("blk.63.")]
    head = tuple(t.model_copy(update={"name": t.name.replace("blk.63.", "blk.64.")}) for t in table)
    nextn = head[0].model_copy(update={"name": "blk.64.nextn.eh_proj.weight"})
    hparams = {**model.hparams, "block_count": 65, "nextn_predict_layers": 1}
    with_head = model.model_copy(update={"hparams": hparams, "tensors": (*model.tensors, *head, nextn)})
    off = plan(with_head, "24000", workload=Workload(n_ctx=4096))
    on = plan(with_head, "24000", workload=Workload(n_ctx=4096, mtp=True))
    assert off.layers[-1].last == on.layers[-1].last == 65
    assert on.devices[0].weights_bytes > off.devices[0].weights_bytes
    assert on.devices[0].kv_bytes > off.devices[0].kv_bytes
    assert on.predicted.tpot_ns > off.predicted.tpot_ns


def test_layers_are_dealt_by_memory() -> None:
    devices = layers_by_ngl(12, 13, [("CUDA0", 24), ("CUDA1", 12)])
    assert devices.count("CUDA0") == 9 and devices.count("CUDA1") == 4
    assert list(devices) == sorted(devices)


def test_one_card_is_among_the_stock_rules_of_two() -> None:
    made = plan(moe(), "8000", on=machine("2x-rtx4060ti-16gb"))
    assert [b.name for b in made.baselines][:3] == ["all-cpu", "one-gpu", "ngl"]
    assert len(made.layers) == 1


def test_layers_of_one_device_stand_together_where_that_costs_nothing() -> None:
    from planner.solver.evaluate import evaluate
    from planner.solver.problem import Capacity, Decision, Edge, Option, Problem, Solution
    from planner.solver.stretches import break_ties

    def option(device: int, host: bool) -> Option:
        return Option(device, 0 if host else device, (str(device),), 10, 0, (0, 0, 0))

    options = tuple(option(d, host) for d in (1, 2) for host in (False, True))
    free = ((0, 1, 1), (1, 0, 1), (1, 1, 0))
    problem = Problem(
        devices=(
            Capacity("CPU", "cpu", 99, -1),
            Capacity("CUDA0", "gpu", 99, -1),
            Capacity("CUDA1", "gpu", 99, -1),
        ),
        decisions=tuple(Decision(f"blk.{n}", ("u",), options, True) for n in range(6)),
        edges=tuple(Edge(n, n + 1, free, ((0,) * 3,) * 3) for n in range(5)),
        pools=(),
        shares=(),
        exclusive=(),
        mixed=(),
        decode_weight=1,
        decode_ns=0,
        max_runs=16,
    )
    mingled = Solution((1, 3, 1, 3, 1, 3))
    found = break_ties(problem, mingled)
    before, after = evaluate(problem, mingled), evaluate(problem, found)
    assert (before.runs, after.runs) == (6, 2)
    assert after.objective_ns <= before.objective_ns
    assert sorted(found.choices) == sorted(mingled.choices)


@pytest.mark.parametrize("name", ["gpt-oss-20b-MXFP4", "gemma-4-26B-A4B-Q4_K_M", "Qwen3.6-35B-A3B-q4_K"])
def test_layers_that_share_their_options_have_those_of_their_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alternating windows, other layers at the ends, recurrent mixers: likeness must see them all."""
    model, profile = real(name), machine()
    curves = {n: tuple((k / 128) ** 0.5 for k in range(129)) for n in range(0, 48, 3)}
    request = Request(budgets_for(profile, parse_budget("8000")), Workload(prompt=700, gen=200))
    known, settings = Known(curves=curves), EngineSettings(slots=True)

    def made() -> Problem:
        return priced(model, profile, request, known=known, settings=settings).problem

    shared = made()
    monkeypatch.setattr(Chooser, "layer", Chooser._layer)
    assert made() == shared
    assert len({id(d.options) for d in shared.decisions}) < len(shared.decisions)
