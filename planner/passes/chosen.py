"""A placement with its price, and how simple it is."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost.build_problem import Priced
from planner.cost.placed import layer_devices_of
from planner.machine.host_memory import HostMemory
from planner.site import sites
from planner.solver.evaluate import Evaluation
from planner.solver.problem import Decision, Option, Solution


@dataclass(frozen=True, slots=True)
class Chosen:
    """A placement that may become the plan; `rule` names the stock rule it equals, if any."""

    priced: Priced
    solution: Solution
    evaluation: Evaluation
    bound_ns: int
    status: str
    rule: str
    doubt_ns: int = 0  # error of what it does not share with the other placements

    @property
    def doubted_ns(self) -> int:
        """Its time at worst, as it is compared with others."""
        return self.evaluation.objective_ns + self.doubt_ns

    @property
    def way(self) -> tuple[bool, ...]:
        """What it asks of the engine beyond its own settings, and of the host for tables; less is simpler."""
        settings = self.priced.settings
        pins_tables = self.priced.model.tables_bytes > 0 and settings.host_memory is HostMemory.PINNED
        return *self.beyond, not settings.repack, not settings.op_offload, pins_tables

    @property
    def beyond(self) -> tuple[bool, bool, bool]:
        """What no stock rule has: drafts, slots that follow the text, experts of a layer apart."""
        settings = self.priced.settings
        drafts = settings.speculation is not None and settings.speculation.tokens > 0
        return drafts, settings.following is not None and not self.rule, self.divided

    @property
    def divided(self) -> bool:
        """Whether single experts lie apart from others, which stock tools cannot be told."""
        return any(site.divided for _, option in self.pairs() for site in sites(option.sites))

    @property
    def opens_gpus(self) -> bool:
        """Whether its problem has a GPU at all."""
        return any(not d.host for d in self.priced.problem.devices)

    @property
    def on_host_alone(self) -> bool:
        """Whether it takes nothing of any GPU."""
        pairs = zip(self.evaluation.memory, self.priced.problem.devices, strict=True)
        return all(device.host or not size for size, device in pairs)

    def pairs(self) -> list[tuple[Decision, Option]]:
        """Every decision and the option it has."""
        return list(
            zip(self.priced.problem.decisions, self.solution.chosen(self.priced.problem), strict=True)
        )

    def layer_devices(self) -> tuple[str, ...]:
        """The layer device of each layer, speculative blocks included, and of the output head."""
        return layer_devices_of(self.priced, self.solution)
