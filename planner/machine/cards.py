"""Published figures of graphics cards, from cards.yaml: each with where it stands, none guessed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from planner.errors import InputError
from planner.machine.presets import similar_names
from planner.records import Record, load

PATH = Path(__file__).with_name("cards.yaml")


class Card(Record):
    """One card as its vendor sells it."""

    name: str
    family: str  # ampere, ada, blackwell: CUDA; radeon, arc: Vulkan
    memory: int = Field(gt=0)  # GiB
    bandwidth: int = Field(gt=0)  # GB/s, nominal
    fp32: float = Field(gt=0)  # TFLOPS, nominal
    pcie: str  # generation x lanes; "": no source was at hand
    sources: tuple[str, ...]  # keys of Cards.sources


class Cards(Record):
    """The table and where its figures stand."""

    sources: dict[str, str]
    cards: tuple[Card, ...]


@dataclass(eq=False)
class UnknownCard(InputError):
    """A card that is not in the table, or whose name fits several."""

    name: str
    near: tuple[str, ...]
    several: bool = False

    def message(self) -> str:
        named = ", ".join(self.near)
        if self.several:
            return f"--gpu {self.name}: which of {named}? the memory tells: --vram 16GiB"
        meant = f" (near: {named})" if self.near else ""
        return (
            f"--gpu {self.name}: no figures of this card{meant}; give them: "
            "--vram 12GiB --gpu-bandwidth 504 --gpu-tflops 29 --pcie 4x16"
        )


@functools.cache
def table() -> Cards:
    """All cards, as the file has them."""
    return load(PATH.read_text(encoding="utf-8"), Cards, PATH.name)


def find(name: str, memory_bytes: int = 0) -> Card:
    """The card of that name (`RTX 4070`, `rtx4070`, with GeForce or without); UnknownCard for any other.

    The memory decides where a card is sold with two sizes.
    """
    asked = _plain(name)
    cards = table().cards
    exact = [card for card in cards if _plain(card.name) == asked]
    found = exact or [
        card for card in cards if _plain(card.name.rpartition(" ")[0]) == asked and _sized(card)
    ]
    if len(found) > 1:
        found = [card for card in found if card.memory << 30 == memory_bytes] or found
    if len(found) > 1:
        raise UnknownCard(name, tuple(card.name for card in found), several=True)
    if not found:
        raise UnknownCard(name, similar_names(asked, tuple(card.name for card in cards)))
    return found[0]


def _sized(card: Card) -> bool:
    return card.name.endswith("GB")


def _plain(name: str) -> str:
    letters = "".join(letter for letter in name.lower() if letter.isalnum())
    for brand in ("nvidia", "geforce", "amd", "radeon", "intel"):
        letters = letters.removeprefix(brand)
    return letters.removesuffix("gpu")  # as drivers call what is in a laptop
