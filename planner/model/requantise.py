"""What if some tensors had other types: the same shapes, other sizes; and the map for llama-quantize."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import OptionProblem
from planner.model.ggml_types import BY_NAME, tensor_bytes
from planner.model.inventory import Inventory, Tensor
from planner.quoting import Unquotable, quantize_name

OPTION = "--quant"
_QUANTISED = re.compile(r".+\.weight")


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors whose name the pattern finds get this type."""

    pattern: str
    type: str


def parse_rule(text: str) -> Rule:
    """A rule from `REGEX=TYPE`; OptionProblem for a bad expression or an unknown type."""
    pattern, equals, name = text.rpartition("=")
    known = {each.lower(): each for each in BY_NAME}
    if not equals or not pattern:
        raise OptionProblem(OPTION, text, "expected REGEX=TYPE, for example 'ffn_.*_exps=iq2_xs'")
    if name.lower() not in known:
        raise OptionProblem(OPTION, text, f"no such type; for example {', '.join(sorted(known)[:8])}")
    try:
        re.compile(pattern)
    except re.error as problem:
        raise OptionProblem(OPTION, text, f"not a regular expression: {problem}") from None
    return Rule(pattern, known[name.lower()])


def requantised(inventory: Inventory, rules: Sequence[Rule]) -> Inventory:
    """The inventory as it would be after quantising again; the last rule that finds a name counts.

    Only weights of two and more axes change. Raises OptionProblem for a rule that changes nothing and
    for a row that is not whole blocks.
    """
    changed: set[Rule] = set()
    tensors = []
    for tensor in inventory.tensors:
        rule = next((r for r in reversed(rules) if re.search(r.pattern, tensor.name)), None)
        if rule is None or len(tensor.shape) < 2 or not _QUANTISED.fullmatch(tensor.name):
            tensors.append(tensor)
            continue
        changed.add(rule)
        tensors.append(_retyped(tensor, rule))
    for rule in rules:
        if rule not in changed:
            raise OptionProblem(OPTION, f"{rule.pattern}={rule.type}", "changes no tensor of this model")
    return inventory.model_copy(update={"tensors": tuple(tensors), "header_digest": ""})


def _retyped(tensor: Tensor, rule: Rule) -> Tensor:
    try:
        size = tensor_bytes(rule.type, tensor.shape)
    except ValueError as problem:
        raise OptionProblem(OPTION, f"{rule.pattern}={rule.type}", f"{tensor.name}: {problem}") from None
    return tensor.model_copy(update={"type": rule.type, "size_bytes": size})


def tensor_types(before: Inventory, after: Inventory) -> str:
    """The changes as a `llama-quantize --tensor-type-file`: one `name=type` a line.

    Raises OptionProblem for a tensor whose name such a file cannot hold.
    """
    changes = [
        f"{_map_name(new.name)}={new.type.lower()}"
        for old, new in zip(before.tensors, after.tensors, strict=True)
        if old.type != new.type
    ]
    return "".join(f"{line}\n" for line in changes)


def _map_name(tensor: str) -> str:
    try:
        return quantize_name(tensor.removesuffix(".weight"))
    except Unquotable as problem:
        raise OptionProblem("--tensor-types", "", str(problem)) from None
