"""Decoding with experts in slots, in a child: `python -m profiler.whole_model.slot_runs`, a JSON line a run.

A run gives a number of slots, of guests, and what the lanes are told of each other's speed, which decides who
takes the experts without a slot. Tokens differ, so that a model of random weights uses all its experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from planner.errors import AtsplanError
from profiler.whole_model.decode import timed
from runtime.child.serve import Message as Line
from runtime.child.serve import serve_lines
from runtime.engine.libllama import Engine
from runtime.hybrid.config import Config
from runtime.hybrid.device import HybridDevice, Report
from runtime.load.dry_run import from_json
from runtime.session.session import Session

EXPERTS = r"\.ffn_(gate|up|down|gate_up)_exps\.weight$"
WARM_TOKENS = 6
_COUNTS = ("hits", "uploaded", "cpu", "cpu_ns")


def runs(request: Line) -> Iterator[Line]:
    """A line for each run that is asked for; one that fails says why."""
    engine = Engine.find(request["engine"])
    for run in request["runs"]:
        try:
            yield {"kind": "run", "key": run["key"], **_run(engine, Path(request["model"]), run, request)}
        except AtsplanError as problem:
            yield {"kind": "run", "key": run["key"], "skipped": str(problem)}


def _run(engine: Engine, model: Path, run: Line, request: Line) -> Line:
    device = HybridDevice(engine.ggml, request["device"], Config(**run["config"]))
    spec = from_json(request["spec"])
    spec = replace(spec, devices=(device.name,), overrides=((EXPERTS, device.buffer_name),))
    with Session(engine, model, spec, own={device.buffer_name: device.buffer_type}) as session:
        return _measured(session, device, Random(request["seed"]), request)


def _measured(session: Session, device: HybridDevice, draw: Random, request: Line) -> Line:
    """Times of tokens and prompts, and what became of the tokens' choices."""

    def tokens(count: int) -> list[int]:
        return [draw.randrange(session.n_vocab) for _ in range(count)]

    prompts = []
    for _ in range(request["prompts"] + 1):  # the first one allocates
        session.clear()
        prompts.append(timed(session, tokens(request["prompt"]), 0))
    start = request["prompt"]
    for position, token in enumerate(tokens(WARM_TOKENS), start):
        timed(session, [token], position)
    before, begin = device.report(), start + WARM_TOKENS
    each = [timed(session, [token], begin + n) for n, token in enumerate(tokens(request["gen"]))]
    after = device.report()
    return {
        "decode_ns": round(trimmed(each)),
        "prompt_ns": min(prompts[1:], default=0),
        **{name: _sum(after, name) - _sum(before, name) for name in _COUNTS},
        "expert_bytes": after.blocks[0].expert_bytes if after.blocks else 0,
        "device_ns": after.device_ns,
        "cpu_start_ns": after.cpu_start_ns,
        "bus_start_ns": after.bus_start_ns,
    }


def trimmed(times: Sequence[int]) -> float:
    """The mean without the slowest tenth: choices are counted over all tokens, stalls are nobody's cost."""
    return statistics.fmean(sorted(times)[: max(len(times) * 9 // 10, 1)])


def _sum(report: Report, name: str) -> int:
    return sum(int(getattr(block, name)) for block in report.blocks)


if __name__ == "__main__":
    serve_lines(runs)
