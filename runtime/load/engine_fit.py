"""What llama.cpp's own --fit would choose under a budget: `common_fit_params`, called in a child process.

It measures with loads that allocate nothing, keeps `margins` bytes free on every device, and fills in
layer count, split and overrides.
"""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.errors import EngineProblem
from planner.plan.load_spec import LoadSpec
from runtime.child.ask import Relayed, ask
from runtime.child.serve import serve
from runtime.engine.libllama import Engine, Override, load_library
from runtime.engine.rpc import connect
from runtime.load import dry_run, load_params

_ROOM = 4096  # entries that the engine asks for
_ERRORS_ONLY = 4
_CONTEXT_LEAST = 256
_ALL_LAYERS = 10_000
_NO_FIT = 1  # of the three answers of common_fit_params: 0 success, 1 no fit, 2 error
# Two signatures: newer builds take one more pointer, a second model to fit.
_HEAD = "_Z17common_fit_paramsPKcP18llama_model_paramsP20llama_context_params"
_LONG = f"{_HEAD}PfP32llama_model_tensor_buft_overridePmjPK22common_fit_extra_model14ggml_log_level"
_SHORT = f"{_HEAD}PfP32llama_model_tensor_buft_overridePmj14ggml_log_level"


class NoPlacement(Relayed):
    """The engine's --fit finds nothing within the memory it may use."""


def fit(
    engine: str, model: Path, spec: LoadSpec, budgets: Mapping[str, int], llama_h: Path | None = None
) -> LoadSpec:
    """The spec that --fit arrives at for the workload and devices of `spec`, at most `budgets` bytes each.

    Raises NoPlacement when it finds none, EngineProblem when the build has no fit or dies.
    """
    request = {
        "engine": engine,
        "llama_h": str(llama_h) if llama_h else None,
        "model": str(model.resolve()),
        "spec": dry_run.to_json(spec),
        "budgets": dict(budgets),
    }
    answer = ask("runtime.load.engine_fit", request, engine)
    if "none" in answer:
        raise NoPlacement(engine, answer["none"])
    return replace(
        spec,
        tensor_split=tuple(answer["tensor_split"]),
        n_gpu_layers=answer["n_gpu_layers"],
        overrides=tuple((pattern, buffer) for pattern, buffer in answer["overrides"]),
        cache_bytes=0,
    )


def supported(engine: Engine) -> bool:
    """Whether the build has a --fit to compare with."""
    try:
        _function(engine)
    except EngineProblem:
        return False
    return True


def _fit_here(request: Mapping[str, Any]) -> dict[str, Any]:
    engine = Engine.find(request["engine"], Path(request["llama_h"]) if request["llama_h"] else None)
    spec, renamed = connect(engine, dry_run.from_json(request["spec"]))
    budgets = {renamed.get(name, name): size for name, size in request["budgets"].items()}
    planned = {there: name for name, there in renamed.items()}
    function, extra = _function(engine)
    kept = load_params.Kept()
    bare = replace(spec, overrides=(), tensor_split=(), n_gpu_layers=-1)
    model = load_params.model_params(engine, bare, kept)
    model.tensor_split = model.tensor_buft_overrides = None  # untouched: these are for fit to set
    context = load_params.context_params(engine, spec, kept)
    split, overrides = (c.c_float * engine.max_devices)(), (Override * _ROOM)()
    margins = (c.c_size_t * engine.max_devices)(*_margins(engine, spec, budgets))
    status = function(
        os.fsencode(request["model"]),
        *(c.byref(model), c.byref(context), split, overrides, margins, _CONTEXT_LEAST, *extra, _ERRORS_ONLY),
    )
    if status == _NO_FIT:
        return {"none": f"engine {engine.label}: --fit found no placement within the budget"}
    if status:
        raise EngineProblem(engine.label, "--fit failed")
    count = len(spec.devices)
    shares = [float(value) for value in split[:count]]
    return {
        # Left at -1 where everything fits.
        "n_gpu_layers": model.n_gpu_layers if model.n_gpu_layers >= 0 else _ALL_LAYERS,
        "tensor_split": [round(s) for s in shares] if any(shares) else _default_split(engine, spec),
        "overrides": [
            [entry.pattern.decode(), planned.get(device, device)]
            for entry in overrides
            if entry.pattern and (device := engine.ggml.buft_device(entry.buft))
        ],
    }


def _default_split(engine: Engine, spec: LoadSpec) -> list[int]:
    """Untouched, layers are dealt by free memory."""
    free = {d.name: d.free_bytes >> 20 for d in engine.ggml.devices()}
    return [max(free[name], 1) for name in spec.devices]


def _margins(engine: Engine, spec: LoadSpec, budgets: Mapping[str, int]) -> list[int]:
    free = {d.name: d.free_bytes for d in engine.ggml.devices()}
    return [max(free[name] - budgets[name], 0) for name in spec.devices]


def _function(engine: Engine) -> tuple[Any, tuple[None, ...]]:
    for library in (engine.lib, _common(engine)):
        for name, extra in ((_LONG, (None,)), (_SHORT, ())):
            if library is not None and hasattr(library, name):
                function = getattr(library, name)
                function.restype = c.c_int
                kinds = [c.c_char_p, *[c.c_void_p] * 5, c.c_uint32, *[c.c_void_p] * len(extra), c.c_int]
                function.argtypes = kinds
                return function, extra
    raise EngineProblem(engine.label, "has no --fit to compare with (no common_fit_params)")


def _common(engine: Engine) -> Any:
    """The library beside libllama that holds what the tools share; None when there is none."""
    for path in sorted(engine.path.parent.glob("libllama-common.so*")) if engine.path.is_absolute() else ():
        return load_library(path, engine.label)
    return None


if __name__ == "__main__":
    serve(_fit_here)
