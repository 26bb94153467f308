"""A program: two threads write from one model whose slots change at every step, and alone; are they the same?

Its argument is a model of 64 experts with routing as told. Says "the same", or what differs.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

SLOTS, LENGTH, STEPS = 20, 40, 400
TEXTS = ((400, 401, 402, 500, 501), (900, 320, 333, 1200, 1201, 1202, 1203))


def main(path: Path) -> str:
    """What differs."""
    from planner.plan.load_spec import LoadSpec
    from planner.workload import Workload
    from runtime.engine.libllama import Engine
    from runtime.hybrid.config import Config, Resident
    from runtime.hybrid.device import HybridDevice
    from runtime.session.session import Session

    engine = Engine.find(None)
    # At every step of a layer another expert takes another slot, whoever computes then.
    moves = tuple(
        (step, layer, expert % 64, step % SLOTS)
        for step in range(STEPS)
        for layer in range(2)
        for expert in range(step * 7, step * 7 + 30)
    )
    seed = {layer: Resident(64, tuple(range(SLOTS))) for layer in range(3)}
    config = Config(name="HYBRID1", residents=seed, policy="schedule", moves=moves, cpu_bytes_us=1000)
    device = HybridDevice(engine.ggml, "CPU", config)
    spec = LoadSpec(
        devices=(device.name,),
        tensor_split=(1,),
        n_gpu_layers=99,
        overrides=((r"\.ffn_(gate|up|down)_exps\.weight$", device.buffer_name),),
        workload=Workload(n_ctx=256),
        use_extra_bufts=False,
        threads=1,
    )

    def written(session: Session, text: tuple[int, ...]) -> list[int]:
        return list(session.generate(text, LENGTH, ignore_end=True).tokens)

    with Session(engine, path, spec, own={device.buffer_name: device.buffer_type}) as one:
        alone = [written(one, text) for text in TEXTS]
        before = device.report().blocks[0].admitted
        with _second(one) as other:
            found: dict[int, list[int]] = {}

            def work(n: int, session: Session) -> None:
                found[n] = written(session, TEXTS[n])

            threads = [threading.Thread(target=work, args=each) for each in enumerate((one, other))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        block = device.report().blocks[0]
    if block.admitted - before < LENGTH // 2 or not before:
        return f"too few exchanges: {before} alone, {block.admitted} in all"
    differ = [n for n in range(2) if found[n] != alone[n]]
    return f"texts {differ} differ: {found} {alone}" if differ else "the same"


def _second(one: Any) -> Any:
    """Another context on the model of a session."""
    import copy
    from contextlib import ExitStack, contextmanager

    from runtime.load import load_params

    @contextmanager
    def opened() -> Any:
        with ExitStack() as stack:
            kept = load_params.Kept()
            stack.callback(kept.objects.clear)
            params = load_params.context_params(one.engine, one.spec, kept, None)
            made = copy.copy(one)
            made.context = stack.enter_context(load_params.context(one.engine, one.model, params, made._said))
            yield made

    return opened()


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
