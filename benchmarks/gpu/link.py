"""A busy link: copies from pinned host memory to a GPU until ended, as another program would cause.

    python -m benchmarks.gpu.link ENGINE [DEVICE]

Prints what it copies, in GB/s, once a second. The nearest thing to a slower bus where the card's own
settings must stay as they are: what runs beside it gets the rest of the bandwidth.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from runtime.child.environment import environment, python
from runtime.engine.libllama import Engine

PIECE_BYTES = 256 * 2**20


def copy_for_ever(engine_path: str, device: str) -> None:
    """Copy one piece after another."""
    ggml = Engine.find(engine_path).ggml
    lib, handle = ggml.lib, ggml.device(device).handle
    pinned = lib.ggml_backend_dev_host_buffer_type(handle)
    with ExitStack() as stack:
        ends = []
        for buft in (pinned, lib.ggml_backend_dev_buffer_type(handle)):
            context = stack.enter_context(ggml.context(2))
            ends.append(ggml.new_tensor(context, "f32", (PIECE_BYTES // 4,)))
            stack.callback(
                lib.ggml_backend_buffer_free, lib.ggml_backend_alloc_ctx_tensors_from_buft(context, buft)
            )
        while True:
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < 1:
                lib.ggml_backend_tensor_copy(*ends)
                count += 1
            rate = count * PIECE_BYTES / (time.perf_counter() - start) / 1e9
            print(f"{rate:.1f} GB/s", flush=True)


@contextmanager
def busy(engine_path: str, device: str) -> Iterator[None]:
    """Copies in a child process inside the block."""
    command = python("-m", "benchmarks.gpu.link", engine_path, device)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield
        finally:
            child.terminate()
            rates = child.stdout.read().split("\n")
            print(f"beside it the link carried {', '.join(rates[:3])} … of other copies", file=sys.stderr)


if __name__ == "__main__":
    copy_for_ever(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "CUDA0")
