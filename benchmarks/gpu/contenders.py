"""What is compared at equal VRAM: the stock rules of llama.cpp, and stripes."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.model.inventory import Inventory
from planner.plan.load_spec import LoadSpec
from planner.site import Site, SiteKind
from planner.workload import Workload
from runtime.stripes.mapped_range import rounded

GPU = "CUDA0"
_FFN = re.compile(r"blk\.(\d+)\.(ffn_(?:gate|up|down|gate_up)(?:_exps)?)\.weight")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model that rules work with; where it is dense its FFNs stand for experts."""

    n_layers: int  # all blocks
    moe_layers: tuple[int, ...]
    n_experts: int
    expert_bytes: int  # of all layers
    layer_bytes: tuple[int, ...]
    slabs: tuple[int, ...]  # bytes of one expert in each expert tensor of a layer
    kinds: tuple[str, ...]  # of these tensors: ffn_gate_exps, ffn_up_exps …
    dense: bool

    def hot_bytes(self, k: int) -> int:
        """VRAM of one layer's k hottest experts."""
        return sum(rounded(k * slab) for slab in self.slabs)


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to load a model."""

    name: str
    setting: str
    spec: LoadSpec


def shape_of(inventory: Inventory) -> Shape:
    """Sizes from the tensor table."""
    n_layers = inventory.number("block_count")
    dense = not any(t.name.endswith("_exps.weight") for t in inventory.tensors)
    n_experts = 1 if dense else inventory.number("expert_count")
    layers = [0] * n_layers
    routed: set[int] = set()
    experts, slabs = 0, dict[str, int]()
    for tensor in inventory.tensors:
        if found := re.match(r"blk\.(\d+)\.", tensor.name):
            layers[int(found[1])] += tensor.size_bytes
        found = _FFN.fullmatch(tensor.name)
        if found and (dense or found[2].endswith("_exps")):
            routed.add(int(found[1]))
            slabs[found[2]] = tensor.size_bytes // n_experts
            experts += tensor.size_bytes
    return Shape(
        n_layers=n_layers,
        moe_layers=tuple(sorted(routed)),
        n_experts=n_experts,
        expert_bytes=experts,
        layer_bytes=tuple(layers),
        slabs=tuple(slabs.values()),
        kinds=tuple(slabs),
        dense=dense,
    )


def whole(shape: Shape, work: Workload) -> Contender:
    """Everything in VRAM."""
    return Contender("all in VRAM", "-ngl 99", _spec(shape, work, shape.n_layers + 1, ()))


def n_cpu_moe(shape: Shape, work: Workload, share: float) -> Contender:
    """Experts of the first layers on the CPU, as few as a `share` of all expert bytes in VRAM leaves."""
    on_cpu = layers_on_cpu(shape, share)
    kinds = "|".join(shape.kinds)
    overrides = tuple((rf"^blk\.{layer}\.({kinds})\.", "CPU") for layer in shape.moe_layers[:on_cpu])
    spec = _spec(shape, work, shape.n_layers + 1, overrides)
    rule = f"-ot FFN of the first {on_cpu}=CPU" if shape.dense else f"--n-cpu-moe {on_cpu}"
    return Contender("n-cpu-moe", f"{rule} --no-mmap", spec)


def layers_on_cpu(shape: Shape, share: float) -> int:
    """How many first layers of experts do not fit into a share of all expert bytes."""
    return len(shape.moe_layers) - int(share * len(shape.moe_layers) + 1e-9)


def n_gpu_layers(shape: Shape, work: Workload, budget_bytes: int, fixed_bytes: int) -> Contender:
    """The most whole layers, from the last, that fit beside `fixed_bytes`."""
    count, used = 0, fixed_bytes
    for size in reversed(shape.layer_bytes):
        if used + size > budget_bytes:
            break
        count, used = count + 1, used + size
    return Contender("ngl", f"-ngl {count + 1} --no-mmap", _spec(shape, work, count + 1, ()))


def fit(folder: Path, model: Path, shape: Shape, work: Workload, margin_mib: int) -> Contender:
    """What llama.cpp's own fitting chooses when `margin_mib` must stay free."""
    command = [folder / "llama-fit-params", "-m", model, "-c", work.n_ctx, "-fitt", margin_mib, "-fa", "on"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=True, timeout=60, cwd=folder
    )
    words = shlex.split(next(line for line in done.stdout.splitlines() if "-ngl" in line))
    layers = int(words[words.index("-ngl") + 1])
    listed = words[words.index("-ot") + 1].split(",") if "-ot" in words else []
    overrides = tuple((pattern, buffer) for pattern, _, buffer in (one.rpartition("=") for one in listed))
    total = shape.n_layers + 1
    spec = _spec(shape, work, total if layers < 0 else min(layers, total), overrides)
    return Contender("fit", f"--fit on --fit-target {margin_mib} --no-mmap", spec)


def stripes(shape: Shape, work: Workload, share: float) -> Contender:
    """Hot experts of every layer in VRAM, as many as `share` of all expert bytes pays for in granules."""
    budget = int(share * shape.expert_bytes)
    layers, sizes = shape.moe_layers, [shape.hot_bytes(k) for k in range(shape.n_experts + 1)]
    narrow = max(k for k, size in enumerate(sizes) if size * len(layers) <= budget)
    steps = [k for k in range(narrow + 1, shape.n_experts) if sizes[k + 1] > sizes[k]]
    wide = min([*steps, shape.n_experts])
    n_wide = (budget - sizes[narrow] * len(layers)) // max(sizes[wide] - sizes[narrow], 1)
    chosen = {at * len(layers) // n_wide for at in range(n_wide)} if n_wide else set()
    widths = {layer: wide if index in chosen else narrow for index, layer in enumerate(layers)}
    text = f"{narrow} of {shape.n_experts} experts, {wide} in {len(chosen)} layers"
    return Contender("stripes", text, striped(shape, work, widths))


def striped(shape: Shape, work: Workload, widths: dict[int, int]) -> LoadSpec:
    """A spec with a width for each striped layer."""
    overrides = [
        (rf"^blk\.{layer}\.({'|'.join(shape.kinds)})\.weight$", str(Site(SiteKind.STRIPE, GPU, k)))
        for layer, k in sorted(widths.items())
    ]
    return _spec(shape, work, shape.n_layers + 1, overrides, mmap=True)


def _spec(
    shape: Shape, work: Workload, layers: int, overrides: Sequence[tuple[str, str]], mmap: bool = False
) -> LoadSpec:
    # Stock loads are faster without mmap: host weights then lie in pinned memory, prefill uploads fly.
    return LoadSpec(
        devices=(GPU,),
        tensor_split=(shape.n_layers + 1,),
        n_gpu_layers=layers,
        overrides=tuple(overrides),
        workload=work,
        use_mmap=mmap,
    )
