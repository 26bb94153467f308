"""Twin devices in the embedded engine: to llama.cpp a GPU each, with the CPU's arithmetic behind it.

They show what the engine does with several GPUs, with its MoE cache and with its pipeline on a machine
that has none: placement, bytes and splits are its own, times are not. Backend API version 3 (b11434 to
b11549 at least). As a program: reads a list of [path, spec, prompt] from stdin, answers with dry runs and,
for prompts that are not empty, logits and what the engine said of its MoE cache.
"""

from __future__ import annotations

import ctypes as c
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from planner.plan.load_spec import LoadSpec
from planner.routing.trace import Row
from runtime.load.dry_run import Breakdown, to_json

ROOT = Path(__file__).resolve().parent.parent
API = 3
MEMORY = 64 << 30  # of each device, as it says
_GPU = 1
_OFFLOADED = 32  # tokens from which such a device asks for host weights, as CUDA does
# struct ggml_backend_device: 15 functions, registry, context.
_NAME, _DESCRIPTION, _MEMORY, _TYPE, _PROPS, _INIT, _BUFT = range(7)
_SUPPORTS_OP, _SUPPORTS_BUFT, _OFFLOAD, _EVENT_NEW, _EVENT_FREE, _EVENT_WAIT = range(9, 15)
_REGISTRY, _DEVICE_WORDS = 15, 17
# struct ggml_backend_buffer_type: 8 functions, device, context.
_BUFT_NAME, _BUFT_IS_HOST, _BUFT_DEVICE, _BUFT_WORDS = 0, 7, 8, 10
# struct ggml_backend: guid, functions, device, context; those of events stand before the last function.
_BACKEND_NAME, _BACKEND_WORDS = 1, 20
_P = c.c_void_p


@dataclass
class Twins:
    """The devices made, and what must stay alive for them."""

    kept: list[Any] = field(default_factory=list)

    def function(self, result: Any, arguments: tuple[Any, ...], call: Callable[..., Any]) -> int:
        """The address of a Python function for C."""
        made = c.CFUNCTYPE(result, *arguments)(call)
        self.kept.append(made)
        return c.cast(made, _P).value or 0

    def words(self, count: int) -> Any:
        made = (c.c_uint64 * count)()
        self.kept.append(made)
        return made

    def text(self, text: str) -> int:
        made = c.create_string_buffer(text.encode())
        self.kept.append(made)
        return c.addressof(made)


def add(lib: Any, cpu: int, names: Iterable[str], twins: Twins) -> None:
    """Register a GPU of each name with the engine `lib`; `cpu` is its CPU device."""
    for name in names:
        address = _device(lib, cpu, name, twins)
        lib.ggml_backend_device_register.argtypes = [_P]
        lib.ggml_backend_device_register(address)


def _device(lib: Any, cpu: int, name: str, twins: Twins) -> int:
    base = (c.c_uint64 * _DEVICE_WORDS).from_address(cpu)
    device, buffer_type = twins.words(_DEVICE_WORDS), twins.words(_BUFT_WORDS)
    address, label = c.addressof(device), twins.text(name)
    assert c.c_int.from_address(base[_REGISTRY]).value == API, "another backend API"
    _buffer_type(lib, buffer_type, address, label, twins)
    device[:] = base[:]
    supports = c.CFUNCTYPE(c.c_bool, _P, _P)(base[_SUPPORTS_OP])
    device[_NAME] = device[_DESCRIPTION] = twins.function(_P, (_P,), lambda _: label)
    device[_MEMORY] = twins.function(None, (_P, _P, _P), _say_memory)
    device[_TYPE] = twins.function(c.c_int, (_P,), lambda _: _GPU)
    device[_PROPS] = twins.function(None, (_P, _P), lambda _, props: _properties(props, label))
    device[_INIT] = twins.function(_P, (_P, _P), lambda *_: _backend(base, cpu, address, label, twins))
    device[_BUFT] = twins.function(_P, (_P,), lambda _: c.addressof(buffer_type))
    device[_SUPPORTS_OP] = twins.function(c.c_bool, (_P, _P), lambda _, op: supports(cpu, op))
    device[_SUPPORTS_BUFT] = twins.function(
        c.c_bool, (_P, _P), lambda _, asked: asked == c.addressof(buffer_type)
    )
    device[_OFFLOAD] = twins.function(c.c_bool, (_P, _P), lambda _, op: _offloads(lib, op))
    device[_EVENT_NEW] = twins.function(_P, (_P,), lambda _: _event(address, twins))
    device[_EVENT_FREE] = device[_EVENT_WAIT] = twins.function(None, (_P, _P), lambda *_: None)
    return address


def _buffer_type(lib: Any, made: Any, device: int, label: int, twins: Twins) -> None:
    """The CPU's buffers under another name, which the CPU may not read."""
    made[:] = (c.c_uint64 * _BUFT_WORDS).from_address(lib.ggml_backend_cpu_buffer_type())[:]
    made[_BUFT_NAME] = twins.function(_P, (_P,), lambda _: label)
    made[_BUFT_IS_HOST] = twins.function(c.c_bool, (_P,), lambda _: False)
    made[_BUFT_DEVICE] = device


def _backend(base: Any, cpu: int, device: int, label: int, twins: Twins) -> int:
    """A stream of the device: the CPU's, with events that are over as soon as they are recorded."""
    made = int(c.CFUNCTYPE(_P, _P, _P)(base[_INIT])(cpu, None))
    words = (c.c_uint64 * _BACKEND_WORDS).from_address(made)
    at = list(words).index(cpu)
    words[at] = device
    words[at - 3] = words[at - 2] = twins.function(None, (_P, _P), lambda *_: None)
    words[_BACKEND_NAME] = twins.function(_P, (_P,), lambda _: label)
    return made


def _event(device: int, twins: Twins) -> int:
    made = twins.words(2)
    made[0] = device
    return c.addressof(made)


def _say_memory(_: int, free: int, total: int) -> None:
    c.c_size_t.from_address(free).value = c.c_size_t.from_address(total).value = MEMORY


def _properties(props: int, label: int) -> None:
    """ggml_backend_dev_props: name, description, memory, type, id, capabilities.

    These are async, host_buffer, buffer_from_host_ptr, events, mmap_support.
    """
    words = (c.c_uint64 * 4).from_address(props)
    words[:] = [label, label, MEMORY, MEMORY]
    c.c_int.from_address(props + 32).value = _GPU
    c.c_uint64.from_address(props + 40).value = 0
    (c.c_bool * 5).from_address(props + 48)[:] = [True, False, False, True, True]


def _offloads(lib: Any, op: int) -> bool:
    from runtime.engine.ggml import Tensor

    tensor = Tensor.from_address(op)
    lib.ggml_op_name.restype, lib.ggml_op_name.argtypes = c.c_char_p, [c.c_int]
    name = lib.ggml_op_name(tensor.op).decode()
    rows = {"GET_ROWS": 0, "MUL_MAT": tensor.ne[1], "MUL_MAT_ID": tensor.ne[2], "ROPE": tensor.ne[2]}
    return bool(rows.get(name, tensor.ne[1] * tensor.ne[2] * tensor.ne[3]) >= _OFFLOADED)


@dataclass(frozen=True, slots=True)
class Ask:
    """One dry load of a model and, with a prompt, a real one that decodes it and `more` tokens."""

    path: Path
    spec: LoadSpec
    prompt: tuple[int, ...] = ()
    more: tuple[int, ...] = ()  # decoded one by one


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine does with it; `problem` is its reason when it does nothing."""

    memory: Mapping[str, Breakdown]
    splits_prefill: int = 0
    splits_decode: int = 0
    strays: tuple[str, ...] = ()
    logits: tuple[float, ...] = ()
    said: tuple[str, ...] = ()  # of its MoE cache, when it is freed
    routed: tuple[Row, ...] = ()  # without a MoE cache: the router's choices, every pass a decode step
    problem: str = ""


def ask(questions: Iterable[Ask], n_devices: int = 1) -> list[Answer]:
    """Answers of the embedded engine with the devices TWIN0, TWIN1 …; the child's last words when it dies."""
    from engines import python  # not in the child, which needs no pytest

    request = [[str(q.path), to_json(q.spec), q.prompt, q.more] for q in questions]
    asked = python(__file__, n_devices, given=json.dumps(request))
    assert asked.returncode == 0, asked.stderr[-3000:]
    return [_read(answer) for answer in json.loads(asked.stdout)]


def _read(answer: dict[str, Any]) -> Answer:
    memory = {name: Breakdown(**sizes) for name, sizes in answer["memory"].items()}
    rest: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in answer.items()}
    rows = tuple((s, bool(d), step, layer, tuple(ids)) for s, d, step, layer, ids in answer.get("routed", ()))
    return Answer(**{**rest, "memory": memory, "routed": rows})


def _answer(engine: Any, path: Path, spec: LoadSpec, prompt: list[int], more: list[int]) -> dict[str, Any]:
    from planner.errors import AtsplanError
    from profiler.routing_trace import Watcher
    from runtime.engine.logs import Tail
    from runtime.load.dry_run import measure_here
    from runtime.session.session import Session

    said, logits, watcher = Tail(), [], Watcher(engine)
    try:
        found = measure_here(engine, path, spec, watch=True)
        if prompt:
            session = Session(engine, path, spec, on_node=None if spec.cache_bytes else watcher)
            with session:
                for tokens in (prompt, *([token] for token in more)):
                    logits += session.logits(tokens).ravel().tolist()
                with engine.log(said.add):
                    session.close()
    except AtsplanError as problem:
        return {"memory": {}, "problem": str(problem)}
    return {
        "memory": {name: asdict(sizes) for name, sizes in found.devices.items()},
        "splits_prefill": found.splits_prefill,
        "splits_decode": found.splits_decode,
        "strays": found.strays,
        "logits": logits,
        "routed": watcher.rows,
        "said": [line.strip() for line in said.lines if "moe_cache" in line],
    }


def _main(n_devices: int) -> None:
    from runtime.engine.libllama import Engine
    from runtime.load.dry_run import from_json

    engine, twins = Engine.find(None), Twins()
    cpu = engine.ggml.devices()[0].handle
    add(engine.lib, cpu, [f"TWIN{n}" for n in range(n_devices)], twins)
    request = json.load(sys.stdin)
    json.dump([_answer(engine, Path(p), from_json(s), a, b) for p, s, a, b in request], sys.stdout)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
