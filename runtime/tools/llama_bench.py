"""A placement as llama-bench spells it: commas separate test points there, so lists use other signs."""

from __future__ import annotations

from planner.errors import InputError
from runtime.tools.options import LOAD_MODE, Inexpressible, Stock


def words(placed: Stock, model: str, prompt: int, gen: int, depth: int) -> list[str]:
    """The arguments of llama-bench (b11434): devices and shares joined by `/`, overrides by `;`.

    Raises Inexpressible for a pattern that one of these signs would cut.
    """
    spec, work = placed.spec, placed.spec.workload
    for pattern, _ in placed.overrides:
        if set(pattern) & set(",;="):
            raise Inexpressible(pattern)
    if any("/" in device for device in placed.devices):
        raise InputError(f"llama-bench cannot be told {', '.join(placed.devices)}: a slash parts devices")
    found = ["-rpc", ",".join(placed.rpc)] if placed.rpc else []
    found += ["-m", model, "-dev", "/".join(placed.devices) or "none", "-ngl", str(spec.n_gpu_layers)]
    if len(spec.devices) > 1 and any(spec.tensor_split):
        found += ["-ts", "/".join(map(str, spec.tensor_split))]
    if placed.overrides:
        found += ["-ot", ";".join(f"{pattern}={buffer}" for pattern, buffer in placed.overrides)]
    if placed.rule:
        found += ["-ncmoe", str(placed.rule.layers)]  # it has no --cpu-moe
    found += ["-b", str(max(work.n_batch, work.n_ubatch)), "-ub", str(work.n_ubatch)]
    found += ["-fa", "on" if work.flash_attn else "off", "-ctk", work.type_k, "-ctv", work.type_v]
    if 0 < placed.least < LOAD_MODE:
        found += ["-mmp", str(int(spec.use_mmap))]
    else:
        found += ["-lm", "mmap" if spec.use_mmap else "none"]
    if spec.threads:
        found += ["-t", str(spec.threads)]
    if not spec.use_extra_bufts:
        found += ["--repack", "0"]
    if not spec.op_offload:
        found += ["-nopo", "1"]
    return [*found, "-p", str(prompt), "-n", str(gen), "-d", str(depth)]


def lacks(placed: Stock) -> list[str]:
    """What llama-bench has no option for."""
    work = placed.spec.workload
    asked = {
        f"{work.n_seq} sequences at once": work.n_seq > 1,
        "a vision projector": bool(placed.mmproj),
        "a draft model": bool(placed.draft),
        "drafts of n-grams": placed.ngrams,
        "the NextN/MTP block": work.mtp,
        "a full cache of sliding-window layers": placed.spec.swa_full,
        "a MoE cache": bool(placed.spec.cache_bytes),
    }
    return [f"llama-bench cannot be told: {what}" for what, there in asked.items() if there]
