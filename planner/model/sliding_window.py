"""Which attention layers see only a sliding window, and how wide it is, by the engine's rules."""

from __future__ import annotations

from dataclasses import dataclass

from planner.model.inventory import Inventory


@dataclass(frozen=True, slots=True)
class _Rule:
    """An architecture's pattern when the file has none: every `period`-th layer sees everything."""

    period: int  # 0: every layer slides; 1: none
    dense_first: bool = False  # the full layer is the first of each period, not the last
    window: int = 0  # default width; 0: only slides when the file states a width
    at_0: bool = False  # a stated width of 0 is one, too: a layer sees the batch at hand alone


_RULES = {
    "afmoe": _Rule(4),
    "cohere2": _Rule(4, at_0=True),
    "cohere2moe": _Rule(4, dense_first=True, at_0=True),
    "deepseek4": _Rule(0),
    "dots3note": _Rule(1, at_0=True),
    "exaone-moe": _Rule(4, window=128, at_0=True),
    "exaone4": _Rule(4, window=4096),
    "gemma2": _Rule(2, window=4096, at_0=True),
    "gemma3": _Rule(6),
    "gemma3n": _Rule(5, at_0=True),
    "gemma4": _Rule(1, at_0=True),
    "gpt-oss": _Rule(2, at_0=True),
    "granite_swa": _Rule(1, at_0=True),
    "laguna": _Rule(4, dense_first=True),
    "lfm2": _Rule(0),
    "llama4": _Rule(4, window=8192),
    "maple": _Rule(1),
    "mellum": _Rule(4),
    "mimo2": _Rule(1, at_0=True),
    "muse-glimmer": _Rule(4, at_0=True),
    "olmo2": _Rule(4),
    "plamo3": _Rule(8),
    "smallthinker": _Rule(4, dense_first=True),
    "spark2_5": _Rule(1, at_0=True),
    "step35": _Rule(1),
}


def window(inventory: Inventory) -> int:
    """Width of the sliding window in tokens; 0 when no layer slides, or those that do see nothing before."""
    rule = _rule(inventory)
    stated = inventory.number("attention.sliding_window", rule.window) if rule else 0
    fixed = {"llama4": 8192, "smallthinker": 4096}.get(inventory.architecture, stated)
    return fixed if stated else 0


def has_window(inventory: Inventory) -> bool:
    """Whether layers may slide: there is a width, or one of 0 that the engine takes for one."""
    rule = _rule(inventory)
    stated = "attention.sliding_window" in inventory.hparams
    return window(inventory) > 0 or (rule is not None and rule.at_0 and stated)


def _rule(inventory: Inventory) -> _Rule | None:
    n_main = inventory.number("block_count") - inventory.number("nextn_predict_layers")
    if inventory.architecture == "exaone4" and n_main != 64:
        return None
    return _RULES.get(inventory.architecture)


def sliding_layers(inventory: Inventory, n_main: int) -> tuple[bool, ...]:
    """For each main layer whether its attention slides."""
    if not has_window(inventory):
        return (False,) * n_main
    pattern = inventory.hparams.get("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        return tuple(bool(v) for v in (*pattern, *(False,) * n_main))[:n_main]
    rule = _RULES[inventory.architecture]
    period = pattern if isinstance(pattern, int) and pattern >= 0 else rule.period
    return tuple(_slides(layer, period, rule.dense_first) for layer in range(n_main))


def all_sliding(inventory: Inventory, n_main: int, n_all: int) -> tuple[bool, ...]:
    """The same for all layers: a speculative block slides where the file lists it, or all layers do."""
    main = sliding_layers(inventory, n_main)
    pattern = inventory.hparams.get("attention.sliding_window_pattern")
    if inventory.architecture == "deepseek4":
        return (*main, *(True,) * (n_all - n_main))
    listed = pattern[n_main:n_all] if isinstance(pattern, tuple) and has_window(inventory) else ()
    return (*main, *map(bool, listed), *(False,) * (n_all - n_main - len(listed)))


def _slides(layer: int, period: int, dense_first: bool) -> bool:
    if period == 0:
        return True
    return layer % period != 0 if dense_first else layer % period < period - 1
