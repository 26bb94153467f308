"""Damaged profiles: whatever the bytes, the answer is heat or one line, never a crash or a hang."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import routing_files as samples
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import AtsplanError
from planner.routing import expert_counts as heats
from planner.routing.formats import detect
from planner.routing.formats import orders as expert_orders

LINES = (
    '{"type": "meta", "num_experts": 8}\n'
    '{"type": "route", "req_id": "r", "token_idx": 0, "layer": 1, "topk_ids": [0, 1], '
    '"topk_weights": [0.6, 0.4]}\n'
)


@cache
def all_samples() -> tuple[bytes, ...]:
    texts = (
        samples.positions(),
        samples.route_trace(),
        samples.topk_export(),
        samples.demand(),
        "layer,expert,count\n" + samples.plain(),
        samples.choices(),
        samples.perf(experts=[[1, 5], [3, 2]]),
        samples.perms(),
        '{"logical_count": [[0, 0], [1.0, 2.0]]}',
        LINES,
        heats.to_text(samples.read(samples.positions()).heat),
    )
    with tempfile.TemporaryDirectory() as folder:
        models = (
            samples.imatrix(Path(folder) / "i.gguf", {}),
            samples.mbolt_model(Path(folder) / "m.gguf", list(range(samples.E))),
        )
    return (*(text.encode() for text in texts), samples.route_bin(), samples.longspear(), *models)


INSERTS = [b"", b"9" * 12, b"-", b",", b"\x00", b"\xff", b"9" * 25, b"1e999", b"null", b"[", b"\n", b"NaN"]
KINDS = st.integers(0, len(all_samples()) - 1)


def check(data: bytes, with_model: bool) -> None:
    """Both readers answer, or refuse in one line."""
    try:
        assert detect.read(data, "x", samples.SHAPE if with_model else None).heat.parts
    except AtsplanError as problem:
        assert "\n" not in str(problem) and len(str(problem)) < 500
    try:
        expert_orders.read_orders(data, "x")
    except AtsplanError as problem:
        assert "\n" not in str(problem) and len(str(problem)) < 500


@settings(max_examples=400, derandomize=True, deadline=None)
@given(KINDS, st.floats(0, 1), st.integers(0, 6), st.sampled_from(INSERTS), st.booleans())
def test_damage(kind: int, place: float, cut: int, insert: bytes, with_model: bool) -> None:
    whole = all_samples()[kind]
    at = round(place * len(whole))
    check(whole[:at] + insert + whole[at + cut :], with_model)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(KINDS, st.floats(0, 1), st.booleans())
def test_cut_files(kind: int, place: float, with_model: bool) -> None:
    whole = all_samples()[kind]
    check(whole[: round(place * len(whole))], with_model)
