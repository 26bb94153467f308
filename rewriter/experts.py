"""Which tensors an order of experts moves, and whether it may.

Experts are numbered by their place in the source file as it was first published. An order lists
those numbers by position: `order[p]` is the expert that position p of the output holds. The router
scores experts by position, so every tensor with an expert axis of a layer moves together; the
expert axis is always the last one, so that a move is a gather of equal slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.block_names import block_name
from planner.errors import AnswerIsNo
from planner.model.ggml_types import is_known, tensor_bytes
from planner.model.inventory import Inventory, Tensor
from planner.model.tensor_roles import Role, counts_experts, is_chunked, is_single_expert, part_of

Order = tuple[int, ...]


@dataclass(eq=False)
class OrderRefused(AnswerIsNo):
    """An order of experts that would change what the model computes, or cannot be applied."""

    layer: int
    why: str

    def message(self) -> str:
        return f"experts of layer {self.layer} cannot be reordered: {self.why}"


def gathers(
    inventory: Inventory, wanted: Mapping[int, Order], recorded: Mapping[int, Order]
) -> Mapping[str, Order]:
    """Tensor name -> source position of each slice of the output, for the tensors that change.

    `wanted` and `recorded` map layers to orders: of the output and of the source file. A layer
    missing from `wanted` goes back to the original order. Raises OrderRefused.
    """
    moves: dict[str, Order] = {}
    by_layer = _by_layer(inventory)
    for layer in sorted({*wanted, *recorded}):
        tensors = by_layer.get(layer, ())
        for order in (wanted.get(layer), recorded.get(layer)):
            if order is not None:
                _check_order(inventory, layer, tensors, order)
        positions = _compose(wanted.get(layer), recorded.get(layer))
        if positions != tuple(range(len(positions))):
            moves.update(_moves(inventory, layer, tensors, positions))
    return moves


def _check_order(inventory: Inventory, layer: int, tensors: tuple[Tensor, ...], order: Order) -> None:
    """OrderRefused when this order of the layer's experts is not one, or its meaning would change."""
    count = _expert_count(layer, tensors)
    if sorted(order) != list(range(count)):
        raise OrderRefused(layer, f"the order is not a permutation of its {count} experts")
    if order == tuple(range(count)):
        return
    _refuse_meaning(inventory, layer, tensors)
    groups = inventory.per_layer("expert_group_count", layer + 1, 1)[layer]
    if groups > 1:
        _refuse_split_groups(layer, order, groups)


def _refuse_split_groups(layer: int, order: Order, groups: int) -> None:
    """Group-limited routing scores runs of neighbouring experts: they may move whole, and inside."""
    size = max(len(order) // groups, 1)
    for start in range(0, len(order), size):
        run = order[start : start + size]
        stray = next((expert for expert in run if expert // size != run[0] // size), None)
        if stray is not None:
            why = f"routing is limited to {groups} groups, and expert {stray} would leave its group"
            raise OrderRefused(layer, why)


def _compose(wanted: Order | None, recorded: Order | None) -> Order:
    """Source positions of the output's slices; one of the two orders is given, both are checked."""
    goal = wanted or tuple(range(len(recorded or ())))
    if recorded is None:
        return goal
    place = {expert: position for position, expert in enumerate(recorded)}
    return tuple(place[expert] for expert in goal)


def _by_layer(inventory: Inventory) -> Mapping[int, tuple[Tensor, ...]]:
    layers: dict[int, list[Tensor]] = {}
    for tensor in inventory.tensors:
        layer = part_of(tensor).layer
        if layer is not None:
            layers.setdefault(layer, []).append(tensor)
    return {layer: tuple(tensors) for layer, tensors in layers.items()}


def _expert_count(layer: int, tensors: tuple[Tensor, ...]) -> int:
    if any(is_single_expert(t.name) for t in tensors):
        raise OrderRefused(
            layer, "its experts are separate tensors: convert the model to merged experts first"
        )
    counts = {p.experts for t in tensors if (p := part_of(t)).role is Role.EXPERTS and not is_chunked(t.name)}
    if not counts:
        raise OrderRefused(layer, "it has no routed experts")
    if len(counts) > 1:
        raise OrderRefused(layer, f"its tensors hold {' and '.join(map(str, sorted(counts)))} experts")
    return counts.pop()


def _refuse_meaning(inventory: Inventory, layer: int, tensors: tuple[Tensor, ...]) -> None:
    """Layers in which an expert's number means something else than its place."""
    names = {t.name for t in tensors}
    if f"{block_name(layer)}.ffn_gate_inp.weight" not in names:
        raise OrderRefused(layer, "no router was found in it")
    table = next((n for n in sorted(names) if "tid2eid" in n), None)
    if table or layer < inventory.number("hash_layer_count"):
        why = f"{table or 'its hash table'} routes tokens to experts by number"
        raise OrderRefused(layer, why)
    for tensor in tensors:
        if part_of(tensor).role is Role.UNKNOWN:
            raise OrderRefused(layer, f"{tensor.name} is not known and may depend on expert numbers")


def _moves(
    inventory: Inventory, layer: int, tensors: tuple[Tensor, ...], positions: Order
) -> Iterator[tuple[str, Order]]:
    for tensor in tensors:
        move = _move(inventory, layer, tensor, positions)
        if move is not None:
            _refuse_opaque(layer, tensor, len(move))
            yield tensor.name, move


def _move(inventory: Inventory, layer: int, tensor: Tensor, positions: Order) -> Order | None:
    """How the slices of one tensor move; None when it has no expert axis."""
    role = part_of(tensor).role
    axis, count = tensor.shape[-1], len(positions)
    if role not in (Role.EXPERTS, Role.EXPERT_SMALL, Role.ROUTER):
        return None
    if is_chunked(tensor.name):
        return _chunks(layer, tensor, positions)
    if axis == count and not _is_hidden_scale(inventory, tensor):
        return positions
    per_expert = role is Role.EXPERTS or counts_experts(tensor.name)
    if not per_expert and (axis == 1 or _is_hidden_scale(inventory, tensor)):
        return None  # one scale for the whole tensor, or one per hidden value
    raise OrderRefused(layer, f"{tensor.name} has {axis} slices for {count} experts")


def _is_hidden_scale(inventory: Inventory, tensor: Tensor) -> bool:
    """A scale over the router's input, which has an entry per hidden value and no expert axis."""
    hidden = inventory.number("embedding_length")
    return tensor.name.endswith("ffn_gate_inp.scale") and tensor.shape == (hidden,)


def _chunks(layer: int, tensor: Tensor, positions: Order) -> Order:
    """Chunked experts serve a run of neighbouring experts each: runs must move whole."""
    chunks = tensor.shape[-1]
    if len(positions) % chunks:
        raise OrderRefused(layer, f"{tensor.name} has {chunks} chunks for {len(positions)} experts")
    size = len(positions) // chunks
    runs = [{expert // size for expert in positions[n : n + size]} for n in range(0, len(positions), size)]
    if any(len(run) > 1 for run in runs):
        raise OrderRefused(
            layer, f"{tensor.name} serves {size} neighbouring experts at a time, they would part"
        )
    return tuple(run.pop() for run in runs)


def _refuse_opaque(layer: int, tensor: Tensor, slices: int) -> None:
    """Only slices whose borders are certain may move."""
    if not is_known(tensor.type):
        why = f"{tensor.name} has type {tensor.type}, in which nobody knows where an expert starts"
        raise OrderRefused(layer, why)
    if tensor.size_bytes != tensor_bytes(tensor.type, tensor.shape):
        raise OrderRefused(layer, f"{tensor.name} is longer than its type and shape")
    one = tensor.shape if len(tensor.shape) > 1 else (tensor.shape[0] // slices,)
    try:
        tensor_bytes(tensor.type, one)
    except ValueError:
        raise OrderRefused(layer, f"{tensor.name} is quantised across experts") from None
