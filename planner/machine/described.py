"""A machine from its parts' published figures: assumed, not measured, and the same for the same words.

The rates are those that the shipped descriptions were made with. Their sources: memory of a card at 0.85 of
the vendor's figure (an RTX 4090 copies at 918-924 of 1008 GB/s, batch-1 kernels reach less); DDR5 at 62 of 96
(AIDA read, 9800X3D), DDR4 at 43.7 of 51.2 (arXiv 2607.10183, figure 9), soldered LPDDR5 at 0.58 for the cores
(as DDR5, with fewer prefetchers: assumed), many channels at half; PCIe 4 x16 at
25.5/26.5 GB/s (NVIDIA/nvbandwidth#15), PCIe 5 x16 at 56.3/57.3 (tinygrad/open-gpu-kernel-modules#29), other
widths in proportion; prompts by an RTX 4090 (10359 t/s of 8B Q4_0, ggml-org/llama.cpp#7676) or 3090 (3593 t/s
of Q6_K, #7860), scaled by nominal FP32; Radeons by
a third of an RTX 4090 for an RX 9070 XT (assumed), Arc by a B580 (2336 t/s of 7B Q4_K_M with SYCL,
intel/ipex-llm#12991).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.errors import OptionProblem
from planner.machine.cards import Card
from planner.machine.profile import Calibration, Device, Fingerprint, Link, Profile

_MIB, _GIB, _GB = 2**20, 2**30, 10**9
_VRAM_SHARE = 0.85
_PROMPT = {  # FLOP/s at prompts, per nominal TFLOPS
    "ampere": 58e12 / 36,
    "ada": 195e12 / 82.58,
    "blackwell": 195e12 / 82.58,
    "radeon": 55e12 / 48.66,
    "arc": 35.6e12 / 13.67,
}
_CUDA = ("ampere", "ada", "blackwell")
_COPY = {3: (12.75, 13.25), 4: (25.5, 26.5), 5: (56.3, 57.3)}  # GB/s of 16 lanes, to the card and back
_LANES = (1, 2, 4, 8, 16)
_IN_KERNEL = 0.7  # of copies
# Share of nominal, FLOP/s of a core. A channel has 64 bits, of soldered memory too.
_DDR = {"DDR4": (43.7 / 51.2, 62.5e9), "DDR5": (62 / 96, 100e9), "LPDDR5": (0.58, 100e9)}
_MANY_CHANNELS = 4  # above: a server
_SERVER_SHARE = 0.5
_MEMORY = re.compile(r"(ddr[45]|lpddr5)(x?)-([0-9]{4,5})(?:x([0-9]{1,2}))?", re.ASCII | re.IGNORECASE)
_PCIE = re.compile(r"([345])(?:\.0)?x([0-9]{1,2})", re.ASCII | re.IGNORECASE)
_MOST_CORES = 512
# A small operator in a CUDA graph, of fast cards and others: what Qwen3-30B-A3B on an RTX 4090 (261 tokens/s,
# sylvanus4/ktransformers-moe-offload-bench) and LLaMA 7B on an RTX 3090 leave beside the reading of weights.
_GRAPH_NS = (1200, 2000)
# A small operator of all cores: 16 us were fitted on 16 Xeon cores, GDN layers of a Ryzen 9900X say 10.
_CPU_SMALL_NS = 10_000


@dataclass(frozen=True, slots=True)
class Parts:
    """What a person knows of a machine."""

    card: Card | None  # None: no GPU
    vram_bytes: int
    ram_bytes: int
    memory: str  # ddr5-6000, ddr5-4800x12
    pcie: str  # of the slot: 4x16; "": as the card
    cores: int


def described(parts: Parts) -> Profile:
    """The assumed profile of a machine; OptionProblem for a memory or slot that is none."""
    kind, rate, channels = _memory(parts.memory)
    card = parts.card
    memory = f"{kind}-{rate} x{channels}"
    host = _host(parts, kind, rate, channels, memory)
    gpu = _gpu(card, parts.vram_bytes) if card else None
    generation, lanes = _slot(card, parts.pcie) if card else (0, 0)
    slot = f"PCIe {generation} x{lanes}"
    what = f"{card.name}, {parts.vram_bytes / _GIB:g} GiB, {slot}" if card else "no GPU"
    words = [card.name, f"{parts.vram_bytes / _GIB:g}gib", slot] if card else ["cpu-only"]
    words += [memory, f"{parts.ram_bytes / _GIB:g}gib", f"{parts.cores}c"]
    return Profile(
        schema_=1,
        name="-".join(re.sub(r"[^a-z0-9.]+", "", word.lower()) for word in words),
        measured=False,
        source=f"assumed, not measured; {what}; {parts.cores} cores, "
        f"{parts.ram_bytes / _GIB:g} GiB {memory}. "
        f"{_sources(card)}Rates as in the shipped descriptions.",
        created="",
        fingerprint=Fingerprint(
            cpu=f"{parts.cores}-core, {memory}",
            cores=parts.cores,
            memory_bytes=parts.ram_bytes,
            os="linux",
            engine="",
        ),
        devices=(gpu, host) if gpu else (host,),
        links=_links(gpu, generation, lanes) if gpu else (),
        calibrations=(_calibration(gpu, generation),),
    )


def _sources(card: Card | None) -> str:
    """Where the card's figures stand."""
    if card is None:
        return ""
    nominal = f"Nominal {card.bandwidth} GB/s, {card.fp32:g} TFLOPS"
    return (
        f"{nominal} ({', '.join(card.sources)} in cards.yaml). " if card.sources else f"{nominal} (given). "
    )


def _memory(text: str) -> tuple[str, int, int]:
    """Kind (DDR5, LPDDR5X), MT/s and channels of 64 bits."""
    match = _MEMORY.fullmatch(text.replace(" ", ""))
    soldered = match is not None and match[1].lower() == "lpddr5"
    if match is None or not 1 <= int(match[4] or 2) <= 24 or (match[2] and not soldered):
        known = "expected ddr5-6000, lpddr5x-7500, or with channels of 64 bits ddr5-4800x12"
        raise OptionProblem("--memory", text, known)
    return f"{match[1]}{match[2]}".upper(), int(match[3]), int(match[4] or 2)


def _slot(card: Card, text: str) -> tuple[int, int]:
    """Generation and lanes that both card and slot have."""
    if not (card.pcie or text):
        raise OptionProblem("--pcie", "", f"no source says how the {card.name} is connected: give 4x16 or so")
    found = []
    for each in filter(None, (card.pcie, text)):
        match = _PCIE.fullmatch(each.replace(" ", "").lower().removeprefix("pcie"))
        if match is None or int(match[2]) not in _LANES:
            raise OptionProblem("--pcie", each, "expected generation and lanes: 4x16, 5x8")
        found.append((int(match[1]), int(match[2])))
    return min(g for g, _ in found), min(n for _, n in found)


def _host(parts: Parts, kind: str, rate: int, channels: int, memory: str) -> Device:
    if not 1 <= parts.cores <= _MOST_CORES:
        raise OptionProblem("--cpu", str(parts.cores), "expected the number of cores")
    share, per_core = _DDR[kind.removesuffix("X")]
    if channels > _MANY_CHANNELS:
        share = _SERVER_SHARE
    kept = (6 if parts.ram_bytes <= 128 * _GIB else 16) * _GIB
    return Device(
        name="CPU",
        kind="cpu",
        description=f"{parts.cores} cores, {memory}",
        memory_bytes=parts.ram_bytes,
        free_bytes=max(parts.ram_bytes - kept, 0),
        bandwidth_bytes_per_s=_tenth(rate * 8 * channels * share / 1000),
        flops_per_s=round(parts.cores * per_core * (0.875 if parts.cores > 8 else 1)),
        op_overhead_ns=_CPU_SMALL_NS,
        threads=parts.cores,
    )


def _gpu(card: Card, vram: int) -> Device:
    cuda = card.family in _CUDA
    context = (320 if cuda else 256) * _MIB
    flops = round(card.fp32 * _PROMPT[card.family] / 1e12) * 10**12
    overhead = _GRAPH_NS[0] if flops >= 100e12 else _GRAPH_NS[1]
    return Device(
        name="CUDA0" if cuda else "Vulkan0",
        kind="gpu",
        description=card.name,
        memory_bytes=vram,
        free_bytes=max(vram - context - 80 * _MIB, 0),
        bandwidth_bytes_per_s=round(card.bandwidth * _VRAM_SHARE) * _GB,
        flops_per_s=max(flops, 10**12),
        op_overhead_ns=overhead if cuda else 5000,
        context_bytes=context,
        max_alloc_bytes=0 if cuda else 4 * _GIB,
    )


def _links(gpu: Device, generation: int, lanes: int) -> tuple[Link, ...]:
    there, back = (_tenth(rate * lanes / 16 - 0.01) for rate in _COPY[generation])
    cuda = gpu.name.startswith("CUDA")
    latency = 9000 if cuda else 20000
    reads = _tenth(there / _GB * _IN_KERNEL) if cuda else 0
    return (
        Link(
            source="CPU",
            target=gpu.name,
            bandwidth_bytes_per_s=there,
            latency_ns=latency,
            zero_copy_bytes_per_s=reads,
        ),
        Link(source=gpu.name, target="CPU", bandwidth_bytes_per_s=back, latency_ns=latency),
    )


def _calibration(gpu: Device | None, generation: int) -> Calibration:
    """Changes of device: 25-35 us with CUDA (boundary pairs of 41 us were measured on an RTX 5090)."""
    if gpu is None:
        return Calibration(model="", split_ns=0, mixed_ns=0, token_ns=250_000)
    split = 45_000 if not gpu.name.startswith("CUDA") else 20_000 if generation > 4 else 30_000
    return Calibration(model="", split_ns=split, mixed_ns=500_000, token_ns=250_000)


def _tenth(gb_per_s: float) -> int:
    """GB/s to the nearest tenth, in bytes."""
    return round(gb_per_s * 10) * _GB // 10
