"""bench and doctor: fair schedules, rivals at the plan's own memory, intervals, and what an engine can do."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from engines import ENVIRONMENT
from sample_plan import sample_plan
from small_plans import plan_for, server_plan

from atsplan import main
from commands.bench import _judge_prediction
from commands.shared.plan_job import Job
from planner.errors import AnswerIsNo
from planner.model.gguf.reader import read_model
from planner.plan.load_spec import LoadSpec, load_spec
from planner.plan.plan import to_text
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write
from runtime.bench.intervals import interval, ratio
from runtime.bench.measure import Failure, Result, compare, schedule, slower
from runtime.bench.prometheus import prometheus
from runtime.bench.prompts import text
from runtime.bench.rivals import RULES, Rival, _most, field_of, plan_rival, rivals
from runtime.engine import locate
from runtime.engine.ggml import Device
from runtime.engine.host_memory_left import host_memory_left
from runtime.load.dry_run import Breakdown
from runtime.verify.memory_against_plan import MemoryShort, MoreThanDry, check_free_memory, check_loaded

SPEC = LoadSpec((), (), 0, (), Workload())


def rival(name: str) -> Rival:
    """A contender that nobody runs."""
    return Rival(name, SPEC, name, {})


def result(name: str, *decode: float) -> Result:
    """A contender with these samples at a prompt of 50 tokens."""
    return Result(rival(name), {50: list(decode)}, {50: [2 * d for d in decode]})


def test_every_contender_comes_once_a_round_in_alternating_order() -> None:
    order = [a.name for _, a in schedule([rival("a"), rival("b"), rival("c")], 3)]
    assert "".join(order) == "abc" + "cba" + "abc"


def test_an_interval_holds_the_median_and_repeats() -> None:
    samples = [9.0, 10.0, 11.0, 10.5, 9.5, 40.0]
    found = interval(samples)
    assert found == interval(samples)
    assert found.low <= found.median == 10.25 <= found.high
    assert interval([7.0]).low == interval([7.0]).high == 7.0
    half = ratio([5.0, 5.1, 4.9], [10.0, 10.2, 9.8])
    assert half.median == 0.5 and 0.45 < half.low <= half.high < 0.55


def test_a_plan_is_slower_only_beyond_the_interval() -> None:
    plan = result("plan", 10, 11, 12, 10, 11)
    assert slower(compare(plan, result("fit", 5, 5.5, 6, 5, 5.5)))
    assert not slower(compare(plan, result("fit", 10, 11, 12, 11, 10)))
    assert not slower(compare(plan, result("fit", 20, 22, 21)))
    assert compare(plan, Result(rival("dead"))) == []


@pytest.mark.parametrize("limit", range(8))
def test_the_largest_setting_that_fits(limit: int) -> None:
    assert _most(7, lambda n: n <= limit) == limit


def test_prompts_are_fixed_and_differ_by_seed() -> None:
    assert text(500, 3) == text(500, 3) != text(500, 4)
    assert len(text(2000).split()) > 4000


def test_prometheus_text() -> None:
    plan = result("plan", 2e6, 4e6)
    plan.memory = {"CUDA0": Breakdown(5, 3, 1)}
    plan.notes = (
        "llama_moe_cache: ubatch <= 8: hits = 241, misses = 147, hit rate = 62.1%, uploaded = 1 MiB",
    )
    plan.tokens = 128
    dead = Result(rival("fit"), failures=[Failure("2026-01-01T00:00:00+0000", "gone")])
    lines = prometheus('a "model"', [plan, dead]).splitlines()
    assert r'atsplan_tpot_seconds{model="a \"model\"",arm="plan",prompt="50"} 0.003' in lines
    assert r'atsplan_device_bytes{model="a \"model\"",arm="plan",device="CUDA0"} 9' in lines
    assert r'atsplan_cache_hit_ratio{model="a \"model\"",arm="plan"} 0.621' in lines
    assert r'atsplan_failures_total{model="a \"model\"",arm="fit"} 1' in lines
    assert all(line.startswith(("# HELP atsplan_", "# TYPE atsplan_", "atsplan_")) for line in lines)


def test_room_is_what_is_free_now() -> None:
    gib = 2**30
    gpu = Device(1, "CUDA0", "gpu", "", 3 * gib, 24 * gib)
    check_free_memory({"CUDA0": Breakdown(2 * gib, 0, 0)}, (gpu,))
    with pytest.raises(
        MemoryShort, match=r"CUDA0: needs 4 096.0 MiB, free are 3 072.0 MiB .*21 504.0 MiB in use"
    ):
        check_free_memory({"CUDA0": Breakdown(4 * gib, 0, 0)}, (gpu,))
    available = host_memory_left()
    assert available
    # Engines call a CPU entirely free, and a GPU on the host's memory may say anything.
    for kind, name in (("cpu", "CPU"), ("igpu", "Vulkan0")):
        host = Device(1, name, kind, "", 2**50, 2**50)
        with pytest.raises(MemoryShort, match=name):
            check_free_memory({name: Breakdown(0, 2 * available, 0)}, (host,))
    mapped = Device(1, "CPU", "cpu", "", 2**50, 2**50)
    check_free_memory({"CPU": Breakdown(2 * available, 0, 0)}, (mapped,))
    with pytest.raises(MemoryShort):
        check_free_memory({"CPU": Breakdown(2 * available, 0, 0)}, (mapped,), mapped=False)


def test_a_load_may_not_take_more_than_its_dry_run() -> None:
    mib = 2**20
    dry = {"CUDA0": Breakdown(100 * mib, 0, 0), "CPU": Breakdown(mib, 0, 0)}
    check_loaded(dry, {"CUDA0": Breakdown(101 * mib, 0, 0), "CPU": Breakdown(99 * mib, 0, 0)})
    with pytest.raises(MoreThanDry, match=r"CUDA0: loaded it holds 110.0 MiB, the dry run said 100.0 MiB"):
        check_loaded(dry, {"CUDA0": Breakdown(110 * mib, 0, 0)})


def test_a_prediction_far_off_is_an_answer() -> None:
    plan = sample_plan()
    measured = plan.model_copy(update={"machine": plan.machine.model_copy(update={"measured": True})})
    far, near = result("plan", 9e6, 9e6), result("plan", 2.2e6)  # predicted: 2 ms
    _judge_prediction(Job(None, measured, SPEC, {}, Path("plan.yaml")), near)  # type: ignore[arg-type]
    _judge_prediction(Job(None, plan, SPEC, {}, Path("plan.yaml")), far)  # type: ignore[arg-type]
    with pytest.raises(AnswerIsNo, match=r"4.5 times slower than predicted: weights paged"):
        _judge_prediction(Job(None, measured, SPEC, {}, Path("plan.yaml")), far)  # type: ignore[arg-type]


def test_rivals_get_no_more_memory_than_the_plan(
    moe_model: Path, computing_server: Path, vulkan_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    engine = locate.find(str(computing_server))  # dry runs only: nothing is computed
    spec = load_spec(server_plan(moe_model))
    plan = plan_rival(engine, moe_model, spec)
    inventory = read_model(moe_model).inventory
    found, missing = rivals(
        field_of(engine, moe_model, inventory, plan), spec, ("fit", "ngl", "n-cpu-moe", "all-cpu")
    )
    assert missing == []
    by_name = {a.name: a for a in found}
    for rival in found:
        assert rival.device_bytes.get("Vulkan0", 0) <= plan.device_bytes["Vulkan0"]
    # The plan itself keeps all experts on the CPU.
    assert by_name["n-cpu-moe"].setting == "-ngl 5 --n-cpu-moe 4"
    assert by_name["n-cpu-moe"].device_bytes == plan.device_bytes
    assert by_name["all-cpu"].device_bytes == {}
    assert by_name["ngl"].spec.n_gpu_layers >= 1
    assert any("exps" in pattern for pattern, _ in by_name["fit"].spec.overrides)


def test_bench_of_a_plan_on_the_cpu(moe_model: Path, tmp_path: Path) -> None:
    path, metrics = tmp_path / "plan.yaml", tmp_path / "metrics.prom"
    path.write_text(to_text(plan_for(moe_model)))
    other = tmp_path / "other.yaml"
    other.write_text(path.read_text())
    options = [
        "--plan",
        str(path),
        "--device-map",
        "CUDA0=CPU",
        "--against",
        f"ngl,all-cpu,{other}",
        "--threads",
        "1",
    ]
    options += ["--rounds", "1", "--prompts", "20,9000", "-n", "4", "--json", "--prometheus", str(metrics)]
    done = CliRunner().invoke(main, ["bench", str(moe_model), *options])
    assert done.exit_code in (0, 1), done.output  # one noisy sample may call either faster
    assert "no rival ngl: the plan uses no device beside the CPU here" in done.stderr
    assert "prompt of 9000 tokens skipped" in done.stderr
    report = json.loads(done.stdout)
    assert [c["name"] for c in report["contenders"]] == ["plan", "all-cpu", "other"]
    for contender in report["contenders"]:
        assert contender["decode_ns"]["20"]["samples"] == 1
        assert contender["failures"] == []
        assert contender["memory"]["CPU"]["model"] > 0
    assert {(c["rival"], c["prompt"]) for c in report["comparisons"]} == {("all-cpu", 20), ("other", 20)}
    assert "atsplan_tpot_seconds" in metrics.read_text()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--against", "best"), "best: is no rule"),
        (("--prompts", "5000"), "nothing fits a context of 256"),
        (("--prompts", "a,b"), "write lengths as"),
    ],
)
def test_wrong_options(moe_model: Path, tmp_path: Path, options: tuple[str, ...], part: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan_for(moe_model)))
    base = ["bench", str(moe_model), "--plan", str(path), "--device-map", "CUDA0=CPU", "--threads", "1"]
    done = CliRunner().invoke(main, [*base, *options])
    assert done.exit_code == 2, done.output
    assert part in done.stderr


def test_a_contender_that_dies_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    from runtime.bench import measure

    model = write(tmp_path / "model.gguf", SynthSpec("llama", n_layers=1, type="q4_K"))
    small = LoadSpec((), (), 0, (), Workload(n_ctx=256, n_batch=64, n_ubatch=64), threads=1)
    good = Rival("good", small, "", {})
    # The engine aborts on a table of embeddings in a layout for matrix products, and reads past norms in one.
    aborts = Rival("aborts", replace(small, overrides=(("^token_embd", "CPU_REPACK"),)), "", {})
    crashes = Rival("crashes", replace(small, overrides=(("attn_norm", "CPU_REPACK"),)), "", {})
    terms = measure.Terms(None, None, model, (8,), 3, rounds=2)
    first, second, third = measure.run(terms, [aborts, good, crashes], {})
    for dead, why in ((first, "GGML_ASSERT.*SIGABRT"), (third, "SIGSEGV")):
        assert len(dead.failures) == 2 and not dead.decode
        for failure in dead.failures:
            assert re.search(why, failure.why) and not failure.loaded
            assert time.strptime(failure.at, "%Y-%m-%dT%H:%M:%S%z")
    assert "GGML_ASSERT" in first.failures[0].lines[-1]
    assert len(second.decode[8]) == 2 and second.tokens == 6 and second.failures == []


def test_a_bench_whose_rival_dies_says_so_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path / "model.gguf", SynthSpec("qwen3moe", n_layers=1, type="q4_K"))
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan_for(model)))
    doomed = (("^token_embd", "CPU_REPACK"),)
    monkeypatch.setitem(
        RULES, "all-cpu", lambda field, base: Rival("all-cpu", replace(base, overrides=doomed), "", {})
    )
    base = ["bench", str(model), "--plan", str(path), "--device-map", "CUDA0=CPU", "--threads", "1"]
    done = CliRunner().invoke(
        main, [*base, "--against", "all-cpu", "--rounds", "1", "--prompts", "8", "-n", "2"]
    )
    assert done.exit_code == 3, done.output
    assert re.search(r"^20\d\d-\S+ all-cpu failed while loading: .*GGML_ASSERT", done.stderr, re.MULTILINE)
    assert re.search(r"^    .*GGML_ASSERT", done.stderr, re.MULTILINE)
    assert "no rival finished a round" in done.stderr.splitlines()[-1]


def test_doctor_says_what_works_and_what_the_rest_takes() -> None:
    done = CliRunner().invoke(main, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    works = {a["name"]: a["works"] for a in found["abilities"]}
    assert works["computes on this processor"] and works["exact memory by dry run"]
    assert "experts in slots" in works
    assert all(a["why_not"] for a in found["abilities"] if not a["works"])
    assert found["devices"][-1]["name"] == "CPU"


def test_doctor_of_a_build_with_more_devices(computing_server: Path, vulkan_engine: Path) -> None:
    done = CliRunner(env={"GGML_VK_VISIBLE_DEVICES": ENVIRONMENT["GGML_VK_VISIBLE_DEVICES"]}).invoke(
        main, ["doctor", "--engine", str(computing_server)]
    )
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    for works in ("comparison with --fit", "serve (llama-server)", "remote devices (RPC)"):
        assert f"yes {works}" in lines
    assert "no  MoE cache: this build has none: it came with b11480" in lines
    assert any(line.startswith("no  striped experts on Vulkan0: ") for line in lines)


def test_doctor_without_an_engine() -> None:
    done = CliRunner().invoke(main, ["doctor", "--engine", "/nowhere"])
    assert done.exit_code == 3
    assert "no such file or folder" in done.stderr


def test_a_bench_in_which_no_rival_can_be_had_does_not_pass(moe_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(to_text(plan_for(moe_model)))
    base = ["bench", str(moe_model), "--plan", str(path), "--device-map", "CUDA0=CPU", "--threads", "1"]
    done = CliRunner().invoke(main, [*base, "--against", "ngl,n-cpu-moe"])
    assert done.exit_code == 3, done.output
    assert (
        "nothing to compare with: ngl: the plan uses no device beside the CPU here; n-cpu-moe" in done.stderr
    )
