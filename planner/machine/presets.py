"""Named machine descriptions that ship with the program, for planning without the machine at hand."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import InputError
from planner.machine.profile import Profile, from_text

FOLDER = Path(__file__).with_name("presets")


@dataclass(eq=False)
class UnknownMachine(InputError):
    """A `--machine` name that does not ship with the program."""

    name: str
    known: tuple[str, ...]

    def message(self) -> str:
        near = similar_names(self.name, self.known)
        named = f"no machine named {self.name}; there are {', '.join(near or self.known)}"
        parts = f"{_gpu_option(self.name)} --ram 64GiB --memory ddr5-6000 --cpu 8"
        return f"{named}; another is described by its parts: atsplan machines {parts} -o profile.yaml"


def _gpu_option(name: str) -> str:
    """The card that somebody named in the place of a machine, else an example."""
    from planner.machine.cards import UnknownCard, find

    try:
        card = find(name)
    except UnknownCard:
        return "--gpu 'RTX 4070'"
    return f"--gpu '{card.name}'" + ("" if card.pcie else " --pcie 4x16")


def similar_names(name: str, known: Sequence[str], most: int = 4) -> tuple[str, ...]:
    """Known names that begin with the given one, then those spelt alike; empty for a name like none."""
    plain = {_plain(each): each for each in known}
    asked = _plain(name)
    begun = [each for key, each in plain.items() if asked and key.startswith(asked)]
    alike = difflib.get_close_matches(asked, plain, n=most, cutoff=0.5)
    return tuple(dict.fromkeys([*begun, *(plain[key] for key in alike)]))[:most]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def names() -> tuple[str, ...]:
    """Names that `load` accepts, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def load(name: str) -> Profile:
    """The description of a named machine: `measured` is False and `source` says where its figures come from.

    Raises UnknownMachine with the nearest names.
    """
    known = names()
    if name not in known:
        raise UnknownMachine(name, known)
    path = FOLDER / f"{name}.yaml"
    return from_text(path.read_text(encoding="utf-8"), path.name)
