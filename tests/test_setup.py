"""Setting up: one line that says what to do when the machine lacks something, and shell that parses."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from engines import ROOT


def environment(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / ".ci" / "environment"), str(folder / "venv")]
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_without_a_new_enough_python_one_line_says_so(tmp_path: Path) -> None:
    program(tmp_path / "python3", "#!/bin/sh\nexit 1\n")
    done = environment(tmp_path, PYTHON=str(tmp_path / "python3"))
    assert done.returncode == 2
    assert done.stderr.startswith("atsplan needs Python 3.11 or later")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "venv").exists()


def test_a_bare_system_is_told_which_packages_it_lacks(tmp_path: Path) -> None:
    # A Python that is new enough and has nothing else, for a user who may not install packages.
    program(tmp_path / "python3", '#!/bin/sh\ncase "$2" in *version_info*3,\\ 11*) exit 0;; esac\nexit 1\n')
    program(tmp_path / "id", "#!/bin/sh\necho 1000\n")
    path = f"{tmp_path}:/usr/bin:/bin"
    done = environment(tmp_path, PYTHON=str(tmp_path / "python3"), PATH=path)
    assert done.returncode == 2
    asked = r"This system lacks what atsplan needs: sudo apt-get install (python3-venv )?libgomp1 \n"
    assert re.fullmatch(asked, done.stderr)


@pytest.mark.parametrize(("shell", "script"), [("bash", ".ci/run"), ("sh", ".ci/environment")])
def test_scripts_parse_and_may_be_run(shell: str, script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run([shell, "-n", str(ROOT / script)], check=True)
