"""Files of the heat commands: profiles of any format, the shape of a model, recorded permutations."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from commands.shared.console import mib, out_text, say, write_text
from commands.shared.models import load_inventory
from planner.errors import FileProblem, InputError
from planner.files import regular

if TYPE_CHECKING:
    from planner.model.gguf.header import Bytes
    from planner.model.routed_layers import MoeShape
    from planner.routing.expert_counts import Heat
    from planner.routing.formats.detect import Imported
    from planner.routing.formats.orders import Orders
    from planner.routing.trace import Trace

MOST_BYTES = 1 << 30  # a trace unfolds to some thirty times its length


@contextmanager
def mapped(path: Path) -> Iterator[Bytes]:
    """The bytes of a file, mapped; FileProblem when it cannot be read, is empty, or larger than memory."""
    try:
        with regular(path) as file:
            if not os.fstat(file.fileno()).st_size:
                raise FileProblem(str(path), "empty file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                if len(data) > MOST_BYTES and data[:4] != b"GGUF":  # of which only the header is read
                    raise FileProblem(str(path), f"is larger than {mib(MOST_BYTES)}: split a trace")
                yield data
    except (OSError, FileNotFoundError, IsADirectoryError, PermissionError) as problem:
        raise FileProblem(str(path), problem.strerror or str(problem)) from None


def shape_of(model: Path | None) -> MoeShape | None:
    """What a model routes; None without a model."""
    if model is None:
        return None
    from planner.model.routed_layers import moe_shape

    return moe_shape(load_inventory(model))


def read_profile(path: Path, model: Path | None = None, n_expert: int = 0) -> Imported:
    """A routing profile of any known format; its notes go to the terminal."""
    from planner.routing.formats.detect import read

    with mapped(path) as data:
        found = read(data, str(path), shape_of(model), n_expert)
    for note in found.notes:
        say(f"{path}: {note}")
    return found


def decode_trace(found: Imported, path: Path) -> Trace:
    """The routing of single tokens, for what depends on its order; InputError where there is none."""
    if found.trace is None:
        raise InputError(f"{path}: counts only: a cache needs the order of the choices, a trace")
    if not found.trace.decode.any():
        raise InputError(f"{path}: no decode steps: expert caches serve decoding, prefill touches nearly all")
    return found.trace


def read_heat(path: Path, model: Path | None = None) -> Heat:
    """The heat of a file of any known format."""
    return read_profile(path, model).heat


def read_orders(path: Path, layout: str = "heat") -> Orders:
    """The permutation recorded in a plan, a rewritten model or a perms.json."""
    from planner.routing.formats import orders as expert_orders

    with mapped(path) as data:
        return expert_orders.read_orders(data, str(path), layout)


def write_result(target: Path | None, text: str, what: str) -> None:
    """To a file, and say so; or to stdout."""
    if target is None:
        out_text(text)
    else:
        write_text(target, text)
        say(f"{target}: {what}")


def describe(heat: Heat) -> str:
    """One line on a heat."""
    tokens = sum(part.tokens for part in heat.parts)
    counted = f"{tokens} tokens" if tokens else "tokens not known"
    found = f"{len(heat.layers)} layers, {heat.n_expert} experts, {len(heat.sources)} sources, {counted}"
    found += f", {', '.join(heat.domains)}" if heat.domains else ""
    return found + (f", contexts up to {heat.depth} tokens" if heat.depth else "")
