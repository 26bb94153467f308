"""What the plan is for: context, depth, prompt and generation, batch and KV types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from planner.constants import CELL_STEP, MAX_SEQUENCES
from planner.records import Count, Many, Record

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
KvType = Annotated[str, Field(max_length=32)]


class CacheType(Record):
    """A type of the KV cache that a fork of the engine adds."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")
    values: int = Field(gt=0, le=4096)  # of a block
    block_bytes: int = Field(gt=0, le=1 << 16)
    # Those that compute attention on it, by the beginnings of their names: CUDA, Vulkan0, CPU.
    devices: Annotated[Many[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=64)]


_MOST = 2**31 - 1  # the engine counts in 32 bits and takes what is above without a word
ENGINE_BATCH, ENGINE_UBATCH = 2048, 512  # tokens handed over and computed at once, where it is not told


class Workload(Record):
    """One use of a model."""

    n_ctx: int = Field(4096, gt=0, le=_MOST)  # cells the KV cache holds, for all sequences together
    depth: Count = 0  # cells filled while the priced token is decoded
    prompt: int = Field(512, ge=0, le=_MOST)  # tokens of a typical prompt
    gen: int = Field(256, gt=0, le=_MOST)  # tokens of a typical answer
    n_seq: int = Field(1, gt=0, le=MAX_SEQUENCES)
    n_batch: int = Field(ENGINE_BATCH, gt=0, le=_MOST)
    n_ubatch: int = Field(ENGINE_UBATCH, gt=0, le=_MOST)
    # Of a fork; absent: the engine's own alone. Before the types that may be of it.
    cache_types: Annotated[Many[CacheType], Field(max_length=64)] | None = None
    type_k: KvType = "f16"
    type_v: KvType = "f16"
    flash_attn: bool = True
    mtp: bool = False  # load NextN/MTP blocks

    @field_validator("type_k", "type_v")
    @classmethod
    def _known(cls, name: str, info: ValidationInfo) -> str:
        known = (*KV_TYPES, *(one.name for one in info.data.get("cache_types") or ()))
        if name not in known:
            listed = ", ".join(f"'{each}'" for each in known[:-1])
            raise PydanticCustomError("kv_type", f"Input should be {listed} or '{known[-1]}'")
        return name

    @property
    def forks(self) -> Mapping[str, CacheType]:
        """The types of a fork that K or V have, by name."""
        used = (self.type_k, self.type_v)
        return {one.name: one for one in self.cache_types or () if one.name in used}

    @property
    def cells_each(self) -> int:
        """Cells of one sequence: the engine divides the cache evenly, in whole steps."""
        return self.n_ctx if self.n_seq == 1 else cells_each(self.n_ctx, self.n_seq)

    @property
    def needed_cells(self) -> int:
        """Cells of a sequence that are filled: prompt and answer; deeper, an answer begins at the depth."""
        whole = self.prompt + self.gen if self.gen > 1 else max(self.prompt, 1)
        return whole if self.depth <= whole else self.depth + self.gen

    @property
    def least_ctx(self) -> int:
        """The smallest context, of all sequences together, that the use fits into."""
        return min(self.needed_cells * self.n_seq, self.n_ctx)


def cells_each(n_ctx: int, n_seq: int) -> int:
    """Cells of one of several sequences: the whole in full steps, divided, in full steps again."""
    steps = -(-n_ctx // CELL_STEP)
    return -(-steps // n_seq) * CELL_STEP


def usual(n_ctx: int, **stated: Any) -> Workload:
    """A workload with what nobody stated filled in.

    A prompt of 512 tokens and an answer of 256, at most half of a sequence's cells each; the token that is
    priced stands in the middle of the answer.
    """
    n_seq = stated.get("n_seq", 1)
    half = max((n_ctx if n_seq <= 1 else cells_each(n_ctx, n_seq)) // 2, 1)
    fields = {"prompt": min(512, half), "gen": min(256, half), **stated}
    fields.setdefault("depth", fields["prompt"] + fields["gen"] // 2)
    return Workload(n_ctx=n_ctx, **fields)
