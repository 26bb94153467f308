"""A context whose decoding is timed: tokens in, nanoseconds out; logits for the last token alone."""

from __future__ import annotations

import ctypes as c
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.errors import EngineProblem
from runtime.engine.ggml import Handle
from runtime.engine.libllama import Batch, Engine


@dataclass(slots=True)
class TimedContext:
    """A loaded model under measurement."""

    engine: Engine
    context: Handle
    n_vocab: int

    def clear(self) -> None:
        """Empty the KV cache."""
        lib = self.engine.lib
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)

    def decode(self, tokens: Any, position: int) -> int:
        """Evaluate tokens (32-bit, an array) from a position on; nanoseconds. Raises EngineProblem."""
        n = len(tokens)
        wanted = np.zeros(n, np.int8)
        wanted[-1] = 1
        positions = np.arange(position, position + n, dtype=np.int32)
        return self.decode_rows(tokens, positions, np.zeros(n, np.int32), wanted)

    def decode_rows(self, tokens: Any, positions: Any, sequences: Any, wanted: Any) -> int:
        """Evaluate tokens of several sequences; nanoseconds. Raises EngineProblem.

        All arrays of 32 bits but `wanted` (8), which asks for logits.
        """
        n = len(tokens)
        counts = np.ones(n, np.int32)
        each = (c.c_void_p * n)(*range(sequences.ctypes.data, sequences.ctypes.data + 4 * n, 4))
        arrays = (positions.ctypes.data, counts.ctypes.data, c.addressof(each), wanted.ctypes.data)
        batch = Batch(n, tokens.ctypes.data, None, *arrays)
        start = time.perf_counter_ns()
        status = self.engine.lib.llama_decode(self.context, batch)
        self.engine.lib.llama_synchronize(self.context)
        if status:
            raise EngineProblem(self.engine.label, f"llama_decode returned {status}")
        return time.perf_counter_ns() - start
