"""Loads a model with stripes in a process of its own; request and answer are JSON (see test_stripes.py)."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from planner.errors import AtsplanError
from planner.plan.load_spec import LoadSpec
from planner.workload import Workload
from runtime.engine.libllama import Engine
from runtime.load.dry_run import measure
from runtime.session.session import Session
from runtime.session.striped import StripedSession, session_for
from runtime.stripes import mapped_range
from runtime.stripes.buffer_type import Stripes
from runtime.stripes.cuda_driver import Driver, Place
from runtime.stripes.server_hook import striped_weights

PATTERN = r"^blk\.\d+\.ffn_(gate|up|down)_exps\.weight$"


def session(engine: Engine, request: dict[str, Any], k: int) -> Session:
    """A session with k hot experts in every layer."""
    spec = LoadSpec(
        devices=("CUDA0",),
        tensor_split=(3,),
        n_gpu_layers=3,
        overrides=((PATTERN, f"stripe:CUDA0:{k}"),),
        workload=Workload(n_ctx=512),
        use_mmap=request.get("read", "mmap") == "mmap",
    )
    return session_for(engine, Path(request["model"]), spec)


def logits(one: Session) -> str:
    """Digest of the logits of 40 tokens."""
    return hashlib.sha256(one.logits([(7 * i) % one.n_vocab for i in range(40)]).tobytes()).hexdigest()


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main(request: dict[str, Any]) -> dict[str, Any]:
    engine, driver = Engine.find(request["engine"]), Driver()
    with driver.current(driver.retain(0)):
        if request.get("starve"):
            return starve(engine, driver, request)
        if request.get("no_host_memory"):
            mapped_range.MARGIN_BYTES = 2**60
            return refused(engine, driver, request)
        if request.get("hook"):
            return hooked(engine, request)
        if request.get("together"):
            return together(engine, request)
        answer: dict[str, Any] = {"vram_after": [], "resident_after": []}
        for _ in range(request.get("times", 1)):
            with session(engine, request, request["k"][0]) as one:
                answer["logits"] = [logits(one)]
                assert isinstance(one, StripedSession)
                answer["device_bytes"] = sum(held.device_bytes for held in one.stripes.held())
                answer["memory"] = {name: sizes.model for name, sizes in one.memory().items()}
                dry = measure(engine, Path(request["model"]), one.spec)
                answer["dry"] = {name: sizes.model for name, sizes in dry.devices.items()}
            answer["vram_after"].append(driver.memory()[0])
            answer["resident_after"].append(resident())
    return answer


def together(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """All at once; the first one is closed before the others are asked."""
    with ExitStack() as stack:
        opened = [stack.enter_context(session(engine, request, k)) for k in request["k"]]
        first = logits(opened[0])
        opened[0].close()
        return {"logits": [first, *(logits(one) for one in opened[1:])]}


def starve(engine: Engine, driver: Driver, request: dict[str, Any]) -> dict[str, Any]:
    """Take the device's memory first, so that the hot part finds none."""
    with session(engine, request, request["k"][0]):
        pass  # libraries and context have taken what they take
    granule = 2 * 2**20
    ballast = driver.create((driver.memory()[0] - 80 * 2**20) // granule * granule, Place.DEVICE, 0)
    answer = refused(engine, driver, request)
    driver.drop(ballast)
    return answer


def refused(engine: Engine, driver: Driver, request: dict[str, Any]) -> dict[str, Any]:
    """A load that cannot succeed: its one line, and the device memory it left behind."""
    before, problem = driver.memory()[0], ""
    try:
        with session(engine, request, request["k"][0]):
            pass
    except AtsplanError as why:
        problem = str(why)
    return {"problem": problem, "vram_lost": before - driver.memory()[0]}


def hooked(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """A plain session, striped behind its back as a server's would be."""
    names = [f"blk.{i}.ffn_{part}_exps.weight" for i in (0, 1) for part in ("gate", "up", "down")]
    widths = dict.fromkeys(names, request["k"][0])
    plain = LoadSpec(("CUDA0",), (3,), 3, (), Workload(n_ctx=512))
    with (
        Stripes(engine.ggml) as stripes,
        striped_weights(stripes, "CUDA0", widths),
        session_for(engine, Path(request["model"]), plain) as opened,
    ):
        stripes.check()
        tensors = sum(held.tensors for held in stripes.held())
        return {"logits": [logits(opened)], "tensors": tensors}


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
