"""Tensor types of unknown layout: fork quants, repacked rows, types newer than this program.

Such tensors are carried as bytes. Whether a GPU can compute them is not known either, so they stay
on the CPU, unless a profile holds measurements of the type on that machine's GPUs, or a pin says
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.machine.profile import Profile
from planner.model.ggml_types import is_known
from planner.model.inventory import Inventory, Tensor, by_name
from planner.model.tensor_roles import Role, part_of
from planner.model.units import Unit


def host_types(inventory: Inventory, profile: Profile) -> tuple[str, ...]:
    """The unknown types of a model that no GPU of the profile was measured with."""
    unknown = {tensor.type for tensor in inventory.tensors if not is_known(tensor.type)}
    gpus = {device.name for device in profile.devices if device.kind != "cpu"}
    return tuple(sorted(unknown - {timing.type for timing in profile.timings if timing.device in gpus}))


def product_of(tensor: Tensor) -> str:
    """The operator that multiplies with a tensor, if it is a matrix."""
    return "MUL_MAT_ID" if part_of(tensor).role is Role.EXPERTS else "MUL_MAT"


def host_bound(inventory: Inventory, units: Iterable[Unit], profile: Profile) -> tuple[str, ...]:
    """Names of units with a tensor of such a type, a tied output head included."""
    kept = frozenset(host_types(inventory, profile))
    if not kept:
        return ()
    tensors = by_name(inventory)
    found = []
    for unit in units:
        names = (*unit.tensors, *(("token_embd.weight",) if unit.tied_bytes else ()))
        if any(tensors[name].type in kept for name in names):
            found.append(unit.name)
    return tuple(found)
