"""Acceptance by position and n-grams in plans: arithmetic, files of servers, memory, exported limits."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from engines import ROOT
from planning_models import dense, machine, plan, real

from atsplan import main
from planner.check.reprice import reprice, with_step_times
from planner.drafts.length import MOST
from planner.drafts.server_texts import steps_in
from planner.errors import FieldProblem
from planner.machine.budgets import budgets_for, parse_budget
from planner.memory.reserves import Extras
from planner.model.inventory import Inventory, to_text
from planner.passes.make_plan import make_plan
from planner.plan.known import Known
from planner.plan.load_spec import LoadSpec
from planner.plan.plan import Plan, Speculation, from_text
from planner.plan.plan import to_text as plan_text
from planner.plan.request import ExtraModels, Request
from planner.solver.clock import Clock
from planner.workload import Workload
from runtime.tools.llama_server import find_program, serving
from runtime.tools.options import options, stock

LARGE, SMALL = dense([16384] * 6), dense([256])
LOG = (
    "spec common_specu: statistics draft-simple: #calls(b,g,a) = 1 16 16, #gen drafts = 16, "
    "#acc drafts = 13, #gen tokens = 61, #acc tokens = 43, #mean acc len = 3.69, "
    "#acc rate/pos = (0.812, 0.750, 0.625, 0.500), dur(b,g,a) = 0.000, 110.526, 0.005 ms\n"
)


@pytest.mark.parametrize("tokens", range(8))
@pytest.mark.parametrize("counted", [(), (800_000,), (812_500, 750_000, 625_000, 500_000), (0, 0)])
def test_tokens_of_a_step_by_position(counted: tuple[int, ...], tokens: int) -> None:
    each = Speculation(accept_ppm=900_000, accepted_ppm=counted, tokens=tokens, draft_ns=0)
    shares = [Fraction(ppm, 10**6) for ppm in counted[:tokens]]
    while len(shares) < tokens:
        shares.append((shares[-1] if shares else Fraction(1)) * Fraction(9, 10))
    assert Fraction(*each.step) == 1 + sum(shares)


def ngrams(
    accept: float, by_position: Sequence[int] = (), model: Inventory = LARGE, budget: str = "8000"
) -> Plan:
    profile = machine()
    beside = ExtraModels(Extras(ngrams=True), "CUDA0", round(accept * 10**6), tuple(by_position))
    request = Request(budgets_for(profile, parse_budget(budget)), Workload(), extra_models=beside)
    return make_plan(model, profile, request, clock=Clock(20))


def test_ngrams_take_no_memory_and_no_time_of_their_own() -> None:
    made, none = ngrams(0.8), ngrams(0.0)
    assert made.speculation is not None and made.speculation.tokens > 0 and made.speculation.draft_ns == 0
    assert not made.workload.mtp and made.constraints.reserves == ()
    assert none.speculation is not None and none.speculation.tokens == 0
    assert made.predicted.tpot_ns < none.predicted.tpot_ns


@pytest.mark.parametrize("budget", ["8000", "3000", "300"])
def test_the_time_of_a_step_is_that_of_a_plan_with_this_length(budget: str) -> None:
    """With all weights on the GPU, with some, and where no GPU is opened."""
    made, profile = ngrams(0.8, budget=budget), machine()
    assert made.speculation is not None and made.speculation.tokens
    timed = with_step_times(made, LARGE, profile, Known()).speculation
    assert timed is not None and len(timed.step_ns) == MOST + 1
    for tokens in (0, 3):
        each = timed.model_copy(update={"tokens": tokens, "step_ns": ()})
        whole = reprice(made.model_copy(update={"speculation": each}), LARGE, profile, Known()).plan
        accepted, ones = each.step
        assert timed.step_ns[tokens] == whole.predicted.tpot_ns * accepted // ones


def test_ngrams_of_a_recurrent_model_keep_states() -> None:
    model = real("Qwen3.6-27B-q4_K")
    made, one = ngrams(0.9, model=model, budget="22000"), plan(model, "22000")
    assert made.speculation is not None and made.speculation.tokens
    lines = {r.name: r.size_bytes for r in made.constraints.reserves}
    assert lines == {"n-gram roll-back": made.speculation.tokens * sum(d.state_bytes for d in one.devices)}


def test_positions_that_accept_little_are_not_drafted() -> None:
    """The same mean, another shape: what falls to nothing after two tokens is drafted two tokens long."""
    steep = ngrams(0.0, (950_000, 900_000, 10_000))
    assert steep.speculation is not None and steep.speculation.tokens == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [({"accepted_ppm": [1, 2]}, "never rise"), ({"ngrams": True, "draft": "d"}, "not both")],
)
def test_records_that_contradict_themselves(change: dict[str, object], why: str) -> None:
    data = ngrams(0.8).model_dump(mode="json", by_alias=True)
    data["speculation"] = {"accept_ppm": 1, "tokens": 1, "draft_ns": 1, **change}
    with pytest.raises(FieldProblem, match=why):
        from_text(json.dumps(data), "p")


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the large and the small model as inventories, and a server's log."""
    for model, name in ((LARGE, "large"), (SMALL, "small")):
        (tmp_path / f"{name}.inventory.yaml").write_text(to_text(model.model_copy(update={"name": name})))
    (tmp_path / "server.log").write_text(LOG)
    return tmp_path


def solved(files: Path, *words: str | Path) -> tuple[Plan, Path]:
    path = files / "plan.yaml"
    known = (files / "large.inventory.yaml", "--machine", "rtx4090-ddr5", "--budget", "8000")
    found = run("solve", *known, *words, "-o", path)
    assert found.exit_code == 0, found.output
    return from_text(path.read_text(), str(path)), path


def test_a_log_decides_the_length(files: Path) -> None:
    made, path = solved(
        files, "--draft", files / "small.inventory.yaml", "--draft-accept", files / "server.log"
    )
    assert made.speculation is not None and made.speculation.tokens
    assert made.speculation.accepted_ppm == (812_500, 750_000, 625_000, 500_000)
    assert plan_text(from_text(plan_text(made), "p")) == plan_text(made)
    large = files / "large.inventory.yaml"
    assert run("check", path, "--model", large).exit_code == 0
    tokens, ones = made.speculation.step
    step = made.speculation.step_ns[made.speculation.tokens]
    assert step == pytest.approx(made.predicted.tpot_ns * tokens / ones, rel=1e-5)
    assert list(made.speculation.step_ns) == sorted(made.speculation.step_ns)
    wrong = made.speculation.model_copy(update={"step_ns": (1, *made.speculation.step_ns[1:])})
    (files / "wrong.yaml").write_text(plan_text(made.model_copy(update={"speculation": wrong})))
    found = run("check", files / "wrong.yaml", "--model", large)
    assert found.exit_code == 1 and "speculation.step_ns" in found.stdout, found.output
    assert "81.2/75/62.5/50 % (by position)" in run("explain", path, "--model", large).stdout


def test_ngrams_are_exported_with_their_limit(files: Path) -> None:
    made, path = solved(files, "--ngram", "--draft-accept", "0.9,0.8,0.7")
    assert made.speculation is not None and made.speculation.tokens
    line = run("export", path, "--inventory", files / "large.inventory.yaml").stdout
    assert f"--spec-type ngram-map-k --spec-ngram-map-k-size-m {made.speculation.tokens}" in line
    assert "--model-draft" not in line
    _, path = solved(files, "--ngram", "--draft-accept", "0")
    assert "--spec" not in run("export", path, "--inventory", files / "large.inventory.yaml").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ngram",), "n-grams are right as often as a text repeats itself"),
        (
            ("--ngram", "--draft", "small.inventory.yaml", "--draft-accept", "0.5"),
            "one kind of draft at a time",
        ),
        (("--ngram", "--draft-accept", "0.5,0.6"), "never rise"),
        (("--ngram", "--draft-accept", "0.5,x"), "expected a rate"),
        (("--ngram", "--draft-accept", "large.inventory.yaml"), "tells nothing of drafted tokens"),
    ],
)
def test_what_is_refused(files: Path, words: tuple[str, ...], said: str) -> None:
    given = [str(files / word) if word.endswith(".yaml") else word for word in words]
    found = run("solve", files / "large.inventory.yaml", "--machine", "rtx4090-ddr5", *given)
    assert found.exit_code == 2 and said in found.stderr, found.output


SPEC = LoadSpec((), (), 0, (), Workload(n_ctx=256, n_batch=64, n_ubatch=64))


def test_drafts_are_never_exported_without_a_limit() -> None:
    placed = stock(SPEC, 4)
    assert not any(option.startswith("--spec") for option, _ in options(placed, "m"))
    assert dict(options(replace(placed, draft="d.gguf"), "m"))["--spec-draft-n-max"] == "3"
    own = replace(placed, spec=replace(SPEC, workload=SPEC.workload.model_copy(update={"mtp": True})))
    assert dict(options(own, "m"))["--spec-draft-n-max"] == "3"
    for each in (own, replace(placed, draft="d.gguf"), replace(placed, ngrams=True, draft_tokens=2)):
        told = options(replace(each, drafts=False), "m")
        assert not any("draft" in option or "spec" in option for option, _ in told)


def test_the_server_keeps_the_limit_of_ngrams(computing_server: Path) -> None:
    model = str(ROOT / "tests" / "data" / "tiny-moe.gguf")
    placed = replace(stock(SPEC, 4), ngrams=True, draft_tokens=3)
    words = [word for pair in options(placed, model) for word in pair if word]
    more = ["-t", "1", "-lv", "5"]
    log: list[str] = []
    with serving(find_program(str(computing_server)), [*words, *more], on_line=log.append) as server:
        text = "the set the server and the server an exception of the server and the set the server"
        asked = {"prompt": text, "n_predict": 100, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(server.url + "/completion", json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["timings"]["draft_n"] > 0
    steps = [step for one in steps_in("\n".join(log)).values() for step in one]
    assert steps and max(step.drafted for step in steps) == 3
