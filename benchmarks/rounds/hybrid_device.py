"""Hybrid experts against the engine's own rules, in one process and in rounds, at equal VRAM.

    python -m benchmarks.rounds.hybrid_device --engine BUILD_FOLDER --work FOLDER --layers 16 --routing strong

Makes the model if need be (128 experts of which 8 are used, q4_K), loads every contender at once, and
measures them in turn in every round, so that a machine that changes its pace changes it for all. Contenders:

    plain        everything on the device
    forward      the same through the wrapper, without experts of ours
    ncmoe:N      experts of the first N layers on the CPU
    hybrid:K     K slots a layer, the rest by the CPU
    hybrid:K+G   and up to G uploads a layer and token
    …@WAY        with the experts in host memory so: pinned, mapped (the faster of the two that follow, as the
                 library measures), ring (mapped, through locked memory), paged (mapped, by the driver alone)

Mapped, with the ring and without, beside pinned, is one command, whose prompts are what to look at:

    python -m benchmarks.rounds.hybrid_device --engine BUILD_FOLDER --prompt 4096 --ubatch 2048 \\
        --contenders plain,hybrid:64+2@pinned,hybrid:64+2@ring,hybrid:64+2@paged,hybrid:64+2@mapped

Prints JSON: milliseconds a token (median of each round), VRAM, hit rate, waits, and how near the bound each
comes: the time wholly in VRAM plus the bytes of experts without a slot over CPU and bus together.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import generated_models
from benchmarks.rounds.visit import engine_name
from planner.plan.load_spec import LoadSpec
from planner.workload import Workload
from profiler.synth.synth import write
from runtime.engine.libllama import Engine
from runtime.hybrid.config import Config
from runtime.hybrid.device import HybridDevice, Report
from runtime.session.session import Session

WAYS: Mapping[str, Mapping[str, Any]] = {
    "pinned": {"memory": "pinned"},
    "mapped": {"memory": "mapped"},
    "ring": {"memory": "mapped", "ring": True},
    "paged": {"memory": "mapped", "ring": False},
}
EXPERTS = r"\.ffn_(gate|up|down|gate_up)_exps\.weight$"
WARM_UP = 6
PROMPT = 24  # tokens before the measured ones


@dataclass(slots=True)
class Contender:
    """One loaded model and what was measured of it."""

    name: str
    session: Session
    hybrid: HybridDevice | None
    load_s: float
    vram_mib: float = 0.0
    rounds: list[float] = field(default_factory=list)  # ms a token, medians
    prompt_tps: list[float] = field(default_factory=list)
    logits: Any = None
    threads: int = 0
    lanes: dict[str, float] = field(default_factory=dict)


def main() -> None:
    """Measure and print."""
    given = _arguments()
    engine = Engine.find(given.engine)
    model = _model(given)
    names = (
        given.contenders.split(",") if given.contenders else _usual(given.layers, given.share, given.guests)
    )
    said(f"{engine.build.text}; {model} {model.stat().st_size >> 20} MiB; {names}")
    with ExitStack() as stack:
        contenders = [_load(engine, stack, model, name, given) for name in names]
        for contender in contenders:
            _first(contender, engine, given)
        for number in range(given.rounds):
            for contender in contenders:
                _round(contender, engine, given, number)
                said(f"round {number} {contender.name}: {contender.rounds[-1]:.3f} ms")
        print(json.dumps(_results(contenders, engine, model, given), indent=1))
    sys.stdout.flush()
    os._exit(0)  # a wrapper lives as long as its process


def said(text: str) -> None:
    """Progress, on stderr."""
    print(f"[{time.monotonic():.0f}] {text}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", help="build folder; none: the installed engine")
    parser.add_argument("--model", type=Path, help="a file to use instead of a made one")
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/atsplan-hybrid"), help="folder for made models"
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--routing", choices=sorted(generated_models.ROUTING), default="strong")
    parser.add_argument(
        "--small", action="store_true", help="a model of a few MiB, to try this program itself"
    )
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--share", type=float, default=0.5, help="of the experts that have slots")
    parser.add_argument("--guests", type=int, default=4)
    parser.add_argument("--contenders", default="")
    parser.add_argument("--threads", default="", help="counts to choose the best of, for each contender")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a measured prompt; 0: none")
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--memory", choices=sorted(WAYS), default="pinned", help="where no contender says it")
    return parser.parse_args()


def _model(given: argparse.Namespace) -> Path:
    if given.model:
        return Path(given.model)
    given.work.mkdir(parents=True, exist_ok=True)
    spec = replace(generated_models.MODELS["qwen3moe"], n_layers=given.layers, n_vocab=32000)
    if given.small:
        spec = replace(
            spec,
            n_embd=256,
            n_head=4,
            n_head_kv=2,
            head_dim=64,
            n_ff_exp=256,
            n_ff=512,
            n_vocab=512,
            n_expert=16,
            n_used=4,
        )
    path: Path = given.work / f"{'small' if given.small else 'moe'}-{given.layers}-{given.routing}.gguf"
    if not path.exists():
        said(f"making {path}")
        write(path, spec)
        generated_models.set_routing(path, given.routing)
    return path


def _usual(layers: int, share: float, guests: int) -> list[str]:
    """Whole, forwarded, the stock rule at no less VRAM, and hybrid with one lane and with both."""
    slots = round(128 * share)
    return [
        "plain",
        "forward",
        f"ncmoe:{layers - round(layers * share)}",
        f"hybrid:{slots}",
        f"hybrid:{slots}+{guests}",
    ]


def _load(engine: Engine, stack: ExitStack, model: Path, name: str, given: argparse.Namespace) -> Contender:
    kind, _, rest = name.partition(":")
    device, hybrid, own = given.device, None, {}
    overrides: tuple[tuple[str, str], ...] = ()
    if kind == "ncmoe":
        blocks = "|".join(map(str, range(int(rest))))
        overrides = ((rf"^blk\.({blocks}){EXPERTS}", "CPU"),) if blocks else ()
    elif kind in ("hybrid", "forward"):
        rest, _, way = rest.partition("@")
        slots, _, guests = rest.partition("+")
        lies = WAYS[way or given.memory]
        wrapper = "HYBRID" + "".join(letter for letter in name if letter.isalnum())
        config = Config(name=wrapper, slots=int(slots or 0), guests=int(guests or 0), quiet=False, **lies)
        hybrid = HybridDevice(engine.ggml, given.device, config)
        device, own = hybrid.name, {hybrid.buffer_name: hybrid.buffer_type}
        overrides = ((EXPERTS, hybrid.buffer_name),) if kind == "hybrid" else ()
    elif kind != "plain":
        raise SystemExit(f"no contender {name}")
    n_ctx = max(4096, given.prompt)
    workload = Workload(n_ctx=n_ctx, n_batch=max(2048, given.ubatch), n_ubatch=given.ubatch)
    spec = LoadSpec((device,), (1,), 999, overrides, workload, threads=_threads(given)[0])
    before, begin = _used_mib(engine, given.device), time.perf_counter()
    session = stack.enter_context(Session(engine, model, spec, own=own))
    session.logits([1, 2, 3], last=True)
    made = Contender(name, session, hybrid, time.perf_counter() - begin)
    made.vram_mib = _used_mib(engine, given.device) - before
    said(f"loaded {name} in {made.load_s:.1f} s, {made.vram_mib:.0f} MiB")
    return made


def _threads(given: argparse.Namespace) -> list[int]:
    if given.threads:
        return [int(count) for count in given.threads.split(",")]
    cores = os.cpu_count() or 1
    return sorted({cores, max(cores // 2, 1), max(3 * cores // 4, 1)}, reverse=True)


def _used_mib(engine: Engine, device: str) -> float:
    found = engine.ggml.device(device)
    return (found.total_bytes - found.free_bytes) / 2**20


def _first(contender: Contender, engine: Engine, given: argparse.Namespace) -> None:
    """Logits to compare, and the number of threads that serves this contender best."""
    tokens = np.random.default_rng(3).integers(0, contender.session.n_vocab, PROMPT).tolist()
    contender.logits = contender.session.logits(tokens, last=True)[0].copy()
    best = float("inf")
    for count in _threads(given):
        engine.lib.llama_set_n_threads(contender.session.context, count, count)
        took = _decode(contender, 12, 11)
        if took < best:
            best, contender.threads = took, count
    engine.lib.llama_set_n_threads(contender.session.context, contender.threads, contender.threads)


def _round(contender: Contender, engine: Engine, given: argparse.Namespace, number: int) -> None:
    before = contender.hybrid.report() if contender.hybrid else None
    contender.rounds.append(_decode(contender, given.tokens, 100 + number))
    if contender.hybrid and before:
        contender.lanes = _lanes(before, contender.hybrid.report(), given.tokens + WARM_UP)
    if given.prompt:
        tokens = np.random.default_rng(number).integers(0, contender.session.n_vocab, given.prompt).tolist()
        begin = time.perf_counter()
        contender.session.logits(tokens, last=True)
        contender.prompt_tps.append(given.prompt / (time.perf_counter() - begin))


def _decode(contender: Contender, count: int, seed: int) -> float:
    """Median milliseconds a token, of random tokens; the same ones for every contender."""
    session = contender.session
    tokens = np.random.default_rng(seed).integers(0, session.n_vocab, PROMPT + WARM_UP + count).tolist()
    session.logits(tokens[:PROMPT], last=True)
    times = []
    for n, token in enumerate(tokens[PROMPT:]):
        begin = time.perf_counter()
        session.choose([token], PROMPT + n)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[WARM_UP:])


def _lanes(before: Report, after: Report, tokens: int) -> dict[str, float]:
    """What the lanes did for one token, the prompt of a round counted with it."""

    def difference(what: str) -> float:
        return float(
            sum(getattr(b, what) for b in after.blocks) - sum(getattr(b, what) for b in before.blocks)
        )

    chosen = max(difference("hits") + difference("cpu") + difference("uploaded"), 1)
    bytes_each = after.blocks[0].expert_bytes if after.blocks else 0
    cold = difference("cpu") + difference("uploaded")
    return {
        "hit_rate": difference("hits") / chosen,
        "cpu_share": difference("cpu") / chosen,
        "uploaded_share": difference("uploaded") / chosen,
        "cold_mib": cold * bytes_each / 2**20 / (tokens + PROMPT),
        "wait_ms": difference("wait_ns") / 1e6 / tokens,
        "cpu_ms": difference("cpu_ns") / 1e6 / tokens,
    }


def _results(
    contenders: list[Contender], engine: Engine, model: Path, given: argparse.Namespace
) -> dict[str, Any]:
    plain = next((c for c in contenders if c.name == "plain"), None)
    stock = [c for c in contenders if c.name.startswith("ncmoe")]
    rows = [_row(each, plain, stock) | _prompts(each, contenders) for each in contenders]
    return {
        "engine": engine_name(engine.build),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": engine.ggml.device(given.device).description,
        "model": {
            "file": model.name,
            "mib": model.stat().st_size >> 20,
            "layers": given.layers,
            "routing": given.routing,
        },
        "rounds": given.rounds,
        "tokens": given.tokens,
        "contenders": rows,
    }


def _row(each: Contender, plain: Contender | None, stock: list[Contender]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": each.name,
        "ms": round(statistics.median(each.rounds), 3),
        "rounds": [round(ms, 3) for ms in each.rounds],
        "vram_mib": round(each.vram_mib),
        "load_s": round(each.load_s, 1),
        "threads": each.threads,
        "prompt_tps": [round(tps) for tps in each.prompt_tps],
    }
    if plain is not None:
        spread = float(plain.logits.std()) or 1.0
        row["logits_distance"] = float(np.sqrt(np.mean((plain.logits - each.logits) ** 2))) / spread
        row["same_token"] = bool(plain.logits.argmax() == each.logits.argmax())
        row["of_plain"] = _paired(plain, each)
    if stock and each.name.startswith("hybrid"):
        row["over_stock"] = {s.name: _paired(s, each) for s in stock}
    if each.hybrid is not None:
        report = each.hybrid.report()
        row |= {"lanes": each.lanes, "cpu_bytes_us": report.cpu_bytes_us, "bus_bytes_us": report.bus_bytes_us}
        row |= {"ring": report.ring, "ring_mib": report.ring_bytes >> 20}
        row |= {"ring_bytes_us": report.ring_bytes_us, "paged_bytes_us": report.paged_bytes_us}
        row |= {"host_mib": report.host_bytes >> 20, "stage_mib": report.stage_bytes >> 20}
        together = report.cpu_bytes_us + (report.bus_bytes_us if "+" in each.name else 0)
        if plain is not None and each.lanes and together:
            cold_ms = each.lanes["cold_mib"] * 2**20 / together / 1e3
            row["bound_ms"] = round(statistics.median(plain.rounds) + cold_ms, 3)
            row["of_bound"] = round(row["bound_ms"] / row["ms"], 3)
    return row


def _prompts(each: Contender, contenders: list[Contender]) -> dict[str, Any]:
    """How many times as fast its prompts are as each other's: the median of ratios within a round."""
    if not each.prompt_tps:
        return {}
    return {
        "prompts_over": {
            other.name: round(
                statistics.median(e / o for e, o in zip(each.prompt_tps, other.prompt_tps, strict=True)), 3
            )
            for other in contenders
            if other is not each
        }
    }


def _paired(base: Contender, each: Contender) -> float:
    """How many times as fast as the base: the median over rounds of the ratio within a round."""
    return round(statistics.median(b / e for b, e in zip(base.rounds, each.rounds, strict=True)), 3)


if __name__ == "__main__":
    main()
