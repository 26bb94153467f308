"""Files of the heat commands: profiles of any format, the shape of a model, orders, and slots to fill."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from commands.shared.console import counted, mib, next_step, out_text, read_text, say, write_text
from commands.shared.models import load_inventory
from planner.errors import FileProblem, InputError, OptionProblem
from planner.files import regular, why_not

if TYPE_CHECKING:
    from commands.shared.plan_job import Job
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
    except OSError as problem:
        raise FileProblem(str(path), why_not(problem)) from None


def shape_of(model: Path | None) -> MoeShape | None:
    """What a model routes; None without a model."""
    if model is None:
        return None
    from planner.model.routed_layers import moe_shape

    return moe_shape(load_inventory(model))


def read_profile(path: Path, model: Path | None = None, n_expert: int = 0) -> Imported:
    """A routing profile of any known format; its notes go to the terminal."""
    from planner.routing.formats.detect import read

    shape = shape_of(model)
    with mapped(path) as data, counted() as told:
        size = len(data)

        def heard(share: float) -> None:
            if share < 1:
                told(f"reading {path.name}", round(share * size), size)
            else:
                told("counting", 0, 0)

        heard(0.0)
        found = read(data, str(path), shape, n_expert, heard)
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


def judge_next(heat: Path | None, model: Path | None) -> None:
    """Name the report on a heat as the next step."""
    of = ("--model", model) if model else ()
    next_step("atsplan", "heat", "report", heat or "heat.csv", *of)


def describe(heat: Heat) -> str:
    """One line on a heat."""
    tokens = sum(part.tokens for part in heat.parts)
    counted = f"{tokens} tokens" if tokens else "tokens not known"
    sources = "1 source" if len(heat.sources) == 1 else f"{len(heat.sources)} sources"
    found = f"{len(heat.layers)} layers, {heat.n_expert} experts, {sources}, {counted}"
    found += f", {', '.join(heat.domains)}" if heat.domains else ""
    return found + (f", contexts up to {heat.depth} tokens" if heat.depth else "")


def seeded(job: Job, given: str | None) -> Job:
    """The job with the hottest experts of FILE[:NAME] in its slots, as many in each layer as the plan has.

    Layers that the heat has not seen keep the plan's. Raises OptionProblem for a plan without slots,
    NoProfile for a name that is not in the file, WrongModel.
    """
    from dataclasses import replace

    from planner.model.routed_layers import moe_shape
    from planner.routing.expert_counts import heat_of_model, hottest

    if given is None:
        return job
    if not job.spec.residents:
        raise OptionProblem("--heat", given, "fills slots, and the plan has none (solve --hybrid)")
    path, heat = _profile(given)
    order = hottest(heat_of_model(heat, moe_shape(job.file.inventory), str(path)))
    residents = tuple(
        (layer, n, order[layer][: len(experts)] if layer in order else experts)
        for layer, n, experts in job.spec.residents
    )
    changed = sum(
        len(set(new) - set(old))
        for (_, _, old), (_, _, new) in zip(job.spec.residents, residents, strict=True)
    )
    say(
        f"slots by {given}: {changed} of {sum(len(each[2]) for each in residents)} experts are not the plan's"
    )
    return replace(job, spec=replace(job.spec, residents=residents))


def _profile(given: str) -> tuple[Path, Heat]:
    """The heat that FILE or FILE:NAME means."""
    from planner.routing.expert_counts import from_text, profile

    whole = Path(given)
    file, _, name = given.rpartition(":")
    if whole.exists() or not file:
        return whole, from_text(read_text(whole), given)
    path = Path(file)
    return path, profile(from_text(read_text(path), file), name, file)
