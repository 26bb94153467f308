"""Other experts in a device's slots while it decodes, as a running `serve` is asked for them.

    python -m benchmarks.hybrid.exchanged --engine BUILD_FOLDER --out exchanged.json

Decodes one stream twice: with the slots of one topic, which stay, and with the same until an order comes
in the middle (`runtime.hybrid.orders`, the file that `serve` writes too) that names those of another topic.
Writes how long the device took to follow, milliseconds of a token before and after, how many tokens are
chosen alike, and what the GPU's driver says meanwhile, as the metrics page tells it. Exits with 1 where the
residents are not those of the order, expert by expert, or where more tokens differ than rounding explains.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.rounds import drifting
from benchmarks.rounds.topics import Given, add_work, given_of
from benchmarks.rounds.visit import engine_name
from planner.plan.load_spec import Residents
from runtime.engine.gpu_usage import readings
from runtime.engine.nvml import nvml
from runtime.hybrid.config import Config
from runtime.hybrid.device import HybridDevice
from runtime.hybrid.lane_files import LaneFiles
from runtime.hybrid.orders import NotFollowed, Orders
from runtime.session.session import Session

ALIKE = 0.98  # of the tokens: CPU and GPU round differently, and near ties fall either way
EVERY_MS = 50  # that the device looks for orders


def main() -> None:
    """Measure, write, judge."""
    options = _arguments()
    given = given_of(options)
    stays, _ = _decoded(given, options, None)
    try:
        goes, told = _decoded(given, options, given.hot["B"])
    except NotFollowed as problem:
        sys.exit(problem.message())
    alike = statistics.mean(a == b for a, b in zip(stays["chosen"], goes["chosen"], strict=True))
    found = {
        "engine": engine_name(given.engine.build),
        "device": options.device,
        "layers": given.n_layers,
        "tokens": len(given.tokens),
        "alike": round(alike, 4),
        **told,
        "stays": _figures(stays),
        "exchanged": _figures(goes),
    }
    Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0 if alike >= ALIKE and told["as_ordered"] else 1)  # a wrapper lives as long as its process


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_work(parser)
    parser.add_argument("--share", type=float, default=0.5, help="of the experts in slots")
    parser.add_argument("--out", default="exchanged.json")
    parser.set_defaults(lockstep=False)  # steps wait for nobody, as in a server
    return parser.parse_args()


def _decoded(given: Given, options: argparse.Namespace, then: Any) -> tuple[dict[str, Any], Any]:
    """The stream, token by token; with an order for `then`, hottest first by layer, when half is decoded."""
    # It stays: the device writes reports there as long as the process lives, and no folder can be removed
    # that another thread writes into.
    folder = Path(tempfile.mkdtemp(prefix="exchanged-", dir=options.work))
    with ThreadPoolExecutor(1) as sender, _loaded(given, options, folder) as (session, device):
        orders = Orders({"": folder / "orders"}, LaneFiles({"": folder / "report"}))
        slots = device.report().blocks[0].slots if device.report().blocks else 0
        wanted: Residents = tuple(
            (layer, given.n_experts, order[:slots]) for layer, order in enumerate(then or ())
        )
        sent: Future[float] | None = None
        found: dict[str, Any] = {"chosen": [], "ms": [], "gpu": []}
        for at, token in enumerate(given.tokens):
            if wanted and at == len(given.tokens) // 2:
                sent = sender.submit(_sent, orders, wanted)
            begin = time.perf_counter()
            found["chosen"].append(session.choose([token], at))
            found["ms"].append((time.perf_counter() - begin) * 1e3)
            if at % 64 == 63:
                found["gpu"] += _gpu(options.device)
        if sent is None:
            return found, {}
        seconds = sent.result()
        now = {(block.block, block.experts): set(block.resident) for block in device.report().blocks}
        as_ordered = all(now[layer, n] == set(experts) for layer, n, experts in wanted)
        return found, {"followed_s": round(seconds, 3), "slots": slots, "as_ordered": as_ordered}


@contextmanager
def _loaded(
    given: Given, options: argparse.Namespace, folder: Path
) -> Iterator[tuple[Session, HybridDevice]]:
    def watched(config: Config) -> Config:
        report, orders = str(folder / "report"), str(folder / "orders")
        return replace(config, report=report, orders=orders, report_ms=EVERY_MS)

    spec, hybrid, _ = drifting.loading(given, "A", 2, options.share, watched)
    assert hybrid is not None
    with Session(given.engine, given.path, spec, own={hybrid.buffer_name: hybrid.buffer_type}) as session:
        session.choose(given.tokens[:8], 0)
        session.clear()
        yield session, hybrid


def _sent(orders: Orders, residents: Residents) -> float:
    begin = time.monotonic()
    orders.send(residents)
    return time.monotonic() - begin


def _gpu(device: str) -> list[tuple[int, int]]:
    """Per cent of the time that a kernel ran, and bytes in use; nothing of other devices."""
    if not device.startswith("CUDA"):
        return []
    with nvml() as library:
        return (
            [(each.percent, each.used_bytes) for each in readings(library, [device]).values()]
            if library
            else []
        )


def _figures(found: dict[str, Any]) -> dict[str, Any]:
    half = len(found["ms"]) // 2
    gpu = found["gpu"]
    return {
        "ms_before": round(statistics.median(found["ms"][:half]), 3),
        "ms_after": round(statistics.median(found["ms"][half + half // 2 :]), 3),
        "slowest_ms_after": round(max(found["ms"][half:]), 2),
        "gpu_busy_percent": round(statistics.mean(percent for percent, _ in gpu), 1) if gpu else None,
        "gpu_used_mib": max(used for _, used in gpu) >> 20 if gpu else None,
    }


if __name__ == "__main__":
    main()
