"""What has to be measured for a model: its operators, each once, at the batches and places that matter.

Pure: an inventory and a list of places in, cases out. The derivation follows the graph llama.cpp builds
(a test holds it to the engine's own graph): a matrix is a MUL_MAT, an expert stack a MUL_MAT_ID, the token
table a GET_ROWS, attention one FLASH_ATTN_EXT over the cells of the cache, a recurrent mixer one state
operator. Norms and other small operators are one constant per device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.machine.op_time import UNFUSED_DELTA_NET, Case
from planner.model.inventory import Inventory, Tensor
from planner.model.tensor_roles import Part, Role, part_of

DEPTHS = (0, 4096, 16384, 65536)
VERIFY_BATCHES = (2, 8)  # speculative decoding checks 2 to 8 tokens; between them the line holds

_MATRIX_ROLES = frozenset(
    {
        Role.ATTENTION,
        Role.STATE,
        Role.MIXER,
        Role.ROUTER,
        Role.SHARED,
        Role.FFN,
        Role.OUTPUT,
        Role.EXTRA,
    }
)
# Two-dimensional, yet not multiplied by a matrix product: convolutions, decay tables, interpolation factors.
_NOT_MULTIPLIED = ("conv1d", "shortconv.conv", "ssm_a", "ssm_d.", "lerp", "rope_f", "time_mix_first", "r_k")


NOT_SUPPORTED = "not supported by the device"


@dataclass(frozen=True, slots=True)
class Place:
    """A device and the buffer its weights lie in."""

    device: str
    buffer: str
    kind: (
        str  # own, host (pinned memory the CPU computes on), repack, zero-copy (GPU kernels read host memory)
    )


@dataclass(frozen=True, slots=True)
class Job:
    """One case at one place."""

    case: Case
    place: Place

    @property
    def key(self) -> str:
        """Identity across runs."""
        c, p = self.case, self.place
        shape = "x".join(map(str, c.shape))
        return f"{c.op} {c.type} {shape} b{c.batch} u{c.used} d{c.depth} {p.device} {p.buffer}"


def job_of(data: Mapping[str, Any]) -> Job:
    """A job from its JSON form (`asdict`)."""
    case = dict(data["case"], shape=tuple(data["case"]["shape"]))
    return Job(Case(**case), Place(**data["place"]))


def jobs_of(cases: Iterable[Case], places: Sequence[Place]) -> tuple[Job, ...]:
    """Every case at every place where it can matter, place by place."""
    cases = tuple(cases)
    return tuple(Job(case, place) for place in places for case in cases if _matters(case, place))


def _matters(case: Case, place: Place) -> bool:
    weights = case.op in ("MUL_MAT", "MUL_MAT_ID")
    if place.kind == "own":
        return True
    if place.kind == "zero-copy":  # striped experts only
        return case.op == "MUL_MAT_ID"
    if place.kind == "host":
        return weights and case.batch == 1
    return weights and case.batch not in VERIFY_BATCHES  # repack


def cases_of(
    inventory: Inventory, n_ubatch: int = 512, max_depth: int = DEPTHS[-1], kv_types: Sequence[str] = ("f16",)
) -> tuple[Case, ...]:
    """The distinct operators of a model, most bytes first.

    Batches are 1, the verify batches and `n_ubatch`; the output head and the state operators have
    batches of their own. Depths stop at the model's context length and at `max_depth`.
    """
    batches = (1, *VERIFY_BATCHES, n_ubatch)
    found = dict.fromkeys(_weight_cases(inventory, batches))
    found |= dict.fromkeys(_attention_cases(inventory, n_ubatch, max_depth, kv_types))
    found |= dict.fromkeys(_state_cases(inventory, n_ubatch))
    # All small operators together are one constant a device; this one shows how it grows with the batch.
    width = (inventory.number("embedding_length", 2048),)
    found |= dict.fromkeys(Case("RMS_NORM", "f32", width, batch) for batch in (1, n_ubatch))
    return tuple(sorted(found, key=lambda c: (c.batch, c.op, c.type, c.shape, c.depth)))


def _weight_cases(inventory: Inventory, batches: Sequence[int]) -> Iterator[Case]:
    used = inventory.number("expert_used_count")
    tied = not any(t.name == "output.weight" for t in inventory.tensors)
    for tensor in inventory.tensors:
        part = part_of(tensor)
        if part.role is Role.EMBEDDING and tensor.name == "token_embd.weight":
            yield from (Case("GET_ROWS", tensor.type, tensor.shape, batch) for batch in (1, batches[-1]))
        if part.role is Role.EXPERTS and part.experts > 1:
            yield from (Case("MUL_MAT_ID", tensor.type, tensor.shape, batch, used) for batch in batches)
        elif _is_matrix(tensor, part) or (tied and tensor.name == "token_embd.weight"):
            # Of a prompt only the last token reaches the head.
            head = part.role in (Role.OUTPUT, Role.EMBEDDING)
            yield from (Case("MUL_MAT", tensor.type, tensor.shape, b) for b in batches if not head or b <= 8)


def _is_matrix(tensor: Tensor, part: Part) -> bool:
    if part.role is Role.EXPERTS:
        return part.experts == 1
    if part.role not in _MATRIX_ROLES or not tensor.name.endswith(".weight"):
        return False
    if len(tensor.shape) < 2 or min(tensor.shape[:2]) < 2:
        return False
    return not any(word in tensor.name for word in _NOT_MULTIPLIED)


def _attention_cases(
    inventory: Inventory, n_ubatch: int, max_depth: int, kv_types: Sequence[str]
) -> Iterator[Case]:
    context = inventory.number("context_length", DEPTHS[-1])
    depths = [d for d in DEPTHS if d <= min(max_depth, context)]
    for shape in attention_shapes(inventory):
        for kind in kv_types:
            for depth in depths:
                yield Case("FLASH_ATTN_EXT", kind, shape, 1, depth=depth)
            for depth in depths[:2]:
                yield Case("FLASH_ATTN_EXT", kind, shape, n_ubatch, depth=depth)


def attention_shapes(inventory: Inventory) -> tuple[tuple[int, int, int], ...]:
    """Distinct (head_dim, n_head, n_head_kv) over the layers that attend."""
    n_layers = inventory.number("block_count")
    heads = inventory.per_layer("attention.head_count", n_layers)
    kv_heads = inventory.per_layer("attention.head_count_kv", n_layers, heads[0] if heads else 0)
    n_embd = inventory.number("embedding_length")
    found: dict[tuple[int, int, int], None] = {}
    for n_head, n_head_kv in zip(heads, kv_heads, strict=True):
        if n_head > 0 and n_head_kv > 0:
            head_dim = inventory.number("attention.key_length") or n_embd // n_head
            found[(head_dim, n_head, n_head_kv)] = None
    swa = inventory.number("attention.key_length_swa")
    return tuple(found) + tuple((swa, h, kv) for d, h, kv in found if swa and swa != d)


def _state_cases(inventory: Inventory, n_ubatch: int) -> Iterator[Case]:
    """The recurrent operator by batch regime: fused kernels differ at 1, 16 and a whole ubatch."""
    shape = state_shape(inventory)
    if shape:
        op = "GATED_DELTA_NET" if _is_delta_net(inventory) else "SSM_SCAN"
        yield from (Case(op, "f32", shape, batch) for batch in (1, 16, n_ubatch))
        if op == "GATED_DELTA_NET":
            yield Case(UNFUSED_DELTA_NET, "f32", shape, 1)


def state_shape(inventory: Inventory) -> tuple[int, int, int] | tuple[()]:
    """The state one recurrent layer reads and writes: (state, head_dim, heads); () without `ssm.` keys."""
    d_state = inventory.number("ssm.state_size")
    d_inner = inventory.number("ssm.inner_size")
    if not d_state or not d_inner:
        return ()
    if _is_mamba1(inventory):
        return (d_state, 1, d_inner)
    heads = max(inventory.number("ssm.time_step_rank"), 1)
    return (d_state, d_inner // heads, heads)


def _is_delta_net(inventory: Inventory) -> bool:
    return any(".ssm_ba." in t.name or ".ssm_beta." in t.name for t in inventory.tensors)


def _is_mamba1(inventory: Inventory) -> bool:
    return any(".ssm_x." in t.name for t in inventory.tensors)
