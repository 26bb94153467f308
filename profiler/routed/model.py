"""GGUF files whose routing is a function of the token, at any depth and in any weight type.

The embedding's first CODE elements hold the token's code. Every matrix that writes into the residual
stream has CODE rows of zeros, so the code reaches each router as it was, but for the norm's factor, which
all experts share; routers read nothing else. The rest of the network is as lively as in any generated model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.block_names import layer_of, stem_of
from profiler.routed.codes import CODE, STEP, Habits, UnfitRouting, codes, router
from profiler.routed.stream import FIRST_ID, word
from profiler.synth.build import SynthSpec, TensorPlan
from profiler.synth.bytes import BLOCKS, POOL_BYTES, Source, fitting_type, plain_bytes, size_bytes
from profiler.synth.synth import with_defaults
from profiler.synth.synth import write as write_synth
from profiler.synth.vocab import vocabulary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

ARCHITECTURES = ("gpt-oss", "llama", "qwen3moe", "qwen3next", "qwen35moe")  # tried with the engine
CLOSING = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp", "ssm_out")
ROUTER = "ffn_gate_inp.weight"
SILENT = ("ffn_gate_inp.bias", "exp_probs_b.bias")  # would change what the router says
KEY = "atsplan.routing"
ROOM = 1024  # bytes kept for the habits in the file, so that they can be replaced in place
USER_DEFINED = 4  # token type: matched as a whole wherever its text stands
BLOCK = BLOCKS["q8_0"]


def write(path: Path, spec: SynthSpec, habits: Habits) -> Path:
    """Write a model of these sizes that routes as told; returns the path to load.

    Raises UnfitRouting for an architecture that was not tried, or a size that has no room for the codes.
    """
    spec = complete(spec, habits)
    with _weights(habits, spec.n_layers + spec.n_nextn) as weights:
        return write_synth(path, spec, metadata=metadata(spec, habits), payload=weights.payload)


def complete(spec: SynthSpec, habits: Habits) -> SynthSpec:
    """The specification with the experts of the habits and a type that holds the codes exactly."""
    if spec.arch not in ARCHITECTURES:
        raise UnfitRouting(spec.arch, f"routed models are made of {', '.join(ARCHITECTURES)}")
    if spec.n_embd <= CODE or spec.n_embd % BLOCK.elements:
        raise UnfitRouting(f"n_embd {spec.n_embd}", f"a multiple of {BLOCK.elements} above {CODE} is needed")
    if spec.n_vocab < FIRST_ID + habits.n_codes:
        raise UnfitRouting(f"n_vocab {spec.n_vocab}", f"{FIRST_ID + habits.n_codes} tokens are needed")
    if spec.tied:
        raise UnfitRouting("a tied output", "the codes would be its logits")
    types = {**spec.types, "embedding": "q8_0"}
    chosen: dict[str, Any] = {
        "n_expert": habits.n_expert,
        "n_used": habits.n_used,
        "skew": 0.0,
        "coverage": 0.0,
    }
    return with_defaults(replace(spec, types=types, **chosen))


def metadata(spec: SynthSpec, habits: Habits) -> dict[str, Any]:
    """The habits, and a vocabulary in which tokens with codes can be written as text."""
    known = vocabulary(spec.n_vocab)
    end = FIRST_ID + habits.n_codes
    tokens, kinds = list(known["tokenizer.ggml.tokens"]), list(known["tokenizer.ggml.token_type"])
    tokens[FIRST_ID:end] = [word(one) for one in range(FIRST_ID, end)]
    kinds[FIRST_ID:end] = [USER_DEFINED] * habits.n_codes
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    return known | changed | {KEY: to_text(habits)}


def to_text(habits: Habits) -> str:
    """JSON, padded to ROOM bytes."""
    text = json.dumps(asdict(habits), separators=(",", ":"))
    if len(text) > ROOM:
        raise UnfitRouting("habits", f"longer than {ROOM} bytes as text")
    return text.ljust(ROOM)


def from_text(text: str) -> Habits:
    """Habits from their JSON."""
    data = json.loads(text)
    data["static"] = tuple((int(slots), float(share)) for slots, share in data["static"])
    return Habits(**data)


def habits_of(path: Path) -> Habits:
    """What a generated file says of itself. Raises UnfitRouting for any other file."""
    from gguf import GGUFReader

    field = GGUFReader(path).get_field(KEY)
    if field is None:
        raise UnfitRouting(str(path), f"no key {KEY}: the file was not made with told routing")
    return from_text(str(field.contents()))


def reroute(path: Path, habits: Habits) -> None:
    """Change how a generated file routes, in place: codes, routers and the habits, nothing else.

    Raises UnfitRouting unless the file's experts and vocabulary are enough.
    """
    from gguf import GGUFReader

    old = habits_of(path)
    if (old.n_expert, old.n_used, old.n_codes) != (habits.n_expert, habits.n_used, habits.n_codes):
        raise UnfitRouting(str(path), "other numbers of experts, or of codes, than the file has")
    reader = GGUFReader(path, "r+")
    field = reader.fields[KEY]
    field.parts[field.data[0]][:] = list(to_text(habits).encode())
    routers = [tensor for tensor in reader.tensors if tensor.name.endswith(ROUTER)]
    with _weights(habits, 1 + max(layer_of(tensor.name) for tensor in routers)) as weights:
        for tensor in reader.tensors:
            if tensor.name == "token_embd.weight":
                weights.stamp(tensor.data)
        for tensor in routers:
            tensor.data[:] = weights.router(tensor.name, tensor.data.shape[1])
    reader.data.flush()


@contextmanager
def _weights(habits: Habits, n_layers: int) -> Iterator[_Weights]:
    """What is written, while threads find the routers; those not needed are dropped."""
    table = codes(habits)
    with ThreadPoolExecutor() as pool:
        routers = [pool.submit(router, habits, table, layer) for layer in range(n_layers)]
        try:
            yield _Weights(habits, table, routers)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class _Weights:
    """Tensor data that differ from a plain generated model's."""

    def __init__(self, habits: Habits, table: Any, routers: Sequence[Future[Any]]) -> None:
        self.habits, self.codes = habits, table
        self._routers = routers
        self._rows: dict[tuple[str, float, int], Bytes] = {}

    def payload(
        self, source: Source, spec: SynthSpec, tensor: TensorPlan, plain: Iterator[Bytes]
    ) -> Iterator[Bytes]:
        """The bytes of a tensor; `plain` are those of a model that was not told how to route."""
        name = tensor.name
        kind = stem_of(name)
        if name == "token_embd.weight":
            row = size_bytes("q8_0", tensor.shape[:1])
            rows = next(plain).reshape(-1, row)
            self.stamp(rows)
            yield rows.reshape(-1)
        elif name.endswith(ROUTER):
            yield plain_bytes(self.router(name, tensor.shape[0]), "f32")
        elif name.endswith(SILENT):
            yield plain_bytes(_zeros(tensor.shape), "f32")
        elif kind in CLOSING and name.endswith(".bias"):
            values = _joined(plain).view("<f4").reshape(tensor.shape[::-1])
            values[..., :CODE] = 0
            yield values.reshape(-1).view("u1")
        elif kind in CLOSING and tensor.shape[1] == spec.n_embd:
            yield from self._closing(source, spec, tensor)
        else:
            yield from plain

    def stamp(self, rows: Bytes) -> None:
        """Write the codes into rows of q8_0 blocks, in place; row r has the code (r - FIRST_ID) mod n."""
        import numpy as np

        blocks = np.zeros((self.habits.n_codes, CODE // 32, BLOCK.size_bytes), np.uint8)
        blocks[:, :, :2] = np.asarray([STEP], np.float16).view(np.uint8)
        quants = np.round(self.codes / STEP).astype(np.int8).view(np.uint8)
        blocks[:, :, 2:] = quants.reshape(self.habits.n_codes, -1, 32)
        flat = blocks.reshape(self.habits.n_codes, -1)
        rows[:, : flat.shape[1]] = flat[(np.arange(len(rows)) - FIRST_ID) % self.habits.n_codes]

    def router(self, name: str, n_embd: int) -> Any:
        """A router's weights (n_expert, n_embd)."""
        weights = _zeros((n_embd, self.habits.n_expert))
        weights[:, :CODE] = self._routers[layer_of(name)].result()
        return weights

    def _closing(self, source: Source, spec: SynthSpec, tensor: TensorPlan) -> Iterator[Bytes]:
        """A matrix that writes nothing into the code: its first CODE rows are zeros, for every expert."""
        import numpy as np

        type_ = fitting_type(spec.types.get(tensor.role, spec.type), tensor.shape[0])
        row = size_bytes(type_, tensor.shape[:1])
        pool = self._pool(source, type_, tensor, row)
        count = tensor.shape[1] - CODE
        nothing = np.zeros(CODE * row, np.uint8)
        starts = source.generator(tensor.name).integers(0, len(pool) - count + 1, _depth(tensor))
        for start in starts.tolist():
            yield nothing
            yield pool[start : start + count].reshape(-1)

    def _pool(self, source: Source, type_: str, tensor: TensorPlan, row: int) -> Bytes:
        """Random rows that matrices of one shape share, each from its own start."""
        import numpy as np

        deviation = tensor.gain / tensor.shape[0] ** 0.5
        key = type_, deviation, tensor.shape[0]
        if key not in self._rows:
            n_rows = tensor.shape[1] + min(tensor.shape[1] * 8, POOL_BYTES // row)
            label = f"closing {type_} {tensor.shape[:2]} {deviation:.6e}"
            pieces = list(source.chunks(label, type_, (tensor.shape[0], n_rows), deviation))
            self._rows[key] = np.concatenate(pieces).reshape(n_rows, row)
        return self._rows[key]


def _depth(tensor: TensorPlan) -> int:
    return tensor.shape[2] if len(tensor.shape) > 2 else 1


def _joined(pieces: Iterator[Bytes]) -> Bytes:
    import numpy as np

    return np.concatenate(list(pieces))


def _zeros(shape: tuple[int, ...]) -> Any:
    import numpy as np

    return np.zeros(shape[::-1], np.float32)
