"""What else takes memory: projector, NextN head, draft model, other users; line by line.

Pure functions from inventories to `Reserve` lines, one per part and device. The solver takes them as
`EngineSettings.reserves`; their sum per device is what the plan must leave free. What the driver takes
for a context is a figure of the device (`Device.context_bytes`), not a line here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from planner.constants import CPU
from planner.errors import InputError, OptionProblem
from planner.memory.compute_buffer import compute_bytes, converts_caches, host_bytes, output_bytes
from planner.memory.kv_cache import kv_bytes, state_bytes
from planner.memory.memory import Reserve
from planner.memory.projector import projector_compute_bytes, projector_inputs_bytes
from planner.memory.weights import loaded_tensors, tied_copy_bytes, weight_bytes
from planner.model.inventory import Inventory
from planner.model.layers import CACHELESS, KNOWN
from planner.model.nextn import drafts_alone
from planner.model.structure import Structure, structure_of
from planner.model.tensor_roles import Role, part_of
from planner.records import MAX_BYTES
from planner.workload import Workload

OTHER_USERS = "other users"  # the reserve that a person states
PROJECTOR = "clip"  # the architecture that every vision projector states
GPU_STEP = 256  # alignment of tensors in GPU buffers


@dataclass(frozen=True, slots=True)
class Extras:
    """What runs beside the model; empty by default."""

    mmproj: Inventory | None = None
    mmproj_device: str = ""  # "": the first GPU
    draft: Inventory | None = None
    draft_device: str = ""  # "": the first GPU
    draft_experts_on_host: bool = False  # its routed experts alone
    ngrams: bool = False  # what followed the last tokens before is drafted
    rollback: int = 0  # tokens a speculative step may take back (its longest draft)
    reserved: Mapping[str, int] = field(default_factory=dict)  # device -> bytes for other users


def check_extras(mmproj: Inventory | None, draft: Inventory | None) -> None:
    """OptionProblem where a file beside the model is not what its option asks for."""
    if mmproj is not None and mmproj.architecture != PROJECTOR:
        why = f"is a {mmproj.architecture} model; a vision projector ({PROJECTOR}) is needed"
        raise OptionProblem("--mmproj", mmproj.name, why)
    if draft is not None and draft.architecture == PROJECTOR:
        raise OptionProblem("--draft", draft.name, "is a vision projector; a language model is needed")
    if draft is not None and draft.architecture in CACHELESS:
        why = f"is a {draft.architecture} model: it keeps no cache and writes no next token"
        raise OptionProblem("--draft", draft.name, why)
    if draft is not None and drafts_alone(draft):
        why = "holds a NextN/MTP block alone: only one in the model's own file is planned (--mtp)"
        raise OptionProblem("--draft", draft.name, why)


def check_drafted(inventory: Inventory, extras: Extras) -> None:
    """OptionProblem where guesses are asked for a model that writes no next token, such as an encoder."""
    if inventory.architecture in CACHELESS and (extras.draft is not None or extras.ngrams):
        option = "--ngram" if extras.ngrams else "--draft"
        why = f"is a {inventory.architecture} model: it writes no next token that could be drafted"
        raise OptionProblem(option, inventory.name, why)


def estimates(extras: Extras) -> Iterator[str]:
    """What a plan must say of sizes that are not known to be right: a draft of a foreign architecture."""
    draft = extras.draft
    if draft is not None and draft.architecture not in KNOWN:
        yield (
            f"the draft {draft.name}: architecture {draft.architecture} is not known, so its KV cache, state "
            "and compute buffer are an estimate"
        )


@dataclass(eq=False)
class BeyondMemory(InputError):
    """Sizes stated by a file that no memory could hold."""

    line: str
    size_bytes: int

    def message(self) -> str:
        return f"{self.line}: would take {self.size_bytes} bytes: its file states sizes that cannot be"


def reserves(
    structure: Structure, workload: Workload, extras: Extras, *, gpu: str, host: str = CPU
) -> tuple[Reserve, ...]:
    """Every line that something beside the model's own weights, caches and compute takes.

    `gpu` is the device for parts that name none (the CPU where there is no GPU). Lines of zero bytes are
    left out. Lines are named projector, projector compute, projector inputs, MTP compute, MTP state,
    MTP inputs, draft, draft KV, draft state, draft compute, draft roll-back, draft embedding, draft experts,
    draft inputs, n-gram roll-back, other users.
    Raises OptionProblem for a projector that is none, and a draft that is one; BeyondMemory.
    """
    check_extras(extras.mmproj, extras.draft)
    lines = (
        *_projector(extras, extras.mmproj_device or gpu, host),
        *_nextn(structure, workload, extras.rollback, gpu, host),
        *_draft(structure, workload, extras, extras.draft_device or gpu, host),
        *_ngrams(structure, workload, extras, gpu),
        *(_line(OTHER_USERS, device or gpu, size) for device, size in sorted(extras.reserved.items())),
    )
    return tuple(line for line in lines if line.size_bytes)


def _line(name: str, device: str, size_bytes: int) -> Reserve:
    if size_bytes > MAX_BYTES:
        raise BeyondMemory(name, size_bytes)
    return Reserve(name=name, device=device, size_bytes=size_bytes)


def _projector(extras: Extras, device: str, host: str) -> Iterator[Reserve]:
    if extras.mmproj is None:
        return
    yield _line("projector", device, weight_bytes(extras.mmproj.tensors, GPU_STEP))
    yield _line("projector compute", device, projector_compute_bytes(extras.mmproj, device))
    yield _line("projector inputs", host, projector_inputs_bytes(extras.mmproj) if device != host else 0)


def _nextn(
    structure: Structure, workload: Workload, rollback: int, device: str, host: str
) -> Iterator[Reserve]:
    """What the NextN head takes beside its weights and KV, which the solver places."""
    shape = structure.layers
    if not workload.mtp or not shape.n_nextn:
        return
    blocks = range(shape.n_main, shape.n_all)
    plain, kept = state_bytes(structure, workload), state_bytes(structure, workload, rollback=rollback)
    buffer = compute_bytes(
        structure, workload, layers=blocks, outputs=workload.n_seq, converts=converts_caches(device)
    )
    yield _line("MTP compute", device, buffer)
    yield _line("MTP state", device, sum(kept) - sum(plain))
    inputs = host_bytes(structure, workload, layers=blocks) + output_bytes(structure, workload)
    yield _line("MTP inputs", host, inputs)


def _ngrams(structure: Structure, workload: Workload, extras: Extras, device: str) -> Iterator[Reserve]:
    """N-grams take no memory of their own, but a recurrent model keeps states to take guesses back to."""
    if not extras.ngrams:
        return
    kept = state_bytes(structure, workload, rollback=extras.rollback)
    yield _line("n-gram roll-back", device, sum(kept) - sum(state_bytes(structure, workload)))


def _draft(
    structure: Structure, workload: Workload, extras: Extras, device: str, host: str
) -> Iterator[Reserve]:
    if extras.draft is None:
        return
    draft = structure_of(extras.draft)
    tensors = loaded_tensors(draft)
    on_host = [t for t in tensors if part_of(t).role in (Role.EMBEDDING, Role.LOOKUP)]
    experts = [t for t in tensors if extras.draft_experts_on_host and part_of(t).role is Role.EXPERTS]
    names = {t.name for t in (*on_host, *experts)}
    rest = [t for t in tensors if t.name not in names]
    kept = state_bytes(structure, workload, rollback=extras.rollback)
    rollback = sum(kept) - sum(state_bytes(structure, workload))  # of the model itself
    tied = tied_copy_bytes(extras.draft, head_on_host=device == host)
    yield _line("draft", device, weight_bytes(rest, GPU_STEP) + tied)
    yield _line("draft KV", device, sum(kv_bytes(draft, workload)))
    yield _line("draft state", device, sum(state_bytes(draft, workload)))
    buffer = compute_bytes(draft, workload, outputs=workload.n_seq, converts=converts_caches(device))
    yield _line("draft compute", device, buffer)
    yield _line("draft roll-back", device, rollback)
    yield _line("draft embedding", host, weight_bytes(on_host))
    yield _line("draft experts", host, weight_bytes(experts))
    yield _line("draft inputs", host, host_bytes(draft, workload) + output_bytes(draft, workload))
