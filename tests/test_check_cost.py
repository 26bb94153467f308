"""What a check costs, counted in calls: files are read once, problems of one plan share what they can."""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter

import pytest
from click.testing import CliRunner
from engines import ROOT

from atsplan import main

# Three of one model and machine, and one that copies no prompts to the GPU.
PLANS = [
    *(
        ROOT / "plans" / f"Qwen3-30B-A3B-Q4_K_M{more}--rtx4060-8gb-ddr5.yaml"
        for more in ("", "+heat", "+heat+hybrid")
    ),
    ROOT / "plans" / "Qwen3-Next-80B-A3B-Q4_K_M--rtx3060-12gb-epyc.yaml",
]


@pytest.fixture(scope="module")
def calls() -> Counter[str]:
    """How often each function of the planner is called when these plans are checked in one process."""
    profile = cProfile.Profile()
    done = profile.runcall(
        CliRunner().invoke, main, ["check", "--no-resolve", *map(str, PLANS)], catch_exceptions=False
    )
    assert (done.exit_code, done.stdout) == (0, "")
    found: Counter[str] = Counter()
    for (path, _, name), (_, count, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if "/planner/" in path:
            found[f"{path.rpartition('/planner/')[2]}:{name}"] += count
    return found


def test_inventory_and_profile_are_read_once(calls: Counter[str]) -> None:
    assert calls["model/inventory.py:from_text"] == calls["machine/profile.py:from_text"] == 2
    assert calls["model/units.py:units_of"] == 2


def test_a_plan_is_read_and_written_once(calls: Counter[str]) -> None:
    assert calls["plan/plan.py:from_text"] == calls["plan/plan.py:to_text"] == len(PLANS)


def test_no_problem_of_a_plan_is_made_twice(calls: Counter[str]) -> None:
    """Its own and the same without GPUs, both again as the engine runs untold, and one without copies."""
    assert calls["cost/build_problem.py:build_problem"] <= 15


def test_problems_of_one_plan_share_prices_and_buffers(calls: Counter[str]) -> None:
    """Weights of the CPU are repacked, or not: a table of prices each, however many problems."""
    assert calls["cost/shared_costs.py:_new"] <= 2 * len(PLANS)
    assert calls["memory/buffer_parts.py:buffer_parts"] <= 3 * len(PLANS)
