"""JSON profiles: mbolt permutations and co-activation, moe_layer_perf, EPLB counts, executed top-k rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from planner.errors import FileProblem
from planner.quoting import short
from planner.routing import trace as traces
from planner.routing.expert_counts import MAX_EXPERTS, Phase
from planner.routing.found import Found, RawPart
from planner.routing.trace import Heard, Row, lines_of

PERF_SCHEMAS = ("llama.cpp.moe_layer_perf.v1", "llama.cpp.moe_layer_opt_perf.v1")
TOPK_SCHEMA = "glm52-routing-trace-export/v2"


def parse(text: str, path: str, heard: Heard) -> Found:
    """Any JSON profile; FileProblem names the part that is wrong."""
    try:
        root = json.loads(text)
    except json.JSONDecodeError as problem:
        if problem.msg == "Extra data":
            return _route_lines(text, path, heard)
        raise FileProblem(path, f"line {problem.lineno}: not JSON: {problem.msg}") from None
    except RecursionError:
        raise FileProblem(path, "not a profile: nested too deeply") from None
    if not isinstance(root, dict):
        raise FileProblem(path, "JSON, but no routing profile: an object is needed")
    if root.get("type") in ("meta", "route"):
        return _route_lines(text, path, heard)
    try:
        return _reader(root, path, heard)(root, path)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as problem:
        raise FileProblem(path, f"broken routing profile: {type(problem).__name__} {problem}") from None


def _reader(root: Mapping[str, Any], path: str, heard: Heard) -> Callable[[Any, str], Found]:
    if root.get("schema") in PERF_SCHEMAS:
        return _perf
    if root.get("schema") == TOPK_SCHEMA:
        return partial(_executed_topk, heard=heard)
    if "logical_count" in root:
        return _logical_count
    layers = root.get("layers")
    if isinstance(layers, list) and layers and isinstance(layers[0], dict) and "heat" in layers[0]:
        return _heat_layers
    if any(isinstance(v, dict) and "hot_experts" in v for v in root.values()):
        raise FileProblem(path, "lists of hot experts without counts: coverage cannot be judged from them")
    raise FileProblem(path, f"JSON, but no routing profile: its keys are {', '.join(list(root)[:6])}")


def _counts(values: Sequence[Any]) -> dict[int, int]:
    """Non-zero counts of a dense list; ValueError for what is no count."""
    numbers = np.asarray(values, dtype=float)
    if (
        numbers.ndim != 1
        or len(numbers) > MAX_EXPERTS
        or not np.isfinite(numbers).all()
        or (numbers < 0).any()
    ):
        raise ValueError("expected non-negative counts of each expert")
    return {e: round(float(v)) for e, v in enumerate(numbers) if v}


def _heat_layers(root: Any, path: str) -> Found:
    """mbolt: perms.json (`heat` by original id) and the co-activation exports."""
    n_expert = int(root.get("n_expert") or root.get("n_expert_per_layer") or len(root["layers"][0]["heat"]))
    counts = {}
    for entry in root["layers"]:
        layer = int(entry.get("abs_layer", entry.get("layer")))
        if len(entry["heat"]) != n_expert or layer < 0 or layer in counts:
            raise ValueError(f"layer {layer}: {len(entry['heat'])} counts for {n_expert} experts")
        counts[layer] = _counts(entry["heat"])
    tokens = int(root.get("n_decode_tokens") or root.get("n_tokens") or 0)
    source = str(root.get("model", "import"))
    kind = "mbolt permutations" if "heat_perm" in root["layers"][0] else "mbolt co-activation"
    part = RawPart(source, Phase.DECODE, tokens, counts)
    return Found(kind, n_expert, int(root.get("k") or 0), parts=[part])


def _perf(root: Any, path: str) -> Found:
    """moe_layer_perf: sparse [expert, hits]; hot and cold together are the total, else `experts`."""
    if not root.get("layers"):
        raise FileProblem(path, "a moe_layer_perf file that was written with profiling off: no counts")
    counts: dict[int, dict[int, int]] = {}
    for entry in root["layers"]:
        layer = _unsigned(entry["layer"])
        hot, cold, plain = (_pairs(entry.get(k, [])) for k in ("hot_experts", "cold_experts", "experts"))
        both = {e: hot.get(e, 0) + cold.get(e, 0) for e in {*hot, *cold}}
        row = both if any(both.values()) else plain
        if row:
            counts[layer] = row
    part = RawPart("import", Phase.MIXED, 0, counts)
    return Found(
        root["schema"], int(root.get("n_expert", 0)), int(root.get("n_expert_used", 0)), parts=[part]
    )


def _pairs(listed: Sequence[Any]) -> dict[int, int]:
    made: dict[int, int] = {}
    for pair in listed:
        expert, hits = pair
        made[_unsigned(expert)] = made.get(expert, 0) + _unsigned(hits)
    return made


def _unsigned(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{short(str(value))} is no unsigned integer")
    return value


def _logical_count(root: Any, path: str) -> Found:
    """EPLB: [layers][experts], or the same for several steps in front; dense layers are all zero."""
    counts = np.asarray(root["logical_count"], dtype=float)
    if counts.ndim < 2:
        raise ValueError("logical_count has no layers")
    while counts.ndim > 2:
        counts = counts.sum(axis=0)
    rows = {layer: _counts(row) for layer, row in enumerate(counts) if row.any()}
    part = RawPart("import", Phase.MIXED, 0, rows)
    return Found("EPLB logical_count", counts.shape[1], parts=[part])


def _executed_topk(root: Any, path: str, heard: Heard) -> Found:
    """Rows of executed top-k by absolute layer, prompts by row ranges: prefill rows, then decode steps."""
    n_rows = max(len(layer["executed_topk"]) for layer in root["layers"].values())
    sources, where = _prompt_rows(root, n_rows)
    rows: list[Row] = []
    for number, (name, layer) in enumerate(root["layers"].items(), start=1):
        for index, ids in enumerate(layer["executed_topk"]):
            if index in where:
                source, decode, step = where[index]
                rows.append((source, decode, step, int(name), tuple(_unsigned(i) for i in ids)))
        heard(number / len(root["layers"]))
    rows.sort(key=lambda row: (row[0], row[1], row[2], row[3]))
    n_expert, k = int(root["routing"]["n_expert_per_layer"]), int(root["routing"]["k"])
    trace = traces.make("", 0, sources, rows)
    return Found(TOPK_SCHEMA, n_expert, k, trace=trace)


def _prompt_rows(root: Any, n_rows: int) -> tuple[list[str], dict[int, tuple[int, bool, int]]]:
    """Names of the prompts, and for each row its prompt, whether it is decode, and its step."""
    sources: list[str] = []
    where: dict[int, tuple[int, bool, int]] = {}
    for index, prompt in enumerate(root["conditional"]["prompts"]):
        sources.append(f"{prompt.get('category', 'prompt')}-{index}")
        start, prefill = int(prompt["start_row"]), int(prompt["prefill_rows"])
        for row in range(max(0, start), min(n_rows, int(prompt["end_row"]))):
            if row in where:
                raise ValueError(f"row {row} belongs to two prompts")
            decode = row >= start + prefill
            where[row] = (index, decode, row - start - prefill if decode else 0)
    return sources, where


def _route_lines(text: str, path: str, heard: Heard) -> Found:
    """JSON lines of a serving engine: {type: route, req_id, token_idx, layer, topk_ids}.

    Rows whose weights are all alike come from the engine's own warm-up and are left out.
    """
    n_expert, left_out = 0, 0
    requests: dict[str, int] = {}
    rows: list[Row] = []
    for number, line in enumerate(lines_of(text, heard), start=1):
        try:
            entry = json.loads(line) if line.strip() else {}
            if entry.get("type") == "meta":
                n_expert = int(entry.get("num_experts") or 0)
            elif entry.get("type") == "route":
                if len(set(entry.get("topk_weights") or (0, 1))) == 1 and len(entry["topk_ids"]) > 1:
                    left_out += 1
                    continue
                source = requests.setdefault(str(entry["req_id"]), len(requests))
                ids = tuple(_unsigned(i) for i in entry["topk_ids"])
                rows.append((source, True, int(entry["token_idx"]), int(entry["layer"]), ids))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise FileProblem(path, f"line {number}: broken route row: {problem}") from None
    notes = (f"{left_out} warm-up rows with equal weights left out",) if left_out else ()
    return Found("route lines", n_expert, trace=traces.make("", 0, requests, rows), notes=notes)
