"""What a model file holds, counted for people and programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.errors import AnswerIsNo
from planner.memory.compute_buffer import compute_bytes
from planner.memory.kv_cache import kv_bytes, state_bytes
from planner.memory.projector import projector_compute_bytes
from planner.memory.reserves import check_extras
from planner.model.ggml_types import is_known
from planner.model.heads import unstated_heads
from planner.model.inventory import Inventory
from planner.model.nextn import drafts_alone, promised_in_vain
from planner.model.sliding_window import window
from planner.model.structure import Structure, structure_of
from planner.model.tensor_roles import Role, missing_partners, part_of
from planner.model.units import Kind, Unit, active_bytes, foreign_note, units_of
from planner.model.validity import load_faults
from planner.workload import Workload

_CELLS = 1024


@dataclass(eq=False)
class Strange(AnswerIsNo):
    """A file with parts that this program, or the stock engine, does not know."""

    model: str
    parts: tuple[str, ...]

    def message(self) -> str:
        return f"{self.model}: --strict: {'; '.join(self.parts)}"


@dataclass(frozen=True, slots=True)
class RoleLine:
    """All tensors of one role."""

    role: str
    tensors: int
    size_bytes: int
    active_bytes: int  # read for one decoded token
    types: tuple[str, ...]  # most bytes first


@dataclass(frozen=True, slots=True)
class ExpertLine:
    """Layers with the same routed experts."""

    layers: int
    experts: int
    used: int
    expert_bytes: int  # of one expert, on average over the layers


@dataclass(frozen=True, slots=True)
class Summary:
    """An inventory at a glance; all sizes in bytes."""

    name: str
    architecture: str
    files: int
    tensors: int
    size_bytes: int
    layers: Mapping[str, int]  # kind -> how many
    roles: tuple[RoleLine, ...]
    experts: tuple[ExpertLine, ...]
    active_bytes: int  # read for one decoded token
    tied_bytes: int  # token_embd.weight a second time, as output head on a GPU
    kv_bytes_per_1k: int  # KV cache of 1024 cells at f16, what grows with the context
    kv_fixed_bytes: int  # KV cache of sliding layers once their window is full
    state_bytes: int  # recurrent state of one sequence
    compute_bytes: int  # compute buffer at the default batch and context
    window: int  # tokens of the sliding window; 0: none
    unknown: tuple[str, ...]
    notes: tuple[str, ...]


def summary_of(inventory: Inventory) -> Summary:
    """Count an inventory; errors of `units_of`."""
    structure = structure_of(inventory)
    table = structure.table
    growing, fixed = _kv(structure)
    return Summary(
        name=inventory.name,
        architecture=inventory.architecture,
        files=len(inventory.shards),
        tensors=len(inventory.tensors),
        size_bytes=inventory.size_bytes,
        layers=_layer_kinds(structure),
        roles=_roles(structure),
        experts=_experts(table.units),
        active_bytes=sum(u.active_bytes for u in table.units),
        tied_bytes=sum(u.tied_bytes for u in table.units),
        kv_bytes_per_1k=growing,
        kv_fixed_bytes=fixed,
        state_bytes=sum(state_bytes(structure, Workload())),
        compute_bytes=compute_bytes(structure, Workload()),
        window=window(inventory),
        unknown=table.unknown,
        notes=_notes(inventory, table.units),
    )


def extra_of(kind: str, inventory: Inventory) -> Mapping[str, object]:
    """A projector or a draft model beside the main one: what it is and what it takes."""
    found: dict[str, object] = {
        "kind": kind,
        "name": inventory.name,
        "architecture": inventory.architecture,
        "tensors": len(inventory.tensors),
        "size_bytes": inventory.size_bytes,
    }
    check_extras(inventory if kind == "mmproj" else None, inventory if kind == "draft" else None)
    if kind == "mmproj":
        return found | {"compute_bytes": projector_compute_bytes(inventory)}
    growing, fixed = _kv(structure_of(inventory))
    return found | {"kv_bytes_per_1k": growing, "kv_fixed_bytes": fixed}


def _kv(structure: Structure) -> tuple[int, int]:
    slides = structure.slides[: structure.layers.n_main]
    sizes = kv_bytes(structure, Workload(n_ctx=_CELLS))
    wide = kv_bytes(structure, Workload(n_ctx=2**20))
    return (
        sum(size for size, s in zip(sizes, slides, strict=True) if not s),
        sum(size for size, s in zip(wide, slides, strict=True) if s),
    )


def _layer_kinds(structure: Structure) -> dict[str, int]:
    layers = structure.layers
    kinds = Counter(unit.kind for unit in structure.units if unit.layer is not None)
    sliding = sum(a and s for a, s in zip(layers.attention, structure.slides, strict=False))
    found = {
        "main": layers.n_main,
        "attention": sum(layers.attention),
        "sliding": sliding,
        "recurrent": sum(layers.recurrent),
        "dense ffn": kinds[Kind.FFN],
        "experts": kinds[Kind.EXPERTS],
        "nextn": layers.n_nextn,
    }
    return {name: count for name, count in found.items() if count or name == "main"}


def _roles(structure: Structure) -> tuple[RoleLine, ...]:
    tensors, units = structure.tensors, structure.units
    routed = {unit.layer: (unit.used, unit.experts) for unit in units if unit.kind is Kind.EXPERTS}
    lines: dict[str, list[tuple[str, int, int]]] = {}
    for unit in units:
        for tensor in (tensors[name] for name in unit.tensors):
            part = part_of(tensor)
            read = active_bytes(unit.kind, tensor, part, *routed.get(unit.layer, (0, 0)))
            lines.setdefault(_role_in(unit, part.role), []).append((tensor.type, tensor.size_bytes, read))
    made = (_role_line(role, rows) for role, rows in lines.items())
    return tuple(sorted(made, key=lambda line: (-line.size_bytes, line.role)))


def _role_in(unit: Unit, role: Role) -> str:
    """Projections named attn_* belong to the mixer where the layer is recurrent."""
    if unit.kind is Kind.NEXTN:
        return Kind.NEXTN.value
    return (Role.MIXER if unit.kind is Kind.RECURRENT and role is Role.ATTENTION else role).value


def _role_line(role: str, rows: list[tuple[str, int, int]]) -> RoleLine:
    types: Counter[str] = Counter()
    for type_name, size, _ in rows:
        types[type_name] += size
    return RoleLine(
        role=role,
        tensors=len(rows),
        size_bytes=sum(size for _, size, _ in rows),
        active_bytes=sum(read for _, _, read in rows),
        types=tuple(name for name, _ in types.most_common()),
    )


def _experts(units: Iterable[Unit]) -> tuple[ExpertLine, ...]:
    groups: dict[tuple[int, int], list[int]] = {}
    for unit in units:
        if unit.kind is Kind.EXPERTS:
            groups.setdefault((unit.experts, unit.used), []).append(unit.size_bytes // max(unit.experts, 1))
    return tuple(
        ExpertLine(len(sizes), experts, used, sum(sizes) // len(sizes))
        for (experts, used), sizes in sorted(groups.items())
    )


def _notes(inventory: Inventory, units: Iterable[Unit]) -> tuple[str, ...]:
    found = []
    kinds = Counter(unit.kind for unit in units)
    if heads := unstated_heads(inventory):
        found.append(heads)
    found += missing_partners(inventory)[:1]
    if kinds[Kind.FOREIGN]:
        found.append("holds tensors that no text model has: llama.cpp refuses the file")
    if inventory.number("nextn_predict_layers") and not kinds[Kind.NEXTN]:
        found.append("speaks of NextN blocks whose tensors it does not hold")
    if drafts_alone(inventory):
        found.append(
            "holds a NextN/MTP block and no other layer: it only drafts, for the model it was cut from"
        )
    elif kinds[Kind.NEXTN]:
        found.append("its NextN blocks are loaded only on request")
    if kinds[Kind.LOOKUP]:
        found.append("its lookup tables stay in host memory; a token reads one row of each")
    return tuple(found)


def refuse_strange(inventory: Inventory) -> None:
    """Strange for a type without a known layout, tensors of other modalities, anything unrecognised."""
    table = units_of(inventory)
    types = sorted({t.type for t in inventory.tensors if not is_known(t.type)})
    found = [f"tensor type {kind} is not known" for kind in types]
    found += filter(None, [foreign_note(table.units)])
    found += [f"{name} is not recognised" for name in table.unknown[:1]]
    found += missing_partners(inventory)[:1]
    if (fault := promised_in_vain(inventory)) and not load_faults(inventory):
        found.append(f"the model {fault}")
    if found:
        raise Strange(inventory.name, tuple(found))
