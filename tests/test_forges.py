"""The pre-commit hooks, the GitHub action and the GitLab snippet do what they say, as far as seen offline."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.plan.schema import plan_schema

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = "gpt-oss-20b-MXFP4--rtx4060-8gb-ddr5.yaml"
BIN = Path(sys.executable).parent


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A scratch git repository with one plan and its inputs, and a file that is none."""
    plans = tmp_path / "repository" / "plans"
    (plans / "inputs").mkdir(parents=True)
    shutil.copy(ROOT / "plans" / SAMPLE, plans / SAMPLE)
    model, machine = SAMPLE.removesuffix(".yaml").split("--")
    for name in (f"{model}.inventory.yaml", f"{machine}.profile.yaml"):
        shutil.copy(ROOT / "plans" / "inputs" / name, plans / "inputs" / name)
    (plans.parent / "other.yaml").write_text("a: 1\n")
    subprocess.run(["git", "init", "-q", str(plans.parent)], check=True)
    subprocess.run(["git", "-C", str(plans.parent), "add", "."], check=True)
    return plans.parent


def run(command: list[str], folder: Path, **more: str) -> tuple[int, str]:
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **more}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def hook(repository: Path, name: str) -> tuple[int, str]:
    """What pre-commit does: the hook's entry on the files of the index that its pattern finds."""
    hooks = {h["id"]: h for h in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    _, listed = run(["git", "ls-files"], repository)
    files = [f for f in listed.splitlines() if re.search(hooks[name]["files"], f)]
    assert files == [f"plans/{SAMPLE}"]
    return run([*shlex.split(hooks[name]["entry"]), *files], repository)


def spoil(repository: Path) -> None:
    path = repository / "plans" / SAMPLE
    path.write_text(re.sub(r"tpot_ns: (\d+)", "tpot_ns: 1", path.read_text(), count=1))


def test_hooks_pass_on_a_good_plan_and_fail_on_a_spoilt_one(repository: Path) -> None:
    assert hook(repository, "atsplan-fmt") == (0, "")
    assert hook(repository, "atsplan-check")[0] == 0
    spoil(repository)
    code, text = hook(repository, "atsplan-check")
    assert code == 1
    assert f"plans/{SAMPLE}:" in text
    assert "predicted.tpot_ns is 1" in text


def steps() -> dict[str, Any]:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    return {step["name"]: step for step in action["runs"]["steps"]}


def test_the_action_checks_and_writes_both_reports(repository: Path, tmp_path: Path) -> None:
    # The install step makes this environment; here it is the one the tests run in.
    (tmp_path / "atsplan").mkdir()
    (tmp_path / "atsplan" / "bin").symlink_to(BIN)
    given = {
        "PLANS": "plans",
        "RESOLVE": "true",
        "SARIF": "a.sarif",
        "JUNIT": "a.xml",
        "RUNNER_TEMP": str(tmp_path),
    }
    script = ["bash", "-eo", "pipefail", "-c", steps()["Check plans"]["run"]]
    assert run(script, repository, **given)[0] == 0
    assert (repository / "a.sarif").exists() and (repository / "a.xml").exists()
    spoil(repository)
    code, _ = run(script, repository, **given | {"RESOLVE": "false"})
    assert code == 1
    assert "predicted.tpot_ns is 1" in (repository / "a.sarif").read_text()


def test_the_action_hands_every_input_to_its_script() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    step = steps()["Check plans"]
    used = set(re.findall(r"inputs\.(\w+)", " ".join(step["env"].values())))
    assert used == action["inputs"].keys()
    assert all(f"${name}" in step["run"] for name in step["env"])


def test_the_gitlab_snippet_runs(repository: Path) -> None:
    text = (ROOT / "docs" / "ci.md").read_text()
    snippet = yaml.safe_load(text.split("## GitLab")[1].split("```yaml\n")[1].split("```")[0])
    job = snippet["plans"]
    assert run(shlex.split(job["script"][-1]), repository)[0] == 0
    assert (repository / job["artifacts"]["reports"]["junit"]).exists()


def test_the_published_schema_is_the_code_s() -> None:
    assert (ROOT / "docs" / "plan.schema.json").read_text() == plan_schema()
