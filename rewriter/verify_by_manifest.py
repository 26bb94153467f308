"""A rewritten model against the manifest beside it, when the source is not at hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from planner.model.gguf.reader import ModelFile
from planner.model.inventory import Tensor
from rewriter.manifest import Manifest
from rewriter.payloads import Payload, digests
from rewriter.stamp import read_stamp
from rewriter.verify import NotFaithful, Verification, slices


def recheck(
    model: ModelFile, manifest: Manifest, advance: Callable[[int], None] = lambda _: None
) -> Verification:
    """Compare every payload with its digest in the manifest; NotFaithful lists all that differ."""
    started = time.monotonic()
    stamp = read_stamp(model)
    orders = stamp.experts if stamp else {}
    tensors = {tensor.name: tensor for tensor in model.inventory.tensors}
    listed = {entry.name: entry for entry in manifest.tensors}
    problems = [f"tensor {name} is missing" for name in listed if name not in tensors]
    problems += [f"tensor {name} is not in the manifest" for name in tensors if name not in listed]
    if stamp is not None and stamp.plan_digest != manifest.plan_digest:
        problems.append("it was made by another plan")
    names = [name for name in listed if name in tensors]
    found = digests([_payload(model, tensors[name], orders) for name in names], advance)
    for name, digest in zip(names, found, strict=True):
        if digest != listed[name].sha256:
            problems.append(f"tensor {name} has other bytes")
    if problems:
        raise NotFaithful(str(model.paths[0]), tuple(problems))
    moved = tuple(sorted(n for n, order in orders.items() if order != tuple(range(len(order)))))
    return Verification(manifest.tensors, model.inventory.size_bytes, time.monotonic() - started, moved)


def _payload(model: ModelFile, tensor: Tensor, orders: Mapping[int, tuple[int, ...]]) -> Payload:
    return Payload(model.paths[tensor.shard], tensor.offset, tensor.size_bytes, slices(tensor, orders))
