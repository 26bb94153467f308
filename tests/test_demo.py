"""The demonstration: its own steps, and how it stops."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from engines import ROOT

from commands.demo import LARGER, ROUTING, _where_it_wins, packed, write_moe
from profiler.synth.synth import SynthSpec, write
from runtime.verify.same_logits import same_logits


def demo(cwd: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atsplan", "demo", "--small", *options]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_a_failing_step_ends_it_with_the_steps_exit_code(tmp_path: Path) -> None:
    done = demo(tmp_path, "--engine", str(tmp_path / "none"))
    assert done.returncode == 3
    assert "$ atsplan inventory moe.gguf\n" in done.stdout
    first, last = done.stderr.splitlines()[-2:]
    assert "no such file or folder" in first
    assert last.startswith("atsplan: demo stopped: `atsplan profile moe.gguf")
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = demo(tmp_path, "--folder", "file")
    assert done.returncode == 2
    assert done.stderr.startswith("atsplan: file")
    assert len(done.stderr.splitlines()) == 1


def test_a_fetch_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    """While pip, which has begun its folders, waits for an index that never answers."""
    passing, made = tmp_path / "passing", tmp_path / "made"
    passing.mkdir()
    command = [sys.executable, "-m", "atsplan", "demo", "--folder", str(made)]
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(60)
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        own = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": url, "TMPDIR": str(passing)}
        with subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as child:
            asked, _ = index.accept()
            with asked:
                child.send_signal(signal.SIGINT)
                _, told = child.communicate(timeout=60)
    assert child.returncode == 130 and told.endswith(b"atsplan: interrupted\n"), told
    assert [*passing.iterdir(), *(path for path in made.rglob("*") if not path.is_dir())] == []
    assert list((made / "models").iterdir()) == []


def test_the_model_of_the_demonstration_is_always_the_same(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_moe(tmp_path / name)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_equal_weights_give_equal_bits_and_others_do_not(tmp_path: Path, dense_model: Path) -> None:
    again = write(tmp_path / "again.gguf", SynthSpec("llama", alignment=4096))
    other = write(tmp_path / "other.gguf", SynthSpec("llama", seed=2))
    same = same_logits(None, dense_model, again)
    assert (same.same, same.n_tokens, same.n_vocab, same.largest) == (True, 32, 512, 0)
    differs = same_logits(None, dense_model, other)
    assert not differs.same
    assert differs.largest > 0.1


def test_what_is_packed_is_that_of_the_plans() -> None:
    for name in (LARGER, ROUTING):
        assert packed(name).samefile(ROOT / "plans" / "inputs" / name)


def test_it_ends_with_a_case_in_which_the_plan_wins(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By so much that it is told from the best stock rule in spite of the predictions' error."""
    _where_it_wins(tmp_path)
    told = capfd.readouterr().err
    line = next(text for text in told.splitlines() if text.startswith("Lanes: "))
    factor = re.search(r"a request (\d\.\d\d)x as fast as by the best stock rule\.", line)
    assert factor and float(factor[1]) >= 1.3, line
    assert "Whole layers, as --n-cpu-moe places them: the plan " in told and "Why: slots" in told
