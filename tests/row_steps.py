"""A program: sequences that decode together on a device with experts in slots; what its report says by row.

Reads from stdin: model, settings of the device (`runtime.hybrid.config`), `seed` (experts in the slots of
every layer), and steps: lists of [sequence, token], in the order of the batch. Answers with the blocks of a
report after each of the `marks`, numbers of steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.hybrid.device import Block

Step = Sequence[tuple[int, int]]  # sequence and token, in the order of the batch
N_CTX = 4096


def rows_after(
    model: Path,
    settings: Mapping[str, Any],
    seed: Sequence[Sequence[int]],
    n_expert: int,
    steps: Sequence[Step],
    marks: Sequence[int],
) -> list[tuple[Block, ...]]:
    """The blocks of the device's report after so many steps each, from a child process."""
    from engines import python

    from runtime.hybrid.device import _block

    request = {
        "model": str(model),
        "settings": dict(settings),
        "seed": [list(experts) for experts in seed],
        "n_expert": n_expert,
        "steps": [list(map(list, step)) for step in steps],
        "marks": list(marks),
    }
    done = python(__file__, given=json.dumps(request), limit_s=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [tuple(_block(block) for block in blocks) for blocks in json.loads(done.stdout)]


def main(asked: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """The answer, as plain data."""
    import numpy as np

    from benchmarks.timed_decode import TimedContext
    from planner.plan.load_spec import LoadSpec
    from planner.workload import Workload
    from runtime.engine.libllama import Engine
    from runtime.hybrid.config import Config, Resident
    from runtime.hybrid.device import HybridDevice
    from runtime.session.session import Session

    engine = Engine.find(None)
    seed = {layer: Resident(asked["n_expert"], tuple(experts)) for layer, experts in enumerate(asked["seed"])}
    device = HybridDevice(engine.ggml, "CPU", Config(residents=seed, **asked["settings"]))
    n_seq = 1 + max(sequence for step in asked["steps"] for sequence, _ in step)
    spec = LoadSpec(
        devices=(device.name,),
        tensor_split=(1,),
        n_gpu_layers=99,
        overrides=((r"\.ffn_(gate|up|down)_exps\.weight$", device.buffer_name),),
        workload=Workload(n_ctx=N_CTX, n_seq=n_seq),
        use_extra_bufts=False,
        threads=1,
    )
    found = []
    with Session(engine, Path(asked["model"]), spec, own={device.buffer_name: device.buffer_type}) as session:
        run = TimedContext(engine, session.context, session.n_vocab)
        at = [0] * n_seq
        for number, step in enumerate(asked["steps"], 1):
            rows = []
            for sequence, token in step:
                rows.append((token, at[sequence], sequence))
                at[sequence] += 1
            tokens, positions, sequences = (np.array(column, np.int32) for column in zip(*rows, strict=True))
            run.decode_rows(tokens, positions, sequences, np.ones(len(rows), np.int8))
            if number in asked["marks"]:
                found.append([asdict(block) for block in device.report().blocks])
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
