"""The graph that times one operator: many nodes of it, each on its own weights; child process only.

A builder adds nodes to a context and names what must get memory: weights go to the arena, inputs are
set, results share one place (a decoder's operators wait for each other as well).
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from planner.machine.op_time import UNFUSED_DELTA_NET, Case, kv_cells
from runtime.engine.ggml import Ggml, Handle


@dataclass(slots=True)
class Parts:
    """What a builder made."""

    weights: list[Handle] = field(default_factory=list)
    inputs: list[tuple[Handle, bytes]] = field(default_factory=list)  # contents to be set
    nodes: list[Handle] = field(default_factory=list)


Build = Callable[[Ggml, Handle, Handle, Case, int], Parts]


def build(ggml: Ggml, weights: Handle, work: Handle, case: Case, nodes: int) -> Parts:
    """Add `nodes` copies of an operator; `weights` and `work` are contexts.

    Raises KeyError for an operator without a builder, AttributeError when the engine lacks it.
    """
    return BUILDERS[case.op](ggml, weights, work, case, nodes)


def windows(case: Case) -> int:
    """How many nodes one weight tensor serves without two of them sharing bytes."""
    if case.op == "MUL_MAT_ID" and case.batch == 1:
        return max(case.shape[2] // max(case.used, 1), 1)
    if case.op == "GET_ROWS":
        return max(case.shape[1] // max(case.batch, 1), 1)
    return 1


def weight_shape(case: Case) -> tuple[str, tuple[int, ...]]:
    """Type and shape of the tensor that a node reads from the arena."""
    if case.op == "FLASH_ATTN_EXT":
        head_dim, _, n_head_kv = case.shape
        return case.type, (head_dim, kv_cells(case), n_head_kv)
    if case.op in ("GATED_DELTA_NET", UNFUSED_DELTA_NET):
        return case.type, (case.shape[1], case.shape[1], case.shape[2])
    return case.type, case.shape


def operators_per_node(case: Case) -> int:
    """ggml operators that do one node's work."""
    return 11 if case.op == UNFUSED_DELTA_NET else 1


def weights_per_node(case: Case) -> int:
    """Tensors of `weight_shape` that one node reads."""
    return 2 if case.op in ("FLASH_ATTN_EXT", "CONT") else 1


def _copies(ggml: Ggml, context: Handle, case: Case, count: int) -> list[Handle]:
    kind, shape = weight_shape(case)
    return [ggml.new_tensor(context, kind, shape) for _ in range(count)]


def _mul_mat(ggml: Ggml, weights: Handle, work: Handle, case: Case, nodes: int) -> Parts:
    parts = Parts(_copies(ggml, weights, case, nodes))
    x = ggml.new_tensor(work, "f32", (case.shape[0], case.batch, *case.shape[2:]))
    parts.inputs.append((x, ramp(case.shape[0] * case.batch * _count(case.shape[2:]))))
    parts.nodes = [ggml.lib.ggml_mul_mat(work, w, x) for w in parts.weights]
    return parts


def _mul_mat_id(ggml: Ggml, weights: Handle, work: Handle, case: Case, nodes: int) -> Parts:
    per_weight = windows(case)
    parts = Parts(_copies(ggml, weights, case, -(-nodes // per_weight)))
    x = ggml.new_tensor(work, "f32", (case.shape[0], 1, case.batch))
    parts.inputs.append((x, ramp(case.shape[0] * case.batch)))
    for index in range(nodes):
        ids = ggml.new_tensor(work, "i32", (case.used, case.batch))
        parts.inputs.append((ids, _expert_ids(case, index % per_weight)))
        weight = parts.weights[index // per_weight]
        parts.nodes.append(ggml.lib.ggml_mul_mat_id(work, weight, x, ids))
    return parts


def _expert_ids(case: Case, window: int) -> bytes:
    """Distinct experts for every token: disjoint windows for one token, uniform draws for a batch."""
    import numpy as np

    experts = case.shape[2]
    if case.batch == 1:
        ids = (np.arange(case.used) + window * case.used) % experts
        return bytes(ids.astype(np.int32).tobytes())
    draw = np.random.Generator(np.random.SFC64([case.batch, window]))
    rows = draw.random((case.batch, experts)).argsort(axis=1)[:, : case.used]
    return bytes(rows.astype(np.int32).tobytes())


def _get_rows(ggml: Ggml, weights: Handle, work: Handle, case: Case, nodes: int) -> Parts:
    import numpy as np

    parts = Parts(_copies(ggml, weights, case, 1))
    draw = np.random.Generator(np.random.SFC64(7))
    for _ in range(nodes):
        ids = ggml.new_tensor(work, "i32", (case.batch,))
        parts.inputs.append((ids, draw.integers(0, case.shape[1], case.batch, np.int32).tobytes()))
        parts.nodes.append(ggml.lib.ggml_get_rows(work, parts.weights[0], ids))
    return parts


def _flash_attention(ggml: Ggml, weights: Handle, work: Handle, case: Case, nodes: int) -> Parts:
    head_dim, n_head, _ = case.shape
    parts = Parts(_copies(ggml, weights, case, 2 * nodes))
    q = ggml.new_tensor(work, "f32", (head_dim, case.batch, n_head))
    mask = ggml.new_tensor(work, "f16", (kv_cells(case), -(-case.batch // 64) * 64))
    parts.inputs = [(q, ramp(head_dim * case.batch * n_head)), (mask, bytes(2 * _count(_ne(ggml, mask))))]
    for index in range(nodes):
        k, v = parts.weights[2 * index : 2 * index + 2]
        parts.nodes.append(ggml.lib.ggml_flash_attn_ext(work, q, k, v, mask, head_dim**-0.5, 0.0, 0.0))
    return parts


def _delta_net(ggml: Ggml, weights: Handle, work: Handle, case: Case, nodes: int) -> Parts:
    _, size, heads = case.shape
    parts = Parts(_copies(ggml, weights, case, nodes))
    shapes = [(size, heads, case.batch)] * 3 + [(1, heads, case.batch)] * 2
    inputs = [ggml.new_tensor(work, "f32", shape) for shape in shapes]
    parts.inputs = [(x, ramp(_count(shape))) for x, shape in zip(inputs, shapes, strict=True)]
    # The last argument is the number of state snapshots; older builds do not read it.
    parts.nodes = [ggml.lib.ggml_gated_delta_net(work, *inputs, state, 1) for state in parts.weights]
    return parts


def _unfused_delta_net(ggml: Ggml, weights: Handle, work: Handle, case: Case, nodes: int) -> Parts:
    """One token of the delta rule from elementwise operators, as an engine computes it without the fused one.

    S <- exp(g) S; S <- S + k (b (v - k S)); the output is q S.
    """
    _, size, heads = case.shape
    parts, lib = Parts(_copies(ggml, weights, case, nodes)), ggml.lib
    shapes = [(size, 1, heads), (size, 1, heads), (1, size, heads), (1, 1, heads), (1, 1, heads)]
    inputs = [ggml.new_tensor(work, "f32", shape) for shape in shapes]
    parts.inputs = [(x, ramp(_count(shape))) for x, shape in zip(inputs, shapes, strict=True)]
    q, k, v, gate, beta = inputs

    def step(name: str, *operands: Handle) -> Handle:
        parts.nodes.append(getattr(lib, f"ggml_{name}")(work, *operands))
        return parts.nodes[-1]

    for state in parts.weights:
        kept = step("mul", state, step("exp", gate))
        known = step("sum_rows", step("mul", kept, k))
        change = step("mul", step("sub", v, known), beta)
        after = step("add", kept, step("mul", step("repeat", k, kept), change))
        step("sum_rows", step("mul", after, q))
    return parts


def _ssm_scan(ggml: Ggml, weights: Handle, work: Handle, case: Case, nodes: int) -> Parts:
    d_state, head_dim, heads = case.shape
    parts = Parts(_copies(ggml, weights, case, nodes))
    decay = (1, heads) if head_dim > 1 else (d_state, heads)
    shapes = [(head_dim, heads, case.batch), (heads, case.batch), decay, *[(d_state, 1, case.batch)] * 2]
    inputs = [ggml.new_tensor(work, "f32", shape) for shape in shapes]
    ids = ggml.new_tensor(work, "i32", (1,))
    parts.inputs = [(x, ramp(_count(shape))) for x, shape in zip(inputs, shapes, strict=True)]
    parts.inputs.append((ids, bytes(4)))
    parts.nodes = [ggml.lib.ggml_ssm_scan(work, state, *inputs, ids, 1) for state in parts.weights]
    return parts


def _norms(ggml: Ggml, weights: Handle, work: Handle, case: Case, nodes: int) -> Parts:
    """A chain of small operators, each on the result of the one before."""
    parts = Parts()
    x = ggml.new_tensor(work, "f32", (case.shape[0], case.batch))
    parts.inputs = [(x, ramp(case.shape[0] * case.batch))]
    for _ in range(nodes):
        x = ggml.lib.ggml_rms_norm(work, x, 1e-6)
        parts.nodes.append(x)
    return parts


def _copy(ggml: Ggml, weights: Handle, work: Handle, case: Case, nodes: int) -> Parts:
    """Plain copies from one place of the arena to another."""
    parts = Parts(_copies(ggml, weights, case, nodes))
    parts.nodes = [ggml.lib.ggml_cont(work, source) for source in parts.weights]
    parts.weights += parts.nodes
    return parts


BUILDERS: dict[str, Build] = {
    "MUL_MAT": _mul_mat,
    "MUL_MAT_ID": _mul_mat_id,
    "GET_ROWS": _get_rows,
    "FLASH_ATTN_EXT": _flash_attention,
    "GATED_DELTA_NET": _delta_net,
    UNFUSED_DELTA_NET: _unfused_delta_net,
    "SSM_SCAN": _ssm_scan,
    "RMS_NORM": _norms,
    "CONT": _copy,
}


def ramp(count: int) -> bytes:
    """Activations: f32 between -0.5 and 0.5."""
    import numpy as np

    return bytes(((np.arange(count, dtype=np.float32) * 0.618) % 1.0 - 0.5).tobytes())


def _count(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _ne(ggml: Ggml, tensor: Handle) -> tuple[int, ...]:
    return tuple(ggml.tensor(tensor).ne)


def set_inputs(ggml: Ggml, parts: Parts) -> None:
    """Write the contents of the inputs after they got memory."""
    for tensor, data in parts.inputs:
        ggml.lib.ggml_backend_tensor_set(tensor, c.cast(c.c_char_p(data), c.c_void_p), 0, len(data))
