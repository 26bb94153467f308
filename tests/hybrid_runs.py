"""Models decoded with and without a hybrid device, in one child process: an abort there fails one test only.

As a program: reads a list of runs from stdin; answers with one JSON line a run and logits in a file each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from runtime.hybrid.device import Report

EXPERTS = r"\.ffn_(gate|up|down|gate_up)_(ch)?exps\.weight$"
# More than sixteen tokens at once end the software Vulkan device by itself.
PROMPT = (3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32)
MORE = (38, 46, 26, 43)
FAULTS = ("-DATSPLAN_HYBRID_FAULTS", "-O1")  # built in half the time


@dataclass(frozen=True, slots=True)
class Run:
    """One load and the decoding of a prompt at once, then of tokens one by one."""

    model: Path
    settings: Mapping[str, Any] | None = None  # of runtime.hybrid.config.Config; None: the device itself
    residents: Mapping[int, Sequence[int]] = field(default_factory=dict)  # by block
    n_experts: int = 8
    pattern: str = EXPERTS  # of the tensors in the hybrid buffer; "": forwarding alone
    observe: bool = False  # stop at every node
    wraps: str = "CPU"
    prompt: tuple[int, ...] = PROMPT
    more: tuple[int, ...] = MORE
    warm: bool = False  # decode all experts first, as stock tools do
    mmap: bool = False
    changes: tuple[
        tuple[int, tuple[int, ...]], ...
    ] = ()  # block, experts: before every token after the prompt
    threads: int = 2

    def on(self, **settings: Any) -> Run:
        """The same run on a hybrid device with these settings."""
        return replace(self, settings=settings)


@dataclass(frozen=True, slots=True)
class Ran:
    """Logits of every token, shape (tokens, vocabulary), and what the device says of itself."""

    logits: NDArray[np.float32]
    report: Report | None


def run_all(
    runs: Sequence[Run], folder: Path, engine: Path | None = None, limit_s: int = 300, faults: bool = False
) -> list[Ran]:
    """The answers to runs on one engine (None: the embedded one), from one child."""
    import numpy as np
    from engines import python

    from runtime.hybrid.device import read_report

    request = {
        "engine": str(engine) if engine else None,
        "folder": str(folder),
        "faults": faults,
        "runs": [{**asdict(run), "model": str(run.model)} for run in runs],
    }
    done = python(__file__, given=json.dumps(request), limit_s=limit_s)
    lines = done.stdout.splitlines()
    assert len(lines) == len(runs), f"{len(lines)} of {len(runs)} runs: {done.stderr[-3000:]}"
    found = []
    for line in lines:
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        report = read_report(json.dumps(answer["report"])) if answer["report"] else None
        found.append(Ran(np.load(answer["logits"]), report))
    return found


def distance(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """Root mean square difference in deviations of the first."""
    return float(((first - second) ** 2).mean() ** 0.5 / first.std())


# ---- in the child


def _answer(engine: Any, request: Mapping[str, Any], run: Mapping[str, Any], target: Path) -> dict[str, Any]:
    import numpy as np

    from planner.plan.load_spec import LoadSpec
    from planner.workload import Workload
    from runtime.session.session import Session

    device, own = _device(engine, request, run)
    name = device.name if device else run["wraps"]
    overrides = ((run["pattern"], device.buffer_name),) if device and run["pattern"] else ()
    spec = LoadSpec(
        devices=(name,),
        tensor_split=(1,),
        n_gpu_layers=99,
        overrides=overrides,
        workload=Workload(n_ctx=256),
        use_extra_bufts=False,
        use_mmap=run["mmap"],
        threads=run["threads"],
    )
    observe = (lambda tensor, ask, user: True) if run["observe"] else None
    rows = []
    with Session(engine, Path(run["model"]), spec, own=own, on_node=observe) as session:
        if run["warm"]:
            engine.lib.llama_set_warmup(session.context, True)
            session.logits(run["prompt"][:2])
            engine.lib.llama_set_warmup(session.context, False)
        rows.append(session.logits(run["prompt"]))
        for n, token in enumerate(run["more"]):
            for block, experts in run["changes"]:
                turned = experts[n % len(experts) :] + experts[: n % len(experts)]
                device.set_residents(block, turned, model=device.report().blocks[0].model)
            session._decode([token], len(run["prompt"]) + n, [True])
            rows.append(session._rows(1).copy())
    np.save(target, np.concatenate(rows))
    return {"logits": str(target), "report": _said(device) if device else None}


def _device(engine: Any, request: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[Any, dict[str, int]]:
    from runtime.hybrid.config import Config, Resident
    from runtime.hybrid.device import HybridDevice

    if run["settings"] is None:
        return None, {}
    residents = {int(b): Resident(run["n_experts"], tuple(e)) for b, e in run["residents"].items()}
    _device.count = getattr(_device, "count", 0) + 1  # type: ignore[attr-defined]
    name = f"HYBRID{_device.count}"  # type: ignore[attr-defined]
    config = Config(name=name, residents=residents, quiet=False, **run["settings"])
    made = HybridDevice(engine.ggml, run["wraps"], config, FAULTS if request["faults"] else ())
    return made, {made.buffer_name: made.buffer_type}


def _said(device: Any) -> dict[str, Any]:
    return asdict(device.report())


def _main() -> None:
    from planner.errors import AtsplanError
    from runtime.engine.libllama import Engine

    request = json.load(sys.stdin)
    engine = Engine.find(request["engine"])
    for number, run in enumerate(request["runs"]):
        try:
            answer = _answer(engine, request, run, Path(request["folder"]) / f"{number}.npy")
        except AtsplanError as problem:
            answer = {"error": str(problem)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
