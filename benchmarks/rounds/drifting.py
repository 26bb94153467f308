"""Slots that follow the text, on texts whose topic changes: every choice of residents, in one process.

    python -m benchmarks.rounds.drifting --engine BUILD_FOLDER --work FOLDER --out drifting.json --minutes 3

Makes the model if need be (sizes and routing of a preset, fewer layers), and decodes one stream token by
token with each contender in turn: some hundred tokens of topic A, as many of B, then A again. Contenders:

    plain               everything on the device: the bound
    ncmoe               experts of the first layers on the CPU, at no less VRAM than the slots
    A, B                slots with the hottest experts of one topic, which stay: right in its phases only
    lfu:H:U, lru:0:U    begin as A and follow: half-life of H tokens, U hundredths of an expert a layer
                        and token
    lfu:H:U:M           the same on demand, in steps of a layer that miss M experts

`+G` behind a name gives G guests; a name may stand twice, which shows what loading by itself changes. With
`--rounds` all of a share are loaded at once and decode the stream in turns, and each is compared with the
slots for A round by round. With `--mixed` the topics come as the preset has them, A is right for all of them,
and there is no B. Writes JSON (milliseconds of every token, hits of every window, VRAM), prints a table, and
draws a picture beside it where matplotlib is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rounds.paired import interval
from benchmarks.rounds.topics import Given, add_work, given_of, said
from benchmarks.rounds.visit import engine_name
from planner.plan.load_spec import LoadSpec
from planner.workload import Workload
from runtime.hybrid.config import Config, Resident
from runtime.hybrid.device import HybridDevice
from runtime.session.session import Session

EXPERTS = r"\.ffn_(gate|up|down|gate_up)_exps\.weight$"
USUAL = "ncmoe,A+2,B+2,lfu:32:100+2,lfu:32:25+2,lru:0:100+2"
WARM_UP = 8  # tokens that are decoded before the stream
SLOWEST = 100  # of so many tokens one, the slowest, is left out of means


@dataclass(slots=True)
class Contender:
    """What was measured of one way."""

    name: str
    slots: int = 0
    vram_mib: float = 0.0
    load_s: float = 0.0
    rounds: list[list[float]] = field(default_factory=list)  # milliseconds of every token
    windows: list[list[float]] = field(default_factory=list)  # hits of every window, by round
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def ms(self) -> list[float]:
        return [statistics.median(each) for each in zip(*self.rounds, strict=True)]

    @property
    def hits(self) -> list[float]:
        return [round(statistics.mean(each), 4) for each in zip(*self.windows, strict=True)]


@dataclass(slots=True)
class Loaded:
    """One way, ready to decode."""

    found: Contender
    session: Session
    hybrid: HybridDevice | None
    last: tuple[int, int] = (0, 0)  # hits and choices so far


def main() -> None:
    """Measure and write."""
    options = _arguments()
    ends = time.monotonic() + 60 * options.minutes
    given = given_of(options)
    said(f"{given.path.name}: {given.path.stat().st_size >> 20} MiB, {given.n_layers} layers")
    found: dict[str, Any] = {"engine": engine_name(given.engine.build), "device": options.device}
    found |= {
        "preset": options.preset,
        "layers": given.n_layers,
        "phases": given.phases,
        "window": options.window,
    }
    found["cells"] = cells = []
    whole = measured(given, "plain", 1.0)
    for share in map(float, options.shares.split(",")):
        names = options.contenders.split(",")
        made = [whole, *(in_turns if options.rounds > 1 else one_by_one)(given, names, share, ends)]
        cells.append({"share": share, "contenders": [_row(each, given) for each in made]})
        Path(options.out).write_text(json.dumps(found, indent=1))
        print(table(cells[-1], given), flush=True)
    picture(found, Path(options.out).with_suffix(".png"))
    sys.stdout.flush()
    os._exit(0)  # a wrapper lives as long as its process


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_work(parser)
    parser.add_argument("--shares", default="0.5,0.25", help="of the experts in VRAM")
    parser.add_argument("--contenders", default=USUAL)
    parser.add_argument("--rounds", type=int, default=1, help="more: all are loaded, and take turns")
    parser.add_argument("--window", type=int, default=32, help="tokens of a point of the curves")
    parser.add_argument("--lockstep", action="store_true", help="steps wait for newcomers: for counts alone")
    parser.add_argument("--minutes", type=float, default=3.0, help="start nothing new after this")
    parser.add_argument("--out", default="drifting.json")
    return parser.parse_args()


# ---- one contender, and several in turns


def one_by_one(given: Given, names: Sequence[str], share: float, ends: float) -> list[Contender]:
    """Each is alone in memory, and decodes the stream once."""
    found = []
    for name in names:
        if time.monotonic() > ends:
            said(f"time is over before {name} at {share}")
            break
        found.append(measured(given, name, share))
    return found


def in_turns(given: Given, names: Sequence[str], share: float, ends: float) -> list[Contender]:
    """All are in memory; slots that followed begin a round as the one before left them."""
    if time.monotonic() > ends:
        said(f"time is over before {share}")
        return []
    with ExitStack() as stack:
        ready = [loaded(given, name, share, stack) for name in names]
        for number in range(given.options.rounds):
            if number and time.monotonic() > ends:
                said(f"time is over before round {number} at {share}")
                break
            for each in ready if number % 2 == 0 else ready[::-1]:
                decode(given, each)
        for each in ready:
            _ended(given, each, share)
    return [each.found for each in ready]


def measured(given: Given, name: str, share: float) -> Contender:
    """Load, decode the stream, free."""
    with ExitStack() as stack:
        ready = loaded(given, name, share, stack)
        decode(given, ready)
        _ended(given, ready, share)
    return ready.found


def loaded(given: Given, name: str, share: float, stack: ExitStack) -> Loaded:
    """A contender that has decoded some tokens."""
    kind, _, guests = name.partition("+")
    found = Contender(name)
    before, begin = _used_mib(given), time.perf_counter()
    spec, hybrid, found.slots = loading(given, kind, int(guests or 0), share)
    own = {hybrid.buffer_name: hybrid.buffer_type} if hybrid else {}
    session = stack.enter_context(Session(given.engine, given.path, spec, own=own))
    for at, token in enumerate(given.tokens[:WARM_UP]):
        session.choose([token], at)
    found.load_s = round(time.perf_counter() - begin, 1)
    found.vram_mib = round(_used_mib(given) - before, 1)
    return Loaded(found, session, hybrid)


def decode(given: Given, ready: Loaded) -> None:
    """The stream once."""
    times: list[float] = []
    hits: list[float] = []
    ready.session.clear()
    for at, token in enumerate(given.tokens):
        begin = time.perf_counter()
        ready.session.choose([token], at)
        times.append(round((time.perf_counter() - begin) * 1e3, 4))
        if ready.hybrid and (at + 1) % given.options.window == 0:
            ready.last, rate = _hits(ready.hybrid, ready.last)
            hits.append(rate)
    ready.found.rounds.append(times)
    ready.found.windows.append(hits)


def _ended(given: Given, ready: Loaded, share: float) -> None:
    found = ready.found
    if ready.hybrid:
        found.told = _told(ready.hybrid, len(given.tokens) * len(found.rounds))
    said(
        f"{found.name} at {share}: {statistics.median(found.ms):.2f} ms, {found.vram_mib:.0f} MiB, "
        f"{found.load_s} s"
    )


def loading(
    given: Given, kind: str, guests: int, share: float, change: Callable[[Config], Config] = lambda same: same
) -> tuple[LoadSpec, HybridDevice | None, int]:
    """How a contender is loaded, its device with slots, and how many; `change` may alter its settings."""
    options, n = given.options, given.n_experts
    device, hybrid, slots = options.device, None, 0
    overrides: tuple[tuple[str, str], ...] = ()
    if kind == "ncmoe":
        blocks = "|".join(map(str, range(given.n_layers - round(given.n_layers * share))))
        overrides = ((rf"^blk\.({blocks}){EXPERTS}", "CPU"),)
    elif kind != "plain":
        slots = max(round(share * n) - guests, 1)
        hybrid = HybridDevice(given.engine.ggml, device, change(_config(given, kind, guests, slots)))
        device, overrides = hybrid.name, ((EXPERTS, hybrid.buffer_name),)
    work = Workload(n_ctx=-(-len(given.tokens) // 256) * 256 + 256, n_ubatch=64, n_batch=64)
    return (
        LoadSpec((device,), (1,), 999, overrides, work, use_mmap=False, threads=options.threads),
        hybrid,
        slots,
    )


def _config(given: Given, kind: str, guests: int, slots: int) -> Config:
    policy, *numbers = kind.split(":")
    hot = given.hot[policy if policy in given.hot else "A"]
    seed = {la: Resident(given.n_experts, order[:slots]) for la, order in enumerate(hot)}
    _config.count = getattr(_config, "count", 0) + 1  # type: ignore[attr-defined]
    made = Config(
        name=f"HYBRID{_config.count}",  # type: ignore[attr-defined]
        residents=seed,
        guests=guests,
        stage=0,  # the stream is decoded token by token
        memory="plain" if given.options.device == "CPU" else "pinned",
        lockstep=given.options.lockstep,
    )
    if policy in given.hot:
        return made
    half_life, hundredths, misses = (*map(int, numbers), 0)[:3]
    upload = given.expert_bytes * hundredths // 100
    return replace(made, policy=policy, half_life=max(half_life, 1), upload_bytes=upload, least_misses=misses)


def _used_mib(given: Given) -> float:
    found = given.engine.ggml.device(given.options.device)
    return float(found.total_bytes - found.free_bytes) / 2**20


def _hits(hybrid: HybridDevice, last: tuple[int, int]) -> tuple[tuple[int, int], float]:
    blocks = hybrid.report().blocks
    now = sum(b.hits for b in blocks), sum(b.hits + b.cpu + b.uploaded for b in blocks)
    return now, round((now[0] - last[0]) / max(now[1] - last[1], 1), 4)


def _told(hybrid: HybridDevice, tokens: int) -> dict[str, Any]:
    report = hybrid.report()
    blocks = report.blocks
    found: dict[str, Any] = {
        what: round(sum(getattr(b, what) for b in blocks) / tokens / max(len(blocks), 1), 3)
        for what in ("hits", "cpu", "uploaded", "admitted", "late", "waited")
    }  # of a layer and token
    found |= {
        what: round(sum(getattr(b, what) for b in blocks) / tokens / 1e6, 4)
        for what in ("wait_ns", "cpu_ns", "launch_ns", "lane_ns", "ahead_ns", "decide_ns", "rows_ns")
    }  # milliseconds of a token
    return found | {"cpu_bytes_us": report.cpu_bytes_us, "bus_bytes_us": report.bus_bytes_us}


# ---- what came of it


def _row(each: Contender, given: Given) -> dict[str, Any]:
    window = given.options.window
    return {
        "name": each.name,
        "slots": each.slots,
        "vram_mib": each.vram_mib,
        "load_s": each.load_s,
        "ms": each.ms,
        "hits": each.hits,
        "rounds_ms": [[round(_mean(part), 4) for part in _phases(times, given, 1)] for times in each.rounds],
        "phase_ms": [round(statistics.median(part), 3) for part in _phases(each.ms, given, 1)],
        "phase_hits": [round(statistics.mean(part), 4) for part in _phases(each.hits, given, window)],
        "lanes": each.told,
    }


def _phases(values: list[float], given: Given, each: int) -> list[list[float]]:
    """Of each phase the values of its second half, when its topic is known; `each`: tokens of a value."""
    found, at = [], 0
    for _, length in given.phases if values else ():
        found.append(values[(at + length // 2) // each : (at + length) // each])
        at += length
    return found


def _mean(values: Sequence[float]) -> float:
    kept = sorted(values)[: len(values) - len(values) // SLOWEST]
    return statistics.mean(kept)


def over_seed(cell: dict[str, Any], *rows: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Time over that of the slots for A, by phase, with a 95 % interval over the rounds.

    Where several stand for one way, their mean counts in every round.
    """
    guests = "".join(rows[0]["name"].partition("+")[1:])
    seeds = [row for row in cell["contenders"] if row["name"] == f"A{guests}"]
    found = []
    for phase in range(len(rows[0]["phase_ms"]) if seeds else 0):
        ours, theirs = (
            [statistics.mean(one) for one in zip(*(_times(row, phase) for row in some), strict=True)]
            for some in (rows, seeds)
        )
        logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
        mean, low, high = (math.exp(value) for value in interval(logs))
        found.append((round(mean, 4), round(low, 4), round(high, 4)))
    return found


def _times(row: dict[str, Any], phase: int) -> list[float]:
    return [times[phase] for times in row["rounds_ms"]]


def regained(cell: dict[str, Any], name: str, given: Given) -> dict[str, float]:
    """Of the way from the wrong slots to the right ones, in the second phase's later half: time and hits.

    Nothing where A and B do not differ.
    """
    guests = "".join(name.partition("+")[1:])
    rows = {row["name"]: row for row in cell["contenders"]}
    if f"A{guests}" not in rows or f"B{guests}" not in rows or len(given.phases) < 2:
        return {}
    found = {}
    for what, sign in (("phase_ms", 1), ("phase_hits", -1)):
        wrong, right, ours = (rows[one][what][1] * sign for one in (f"A{guests}", f"B{guests}", name))
        if wrong > right:
            found[what] = round((wrong - ours) / (wrong - right), 3)
    return found


def table(cell: dict[str, Any], given: Given) -> str:
    """A line for each contender: milliseconds in each phase, against the stock rule, VRAM, hits."""
    stock = next((row for row in cell["contenders"] if row["name"] == "ncmoe"), None)
    lines = [f"share {cell['share']}: ms a token by phase ({' '.join(topic for topic, _ in given.phases)})"]
    for row in cell["contenders"]:
        phases = " ".join(f"{ms:8.3f}" for ms in row["phase_ms"])
        text = f"{row['name']:>16} {phases}  {row['vram_mib']:8.0f} MiB"
        if stock and row["slots"]:
            text += f"  {statistics.median(stock['ms']) / statistics.median(row['ms']):.2f}x stock"
        if row["slots"]:
            text += f"  hits {statistics.mean(row['hits'] or [0]):.3f}"
        back = regained(cell, row["name"], given) if ":" in row["name"] else {}
        text += "".join(f"  {what[6:]} regained {share:.0%}" for what, share in back.items())
        lines.append(text + _over(cell, row))
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in cell["contenders"]:
        by_name.setdefault(row["name"], []).append(row)
    several = [(name, rows) for name, rows in by_name.items() if len(rows) > 1 and name[0] not in given.hot]
    return "\n".join(
        (*lines, *(f"{name:>16} {len(rows)} loads{_over(cell, *rows)}" for name, rows in several))
    )


def _over(cell: dict[str, Any], *rows: dict[str, Any]) -> str:
    if not rows[0]["slots"] or len(rows[0]["rounds_ms"]) < 2:
        return ""
    ratios = (f"{mean:.3f} ({low:.3f}-{high:.3f})" for mean, low, high in over_seed(cell, *rows))
    return f"  time over A's {' '.join(ratios)}"


def picture(found: dict[str, Any], path: Path) -> None:
    """Milliseconds over tokens, a panel for each share."""
    try:
        import matplotlib as mpl
    except ImportError:
        said("no matplotlib: no picture")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plots

    window = found["window"]
    figure, panels = plots.subplots(
        len(found["cells"]), 1, figsize=(9, 4 * len(found["cells"])), squeeze=False
    )
    for cell, panel in zip(found["cells"], panels[:, 0], strict=True):
        for row in cell["contenders"]:
            rows = np.asarray(row["ms"][: len(row["ms"]) // window * window]).reshape(-1, window)
            panel.plot(np.arange(len(rows)) * window + window, np.median(rows, axis=1), label=row["name"])
        at = 0
        for topic, length in found["phases"]:
            panel.axvline(at, color="grey", linewidth=0.5)
            panel.annotate(topic, (at + length / 2, 0.98), xycoords=("data", "axes fraction"), va="top")
            at += length
        panel.set(
            title=f"{cell['share']:.0%} of the experts in VRAM",
            xlabel="token",
            ylabel="ms a token",
            ylim=(0, None),
        )
        panel.legend(fontsize=7, ncols=3)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
