"""What the stripes of a spec leave in host memory, by the same granules as the runtime maps."""

from __future__ import annotations

import re
from collections.abc import Mapping

from planner.inventory import Inventory, Tensor
from planner.loading import LoadSpec
from runtime.stripe_range import rounded


def host_bytes(inventory: Inventory, spec: LoadSpec) -> Mapping[str, int]:
    """Bytes of striped tensors that do not lie on their device, by device."""
    patterns = [(re.compile(pattern), buffer) for pattern, buffer in spec.overrides]
    found: dict[str, int] = {}
    for tensor in inventory.tensors:
        buffer = next((b for pattern, b in patterns if pattern.search(tensor.name)), "")
        if buffer.startswith("stripe:"):
            _, device, k = buffer.split(":")
            found[device] = found.get(device, 0) + tensor.size_bytes - hot_bytes(tensor, int(k))
    return found


def hot_bytes(tensor: Tensor, k: int) -> int:
    """Device memory of the first k experts of a tensor, in whole granules."""
    return min(rounded(k * tensor.size_bytes // tensor.shape[-1]), rounded(tensor.size_bytes))
