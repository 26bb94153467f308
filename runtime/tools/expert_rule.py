"""Overrides in the words of the tools' own rule for experts, where it places exactly the same tensors.

`--cpu-moe` keeps every expert tensor in host memory, `--n-cpu-moe N` those of the first N layers. Both are
overrides by patterns of the tool's own, so what they place can be proved like any other override.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.block_names import block_of
from planner.constants import CPU
from planner.model.inventory import Inventory
from planner.model.routed_layers import routed_weight
from planner.model.structure import structure_of
from planner.plan.engine_rules import spec_layer_devices, tensor_devices
from planner.plan.load_spec import LoadSpec
from planner.plan.override_match import matches
from planner.plan.patterns import listed
from planner.plan.plan import Placement, Plan
from planner.site import ON_CPU

# Searched in the tensor's name (b10068 to b11549); a layer's own begins with `blk\.N`.
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
# Architectures whose experts have biases or scales, which the rule moves and a plan may leave.
_MORE = frozenset(["gpt-oss", "gemma4"])

Overrides = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ExpertRule:
    """The experts of the first `layers` layers stay on the CPU; of all, when there are no others."""

    layers: int
    every: bool
    others: Overrides  # overrides of the plan that the rule does not stand for

    @property
    def option(self) -> tuple[str, str]:
        """The option of llama-server and llama-cli, and its value."""
        return ("--cpu-moe", "") if self.every else ("--n-cpu-moe", str(self.layers))


def expert_rule(spec: LoadSpec, n_blocks: int, inventory: Inventory | None, plan: Plan) -> ExpertRule | None:
    """The rule that stands for overrides of `spec`; None when none places exactly what they place.

    With an inventory that is proved tensor by tensor; else by the plan's units, and then only for a plan
    that overrides nothing but experts, of an architecture whose experts are weights alone.
    """
    if inventory is None:
        return None if plan.model.architecture in _MORE else _of_units(spec, n_blocks, plan.units)
    return _proved(spec, n_blocks, inventory)


def _proved(spec: LoadSpec, n_blocks: int, inventory: Inventory) -> ExpertRule | None:
    structure = structure_of(inventory)
    where = tensor_devices(structure, spec)
    homes = {name: block_of(name) for name in where if re.search(_EXPERTS, name)}
    held = {layer for name, layer in homes.items() if where[name] == CPU}
    found = matches(inventory, spec.overrides)
    meant = [m for m in found if m.buffer == CPU and set(m.tensors) & homes.keys()]
    if not held or not meant or None in homes.values():
        return None
    every = held == set(homes.values())
    layers = n_blocks if every else max(layer for layer in held if layer is not None) + 1
    others = tuple((m.pattern, m.buffer) for m in found if m not in meant)
    rule = ExpertRule(layers, every, others)
    # Disjoint, so that it does not matter which of the two options a tool reads first.
    if any(set(m.tensors) & homes.keys() for m in found if m not in meant):
        return None
    told = tensor_devices(structure, _with_rule(spec, rule))
    return rule if told == where else None


def _with_rule(spec: LoadSpec, rule: ExpertRule) -> LoadSpec:
    return replace(spec, overrides=(*patterns(rule.layers, every=rule.every), *rule.others))


def patterns(layers: int, *, every: bool) -> Overrides:
    """The overrides that the tools make of the rule."""
    if every:
        return ((_EXPERTS, CPU),)
    return tuple((rf"blk\.{n}{_EXPERTS}", CPU) for n in range(layers))


def _of_units(spec: LoadSpec, n_blocks: int, units: Sequence[Placement]) -> ExpertRule | None:
    """By the sites: experts of the first layers on the CPU, and overrides that reach exactly these."""
    experts = {
        n: p.site for p in units if p.unit.endswith(".experts") and (n := block_of(p.unit)) is not None
    }
    held = {n for n, site in experts.items() if site == ON_CPU}
    if not held or not spec.overrides or any(site.divided for site in experts.values()):
        return None
    first = max(held) + 1
    reached = _reached(spec.overrides)
    if reached is None or any(n < first and n not in held for n in experts):
        return None
    devices = spec_layer_devices(spec, n_blocks)
    on_host = {n for n in held if devices[n] == CPU}  # their experts need no override
    return ExpertRule(first, held == set(experts), ()) if reached <= held <= reached | on_host else None


def _reached(overrides: Overrides) -> set[int] | None:
    """The layers whose experts overrides keep on the CPU; None when they place anything else, or may."""
    parts: dict[int, set[str]] = {}
    for pattern, buffer in overrides:
        names = listed(pattern)
        found = [routed_weight(name) for name in names or ()]
        if buffer != CPU or not found or not all(found):
            return None
        for layer, matrix in filter(None, found):
            parts.setdefault(layer, set()).add(matrix)
    whole = all("down" in each and each & {"up", "gate_up"} for each in parts.values())
    return set(parts) if whole else None
