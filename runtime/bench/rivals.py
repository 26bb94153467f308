"""The contenders of a bench: the plan and stock rules, each given the same measured device memory.

Every question to the engine goes to a child process: none of a device's memory stays with who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from planner.constants import CPU
from planner.errors import EngineProblem
from planner.model.inventory import Inventory
from planner.model.layers import layers_of
from planner.model.structure import structure_of
from planner.model.units import Kind, units_of
from planner.passes.engine_fit import with_counted_layers
from planner.plan.engine_rules import spec_layer_devices, tensor_devices
from planner.plan.load_spec import LoadSpec
from planner.plan.overrides import collate
from planner.plan.stock_rule import ALL_CPU, FIT, N_CPU_MOE, NGL
from runtime.engine.locate import Place
from runtime.load import dry_run, engine_fit
from runtime.load.dry_run import Breakdown
from runtime.load.load_params import usable_cores
from runtime.session.draft_model import Draft
from runtime.stripes.widths import widths as stripe_widths


@dataclass(frozen=True, slots=True)
class Rival:
    """One contender."""

    name: str
    spec: LoadSpec
    setting: str  # what it is in words or flags
    device_bytes: Mapping[str, int]  # of the dry run, CPU left out
    draft: Draft | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """What all contenders share."""

    engine: Place
    model: Path
    inventory: Inventory
    devices: tuple[str, ...]  # those of the plan, each once
    budgets: Mapping[str, int]  # bytes per device that the plan itself takes
    asked: dict[LoadSpec, dict[str, int]] = field(default_factory=dict)  # dry runs, none of them twice
    heard: Callable[[], None] = lambda: None  # is told of each dry run

    def device_bytes(self, spec: LoadSpec) -> dict[str, int]:
        """What a spec takes of each device, by a dry run."""
        if spec not in self.asked:
            self.asked[spec] = _device_bytes(dry_run.memory(self.engine, self.model, spec))
            self.heard()
        return self.asked[spec]


def plan_rival(engine: Place, model: Path, spec: LoadSpec, draft: Draft | None = None) -> Rival:
    """The plan as a contender, its draft's memory counted."""
    found = _device_bytes(dry_run.memory(engine, model, spec))
    if draft is None:
        return Rival("plan", spec, "the plan", found)
    for name, size in _device_bytes(dry_run.memory(engine, draft.path, draft.spec)).items():
        found[name] = found.get(name, 0) + size
    return Rival("plan", spec, f"the plan, drafts of {draft.tokens} by {draft.path.name}", found, draft)


def without_draft(rival: Rival) -> Rival:
    """The same placement that makes every token itself."""
    return replace(rival, name="no-draft", setting="the plan without its draft")


def field_of(
    engine: Place, model: Path, inventory: Inventory, plan: Rival, heard: Callable[[], None] = lambda: None
) -> Field:
    """The conditions for the plan's rivals: its devices and the memory it takes on each."""
    devices = tuple(dict.fromkeys(d for d in plan.spec.devices if d != CPU))
    budgets = {d: plan.device_bytes.get(d, 0) for d in devices}
    return Field(engine, model, inventory, devices, budgets, heard=heard)


def dry_runs(names: Iterable[str], n_layers: int) -> int:
    """About how many dry runs it takes to find the rivals of these names: bisections over the layers."""
    return sum(n_layers.bit_length() + 1 if name in (NGL, N_CPU_MOE) else name == FIT for name in names)


def rivals(field: Field, base: LoadSpec, names: tuple[str, ...]) -> tuple[list[Rival], list[str]]:
    """The rivals of these names, and why some could not be found."""
    found: list[Rival] = []
    missing: list[str] = []
    for name in names:
        try:
            found.append(RULES[name](field, base))
        except EngineProblem as problem:
            missing.append(f"{name}: {problem.why}")
    return found, missing


def all_cpu(field: Field, base: LoadSpec) -> Rival:
    """No device but the CPU."""
    spec = replace(base, devices=(), tensor_split=(), n_gpu_layers=0, overrides=(), cache_bytes=0)
    return Rival(ALL_CPU, spec, "-ngl 0 --device none", {})


def best_ngl(field: Field, base: LoadSpec) -> Rival:
    """The most layers that fit, the others on the CPU."""
    total = _all_layers(field)

    def at(count: int) -> LoadSpec:
        return _stock(field, base, count, ())

    count = _most(total, lambda n: _fits(field, at(n)))
    return _rival(field, NGL, at(count), f"-ngl {count}")


def best_n_cpu_moe(field: Field, base: LoadSpec) -> Rival:
    """All layers offloaded, the experts of the fewest first layers on the CPU. Dense models: their FFN."""
    units = [u for u in units_of(field.inventory).units if u.kind in (Kind.EXPERTS, Kind.FFN)]
    experts = [u for u in units if u.kind is Kind.EXPERTS] or units
    layers = sorted({u.layer for u in experts if u.layer is not None})
    total = _all_layers(field)

    def at(on_device: int) -> LoadSpec:
        first = set(layers[: len(layers) - on_device])
        wanted = {name: CPU for u in experts if u.layer in first for name in u.tensors}
        return _stock(field, base, total, tuple((o.pattern, o.buffer) for o in collate(wanted)))

    count = _most(len(layers), lambda n: _fits(field, at(n)))
    flag = "--n-cpu-moe" if experts[0].kind is Kind.EXPERTS else "--n-cpu-ffn"
    return _rival(field, N_CPU_MOE, at(count), f"-ngl {total} {flag} {len(layers) - count}")


def best_fit(field: Field, base: LoadSpec) -> Rival:
    """What the engine's own --fit chooses."""
    total = _all_layers(field)
    bare = _stock(field, base, total, ())
    engine = field.engine
    found = engine_fit.fit(str(engine.path), field.model, bare, field.budgets, engine.llama_h)
    spec = with_counted_layers(field.inventory, found)
    return _rival(field, FIT, spec, f"--fit on ({spec.n_gpu_layers} layers, {len(spec.overrides)} overrides)")


RULES: Mapping[str, Callable[[Field, LoadSpec], Rival]] = {
    ALL_CPU: all_cpu,
    NGL: best_ngl,
    N_CPU_MOE: best_n_cpu_moe,
    FIT: best_fit,
}


def same_load(inventory: Inventory, one: LoadSpec, other: LoadSpec) -> bool:
    """Whether two specs put every weight and cache in the same place and compute alike: a race of one."""
    return _effect(inventory, one) == _effect(inventory, other)


def _effect(inventory: Inventory, spec: LoadSpec) -> tuple[object, ...]:
    plain = replace(
        spec,
        devices=(),
        tensor_split=(),
        n_gpu_layers=0,
        overrides=(),
        notes=(),
        mapped=(),
        threads=spec.threads or usable_cores(),
    )
    layers = spec_layer_devices(spec, layers_of(inventory).n_all)
    return plain, layers, tensor_devices(structure_of(inventory), spec), stripe_widths(inventory, spec)


def _all_layers(field: Field) -> int:
    if not field.devices:
        raise EngineProblem(field.engine.label, "the plan uses no device beside the CPU here")
    return layers_of(field.inventory).n_all + 1


def _stock(field: Field, base: LoadSpec, count: int, overrides: tuple[tuple[str, str], ...]) -> LoadSpec:
    """All devices in proportion to what the plan uses of each, as a person would set --tensor-split."""
    mib = tuple(max(field.budgets[d] >> 20, 1) for d in field.devices)
    shares = replace(
        base,
        devices=field.devices,
        tensor_split=mib,
        n_gpu_layers=count,
        overrides=overrides,
        cache_bytes=0,
    )
    return with_counted_layers(field.inventory, shares)


def _rival(field: Field, name: str, spec: LoadSpec, setting: str) -> Rival:
    return Rival(name, spec, setting, field.device_bytes(spec))


def _fits(field: Field, spec: LoadSpec) -> bool:
    found = field.device_bytes(spec)
    return all(size <= field.budgets.get(device, 0) for device, size in found.items())


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest count up to `limit` that fits, by bisection; EngineProblem when not even 0 does."""
    low, high = 0, limit
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0 and not fits(0):
        raise EngineProblem("llama.cpp", "no setting of this rule fits the memory that the plan takes")
    return low


def _device_bytes(found: Mapping[str, Breakdown]) -> dict[str, int]:
    return {name: sizes.total for name, sizes in found.items() if name != CPU}
