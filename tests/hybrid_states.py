"""A model through saved states, a shifted context, a control vector and an adapter, in a child process.

As a program: MODEL ADAPTER PLAIN HYBRID. Writes the logits of each part to two files (.npz): of the engine's
own device, and with experts in slots.
"""

from __future__ import annotations

import ctypes as c
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from runtime.session.session import Session

PROMPT = (3, 14, 15, 9, 26, 5)
MORE = (38, 46, 26)
EXPERTS = r"\.ffn_(gate|up|down)_exps\.weight$"


def parts(session: Session, adapter: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Logits of the tokens after the prompt, by what happened before them."""
    lib, context = session.engine.lib, session.context
    session.logits(PROMPT)
    state = (c.c_uint8 * _size(lib, context))()
    assert lib.llama_state_get_data(c.c_void_p(context), state, c.c_size_t(len(state)))
    yield "as usual", decode(session, len(PROMPT))
    assert lib.llama_state_set_data(c.c_void_p(context), state, c.c_size_t(len(state))) == len(state)
    yield "a state was loaded", decode(session, len(PROMPT))
    lib.llama_get_memory.restype = c.c_void_p
    memory = c.c_void_p(lib.llama_get_memory(c.c_void_p(context)))
    assert lib.llama_memory_seq_rm(memory, 0, 1, 4)
    lib.llama_memory_seq_add(memory, 0, 4, -1, -3)
    yield "the context was shifted", decode(session, len(PROMPT) + len(MORE) - 3)
    width = lib.llama_model_n_embd(c.c_void_p(session.model))
    vector = (c.c_float * (4 * width))(*([0.25, -0.5] * (2 * width)))
    assert not lib.llama_set_adapter_cvec(c.c_void_p(context), vector, c.c_size_t(len(vector)), width, 1, 3)
    session.logits(PROMPT)
    yield "a control vector", decode(session, len(PROMPT))
    assert not lib.llama_set_adapter_cvec(c.c_void_p(context), None, c.c_size_t(0), width, 0, 0)
    lib.llama_adapter_lora_init.restype = c.c_void_p
    lora = lib.llama_adapter_lora_init(c.c_void_p(session.model), str(adapter).encode())
    assert lora
    loaded, scale = (c.c_void_p * 1)(lora), (c.c_float * 1)(1.0)
    assert not lib.llama_set_adapters_lora(c.c_void_p(context), loaded, c.c_size_t(1), scale)
    session.logits(PROMPT)
    yield "an adapter of experts", decode(session, len(PROMPT))


def _size(lib: Any, context: int) -> int:
    lib.llama_state_get_size.restype = c.c_size_t
    return int(lib.llama_state_get_size(c.c_void_p(context)))


def decode(session: Session, at: int) -> NDArray[np.float32]:
    """Logits of MORE, one by one, from a place on."""
    import numpy as np

    rows = []
    for n, token in enumerate(MORE):
        session._decode([token], at + n, [True])
        rows.append(session._rows(1).copy())
    return np.concatenate(rows)


def main(model: str, adapter: str, *targets: str) -> None:
    """Load both ways, go through the parts, write."""
    import numpy as np

    from planner.plan.load_spec import LoadSpec
    from planner.workload import Workload
    from runtime.engine.libllama import Engine
    from runtime.hybrid.config import Config
    from runtime.hybrid.device import HybridDevice
    from runtime.session.session import Session

    engine = Engine.find(None)
    device = HybridDevice(engine.ggml, "CPU", Config(slots=3, stage=0))
    own = {device.buffer_name: device.buffer_type}
    for target, name in zip(targets, ("CPU", device.name), strict=True):
        spec = LoadSpec(
            devices=(name,),
            tensor_split=(1,),
            n_gpu_layers=99,
            overrides=((EXPERTS, device.buffer_name),) if name == device.name else (),
            workload=Workload(n_ctx=256),
            use_extra_bufts=False,
            threads=2,
        )
        with Session(engine, Path(model), spec, own=own) as session:
            found: dict[str, Any] = dict(parts(session, Path(adapter)))
        np.savez(target, **found)
    freed = device.report().freed
    assert freed and all(block.cpu and block.hits for block in freed), "the lanes had nothing to do"


if __name__ == "__main__":
    main(*sys.argv[1:])
