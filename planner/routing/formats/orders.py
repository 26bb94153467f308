"""Where a permutation of experts is recorded: plans, rewritten models, perms.json of mbolt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from planner.errors import FileProblem
from planner.model.gguf.expert_orders import expert_orders
from planner.model.gguf.header import Bytes, parse_header
from planner.plan import plan as plans
from planner.routing.formats.binary import mbolt_orders

Orders = Mapping[int, Sequence[int]]  # layer -> original expert id at each position


def read_orders(data: Bytes, path: str, layout: str = "heat") -> Orders:
    """The permutation in a plan, in a rewritten GGUF or in a perms.json (`layout`: heat, chain or clique).

    Raises FileProblem when the file records none.
    """
    if data[0:4] == b"GGUF":
        orders = model_orders(data, path)
    else:
        try:
            text = bytes(data[0 : len(data)]).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise FileProblem(path, "no permutation that this program knows") from None
        orders = (
            _json_orders(text, path, layout) if text.lstrip().startswith("{") else _plan_orders(text, path)
        )
    if not orders:
        raise FileProblem(path, "records no permutation of experts")
    return orders


def model_orders(data: Bytes, path: str) -> Orders:
    """The permutation that a rewritten model carries; empty when it carries none."""
    header = parse_header(data, path)
    return expert_orders(header, path) or mbolt_orders(data, header, path)


def _plan_orders(text: str, path: str) -> Orders:
    return {entry.layer: entry.order for entry in plans.from_text(text, path).experts}


def _json_orders(text: str, path: str, layout: str) -> Orders:
    try:
        return {int(la["layer"]): [int(e) for e in la[f"{layout}_perm"]] for la in json.loads(text)["layers"]}
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as problem:
        raise FileProblem(path, f"no perms.json with {layout}_perm in each layer: {problem}") from None
