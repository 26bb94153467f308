"""How the experts in slots change with the text: settled by a plan, told to a load, replayed on a trace."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Policy(StrEnum):
    """Who stays in the slots."""

    STATIC = "static"  # the seed
    LRU = "lru"  # what was used last
    LFU = "lfu"  # what was used most, counts fading


@dataclass(frozen=True, slots=True)
class Adaptation:
    """How the experts in the slots of a layer change."""

    policy: Policy = Policy.STATIC
    half_life: int = 64  # tokens, in which a count fades to a half
    protect: int = 0  # first experts of the seed, which never leave
    upload_bytes: int = 0  # a layer and step; saved up until they are an expert's
    refill_bytes: int = 0  # a layer, once after a prompt
    least_misses: int = 0  # > 0: experts come on demand, in steps that miss so many


STAYS = Adaptation()
