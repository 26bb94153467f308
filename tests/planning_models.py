"""Models and machines for planning tests: real shapes at a tenth of the layers, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.inputs.tensor_tables import Row, inventory_of
from planner.check.check import CheckOptions, Inputs, check_plan
from planner.check.findings import Finding
from planner.cost.build_problem import Priced, analyse, build_problem
from planner.machine.budgets import budgets_for, parse_budget
from planner.machine.presets import load
from planner.machine.profile import Device, OpTiming, Profile
from planner.model.ggml_types import tensor_bytes
from planner.model.inventory import Hparam, Inventory, from_text
from planner.model.structure import structure_of
from planner.passes.make_plan import make_plan
from planner.plan.engine_settings import EngineSettings
from planner.plan.known import Known
from planner.plan.plan import Plan, to_text
from planner.plan.request import Request
from planner.solver.clock import Clock
from planner.solver.problem import Problem
from planner.workload import Workload

INPUTS = Path(__file__).parents[1] / "plans" / "inputs"
MIB = 2**20
GB = 10**9
WIDTH, EXPERTS, INNER = 2048, 128, 768


def moe(layers: int = 8, *, dense_first: int = 0, arch: str = "qwen3moe", **more: Hparam) -> Inventory:
    """A mixture of experts like Qwen3-30B-A3B, with fewer layers."""
    rows = _ends()
    for n in range(layers):
        rows += _attention(n)
        rows += _dense(n, 6144) if n < dense_first else _experts(n)
    return inventory_of("moe", arch, {**_hparams(layers), **more}, rows)


def with_nextn(layers: int = 8) -> Inventory:
    """The mixture of experts with a NextN block behind its layers."""
    model = moe(layers)
    block = [t for t in model.tensors if t.name.startswith(f"blk.{layers - 1}.")]
    head = [t.model_copy(update={"name": t.name.replace(f".{layers - 1}.", f".{layers}.")}) for t in block]
    mark = head[0].model_copy(update={"name": f"blk.{layers}.nextn.eh_proj.weight"})
    hparams = {**model.hparams, "block_count": layers + 1, "nextn_predict_layers": 1}
    return model.model_copy(update={"hparams": hparams, "tensors": (*model.tensors, *head, mark)})


def dense(inner: list[int], *, arch: str = "qwen3") -> Inventory:
    """A dense model with a feed-forward of its own width in each layer."""
    rows = _ends()
    for n, width in enumerate(inner):
        rows += _attention(n) + _dense(n, width)
    told: Hparam = inner[0] if len(set(inner)) == 1 else tuple(inner)
    return inventory_of("dense", arch, {**_hparams(len(inner)), "feed_forward_length": told}, rows)


def real(name: str) -> Inventory:
    """One of the inventories that ship with the plans."""
    path = INPUTS / f"{name}.inventory.yaml"
    return from_text(path.read_text(), str(path))


def machine(name: str = "rtx4090-ddr5", **devices: Mapping[str, object]) -> Profile:
    """A shipped machine; keyword arguments change fields of its devices by name."""
    profile = load(name)

    def changed(device: Device) -> Device:
        return device.model_copy(update=dict(devices.get(device.name, {})))

    return profile.model_copy(update={"devices": tuple(map(changed, profile.devices))})


def timed(op: str, kind: str, shape: tuple[int, ...], ns: int = 20_000, **fields: int) -> OpTiming:
    """An operator on a type, as measured on CUDA0; `fields` are its batch, depth and experts used."""
    cases = {"batch": 1} | fields
    where = {"device": "CUDA0", "buffer": "CUDA0"}
    return OpTiming(op=op, type=kind, shape=shape, time_ns=ns, spread_ns=0, samples=9, **where, **cases)


def plan(
    model: Inventory,
    budget: str,
    *,
    on: Profile | None = None,
    workload: Workload | None = None,
    known: Known | None = None,
    settings: EngineSettings | None = None,
    limit_s: float = 5.0,
    clock: Clock | None = None,
    advise: bool = False,
    **asked: Any,
) -> Plan:
    """A plan as `atsplan solve` makes it; `asked` are fields of the request."""
    profile = on or machine()
    budgets = budgets_for(profile, parse_budget(budget) if budget else {})
    request = Request(budgets, workload or Workload(), **asked)
    known, settings, clock = known or Known(), settings or EngineSettings(), clock or Clock(limit_s)
    return make_plan(model, profile, request, known, settings, clock, advise=advise)


def priced(
    model: Inventory,
    profile: Profile,
    request: Request,
    *,
    known: Known | None = None,
    settings: EngineSettings | None = None,
) -> Priced:
    """The problem of a request, and what it was made from; with the engine's own settings unless said."""
    analysed = analyse(structure_of(model), request.workload)
    return build_problem(analysed, profile, request, settings or EngineSettings(), known or Known())


def problem_of(model: Inventory, profile: Profile, request: Request) -> Problem:
    """The integers alone."""
    return priced(model, profile, request).problem


def sites(made: Plan, kind: str = "") -> dict[str, str]:
    """Site by unit name, of units whose name ends in `kind`."""
    return {p.unit: str(p.site) for p in made.units if p.unit.endswith(kind)}


def _row(name: str, kind: str, *shape: int) -> Row:
    return Row(name, kind, shape, tensor_bytes(kind, shape))


def _hparams(layers: int) -> dict[str, Hparam]:
    return {
        "block_count": layers,
        "context_length": 131072,
        "embedding_length": WIDTH,
        "feed_forward_length": 6144,
        "attention.head_count": 32,
        "attention.head_count_kv": 4,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "expert_used_count": 8,
        "vocab_size": 32000,
    }


def _ends() -> list[Row]:
    return [
        _row("token_embd.weight", "q4_K", WIDTH, 32000),
        _row("output_norm.weight", "f32", WIDTH),
        _row("output.weight", "q6_K", WIDTH, 32000),
    ]


def _attention(n: int) -> list[Row]:
    return [
        _row(f"blk.{n}.attn_norm.weight", "f32", WIDTH),
        _row(f"blk.{n}.attn_q.weight", "q4_K", WIDTH, 4096),
        _row(f"blk.{n}.attn_k.weight", "q4_K", WIDTH, 512),
        _row(f"blk.{n}.attn_v.weight", "q6_K", WIDTH, 512),
        _row(f"blk.{n}.attn_output.weight", "q4_K", 4096, WIDTH),
        _row(f"blk.{n}.ffn_norm.weight", "f32", WIDTH),
    ]


def _dense(n: int, inner: int) -> list[Row]:
    return [
        _row(f"blk.{n}.ffn_gate.weight", "q4_K", WIDTH, inner),
        _row(f"blk.{n}.ffn_up.weight", "q4_K", WIDTH, inner),
        _row(f"blk.{n}.ffn_down.weight", "q4_K", inner, WIDTH),
    ]


def _experts(n: int) -> list[Row]:
    return [
        _row(f"blk.{n}.ffn_gate_inp.weight", "f32", WIDTH, EXPERTS),
        _row(f"blk.{n}.ffn_gate_exps.weight", "q4_K", WIDTH, INNER, EXPERTS),
        _row(f"blk.{n}.ffn_up_exps.weight", "q4_K", WIDTH, INNER, EXPERTS),
        _row(f"blk.{n}.ffn_down_exps.weight", "q4_K", INNER, WIDTH, EXPERTS),
    ]


def linked(gb_per_s: float) -> Profile:
    """A desktop whose copies between CPU and GPU are this fast."""
    profile = machine("rtx4090-ddr5")
    speed = {"bandwidth_bytes_per_s": int(gb_per_s * GB)}
    return profile.model_copy(update={"links": tuple(li.model_copy(update=speed) for li in profile.links)})


def prompting(prompt: int) -> Workload:
    """A long context, a prompt of this many tokens and a short answer."""
    return Workload(n_ctx=16384, prompt=prompt, gen=64)


def findings(made: Plan, model: Inventory, profile: Profile) -> list[Finding]:
    """What a check says of a plan, solved again."""
    return check_plan(made, to_text(made), "plan.yaml", Inputs(model, profile), CheckOptions())


def twins(memory_mib: int) -> Profile:
    """Two GPUs of one machine under names that the test engine has."""
    two = machine("rtx3090-rtx3060-ddr4")
    names = {"CUDA0": "TWIN0", "CUDA1": "TWIN1"}
    size = {"memory_bytes": memory_mib * MIB, "free_bytes": memory_mib * MIB, "context_bytes": 0}
    devices = tuple(
        d.model_copy(update={"name": names[d.name], **size}) if d.name in names else d for d in two.devices
    )
    links = tuple(
        li.model_copy(
            update={"source": names.get(li.source, li.source), "target": names.get(li.target, li.target)}
        )
        for li in two.links
    )
    return two.model_copy(update={"devices": devices, "links": links})
