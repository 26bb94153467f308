"""Which experts a served plan's router chose, as heat: counted by the devices that hold experts in slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from commands.shared.console import say, write_text
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
        from planner.routing.expert_counts import to_text

        try:
            heat = heat_of_blocks(file, [block for _, block in blocks()])
            if heat.parts:
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
    Choices count prompts and answers together. Tokens are those of the layer that saw most. InputError for
    counts that none can be, and for a file whose record of an earlier rewrite is damaged.
    """
    from planner.model.gguf.expert_orders import expert_orders
    from planner.model.routed_layers import moe_shape
    from planner.routing.expert_counts import Part, Phase, make, original

    shape = moe_shape(file.inventory)
    own = [b for b in blocks if b.kind == "exps" and b.experts == shape.n_expert and b.block in shape.layers]
    first = min((b.model for b in own), default=0)
    counts = {b.block: b.chosen for b in own if b.model == first and any(b.chosen)}
    tokens = max((sum(row) for row in counts.values()), default=0) // max(shape.n_used, 1)
    parts = [Part(SOURCE, Phase.MIXED, tokens, counts)] if counts else []
    heat = make(shape.digest, shape.n_expert, shape.n_used, parts)
    orders = expert_orders(file.headers[0].header, str(file.paths[0]))
    return original(heat, {layer: order for layer, order in orders.items() if layer in counts})
