"""From the lines of the measuring process to a profile: gates, warnings, figures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.constants import CPU
from planner.errors import MachineError
from planner.machine.budgets import METAL
from planner.machine.op_time import STATE_OPS, Case, bytes_read
from planner.machine.profile import Device, Fingerprint, Link, OpTiming, Profile, Unsupported
from profiler.operators.cases import NOT_SUPPORTED, Job, Place
from profiler.operators.doubtful import doubtful, settled
from profiler.operators.timings import possible

Line = Mapping[str, Any]
BUSY = 0.3  # load by others, as a share of the cores, from which timings are called contended
WIDE = 0.25  # interquartile range over median of one case that is not steady
MANY = 0.25  # share of unsteady cases that marks the whole profile
FADED = 0.2  # loss of stream bandwidth from the first case to the last that is named
REFUSED = "not believed"
PAGED = 16  # a large case this much slower than the device streams did not read device memory


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a measured case is worth."""

    job: Job
    timing: OpTiming | None
    dropped: str = ""  # why there is none


@dataclass(eq=False)
class Contended(MachineError):
    """A strict profile of a machine that is not quiet."""

    warnings: tuple[str, ...]

    def message(self) -> str:
        return f"--strict: {'; '.join(self.warnings)}; stop other programs and profile again"


def places(lines: Iterable[Line]) -> tuple[Place, ...]:
    """The places that the measuring process found."""
    return tuple(Place(**line["place"]) for line in lines if line["kind"] == "place")


def devices(lines: Iterable[Line]) -> tuple[Device, ...]:
    """Device records in the engine's order."""
    names = Device.model_fields.keys()
    found = []
    for line in lines:
        if line["kind"] == "device":
            values = {k: v for k, v in line.items() if k in names} | {"kind": line["device_kind"]}
            found.append(Device(**values))
    return tuple(_pooled(found))


def _pooled(found: Sequence[Device]) -> Iterator[Device]:
    """GPUs without memory of their own draw on the one that the CPU has."""
    shared = {d.name for d in found if d.kind == "igpu" or d.name.startswith(METAL)}
    for device in found:
        pool = "system" if shared and (device.kind == "cpu" or device.name in shared) else ""
        yield device.model_copy(update={"memory_pool": pool})


def links(lines: Sequence[Line]) -> tuple[Link, ...]:
    """Link records; kernels read host memory at the zero-copy rate measured for their device."""
    zero_copy = {line["device"]: line["bytes_per_s"] for line in lines if line["kind"] == "zero-copy"}
    return tuple(
        Link(
            source=line["source"],
            target=line["target"],
            bandwidth_bytes_per_s=line["bandwidth_bytes_per_s"],
            latency_ns=line["latency_ns"],
            mapped_bytes_per_s=line.get("mapped_bytes_per_s", 0),
            zero_copy_bytes_per_s=zero_copy.get(line["target"], 0) if line["source"] == CPU else 0,
        )
        for line in lines
        if line["kind"] == "link"
    )


def verdicts(jobs: Sequence[Job], lines: Sequence[Line], streams: Mapping[str, int]) -> tuple[Verdict, ...]:
    """A timing for every job, or why not; `streams` are bytes per second by device, or device and buffer."""
    results = settled(lines)
    stalled = doubtful(jobs, lines)
    return tuple(
        Verdict(job, None, f"{REFUSED}: {stalled[job.key]}")
        if job.key in stalled
        else _verdict(job, results[job.key], streams)
        for job in jobs
        if job.key in results
    )


def _verdict(job: Job, line: Line, streams: Mapping[str, int]) -> Verdict:
    if "skipped" in line:
        return Verdict(job, None, line["skipped"])
    place, case = job.place, job.case
    stream = streams.get(f"{place.device} {place.buffer}", streams[place.device])
    moved = compulsory_bytes(case)
    if not possible(moved, line["time_ns"], stream):
        rate = moved * 1e9 / line["time_ns"]
        return Verdict(
            job, None, f"{rate / 1e9:.1f} GB/s is more than the {stream / 1e9:.1f} GB/s it streams"
        )
    timing = OpTiming(
        op=case.op,
        type=case.type,
        shape=case.shape,
        batch=case.batch,
        used=case.used,
        depth=case.depth,
        device=place.device,
        buffer=place.buffer,
        time_ns=line["time_ns"],
        spread_ns=line["spread_ns"],
        samples=line["samples"],
    )
    return Verdict(job, timing)


def where(place: Place) -> str:
    """A place of weights as people read it."""
    return place.device if place.buffer == place.device else f"{place.device} from {place.buffer}"


def without_kernels(verdicts: Iterable[Verdict]) -> dict[str, dict[str, None]]:
    """By place, what it has no kernels for: a type of a product, or a shape where it computes others."""
    judged = [
        (where(v.job.place), v.job.case, v.timing is None and v.dropped == NOT_SUPPORTED) for v in verdicts
    ]
    able = {(there, case.op, case.type) for there, case, refused in judged if not refused}
    found: dict[str, dict[str, None]] = {}
    for there, case, refused in judged:
        if refused:
            some = (there, case.op, case.type) in able
            found.setdefault(there, {})[case.label if some else f"{case.op} {case.type}"] = None
    return found


def unsupported(judged: Iterable[Verdict]) -> tuple[Unsupported, ...]:
    """Products that a device said it cannot compute with weights of its own memory, at any shape or batch."""
    own = [v for v in judged if v.job.place.kind == "own" and v.job.case.op in ("MUL_MAT", "MUL_MAT_ID")]
    refused = {_product(v) for v in own if v.dropped == NOT_SUPPORTED}
    known = sorted(refused - {_product(v) for v in own if v.timing})
    return tuple(Unsupported(op=op, type=kind, device=device) for op, kind, device in known)


def _product(verdict: Verdict) -> tuple[str, str, str]:
    return verdict.job.case.op, verdict.job.case.type, verdict.job.place.device


def compulsory_bytes(case: Case) -> int:
    """Bytes that no cache can have saved. A recurrent state is small enough to stay in one."""
    if case.op in STATE_OPS or case.op in ("GET_ROWS", "RMS_NORM"):
        return 0
    if case.op == "MUL_MAT_ID" and case.batch > 1:
        case = replace(case, batch=1)  # of several tokens only one is sure to use experts of its own
    return bytes_read(case)


def streams(lines: Iterable[Line]) -> dict[str, int]:
    """Stream bandwidth by device, and by `device buffer` for reads of host memory over a link."""
    lines = list(lines)
    found = {line["name"]: line["stream_bytes_per_s"] for line in lines if line["kind"] == "device"}
    for line in lines:
        if line["kind"] == "stream":
            found[line["device"]] = max(found[line["device"]], line["bytes_per_s"])
    rates = {line["device"]: line["bytes_per_s"] for line in lines if line["kind"] == "zero-copy"}
    copies = {link["target"]: link["bandwidth_bytes_per_s"] for link in lines if link["kind"] == "link"}
    for place in places(lines):
        if place.kind == "zero-copy":
            found[f"{place.device} {place.buffer}"] = max(rates[place.device], copies.get(place.device, 0))
    return found


def slowdowns(lines: Sequence[Line]) -> tuple[str, ...]:
    """What became slower while it was measured, and what the machine itself says about that."""
    first = {line["name"]: line["stream_bytes_per_s"] for line in lines if line["kind"] == "device"}
    found = []
    for line in lines:
        if line["kind"] == "heat":
            found.append(f"throttled: heat slowed cores down {line['events']} times: cool it, profile again")
        if line["kind"] != "stream":
            continue
        device, before, now = line["device"], first[line["device"]], line["bytes_per_s"]
        if line["slowed"]:
            found.append(f"throttled: {device} was slowed down by {' and '.join(line['slowed'])}")
        if now < (1 - FADED) * before:
            rates = f"{before / 1e9:.1f} GB/s at first and {now / 1e9:.1f} at the end"
            found.append(f"unsteady: {device} streamed {rates}: heat, or other programs")
    return tuple(found)


def warnings(
    judged: Sequence[Verdict], streams: Mapping[str, int], load: float, fingerprint: Fingerprint
) -> tuple[str, ...]:
    """What a reader of the profile must know before trusting it."""
    timed = [v.timing for v in judged if v.timing]
    wide = [t for t in timed if t.spread_ns > WIDE * t.time_ns]
    fast = [v for v in judged if "more than the" in v.dropped]
    failed = [v for v in judged if v.dropped.startswith("the engine failed")]
    stalled = [v for v in judged if v.dropped.startswith(REFUSED)]
    paged = [t for t in timed if _looks_paged(t, streams)]
    found = []
    if load > BUSY:
        found.append(f"contended: other programs kept {load:.1f} of every core busy when it began")
    if len(wide) > MANY * len(timed):
        found.append(f"unsteady: {len(wide)} of {len(timed)} cases spread by more than {WIDE:.0%}")
    if fast:
        found.append(
            f"dropped {len(fast)} impossible timings, the first: {fast[0].job.key}: {fast[0].dropped}"
        )
    if stalled:
        found.append(
            f"refused {len(stalled)} timings that were measured again and stayed as they cannot be, "
            f"the first: {stalled[0].job.key}: {stalled[0].dropped}"
        )
    if failed:
        found.append(
            f"the engine failed in {len(failed)} cases, the first: {failed[0].job.key}: {failed[0].dropped}"
        )
    if paged:
        found.append(
            f"{len(paged)} timings on {paged[0].device} look paged to host memory: free some, profile again"
        )
    if fingerprint.driver == "wddm":
        found.append("WDDM driver: device memory spills to host memory without an error when it is full")
    return tuple(found)


def _looks_paged(timing: OpTiming, streams: Mapping[str, int]) -> bool:
    if timing.device == CPU or timing.buffer != timing.device or timing.op not in ("MUL_MAT", "MUL_MAT_ID"):
        return False
    moved = bytes_read(_case(timing))
    slow = moved * 1e9 / timing.time_ns < streams[timing.device] / PAGED
    return slow and timing.batch == 1 and moved > 32 * 2**20


def _case(timing: OpTiming) -> Case:
    return Case(timing.op, timing.type, timing.shape, timing.batch, timing.used, timing.depth)


def profile(
    name: str,
    command: str,
    created: str,
    fingerprint: Fingerprint,
    lines: Sequence[Line],
    judged: Sequence[Verdict],
    notes: Sequence[str],
) -> Profile:
    """The profile of what was measured, before whole-model calibration."""
    return Profile(
        name=name,
        measured=True,
        source=command,
        created=created,
        fingerprint=fingerprint,
        devices=devices(lines),
        links=links(lines),
        timings=tuple(v.timing for v in judged if v.timing),
        unsupported=unsupported(judged),
        warnings=tuple(notes),
    )
