"""The draft length as a decision: exact arithmetic, measured verify batches, memory, what is told of it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from planning_models import dense, machine, moe, plan, real, timed, with_nextn

from atsplan import main
from planner.check.check import CheckOptions, Inputs, check_plan
from planner.check.findings import Severity
from planner.cost.unit_time import Prices
from planner.machine.budgets import budgets_for, parse_budget
from planner.machine.profile import Profile
from planner.memory.reserves import Extras
from planner.model.inventory import Inventory, to_text
from planner.model.structure import structure_of
from planner.model.units import Kind, units_of
from planner.passes.make_plan import make_plan
from planner.passes.settings_to_try import LONGEST_DRAFT, PUBLISHED_PPM, draft_ns
from planner.plan.engine_settings import EngineSettings
from planner.plan.load_spec import LoadSpec
from planner.plan.plan import Plan, Speculation, from_text
from planner.plan.plan import to_text as plan_text
from planner.plan.request import ExtraModels, Request
from planner.solver.clock import Clock
from planner.workload import Workload
from runtime.tools.llama_server import find_program, serving
from runtime.tools.options import options, stock

PLANS = Path(__file__).resolve().parent.parent / "plans"
INPUTS = PLANS / "inputs"
LARGE, SMALL = dense([16384] * 6), dense([256])


def drafted(
    accept: float,
    *,
    model: Inventory = LARGE,
    draft: Inventory | None = SMALL,
    budget: str = "8000",
    on: Profile | None = None,
    workload: Workload | None = None,
) -> Plan:
    profile = on or machine()
    work = (workload or Workload()).model_copy(update={"mtp": draft is None})
    beside = ExtraModels(Extras(draft=draft), "CUDA0", round(accept * 10**6))
    request = Request(budgets_for(profile, parse_budget(budget)), work, extra_models=beside)
    return make_plan(model, profile, request, clock=Clock(20))


def chosen(made: Plan) -> Speculation:
    assert made.speculation is not None
    return made.speculation


def lengths(made: Plan) -> Mapping[int, float]:
    """Milliseconds of a token by draft length, from the plan's note."""
    (note,) = [n for n in made.notes if n.startswith("drafted tokens a step")]
    parts = (part.split(": ") for part in note.partition(": ")[2].split(", "))
    return {int(n): float(ms.removesuffix(" ms")) for n, ms in parts}


@pytest.mark.parametrize(("accept", "tokens"), [(0, 5), (500_000, 3), (700_000, 7), (1_000_000, 4), (1, 0)])
def test_tokens_of_a_step(accept: int, tokens: int) -> None:
    each = Speculation(accept_ppm=accept, tokens=tokens, draft_ns=0)
    wanted = sum((Fraction(accept, 10**6) ** i for i in range(tokens + 1)), Fraction(0))
    assert Fraction(*each.step) == wanted
    assert abs(each.per_token(10**9) - 10**9 / wanted) <= Fraction(1, 2)


def test_the_time_of_an_accepted_token_is_that_of_its_step() -> None:
    """A step of one sequence that checks 3 tokens is one of 3 sequences, plus the drafts, over its yield."""
    work = Workload(n_ctx=4096)
    profile = machine()
    ns = draft_ns(SMALL, profile, work, "CUDA0")
    settings = EngineSettings(speculation=Speculation(draft="d", accept_ppm=600_000, tokens=2, draft_ns=ns))
    step = plan(LARGE, "8000", workload=work.model_copy(update={"n_seq": 3})).predicted.tpot_ns
    token = plan(LARGE, "8000", workload=work, settings=settings).predicted.tpot_ns
    assert token == pytest.approx((step + 2 * ns) / 1.96, rel=1e-3)


def test_never_right_drafts_nothing_and_always_right_as_much_as_allowed() -> None:
    assert chosen(drafted(0.0)).tokens == 0
    assert chosen(drafted(1.0)).tokens == LONGEST_DRAFT
    few, many = chosen(drafted(0.5)).tokens, chosen(drafted(0.9)).tokens
    assert 0 < few < many <= LONGEST_DRAFT


@pytest.mark.parametrize("accept", [0.3, 0.6, 0.8])
def test_no_other_length_is_faster(accept: float) -> None:
    made = drafted(accept)
    found = lengths(made)
    assert set(found) == set(range(LONGEST_DRAFT + 1))
    assert found[chosen(made).tokens] <= min(found.values()) * 1.011  # to draft nothing wins within 1 %
    assert found[chosen(made).tokens] == pytest.approx(made.predicted.tpot_ns / 1e6, abs=0.006)


def test_without_the_question_a_plan_says_nothing_of_it() -> None:
    assert "speculation" not in plan_text(plan(LARGE, "8000"))


def test_experts_on_the_host_make_checking_dear() -> None:
    """A batch touches more experts: what pays where all is in GPU memory does not on the CPU."""
    scarce = drafted(0.7, model=moe(), budget="900")
    roomy = drafted(0.7, model=moe(), budget="8000")
    longest = LONGEST_DRAFT
    assert lengths(scarce)[longest] - lengths(scarce)[0] > 2 * (lengths(roomy)[longest] - lengths(roomy)[0])


def measured(batch: int, factor: int) -> Profile:
    """The machine with the matrices of LARGE measured at batches 1 and `batch`."""
    profile = machine()
    prices = Prices(structure_of(LARGE), profile, Workload())
    unit = next(u for u in units_of(LARGE).units if u.kind is Kind.FFN)
    ns = prices.on(unit, "CUDA0").decode_ns // 3
    cases = [
        timed("MUL_MAT", "q4_K", shape, ns * times, batch=b)
        for shape in ((2048, 16384), (16384, 2048))
        for b, times in ((1, 1), (batch, factor))
    ]
    return profile.model_copy(update={"timings": tuple(cases)})


def test_measured_verify_batches_decide() -> None:
    assert chosen(drafted(0.7, on=measured(8, 1))).tokens > 0
    assert chosen(drafted(0.7, on=measured(8, 30))).tokens == 0


def test_a_nextn_block_drafts_by_itself() -> None:
    made = drafted(0.8, model=with_nextn(), draft=None)
    assert chosen(made).tokens > 0 and chosen(made).draft == "" and made.workload.mtp
    block = next(p for p in made.units if p.unit.endswith(".nextn"))
    one = plan(with_nextn(), "8000", workload=Workload(mtp=True))
    alone = next(p for p in one.units if p.unit.endswith(".nextn")).time_ns
    assert block.time_ns == pytest.approx(chosen(made).per_token(alone * chosen(made).tokens), rel=0.01)
    idle = drafted(0.0, model=with_nextn(), draft=None)
    assert chosen(idle).tokens == 0 and not idle.workload.mtp  # and its memory is the model's
    assert idle.devices[0].weights_bytes < made.devices[0].weights_bytes


def test_the_draft_takes_memory_only_where_it_drafts() -> None:
    names = {r.name for r in drafted(0.9).constraints.reserves}
    assert {"draft", "draft KV", "draft compute"} <= names
    assert drafted(0.0).constraints.reserves == ()


def test_a_recurrent_model_keeps_states_to_take_back() -> None:
    made = drafted(0.9, model=real("Qwen3.6-27B-q4_K"), budget="22000")
    lines = {r.name: r.size_bytes for r in made.constraints.reserves}
    one = plan(real("Qwen3.6-27B-q4_K"), "22000")
    assert lines["draft roll-back"] == chosen(made).tokens * sum(d.state_bytes for d in one.devices)


def test_a_draft_as_large_as_the_model_is_left_out() -> None:
    made = drafted(0.9, budget="900", draft=dense([16384] * 6))
    assert chosen(made).tokens == 0
    assert not any(r.device == "CUDA0" for r in made.constraints.reserves)


def findings(made: Plan) -> list[str]:
    inputs, text = Inputs(LARGE, machine()), plan_text(made)
    found = check_plan(made, text, "p", inputs, CheckOptions())
    return [f"{f.rule}: {f.message}" for f in found if f.severity is not Severity.NOTE]


def test_check_derives_the_times_again() -> None:
    made = from_text(plan_text(drafted(0.7)), "p")
    assert findings(made) == []
    for change in ({"accept_ppm": 800_000}, {"tokens": chosen(made).tokens + 1}, {"draft_ns": 1}):
        other = made.model_copy(update={"speculation": chosen(made).model_copy(update=change)})
        assert any("predicted.tpot_ns" in text for text in findings(other)), change


# On the command line.


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """The large and the small model as inventories."""
    for model, name in ((LARGE, "large"), (SMALL, "small")):
        (tmp_path / f"{name}.inventory.yaml").write_text(to_text(model.model_copy(update={"name": name})))
    return tmp_path / "large.inventory.yaml", tmp_path / "small.inventory.yaml"


def test_solved_explained_and_exported(files: tuple[Path, Path], tmp_path: Path) -> None:
    large, small = files
    path = tmp_path / "plan.yaml"
    words = (large, "--machine", "rtx4090-ddr5", "--budget", "8000", "--draft", small)
    found = run("solve", *words, "--draft-accept", "auto", "-o", path)
    assert found.exit_code == 0 and "drafted tokens a step" in found.stderr, found.output
    made = from_text(path.read_text(), str(path))
    tokens = chosen(made).tokens
    assert chosen(made).accept_ppm == PUBLISHED_PPM and chosen(made).draft == "small" and tokens > 0
    told = run("explain", path, "--model", large).stdout
    assert f"small drafts {tokens} tokens a step" in told and "goes to the draft model" in told
    line = run("export", path, "--inventory", large).stdout
    assert "--model-draft small.gguf" in line and f"--spec-draft-n-max {tokens}" in line
    assert "--spec-type draft-simple" in line and "--spec-draft-device CUDA0" in line
    assert run("check", path, "--model", large).exit_code == 0


def test_the_table_of_the_findings_is_what_plans_say() -> None:
    """Two are solved again; that of the NextN block is in git."""
    table = " ".join((PLANS.parent / "docs" / "findings-solver.md").read_text(encoding="utf-8").split())
    draft = INPUTS / "Qwen3-4B-Instruct-2507-q4_K.inventory.yaml"
    made = [from_text((PLANS / "GLM-4.5-q4_K+mtp--rtx4090-epyc.yaml").read_text(), "plan")]
    for model, on in (("Llama-3.1-70B-Q4_K_M", "ddr5"), ("Qwen3-235B-A22B-UD-Q4_K_S", "epyc")):
        words = ("--machine", f"rtx4090-{on}", "--budget", "21500", "-c", "8192", "--draft", draft)
        found = run("solve", INPUTS / f"{model}.inventory.yaml", *words, "--draft-accept", "0.7", "--json")
        made.append(Plan.model_validate_json(found.stdout))
    nextn, dense_70b, moe_235b = (
        (chosen(plan).tokens, lengths(plan), plan.predicted.tpot_ns / 1e6) for plan in made
    )
    assert f"RTX 4090, DDR5 | {dense_70b[0]} | {dense_70b[1][0]:.0f}, {dense_70b[2]:.0f} |" in table
    assert f"RTX 4090, Epyc | {moe_235b[0]} | {moe_235b[1][0]:.1f}, {moe_235b[2]:.1f} |" in table
    assert f"RTX 4090, Epyc | {nextn[0]} | {nextn[1][0]:.1f}, {nextn[2]:.1f} |" in table


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--draft-accept", "0.7"), "needs --draft, --mtp or --ngram"),
        (("--draft", "small", "--draft-accept", "1.5"), "expected a rate"),
        (("--draft", "small", "--draft-accept", "-0.1"), "expected a rate"),
        (("--draft", "small", "--draft-accept", "nan"), "expected a rate"),
        (("--draft", "small", "--draft-accept", "70%"), "expected a rate"),
    ],
)
def test_rates_that_are_none(files: tuple[Path, Path], words: tuple[str, ...], said: str) -> None:
    given = [str(files[1]) if word == "small" else word for word in words]
    found = run("solve", files[0], "--machine", "rtx4090-ddr5", "--budget", "8000", *given)
    assert found.exit_code == 2 and said in found.stderr, found.output


def test_the_server_drafts_as_planned(computing_server: Path, dense_model: Path) -> None:
    """A model that drafts for itself is always right: the server must yield drafts + 1 tokens a step."""
    work = Workload(n_ctx=512, n_batch=64, n_ubatch=64)
    placed = replace(
        stock(LoadSpec((), (), 0, (), work), 4), draft=str(dense_model), draft_device="CPU", draft_tokens=4
    )
    words = [word for pair in options(placed, str(dense_model)) for word in pair if word]
    log: list[str] = []
    program = find_program(str(computing_server))
    with serving(program, words, on_line=log.append, timeout_s=120) as server:
        _complete(server.url)
    told = [line for line in log if "draft acceptance" in line]
    assert told and "= 1.0000" in told[0] and "mean len =  5.00" in told[0]


def _complete(url: str) -> None:
    data = json.dumps({"prompt": [5, 6, 7, 8], "n_predict": 21, "temperature": 0}).encode()
    request = urllib.request.Request(url + "/completion", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: Any = json.load(answer)
            assert found
    except urllib.error.HTTPError as problem:  # random weights speak no text; the tokens were computed
        assert problem.code == 500
