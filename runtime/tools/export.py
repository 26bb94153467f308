"""A plan in the words of other tools: command lines, presets, environment, Python, compose files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from planner.plan.plan import Plan
from runtime.engine.ggml import TYPE_NUMBERS
from runtime.tools import llama_bench
from runtime.tools.options import ENVIRONMENT, Stock, options

_PROMPT_CACHE_MIB = 8192  # what llama-server takes for past prompts unless told
_HOST_SLACK_MIB = 1024  # of host memory, for all else
_SECTION = str.maketrans("[]:", "()-")
Writer = Callable[[Plan, Stock, str], str]


def export(plan: Plan, placed: Stock, model: str, form: str) -> str:
    """The text of one format; KeyError for a format that is not in FORMATS."""
    return FORMATS[form](plan, placed, model)


def arguments(placed: Stock, model: str) -> list[str]:
    """The options as an argument list."""
    return [part for option, value in options(placed, model) for part in (option, value) if part]


def _server(plan: Plan, placed: Stock, model: str) -> str:
    words = ["llama-server", *arguments(placed, model), *prompt_cache(plan)]
    return _comment(plan, placed, "#") + shlex.join(words) + "\n"


def prompt_cache(plan: Plan) -> list[str]:
    """A limit for what the server keeps of past prompts in host memory, where its own would not fit."""
    host = next((use for use in plan.devices if use.kind == "cpu"), None)
    left = (host.budget_bytes - host.used_bytes) // 2**20 - _HOST_SLACK_MIB if host else _PROMPT_CACHE_MIB
    return ["--cache-ram", str(max(left, 0))] if left < _PROMPT_CACHE_MIB else []


def _cli(plan: Plan, placed: Stock, model: str) -> str:
    return _comment(plan, placed, "#") + shlex.join(["llama-cli", *arguments(placed, model)]) + "\n"


def _bench(plan: Plan, placed: Stock, model: str) -> str:
    """llama-bench measures its own contexts: the plan's workload gives prompt, answer and depth."""
    work = plan.workload
    words = llama_bench.words(placed, model, work.prompt, work.gen, work.depth)
    told = replace(placed, notes=(*placed.notes, *llama_bench.lacks(placed)))
    return _comment(plan, told, "#") + shlex.join(["llama-bench", *words]) + "\n"


def _preset(plan: Plan, placed: Stock, model: str) -> str:
    # The section's name is the model's; a colon would begin a tag, a bracket end the name.
    lines = [f"[{plan.model.name.translate(_SECTION)}]"]
    for option, value in options(placed, model):
        key = option.removeprefix("--")
        lines.append(f"{key} = {value or 'true'}")
    return _comment(plan, placed, ";") + "\n".join(lines) + "\n"


def _env(plan: Plan, placed: Stock, model: str) -> str:
    lines = ["# as `docker run --env-file` reads it: no quotes, nothing escaped"]
    lines += [f"{name}={value}" for name, value in _environment(placed, model).items()]
    lacks = [part for pair in options(placed, model) if pair[0] not in ENVIRONMENT for part in pair if part]
    if lacks:
        lines.append(f"# no variable says this, add the options: {shlex.join(lacks)}")
    return _comment(plan, placed, "#") + "\n".join(lines) + "\n"


def _environment(placed: Stock, model: str) -> dict[str, str]:
    """The variables that stand for options; --no-op-offload has none."""
    return {ENVIRONMENT[o]: _env_value(o, v) for o, v in options(placed, model) if o in ENVIRONMENT}


def _json(plan: Plan, placed: Stock, model: str) -> str:
    data = {
        "model": plan.model.name,
        "table_digest": plan.model.table_digest,
        "exact": placed.exact,
        "notes": placed.notes,
        "arguments": arguments(placed, model),
        "environment": _environment(placed, model),
        "predicted_tpot_ns": plan.predicted.tpot_ns,
    }
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _compose(plan: Plan, placed: Stock, model: str) -> str:
    folders = _folders(model, placed.mmproj, placed.draft)
    there = replace(placed, mmproj=_inside(placed.mmproj, folders), draft=_inside(placed.draft, folders))
    told = [*arguments(there, _inside(model, folders)), *prompt_cache(plan)]
    command = json.dumps([*told, "--host", "0.0.0.0", "--port", "8080"])
    lines = [
        "services:",
        "  llama:",
        "    # An image with llama-server as its entry point, built for the devices of the plan.",
        "    image: ${LLAMA_SERVER_IMAGE:?set it to a llama.cpp server image}",
        f"    command: {_dollars(command)}",
        "    ports: ['8080:8080']",
        "    volumes:",
        *(f"      - {json.dumps(f'{_dollars(at)}:{inside}:ro')}" for at, inside in folders.items()),
    ]
    if any(device.startswith("CUDA") for device in placed.devices):
        lines += [
            "    deploy:",
            "      resources:",
            "        reservations:",
            "          devices: [{driver: nvidia, count: all, capabilities: [gpu]}]",
        ]
    return _comment(plan, placed, "#") + "\n".join(lines) + "\n"


_PYTHON = '''"""{title}"""

import ctypes

import llama_cpp

MODEL = {model!r}
DEVICES = {devices!r}  # names as ggml prints them; empty: CPU only
OVERRIDES = {overrides!r}  # first match wins


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
        title=f"{plan.model.name}, placed by atsplan; for llama-cpp-python.",
        model=model,
        devices=list(placed.devices),
        overrides=[list(each) for each in spec.overrides],
        arguments="\n".join(f"    {k}={v!r}," for k, v in values.items() if v is not None),
    )
    return _comment(plan, replace(placed, notes=(*placed.notes, *_not_in_python(placed))), "#") + text


def _not_in_python(placed: Stock) -> list[str]:
    """What llama-cpp-python's Llama() has no option for."""
    spec, work = placed.spec, placed.spec.workload
    lacks = {
        "a vision projector (--mmproj)": bool(placed.mmproj),
        "a draft model": bool(placed.draft),
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
    "docker-compose": _compose,
}


def _comment(plan: Plan, placed: Stock, mark: str) -> str:
    lines: Sequence[str] = [f"{plan.model.name}: {plan.command}", *placed.notes]
    return "".join(f"{mark} {line}\n" for text in lines for line in text.splitlines())


def _env_value(option: str, value: str) -> str:
    return value or ("1" if option.startswith("--no-") else "true")


def _folders(*paths: str) -> dict[str, str]:
    """Folder of each file to the one it is mounted as in the container: /models, /models2 …"""
    found = dict.fromkeys(_folder(path) for path in paths if path)
    return {folder: f"/models{number if number > 1 else ''}" for number, folder in enumerate(found, 1)}


def _folder(path: str) -> str:
    return path.rpartition("/")[0] or "."


def _inside(path: str, folders: Mapping[str, str]) -> str:
    """Where a file lies in the container."""
    return f"{folders[_folder(path)]}/{path.rpartition('/')[2]}" if path else ""


def _dollars(text: str) -> str:
    return text.replace("$", "$$")  # compose reads $name as a variable
