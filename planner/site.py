"""Where the bytes of a unit live and who computes with it: the one place that reads and writes a site.

| text | weights | computed by |
|---|---|---|
| `cpu` | host memory | the CPU |
| `gpu:DEVICE` | device memory | the device |
| `stripe:DEVICE:K` | the K hottest experts in device memory, the others in pinned host memory | the device |
| `hybrid:DEVICE:K` | host memory, and K of them in slots of the device | device, CPU and bus at once |
| `hybrid:DEVICE:K+G` | the same, and G more slots for what the bus brings for one step (no number: 2) | |
| `cache:DEVICE:PPM` | host memory, behind the engine's MoE cache of that share of all experts | the device |

A device's own name may hold colons (`RPC0[10.0.0.2:50052]`). A buffer of the engine is named like its
device, a buffer of this program's own like its site, so overrides are read and written here too.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema

from planner.constants import CPU
from planner.errors import InputError
from planner.quoting import short

HOST = CPU


class SiteKind(StrEnum):
    """How a unit is held; the text of a site begins with it."""

    CPU = "cpu"
    GPU = "gpu"
    STRIPE = "stripe"
    CACHE = "cache"
    HYBRID = "hybrid"

    __hash__ = str.__hash__  # Enum's own is far slower, and a problem hashes its sites all the time


_COUNTED = (SiteKind.STRIPE, SiteKind.CACHE, SiteKind.HYBRID)
_OWN = (SiteKind.STRIPE, SiteKind.HYBRID)  # buffers that the engine does not have
_MOST = {SiteKind.STRIPE: 999_999, SiteKind.CACHE: 1_000_000, SiteKind.HYBRID: 999_999}
GUESTS = 2  # slots of a layer for experts that the bus brings for one step, where a site says no number
_FORMS = "cpu, gpu:DEVICE, hybrid:DEVICE:SLOTS, stripe:DEVICE:EXPERTS or cache:DEVICE:PPM"
_AMOUNT = re.compile(r"([1-9][0-9]{0,6})(?:\+([0-9]))?", re.ASCII)


class NoSite(InputError, ValueError):
    """A text that is no site; its words say what one looks like."""


@dataclass(frozen=True, slots=True)
class Site:
    """One site; `device` is CPU for `cpu`; `amount`: slots, experts of a stripe, ppm of a cache.

    `guests`: more slots of `hybrid`, for experts of one step.
    """

    kind: SiteKind
    device: str = HOST
    amount: int = 0
    guests: int = GUESTS

    def __str__(self) -> str:
        if self.kind is SiteKind.CPU:
            return self.kind.value
        guests = f"+{self.guests}" if self.guests != GUESTS else ""
        return f"{self.kind}:{self.device}" + (f":{self.amount}{guests}" if self.amount else "")

    @staticmethod
    def parse(text: str) -> Site:
        """A site from its text. Raises NoSite."""
        return _parsed(text)

    @staticmethod
    def on(device: str) -> Site:
        """The whole unit on one device, the CPU included."""
        return _whole(device)

    @staticmethod
    def of_buffer(buffer: str) -> Site:
        """What a buffer of an override stands for. Raises NoSite for one of ours that is cut short."""
        own = buffer.partition(":")[0] in _OWN
        return _parsed(buffer) if own else Site.on(buffer)

    @property
    def buffer(self) -> str:
        """The buffer an override must name: a device, CPU, or one that the runtime makes itself."""
        if self.kind in _OWN:
            return str(self)
        return HOST if self.on_host else self.device

    @property
    def on_host(self) -> bool:
        """Whether all weights lie in host memory."""
        return self.kind in (SiteKind.CPU, SiteKind.CACHE)

    @property
    def divided(self) -> bool:
        """Whether single experts of the unit lie apart from others, on the device or before it."""
        return self.kind in _COUNTED

    @property
    def others(self) -> str:
        """Who serves a single token's experts that have no slot."""
        return "CPU and bus" if self.guests else "the CPU"

    @property
    def memory(self) -> str:
        """The memory it takes, without the amount: `gpu:CUDA0`, `stripe:CUDA0`, `cpu`."""
        return str(Site(self.kind, self.device))

    def moved(self, device: str) -> Site:
        """The same on another device; on the CPU nothing is divided."""
        return ON_CPU if device == HOST else replace(self, device=device)


ON_CPU = Site(SiteKind.CPU)


@lru_cache(maxsize=256)
def _whole(device: str) -> Site:
    return ON_CPU if device == HOST else Site(SiteKind.GPU, device)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Site:
    kind, _, rest = text.partition(":")
    if text == SiteKind.CPU:
        return ON_CPU
    if kind == SiteKind.GPU and rest and rest != HOST:
        return Site(SiteKind.GPU, rest)
    if kind in _COUNTED:
        device, _, amounts = rest.rpartition(":")
        found = _AMOUNT.fullmatch(amounts)
        plain = found is not None and (found[2] is None or kind == SiteKind.HYBRID)
        if found and plain and device and device != HOST and int(found[1]) <= _MOST[SiteKind(kind)]:
            return Site(SiteKind(kind), device, int(found[1]), int(found[2] or GUESTS))
    raise NoSite(f"'{short(text, 60)}' is no site; expected {_FORMS}")


def sites(labels: Iterable[Hashable]) -> tuple[Site, ...]:
    """The sites behind labels of the solver, which compares them and nothing else."""
    found = tuple(label for label in labels if isinstance(label, Site))
    assert found == tuple(labels)
    return found


def _validated(value: Any) -> Site:
    if isinstance(value, Site):
        return value
    if not isinstance(value, str):
        raise ValueError(f"expected a site: {_FORMS}")
    return _parsed(value)


SITE_PATTERN = r"^(cpu|gpu:.+|hybrid:.+:[1-9][0-9]*(\+[0-9])?|(stripe|cache):.+:[1-9][0-9]*)$"
SiteField = Annotated[
    Site,
    PlainValidator(_validated),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": SITE_PATTERN}),
]


def _a_buffer(value: str) -> str:
    Site.of_buffer(value)
    return value


BufferField = Annotated[str, Field(min_length=1), AfterValidator(_a_buffer)]
