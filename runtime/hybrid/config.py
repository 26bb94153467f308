"""Which experts live on the device and how the rest is computed: the native library's settings as text.

The same text goes to the library in this process and, as a file that ATSPLAN_HYBRID names, to stock tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.quoting import word

ENVIRONMENT = "ATSPLAN_HYBRID"
LIBRARY = "GGML_BACKEND_PATH"  # of ggml's loader
MEMORIES = ("pinned", "plain", "mapped")


@dataclass(frozen=True, slots=True)
class Resident:
    """The experts that have slots in a block of `n_experts`, in the order of the slots."""

    n_experts: int
    experts: tuple[int, ...]
    guests: int | None = None  # slots for experts of one step; None: as many as other blocks have

    @property
    def words(self) -> str:
        """A block's line after its number."""
        guests = "" if self.guests is None else f" {self.guests}"
        return f"{self.n_experts} {','.join(map(str, self.experts)) or '-'}{guests}"


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of one hybrid device."""

    device: str = ""  # to wrap, for stock tools; "": the first GPU
    name: str = ""  # of the wrapper; "": HYBRID0
    residents: Mapping[int, Resident] = field(default_factory=dict)  # by block
    slots: int = 0  # of the blocks that are not in `residents`: their first experts
    guests: int = 0  # slots for experts that are uploaded for one step, where a line says no number
    stage: int = -1  # experts of a layer that a prompt may bring at once; -1 all, 0 none
    banks: int = 2  # of the stage; 2: a layer's experts arrive while the layer before computes
    ring: bool | None = None  # whether prompts bring unlocked pages through locked memory; None: where faster
    ring_chunk: int = 0  # bytes of one chunk of it (tests); 0: the library's own
    memory: str = "pinned"  # of the experts on the host: one of MEMORIES
    threads: int = 0  # of the CPU lane; 0: the engine's
    cpu_tokens: int = 64  # batches up to this many tokens may use the CPU lane
    cpu_bytes_us: int = 0  # weights that the CPU lane reads in a microsecond; 0: measured, now and then
    bus_bytes_us: int = 0
    policy: str = "static"  # who stays in the slots: static, lru, lfu, or schedule (tests)
    half_life: int = 64  # tokens, of lfu's counts
    protect: int = 0  # first experts of each line that never leave
    upload_bytes: int = 0  # a block and step may bring, saved up until they are an expert's
    refill_bytes: int = 0  # and once after a prompt
    least_misses: int = 0  # > 0: experts come on demand, in steps that miss so many
    lockstep: bool = False  # steps wait for what was sent: counts can be told
    moves: tuple[tuple[int, int, int, int], ...] = ()  # schedule: step, block, expert, slot
    report: str = ""  # file for statistics, written when a model is freed
    report_ms: int = 0  # and as often while it is loaded; 0: not then
    orders: str = ""  # file that is looked at as often: other residents while it runs (runtime.hybrid.orders)
    quiet: bool = True
    regions: bool = True  # False: every product by itself
    ahead: bool = True  # without guests: what is resident begins before the host knows the choices
    merge: bool = True  # an expert's matrices come in one strided copy where they lie at equal distances
    fault: str = ""  # seeded by tests

    def text(self) -> bytes:
        """One setting a line; quoting.Unquotable for a name that is not one word."""
        numbers: list[str] = ["slots", "guests", "stage", "banks", "threads"]
        numbers += ["cpu_tokens", "cpu_bytes_us", "bus_bytes_us"]
        texts = ("device", "name", "report", "orders", "fault")
        lines = [f"{key} {word(getattr(self, key))}" for key in texts if getattr(self, key)]
        lines += [f"{key} {getattr(self, key)}" for key in numbers]
        lines += [f"report_ms {self.report_ms}"] if self.report_ms else []
        lines += [f"ring {self.ring:d}"] if self.ring is not None else []
        lines += [f"ring_chunk {self.ring_chunk}"] if self.ring_chunk else []
        lines += [f"memory {self.memory}", f"quiet {self.quiet:d}", f"regions {self.regions:d}"]
        lines += [f"{key} 0" for key in ("ahead", "merge") if not getattr(self, key)]
        if self.policy != "static":
            lines += self._adaptation()
        for block, line in sorted(self.residents.items()):
            lines.append(f"resident {block} {line.words}")
        return ("\n".join(lines) + "\n").encode()

    def _adaptation(self) -> list[str]:
        numbers = ("half_life", "protect", "upload_bytes", "refill_bytes")
        lines = [f"policy {self.policy}", *(f"{key} {getattr(self, key)}" for key in numbers)]
        lines += [f"least_misses {self.least_misses}"] if self.least_misses else []
        moves = [f"move {' '.join(map(str, move))}" for move in sorted(self.moves)]
        return [*lines, f"lockstep {self.lockstep:d}", *moves]
