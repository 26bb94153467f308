"""What the plan is for: context, depth, prompt and generation, batch and KV types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

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


class Workload(Record):
    """One use of a model."""

    n_ctx: int = Field(4096, gt=0, le=_MOST)  # cells the KV cache holds, for all sequences together
    depth: Count = 0  # cells filled while the priced token is decoded
    prompt: int = Field(512, ge=0, le=_MOST)  # tokens of a typical prompt
    gen: int = Field(256, gt=0, le=_MOST)  # tokens of a typical answer
    n_seq: int = Field(1, gt=0, le=_MOST)
    n_batch: int = Field(2048, gt=0, le=_MOST)
    n_ubatch: int = Field(512, gt=0, le=_MOST)
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
    def needed_cells(self) -> int:
        """Cells that the use fills: prompt and answer; a depth beyond them is where an answer begins."""
        whole = self.prompt + self.gen if self.gen > 1 else max(self.prompt, 1)
        return whole if self.depth <= whole else self.depth + self.gen


def usual(n_ctx: int, **stated: Any) -> Workload:
    """A workload with what nobody stated filled in.

    A prompt of 512 tokens and an answer of 256, at most half of the context each; the token that is priced
    stands in the middle of the answer.
    """
    half = max(n_ctx // 2, 1)
    fields = {"prompt": min(512, half), "gen": min(256, half), **stated}
    fields.setdefault("depth", fields["prompt"] + fields["gen"] // 2)
    return Workload(n_ctx=n_ctx, **fields)
