"""How unevenly a generated router chooses its experts."""

from __future__ import annotations

TOKENS = 2048


def coverage(skew: float, n_expert: int, n_used: int) -> float:
    """Share of routed choices that fall on the hottest half of the experts.

    Simulated: constant logits of deviation `skew` plus, for every token, independent ones of deviation 1.
    """
    import numpy as np

    draw = np.random.Generator(np.random.SFC64(7))
    logits = draw.standard_normal(n_expert) * skew + draw.standard_normal((TOKENS, n_expert))
    chosen = np.argpartition(-logits, n_used - 1, axis=1)[:, :n_used]
    counts = np.sort(np.bincount(chosen.ravel(), minlength=n_expert))[::-1]
    return float(counts[: max(1, n_expert // 2)].sum() / counts.sum())


def skew_for(wanted: float, n_expert: int, n_used: int) -> float:
    """The skew at which the hottest half of the experts serves the share `wanted` of all choices."""
    low, high = 0.0, 8.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if coverage(middle, n_expert, n_used) < wanted else (low, middle)
    return round(low, 4)
