"""What devices with experts in slots say of their work while a program of the engine runs: files it rewrites.

The program is another's child by then and its files are data: read as far as a report can be long, and
dropped whole when anything in them is not what a report holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from planner.constants import MAX_LAYERS
from planner.plan.plan import MAX_EXPERTS
from runtime.hybrid.device import ROWS, Block

EVERY_MS = 1000
MAX_REPORT = 32 * 2**20  # 512 layers of 4096 experts, with a count of nine digits each
_Text = Annotated[str, Field(max_length=1000)]
_Blocks = Annotated[list[dict[str, Any]], Field(max_length=2 * MAX_LAYERS)]
_SAID = TypeAdapter(dict[str, int | _Text | _Blocks])
_BLOCK = TypeAdapter(Block)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a device says of the orders it gets: see runtime.hybrid.orders."""

    order: int = 0
    fault: str = ""


@dataclass(frozen=True, slots=True)
class LaneFiles:
    """The report of each device, by the plan's name of the device."""

    files: Mapping[str, Path]

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """Device and block, as last written; nothing of a device whose file is not there or no report."""
        for device, path in self.files.items():
            for block in read_live(path):
                yield device, block

    def answer(self, device: str) -> Answer:
        """Of a device to its last order; none yet where its file is not there or is no report."""
        said = _said(self.files[device])
        order, fault = said.get("order", 0), said.get("order_fault", "")
        return Answer(order, fault) if isinstance(order, int) and isinstance(fault, str) else Answer()


def read_live(path: Path) -> tuple[Block, ...]:
    """The blocks of the models that are loaded; () for a file that is not there or is no report."""
    held = _said(path).get("blocks", [])
    try:
        blocks = (
            tuple(_BLOCK.validate_python(_tuples(each)) for each in held) if isinstance(held, list) else ()
        )
    except (ValidationError, TypeError, RecursionError):
        return ()
    return blocks if all(map(_possible, blocks)) else ()


def _said(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_REPORT + 1)
        return _SAID.validate_json(text, strict=True) if len(text) <= MAX_REPORT else {}
    except (OSError, ValidationError, RecursionError):
        return {}


def _tuples(said: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in said.items()}


def _possible(block: Block) -> bool:
    """Whether numbers and lists are such as a block can have."""
    counts = [v for name in Block.__dataclass_fields__ if isinstance(v := getattr(block, name), int)]
    experts = 0 < block.experts <= MAX_EXPERTS and len(block.chosen) == block.experts
    slots = len(block.resident) <= block.experts and all(-1 <= e < block.experts for e in block.resident)
    rows = len(block.row_choices) == len(block.row_hits) <= ROWS
    rows &= all(hits <= choices for hits, choices in zip(block.row_hits, block.row_choices, strict=False))
    named = block.kind.isascii() and block.kind.isalpha() and len(block.kind) <= 16
    numbers = (*counts, *block.chosen, *block.row_choices, *block.row_hits)
    return experts and slots and rows and named and all(0 <= n < 2**63 for n in numbers)
