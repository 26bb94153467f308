"""Other experts for the slots that a plan has, by routing that was counted since: the sites stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.check.reprice import edited, reprice
from planner.constants import PPM
from planner.errors import AnswerIsNo
from planner.learn.refine import GAIN_PPM
from planner.machine.profile import Profile
from planner.model.inventory import Inventory
from planner.plan.known import Known
from planner.plan.load_spec import load_spec, newcomers
from planner.plan.plan import Plan


@dataclass(eq=False)
class NothingToSeat(AnswerIsNo):
    """A plan without slots, or routing in which no experts are used more than others."""

    why: str

    def message(self) -> str:
        return f"no other experts for the slots: {self.why}"


@dataclass(frozen=True, slots=True)
class Reseated:
    """A plan before and after its slots got other experts, both priced for the routing at hand."""

    before: Plan
    after: Plan
    moved: int  # experts that come
    layers: int  # in so many layers

    @property
    def gain_ppm(self) -> int:
        """Of the request's time."""
        was, now = self.before.predicted.objective_ns, self.after.predicted.objective_ns
        return max(was - now, 0) * PPM // max(was, 1)

    @property
    def worth_it(self) -> bool:
        """The rule of `refine`: another plan must bring 3 %."""
        return self.gain_ppm >= GAIN_PPM


def reseated(
    plan: Plan,
    inventory: Inventory,
    profile: Profile,
    routing: Known,
    served: Mapping[int, tuple[float, ...]],
) -> Reseated:
    """The plan with the experts in its slots that `routing` uses most.

    `served`: by layer, the share of that routing's choices that the first experts of the plan's own orders
    serve. Raises NothingToSeat.
    """
    if not load_spec(plan).residents:
        raise NothingToSeat("the plan has none")
    if not routing.curves:
        raise NothingToSeat(f"the routing is {routing.verdict or 'not known'}")
    judged = plan.constraints.model_copy(update={"heat_digest": routing.heat_digest})
    here = plan.model_copy(update={"constraints": judged})
    before = reprice(here, inventory, profile, replace(routing, curves=served)).plan
    after = edited(here, inventory, profile, routing)  # optimal for other routing, if for any
    return Reseated(before, after, *newcomers(load_spec(plan).residents, load_spec(after).residents))
