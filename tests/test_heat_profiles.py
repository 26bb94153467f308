"""Several named profiles in one heat file: domain and depth of counts, and slots filled by one of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engines import ENVIRONMENT

from commands.shared.heat_files import seeded
from commands.shared.inputs import outside
from commands.shared.plan_job import open_job
from planner.errors import FieldProblem, OptionProblem
from planner.routing.expert_counts import (
    NoProfile,
    Part,
    Phase,
    from_text,
    hottest,
    make,
    merge,
    profile,
    to_text,
)
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write

ROOT = Path(__file__).resolve().parents[1]
ROWS = {"code": (5, 9, 0, 1), "prose": (1, 0, 7, 8)}


def heat(**domains: str) -> str:
    """Two sources, with domains and depths where they are named."""
    parts = [
        Part(name, Phase.DECODE, 10, {0: row}, domains.get(name, ""), 256 if name in domains else 0)
        for name, row in ROWS.items()
    ]
    return to_text(make("", 4, 2, parts))


def test_domain_and_depth_are_kept() -> None:
    text = heat(code="python", prose="novels")
    assert "# domain: python\n# depth: 256\n" in text
    found = from_text(text, "x")
    assert to_text(found) == text and found.domains == ("novels", "python") and found.depth == 256
    plain = from_text(heat(), "x")
    assert "domain" not in heat() and plain.domains == () and plain.depth == 0
    both = merge([found, plain])
    assert len(both.parts) == 4 and both.total()[0] == tuple(
        2 * sum(pair) for pair in zip(*ROWS.values(), strict=True)
    )
    with pytest.raises(FieldProblem):
        from_text(text.replace("depth: 256", "depth: deep"), "x")


def test_a_profile_is_found_by_domain_or_source() -> None:
    found = from_text(heat(code="python"), "x")
    assert hottest(profile(found, "python", "x")) == {0: (1, 0, 3, 2)} == hottest(profile(found, "code", "x"))
    assert hottest(profile(found, "prose", "x")) == {0: (3, 2, 0, 1)}
    with pytest.raises(NoProfile, match="python, code, prose"):
        profile(found, "law", "heat.csv")


def test_use_outside_of_what_was_counted_is_said() -> None:
    found = from_text(heat(code="python", prose="novels"), "x")
    near = Workload(n_ctx=4096, prompt=100, depth=400)
    far = Workload(n_ctx=65536, prompt=100, depth=32768)
    assert [line for line in outside(found, near) if "depth" in line] == []
    assert any("256 tokens, planned for 32868" in line for line in outside(found, far))
    assert any("novels, python" in line for line in outside(found, near))
    assert list(outside(from_text(heat(), "x"), far)) == []


def atsplan(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "atsplan.py"), *map(str, words)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=200,
        check=False,
    )


def test_import_names_what_a_file_does_not_say(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("layer,expert,count\n0,1,5\n0,3,2\n")
    done = atsplan("heat", "import", path, "--experts", "4", "--domain", "law", "--depth", "900")
    assert done.returncode == 0, done.stderr
    found = from_text(done.stdout, "x")
    assert [(part.domain, part.depth) for part in found.parts] == [("law", 900)]


def test_slots_are_filled_by_a_profile(tmp_path: Path) -> None:
    spec = SynthSpec("qwen3moe", n_layers=3, n_embd=512, n_expert=16, n_ff_exp=1024, skew=1.0)
    model = write(tmp_path / "moe.gguf", spec)
    asked = ("--machine", "rtx4090-ddr5", "--budget", "2000", "--ctx", "512", "--ubatch", "64")
    use = ("--workload", "prompt=64,gen=64", "--hybrid", "--pin", "blk.*.attention=gpu")
    plan, stock = tmp_path / "plan.yaml", tmp_path / "stock.yaml"
    for path, experts in ((plan, "hybrid"), (stock, "cpu")):
        done = atsplan("solve", model, *asked, *use, "--pin", f"blk.*.experts={experts}", "-o", path)
        assert done.returncode == 0, done.stderr
    rows = {layer: tuple(range(16)) for layer in (0, 2)}
    counts = tmp_path / "heat.csv"
    counts.write_text(to_text(make("", 16, 4, [Part("a", Phase.DECODE, 1, rows, "code")])))
    job = open_job(model, plan, (), 1)
    filled = seeded(job, f"{counts}:code").spec.residents
    for (layer, n, before), (same, _, after) in zip(job.spec.residents, filled, strict=True):
        assert (layer, n, len(before)) == (same, 16, len(after))
        assert after == (tuple(reversed(range(16)))[: len(after)] if layer in rows else before)
    assert seeded(job, str(counts)).spec.residents == filled and seeded(job, None) is job
    with pytest.raises(NoProfile):
        seeded(job, f"{counts}:law")
    with pytest.raises(OptionProblem, match="none"):
        seeded(open_job(model, stock, (), 1), str(counts))
