"""The stripes of a spec: their widths, and what they leave in host memory, in the granules of the runtime."""

from __future__ import annotations

from collections.abc import Mapping

from planner.model.inventory import Inventory, Tensor, by_name
from planner.plan.load_spec import LoadSpec
from planner.plan.override_match import placed
from planner.site import Site, SiteKind
from runtime.stripes.mapped_range import rounded


def host_bytes(inventory: Inventory, spec: LoadSpec) -> Mapping[str, int]:
    """Bytes of striped tensors that do not lie on their device, by device."""
    tensors, found = by_name(inventory), dict[str, int]()
    for device, hot in widths(inventory, spec).items():
        found[device] = sum(tensors[name].size_bytes - hot_bytes(tensors[name], k) for name, k in hot.items())
    return found


def slot_bytes(inventory: Inventory, spec: LoadSpec) -> Mapping[str, tuple[int, int]]:
    """Of tensors with slots, by device: bytes of slots and guests, and of all their experts, on the host."""
    tensors, found = by_name(inventory), dict[str, tuple[int, int]]()
    for name, buffer in placed(inventory, spec.overrides).items():
        site = Site.of_buffer(buffer)
        if site.kind is SiteKind.HYBRID:
            each = tensors[name].size_bytes // tensors[name].shape[-1]
            slots, whole = found.get(site.device, (0, 0))
            here = (site.amount + site.guests) * each
            found[site.device] = (slots + here, whole + tensors[name].size_bytes)
    return found


def hot_bytes(tensor: Tensor, k: int) -> int:
    """Device memory of the first k experts of a tensor, in whole granules."""
    return min(rounded(k * tensor.size_bytes // tensor.shape[-1]), rounded(tensor.size_bytes))


def widths(inventory: Inventory, spec: LoadSpec) -> dict[str, dict[str, int]]:
    """Device to tensor to the number of its hot experts, for the striped tensors of a spec."""
    found: dict[str, dict[str, int]] = {}
    for name, buffer in placed(inventory, spec.overrides).items():
        site = Site.of_buffer(buffer)
        if site.kind is SiteKind.STRIPE:
            found.setdefault(site.device, {})[name] = site.amount
    return found
