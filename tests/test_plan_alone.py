"""What a plan disproves by itself: changed numbers and names are found without model and profile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from engines import ROOT

from atsplan import main
from planner.check.plan_alone import faults
from planner.plan.plan import from_text

PLANS = sorted((ROOT / "plans").glob("*--*.yaml"))
HYBRID = ROOT / "plans" / "gemma-4-26B-A4B-Q4_K_M+hybrid--rtx3060-12gb-ddr4.yaml"
ONE = ROOT / "plans" / "Qwen3-30B-A3B-Q4_K_M--rtx4060-8gb-ddr5.yaml"


def check(tmp_path: Path, text: str) -> tuple[int, str]:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    done = CliRunner().invoke(main, ["check", "--allow-missing", str(path)])
    return done.exit_code, done.output


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_plans_in_git_agree_with_themselves(path: Path) -> None:
    assert faults(from_text(path.read_text(), str(path))) == []


@pytest.mark.parametrize(
    ("pattern", "new", "rule"),
    [
        (r"(predicted:\n  tpot_ns: \d+)\d\n", r"\1\n", "cost"),
        (r"(predicted:\n  tpot_ns: \d+\n  prefill_ns: \d+)\d\n", r"\1\n", "cost"),
        (r"objective_ns: (\d+)\d", r"objective_ns: \1", "cost"),
        (r"(name: CUDA0, .*weights_bytes: \d+)\d", r"\1", "memory"),
        (r"(name: CPU, .*weights_bytes: \d)", r"\g<1>9", "memory"),
        (r"(- \{unit: blk\.3\.attention, site: )'gpu:CUDA0'", r"\1'gpu:CUDA1'", "sites"),
        (r"(- \{unit: blk\.3\.experts, site: )cpu", r"\1'gpu:CUDA0'", "overrides"),
        (r"(- \{unit: blk\.40\.experts, site: )'gpu:CUDA0'", r"\1cpu", "overrides"),
        (r"(- \{first: 0, last: \d+, device: )CUDA0", r"\1CUDA7", "sites"),
        (r"(pattern: .*, buffer: )CPU", r"\1CUDA0", "overrides"),
        (r"(pattern: .*, tensors: )\d+", r"\g<1>5", "overrides"),
        (r"(table_digest: 'sha256:)[0-9a-f]", r"\1", "inputs"),
        (r"(profile_digest: ')sha256:", r"\1md5:", "inputs"),
        (r"(- \{unit: blk\.3\.router, site: 'gpu:CUDA0', size_bytes: )", r"\g<1>9", "memory"),
        (r"(first: 0, last: )48", r"\g<1>20", "sites"),
        (r"(name: n-cpu-moe, setting: .*tpot_ns: )\d(\d+)", r"\g<1>1\2", "optimal"),
    ],
)
def test_a_changed_value_is_found_without_inputs(pattern: str, new: str, rule: str, tmp_path: Path) -> None:
    text, count = re.subn(pattern, new, ONE.read_text(), count=1)
    assert count == 1 and text != ONE.read_text()
    code, said = check(tmp_path, text)
    assert code == 1, said
    found = {line.rpartition("[")[2].rstrip("]") for line in said.splitlines() if line.endswith("]")}
    assert rule in found, said
    assert "none with findings" not in said


def test_every_process_says_the_same(tmp_path: Path) -> None:
    """Sets of texts have another order in every process: layers of one override are told in theirs."""
    text, count = re.subn(
        r"(hybrid:CUDA0:)\d+((?:\+\d+)?', tensors: \d+)", r"\g<1>63\2", HYBRID.read_text(), count=1
    )
    assert count == 1 and text != HYBRID.read_text()
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    words = [sys.executable, "-m", "atsplan", "check", "--allow-missing", "--json", str(path)]
    said = set()
    for seed in range(4):
        variables = {**os.environ, "PYTHONHASHSEED": str(seed)}
        said.add(subprocess.run(words, capture_output=True, text=True, env=variables).stdout)
    assert len(said) == 1 and "an override puts tensors of layer" in said.pop()


def test_a_misspelt_site_is_no_plan(tmp_path: Path) -> None:
    text = re.sub(r"(blk\.3\.experts, site: )cpu", r"\1cpuu", ONE.read_text())
    code, said = check(tmp_path, text)
    assert code == 2 and "'cpuu' is no site" in said


@pytest.mark.parametrize(
    "words",
    [
        ("GLM-4.5-q4_K", "--machine", "rtx4090-ddr5", "--budget", "20000", "--mtp", "--page"),
        ("gemma-4-26B-A4B-Q4_K_M", "--machine", "2x-rtx4060ti-16gb", "--budget", "4000"),
        ("Qwen3.5-0.8B-q8_0", "--machine", "rtx4060-8gb-ddr5", "--budget", "500"),
        ("Qwen3-4B-Instruct-2507-q4_K", "--machine", "rtx4060-8gb-ddr5", "--budget", "1500", "--contiguous"),
        ("Qwen3-30B-A3B-Q4_K_M", "--machine", "rtx4060-8gb-ddr5", "--budget", "7000", "--hybrid"),
        ("Qwen3-30B-A3B-Q4_K_M", "--machine", "rtx4060-8gb-ddr5", "--budget", "7000", "--pin", "blk.7.*=cpu"),
    ],
    ids=lambda words: words[0],
)
def test_plans_of_other_kinds_agree_with_themselves(words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    model = ROOT / "plans" / "inputs" / f"{words[0]}.inventory.yaml"
    made = CliRunner().invoke(main, ["solve", str(model), *words[1:], "-o", str(path)])
    assert made.exit_code == 0, made.output
    assert faults(from_text(path.read_text(), str(path))) == []
