"""The work of benchmarks whose topics change: a model, a stream of tokens, and what each topic chooses."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from profiler.routed import codes, model, stream
from profiler.routed.presets import PRESETS
from runtime.engine.libllama import Engine

SEEN = 4096  # tokens of a topic that its hottest experts are counted on


def said(text: str) -> None:
    """Progress, on stderr."""
    print(f"[{time.monotonic():.0f}] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Given:
    """The work: a model, a stream, and the topics of its phases."""

    engine: Engine
    path: Path
    tokens: tuple[int, ...]
    phases: tuple[tuple[str, int], ...]  # topic, tokens
    hot: dict[str, tuple[tuple[int, ...], ...]]  # by topic and layer: experts, hottest first
    n_layers: int
    n_experts: int
    expert_bytes: int
    options: argparse.Namespace


def add_work(parser: argparse.ArgumentParser) -> None:
    """The options that say which model, tokens and device."""
    parser.add_argument("--engine", help="build folder; none: the installed engine")
    parser.add_argument("--work", type=Path, default=Path("/tmp/atsplan-models"), help="folder for models")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="shifting")
    parser.add_argument("--size", choices=("small", "large"), default="large")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--switch", type=int, default=256, help="tokens of a topic")
    parser.add_argument("--turns", type=int, default=3, help="phases")
    parser.add_argument("--mixed", action="store_true", help="the preset's own turns of all its topics")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")


def given_of(options: argparse.Namespace) -> Given:
    """The model, made if need be, and the tokens that options of `add_work` name."""
    preset = PRESETS[options.preset]
    habits = preset.habits
    spec = preset.spec(options.size)
    vocabulary = stream.FIRST_ID + habits.n_codes
    spec = replace(spec, name="", n_layers=options.layers, n_vocab=-(-vocabulary // 64) * 64)
    options.work.mkdir(parents=True, exist_ok=True)
    path = options.work / f"{options.preset}-{options.size}-{options.layers}.gguf"
    if not path.exists():
        said(f"making {path}")
        path = model.write(path, spec, habits)
    chosen = codes.chosen_by_code(habits, options.layers)
    topics = {"A": None} if options.mixed else {"A": 0, "B": 1}
    drawn = {name: _of_topic(habits, topic, SEEN, 77) for name, topic in topics.items()}
    hot = {name: tuple(map(_hottest(habits.n_expert), chosen[:, seen])) for name, seen in drawn.items()}
    phases = tuple((list(topics)[turn % len(topics)], options.switch) for turn in range(options.turns))
    length = options.turns * options.switch
    fresh = {name: _of_topic(habits, topic, length, 5) for name, topic in topics.items()}
    parts = [fresh[name][turn * length :][:length] for turn, (name, length) in enumerate(phases)]
    tokens = tuple(int(code) + stream.FIRST_ID for code in np.concatenate(parts))
    return Given(
        Engine.find(options.engine), path, tokens, phases, hot, options.layers, habits.n_expert,
        _expert_bytes(path, habits.n_expert), options,
    )  # fmt: skip


def _of_topic(habits: codes.Habits, topic: int | None, length: int, seed: int) -> Any:
    """Codes of one topic, in the order of a stream; of all where none is named."""
    if topic is None:
        return stream.codes_of(replace(habits, drift=0.0), length, seed)
    enough = 2 * habits.n_topics * max(length, habits.topic_tokens)
    drawn = stream.codes_of(replace(habits, drift=0.0), enough, seed)
    return drawn[habits.topic_of(drawn) == topic][:length]


def _hottest(n_experts: int) -> Any:
    def order(ids: Any) -> tuple[int, ...]:
        count = np.bincount(ids.ravel(), minlength=n_experts)
        return tuple(int(e) for e in np.argsort(-count, kind="stable"))

    return order


def _expert_bytes(path: Path, n_experts: int) -> int:
    """Of one expert of one layer."""
    from planner.model.gguf.reader import read_model

    tensors = read_model(path).inventory.tensors
    return (
        sum(t.size_bytes for t in tensors if t.name.startswith("blk.0.ffn_") and "_exps." in t.name)
        // n_experts
    )
