"""From sites to `tensor_buft_overrides`: few patterns, each matching exactly the tensors it is meant to.

The engine searches every pattern (std::regex, ECMAScript) in the full tensor name and takes the first
that matches. Patterns here are anchored at both ends, escape every dot, and use only alternation,
character classes and non-capturing groups, which Python's `re` and ECMAScript read alike. No pattern
contains a comma or an equals sign, which the option parsers of the stock tools split at.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.block_names import within_block
from planner.constants import CPU
from planner.errors import InputError
from planner.model.inventory import Inventory
from planner.model.units import Kind, Unit, divisible, movable
from planner.plan.plan import Override
from planner.site import Site, SiteKind

_TIED = "token_embd.weight"


@dataclass(eq=False)
class UnplaceableUnit(InputError):
    """A unit whose site the engine cannot be told."""

    unit: str
    site: Site
    why: str

    def message(self) -> str:
        return f"unit {self.unit} cannot live at {self.site}: {self.why}"


def overrides_of(
    inventory: Inventory, units: Sequence[Unit], sites: Sequence[Site], layer_devices: Sequence[str]
) -> tuple[Override, ...]:
    """The overrides that move each tensor from where the engine would put it to its unit's site.

    `sites` has one entry a unit; `layer_devices` one a layer (NextN blocks included) and the output
    head's last. The patterns are disjoint, so their order is free; it is fixed for reproducibility.
    Raises UnplaceableUnit.
    """
    wanted = wanted_buffers(inventory, units, sites, layer_devices)
    return collate(wanted)


def wanted_buffers(
    inventory: Inventory, units: Sequence[Unit], sites: Sequence[Site], layer_devices: Sequence[str]
) -> dict[str, str]:
    """Tensors that need an override, and the buffer each must land in."""
    tied = all(tensor.name != "output.weight" for tensor in inventory.tensors)
    wanted: dict[str, str] = {}
    for unit, site in zip(units, sites, strict=True):
        buffer = site.buffer
        if unit.kind is Kind.FOREIGN or buffer == home(unit, layer_devices):
            continue
        if tied and _TIED in unit.tensors and buffer != layer_devices[-1]:
            raise UnplaceableUnit(unit.name, site, "the output head is the same tensor and lives elsewhere")
        wanted.update(dict.fromkeys(divisible(unit) if site.divided else movable(unit), buffer))
    return wanted


def home(unit: Unit, layer_devices: Sequence[str]) -> str:
    """The device whose memory the engine gives a unit when nothing overrides it."""
    if unit.kind in (Kind.EMBEDDING, Kind.LOOKUP, Kind.FOREIGN):
        return CPU  # input tables stay on the host however many layers are offloaded
    last = len(layer_devices) - 1  # tensors of layers that the model does not count stay with the head
    return layer_devices[last if unit.layer is None else min(unit.layer, last)]


def collate(wanted: Mapping[str, str]) -> tuple[Override, ...]:
    """Patterns for tensors and their buffers, layers with the same tensors joined, in layer order.

    A striped tensor has memory of its own, so each gets a pattern of its own.
    """
    grouped: dict[tuple[str, str], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    found: list[tuple[int, Override]] = []
    for name, buffer in wanted.items():
        block = within_block(name)
        if block is None or Site.of_buffer(buffer).kind is SiteKind.STRIPE:
            found.append((_first_layer(name), _exact(name, buffer)))
        else:
            layer, rest = block
            stem, _, suffix = rest.rpartition(".")
            grouped[buffer, suffix][layer].append(stem)
    for (buffer, suffix), layers in grouped.items():
        found += list(_joined(buffer, suffix, layers))
    found.sort(key=lambda each: (each[0], each[1].pattern))
    return tuple(override for _, override in found)


def escape(text: str) -> str:
    """The text as a pattern, in the spelling that ECMAScript and Python share."""
    return re.sub(r"[.^$*+?()\[\]{}|\\]", r"\\\g<0>", text)


def numbers(values: Iterable[int]) -> str:
    """An alternation that matches exactly these numbers: `9|1[0-5]|2[0-47]`."""
    by_head: dict[str, set[int]] = defaultdict(set)
    for value in values:
        head, tail = divmod(value, 10)
        by_head[str(head) if head else ""].add(tail)
    return "|".join(head + _digits(by_head[head]) for head in sorted(by_head, key=lambda h: int(h or 0)))


def _digits(tails: set[int]) -> str:
    ordered = sorted(tails)
    if len(ordered) == 1:
        return str(ordered[0])
    spans: list[list[int]] = []
    for tail in ordered:
        if spans and tail == spans[-1][1] + 1:
            spans[-1][1] = tail
        else:
            spans.append([tail, tail])
    return "[" + "".join(_span(first, last) for first, last in spans) + "]"


def _span(first: int, last: int) -> str:
    if last - first > 1:
        return f"{first}-{last}"
    return "".join(str(tail) for tail in range(first, last + 1))


def _joined(buffer: str, suffix: str, layers: Mapping[int, Sequence[str]]) -> Iterator[tuple[int, Override]]:
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for layer, stems in layers.items():
        alike[tuple(sorted(stems))].append(layer)
    for stems, numbered in alike.items():
        which = _group(numbers(numbered), len(numbered))
        names = _group("|".join(escape(stem) for stem in stems), len(stems))
        dotted = rf"\.{escape(suffix)}"
        pattern = rf"^blk\.{which}\.{names}{dotted}$"
        yield min(numbered), Override(pattern=pattern, buffer=buffer, tensors=len(stems) * len(numbered))


def _group(alternation: str, count: int) -> str:
    return f"(?:{alternation})" if count > 1 else alternation


def _exact(name: str, buffer: str) -> Override:
    return Override(pattern=f"^{escape(name)}$", buffer=buffer, tensors=1)


def _first_layer(name: str) -> int:
    block = within_block(name)
    return block[0] if block else -1
