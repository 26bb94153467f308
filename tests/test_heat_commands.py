"""The heat and simulate commands, end to end: files in, files out, answers, refusals."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_moe
from click.testing import CliRunner, Result
from hand_plans import hand_plan, with_uses
from processes import descendants, until
from tiny_moe import EXPERTS, LAYERS, MODEL

import atsplan
from commands.shared.inputs import known_of_heat
from planner.model import inventory as inventories
from planner.model.gguf.reader import read_model
from planner.model.units import Kind
from planner.plan import plan as plans
from planner.plan.plan import LayerRange
from planner.routing import expert_counts as heats
from planner.routing import trace as traces
from planner.routing.expert_counts import Heat, Part, Phase
from planner.workload import Workload
from rewriter.rewrite import RewriteOptions, rewrite

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 300  # with a machine that is busy
TRACE_OPTIONS = ("--threads", 1, "--no-cost", "-n", 6, "--temp", 0)


def run(*args: object, code: int = 0) -> Result:
    result = CliRunner().invoke(atsplan.main, [str(a) for a in args])
    assert result.exit_code == code, result.output
    return result


def refused(*args: object, why: str, code: int = 2) -> None:
    """One line on stderr, and nothing on stdout."""
    result = run(*args, code=code)
    lines = [line for line in result.stderr.splitlines() if line.startswith("atsplan: ")]
    assert len(lines) == 1 and why in lines[0], result.stderr


def prompts(folder: Path) -> Path:
    path = folder / "p.jsonl"
    entries = tiny_moe.reference()["prompts"].items()
    path.write_text("".join(json.dumps({"name": n, "text": e["text"]}) + "\n" for n, e in entries))
    return path


def load(path: Path) -> Heat:
    return heats.from_text(path.read_text(), str(path))


def write(path: Path, rows: list[list[int]], source: str = "a", tokens: int = 1000) -> Path:
    """A heat.csv of one source, rows by layer."""
    part = Part(source, Phase.DECODE, tokens, {la: tuple(row) for la, row in enumerate(rows)})
    path.write_text(heats.to_text(heats.make("", len(rows[0]), 2, [part])))
    return path


def zipf_rows(seed: int, power: float, order_seed: int = 0) -> list[list[int]]:
    """Two layers of 64 experts, 2000 tokens; `power` 0 is uniform."""
    rng, orders = np.random.default_rng(seed), np.random.default_rng(order_seed)
    share = 1 / np.arange(1, 65) ** power
    rows = []
    for _ in range(2):
        row = np.zeros(64, dtype=int)
        row[orders.permutation(64)] = rng.multinomial(4000, share / share.sum())
        rows.append([int(c) for c in row])
    return rows


def test_a_trace_on_the_way_to_a_report(tmp_path: Path) -> None:
    heat, trace = tmp_path / "h.csv", tmp_path / "t.csv"
    done = run(
        "heat", "trace", MODEL, "--prompts", prompts(tmp_path), *TRACE_OPTIONS, "-o", heat, "--trace", trace
    )
    assert done.stdout == ""
    found = load(heat)
    assert found.model == read_model(MODEL).inventory.table_digest()
    assert (found.sources, found.layers, found.n_expert) == (("code", "docs"), tuple(range(LAYERS)), EXPERTS)
    again = traces.heat_of(traces.from_text(trace.read_text(), "t"))
    assert again.total() == found.total()
    judged = json.loads(run("heat", "report", heat, "--model", MODEL, "--json").stdout)
    assert judged["sources"] == ["code", "docs"] and len(judged["layers"]) == LAYERS
    assert len(judged["phases"]) == 2
    replayed = json.loads(
        run("simulate", trace, "--slots", 8, "--model", MODEL, "--budget", 2, "--json").stdout
    )
    rates = {row["policy"]: row["hit_rate"] for row in replayed["runs"]}
    assert max(rates.values()) == rates["belady"] > rates["lru"] > 0
    assert replayed["cache"]["advice"]["cache_bytes"] <= 2 * 2**20
    refused("simulate", heat, why="counts only")


def test_positions_of_a_permuted_model_are_original_ids(tmp_path: Path) -> None:
    rng = random.Random(4)
    orders = {la: tuple(rng.sample(range(EXPERTS), EXPERTS)) for la in range(LAYERS)}
    model = read_model(MODEL)
    plan = hand_plan(model, experts=orders)
    out = tmp_path / "permuted.gguf"
    rewrite(model, plan, out, RewriteOptions())
    heat = {}
    for name, file in (("source", MODEL), ("permuted", out)):
        path = tmp_path / f"{name}.csv"
        run("heat", "trace", file, "--prompts", prompts(tmp_path), *TRACE_OPTIONS, "-o", path)
        heat[name] = load(path)
    source, permuted = (heats.only(h, Phase.PREFILL).total() for h in (heat["source"], heat["permuted"]))
    for layer in range(LAYERS):
        moved = sum(abs(a - b) for a, b in zip(source[layer], permuted[layer], strict=True)) / 2
        assert moved <= 0.01 * sum(source[layer])
    assert heat["permuted"].model == heat["source"].model
    # The same through files: counts by position, and the plan that says where each expert went.
    by_position = heats.make(
        "",
        EXPERTS,
        4,
        [
            Part("x", Phase.DECODE, 9, {la: tuple(row[e] for e in orders[la]) for la, row in source.items()}),
        ],
    )
    (tmp_path / "pos.csv").write_text(heats.to_text(by_position))
    (tmp_path / "plan.yaml").write_text(plans.to_text(plan))
    for record in (out, tmp_path / "plan.yaml"):
        done = run("heat", "import", tmp_path / "pos.csv", "--permutation", record, "--model", MODEL)
        assert heats.from_text(done.stdout, "x").total() == source


def test_a_trace_loads_as_a_plan_says(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    file = read_model(MODEL)
    whole = hand_plan(file, lambda unit: "cpu" if unit.kind is Kind.EMBEDDING else "gpu:CUDA0")
    layers = (LayerRange(first=0, last=LAYERS, device="CUDA0"),)
    plan.write_text(plans.to_text(with_uses(whole.model_copy(update={"layers": layers}), file.inventory)))
    args = ("heat", "trace", MODEL, "--text", "def f", "--no-cost", "-n", 3, "--plan", plan)
    mapped = ("--device-map", "CUDA0=CPU")
    heat = heats.from_text(run(*args, *mapped).stdout, "x")
    assert heat.sources == ("text-1",) and heat.layers == tuple(range(LAYERS))
    refused(*args, "--device", "CPU", why="the plan says which devices")
    refused(*args, why="no device CUDA", code=3)


def test_uniform_and_skewed_routing_get_their_verdict(tmp_path: Path) -> None:
    for name, power in (("flat", 0.0), ("skewed", 1.0)):
        files = [write(tmp_path / f"{name}{i}.csv", zipf_rows(i, power), f"s{i}", 2000) for i in range(3)]
        done = run("heat", "report", *files, "--check", code=0 if name == "skewed" else 1)
        judged = json.loads(run("heat", "report", *files, "--json").stdout)
        assert judged["exploitable"] is (name == "skewed")
        quarter = next(i for i in judged["intervals"] if i["resident"] == 0.25)
        assert quarter["low"] <= quarter["value"] <= quarter["high"]
        if name == "flat":
            assert abs(quarter["value"] - 0.25) < 0.02 < quarter["in_sample"] - 0.25
            assert "no exploitable skew" in done.output
        else:
            share = 1 / np.arange(1, 65)
            assert quarter["value"] == pytest.approx(share[:16].sum() / share.sum(), abs=0.02)


def test_favourites_of_each_prompt_alone_are_no_skew(tmp_path: Path) -> None:
    """Every source is skewed, each its own way: in-sample coverage says yes, held-out says no."""
    files = [write(tmp_path / f"{i}.csv", zipf_rows(i, 1.2, order_seed=i), f"s{i}", 2000) for i in range(4)]
    judged = json.loads(run("heat", "report", *files, "--json").stdout)
    assert not judged["exploitable"]
    assert min(judged["transfer"][i][i] for i in range(4)) > 0.6
    assert max(judged["transfer"][i][j] for i in range(4) for j in range(4) if i != j) < 0.5


def test_many_sources_have_no_transfer_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # its heads are whole in a wide table
    files = [write(tmp_path / f"{i}.csv", zipf_rows(i, 1.0), f"s{i}", 500) for i in range(17)]
    judged = json.loads(run("heat", "report", *files, "--json").stdout)
    assert judged["transfer"] == [] and judged["exploitable"]
    assert "chosen on" in run("heat", "report", *files[:16]).stdout
    assert "chosen on" not in run("heat", "report", *files).stdout


def test_one_flat_source_is_no_skew_either(tmp_path: Path) -> None:
    one = write(tmp_path / "a.csv", zipf_rows(1, 0.0), tokens=2000)
    assert "no exploitable skew" in run("heat", "report", one).stdout


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_pictures_are_the_same_each_time(tmp_path: Path, kind: str) -> None:
    files = [write(tmp_path / f"{i}.csv", zipf_rows(i, 1.0), f"s{i}") for i in range(2)]
    made = []
    for turn in "ab":
        paths = [tmp_path / f"{turn}-{what}.{kind}" for what in ("map", "curves")]
        run("heat", "report", *files, "--map", paths[0], "--curves", paths[1])
        made.append([path.read_bytes() for path in paths])
    assert made[0] == made[1]
    assert all(
        data.startswith(b"\x89PNG" if kind == "png" else b"<?xml") and len(data) > 5000 for data in made[0]
    )


def test_merge_weighs_and_import_names(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.csv", [[4, 2, 0]], "a"), write(tmp_path / "b.csv", [[0, 1, 1]], "b")
    merged = heats.from_text(run("heat", "merge", a, b, "-w", 1, "-w", 10).stdout, "x")
    assert merged.total() == {0: (4, 12, 10)} and merged.sources == ("a", "b")
    assert heats.from_text(run("heat", "import", a, b).stdout, "x").sources == ("a", "b")
    assert heats.from_text(run("heat", "import", a, "--source", "c").stdout, "x").sources == ("c.a",)
    plain = tmp_path / "mine.csv"
    plain.write_text("layer,expert,count\n0,1,5\n")
    done = run("heat", "import", plain, "--experts", 4, "--phase", "prefill", "--tokens", 7)
    part = heats.from_text(done.stdout, "x").parts[0]
    assert (part.source, part.phase, part.tokens, part.counts) == (
        "mine",
        Phase.PREFILL,
        7,
        {0: (0, 5, 0, 0)},
    )


def test_exports_within_a_budget(tmp_path: Path) -> None:
    rows = [[(e * 7 + la) % EXPERTS + 1 for e in range(EXPERTS)] for la in range(LAYERS)]
    heat = write(tmp_path / "h.csv", rows)
    one = 3 * 128 * 64 * 2  # bytes of an expert
    budget = 10.5 * one / 2**20
    perf = json.loads(
        run("heat", "export", heat, "--to", "moe-layer-perf", "--model", MODEL, "--budget", budget).stdout
    )
    assert sum(len(layer["experts"]) for layer in perf["layers"]) == 10
    trace = run("heat", "export", heat, "--to", "moe-trace", "--model", MODEL, "--budget", budget).stdout
    experts = {la: {int(i) for r in rows for i in r[2:]} - {-1} for la, rows in _by_layer(trace).items()}
    assert {la: len(ids) for la, ids in experts.items()} == dict.fromkeys(range(LAYERS), 2)
    capped = run("heat", "export", heat, "--to", "moe-layer-perf", "--per-layer", 3).stdout
    assert all(len(layer["experts"]) == 3 for layer in json.loads(capped)["layers"])
    refused("heat", "export", heat, "--to", "perms", "--per-layer", 3, why="holds every expert")
    refused("heat", "export", heat, "--to", "moe-trace", "--budget", 1, why="needs --model")


def _by_layer(text: str) -> dict[int, list[list[str]]]:
    made: dict[int, list[list[str]]] = {}
    for line in text.splitlines():
        fields = line.split(",")
        made.setdefault(int(fields[1]), []).append(fields)
    return made


def demand_lines(**first: Any) -> str:
    """A demand trace of 12 steps with a ledger: 5 ms and 2 ms a miss."""
    rng = random.Random(2)
    lines = [f"step={s} layer=0 ids={','.join(map(str, rng.sample(range(16), 4)))}" for s in range(12)]
    lines += [f"step={s} need=4 resident=1 misses={s % 4} ms={5 + 2 * (s % 4)}" for s in range(12)]
    return "\n".join(lines) + "\n"


def test_a_ledger_gives_times_and_prefetch_is_judged(tmp_path: Path) -> None:
    file = tmp_path / "d.txt"
    file.write_text(demand_lines())
    args = ("simulate", file, "--policy", "lru", "--slots", 8)
    found = json.loads(run(*args, "--recall", 0.9, "--width", 8, "--json").stdout)
    assert (found["time_model"]["fixed_ns"], found["time_model"]["per_miss_ns"]) == (5_000_000, 2_000_000)
    ahead = found["runs"][0]["look_ahead"]
    assert ahead["ahead_ns"] >= ahead["plain_ns"]
    text = run(*args, "--recall", 0.9, "--width", 8).stdout
    assert "time of a step: 5.00 ms + 2.00 ms a miss" in text
    for shape in (("--shared",), ("--serial",), ("--half-life", 4)):
        assert "lru" in run(*args, *shape).stdout


def test_a_static_set_is_judged_on_steps_it_was_not_chosen_on(tmp_path: Path) -> None:
    """Six steps ask for 0..3, six for 4..7: the set of the first half serves nothing of the second."""
    file = tmp_path / "d.txt"
    file.write_text("".join(f"step={s} layer=0 ids={'0,1,2,3' if s < 6 else '4,5,6,7'}\n" for s in range(12)))
    args = ("simulate", file, "--policy", "static", "--policy", "lru", "--slots", 4, "--json")
    half = {row["policy"]: row["hit_rate"] for row in json.loads(run(*args).stdout)["runs"]}
    assert half == {"static": 0.0, "lru": pytest.approx(5 / 6)}
    hot = write(tmp_path / "h.csv", [[9 if e in (4, 5, 6, 7) else 0 for e in range(8)]])
    told = {
        r["policy"]: r["hit_rate"]
        for r in json.loads(run(*args, "--hot", hot, "--warm-up", 0).stdout)["runs"]
    }
    assert told == {"static": 0.5, "lru": pytest.approx(10 / 12)}
    refused(*args, "--warm-up", 0, why="needs --hot")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("simulate", "{d}", "--policy", "fifo"), "is none of lru"),
        (("simulate", "{d}", "--budget", "1"), "needs --model"),
        (("simulate", "{d}", "--recall", "0.5"), "give both"),
        (("simulate", "{d}", "--miss-ms", "0.5"), "give both"),
        (("simulate", "/nowhere"), "/nowhere"),
        (("heat", "report", "{d}", "--map", "x.gif"), ".svg"),
        (("heat", "report", "/nowhere"), "/nowhere: no such file"),
        (("heat", "report", "{folder}"), "folder: is a folder, a file is needed"),
        (("heat", "report", "{plan}"), "is a plan, a routing profile is needed"),
        (("simulate", "{plan}"), "is a plan, a routing profile is needed"),
        (("heat", "import", "{empty}"), "empty file"),
        (("heat", "merge", "{d}", "-w", "1", "-w", "2"), "one for each"),
        (("heat", "trace", str(MODEL)), "at least one prompt"),
        (("heat", "trace", str(MODEL), "--prompts", "{empty}"), "no prompt"),
        (("heat", "trace", "{d}", "--text", "x"), "not a GGUF"),
        (("heat", "import", "{d}", "--permutation", str(MODEL)), "no permutation"),
    ],
)
def test_refusals_are_one_line(args: tuple[str, ...], why: str, tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text(demand_lines())
    (tmp_path / "empty").write_text("")
    (tmp_path / "folder").mkdir()
    names = {"d": tmp_path / "d.txt", "empty": tmp_path / "empty", "folder": tmp_path / "folder"}
    names["plan"] = ROOT / "plans" / "Qwen3.6-27B-q4_K--rtx4090-ddr5.yaml"
    refused(*(arg.format(**names) for arg in args), why=why)


def test_an_interrupted_trace_leaves_nothing(tmp_path: Path) -> None:
    many = tmp_path / "many.txt"
    many.write_text("\n---\n".join(["def f(x):"] * 3000))
    command = ["atsplan.py", "heat", "trace", str(MODEL), "--prompts", str(many), "-n", "200"]
    process = subprocess.Popen(
        [sys.executable, *command, "-o", str(tmp_path / "h.csv")],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        assert until(lambda: any(map(_reads_the_model, descendants(process.pid))), PATIENCE_S)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130 and said.decode().strip().endswith("atsplan: interrupted")
    assert [p.name for p in tmp_path.iterdir()] == ["many.txt"]


def _reads_the_model(pid: int) -> bool:
    """Whether a process is the engine's, at work: it has the model in its memory."""
    try:
        return str(MODEL) in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def test_heat_that_does_not_say_its_tokens_is_trusted_alike_by_report_and_solve(
    tmp_path: Path,
) -> None:
    """A tool may write counts alone: the tokens they are of are theirs by the choices of a token."""
    table = ROOT / "plans" / "inputs" / "Qwen3-30B-A3B-Q4_K_M.inventory.yaml"
    lines = ["# heat: 1", "# model:", "# experts: 128", "# used: 8", "layer,expert,count"]
    lines += [
        f"{la},{e},{20_000 if e < 16 and not la % 2 else 2_800}" for la in range(48) for e in range(128)
    ]
    heat = tmp_path / "heat.csv"
    heat.write_text("\n".join(lines) + "\n")
    said = json.loads(run("heat", "report", heat, "--model", table, "--json").stdout)["verdict"]
    inventory = inventories.from_text(table.read_text(), table.name)
    assert known_of_heat(heat, inventory, Workload(n_ctx=4096)).verdict == said
    assert "lift 1.6" in said
