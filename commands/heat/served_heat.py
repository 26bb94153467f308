"""Which experts a served plan's router chose, as heat: counted by the devices that hold experts in slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from commands.shared.console import say, write_text
from planner.constants import EXPERTS_KEY
from planner.errors import AtsplanError
from runtime.child.meanwhile import repeated

if TYPE_CHECKING:
    from planner.model.gguf.reader import ModelFile
    from planner.routing.expert_counts import Heat
    from runtime.hybrid.device import Block

_EVERY_S = 30.0
SOURCE = "serve"


@contextmanager
def heat_written(
    path: Path,
    file: ModelFile,
    blocks: Callable[[], Iterable[tuple[str, Block]]],
    every_s: float = _EVERY_S,
) -> Iterator[None]:
    """Keep a heat file of what `blocks` count since the model was loaded, now and then and at the end."""

    def write() -> None:
        heat = heat_of_blocks(file, [block for _, block in blocks()])
        if not heat.parts:
            return
        from planner.routing.expert_counts import to_text

        try:
            write_text(path, to_text(heat))
        except (AtsplanError, OSError) as problem:
            say(f"note: {path}: not written: {problem}")

    try:
        with repeated(lambda ended: write(), every_s):
            yield
    finally:
        write()


def heat_of_blocks(file: ModelFile, blocks: Iterable[Block]) -> Heat:
    """Counts of a model's routed layers, by original expert; without parts where nothing was chosen yet.

    A draft model on the same device is left out: the first model that was loaded is the one that is served.
    Choices count prompts and answers together. Tokens are those of the layer that saw most.
    """
    from planner.model.routed_layers import moe_shape
    from planner.routing.expert_counts import Heat, Part, Phase

    shape = moe_shape(file.inventory)
    own = [b for b in blocks if b.kind == "exps" and b.experts == shape.n_expert and b.block in shape.layers]
    first = min((b.model for b in own), default=0)
    orders = {kv.key: kv.value for kv in file.headers[0].header.kvs if kv.key.startswith(EXPERTS_KEY)}
    counts: dict[int, tuple[int, ...]] = {}
    for block in own:
        if block.model == first and any(block.chosen):
            order = orders.get(f"{EXPERTS_KEY}{block.block}")
            counts[block.block] = _by_id(block.chosen, order if isinstance(order, tuple) else None)
    tokens = max((sum(row) for row in counts.values()), default=0) // max(shape.n_used, 1)
    parts = (Part(SOURCE, Phase.MIXED, tokens, counts),) if counts else ()
    return Heat(shape.digest, shape.n_expert, shape.n_used, parts)


def _by_id(chosen: tuple[int, ...], order: tuple[object, ...] | None) -> tuple[int, ...]:
    """Counts by position in the file as counts by original id."""
    if order is None:
        return chosen
    made = [0] * len(chosen)
    for position, expert in enumerate(order):
        if isinstance(expert, int):
            made[expert] = chosen[position]
    return tuple(made)
