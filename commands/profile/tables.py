"""What a profile measured, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commands.shared import console

if TYPE_CHECKING:
    from planner.machine.profile import Profile
    from profiler.session import Measured


def show_profile(profile: Profile) -> None:
    """What a profile says of devices, links and whole models."""
    _devices(profile, {d.name: d.bandwidth_bytes_per_s for d in profile.devices})
    _links(profile)
    _calibrations(profile)


def report(measured: Measured, profile: Profile, as_json: bool) -> None:
    """All that was measured, with the warnings of its profile."""
    if as_json:
        console.out_json(profile.model_dump(mode="json", by_alias=True))
    else:
        _devices(profile, measured.streams)
        _links(profile)
        _cases(measured)
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


def _cases(measured: Measured) -> None:
    from profiler.operators.cases import NOT_SUPPORTED
    from profiler.summarise import compulsory_bytes, where, without_kernels

    if not measured.verdicts:
        return
    table = console.table("operator", "batch", "depth", "where", "time", "spread", "GB/s", "of stream")
    for verdict in measured.verdicts:
        case, place, timing = verdict.job.case, verdict.job.place, verdict.timing
        head = (case.label, str(case.batch), str(case.depth or ""), where(place))
        if timing is None and verdict.dropped == NOT_SUPPORTED:
            continue
        if timing is None:
            table.add_row(*head, verdict.dropped, "", "", "")
            continue
        rate = compulsory_bytes(case) * 1e9 / timing.time_ns
        stream = measured.streams.get(f"{place.device} {place.buffer}", measured.streams[place.device])
        share = (f"{rate / 1e9:.1f}", f"{rate / stream:.0%}") if rate else ("", "")
        table.add_row(
            *head, f"{timing.time_ns / 1e3:.1f} us", f"{timing.spread_ns / timing.time_ns:.0%}", *share
        )
    console.out_table(table)
    for place_name, products in without_kernels(measured.verdicts).items():
        console.out(f"{place_name}: no kernels for {', '.join(products)}")


def _calibrations(profile: Profile) -> None:
    if not profile.calibrations:
        return
    table = console.table("calibration", "split", "mixed graph", "token", "scale", "worst residual", "runs")
    for c in profile.calibrations:
        scales = ", ".join(f"{name} {ppm / 1e6:.2f}" for name, ppm in c.scale_ppm.items())
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
