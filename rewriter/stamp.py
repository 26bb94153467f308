"""What a rewritten file says about itself: its source, its plan, and how to go back.

The engine ignores metadata keys it does not know, so the record travels inside the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from planner.constants import EXPERTS_KEY, OWN_PREFIX
from planner.errors import FileProblem, InputError
from planner.model.gguf.expert_orders import damaged, expert_orders, permutation
from planner.model.gguf.header import MAX_ALIGNMENT
from planner.model.gguf.reader import ModelFile
from planner.plan.plan import Plan, to_text, to_text_of_schema_1
from planner.records import digest

PREFIX = OWN_PREFIX
PLAN_DIGEST = PREFIX + "plan_digest"
SOURCE_HEADER = PREFIX + "source.header_digest"
SOURCE_TABLE = PREFIX + "source.table_digest"
SOURCE_ORDER = PREFIX + "source.order"
SOURCE_ALIGNMENT = PREFIX + "source.alignment"
SOURCE_SIZE = PREFIX + "source.size"
SOURCE_TRAILING = PREFIX + "source.trailing"
SOURCE_LOST = PREFIX + "source.lost"
EXPERTS = EXPERTS_KEY
_MOST_BYTES = 2**62
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Stamp:
    """Where a rewritten file comes from."""

    plan_digest: str
    source_header: str  # header digest of the first source
    source_table: str  # its table digest
    source_order: tuple[int, ...]  # for each tensor of this file, its place among the source's
    source_alignment: int  # general.alignment as the source stated it, 0 when it did not
    source_size: int  # bytes of the source when it was one file, those behind its last tensor apart; else 0
    source_trailing: int | None  # bytes behind its last tensor, kept behind the last one here; None: not told
    source_lost: int  # bytes of the source that no rewrite keeps: padding that is not zero, ends of shards
    experts: Mapping[int, tuple[int, ...]]  # layer -> original expert id at each position


@dataclass(eq=False)
class PlanMismatch(InputError):
    """A plan that was made for another model."""

    path: str
    model: str
    plan_model: str
    what: str
    expected: str
    found: str

    def message(self) -> str:
        names = f"{self.plan_model}, not {self.model}"
        digests = f"{self.what} {self.expected[:19]} in the plan, {self.found[:19]} here"
        return f"{self.path}: the plan is for another model: {names} ({digests})"


def plan_digest(plan: Plan) -> str:
    """Digest of the canonical text of a plan."""
    return digest(to_text(plan))


def plan_digests(plan: Plan) -> tuple[str, ...]:
    """The digests under which files that were rewritten by this plan name it: one for each schema so far."""
    return plan_digest(plan), digest(to_text_of_schema_1(plan))


def read_stamp(model: ModelFile) -> Stamp | None:
    """The stamp of a rewritten file, None for any other; FileProblem when it is damaged."""
    header = model.headers[0].header
    if header.get(SOURCE_HEADER) is None:
        return None
    order = _permutation(model, SOURCE_ORDER)
    if len(order) != len(model.inventory.tensors):
        raise _damaged(model, f"{SOURCE_ORDER} has {len(order)} entries")
    alignment = _number(model, SOURCE_ALIGNMENT) or 0
    if alignment & (alignment - 1) or alignment > MAX_ALIGNMENT:
        raise _damaged(model, f"{SOURCE_ALIGNMENT} {alignment} is not a power of two up to 2^30")
    size, weights = _number(model, SOURCE_SIZE) or 0, model.inventory.size_bytes
    if size and size < weights:
        raise _damaged(model, f"{SOURCE_SIZE} {size} is less than the {weights} bytes of the weights")
    return Stamp(
        plan_digest=_digest(model, PLAN_DIGEST),
        source_header=_digest(model, SOURCE_HEADER),
        source_table=_digest(model, SOURCE_TABLE),
        source_order=order,
        source_alignment=alignment,
        source_size=size,
        source_trailing=_number(model, SOURCE_TRAILING),
        source_lost=_number(model, SOURCE_LOST) or 0,
        experts=expert_orders(header, str(model.paths[0])),
    )


def check_plan(model: ModelFile, plan: Plan, path: str) -> None:
    """PlanMismatch unless the plan was made for this model, or for the source it was rewritten from.

    `path` names the plan in the message.
    """
    found = model.inventory.table_digest()
    if plan.model.table_digest != found:
        raise _mismatch(model, plan, path, "tensor table", plan.model.table_digest, found)
    stamp = read_stamp(model)
    headers = {model.inventory.header_digest, *((stamp.source_header,) if stamp else ())}
    if plan.model.header_digest and plan.model.header_digest not in headers:
        expected = plan.model.header_digest
        raise _mismatch(model, plan, path, "header", expected, model.inventory.header_digest)


def _mismatch(model: ModelFile, plan: Plan, path: str, what: str, expected: str, found: str) -> PlanMismatch:
    return PlanMismatch(path, model.inventory.name, plan.model.name, what, expected, found)


def _number(model: ModelFile, key: str) -> int | None:
    """A count of bytes; None where there is no such entry."""
    kv = model.get(key)
    if kv is None:
        return None
    if type(kv.value) is not int or not 0 <= kv.value <= _MOST_BYTES:
        raise _damaged(model, f"{key} is no number of bytes")
    return kv.value


def _digest(model: ModelFile, key: str) -> str:
    text = model.headers[0].header.text(key)
    if not _DIGEST.fullmatch(text):
        raise _damaged(model, f"{key} is not a digest")
    return text


def _permutation(model: ModelFile, key: str) -> tuple[int, ...]:
    return permutation(model.get(key), key, str(model.paths[0]))


def _damaged(model: ModelFile, what: str) -> FileProblem:
    return damaged(str(model.paths[0]), what)
