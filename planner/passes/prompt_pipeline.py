"""Whether the engine pipelines prompts over several devices, and what its copies of inputs take.

llama.cpp does (llama-context.cpp) when it is given more than one device, the first layer and all others are
on listed devices, no tensor is overridden, and every GPU has events, which devices over the network have not.
It then keeps four copies of the inputs of every split, on the host too. An override that puts a tensor where
it is anyway turns this off and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.block_names import block_name
from planner.cost.build_problem import Priced
from planner.cost.paged import resident_of
from planner.memory.compute_buffer import PIPELINE_COPIES, compute_bytes, host_bytes
from planner.model.inventory import Inventory
from planner.model.units import Unit
from planner.plan.override_match import placed
from planner.plan.overrides import escape, home
from planner.plan.plan import Override
from planner.site import Site
from planner.solver.problem import Option, Problem, Solution


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What the engine would do with a placement, and whether there is room for it."""

    copies: tuple[int, ...]  # bytes by device; all zero when the engine does not pipeline
    fits: bool

    @property
    def engaged(self) -> bool:
        """Whether the engine would, left to itself."""
        return any(self.copies)

    @property
    def refused(self) -> bool:
        """Whether it must be kept from it."""
        return self.engaged and not self.fits

    def on(self, device: int) -> int:
        """Bytes of copies that the plan leaves room for."""
        return self.copies[device] if self.fits else 0


def pipeline_of(priced: Priced, solution: Solution) -> Pipeline:
    """Whether the engine pipelines a placement, and whether its copies fit.

    Where the CPU has layers between or behind those of GPUs it would be a stage too, with buffers several
    times as large: there is no room for that.
    """
    problem, chosen = priced.problem, solution.chosen(priced.problem)
    if not _engages(problem, chosen):
        return Pipeline((0,) * len(problem.devices), True)
    structure, workload = priced.model.structure, priced.prices.workload
    sizes = [compute_bytes(structure, workload, copies=n) for n in (1, PIPELINE_COPIES)]
    hosts = [host_bytes(structure, workload, copies=n) for n in (1, PIPELINE_COPIES)]
    used = {o.entry for o, d in zip(chosen, problem.decisions, strict=True) if d.layer}
    copies = tuple(
        hosts[1] - hosts[0] if device.host else (sizes[1] - sizes[0]) * (d in used)
        for d, device in enumerate(problem.devices)
    )
    hosted = any(problem.devices[d].host for d in used)
    return Pipeline(copies, not hosted and _fit(priced, solution, copies, sizes[1]))


def _engages(problem: Problem, chosen: Sequence[Option]) -> bool:
    layers = [o for o, d in zip(chosen, problem.decisions, strict=True) if d.layer]
    homes = list(dict.fromkeys(o.entry for o in layers))
    if len(homes) < 2 or problem.devices[homes[0]].host:
        return False
    if any(problem.devices[d].kind == "rpc" for d in homes):
        return False
    return all(site == Site.on(problem.devices[o.entry].device) for o in layers for site in o.sites)


def _fit(priced: Priced, solution: Solution, copies: Sequence[int], buffer: int) -> bool:
    """Whether all devices have room for their copies beside what must be in memory, paged weights apart."""
    problem = priced.problem
    held = resident_of(priced, priced.ledger.held(problem, solution))
    together = [0] * len(problem.pools)
    for d, (device, used, extra) in enumerate(zip(problem.devices, held, copies, strict=True)):
        limit = priced.prices.profile.device(device.device).max_alloc_bytes
        there = priced.resident.get(d, device.capacity_bytes)
        if used.total + extra > there or (extra and limit and buffer > limit):
            return False
        if device.pool >= 0:
            together[device.pool] += used.total + extra
    return all(size <= priced.pool_bytes(p) for p, size in enumerate(together))


def unpiped(inventory: Inventory, layer_devices: Sequence[str]) -> Override:
    """An override that changes no placement: the smallest weight of the first layer stays where it is."""
    first = f"{block_name(0)}."
    mine = [t for t in inventory.tensors if t.name.startswith(first) and t.name.endswith(".weight")]
    least = min(mine, key=lambda t: (t.size_bytes, t.name))
    return Override(pattern=f"^{escape(least.name)}$", buffer=layer_devices[0], tensors=1)


def restated(
    inventory: Inventory, units: Sequence[Unit], layer_devices: Sequence[str], overrides: Sequence[Override]
) -> Mapping[str, str]:
    """Tensors that overrides put where they would be anyway."""
    homes: dict[str, str] = {}
    for unit in units:
        homes.update(dict.fromkeys(unit.tensors, home(unit, layer_devices)))
    found = placed(inventory, [(o.pattern, o.buffer) for o in overrides])
    return {name: buffer for name, buffer in found.items() if homes.get(name) == buffer}
