"""What a profile measured, as tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from commands.shared import console

if TYPE_CHECKING:
    from planner.machine.op_time import Case
    from planner.machine.profile import Profile
    from planner.model.inventory import Inventory
    from profiler.session import Measured
    from profiler.summarise import Verdict

_SHOWN = 8  # of the worst cases


def show_profile(profile: Profile) -> None:
    """What a profile says of devices, links and whole models."""
    _devices(profile, {d.name: d.bandwidth_bytes_per_s for d in profile.devices})
    _links(profile)
    _calibrations(profile)


def report(measured: Measured, profile: Profile, inventory: Inventory | None, as_json: bool) -> None:
    """What was measured in short, with the warnings of its profile."""
    if as_json:
        console.out_json(profile.model_dump(mode="json", by_alias=True))
    else:
        _devices(profile, measured.streams)
        _links(profile)
        _worst(measured, inventory)
        _calibrations(profile)
        _slots(profile)
    for warning in profile.warnings:
        console.say(f"warning: {warning}")


def _devices(profile: Profile, streams: dict[str, int]) -> None:
    table = console.table("device", "memory", "streams", "mat-vec q4_K", "product", "small op", "threads")
    for d in profile.devices:
        table.add_row(
            f"{d.name} ({d.description})",
            console.mib(d.memory_bytes),
            f"{streams[d.name] / 1e9:.1f} GB/s",
            f"{d.bandwidth_bytes_per_s / 1e9:.1f} GB/s",
            f"{d.flops_per_s / 1e12:.2f} TFLOP/s",
            f"{d.op_overhead_ns / 1e3:.1f} us",
            str(d.threads or ""),
        )
    console.out_table(table)


def _links(profile: Profile) -> None:
    if not profile.links:
        return
    table = console.table("link", "copies", "latency", "kernels read")
    for link in profile.links:
        table.add_row(
            f"{link.source} to {link.target}",
            f"{link.bandwidth_bytes_per_s / 1e9:.1f} GB/s",
            f"{link.latency_ns / 1e3:.1f} us",
            f"{link.zero_copy_bytes_per_s / 1e9:.1f} GB/s" if link.zero_copy_bytes_per_s else "",
        )
    console.out_table(table)


def _worst(measured: Measured, inventory: Inventory | None) -> None:
    """The cases that are worth least, and what of the model is priced by them or without them."""
    from profiler.operators.cases import NOT_SUPPORTED
    from profiler.summarise import WIDE, where, without_kernels

    found = [v for v in measured.verdicts if v.dropped != NOT_SUPPORTED]
    if not found:
        return
    worst = sorted((v for v in found if _spread(v) > WIDE), key=lambda v: -_spread(v))
    table = console.table("worst of the cases", "batch", "where", "time", "what is wrong", "affects")
    for v in worst[:_SHOWN]:
        case, timing = v.job.case, v.timing
        time = f"{timing.time_ns / 1e3:.1f} us" if timing else "none"
        why = f"spread {_spread(v):.0%}" if timing else v.dropped
        table.add_row(case.label, str(case.batch), where(v.job.place), time, why, _affected(case, inventory))
    refused = sum(v.timing is None for v in found)
    told = f"{len(found)} cases measured: {len(found) - len(worst)} steady, {len(worst) - refused} unsteady"
    console.out(f"{told}, {refused} refused; --table FILE writes them all")
    if worst:
        console.out_table(table)
    for place_name, products in without_kernels(measured.verdicts).items():
        console.out(f"{place_name}: no kernels for {', '.join(products)}")


def _spread(verdict: Verdict) -> float:
    """Interquartile range over the median; of a case that is refused more than any."""
    timing = verdict.timing
    return timing.spread_ns / timing.time_ns if timing else float("inf")


def _affected(case: Case, inventory: Inventory | None) -> str:
    """The tensors of a model that an operator multiplies with, or what else it is for."""
    if inventory is None:
        return ""
    if case.op == "FLASH_ATTN_EXT":
        return "attention"
    alike = [t.name for t in inventory.tensors if (t.type, t.shape) == (case.type, case.shape)]
    if not alike:
        return "calibration" if case.op.startswith("MUL_MAT") else "small operators"
    return f"{alike[0]} and {len(alike) - 1} more" if len(alike) > 1 else alike[0]


def all_cases(verdicts: Sequence[Verdict], streams: dict[str, int]) -> str:
    """Every case as CSV: times in nanoseconds, rates in bytes a second, or why there is none."""
    from profiler.summarise import compulsory_bytes, where

    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(
        ("operator", "batch", "depth", "where", "time_ns", "spread_ns", "bytes_per_s", "of_stream", "dropped")
    )
    for verdict in verdicts:
        case, place, timing = verdict.job.case, verdict.job.place, verdict.timing
        head = (case.label, case.batch, case.depth, where(place))
        if timing is None:
            rows.writerow((*head, "", "", "", "", verdict.dropped))
            continue
        rate = compulsory_bytes(case) * 10**9 // timing.time_ns
        stream = streams.get(f"{place.device} {place.buffer}", streams[place.device])
        rows.writerow(
            (*head, timing.time_ns, timing.spread_ns, rate or "", f"{rate / stream:.3f}" if rate else "", "")
        )
    return text.getvalue()


def _calibrations(profile: Profile) -> None:
    if not profile.calibrations:
        return
    table = console.table("calibration", "split", "mixed graph", "token", "scale", "worst residual", "runs")
    for c in profile.calibrations:
        prompts = {f"{name} prompts": ppm for name, ppm in (c.prompt_scale_ppm or {}).items()}
        scales = ", ".join(f"{name} {ppm / 1e6:.2f}" for name, ppm in (c.scale_ppm | prompts).items())
        table.add_row(
            c.model[:19] or "generated model",
            f"{c.split_ns / 1e3:.1f} us",
            console.ms(c.mixed_ns),
            console.ms(c.token_ns),
            scales,
            f"{c.residual_ppm / 1e4:.1f} %",
            str(c.runs),
        )
    console.out_table(table)


def _slots(profile: Profile) -> None:
    """What a layer's experts cost in slots, the others beside them."""
    if not profile.slots:
        return
    table = console.table(
        "experts in slots", "a layer", "an expert by CPU", "beside the bus", "by bus", "prompts", "off by"
    )
    for c in profile.slots:
        table.add_row(
            f"{c.device}, {c.type}, {c.expert_bytes / 2**20:.1f} MiB",
            f"{c.sync_ns / 1e3:.0f} us",
            f"{c.pair_ns / 1e3:.0f} us",
            f"{c.beside_ns / 1e3:.0f} us",
            f"{c.upload_ns / 1e3:.0f} us",
            f"{c.staged_bytes_per_s / 1e9:.1f} GB/s" if c.staged_bytes_per_s else "",
            f"{c.residual_ppm / 1e4:.1f} %",
        )
    console.out_table(table)
