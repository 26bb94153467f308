"""Exact bytes per device without loading weights: a `no_alloc` load by the engine, in a child process."""

from __future__ import annotations

import ctypes as c
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.constants import CPU
from planner.errors import EngineProblem
from planner.plan.adaptation import Adaptation, Policy
from planner.plan.load_spec import LoadSpec
from planner.site import Site
from planner.workload import Workload
from runtime.child.ask import ask
from runtime.child.serve import serve
from runtime.engine.ggml import Handle
from runtime.engine.libllama import Engine
from runtime.engine.locate import Place
from runtime.engine.logs import CONTINUED, DEBUG, Tail
from runtime.engine.rpc import connect
from runtime.engine.scheduler_log import Listener, describe
from runtime.load import load_params

_SCHED_DEBUG = "GGML_SCHED_DEBUG"  # read by the engine when a context is made
_BREAKDOWN = "_Z26llama_get_memory_breakdownPK13llama_context"


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Bytes of one device: weights; KV cache, recurrent state, output and MoE cache; compute buffers."""

    model: int
    context: int
    compute: int

    @property
    def total(self) -> int:
        return self.model + self.context + self.compute

    def __add__(self, other: Breakdown) -> Breakdown:
        return Breakdown(self.model + other.model, self.context + other.context, self.compute + other.compute)


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a load would take, and the graph it would build."""

    devices: Mapping[str, Breakdown]  # host memory of whatever kind counts as CPU
    buffers: Mapping[str, Breakdown]  # the same by buffer type: CPU, CPU_REPACK, CUDA_Host, CUDA0 …
    nodes: int  # of the decode graph
    splits_prefill: int
    splits_decode: int
    notes: tuple[str, ...]  # what the engine disabled or refused to honour
    strays: tuple[str, ...] = ()  # work at decode that would run away from its data; only when asked for


def memory(engine: Engine | Place, model_path: Path, spec: LoadSpec) -> Mapping[str, Breakdown]:
    """Bytes per device that loading `model_path` by `spec` takes, exactly as the engine counts them.

    Runs in a child process; an abort of the engine becomes EngineProblem with its last message.
    """
    return measure(engine, model_path, spec).devices


def measure(engine: Engine | Place, model_path: Path, spec: LoadSpec, watch: bool = False) -> DryRun:
    """Memory and graph of a load; `watch` fills in `strays`. See `memory`."""
    request = {
        "engine": str(engine.path),
        "llama_h": str(engine.llama_h) if engine.llama_h else None,
        "model": str(Path(model_path).resolve()),
        "spec": to_json(spec),
        "watch": watch,
    }
    answer = ask("runtime.load.dry_run", request, engine.label)
    return DryRun(
        devices={name: Breakdown(**sizes) for name, sizes in answer["devices"].items()},
        buffers={name: Breakdown(**sizes) for name, sizes in answer["buffers"].items()},
        nodes=answer["nodes"],
        splits_prefill=answer["splits_prefill"],
        splits_decode=answer["splits_decode"],
        notes=tuple(answer["notes"]),
        strays=tuple(answer["strays"]),
    )


def measure_here(
    engine: Engine, model_path: Path, spec: LoadSpec, watch: bool = False, shared: Collection[int] = ()
) -> DryRun:
    """The same in this process, which an abort of the engine ends: for children.

    `watch` also asks the scheduler where every node of the decode graph would run; the KV caches of
    `shared` layers are read by other layers, wherever these are.
    """
    load_params.check(engine, spec)
    said, graphs, kept = Tail(4000), Listener(), load_params.Kept()
    with ExitStack() as stack:
        stack.callback(kept.objects.clear)
        params = load_params.model_params(engine, spec, kept, no_alloc=True)
        model = stack.enter_context(load_params.model(engine, model_path, params))
        with _scheduler_log(watch), engine.log(_both(said, graphs)):
            context = engine.lib.llama_init_from_model(model, load_params.context_params(engine, spec, kept))
        if not context:
            raise EngineProblem(engine.label, said.cause() or "could not create a context")
        stack.callback(engine.lib.llama_free, context)
        buffers = breakdown(engine, context)
        devices = _less_stripes(by_device(engine, buffers), model_path, spec)
    nodes, (prefill, decode) = _graph(list(said.lines))
    strays = describe(graphs.decode().strays, shared)
    return DryRun(devices, buffers, nodes, prefill, decode, tuple(_notes(list(said.lines))), strays)


@contextmanager
def _scheduler_log(watch: bool) -> Iterator[None]:
    """Have contexts made inside the block print their graphs."""
    if not watch:
        yield
        return
    os.environ[_SCHED_DEBUG] = "2"
    try:
        yield
    finally:
        del os.environ[_SCHED_DEBUG]


def _both(said: Tail, graphs: Listener) -> Callable[[int, str], None]:
    # The scheduler prints each graph in thousands of debug lines: these must not push out the others.
    def receive(level: int, text: str) -> None:
        graphs.add(level, text)
        if level not in (DEBUG, CONTINUED):
            said.add(level, text)

    return receive


def _less_stripes(devices: dict[str, Breakdown], model_path: Path, spec: LoadSpec) -> dict[str, Breakdown]:
    """Here a striped tensor counts whole on its device; its cold part will lie in host memory."""
    if not any(Site.of_buffer(buffer).divided for _, buffer in spec.overrides):
        return devices
    from planner.model.gguf.reader import read_model
    from runtime.stripes.widths import host_bytes, slot_bytes

    found = dict(devices)
    inventory = read_model(model_path).inventory
    moves = [(device, -size, size) for device, size in host_bytes(inventory, spec).items()]
    moves += [(d, slots - whole, whole) for d, (slots, whole) in slot_bytes(inventory, spec).items()]
    for device, here, host in moves:
        for name, moved in ((device, here), (CPU, host)):
            found[name] = found.get(name, Breakdown(0, 0, 0)) + Breakdown(moved, 0, 0)
    return found


def to_json(spec: LoadSpec) -> dict[str, Any]:
    """A spec as plain data."""
    plain = {name: getattr(spec, name) for name in LoadSpec.__dataclass_fields__ if name != "workload"}
    return {**plain, "workload": spec.workload.model_dump(), "adaptation": asdict(spec.adaptation)}


def from_json(data: Mapping[str, Any]) -> LoadSpec:
    """A spec from the plain data that `to_json` made."""
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    for pairs in ("overrides", "mapped", "guests"):
        plain[pairs] = tuple((first, second) for first, second in data[pairs])
    plain["residents"] = tuple((a, n, tuple(ids)) for a, n, ids in data["residents"])
    plain["workload"] = Workload(**data["workload"])
    told = data["adaptation"]
    plain["adaptation"] = Adaptation(**{**told, "policy": Policy(told["policy"])})
    return LoadSpec(**plain)


def supported(engine: Engine) -> bool:
    """Whether the build tells its memory exactly."""
    return engine.has(_BREAKDOWN)


def breakdown(engine: Engine, context: Handle) -> dict[str, Breakdown]:
    """Bytes of a live context by buffer type name."""
    if not supported(engine):
        raise EngineProblem(engine.label, "this build does not report memory (llama_get_memory_breakdown)")
    # A std::map by value comes back through a hidden pointer; libstdc++ and libc++ differ in its nodes.
    room = (c.c_uint64 * 6)()
    getattr(engine.lib, _BREAKDOWN)(c.cast(room, c.c_void_p), context)
    found: dict[str, Breakdown] = {}
    for buffer, *sizes in _nodes(room[2]):
        name = engine.ggml.buft_name(buffer)
        found[name] = found.get(name, Breakdown(0, 0, 0)) + Breakdown(*sizes)
    return dict(sorted(found.items()))


def by_device(engine: Engine, buffers: Mapping[str, Breakdown]) -> dict[str, Breakdown]:
    """Buffer types summed up per device; host buffers of any device count as CPU."""
    home = _homes(engine)
    found: dict[str, Breakdown] = {}
    for name, sizes in buffers.items():
        found[home(name)] = found.get(home(name), Breakdown(0, 0, 0)) + sizes
    return found


def sizes_by_device(engine: Engine, buffers: Mapping[str, int]) -> dict[str, int]:
    """The same for plain sizes."""
    home = _homes(engine)
    found: dict[str, int] = {}
    for name, size in buffers.items():
        found[home(name)] = found.get(home(name), 0) + size
    return found


def _homes(engine: Engine) -> Callable[[str], str]:
    """The device of a buffer type by its name."""
    types = engine.ggml.all_buffer_types()

    def home(name: str) -> str:
        handle = types.get(name)
        if handle is None or engine.lib.ggml_backend_buft_is_host(handle):
            return CPU
        return engine.ggml.buft_device(handle)

    return home


def _nodes(node: int) -> Iterator[tuple[int, int, int, int]]:
    """Key and three sizes of every node of a red-black tree: colour, parent, left, right, then the value."""
    if not node:
        return
    words = (c.c_uint64 * 8).from_address(node)
    yield from _nodes(words[2])
    yield words[4], words[5], words[6], words[7]
    yield from _nodes(words[3])


def _measure_request(request: Mapping[str, Any]) -> dict[str, Any]:
    engine = Engine.find(request["engine"], Path(request["llama_h"]) if request["llama_h"] else None)
    spec, renamed = connect(engine, from_json(request["spec"]))
    answer = asdict(measure_here(engine, Path(request["model"]), spec, request["watch"]))
    planned = {here: name for name, here in renamed.items()}
    answer["devices"] = {planned.get(name, name): sizes for name, sizes in answer["devices"].items()}
    return answer


_SPLITS = re.compile(
    r"graph(?: \(pp.*?\))?: nodes\s*=\s*(\d+)(?: / (\d+))?.*?splits\s*=\s*(\d+)(?: / (\d+))?"
)
_SPLITS_OLD = re.compile(r"graph (nodes|splits)\s*=\s*(\d+)(?: \(with bs=\d+\), (\d+) \(with bs=1\))?")
_DISABLED = re.compile(
    r"(?:set to disabled|not supported|fused \S+.*disabled|no layer has all of its experts.*)"
)


def _graph(lines: list[str]) -> tuple[int, tuple[int, int]]:
    """Nodes of the decode graph, splits of the prefill and the decode graph; zeros when not said."""
    nodes, splits = 0, (0, 0)
    for line in lines:
        if found := _SPLITS.search(line):
            nodes = int(found[2] or found[1])
            splits = int(found[3]), int(found[4] or found[3])
        elif old := _SPLITS_OLD.search(line):
            last = int(old[3] or old[2])
            nodes, splits = (last, splits) if old[1] == "nodes" else (nodes, (int(old[2]), last))
    return nodes, splits


def _notes(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines if _DISABLED.search(line)]


if __name__ == "__main__":
    serve(_measure_request)
