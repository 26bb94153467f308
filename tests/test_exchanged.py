"""The benchmark of other experts in a decoding device's slots, on the CPU: followed, expert by expert."""

from __future__ import annotations

import json
from pathlib import Path

from engines import python


def test_an_order_is_followed_while_tokens_are_decoded(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--device", "CPU", "--size", "small", "--layers", 2, "--switch", 200, "--turns", 2]
    words += ["--threads", 1, "--work", tmp_path, "--out", out]
    done = python("-m", "benchmarks.hybrid.exchanged", *words, limit_s=200)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found["as_ordered"] and found["alike"] >= 0.98 and found["tokens"] == 400
    assert found["followed_s"] >= 0 and found["stays"]["gpu_used_mib"] is None  # no GPU here
    assert "/" not in found["engine"]  # results are published
