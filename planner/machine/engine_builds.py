"""What is known of builds of llama.cpp: their numbers, and models and placements that break them.

The knowledge is data, engine_faults.yaml. A build is known by its number, the one thing that orders
builds: `llama_version()` is the same for hundreds of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from planner.constants import CPU
from planner.model.units import Kind, Unit
from planner.records import Count, Many, Record, load

_FILE = Path(__file__).with_name("engine_faults.yaml")
_MOE_CACHE = 11480  # the first build with moe_cache_size
_NEXTN = 10434  # the first build seen with load_mtp
_NEXTN_FIRST = frozenset({"qwen3next", "qwen35", "qwen35moe"})  # which had it then
# The first one seen to draft with other architectures' blocks alone: b10434 gives their contexts every layer.
_NEXTN_OTHERS = 11549
# b11549; xllamacpp 2026.10.11549; packages that carry the build as 0.10434.0 or 11434.0.0.
_NUMBER = re.compile(r"\bb(\d{4,6})\b|\b20\d\d\.\d+\.(\d{4,6})\b|\b0\.(\d{4,6})\b|\b(\d{4,6})\.0\.\d\b")
# Looked up on the host wherever the rest is, or not loaded.
_APART = (Kind.EMBEDDING, Kind.LOOKUP, Kind.NEXTN, Kind.FOREIGN)


class EngineRange(Record):
    """Builds of llama.cpp by number; 0: no limit."""

    least: Count = 0
    most: Count = 0


class Fault(Record):
    """Something that builds from `first` on, and before `fixed`, cannot do."""

    architectures: Many[str]
    devices: Many[str]  # beginnings of device names; (): any but the CPU alone
    placement: Literal[
        "mixed", "any"
    ]  # mixed: the CPU and another device both hold weights they compute with
    first: int = Field(gt=0, le=2**31 - 1)
    fixed: Count  # 0: not yet
    why: str
    source: str

    def concerns(self, architecture: str, devices: Iterable[str]) -> bool:
        """Whether a model of this architecture, with weights on these devices, meets the fault."""
        if architecture not in self.architectures:
            return False
        names = set(devices)
        if self.placement == "any" and not self.devices:
            return True
        others = {n for n in names if n != CPU and (not self.devices or n.startswith(self.devices))}
        return bool(others) and (self.placement == "any" or CPU in names)

    def breaks(self, build: int) -> bool:
        """Whether a build has the fault; builds of unknown number (0) are believed not to."""
        return build >= self.first and (not self.fixed or build < self.fixed)


class Knowledge(Record):
    """The file."""

    schema_: int = Field(1, alias="schema", ge=1, le=1)
    commits: Mapping[str, int]
    faults: Many[Fault]


@dataclass(frozen=True, slots=True)
class Demands:
    """What loading a plan asks of a build."""

    architecture: str
    devices: tuple[str, ...]  # those whose weights are computed with
    made_for: str = ""  # the engine whose timings the plan rests on; "" for an assumed machine
    least: int = 0  # build numbers; 0: no limit
    most: int = 0

    def refusal(self, engine: str) -> str:
        """Why a build must not load the plan, one line; "" when nothing is known against it."""
        build = build_number(engine)
        if not build:
            return ""
        for fault in faults_of(self.architecture, self.devices):
            if fault.breaks(build):
                return f"b{build} cannot run this placement of {self.architecture}: {sentence(fault)}"
        if build < self.least or 0 < self.most < build:
            return f"the plan is for {span(self.least, self.most)} of llama.cpp, this is b{build}"
        return ""

    def difference(self, engine: str) -> str:
        """What to know of another build than the plan's, or of one without a number; "" when nothing."""
        build = build_number(engine)
        faults = faults_of(self.architecture, self.devices)
        if not build and (self.least or self.most or faults):
            known = "; ".join(map(sentence, faults)) or f"the plan is for {span(self.least, self.most)}"
            return f"{engine} does not tell its build number: {known}"
        if not self.made_for or same_build(engine, self.made_for):
            return ""
        return f"the plan's times were measured with {self.made_for}, this is {engine}: they may differ"


@cache
def knowledge() -> Knowledge:
    """What ships with the program."""
    return load(_FILE.read_text(encoding="utf-8"), Knowledge, _FILE.name)


def build_number(text: str) -> int:
    """The build number in an engine's name, or of the commit it names; 0 when it has none."""
    if found := _NUMBER.search(text):
        return int(next(filter(None, found.groups())))
    return next((n for commit, n in knowledge().commits.items() if commit in text), 0)


def same_build(one: str, other: str) -> bool:
    """Whether two engines are one build: by their numbers where both tell, else by name."""
    numbers = build_number(one), build_number(other)
    return numbers[0] == numbers[1] if all(numbers) else one == other


def computing_devices(units: Iterable[Unit], placed: Mapping[str, str]) -> tuple[str, ...]:
    """The devices whose weights are computed with, sorted; `placed` maps tensors to devices."""
    named = {
        placed[name] for unit in units if unit.kind not in _APART for name in unit.tensors if name in placed
    }
    return tuple(sorted(named))


def faults_of(architecture: str, devices: Iterable[str]) -> tuple[Fault, ...]:
    """Every known fault that this model on these devices meets in some build."""
    names = tuple(devices)
    return tuple(f for f in knowledge().faults if f.concerns(architecture, names))


def mixing_fault(architecture: str, engine: str, devices: Iterable[str]) -> Fault | None:
    """Why weights must not be on the CPU and on others of these devices; None when they may, or unknown."""
    build = build_number(engine)
    found = faults_of(architecture, {CPU, *devices})
    return next((f for f in found if f.placement == "mixed" and f.breaks(build)), None)


def range_of(architecture: str, devices: Iterable[str], *, cache: bool, nextn: bool) -> EngineRange | None:
    """The builds that can load a placement; None when nothing limits them."""
    faults = faults_of(architecture, devices)
    least = max((f.fixed for f in faults), default=0)
    most = min((f.first - 1 for f in faults if not f.fixed), default=0)
    drafts = _NEXTN if architecture in _NEXTN_FIRST else _NEXTN_OTHERS
    least = max(least, _MOE_CACHE if cache else 0, drafts if nextn else 0)
    return EngineRange(least=least, most=most) if least or most else None


def sentence(fault: Fault) -> str:
    """A fault in one sentence."""
    return f"{fault.why}, in {span(fault.first, fault.fixed - 1 if fault.fixed else 0)} ({fault.source})"


def span(least: int, most: int) -> str:
    """A range of builds in words."""
    if least and most:
        return f"builds b{least} to b{most}"
    if least:
        return f"b{least} and later"
    return f"builds up to b{most}" if most else "any build"
