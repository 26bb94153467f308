"""solve, explain and sweep as commands: what they print, write and refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from planning_models import moe
from terminals import on_a_terminal

from atsplan import main
from commands.solve.request import Inputs, Watch
from planner.model.inventory import to_text
from planner.passes.refusal import OutOfTime
from planner.plan.plan import Plan, from_text
from planner.routing.expert_counts import Part, Phase, make
from planner.routing.expert_counts import to_text as heat_text

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "moe.inventory.yaml"
    path.write_text(to_text(moe()))
    return path


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def solve(model: Path, *words: str | Path) -> Result:
    return run("solve", model, "--machine", "rtx4090-ddr5", *words)


def test_a_plan_is_written_shown_and_explained(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    found = solve(model, "--budget", "2000", "-o", path)
    assert found.exit_code == 0, found.output
    assert "n-cpu-moe" in found.stdout and "gap 0" in found.stdout and "assumed, not measured" in found.stderr
    plan = from_text(path.read_text(), str(path))
    assert plan.devices[0].used_bytes <= 2000 * 2**20
    told = run("explain", path, "--model", model)
    assert told.exit_code == 0
    assert "The limit is memory: " in told.stdout and " of 2 000 MiB of CUDA0 are used, " in told.stdout
    assert "1 GiB more on CUDA0 would take" in told.stdout
    data = json.loads(run("explain", path, "--model", model, "--json").stdout)
    assert sum(part["time_ns"] for part in data["slices"]) == plan.predicted.tpot_ns
    assert data["tpot_ns_with_1_gib_more"] < plan.predicted.tpot_ns
    assert "more memory" in run("explain", path).stderr  # no model: that question stays open


def test_json_is_the_plan(model: Path) -> None:
    data = json.loads(solve(model, "--budget", "8000", "--json").stdout)
    assert data["schema"] == 2 and data["predicted"]["gap_ppm"] == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--budget", "0"), 2, "above zero"),
        (("--budget", "-5"), 2, "expected a size"),
        (("--budget", "nan"), 2, "expected a size"),
        (("--budget", "1e99"), 2, "expected a size"),
        (("--budget", "99999999"), 2, "24576 MiB in all"),
        (("--budget", "CUDA0=1000,CUDA0=2000"), 2, "given twice"),
        (("--budget", "CUDA3=1000"), 2, "no such device"),
        (("--budget", "=5"), 2, "no device before `=`"),
        (("--budget", "2000", "--ctx", "0"), 2, "--ctx 0"),
        (("--budget", "2000", "--ctx", "many"), 2, "or max"),
        (("--budget", "2000", "--ctx", "4096", "--ctx-min", "8192"), 2, "above the context"),
        (("--budget", "2000", "--workload", "prompt=9000"), 2, "needs 9256 cells"),
        (("--budget", "2000", "--workload", "prompts=9"), 2, "expected prompt="),
        (("--budget", "2000", "--workload", "gen=0"), 2, "--workload gen=0: input should be greater than 0"),
        (("--budget", "2000", "--workload", "seqs=0"), 2, "--workload seqs=0: "),
        (
            ("--budget", "2000", "-np", "257"),
            2,
            "--workload seqs=257: ",
        ),  # the engine: n_seq_max must be <= 256
        (
            ("--budget", "2000", "-np", "8", "--workload", "prompt=512,gen=256"),
            2,
            "--ctx 4096: the workload needs 768 cells for each of 8 sequences",
        ),
        (("--budget", "2000", "--workload", ""), 2, "expected prompt="),
        (("--budget", ""), 2, "expected a size"),
        (("--budget", "2000", "--reserve", ""), 2, "expected a size"),
        (("--budget", "2000", "--fit", ""), 2, "--fit: expected a library, a folder, or auto"),
        (("--budget", "2000", "--kv-type", "q9_0"), 2, "--kv-type q9_0: q9_0: "),
        (("--budget", "2000", "--kv-type", "f16/"), 2, "--kv-type f16/: nothing: "),
        (("--budget", "2000", "--pin", "nothing"), 2, "PATTERN=SITE"),
        (("--budget", "2000", "--pin", "blk.77.*=cpu"), 2, "matches no tensor"),
        (("--budget", "2000", "--reserve", "CUDA5=100"), 2, "has no budget"),
        (("--budget", "2000", "--quant", "exps=q99"), 2, "no such type"),
        (("--budget", "2000", "--tensor-types", "x"), 2, "needs --quant"),
        (("--budget", "2000", "--no-cpu"), 1, "CUDA0 needs"),
        (("--budget", "2000", "--no-cpu", "--ctx-min", "1024"), 1, "not even a context of 1024"),
        (("--budget", "2000", "--heat", "no-such-file"), 2, "no such file"),
    ],
)
def test_one_line_and_an_exit_code(model: Path, words: tuple[str, ...], code: int, said: str) -> None:
    found = solve(model, *words)
    assert found.exit_code == code, found.output
    assert said in found.stderr and found.stdout == ""
    assert len([line for line in found.stderr.splitlines() if line.startswith("atsplan: ")]) == 1


def test_a_plan_that_cannot_be_written_leaves_nothing(model: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    found = solve(model, "--budget", "2000", "-o", tmp_path / "no" / "plan.yaml")
    assert found.exit_code == 2 and sorted(tmp_path.iterdir()) == before


def test_the_swept_budget_is_not_given_twice(model: Path) -> None:
    ranged = ["--budgets", "2000:3000:1000"]
    given = ["sweep", str(model), "--machine", "rtx4090-ddr5", *ranged, "--budget", "CUDA0=700"]
    found = CliRunner().invoke(main, given)
    assert (found.exit_code, found.stderr) == (
        2,
        "atsplan: --budget CUDA0=700: CUDA0 is what --budgets sweeps\n",
    )


def test_the_largest_context(model: Path) -> None:
    found = solve(model, "--budget", "4500", "--ctx", "max", "--json")
    assert "the largest with every layer whole on a GPU" in found.stderr
    n_ctx = json.loads(found.stdout)["workload"]["n_ctx"]
    assert 4096 < n_ctx < 131072 and n_ctx % 256 == 0


def test_what_if_with_a_map_for_quantising(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "types.txt"
    found = solve(model, "--budget", "2000", "--quant", "ffn_.*_exps=iq2_xs", "--tensor-types", path)
    assert found.exit_code == 0 and "what if" in found.stderr and "ms -> " in found.stderr
    assert "blk.3.ffn_up_exps=iq2_xs" in path.read_text().splitlines()


def test_heat_makes_stripes_and_names_its_file(model: Path, tmp_path: Path) -> None:
    counts = dict.fromkeys(range(8), (100000,) * 16 + (10,) * 112)
    heat = tmp_path / "heat.csv"
    heat.write_text(heat_text(make("", 128, 8, [Part("chat", Phase.DECODE, 90_000, counts)])))
    path = tmp_path / "plan.yaml"
    assert solve(model, "--budget", "1500", "--heat", heat, "-o", path).exit_code == 0
    plan = from_text(path.read_text(), str(path))
    striped = {p.unit for p in plan.units if p.site.memory == "stripe:CUDA0"}
    assert striped and len(plan.experts) == len(striped)
    assert plan.constraints.heat_digest.startswith("sha256:")
    plain = solve(model, "--budget", "1500", "--heat", heat, "--no-stripes", "--json")
    assert "stripe" not in plain.stdout.split('"units"')[1]


def test_heat_of_another_model(model: Path, tmp_path: Path) -> None:
    heat = tmp_path / "heat.csv"
    heat.write_text(heat_text(make("", 64, 8, [Part("x", Phase.DECODE, 9, {0: (1,) * 64})])))
    found = solve(model, "--budget", "1500", "--heat", heat)
    assert found.exit_code == 2 and "64 experts a layer, the model 128" in found.stderr


def test_sweep_as_table_picture_and_data(model: Path, tmp_path: Path) -> None:
    machine = ("--machine", "rtx4090-ddr5", "--budgets", "100:3700:1200")
    picture = tmp_path / "sweep.svg"
    shown = run("sweep", model, *machine, "--plot", picture)
    assert shown.exit_code == 0 and shown.stdout.count("MiB") == 4
    first = picture.read_bytes()
    assert run("sweep", model, *machine, "--plot", picture).exit_code == 0
    assert picture.read_bytes() == first
    points = json.loads(run("sweep", model, *machine, "--json").stdout)
    times = [point["tpot_ns"] for point in points]
    assert len(times) == 4 and times[-1] < times[0]
    assert all(point["tpot_ns"] <= point["best_stock_tpot_ns"] * 1.05 for point in points)
    assert all(point["gain_ppm"] >= 1_000_000 for point in points)


def test_a_sweep_where_nothing_fits_says_what_is_missing_and_what_would_fit() -> None:
    """For each point what it needs; for the last what was tried and fits, and that is so."""
    llama = Path(__file__).parent.parent / "plans" / "inputs" / "Llama-3.1-70B-Q4_K_M.inventory.yaml"
    given = ("--machine", "rtx4060-8gb-ddr5", "--budgets", "6G:7G:1G")
    found = run("sweep", llama, *given, "--json")
    points = json.loads(found.stdout)
    assert found.exit_code == 1 and [point["feasible"] for point in points] == [False, False]
    assert all(point["needs"][0]["shortage_bytes"] > 0 for point in points)
    quant = next(way for way in points[-1]["tested"] if "--quant" in way).split("--quant ")[1]
    fits = run("solve", llama, *given[:2], "--budget", "7G", "--quant", quant, "--json")
    assert fits.exit_code == 0, fits.output
    (line,) = [text for text in found.stderr.splitlines() if text.startswith("atsplan: ")]
    assert "nothing fits up to 7 168 MiB: does not fit" in line.replace("\u202f", " ") and quant in line


def test_rows_of_a_sweep_are_shown_before_anything_is_drawn(model: Path, tmp_path: Path) -> None:
    """A picture that cannot be drawn takes no row with it; one that nothing here draws is refused first."""
    folder = tmp_path / "gone"
    folder.mkdir()
    given = ("sweep", model, "--machine", "rtx4090-ddr5", "--budgets", "2000:3000:1000")

    def lost(*_: object) -> None:
        folder.rmdir()
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("commands.solve.sweep.draw", lost)
        found = run(*given, "--plot", folder / "a.png")
        assert found.exit_code == 2 and "2 000 MiB" in found.stdout and "No space left" in found.stderr
        patch.setattr("commands.shared.pictures.find_spec", lambda name: None)
        early = run(*given, "--plot", tmp_path / "a.png")
    assert (early.exit_code, early.stdout) == (2, "") and "pip install 'atsplan[plot]'" in early.stderr


def test_a_sweep_names_the_least_budget_that_is_as_fast_as_any(model: Path) -> None:
    """Of the largest context; that plan is as fast as the table says."""
    given = (
        "sweep",
        model,
        "--machine",
        "rtx4090-ddr5",
        "--budgets",
        "3000:9000:3000",
        "--contexts",
        "1k,4k",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["atsplan", *map(str, given)])
        found = run(*given, "--json")
    points = [point for point in json.loads(found.stdout) if point["n_ctx"] == 4096]
    (step,) = [text for text in found.stderr.splitlines() if text.startswith("next: ")]
    assert step.endswith("-o plan.yaml") and "--contexts" not in step and "-c 4096" in step
    budget = int(step.split("--budget CUDA0=")[1].split()[0]) << 20
    best = min(point["objective_ns"] for point in points)
    good = [p["budget_bytes"] for p in points if p["objective_ns"] <= 1.01 * best]
    assert budget == min(good)


def test_a_sweep_judges_by_what_it_is_solved_for() -> None:
    """A plan may be slower to decode than a rule and faster for the request: the gain is the request's."""
    model = Path(__file__).parent.parent / "plans" / "inputs" / "gpt-oss-20b-MXFP4.inventory.yaml"
    given = ("--machine", "rtx3060-12gb-epyc", "--budgets", "6000:8000:2000", "--json")
    points = json.loads(run("sweep", model, *given).stdout)
    assert len(points) == 2
    assert any(point["tpot_ns"] > point["best_stock_tpot_ns"] for point in points)
    assert all(point["gain_ppm"] >= 1_000_000 for point in points)


@pytest.mark.parametrize("text", ["1:2", "a:b:c", "5:1:1", "0:10:1", "1:10:0", "1:9999999:1"])
def test_ranges_that_are_none(model: Path, text: str) -> None:
    found = run("sweep", model, "--machine", "rtx4090-ddr5", "--budgets", text)
    assert found.exit_code == 2 and "--budgets" in found.stderr


@pytest.mark.parametrize(
    ("words", "depth"),
    [
        ((), 640),
        (("--workload", "prompt=2000,gen=500"), 2250),
        (("--workload", "depth=0"), 0),
        (("--ctx", "256"), 192),
    ],
)
def test_a_token_is_priced_in_the_middle_of_the_answer(
    model: Path, words: tuple[str, ...], depth: int
) -> None:
    found = solve(model, "--budget", "2000", *words)
    assert found.exit_code == 0 and f"a token at depth {depth}\n" in found.stdout
    made = json.loads(solve(model, "--budget", "2000", *words, "--json").stdout)
    assert made["workload"]["depth"] == depth


def test_a_deeper_token_costs_more(model: Path) -> None:
    at = ("--budget", "2000", "--ctx", "65536", "--json", "--workload")
    times = [
        json.loads(solve(model, *at, f"depth={d}").stdout)["predicted"]["tpot_ns"] for d in (0, 640, 60000)
    ]
    assert times == sorted(times) and times[-1] > times[0]


def test_explain_names_memory_only_where_it_is_the_limit(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    for words, said in (
        (("--budget", "1990", "--time-limit", "5"), " MiB of CUDA0 are used"),
        (("--budget", "20000", "--pin", "blk.0.experts=cpu"), "; what was asked keeps the rest off it."),
        (("--budget", "20000"), "Memory is not the limit: everything that a GPU could speed up is on one."),
    ):
        assert solve(model, *words, "-o", path).exit_code == 0
        told = run("explain", path, "--model", model).stdout
        assert said in told
        free = [int(line.split(", ")[1].split()[0]) for line in told.splitlines() if "too few" in line]
        smallest = min(p.size_bytes for p in from_text(path.read_text(), "p").units if "experts" in p.unit)
        assert all(size * 2**20 < smallest for size in free)
    assert solve(model, "--budget", "20000", "--pin", "blk.0.experts=cpu", "-o", path).exit_code == 0
    told = run("explain", path, "--model", model).stdout
    assert "-ot (the pins)" in told  # what rules are compared under


@pytest.mark.parametrize("limit", [(), ("--time-limit", "60")])
def test_a_search_says_how_far_it_is_where_somebody_watches(model: Path, limit: tuple[str, ...]) -> None:
    """On a terminal of its own; a bar that comes at once, as after two seconds of work."""
    seen = on_a_terminal("solve", model, "--machine", "rtx4090-ddr5", "--budget", "2000", *limit)
    told = seen.screen
    assert seen.status == 0 and "this plan" in seen.out and "planning" not in seen.out
    assert re.search(r"planning .* of some \d+ problems", told) and re.search(r"\d:\d\d|-:--:--", told), told
    assert ("at most 5" in told or "at most 60 s" in told) == bool(limit), told
    assert told.rstrip().endswith(" -o plan.yaml"), "the bar goes when the work is done"
    assert "problems" not in solve(model, "--budget", "2000").output


@pytest.mark.parametrize(
    ("ended", "code", "said"), [(KeyboardInterrupt, 130, "interrupted"), (OutOfTime, 1, "in time")]
)
def test_a_sweep_that_is_ended_early_shows_what_it_has(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ended: type[BaseException],
    code: int,
    said: str,
) -> None:
    """Ctrl-C, or the end of the time, while the third plan is solved."""
    solved: list[Plan] = []
    solve_one = Inputs.plan

    def third_is_ended(inputs: Inputs, *, advise: bool = True, watch: Watch) -> Plan:
        if len(solved) == 2:
            raise ended
        solved.append(solve_one(inputs, advise=advise))
        return solved[-1]

    monkeypatch.setattr(Inputs, "plan", third_is_ended)
    page, swept = tmp_path / "page.html", ("--budgets", "1G:4G:1G", "--contexts", "2k,4k")
    found = run("sweep", model, "--machine", "rtx4090-ddr5", *swept, "--json", "--html", page)
    assert found.exit_code == code
    assert [point["budget_bytes"] >> 30 for point in json.loads(found.stdout)] == [1, 2]
    assert "2 of 8 plans were solved" in found.stderr and said in found.stderr.splitlines()[-1]
    assert "The sweep was ended early" in page.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "say what to sweep: --budgets 4G:24G:1G"),
        (("--contexts", "4k,many"), "expected numbers of tokens"),
        (("--contexts", "0"), "expected numbers of tokens"),
        (("--budgets", "1G:24G:1G", "--contexts", ",".join(f"{n}k" for n in range(1, 40))), "more than 500"),
    ],
)
def test_a_sweep_of_nothing_or_too_much_is_one_line(model: Path, words: tuple[str, ...], said: str) -> None:
    found = run("sweep", model, "--machine", "rtx4090-ddr5", *words)
    assert (found.exit_code, found.stdout) == (2, "") and said in found.stderr


def test_contexts_are_swept_with_each_budget(model: Path) -> None:
    machine = ("--machine", "rtx4090-ddr5")
    found = run("sweep", model, *machine, "--budgets", "1G:2G:1G", "--contexts", "8k,2k", "--json")
    points = json.loads(found.stdout)
    assert [(p["budget_bytes"] >> 30, p["n_ctx"]) for p in points] == [
        (1, 2048),
        (2, 2048),
        (1, 8192),
        (2, 8192),
    ]
    alone = json.loads(solve(model, "--budget", "1G", "-c", "8k", "--json").stdout)
    assert points[2]["tpot_ns"] == alone["predicted"]["tpot_ns"]
