"""llama.cpp's own --fit as a baseline: recorded, priced like any rule, derived again without the engine."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner, Result
from planning_models import machine, moe, plan, real
from sparse_model import write_sparse

from atsplan import main
from planner.check.check import CheckOptions, Inputs, check_plan
from planner.check.findings import Severity
from planner.machine.profile import to_text as profile_text
from planner.model.inventory import Inventory
from planner.model.structure import structure_of
from planner.passes.engine_fit import fit_record, fit_rules, with_counted_layers
from planner.plan.known import Known
from planner.plan.load_spec import LoadSpec
from planner.plan.plan import Baseline, EngineFit, Plan, from_text, to_text
from planner.workload import Workload

EXPERTS = r"blk\.{}\.ffn_(up|down|gate_up|gate)_(ch|)exps"
DOWN = r"blk\.{}\.ffn_down.*"


def load(*patterns: str, devices: tuple[str, ...] = ("CUDA0",), ngl: int = 9) -> LoadSpec:
    return LoadSpec(devices, (1,) * len(devices), ngl, tuple((p, "CPU") for p in patterns), Workload())


def fitted(*patterns: str, ngl: int = 9) -> EngineFit:
    return fit_record(moe(), "engine", load(*patterns, ngl=ngl), Workload())


def row(made: Plan) -> Baseline:
    return next(b for b in made.baselines if b.name == "fit")


def findings(made: Plan, text: str = "", model: Inventory | None = None) -> list[str]:
    options = CheckOptions(today=date(2026, 1, 1))
    inputs = Inputs(model or moe(), machine())
    found = check_plan(made, text or to_text(made), "plan.yaml", inputs, options)
    return [f"{f.rule}: {f.message}" for f in found if f.severity is not Severity.NOTE]


# In the solver's terms.


def test_layers_are_dealt_by_the_engine_s_rule() -> None:
    two = with_counted_layers(moe(), load(devices=("CUDA0", "CUDA1"), ngl=10_000))
    assert (two.n_gpu_layers, two.tensor_split) == (9, (5, 4))
    shares = LoadSpec(("CUDA0", "CUDA1"), (24_000, 12_000), 6, (), Workload())
    assert with_counted_layers(moe(), shares).tensor_split == (4, 2)
    assert with_counted_layers(moe(), load(ngl=0)).tensor_split == (0,)


def test_a_cut_feed_forward_is_read_both_ways() -> None:
    (whole,) = fit_rules(structure_of(moe()), fitted(EXPERTS.format(0), EXPERTS.format("[12]")), Workload())
    assert whole.layer_devices == ("CUDA0",) * 9 and whole.setting == "-ngl 9, 2 overrides"
    assert set(whole.sites) == {"blk.0.experts", "blk.1.experts", "blk.2.experts"}
    gpu, cpu = fit_rules(structure_of(moe()), fitted(EXPERTS.format(0), DOWN.format(2)), Workload())
    assert set(gpu.sites) == {"blk.0.experts"} and gpu.setting.endswith("blk.2 cut: counted on the GPU")
    assert set(cpu.sites) == {"blk.0.experts", "blk.2.experts"} and cpu.setting.endswith("on the CPU")


def test_layers_on_the_cpu_and_patterns_of_layers_that_are_not_there() -> None:
    (given,) = fit_rules(
        structure_of(moe()), fitted(EXPERTS.format(4), EXPERTS.format(40), ngl=4), Workload()
    )
    assert given.layer_devices == ("CPU",) * 5 + ("CUDA0",) * 4
    assert given.sites == {}  # layer 4 is on the CPU as a whole


# As a baseline.


@pytest.mark.parametrize("seed", range(12))
def test_the_plan_is_never_predicted_slower(seed: int) -> None:
    random = Random(seed)
    ngl = random.randrange(0, 10)
    patterns = [random.choice((EXPERTS, DOWN)).format(n) for n in range(8) if random.random() < 0.5]
    made = plan(moe(), str(random.randrange(400, 4000)), known=Known(fit=fitted(*patterns, ngl=ngl)))
    own, work = row(made), made.workload
    if own.feasible:
        assert made.predicted.objective_ns <= work.gen * own.tpot_ns + own.prefill_ns
    assert findings(made) == []


def test_a_fit_that_equals_a_stock_rule_has_its_numbers() -> None:
    stock = next(b for b in plan(moe(), "2000").baselines if b.name == "n-cpu-moe")
    count = int(stock.setting.rpartition(" ")[2])
    made = plan(moe(), "2000", known=Known(fit=fitted(EXPERTS.format(f"[0-{count - 1}]"))))
    assert row(made) == stock.model_copy(update={"name": "fit", "setting": "-ngl 9, 1 overrides"})


def test_without_fit_a_plan_says_nothing_of_it() -> None:
    text = to_text(plan(moe(), "2000"))
    assert "\nfit:" not in text and "name: fit" not in text


def test_what_does_not_fit_here_is_said() -> None:
    made = plan(moe(), "1000", known=Known(fit=fitted()))
    assert not row(made).feasible
    assert any(note.startswith("fit (-ngl 9) does not fit as memory is counted here") for note in made.notes)
    none = EngineFit(engine="engine", n_ctx=4096)
    made = plan(moe(), "1000", known=Known(fit=none))
    assert (row(made).feasible, row(made).setting) == (False, "finds no placement")
    assert findings(made) == []


def test_check_derives_the_row_again() -> None:
    made = plan(moe(), "2000", known=Known(fit=fitted(EXPERTS.format("[0-4]"))))
    assert findings(from_text(to_text(made), "plan.yaml")) == []
    faster = to_text(made).replace(f"tpot_ns: {row(made).tpot_ns}", "tpot_ns: 77")
    told = findings(from_text(faster, "plan.yaml"), faster)
    assert any("baselines.fit.tpot_ns is 77" in text for text in told)
    assert made.fit is not None
    fewer = made.model_copy(update={"fit": made.fit.model_copy(update={"overrides": ()})})
    assert any("baselines.fit" in text for text in findings(fewer))
    other = made.model_copy(update={"fit": made.fit.model_copy(update={"n_ctx": 8192})})
    assert any("baselines.fit" in text for text in findings(other))  # asked for another context


def test_layers_that_do_not_add_up_are_refused() -> None:
    text = to_text(plan(moe(), "2000", known=Known(fit=fitted())))
    wrong = text.replace("tensor_split: [9]", "tensor_split: [8]")
    with pytest.raises(Exception, match="the layers of each device"):
        from_text(wrong, "plan.yaml")


# The real thing.


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def on(tmp_path: Path, device: str, mib: int, kind: str = "gpu") -> Path:
    """A machine whose one GPU has another name and size."""

    def renamed(name: str) -> str:
        return device if name == "CUDA0" else name

    size = {"memory_bytes": mib * 2**20, "free_bytes": mib * 2**20, "context_bytes": 0}
    profile = machine(CUDA0={"name": device, "kind": kind, **size})
    links = tuple(
        li.model_copy(update={"source": renamed(li.source), "target": renamed(li.target)})
        for li in profile.links
    )
    path = tmp_path / "machine.profile.yaml"
    path.write_text(profile_text(profile.model_copy(update={"links": links})))
    return path


@pytest.mark.parametrize("budget", ["4", "9", "12", "40"])
def test_fit_of_an_engine_with_a_gpu(
    budget: str, vulkan_engine: Path, moe_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    profile, path = on(tmp_path, "Vulkan0", 1024), tmp_path / "plan.yaml"
    words = (moe_model, "--profile", profile, "--ctx", "512", "--fit", vulkan_engine)
    found = run("solve", *words, "--budget", f"{budget}MiB", "-o", path)
    assert found.exit_code == 0, found.output
    made = from_text(path.read_text(), str(path))
    assert made.fit is not None and made.fit.n_ctx == 512 and made.fit.devices == ("Vulkan0",)
    if row(made).feasible:
        assert made.predicted.objective_ns <= made.workload.gen * row(made).tpot_ns + row(made).prefill_ns
    if budget == "40":  # everything fits
        assert row(made).tpot_ns == made.predicted.tpot_ns and made.fit.overrides == ()
    assert "\n fit " in found.stdout
    assert run("check", path, "--model", moe_model, "--profile", profile).exit_code == 0
    assert "\nfit (" in run("explain", path, "--model", moe_model, "--profile", profile).stdout


def test_a_curve_with_fit(
    vulkan_engine: Path, moe_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
    words = (moe_model, "--profile", on(tmp_path, "Vulkan0", 1024), "--ctx", "512", "--fit", vulkan_engine)
    picture = tmp_path / "sweep.svg"
    found = run("sweep", *words, "--budgets", "20MiB:40MiB:20MiB", "--json", "--plot", picture)
    assert found.exit_code == 0, found.output
    assert all(p["tpot_ns"] <= p["best_stock_tpot_ns"] * 1.05 for p in json.loads(found.stdout))
    assert "<!-- fit -->" in picture.read_text()


def test_fit_where_there_is_no_gpu(dense_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    found = run("solve", dense_model, "--machine", "cpu-only-ddr5", "--fit", "auto", "-o", path)
    assert found.exit_code == 0, found.output
    made = from_text(path.read_text(), str(path))
    assert made.fit is not None and made.fit.n_gpu_layers == 0 and "xllamacpp" in made.fit.engine
    assert [b.name for b in made.baselines] == ["all-cpu", "fit"]
    assert row(made).tpot_ns == made.predicted.tpot_ns


def test_engines_and_files_that_cannot_be_asked(dense_model: Path, tmp_path: Path) -> None:
    found = run("solve", dense_model, "--machine", "rtx4090-ddr5", "--fit", "auto")
    assert found.exit_code == 2 and "the engine has no CUDA0 here" in found.stderr
    table = tmp_path / "m.inventory.yaml"
    found = run("solve", table, "--machine", "rtx4090-ddr5", "--fit", "auto")
    assert found.exit_code == 2


def test_fit_of_a_model_at_full_size_on_a_remote_gpu(
    rpc_server: str,
    computing_server: Path,
    tmp_path: Path,
) -> None:
    """Seventeen gigabytes as a sparse file: --fit measures, the row follows, the plan is not slower."""
    model = write_sparse(tmp_path / "model.gguf", real("Qwen3-30B-A3B-Q4_K_M"))
    profile, path = on(tmp_path, f"RPC0[{rpc_server}]", 16_000, "rpc"), tmp_path / "plan.yaml"
    words = (model, "--profile", profile, "--budget", "4000", "--fit", computing_server)
    found = run("solve", *words, "-o", path)
    assert found.exit_code == 0, found.output
    made = from_text(path.read_text(), str(path))
    assert made.fit is not None and made.fit.devices == (f"RPC0[{rpc_server}]",)
    assert len(made.fit.overrides) > 40 and row(made).feasible
    assert row(made).vram_bytes <= 4000 * 2**20
    assert made.predicted.objective_ns <= made.workload.gen * row(made).tpot_ns + row(made).prefill_ns
    assert run("check", path, "--model", model, "--profile", profile).exit_code == 0
