"""Perplexity of trained models through the lanes: within a thousandth of the engine's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hybrid_runs import Ran, Run, run_all

DATA = Path(__file__).parent / "data"
TEXT = (DATA / "tiny-moe-64.txt").read_bytes()[:220]  # tokens of both models are bytes
WITHIN = 1e-3
LANES = {
    "cpu": {"stage": 0},
    "bus": {"guests": 4, "cpu_bytes_us": 1000, "bus_bytes_us": 4000, "stage": 0},
    "stage": {"guests": 4, "cpu_bytes_us": 1, "bus_bytes_us": 10**6},
}


@pytest.mark.parametrize("model", [DATA / "tiny-moe.gguf", DATA / "tiny-moe-64.gguf"], ids=lambda p: p.stem)
def test_the_lanes_cost_no_perplexity(model: Path, tmp_path: Path) -> None:
    plain = Run(model, prompt=tuple(TEXT[:120]), more=tuple(TEXT[120:]))
    runs = [plain.on(slots=3, **settings) for settings in LANES.values()]
    stock, *ours = [perplexity(ran) for ran in run_all([plain, *runs], tmp_path)]
    assert 1 < stock < 40  # a trained model and the text that it was trained on, not noise
    for lane, found in zip(LANES, ours, strict=True):
        assert found == pytest.approx(stock, rel=WITHIN), lane


def perplexity(ran: Ran) -> float:
    """Of every byte after the first, by the logits of the bytes before it."""
    logits = ran.logits[: len(TEXT) - 1].astype(np.float64)
    assert len(ran.logits) == len(TEXT)
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(logits)), np.frombuffer(TEXT, np.uint8)[1:]]
    return float(np.exp(np.mean(np.log(np.exp(logits).sum(axis=1)) - chosen)))
