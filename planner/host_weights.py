"""How the host holds the weights a plan leaves there: mapped from the file, or read into their own memory.

Beside a GPU the engine reads into pinned memory, from which prompts are streamed several times faster than
from a mapping (H200: 233 against 1429 ms for one prompt). Pinned pages cannot be paged out, so weights
that fill most of the memory are mapped, and what is mapped is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from planner.options import SolveOptions
from planner.plan import DeviceUse, Placement
from planner.profile import Profile

PINNED_PPM = 600_000  # of the host's memory that weights may pin


def reads(
    uses: Sequence[DeviceUse], placements: Sequence[Placement], profile: Profile, options: SolveOptions
) -> Literal["read"] | None:
    """ "read" where a GPU works with weights of the host that can be pinned; None: mapped."""
    if options.host_weights:
        return "read" if options.host_weights == "read" else None
    if not streamed(uses, placements) or options.page:
        return None
    return "read" if all(_pinnable(use, profile) for use in uses if use.kind == "cpu") else None


def streamed(uses: Sequence[DeviceUse], placements: Sequence[Placement]) -> bool:
    """Whether a GPU is used beside host weights that are computed with; stripes pin their own memory."""
    if any(p.site.startswith("stripe:") for p in placements) or all(use.kind == "cpu" for use in uses):
        return False
    return any(p.site.startswith(("cpu", "cache:")) and p.time_ns for p in placements)


def _pinnable(use: DeviceUse, profile: Profile) -> bool:
    return use.weights_bytes * 10**6 <= profile.device(use.name).memory_bytes * PINNED_PPM
