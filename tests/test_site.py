"""Sites: one text each, read and written in one place, and every kind goes through every command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from atsplan import main
from commands.shared.inputs import known_of_heat
from planner.cost.pins import parse_pin
from planner.machine.budgets import budgets_for, parse_budget
from planner.machine.presets import load
from planner.model.gguf.reader import read_model
from planner.passes.make_plan import make_plan
from planner.plan.known import Known
from planner.plan.plan import CachePoint, Plan, to_text
from planner.plan.request import Request
from planner.routing.expert_counts import Part, Phase, make
from planner.routing.expert_counts import to_text as heat_text
from planner.site import NoSite, Site, SiteKind
from planner.workload import Workload
from profiler.synth.synth import SynthSpec, write
from rewriter.regions import regions
from rewriter.rewrite import RewriteOptions, decide

EXPERTS = 16
REMOTE = "RPC0[10.0.0.2:50052]"


@pytest.mark.parametrize(
    ("text", "site"),
    [
        ("cpu", Site(SiteKind.CPU)),
        ("gpu:CUDA0", Site(SiteKind.GPU, "CUDA0")),
        (f"gpu:{REMOTE}", Site(SiteKind.GPU, REMOTE)),
        ("hybrid:CUDA1:12", Site(SiteKind.HYBRID, "CUDA1", 12)),
        ("hybrid:CUDA1:12+0", Site(SiteKind.HYBRID, "CUDA1", 12, 0)),
        (f"hybrid:{REMOTE}:12+9", Site(SiteKind.HYBRID, REMOTE, 12, 9)),
        ("stripe:CUDA1:12", Site(SiteKind.STRIPE, "CUDA1", 12)),
        (f"stripe:{REMOTE}:3", Site(SiteKind.STRIPE, REMOTE, 3)),
        ("cache:CUDA0:250000", Site(SiteKind.CACHE, "CUDA0", 250_000)),
    ],
)
def test_a_site_is_its_text(text: str, site: Site) -> None:
    assert Site.parse(text) == site and str(site) == text
    assert Site.of_buffer(site.buffer).device == (site.device if not site.on_host else "CPU")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "cpuu",
            "CPU",
            "gpu",
            "gpu:",
            "gpu:CPU",
            "stripe:CUDA0",
            "stripe:CUDA0:",
            "stripe::4",
            "disk:CUDA0",
        ),
        *(
            "hybrid:CUDA0:4+",
            "hybrid:CUDA0:4+10",
            "hybrid:CUDA0:4+-1",
            "hybrid:CUDA0:+1",
            "hybrid:CUDA0:4+1+1",
        ),
        *("stripe:CUDA0:4+0", "cache:CUDA0:4+2", "hybrid:CUDA0:4+٤"),
        *("stripe:CUDA0:0", "stripe:CUDA0:04", "stripe:CUDA0:-1", "stripe:CUDA0:x", "stripe:CUDA0:٤"),
        *(
            "stripe:CPU:4",
            "cache:CUDA0",
            "cache:CUDA0:1000001",
            "cache:CUDA0:99999999999999999999",
            "cpu:CUDA0",
        ),
    ],
)
def test_anything_else_is_no_site(text: str) -> None:
    with pytest.raises(NoSite, match="is no site; expected cpu, gpu:DEVICE"):
        Site.parse(text)


def test_a_plan_with_such_a_site_is_refused_by_its_line(made: Callable[[str], Plan], tmp_path: Path) -> None:
    text = to_text(made("cpu"))
    path = tmp_path / "plan.yaml"
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if "site: cpu," in line)
    lines[at] = lines[at].replace("site: cpu,", "site: cpuu,")
    path.write_text("\n".join(lines) + "\n")
    found = run("check", path)
    assert (
        found.exit_code == 2
        and f"plan.yaml:{at + 1}: " in found.output
        and "'cpuu' is no site" in found.output
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of some MiB a layer, so that a stripe's granules mean something."""
    spec = SynthSpec("qwen3moe", n_layers=3, n_embd=512, n_expert=EXPERTS, n_ff_exp=1024)
    return write(tmp_path_factory.mktemp("sites") / "moe.gguf", spec)


@pytest.fixture(scope="module")
def heat(model: Path) -> Path:
    """A file beside the model that says its late experts are the hot ones."""
    counts = dict.fromkeys(range(3), tuple(10 + 400 * (n >= EXPERTS // 2) for n in range(EXPERTS)))
    path = model.with_name("x.heat.csv")
    path.write_text(heat_text(make("", EXPERTS, 2, [Part("chat", Phase.DECODE, 9_000, counts)])))
    return path


@pytest.fixture(scope="module")
def made(model: Path, heat: Path) -> Callable[[str], Plan]:
    """The planner's own plan with the experts of layer 1 at a site of this kind."""
    inventory, profile = read_model(model).inventory, load("rtx4090-ddr5")
    plans: dict[str, Plan] = {}

    def plan(kind: str) -> Plan:
        if kind not in plans:
            pins = {
                "cpu": ("blk.1.experts=cpu", "blk.*.attention=gpu"),
                "cache": ("blk.*.experts=cache",),
            }.get(kind, (f"blk.1.experts={kind}", "blk.*.attention=gpu"))
            work = Workload(n_ctx=512, n_ubatch=64, prompt=64, gen=64)
            known = Known(cache=(CachePoint(share_ppm=250_000, hit_ppm=800_000),) if kind == "cache" else ())
            if kind == "stripe":
                known = known_of_heat(heat, inventory, work)
            budgets = budgets_for(profile, parse_budget("2000"))
            request = Request(budgets, work, pins=tuple(map(parse_pin, pins)), hybrid=kind == "hybrid")
            plans[kind] = make_plan(inventory, profile, request, known)
        return plans[kind]

    return plan


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.mark.parametrize("kind", list(SiteKind))
def test_every_kind_that_the_planner_makes_goes_through_every_command(
    kind: SiteKind, model: Path, heat: Path, made: Callable[[str], Plan], tmp_path: Path
) -> None:
    plan = made(kind.value)
    placed = next(p.site for p in plan.units if p.unit == "blk.1.experts")
    assert placed.kind is kind
    path, out = tmp_path / "plan.yaml", tmp_path / "out.gguf"
    path.write_text(to_text(plan))
    beside = ("--heat", heat) if kind is SiteKind.STRIPE else ()
    _ends(run("check", path, "--model", model, *beside))
    assert "experts" in _ends(run("explain", path, "--model", model)).stdout
    _ends(run("diff", path, path))
    _ends(run("rewrite", model, "--plan", path, "-o", out))
    file = read_model(model)
    names = {r.name for r in decide(file, plan, out.name, RewriteOptions(), "plan.yaml").regions}
    assert placed.memory in names
    _ends(run("verify", model, out, "--plan", path))
    shown = _ends(run("export", path, "--model", "model.gguf", "--inventory", model)).stdout
    assert ("--moe-cache-mib" in shown) == (kind is SiteKind.CACHE)
    if kind is not SiteKind.STRIPE:  # memory of two kinds in one tensor exists on an NVIDIA GPU only
        loaded = run("run", out, "--plan", path, "--device-map", "CUDA0=CPU", "-p", "a", "-n", "2")
        _ends(loaded)


def _ends(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


def test_only_memories_of_the_plan_hold_tensors(model: Path, made: Callable[[str], Plan]) -> None:
    file, plan = read_model(model), made("cpu")
    from planner.model.units import units_of

    units = units_of(file.inventory).units
    found = regions(file.inventory, plan, units, "plan.yaml")
    assert sum(len(r.tensors) for r in found) == len(file.inventory.tensors)
