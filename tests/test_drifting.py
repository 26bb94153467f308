"""The benchmark of texts whose topic changes, on a small model: what it writes, and that slots follow."""

from __future__ import annotations

import json
from pathlib import Path

from engines import python


def test_slots_follow_a_topic(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    small = ["--size", "small", "--preset", "shifting", "--layers", 2, "--switch", 128, "--turns", 2]
    words = ["--device", "CPU", "--shares", "0.25", "--threads", 1, "--window", 16]
    words += ["--lockstep", "--work", tmp_path, "--rounds", 2]
    ways = "ncmoe,A,B,lfu:32:100,lfu:32:100:2"
    done = python(
        "-m", "benchmarks.rounds.drifting", *small, *words, "--contenders", ways, "--out", out, limit_s=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert "/" not in found["engine"]  # results are published
    (cell,) = found["cells"]
    rows = {row["name"]: row for row in cell["contenders"]}
    assert list(rows) == ["plain", *ways.split(",")]
    assert all(len(row["ms"]) == 256 for row in rows.values())
    wrong, right = rows["A"]["phase_hits"][1], rows["B"]["phase_hits"][1]
    assert wrong + 0.2 < right
    assert [len(row["rounds_ms"]) for row in rows.values()] == [1, *[2] * 5]
    for name in ("lfu:32:100", "lfu:32:100:2"):
        hits = rows[name]["phase_hits"]
        assert hits[0] > rows["A"]["phase_hits"][0] - 0.03
        assert hits[1] > wrong + 0.8 * (right - wrong)
        assert rows[name]["lanes"]["admitted"] > 0 == rows["A"]["lanes"]["admitted"]
    assert rows["lfu:32:100:2"]["lanes"]["admitted"] < rows["lfu:32:100"]["lanes"]["admitted"]
    # What the host does is there, by its part, so that a result says where a step's time went.
    assert all(rows["A"]["lanes"][part] >= 0 for part in ("ahead_ns", "decide_ns", "rows_ns"))
    assert "time over A's 1.000 (1.000-1.000)" in done.stdout
