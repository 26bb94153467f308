"""What is known of a model's routing and of the engine's own choice, beside model, machine and request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.plan.plan import CachePoint, EngineFit, ExpertOrder, Following


@dataclass(frozen=True, slots=True)
class Known:
    """Knowledge that a plan may rest on; all of it may be absent."""

    curves: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # coverage by layer
    orders: tuple[ExpertOrder, ...] = ()  # hot first, for the rewriter
    distinct: Mapping[int, float] = field(default_factory=dict)  # experts a ubatch touches, by layer
    cache: tuple[CachePoint, ...] = ()  # the engine has a MoE cache; concave hit curve
    following: tuple[Following, ...] = ()  # ways for slots to follow the text, and what they would serve
    fit: EngineFit | None = None  # what the engine's own --fit chose: one more stock rule
    heat_digest: str = ""  # of the heat file behind curves and orders
    verdict: str = ""  # of that file, in the words of `heat report`; curves are there only if it is worth it
