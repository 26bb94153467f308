"""Measured times of a plan: what is left out of them, what they change, and when another plan is proposed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from planning_models import machine, moe, plan

from atsplan import main
from planner.check.reprice import reprice
from planner.constants import PPM
from planner.cost.unit_time import calibration_for
from planner.errors import FileProblem
from planner.learn.readers import samples_in
from planner.learn.refine import GAIN_PPM, Refined, Verdict, refine
from planner.learn.samples import Dropped, Kind, Sample, cleaned
from planner.learn.watch import APART, Watch
from planner.machine.profile import Profile, from_text, to_text
from planner.model.inventory import to_text as inventory_text
from planner.plan.known import Known
from planner.plan.plan import Plan
from planner.plan.plan import from_text as plan_from
from planner.plan.plan import to_text as plan_text

MODEL = moe()


@pytest.fixture(scope="module")
def made() -> Plan:
    """Experts of most layers on the CPU."""
    return plan(MODEL, "900")


def scaled(**factors: float) -> Profile:
    """The machine as it really is: some devices slower than the profile says."""
    profile = machine()
    real = calibration_for(profile, "").model_copy(
        update={
            "model": MODEL.table_digest(),
            "scale_ppm": {device: round(factor * PPM) for device, factor in factors.items()},
        }
    )
    return profile.model_copy(update={"calibrations": (*profile.calibrations, real)})


def measured(made: Plan, on: Profile, *, percent: int = 1, seed: int = 1) -> list[Sample]:
    """Ten tokens' times and four prompts' of the plan on that machine, each within some percent."""
    real, rng = reprice(made, MODEL, on, Known()).plan.predicted, random.Random(seed)

    def near(ns: int) -> int:
        return ns * rng.randint(1000 - 10 * percent, 1000 + 10 * percent) // 1000

    work = made.workload
    tokens = [Sample(Kind.TOKEN, near(real.tpot_ns), 100, work.depth) for _ in range(10)]
    return [*tokens, *(Sample(Kind.PROMPT, near(real.prefill_ns), work.prompt) for _ in range(4))]


def refined(made: Plan, samples: list[Sample], on: Profile | None = None) -> Refined:
    return refine(made, MODEL, on or machine(), Known(), samples)


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1])
def test_small_deviations_touch_nothing(made: Plan, factor: float) -> None:
    found = refined(made, measured(made, scaled(CPU=factor)))
    assert found.verdict is Verdict.AS_PREDICTED
    assert found.calibrated is None and found.proposed is None and found.plan is None


def test_the_device_at_fault_is_found_and_the_plan_kept_where_none_is_better(made: Plan) -> None:
    found = refined(made, measured(made, scaled(CPU=1.6)))
    assert found.verdict is Verdict.KEPT and found.gain_ppm < GAIN_PPM and found.calibrated
    factors = found.calibrated.factors
    assert factors["CPU"] == pytest.approx(1.6e6, rel=0.05)
    assert factors["CUDA0"] == pytest.approx(1e6, rel=0.10)
    token = found.calibrated.after.token_ns
    assert found.seen.token and token == pytest.approx(found.seen.token.ns, rel=0.03)


def test_prompts_are_corrected_apart_from_tokens() -> None:
    """What large products take is no matter of small ones: neither scale moves by the other's measurement."""
    whole = plan(MODEL, "8000")
    (*others, own) = scaled(CPU=1.0).calibrations
    slow = own.model_copy(update={"prompt_scale_ppm": {"CUDA0": 1_500_000}})
    found = refined(whole, measured(whole, machine().model_copy(update={"calibrations": (*others, slow)})))
    assert found.calibrated and found.seen.prompt
    factors, before, after = found.calibrated.factors, found.calibrated.before, found.calibrated.after
    assert before.prompt_ns == pytest.approx(found.seen.prompt.ns / 1.5, rel=0.05)
    assert after.prompt_ns == pytest.approx(found.seen.prompt.ns, rel=0.03)
    assert after.token_ns == pytest.approx(before.token_ns, rel=0.03)
    assert factors["CUDA0"] == pytest.approx(1e6, rel=0.03)
    assert factors["CUDA0 prompts"] == pytest.approx(1.5e6, rel=0.05)
    again = refined(whole, measured(whole, scaled(CPU=1.0)), found.calibrated.profile)
    assert again.calibrated and again.calibrated.after.prompt_ns == pytest.approx(before.prompt_ns, rel=0.03)


def test_another_plan_is_proposed_for_a_gain_and_not_twice(made: Plan) -> None:
    real = scaled(CPU=0.2)
    found = refined(made, measured(made, real))
    assert found.verdict is Verdict.BETTER and found.gain_ppm >= GAIN_PPM
    assert found.proposed and found.calibrated and found.changes.moves and found.plan
    # It is faster on the machine as it really is, not only as it was calibrated.
    there = [reprice(p, MODEL, real, Known()).plan.predicted.objective_ns for p in (made, found.proposed)]
    assert there[1] < there[0] * (PPM - GAIN_PPM) // PPM
    # Measured again with what was learnt, the proposal is as predicted: plans do not swing.
    again = refined(found.proposed, measured(found.proposed, real, seed=2), found.calibrated.profile)
    assert again.verdict is Verdict.AS_PREDICTED


POISON: Mapping[str, tuple[Mapping[str, object], Dropped]] = {
    "contention": ({"contended": True}, Dropped.CONTENDED),
    "warm-up": ({"warm_up": True}, Dropped.WARM_UP),
    "the first pass after a change": ({"after_change": True}, Dropped.AFTER_CHANGE),
    "other sequences": ({"lanes": 4}, Dropped.OTHER_USE),
}


@pytest.mark.parametrize("kind", POISON)
def test_marked_poison_never_reaches_the_calibration(made: Plan, kind: str) -> None:
    """However much of it there is: three clean samples among forty bad ones decide."""
    marks, why = POISON[kind]
    clean = measured(made, machine())
    bad = [replace(s, ns=s.ns * 3, **marks) for s in clean * 3]  # type: ignore[arg-type]
    found = refined(made, [*bad, *clean[-7:]])
    assert found.verdict is Verdict.AS_PREDICTED and found.calibrated is None
    assert found.seen.dropped[why] == len(bad)
    alone = refined(made, bad)
    assert alone.verdict is Verdict.UNKNOWN and alone.calibrated is None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [2, 10, 1000])
def test_unmarked_poison_is_an_outlier(made: Plan, factor: int, seed: int) -> None:
    """Four of ten tokens disturbed: the other six decide, to the nanosecond of their own middle."""
    samples = measured(made, machine(), seed=seed)
    clean = cleaned(samples[4:])
    poisoned = cleaned([*(replace(s, ns=s.ns * factor) for s in samples[:4]), *samples[4:]])
    assert poisoned.token == clean.token and poisoned.prompt == clean.prompt
    assert poisoned.dropped[Dropped.OUTLIER] == 4
    assert refined(made, samples).verdict is Verdict.AS_PREDICTED


def test_times_of_two_machines_are_of_none(made: Plan) -> None:
    samples = measured(made, machine())[:10]
    wild = [replace(s, ns=s.ns * (1 + n % 3)) for n, s in enumerate(samples)]
    seen = cleaned(wild)
    assert seen.token is None and Kind.TOKEN in seen.noisy
    assert refined(made, wild).verdict is Verdict.UNKNOWN


def test_too_few_say_nothing_and_nonsense_is_left_out() -> None:
    assert cleaned([Sample(Kind.TOKEN, 100, 10)] * 2).token is None
    odd = [Sample(Kind.TOKEN, 0, 10), Sample(Kind.TOKEN, 5, 0), Sample(Kind.PROMPT, -1, 9)]
    assert cleaned(odd).dropped == {Dropped.EMPTY: 3}
    lengths = [Sample(Kind.PROMPT, 100 * n, n) for n in (500, 510, 520, 2000)]
    seen = cleaned(lengths)
    assert seen.prompt and seen.prompt.tokens in (500, 510, 520) and seen.dropped == {Dropped.OTHER_USE: 1}


# The library function that services call.


def fed(watch: Watch, ns: int, times: int) -> None:
    for _ in range(times):
        watch.saw(Sample(Kind.TOKEN, ns, 50))


def test_a_watch_decides_once_for_a_deviation_and_seldom() -> None:
    watch = Watch(1000, 0)
    fed(watch, 1300, 9)
    assert not watch.due(APART * 1000 - 1)  # too early, whatever was seen
    assert watch.due(APART * 1000)
    fed(watch, 1300, 40)
    assert not any(watch.due(now) for now in range(10_000, 200_000, 5000))  # the same deviation
    fed(watch, 1010, 64)
    assert not watch.due(300_000)
    fed(watch, 1300, 64)
    assert watch.due(310_000)  # it had settled and came back


def test_a_watch_forgets_at_a_change_and_does_not_count_its_first_pass() -> None:
    watch = Watch(1000, 0)
    fed(watch, 1300, 30)
    watch.changed(1300, 50_000)
    fed(watch, 90_000, 1)
    fed(watch, 1300, 8)
    seen = watch.seen()
    assert seen.token and seen.token.ns == 1300 and seen.dropped == {Dropped.AFTER_CHANGE: 1}
    assert not watch.due(60_000)
    assert len(watch.samples) == 9


def test_a_watch_needs_enough_and_passes_the_noise_by() -> None:
    watch = Watch(1000, 0)
    fed(watch, 1300, 8)  # the first of them is the process's first
    assert not watch.due(99_000)
    fed(watch, 1300, 1)
    assert watch.due(99_000)
    busy = Watch(1000, 0)
    for _ in range(60):
        busy.saw(Sample(Kind.TOKEN, 2000, 50, contended=True))
    assert not busy.due(99_000)


# Files.

SERVER_LOG = """\
0.00.578.449 I slot launch_slot_: id  1 | task 0 | processing task, is_child = 0
0.00.979.859 I slot print_timing: id  1 | task 0 | prompt eval time =      33.78 ms /    64 tokens (    0.81 ms per token,  1233.49 tokens per second)
0.00.988.497 I slot print_timing: id  1 | task 0 |        eval time =     387.56 ms /   120 tokens (    3.23 ms per token,   309.63 tokens per second)
0.00.988.643 I slot      release: id  1 | task 0 | stop processing: n_tokens = 136, truncated = 0
0.01.025.299 I slot launch_slot_: id  0 | task 34 | processing task, is_child = 0
0.01.126.226 I slot print_timing: id  0 | task 34 | prompt eval time =      20.00 ms /    80 tokens (    0.35 ms per token,  2829.85 tokens per second)
0.01.132.516 I slot print_timing: id  0 | task 34 |        eval time =      90.00 ms /    60 tokens (    1.63 ms per token,   614.26 tokens per second)
0.01.136.454 I slot      release: id  0 | task 34 | stop processing: n_tokens = 67, truncated = 0
0.02.000.000 I slot launch_slot_: id  0 | task 60 | processing task, is_child = 0
0.02.000.001 I slot launch_slot_: id  1 | task 61 | processing task, is_child = 0
0.02.132.516 I slot print_timing: id  0 | task 60 |        eval time =     180.00 ms /    60 tokens (    1.63 ms per token,   614.26 tokens per second)
0.02.136.454 I slot      release: id  0 | task 60 | stop processing: n_tokens = 67, truncated = 0
"""  # noqa: E501 - lines of llama-server b10068


def test_requests_of_a_server_log() -> None:
    first, cold, prompt, token, both = samples_in(SERVER_LOG, "log")
    assert first.warm_up and cold.warm_up
    assert prompt == Sample(Kind.PROMPT, 20_000_000, 80)
    assert token == Sample(Kind.TOKEN, 1_500_000, 60, 80 + 30)
    assert both.lanes == 2 and both.contended  # one came while the other ran


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            json.dumps({"prompt_tokens": 8, "tokens": [1] * 10, "prefill_ns": 500, "tpot_ns": 40.4}),
            [Sample(Kind.PROMPT, 500, 8, warm_up=True), Sample(Kind.TOKEN, 40, 10, 13)],
        ),
        (
            json.dumps(
                [
                    {"n_prompt": 512, "n_gen": 0, "samples_ns": [900, 910]},
                    {"n_prompt": 0, "n_gen": 10, "n_depth": 100, "avg_ns": 5000},
                    {"n_prompt": 512, "n_gen": 10, "avg_ns": 1},
                ]
            ),
            [
                Sample(Kind.PROMPT, 900, 512),
                Sample(Kind.PROMPT, 910, 512),
                Sample(Kind.TOKEN, 500, 10, 105),
            ],
        ),
        (
            "llamacpp:tokens_predicted_total 60\nllamacpp:tokens_predicted_seconds_total 0.6\n",
            [Sample(Kind.TOKEN, 10_000_000, 60)],
        ),
        (
            "llamacpp:tokens_predicted_total 60\nllamacpp:tokens_predicted_seconds_total 0.6\n"
            "llamacpp:n_busy_slots_per_decode 2.5\n",
            [Sample(Kind.TOKEN, 10_000_000, 60, contended=True)],
        ),
    ],
    ids=["run", "llama-bench", "metrics", "busy metrics"],
)
def test_other_files(text: str, wanted: list[Sample]) -> None:
    assert list(samples_in(text, "f")) == wanted


OFTEN = {"median": 10**8, "samples": 1 << 60}
D = "9" * 5000  # more digits than Python reads as a number


@pytest.mark.parametrize(
    "text",
    [
        SERVER_LOG.replace("20.00 ms", "1.2.3 ms").replace("90.00 ms", ". ms"),
        SERVER_LOG.replace("20.00 ms", f"{D} ms").replace("90.00 ms", f"{D} ms"),
        SERVER_LOG.replace("80 tokens", f"{D} tokens").replace("60 tokens", f"{D} tokens"),
        SERVER_LOG.replace("task 34", f"task {D}"),
        SERVER_LOG.replace("id  0", f"id  {D}"),
        "llamacpp:tokens_predicted_total 60\nllamacpp:tokens_predicted_seconds_total 0.6\n"
        "llamacpp:n_busy_slots_per_decode 1.2.3\n",
        "llamacpp:tokens_predicted_total 1\nllamacpp:tokens_predicted_seconds_total 1e308\n",
        json.dumps({"prompt_tokens": 1 << 70, "tokens": [1] * 10, "prefill_ns": 500, "tpot_ns": 1e300}),
        json.dumps({"contenders": [{"name": "plan", "prefill_ns": {}, "decode_ns": {"512": OFTEN}}]}),
    ],
    ids=["dots", "times", "tokens", "task", "slot", "metrics", "seconds", "run", "bench"],
)
def test_numbers_of_a_file_that_none_can_be_reach_no_plan(made: Plan, text: str) -> None:
    samples = list(samples_in(text, "f"))
    assert all(0 <= s.ns <= 1 << 53 and 0 <= s.tokens <= 1 << 53 for s in samples)
    found = refine(made, MODEL, machine(), Known(), samples)
    if found.calibrated:
        assert from_text(to_text(found.calibrated.profile), "p") == found.calibrated.profile


@pytest.mark.parametrize("factor", [0.01, 30, 10**6])
def test_times_of_another_model_reach_no_calibration(made: Plan, factor: float) -> None:
    wrong = [replace(s, ns=max(round(s.ns * factor), 1)) for s in measured(made, machine())]
    found = refined(made, wrong)
    assert found.verdict is Verdict.UNEXPLAINED
    assert found.calibrated is None and found.proposed is None and found.deviation_ppm > 500_000


def test_what_the_context_cannot_hold_was_not_measured_of_this_plan(made: Plan) -> None:
    clean = measured(made, machine())
    longer = [replace(s, depth=made.workload.n_ctx + 1) for s in clean if s.kind is Kind.TOKEN]
    longer += [replace(s, tokens=1 << 40) for s in clean if s.kind is Kind.PROMPT]
    found = refined(made, longer)
    assert found.verdict is Verdict.UNKNOWN and found.seen.dropped == {Dropped.TOO_LONG: len(longer)}
    assert refined(made, [*longer, *clean]).verdict is Verdict.AS_PREDICTED


def test_a_log_of_requests_that_never_end_is_read_in_a_time() -> None:
    """A slot has one request at a time: what is launched there is not counted as running for ever."""
    lost = "".join(f"slot launch_slot_: id  {n} | task {n + 100} | x\n" for n in range(30_000))
    again = lost + "".join(f"slot launch_slot_: id  0 | task {n + 200_000} | x\n" for n in range(30_000))
    assert len(samples_in(again + SERVER_LOG, "log")) == 5


@pytest.mark.parametrize(
    "text", ["", "no measurements", "{}", "[[]]", '{"contenders": []}', "[" * 5000, "{nan"]
)
def test_files_without_measurements(text: str) -> None:
    with pytest.raises(FileProblem, match="f: "):
        samples_in(text, "f")


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def bench_report(made: Plan, on: Profile) -> str:
    real = reprice(made, MODEL, on, Known()).plan.predicted
    prompt = str(made.workload.depth)

    def each(ns: int) -> dict[str, object]:
        return {"median": ns, "low": ns, "high": ns, "samples": 5}

    arm = {"decode_ns": {prompt: each(real.tpot_ns)}, "prefill_ns": {}, "unsettled": []}
    return json.dumps({"contenders": [{"name": "plan", **arm}, {"name": "ngl", **arm}]})


def test_the_command_writes_a_faster_plan_and_its_profile(made: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(plan_text(made))
    (tmp_path / "m.inventory.yaml").write_text(inventory_text(MODEL))
    (tmp_path / "m.profile.yaml").write_text(to_text(machine()))
    (tmp_path / "bench.json").write_text(bench_report(made, scaled(CPU=0.2)))
    inputs = ("--model", tmp_path / "m.inventory.yaml", "--profile", tmp_path / "m.profile.yaml")
    words = ("refine", tmp_path / "plan.yaml", *inputs, "--measured", tmp_path / "bench.json")
    written = ("-o", tmp_path / "better.yaml", "--calibrated", tmp_path / "new.profile.yaml")
    found = run(*words, *written)
    assert found.exit_code == 0, found.output
    assert "another plan is faster" in found.stdout and "less for the whole request" in found.stdout
    better = plan_from((tmp_path / "better.yaml").read_text(), "p")
    learnt = from_text((tmp_path / "new.profile.yaml").read_text(), "p")
    assert calibration_for(learnt, MODEL.table_digest()).scale_ppm["CPU"] < PPM // 2
    checked = run("check", tmp_path / "better.yaml", *inputs[:2], "--profile", tmp_path / "new.profile.yaml")
    assert checked.exit_code == 0, checked.output
    assert better.predicted.tpot_ns < made.predicted.tpot_ns
    told = json.loads(run(*words, "--json").stdout)
    assert told["verdict"] == "better" and told["moves"] and told["proposed"]["schema"] == 2
    (tmp_path / "bench.json").write_text(bench_report(made, machine()))
    calm = run(*words)
    assert calm.exit_code == 0 and "as predicted" in calm.stdout


def test_without_what_a_plan_was_made_from_there_is_nothing_to_refine(made: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(plan_text(made))
    (tmp_path / "bench.json").write_text(bench_report(made, machine()))
    found = run("refine", tmp_path / "plan.yaml", "--measured", tmp_path / "bench.json")
    assert found.exit_code == 2 and "give --model" in found.stderr


def corrected(folder: Path, made: Plan, *factors: float, **gpu: float) -> tuple[Result, Path]:
    """`profile --refine` with a result of bench for each factor of the CPU's times, and one of the GPU's."""
    (folder / "plan.yaml").write_text(plan_text(made))
    (folder / "m.inventory.yaml").write_text(inventory_text(MODEL))
    (folder / "m.profile.yaml").write_text(to_text(machine()))
    words: list[str | Path] = ["profile", folder / "m.inventory.yaml", "--machine", folder / "m.profile.yaml"]
    for n, factor in enumerate(factors):
        (folder / f"{n}.json").write_text(bench_report(made, scaled(CPU=factor, **gpu)))
        words += ["--refine", f"{folder / 'plan.yaml'}={folder / f'{n}.json'}"]
    return run(*words, "-o", folder / "new.yaml"), folder / "new.yaml"


def test_a_profile_is_corrected_by_results_however_near(made: Plan, tmp_path: Path) -> None:
    found, path = corrected(tmp_path, made, 1.1, 1.1)
    assert found.exit_code == 0, found.output
    learnt = from_text(path.read_text(), "p")
    assert calibration_for(learnt, MODEL.table_digest()).scale_ppm["CPU"] > 1.05 * PPM
    told = reprice(made, MODEL, learnt, Known()).plan.predicted.tpot_ns
    real = reprice(made, MODEL, scaled(CPU=1.1), Known()).plan.predicted.tpot_ns
    assert told == pytest.approx(real, rel=0.01)
    assert "contradicts" not in found.output and learnt.warnings == machine().warnings
    assert "corrected by 2 results" in learnt.source


def test_results_that_contradict_each_other_are_named(made: Plan, tmp_path: Path) -> None:
    found, path = corrected(tmp_path, made, 1.0, 3.0)
    assert found.exit_code == 0, found.output
    named = [w for w in from_text(path.read_text(), "p").warnings if "contradicts the other" in w]
    assert len(named) == 2 and "0.json" in named[0] and "1.json" in named[1]


@pytest.mark.parametrize("factor", [30.0, 1e6])
def test_results_of_another_model_correct_no_profile(factor: float, made: Plan, tmp_path: Path) -> None:
    found, path = corrected(tmp_path, made, factor, CUDA0=factor)
    assert found.exit_code == 2 and not path.exists()
    assert "0.json: no calibration explains it" in found.output


def test_one_result_contradicts_no_others(made: Plan, tmp_path: Path) -> None:
    found, path = corrected(tmp_path, made, 0.01, CUDA0=0.01)
    assert found.exit_code == 0, found.output
    (named,) = from_text(path.read_text(), "p").warnings
    assert "is not all explained by a calibration" in named


def test_few_runs_of_a_plan_count_together(made: Plan, tmp_path: Path) -> None:
    for n in range(3):
        tokens = {
            "prompt_tokens": 512,
            "tokens": [1] * 64,
            "prefill_ns": 9,
            "tpot_ns": made.predicted.tpot_ns,
        }
        (tmp_path / f"run{n}.json").write_text(json.dumps(tokens))
    (tmp_path / "plan.yaml").write_text(plan_text(made))
    (tmp_path / "m.inventory.yaml").write_text(inventory_text(MODEL))
    (tmp_path / "m.profile.yaml").write_text(to_text(machine()))
    words: list[str | Path] = [
        "profile",
        tmp_path / "m.inventory.yaml",
        "--machine",
        tmp_path / "m.profile.yaml",
    ]
    few = [*words, "--refine", f"{tmp_path / 'plan.yaml'}={tmp_path / 'run0.json'}"]
    alone = run(*few)
    assert alone.exit_code == 2 and "run0.json: holds too few clean measurements" in alone.stderr
    for n in (1, 2):
        few += ["--refine", f"{tmp_path / 'plan.yaml'}={tmp_path / f'run{n}.json'}"]
    assert run(*few).exit_code == 0
    assert "expected PLAN=RESULT" in run(*words, "--refine", "plan.yaml").stderr


def test_rows_of_another_model_are_no_measurement_of_the_plan() -> None:
    size = sum(tensor.size_bytes for tensor in MODEL.tensors)
    row = {"n_prompt": 0, "n_gen": 64, "n_depth": 0, "avg_ts": 20.0, "samples_ns": [3_200_000_000] * 3}
    assert samples_in(json.dumps([{**row, "model_size": size}]), "f", MODEL)
    assert samples_in(json.dumps([row]), "f", MODEL)
    with pytest.raises(FileProblem, match=r"its model has .* GiB, MODEL has"):
        samples_in(json.dumps([{**row, "model_size": 2 * size}]), "f", MODEL)
