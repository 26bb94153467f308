"""The nearest placement that stock llama.cpp tools can be told, and their options for it.

The tools list no CPU among devices, split a device list of at most 15 entries, and know no stripes. What
they cannot express is said in `Stock.notes` and replaced by the nearest legal form: layers of the CPU
between device layers keep their weights there by overrides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.constants import CPU, STOCK_DRAFT
from planner.errors import InputError
from planner.plan.load_spec import LoadSpec
from planner.plan.stock import stock_spec
from runtime.tools.expert_rule import ExpertRule

LOAD_MODE = 10434  # the first build seen with --load-mode; b10068 has --no-mmap alone
_RPC = re.compile(r"(RPC\d*)\[(.+)\]")


@dataclass(eq=False)
class Inexpressible(InputError):
    """A pattern the option parser of a tool would break."""

    pattern: str

    def message(self) -> str:
        return (
            f"override {self.pattern}: a comma or an equals sign in a pattern breaks --override-tensor: "
            "give --inventory to have it spelt anew"
        )


@dataclass(frozen=True, slots=True)
class Stock:
    """A placement in the terms of the stock tools."""

    spec: LoadSpec
    rpc: tuple[str, ...]  # servers to register, in order
    notes: tuple[str, ...]  # what could not be said, and what stands there instead
    exact: bool
    mmproj: str = ""  # path of a vision projector to load beside the model
    mmproj_on_cpu: bool = False
    draft: str = ""  # path of a draft model
    draft_device: str = ""  # where it computes; "": the tool's choice
    draft_tokens: int = 0  # drafted a step; 0: the usual number
    draft_experts_on_host: bool = False
    ngrams: bool = False  # what followed the last tokens before is drafted
    rule: ExpertRule | None = None  # stands for overrides of `spec`
    drafts: bool = True  # False: nothing is drafted, not even by the model's own NextN block
    checkpoint_bytes: int = 0  # host memory of one checkpoint of one slot; 0: none are made, or not known
    least: int = 0  # the oldest build that shall take the options; 0: not known

    @property
    def devices(self) -> tuple[str, ...]:
        """Device names as the tools print them."""
        return tuple(_short(device) for device in self.spec.devices)

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """The overrides to spell out: those that no rule of the tool's own stands for."""
        return self.rule.others if self.rule else self.spec.overrides


def stock(spec: LoadSpec, n_blocks: int) -> Stock:
    """The nearest placement the tools can be told; `n_blocks` counts NextN blocks. Raises Inexpressible."""
    for pattern, _ in spec.overrides:
        if cut_by_parsers(pattern):
            raise Inexpressible(pattern)
    legal = stock_spec(spec, n_blocks)
    notes = legal.notes
    rpc = dict.fromkeys(m[2] for device in legal.devices if (m := _RPC.fullmatch(device)))
    return Stock(replace(legal, notes=spec.notes), tuple(rpc), notes, len(notes) == 0)


def cut_by_parsers(pattern: str) -> bool:
    """Whether the option parsers of the tools would cut a pattern."""
    return bool(set(pattern) & set(",="))


def options(plan: Stock, model: str) -> list[tuple[str, str]]:
    """Long options and their values that llama-server and llama-cli share, in a fixed order."""
    spec, work = plan.spec, plan.spec.workload
    found = [("--rpc", ",".join(plan.rpc))] if plan.rpc else []
    found += [
        ("--model", model),
        ("--device", ",".join(plan.devices) or "none"),
        ("--n-gpu-layers", str(spec.n_gpu_layers)),
    ]
    if len(spec.devices) > 1 and any(spec.tensor_split):
        found.append(("--tensor-split", ",".join(map(str, spec.tensor_split))))
    if plan.overrides:
        found.append(("--override-tensor", ",".join(f"{p}={b}" for p, b in plan.overrides)))
    if plan.rule:
        found.append(plan.rule.option)
    found += [
        # Left on, it would change whatever is not set here.
        ("--fit", "off"),
        ("--ctx-size", str(work.n_ctx)),
        ("--parallel", str(work.n_seq)),
        ("--batch-size", str(max(work.n_batch, work.n_ubatch))),
        ("--ubatch-size", str(work.n_ubatch)),
        ("--flash-attn", "on" if work.flash_attn else "off"),
        ("--cache-type-k", work.type_k),
        ("--cache-type-v", work.type_v),
        *_loading(plan),
    ]
    if plan.mmproj:
        found.append(("--mmproj", plan.mmproj))
        if plan.mmproj_on_cpu:
            found.append(("--no-mmproj-offload", ""))
    if plan.ngrams and plan.drafts:
        # Their length has an option of its own. ngram-simple never drafts less than the 12 tokens it looks up
        # by, whatever it is told (b10068); this one keeps to its length.
        found += [
            ("--spec-type", "ngram-map-k"),
            ("--spec-ngram-map-k-size-m", str(plan.draft_tokens or STOCK_DRAFT)),
        ]
    elif plan.draft and plan.drafts:
        # Without the type the draft model is loaded and never asked (b10434). A draft with other KV types
        # than the model's is refused or slow.
        found += [
            ("--spec-type", "draft-simple"),
            ("--model-draft", plan.draft),
            ("--cache-type-k-draft", work.type_k),
            ("--cache-type-v-draft", work.type_v),
        ]
        if plan.draft_device:
            device = "none" if plan.draft_device == CPU else _short(plan.draft_device)
            found += [("--spec-draft-device", device), ("--spec-draft-ngl", "all")]
        if plan.draft_experts_on_host:
            found.append(("--spec-draft-cpu-moe", ""))
    elif work.mtp and plan.drafts:
        # The block's own cache is of the draft's types, f16 unless told (b10434).
        found += [
            ("--spec-type", "draft-mtp"),
            ("--cache-type-k-draft", work.type_k),
            ("--cache-type-v-draft", work.type_v),
        ]
    if plan.drafts and (plan.draft or work.mtp) and not plan.ngrams:
        # Said always: the plan counts as many copies of a recurrent state.
        found.append(("--spec-draft-n-max", str(plan.draft_tokens or STOCK_DRAFT)))
    if spec.threads:
        found.append(("--threads", str(spec.threads)))
    if spec.cache_bytes:
        found.append(("--moe-cache-mib", str(spec.cache_bytes // 2**20)))  # b11480 and later
    if not spec.use_extra_bufts:
        found.append(("--no-repack", ""))
    if not spec.op_offload:
        found.append(("--no-op-offload", ""))
    if spec.swa_full:
        found.append(("--swa-full", ""))
    return found


def _loading(plan: Stock) -> list[tuple[str, str]]:
    """How the file is read, in the words of the oldest build: later ones take the older spelling too."""
    mmap = plan.spec.use_mmap
    if 0 < plan.least < LOAD_MODE:
        return [] if mmap else [("--no-mmap", "")]  # mapped unless told
    return [("--load-mode", "mmap" if mmap else "none")]


# Option to the environment variable the tools read instead.
ENVIRONMENT: Mapping[str, str] = {
    "--rpc": "LLAMA_ARG_RPC",
    "--model": "LLAMA_ARG_MODEL",
    "--device": "LLAMA_ARG_DEVICE",
    "--n-gpu-layers": "LLAMA_ARG_N_GPU_LAYERS",
    "--tensor-split": "LLAMA_ARG_TENSOR_SPLIT",
    "--override-tensor": "LLAMA_ARG_OVERRIDE_TENSOR",
    "--cpu-moe": "LLAMA_ARG_CPU_MOE",
    "--n-cpu-moe": "LLAMA_ARG_N_CPU_MOE",
    "--fit": "LLAMA_ARG_FIT",
    "--ctx-size": "LLAMA_ARG_CTX_SIZE",
    "--parallel": "LLAMA_ARG_N_PARALLEL",
    "--batch-size": "LLAMA_ARG_BATCH",
    "--ubatch-size": "LLAMA_ARG_UBATCH",
    "--flash-attn": "LLAMA_ARG_FLASH_ATTN",
    "--cache-type-k": "LLAMA_ARG_CACHE_TYPE_K",
    "--cache-type-v": "LLAMA_ARG_CACHE_TYPE_V",
    "--load-mode": "LLAMA_ARG_LOAD_MODE",
    "--no-mmap": "LLAMA_ARG_NO_MMAP",
    "--mmproj": "LLAMA_ARG_MMPROJ",
    "--no-mmproj-offload": "LLAMA_ARG_NO_MMPROJ_OFFLOAD",
    "--model-draft": "LLAMA_ARG_SPEC_DRAFT_MODEL",
    "--cache-type-k-draft": "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
    "--cache-type-v-draft": "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
    "--spec-draft-n-max": "LLAMA_ARG_SPEC_DRAFT_N_MAX",
    "--spec-draft-ngl": "LLAMA_ARG_N_GPU_LAYERS_DRAFT",
    "--spec-draft-cpu-moe": "LLAMA_ARG_SPEC_DRAFT_CPU_MOE",
    "--spec-type": "LLAMA_ARG_SPEC_TYPE",
    "--threads": "LLAMA_ARG_THREADS",
    "--moe-cache-mib": "LLAMA_ARG_MOE_CACHE_MIB",
    "--no-repack": "LLAMA_ARG_NO_REPACK",
    "--swa-full": "LLAMA_ARG_SWA_FULL",
}


def _short(device: str) -> str:
    found = _RPC.fullmatch(device)
    return found[1] if found else device
