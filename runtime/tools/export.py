"""A plan in the words of other tools: command lines, presets, environment, Python, compose files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from planner import quoting
from planner.constants import MIB
from planner.errors import InputError
from planner.machine.engine_builds import span
from planner.memory.server_memory import MOST_CHECKPOINTS, MOST_PROMPTS_BYTES, kept
from planner.plan.plan import Plan
from runtime.engine.ggml import TYPE_NUMBERS
from runtime.tools import llama_bench
from runtime.tools.llama_server import LOOPBACK, is_loopback
from runtime.tools.options import ENVIRONMENT, LOAD_MODE, Stock, options

_PORT = "8080"
COMPOSE = "docker-compose"
Writer = Callable[[Plan, Stock, str], str]


@dataclass(eq=False)
class NotHeld(InputError):
    """A path, device or pattern that an export format has no spelling for."""

    form: str
    why: str

    def message(self) -> str:
        return f"export as {self.form}: {self.why}: rename the file, or choose another --format"


@dataclass(frozen=True, slots=True)
class Published:
    """Who may reach a server in a container."""

    host: str = LOOPBACK  # address of the machine that its port is published on
    keyless: bool = False  # also where other machines reach it


def export(plan: Plan, placed: Stock, model: str, form: str, published: Published | None = None) -> str:
    """The text of one format; KeyError for a format that is not in FORMATS.

    `published` is for docker-compose. Raises NotHeld for a value that the format cannot say: never another
    one in its place.
    """
    try:
        if published is not None and form == COMPOSE:
            return _compose(plan, placed, model, published)
        return FORMATS[form](plan, placed, model)
    except quoting.Unquotable as problem:
        raise NotHeld(form, str(problem)) from None


def arguments(placed: Stock, model: str) -> list[str]:
    """The options as an argument list; quoting.Unquotable for what no argument can be."""
    return [quoting.argument(part) for pair in options(placed, model) for part in pair if part]


def _server(plan: Plan, placed: Stock, model: str) -> str:
    words = ["llama-server", *arguments(placed, model), *host_limits(plan, placed)]
    return _comment(plan, placed, "#") + quoting.shell(words) + "\n"


def host_limits(plan: Plan, placed: Stock) -> list[str]:
    """Limits for what the server keeps in host memory, where its own would not fit: checkpoints of each slot,
    half of what is left at most, and past prompts.
    """
    host = next((use for use in plan.devices if use.kind == "cpu"), None)
    if host is None:
        return []
    there = kept(host.budget_bytes - host.used_bytes, placed.checkpoint_bytes, plan.workload.n_seq)
    few, small = there.checkpoints < MOST_CHECKPOINTS, there.prompts_bytes < MOST_PROMPTS_BYTES
    words = ["--ctx-checkpoints", str(there.checkpoints)] if few else []
    return [*words, *(["--cache-ram", str(there.prompts_bytes // MIB)] if small else [])]


def _cli(plan: Plan, placed: Stock, model: str) -> str:
    return _comment(plan, placed, "#") + quoting.shell(["llama-cli", *arguments(placed, model)]) + "\n"


def _bench(plan: Plan, placed: Stock, model: str) -> str:
    """llama-bench measures its own contexts: the plan's workload gives prompt, answer and depth."""
    work = plan.workload
    words = llama_bench.words(placed, model, work.prompt, work.gen, work.depth)
    told = replace(placed, notes=(*placed.notes, *llama_bench.lacks(placed)))
    return _comment(plan, told, "#") + quoting.shell(["llama-bench", *words]) + "\n"


def _preset(plan: Plan, placed: Stock, model: str) -> str:
    lines = [f"[{quoting.ini_section(plan.model.name)}]"]
    for option, value in options(placed, model):
        key = option.removeprefix("--")
        lines.append(f"{key} = {quoting.ini_value(value or 'true')}")
    return _comment(plan, placed, ";") + "\n".join(lines) + "\n"


def _env(plan: Plan, placed: Stock, model: str) -> str:
    lines = ["# as `docker run --env-file` reads it: no quotes, nothing escaped"]
    lines += [f"{name}={quoting.env_value(value)}" for name, value in _environment(placed, model).items()]
    lacks = [part for pair in options(placed, model) if pair[0] not in ENVIRONMENT for part in pair if part]
    more = f"no variable says this, add the options: {quoting.shell(lacks)}"
    added = quoting.comment("#", more) if lacks else ""
    return _comment(plan, placed, "#") + "\n".join(lines) + "\n" + added


def _environment(placed: Stock, model: str) -> dict[str, str]:
    """The variables that stand for options; --no-op-offload has none."""
    return {ENVIRONMENT[o]: _env_value(o, v) for o, v in options(placed, model) if o in ENVIRONMENT}


def _json(plan: Plan, placed: Stock, model: str) -> str:
    data = {
        "model": plan.model.name,
        "table_digest": plan.model.table_digest,
        "exact": placed.exact,
        "engines": plan.engines.model_dump() if plan.engines else None,
        "notes": placed.notes,
        "arguments": arguments(placed, model),
        "environment": _environment(placed, model),
        "predicted_tpot_ns": plan.predicted.tpot_ns,
        "predicted_prefill_ns": plan.predicted.prefill_ns,
    }
    return quoting.json_text(data) + "\n"


def _compose(plan: Plan, placed: Stock, model: str, published: Published = Published()) -> str:
    folders = _folders(model, placed.mmproj, placed.draft)
    there = replace(placed, mmproj=_inside(placed.mmproj, folders), draft=_inside(placed.draft, folders))
    told = [*arguments(there, _inside(model, folders)), *host_limits(plan, placed)]
    # Within the container every address; what is published is decided below.
    command = ", ".join(map(quoting.compose, [*told, "--host", "0.0.0.0", "--port", _PORT]))
    lines = [
        "services:",
        "  llama:",
        "    # An image with llama-server as its entry point, built for the devices of the plan.",
        "    image: ${LLAMA_SERVER_IMAGE:?set it to a llama.cpp server image}",
        f"    command: [{command}]",
        *_ports(published),
        "    volumes:",
        *(line for at, inside in folders.items() for line in _mounted(at, inside)),
    ]
    if any(device.startswith("CUDA") for device in placed.devices):
        lines += [
            "    deploy:",
            "      resources:",
            "        reservations:",
            "          devices: [{driver: nvidia, count: all, capabilities: [gpu]}]",
        ]
    return _comment(plan, placed, "#") + "\n".join(lines) + "\n"


def _swap(plan: Plan, placed: Stock, model: str) -> str:
    """An entry of llama-swap's configuration, which starts the server when its model is asked for."""
    words = ["llama-server", *arguments(placed, model), *host_limits(plan, placed)]
    command = quoting.swap_command([*words, "--host", LOOPBACK, "--port"])
    name = quoting.yaml(quoting.short(plan.model.name))
    lines = ["models:", f"  {name}:", f"    cmd: {quoting.yaml(command + ' ${PORT}')}"]
    return _comment(plan, placed, "#") + "\n".join(lines) + "\n"


def _ports(published: Published) -> list[str]:
    """The port on one address of the machine; beyond the machine itself a key is needed, unless waived."""
    host = published.host
    address = f"[{host}]" if ":" in host else host
    lines = [f"    ports: [{quoting.compose(f'{address}:{_PORT}:{_PORT}')}]"]
    if is_loopback(host):
        return ["    # Of this machine only: --publish tells other addresses.", *lines]
    if published.keyless:
        return ["    # Open to everyone who reaches this address, without a key.", *lines]
    asked = "${LLAMA_API_KEY:?set it: the server can be reached from other machines}"
    return [*lines, "    environment:", f"      LLAMA_API_KEY: {quoting.yaml(asked)}"]


def _mounted(folder: str, inside: str) -> list[str]:
    # The long form: in the short one a colon in a path ends it, and a bare name is no path.
    return [
        "      - type: bind",
        f"        source: {quoting.compose(folder)}",
        f"        target: {inside}",
        "        read_only: true",
    ]


# The first line keeps a comment below it from choosing another encoding (PEP 263).
_PYTHON_HEAD = "# coding: utf-8\n"
_PYTHON = '''"""A model as atsplan has placed it, for llama-cpp-python."""

import ctypes

import llama_cpp

MODEL = {model}
DEVICES = {devices}  # names as ggml prints them; empty: CPU only
OVERRIDES = {overrides}  # first match wins


class Override(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def ggml(name, result, *arguments):
    """A function of libggml, reached through the loaded libllama."""
    function = getattr(llama_cpp.llama_cpp._lib, name)
    function.restype, function.argtypes = result, arguments
    return function


by_name = ggml("ggml_backend_dev_by_name", ctypes.c_void_p, ctypes.c_char_p)
buffer_of = ggml("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
devices = (ctypes.c_void_p * (len(DEVICES) + 1))(*[by_name(d.encode()) for d in DEVICES], None)
overrides = (Override * (len(OVERRIDES) + 1))()
for entry, (pattern, device) in zip(overrides, OVERRIDES):
    entry.pattern, entry.buft = pattern.encode(), buffer_of(by_name(device.encode()))

# Llama() has no option for devices and overrides, but keeps what the default parameters hold.
defaults = llama_cpp.llama_model_default_params


def planned_params():
    params = defaults()
    params.devices = ctypes.addressof(devices)
    params.tensor_buft_overrides = ctypes.addressof(overrides)
    return params


llama_cpp.llama_cpp.llama_model_default_params = llama_cpp.llama_model_default_params = planned_params
llm = llama_cpp.Llama(
    model_path=MODEL,
{arguments}
)
'''


def _python(plan: Plan, placed: Stock, model: str) -> str:
    spec, work = placed.spec, placed.spec.workload
    if work.forks:
        raise NotHeld("llama-cpp-python", f"knows no KV cache of type {', '.join(work.forks)}")
    values: dict[str, object] = {
        "n_gpu_layers": spec.n_gpu_layers,
        "tensor_split": list(spec.tensor_split) if len(spec.devices) > 1 else None,
        "use_mmap": spec.use_mmap,
        "n_ctx": work.n_ctx,
        "n_batch": work.n_batch,
        "n_ubatch": work.n_ubatch,
        "n_threads": spec.threads or None,
        "flash_attn": work.flash_attn,
        "swa_full": spec.swa_full,
        "op_offload": None if spec.op_offload else False,
        "type_k": TYPE_NUMBERS[work.type_k],
        "type_v": TYPE_NUMBERS[work.type_v],
    }
    text = _PYTHON.format(
        model=quoting.python(quoting.argument(model)),
        devices=quoting.python([quoting.argument(device) for device in placed.devices]),
        overrides=quoting.python([list(map(quoting.argument, each)) for each in spec.overrides]),
        arguments="\n".join(f"    {k}={quoting.python(v)}," for k, v in values.items() if v is not None),
    )
    told = replace(placed, notes=(*placed.notes, *_not_in_python(placed)))
    return _PYTHON_HEAD + _comment(plan, replace(told, least=1), "#") + text  # it spells no options


def _not_in_python(placed: Stock) -> list[str]:
    """What llama-cpp-python's Llama() has no option for."""
    spec, work = placed.spec, placed.spec.workload
    lacks = {
        "a vision projector (--mmproj)": bool(placed.mmproj),
        "a draft model": bool(placed.draft),
        "drafts of n-grams": placed.ngrams,
        "the NextN/MTP block": work.mtp,
        f"{work.n_seq} sequences at once": work.n_seq > 1,
        f"remote devices ({', '.join(placed.rpc)})": bool(placed.rpc),
        f"a MoE cache ({spec.cache_bytes // 2**20} MiB)": spec.cache_bytes > 0,
        "plain CPU buffers (no repacking)": not spec.use_extra_bufts,
    }
    return [f"llama-cpp-python cannot be told: {what}" for what, asked in lacks.items() if asked]


FORMATS: Mapping[str, Writer] = {
    "llama-server": _server,
    "llama-cli": _cli,
    "llama-bench": _bench,
    "preset": _preset,
    "env": _env,
    "json": _json,
    "llama-cpp-python": _python,
    COMPOSE: _compose,
    "llama-swap": _swap,
}


def _comment(plan: Plan, placed: Stock, mark: str) -> str:
    name = quoting.short(plan.model.name)
    told = (f"{name}: {plan.command}", *builds(plan, placed), *placed.notes)
    return "".join(quoting.comment(mark, text) for text in told)


def builds(plan: Plan, placed: Stock) -> list[str]:
    """The builds of llama.cpp that can load the plan, as far as any cannot; else those of its options."""
    if plan.engines is None or not (plan.engines.least or plan.engines.most):
        return [] if placed.least else [f"its options are those of llama.cpp {span(LOAD_MODE, 0)}"]
    return [f"for llama.cpp {span(plan.engines.least, plan.engines.most)}"]


def _env_value(option: str, value: str) -> str:
    return value or ("1" if option.startswith("--no-") else "true")


def _folders(*paths: str) -> dict[str, str]:
    """Folder of each file to the one it is mounted as in the container: /models, /models2 …"""
    found = dict.fromkeys(_folder(path) for path in paths if path)
    return {folder: f"/models{number if number > 1 else ''}" for number, folder in enumerate(found, 1)}


def _folder(path: str) -> str:
    folder, slash, _ = path.rpartition("/")
    return folder or slash or "."


def _inside(path: str, folders: Mapping[str, str]) -> str:
    """Where a file lies in the container."""
    return f"{folders[_folder(path)]}/{path.rpartition('/')[2]}" if path else ""
