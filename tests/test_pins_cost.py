"""A pin or a limit never makes a plan faster, and stock rules are judged under both."""

from __future__ import annotations

import json
from random import Random

import pytest
from click.testing import CliRunner
from planning_models import INPUTS, dense, machine, moe, plan, real

from atsplan import main
from planner.check.explain import sentences
from planner.check.gains import best_rule, gains, gains_text
from planner.check.recorded_rules import objective_ns, rule_plan, usable_rules
from planner.check.reprice import edited
from planner.errors import AnswerIsNo, OptionProblem
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.plan.known import Known
from planner.plan.plan import Plan
from planner.plan.request import Pin
from planner.plan.stock_rule import NOT_KEPT
from planner.site import ON_CPU, Site
from planner.workload import Workload

CARD = "rtx4060-8gb-ddr5"
PATTERNS = ("blk.0.*", "blk.1.experts", "*.experts", "*.ffn", "blk.[23].*", "output", "*attn_k.weight")


def random_case(seed: int) -> tuple[Inventory, dict[str, object], dict[str, object]]:
    """A small model, what is asked of it, and a pin or a limit beside it."""
    random = Random(seed)
    layers = random.randrange(3, 7)
    inner = [random.choice((2048, 6144, 12288)) for _ in range(layers)]
    model = moe(layers, dense_first=random.choice((0, 1))) if seed % 3 else dense(inner)
    use = Workload(n_ctx=2048, prompt=random.choice((16, 512)), gen=random.choice((1, 64)), depth=256)
    budget = random.choice(("600", "900", "1400", "2500"))
    asked: dict[str, object] = {"budget": budget, "workload": use, "page": True}
    limits: list[dict[str, object]] = [{"contiguous": True}]
    limits += [{"pins": (Pin(p, random.choice(("gpu", "cpu"))),)} for p in random.sample(PATTERNS, 4)]
    return model, asked, random.choice(limits)


def made(model: Inventory, asked: dict[str, object], **more: object) -> Plan | None:
    """The plan, or nothing where it does not fit or no such part is there."""
    try:
        return plan(model, on=machine(CARD), **asked, **more)  # type: ignore[arg-type]
    except (AnswerIsNo, OptionProblem):
        return None


@pytest.mark.parametrize("seed", [2, 4, 5, 9])
def test_nothing_that_is_asked_makes_a_plan_faster(seed: int) -> None:
    model, asked, more = random_case(seed)
    limited = made(model, asked, **more)
    assert limited is not None, more
    free = made(model, asked)
    assert free is not None and limited.predicted.objective_ns >= free.predicted.objective_ns
    for each in (free, limited):
        best = best_rule(each)
        assert best is None or objective_ns(each, best) >= each.predicted.objective_ns


@pytest.fixture(scope="module")
def pinned() -> Plan:
    """A real model with one layer pinned to a GPU: the rules alone keep its experts on the CPU."""
    return plan(real("gpt-oss-20b-MXFP4"), "7000", on=machine(CARD), pins=(Pin("blk.0.*", "gpu"),))


def test_a_pin_never_improves_a_real_plan(pinned: Plan) -> None:
    free = plan(real("gpt-oss-20b-MXFP4"), "7000", on=machine(CARD))
    assert free.predicted.objective_ns <= pinned.predicted.objective_ns
    assert free.predicted.prefill_ns <= pinned.predicted.prefill_ns


def test_stock_rules_keep_the_pins_too(pinned: Plan) -> None:
    rules = {rule.name: rule for rule in pinned.baselines}
    assert rules["n-cpu-moe"].setting == "-ngl 25 --n-cpu-moe 13 -ot (the pins)"
    assert rules["all-cpu"].setting == NOT_KEPT and not rules["all-cpu"].feasible
    assert objective_ns(pinned, rules["n-cpu-moe"]) >= pinned.predicted.objective_ns
    told = list(sentences(pinned))
    assert f"all-cpu {NOT_KEPT}." in told


def test_a_recorded_rule_with_pins_costs_what_is_recorded(pinned: Plan) -> None:
    model, profile = real("gpt-oss-20b-MXFP4"), machine(CARD)
    units = structure_of(model).units
    rule = usable_rules(pinned, units)[0]
    assert rule.setting.endswith("-ot (the pins)")
    assert rule not in usable_rules(pinned)  # without the model nothing tells what the pins name
    again = edited(rule_plan(pinned, rule, units), model, profile, Known())
    sites = {p.unit: p.site for p in again.units}
    assert sites["blk.0.experts"] == Site.on("CUDA0") and sites["blk.1.experts"] == ON_CPU
    assert (again.predicted.tpot_ns, again.predicted.prefill_ns) == (rule.tpot_ns, rule.prefill_ns)


def test_what_flags_bring_and_what_the_placement_brings_are_told_apart(pinned: Plan) -> None:
    found = gains(pinned)
    assert found is not None and found.flags == ("--no-mmap",) and pinned.untuned is not None
    best = best_rule(pinned)
    assert best is not None and found.by_flags == objective_ns(pinned, pinned.untuned) / objective_ns(
        pinned, best
    )
    assert found.by_flags > 1 and found.by_placement > 1
    whole = objective_ns(pinned, pinned.untuned) / pinned.predicted.objective_ns
    assert found.by_flags * found.by_placement == pytest.approx(whole)
    assert gains_text(pinned) in list(sentences(pinned))
    assert "by --no-mmap, which it could be given too" in gains_text(pinned)


def test_a_plan_without_flags_has_nothing_to_tell_apart() -> None:
    whole = plan(real("Qwen3-30B-A3B-Q4_K_M"), "24000")
    assert whole.untuned is None and gains(whole) is None and gains_text(whole) == ""


def test_a_plan_that_gains_nothing_by_flags_or_placement_does_not_say_so_in_figures() -> None:
    """As a tenth of a thousandth: who reads "1.000 times" asks what that is to tell."""
    found = plan(moe(16), "2500")
    assert found.untuned is not None and "times as fast" in gains_text(found)
    same = found.untuned.model_copy(
        update={"tpot_ns": found.predicted.tpot_ns + 9, "prefill_ns": found.predicted.prefill_ns}
    )
    rules = tuple(
        rule.model_copy(update={"tpot_ns": same.tpot_ns, "prefill_ns": same.prefill_ns})
        for rule in found.baselines
    )
    alike = found.model_copy(update={"untuned": same, "baselines": rules})
    told = gains(alike)
    assert told is not None and told.flags and gains_text(alike) == ""


def test_more_memory_that_changes_nothing_is_said_so() -> None:
    found = plan(moe(16), "2500")
    told = [line for line in sentences(found, found) if line.startswith("1 GiB more")]
    assert told == ["1 GiB more on CUDA0 would change neither a token nor the prompt."]
    slower = found.predicted.model_copy(update={"prefill_ns": found.predicted.prefill_ns + 2_000_000})
    told = [
        line
        for line in sentences(found, found.model_copy(update={"predicted": slower}))
        if line.startswith("1 GiB more")
    ]
    assert told == ["1 GiB more on CUDA0 would add 2.00 ms to the prompt."]


def test_a_sweep_never_gains_less_than_nothing() -> None:
    words = [str(INPUTS / "Qwen3.6-35B-A3B-q4_K.inventory.yaml"), "--machine", CARD]
    done = CliRunner().invoke(main, ["sweep", *words, "--budgets", "2000:2000:1", "--json"])
    assert done.exit_code == 0, done.output
    assert all(point["gain_ppm"] >= 1_000_000 for point in json.loads(done.stdout))


def test_a_nearly_full_card_is_no_reason_to_copy_prompts() -> None:
    """Its doubt is of both ways: where it was of one, a plan was 1.2 times slower with 3000 MiB more."""
    model, server = real("Qwen3-Next-80B-A3B-Q4_K_M"), machine("rtx3060-12gb-epyc")
    less, more = (
        plan(model, budget, on=server, workload=Workload(n_ctx=8192)) for budget in ("9000", "12000")
    )
    assert more.predicted.objective_ns < less.predicted.objective_ns
    assert not less.op_offload and not more.op_offload


def test_a_faster_way_that_is_doubted_is_said() -> None:
    made = plan(real("gpt-oss-120b-MXFP4"), "7000", on=machine("rtx4060-8gb-epyc"))
    (told,) = [note for note in made.notes if "--no-op-offload" in note]
    assert made.op_offload and "times as fast; not chosen, as their" in told
    quick = plan(real("Qwen3-30B-A3B-Q4_K_M"), "24000")  # nothing to copy, nothing to doubt
    assert not any("--no-op-offload" in note for note in quick.notes)
