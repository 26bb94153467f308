"""The trained fixture: a byte-level qwen3moe of 1.9 million weights, and what PyTorch says about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parent / "data" / "tiny-moe.gguf"
LAYERS, EXPERTS, USED = 4, 16, 4


def reference() -> dict[str, Any]:
    """`judged` (bits per byte on unseen text) and, by prompt, text, last logits and chosen experts."""
    data: dict[str, Any] = json.loads(MODEL.with_suffix(".json").read_text())
    return data
