"""What a placement costs with every piece that the engine's scheduler makes of it.

The problem pays for changes of device, which are the pieces of nearly all graphs. What the scheduler makes
beyond them (`graph_splits`) hangs on all layers at once, and is paid for here: what the problem says of a
placement is never more than it costs, so bounds hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.block_names import block_name
from planner.constants import CPU
from planner.cost.build_problem import OUTPUT, Model, Priced
from planner.cost.graph_splits import clears_state, graph_splits, projects_ahead
from planner.model.units import Kind
from planner.site import Site, sites
from planner.solver.evaluate import Evaluation, evaluate
from planner.solver.problem import Solution


def evaluate_placed(priced: Priced, solution: Solution) -> Evaluation:
    """Cost and violated limits of a complete placement; its splits are those of the engine's graph.

    A piece beyond the changes of device copies at most a row within one memory: the scheduler's part is paid.
    A prompt pays as often as it has ubatches.
    """
    found = evaluate(priced.problem, solution)
    devices = layer_devices_of(priced, solution)
    if _plain(priced.model, devices):
        return found
    splits = graph_splits(priced.model, devices, sites_of(priced, solution, devices))
    more_ns = max(splits - found.splits, 0) * priced.prices.calibration.split_ns
    decode_ns = priced.prices.per_token(more_ns)
    prefill_ns = more_ns * sum(count for _, count in priced.prices.batches)
    return replace(
        found,
        decode_ns=found.decode_ns + decode_ns,
        prefill_ns=found.prefill_ns + prefill_ns,
        objective_ns=found.objective_ns + priced.problem.price(decode_ns, prefill_ns),
        splits=splits,
        edges_ns=found.edges_ns + decode_ns,
    )


def layer_devices_of(priced: Priced, solution: Solution) -> tuple[str, ...]:
    """The layer device of each layer, speculative blocks included, and of the output head."""
    problem = priced.problem
    names = [d.device for d in problem.devices]
    chosen = zip(problem.decisions, solution.chosen(problem), strict=True)
    by_name = {decision.name: names[o.entry] for decision, o in chosen if decision.layer}
    head = by_name.get(OUTPUT, CPU)
    return (*(by_name.get(block_name(n), head) for n in range(priced.model.layers.n_all)), head)


def sites_of(priced: Priced, solution: Solution, devices: Sequence[str]) -> Mapping[str, Site]:
    """The site of every unit; those that are not loaded stay with their layer's device."""
    found: dict[str, Site] = {}
    for decision, option in zip(priced.problem.decisions, solution.chosen(priced.problem), strict=True):
        found.update(zip(decision.units, sites(option.sites), strict=True))
    for unit in priced.model.units:
        home = devices[-1] if unit.layer is None else devices[min(unit.layer, len(devices) - 1)]
        found.setdefault(unit.name, Site.on(home))
    return found


def _plain(model: Model, devices: Sequence[str]) -> bool:
    """Whether the pieces are the changes of device for certain: one device, or first the CPU, then one GPU.

    But for what the engine computes for all layers at once, or clears before their states are used, and for
    layers whose parts stand side by side.
    """
    first = next((n for n, device in enumerate(devices) if device != CPU), len(devices))
    if any(device != devices[-1] for device in devices[first:]):
        return False
    if any(sum(unit.kind in (Kind.FFN, Kind.EXPERTS) for unit in units) > 1 for _, units in model.groups):
        return False
    ahead = projects_ahead(model) or any(clears_state(model, n) for n in range(model.layers.n_main))
    return not first or not ahead
