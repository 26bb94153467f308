"""What is told of a plan that runs: families of prometheus_client, filled by run, bench and serve.

The library writes the format, with every escape and with the type lines that scrapers want, keeps histograms
and serves them over HTTP; labels are texts out of files and stay data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from planner.plan.plan import Plan
from planner.quoting import utf8
from runtime.engine.gpu_usage import readings
from runtime.engine.nvml import nvml
from runtime.hybrid.device import Block, Report

_TOKEN_S = (1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, 5000)
_FIRST_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)
_NS = 1e9
# Counters of a layer's experts: name, text, divisor, field of its block.
_COUNTED = (
    ("expert_uploads", "Experts copied to the device.", 1, "uploads"),
    ("expert_upload_bytes", "Bytes of experts copied to the device.", 1, "upload_bytes"),
    ("expert_cpu_seconds", "Time that the CPU computed experts.", _NS, "cpu_ns"),
)
# Of steps of 2 to 16 tokens, by a token's place in its step: the rank among sequences that decode together.
_BY_ROW = (
    ("expert_row_choices", "Choices of experts by rank among the sequences of a step.", "row_choices"),
    ("expert_row_hits", "Those whose expert had a slot.", "row_hits"),
)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its answer; times in nanoseconds, 0: not known."""

    prompt_tokens: int
    first_ns: int  # until the first token
    tokens: int
    token_ns: int  # of one token after the first


class Metrics:
    """The figures of one plan; each object has its own registry, so that tests and services share nothing."""

    def __init__(self, plan: Plan, digest: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._drafts = _Drafts()
        self._lanes = _Lanes()
        own = self.registry
        self._info = Gauge(
            "atsplan_plan_info", "The plan that runs.", ("model", "machine", "digest"), registry=own
        )
        self._predicted = tuple(
            Gauge(f"atsplan_predicted_{name}_seconds", text, registry=own)
            for name, text in (
                ("tpot", "Predicted time per output token."),
                ("prefill", "Predicted time of the planned prompt."),
            )
        )
        self._bytes = Gauge(
            "atsplan_device_bytes", "Memory of a device.", ("device", "part", "counted_by"), registry=own
        )
        self._prompts = Counter("atsplan_prompt_tokens", "Tokens of prompts computed.", registry=own)
        self._prompt_s = Counter("atsplan_prompt_seconds", "Time that prompts took.", registry=own)
        self._tokens = Counter("atsplan_tokens", "Tokens generated.", registry=own)
        self._tpot = Histogram(
            "atsplan_tpot_seconds",
            "Mean time per output token of a request.",
            buckets=[ms / 1000 for ms in _TOKEN_S],
            registry=own,
        )
        self._ttft = Histogram(
            "atsplan_ttft_seconds", "Time until the first token.", buckets=_FIRST_S, registry=own
        )
        self._ratio = Gauge(
            "atsplan_tpot_over_predicted_ratio",
            "Time per output token of the last request over the plan's.",
            registry=own,
        )
        self._predicted_ns = 0
        self.planned(plan, digest)
        for each in (self._drafts, self._lanes, _Gpus([use.name for use in plan.devices])):
            own.register(each)

    def request(self, one: Request) -> None:
        """A request that has ended."""
        self._prompts.inc(one.prompt_tokens)
        self._prompt_s.inc(one.first_ns / _NS)
        self._tokens.inc(one.tokens)
        if one.first_ns:
            self._ttft.observe(one.first_ns / _NS)
        if one.token_ns:
            self._tpot.observe(one.token_ns / _NS)
            if self._predicted_ns:
                self._ratio.set(one.token_ns / self._predicted_ns)

    def drafted(self, drafts: Iterable[tuple[int, int]]) -> None:
        """Drafts that were verified: tokens proposed, and accepted."""
        for proposed, accepted in drafts:
            self._drafts.add(proposed, accepted)

    def drafted_in_all(self, drafts: int, proposed: int, accepted: int, at: Sequence[int]) -> None:
        """What a server counts of its drafts since it started; `at`: accepted at each position."""
        self._drafts.become(drafts, proposed, accepted, at)

    def memory(self, held: Mapping[str, Mapping[str, int]]) -> None:
        """Bytes of each device by part, as the engine counts them."""
        for device, parts in held.items():
            for part, size in parts.items():
                self._bytes.labels(utf8(device), utf8(part), "engine").set(size)

    def lanes(self, reports: Iterable[Report]) -> None:
        """Work of the devices that hold experts in slots, since the model was loaded."""
        found = tuple((r.wraps, block) for r in reports for block in r.blocks)
        self._lanes.source = lambda: found

    def lanes_now(self, source: Callable[[], Iterable[tuple[str, Block]]]) -> None:
        """The same, asked of `source` whenever somebody reads: device and block."""
        self._lanes.source = source

    def text(self) -> str:
        """All of it in the exposition format."""
        return generate_latest(self.registry).decode()

    def planned(self, plan: Plan, digest: str) -> None:
        """The plan that runs from now on."""
        self._info.clear()
        self._info.labels(utf8(plan.model.name), utf8(plan.machine.name), digest).set(1)
        times = plan.predicted.tpot_ns, plan.predicted.prefill_ns
        for gauge, ns in zip(self._predicted, times, strict=True):
            gauge.set(ns / _NS)
        self._predicted_ns = plan.predicted.tpot_ns
        for use in plan.devices:
            parts = ("weights", "kv", "state", "compute", "cache", "reserve", "tables")
            for part in parts:
                size = getattr(use.memory, part)
                self._bytes.labels(utf8(use.name), part, "plan").set(size)


class _Drafts:
    """Totals of drafts, either added up here or taken over from a server that counts itself."""

    def __init__(self) -> None:
        self._drafts = self._proposed = self._accepted = 0
        self._at: list[int] = []

    def add(self, proposed: int, accepted: int) -> None:
        self._drafts += 1
        self._proposed += proposed
        self._accepted += accepted
        self._at += [0] * (accepted - len(self._at))
        for n in range(accepted):
            self._at[n] += 1

    def become(self, drafts: int, proposed: int, accepted: int, at: Sequence[int]) -> None:
        self._drafts, self._proposed, self._accepted = drafts, proposed, accepted
        self._at = list(at) or self._at

    def collect(self) -> Iterator[Metric]:
        """The families; none where nothing was drafted."""
        if not self._drafts and not self._proposed:
            return
        yield CounterMetricFamily("atsplan_drafts", "Drafts that were verified.", value=self._drafts)
        yield CounterMetricFamily(
            "atsplan_draft_proposed_tokens", "Tokens that were drafted.", value=self._proposed
        )
        yield CounterMetricFamily(
            "atsplan_draft_accepted_tokens", "Drafted tokens that were right.", value=self._accepted
        )
        at = CounterMetricFamily(
            "atsplan_draft_accepted_at", "Drafts that were right up to a position.", labels=("position",)
        )
        for n, number in enumerate(self._at):
            at.add_metric([str(n + 1)], number)
        yield at


class _Lanes:
    """Experts in slots, layer by layer."""

    def __init__(self) -> None:
        self.source: Callable[[], Iterable[tuple[str, Block]]] = tuple

    def collect(self) -> Iterator[Metric]:
        """The families; none without such a device."""
        found = list(self.source())
        if not found:
            return
        served = CounterMetricFamily(
            "atsplan_expert_choices",
            "Choices of experts, by who served them.",
            labels=("device", "layer", "by"),
        )
        for device, block in found:
            for by, number in (("slot", block.hits), ("upload", block.uploaded), ("cpu", block.cpu)):
                served.add_metric([utf8(device), str(block.block), by], number)
        yield served
        for name, text, scale, field in _COUNTED:
            family = CounterMetricFamily(f"atsplan_{name}", text, labels=("device", "layer"))
            for device, block in found:
                family.add_metric([utf8(device), str(block.block)], getattr(block, field) / scale)
            yield family
        yield from _by_row(found)
        waits = CounterMetricFamily(
            "atsplan_expert_wait_seconds", "Time the host waited.", labels=("device", "layer", "for")
        )
        for device, block in found:
            for what, ns in _waits(block):
                waits.add_metric([utf8(device), str(block.block), what], ns / _NS)
        yield waits


def _by_row(found: Sequence[tuple[str, Block]]) -> Iterator[Metric]:
    """Choices and hits of all layers by a token's place in its step; none of places that no step had."""
    for name, text, field in _BY_ROW:
        sums: dict[tuple[str, int], int] = {}
        for device, block in found:
            for row, number in enumerate(getattr(block, field)):
                if block.row_choices[row]:
                    sums[device, row] = sums.get((device, row), 0) + number
        family = CounterMetricFamily(f"atsplan_{name}", text, labels=("device", "row"))
        for (device, row), number in sorted(sums.items()):
            family.add_metric([utf8(device), str(row)], number)
        yield family


def _waits(block: Block) -> tuple[tuple[str, int], ...]:
    own = block.ahead_ns + block.decide_ns + block.rows_ns
    return ("router", block.wait_ns), ("lane", block.lane_ns), ("launch", block.launch_ns), ("host", own)


class _Gpus:
    """NVIDIA GPUs at the moment they are asked for, as the driver counts."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = [device for device in devices if device.startswith("CUDA")]

    def collect(self) -> Iterator[Metric]:
        """The families; none without such a GPU, or a driver that answers."""
        if not self._devices:
            return
        try:
            with nvml() as library:
                found = readings(library, self._devices) if library else {}
        except Exception:  # a GPU that is lost must not take the page with it
            return
        busy = GaugeMetricFamily("atsplan_gpu_utilisation_ratio", "Time that a kernel ran.", labels=("gpu",))
        used = GaugeMetricFamily("atsplan_gpu_used_bytes", "Memory in use, all programs.", labels=("gpu",))
        for number, reading in found.items():
            busy.add_metric([str(number)], reading.percent / 100)
            used.add_metric([str(number)], reading.used_bytes)
        if found:
            yield busy
            yield used
