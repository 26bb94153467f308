"""Plans with experts in slots, made by the planner for a small model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from engines import ENVIRONMENT, ROOT

from planner.plan.plan import Plan, from_text, to_text
from planner.site import SiteKind

_MACHINE = ("--machine", "rtx4090-ddr5", "--budget", "2000", "--ctx", "512", "--ubatch", "64")
_PINS = ("--pin", "blk.*.attention=gpu", "--pin", "blk.*.experts=hybrid")


def slotted_plan(model: Path, folder: Path, slots: int, of: Plan | None = None) -> Plan:
    """The planner's own plan for a model, or the plan `of`, with so many slots in every layer."""
    plan = of or _solved(model, folder / "slotted.yaml")
    text = to_text(plan)
    for amount in {p.site.amount for p in plan.units if p.site.kind is SiteKind.HYBRID}:
        text = text.replace(f"hybrid:CUDA0:{amount}", f"hybrid:CUDA0:{slots}")
    return from_text(text, "plan.yaml")


def _solved(model: Path, path: Path) -> Plan:
    words = ["solve", str(model), *_MACHINE, "--workload", "prompt=64,gen=64", "--hybrid", *_PINS]
    done = subprocess.run(
        [sys.executable, "-m", "atsplan", *words, "-o", str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return from_text(path.read_text(), str(path))
