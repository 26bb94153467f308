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
    tensors = by_name(inventory)
    return {
        device: sum(tensors[name].size_bytes - hot_bytes(tensors[name], k) for name, k in hot.items())
        for device, hot in widths(inventory, spec).items()
    }


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
