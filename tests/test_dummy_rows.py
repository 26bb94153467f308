"""Rows of a trace that repeat one choice for many tokens are dummies: found, said, left out of the counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from click.testing import CliRunner

import atsplan
from planner.routing import trace as traces

WEIGHTS = [0.4, 0.3, 0.2, 0.1]


def routes(path: Path, dummies: int, tokens: int) -> Path:
    """A vLLM-like log of one layer: `dummies` rows of the profiling run, then real ones."""
    rng = np.random.default_rng(7)
    rows = [[3, 1, 4, 15]] * dummies + [rng.permutation(60)[:4].tolist() for _ in range(tokens)]
    lines = [
        {"type": "route", "req_id": "r", "token_idx": i, "layer": 0, "topk_ids": ids, "topk_weights": WEIGHTS}
        for i, ids in enumerate(rows)
    ]
    meta = {"type": "meta", "model": "x", "num_experts": 60, "top_k": 4}
    path.write_text("\n".join(json.dumps(each) for each in (meta, *lines)) + "\n")
    return path


def run(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(atsplan.main, [str(word) for word in words])
    return done.exit_code, done.stdout, done.stderr


def test_dummies_are_said_and_buy_no_lift(tmp_path: Path) -> None:
    file = routes(tmp_path / "routes.jsonl", 16_384, 2_434)
    code, shown, said = run("heat", "report", file, "--json")
    assert code == 0, said
    assert "16384 of 18818 rows repeat one choice for 64 tokens and more (experts 3 1 4 15)" in said
    assert "left out" in said
    assert not json.loads(shown)["exploitable"]
    _, _, quiet = run("heat", "report", routes(tmp_path / "real.jsonl", 0, 2_434), "--json")
    assert "repeat" not in quiet


def test_a_trace_of_nothing_else_is_kept_and_said(tmp_path: Path) -> None:
    code, _, said = run("heat", "report", routes(tmp_path / "all.jsonl", 500, 0), "--json")
    assert code == 0 and "500 of 500 rows repeat one choice" in said and "nothing follows" in said


def test_runs_are_counted_within_a_layer_and_a_source() -> None:
    same = (0, 1, 2)
    rows = [(0, True, step, layer, same) for step in range(70) for layer in (0, 1)]
    other = [
        (0, True, step, 0, tuple(np.random.default_rng(step).permutation(9)[:3])) for step in range(70, 99)
    ]
    trace = traces.make("", 9, ["a"], [*rows, *other])
    assert traces.repeated(trace).sum() == 140
    short = traces.make("", 9, ["a"], rows[:100])  # 50 of each layer
    assert not traces.repeated(short).any()
    assert not traces.repeated(traces.make("", 9, [], [])).any()


def test_padding_between_real_tokens_is_found_too() -> None:
    """In every batch some rows of a fixed length: no run is long, but no text chooses alike so often."""
    rng = np.random.default_rng(3)
    rows = []
    for step in range(600):
        pad = [(1, 2, 3, 4), (9, 8, 7, 6)][step % 2]
        real = tuple(rng.permutation(32)[:4].tolist())
        rows += [(0, True, step, layer, pad if step % 4 < 2 else real) for layer in (0, 1)]
    trace = traces.make("", 32, ["a"], rows)
    assert not traces.repeated(trace).any()
    assert traces.frequent(trace).sum() == 600
    few = traces.make("", 8, ["a"], [(0, True, step, 0, (step % 3, 7)) for step in range(600)])
    assert not traces.frequent(few).any()  # a third of the tokens choose alike where there are 28 ways
    mixed = [(0, step % 10 < 9, step, 0, tuple(rng.permutation(32)[:4].tolist())) for step in range(2000)]
    assert not traces.frequent(traces.make("", 32, ["a"], mixed)).any()


def test_padding_buys_no_lift(tmp_path: Path) -> None:
    file, rng = tmp_path / "padded.jsonl", np.random.default_rng(5)
    lines = [json.dumps({"type": "meta", "model": "x", "num_experts": 60, "top_k": 4})]
    for token in range(3000):
        ids = [3, 1, 4, 15] if token % 3 else rng.permutation(60)[:4].tolist()
        row = {"type": "route", "req_id": "r", "token_idx": token, "layer": 0, "topk_ids": ids}
        lines.append(json.dumps({**row, "topk_weights": WEIGHTS}))
    file.write_text("\n".join(lines) + "\n")
    code, shown, said = run("heat", "report", file, "--json")
    assert code == 0 and "2000 of 3000 rows are one choice of a fifth of all tokens" in said, said
    assert not json.loads(shown)["exploitable"]
