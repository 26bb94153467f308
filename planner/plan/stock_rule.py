"""Stock rules: llama.cpp's own ways to place a model, under one name each in plans, benches and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.site import Site

ALL_CPU = "all-cpu"  # no device but the CPU
ONE_GPU = "one-gpu"  # -ngl on one of several GPUs
NGL = "ngl"  # the last N layers on GPUs
CPU_MOE = "cpu-moe"  # -ngl N, all experts on the CPU
N_CPU_MOE = "n-cpu-moe"  # all layers on GPUs, the experts of the first N on the CPU
N_CPU_FFN = "n-cpu-ffn"  # the same with the N largest dense FFNs
FIT = "fit"  # what the engine's own --fit chooses
PINS = "-ot (the pins)"  # in a setting whose placement the pins change
NOT_KEPT = "cannot keep what was asked"  # in place of a setting: none of the rule keeps pins and limits
PLAIN = "--no-op-offload"  # a setting's last word where prompts are not copied to a GPU


@dataclass(frozen=True, slots=True)
class Rule:
    """One setting of a stock rule: a layer device per layer and the head, and units moved to the CPU."""

    name: str
    setting: str
    layer_devices: tuple[str, ...]  # one a layer (speculative blocks included), the output head last
    sites: Mapping[str, Site]  # unit name to site, where it is not on its layer device
