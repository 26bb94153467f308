"""Results of a bench as a Prometheus text file (exposition format 0.0.4)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import median

from planner.quoting import prometheus_label
from runtime.bench.measure import Result

_HELP = {
    "tokens_total": ("counter", "Tokens generated while measuring."),
    "tpot_seconds": ("gauge", "Median time per output token."),
    "prefill_seconds": ("gauge", "Median time of the prompt."),
    "load_seconds": ("gauge", "Median load time."),
    "device_bytes": ("gauge", "Memory of a device as the engine counts it."),
    "gpu_peak_bytes": ("gauge", "Most memory of NVIDIA GPUs in use, as the driver counts it."),
    "gpu_utilisation_ratio": ("gauge", "Mean GPU utilisation while measuring."),
    "draft_accepted_ratio": ("gauge", "Guesses of the draft that the model accepted."),
    "cache_hit_ratio": ("gauge", "Hits of the engine's MoE cache."),
    "failures_total": ("counter", "Rounds that did not finish."),
}
_HITS = re.compile(r"hit rate = ([\d.]+)%")


def prometheus(model: str, results: Sequence[Result]) -> str:
    """The text of a metrics file; one time series an arm, prompt length and device."""
    lines: list[str] = []
    for name, (kind, text) in _HELP.items():
        samples = [(labels, value) for r in results for labels, value in _samples(name, r)]
        if not samples:
            continue
        lines += [f"# HELP atsplan_{name} {text}", f"# TYPE atsplan_{name} {kind}"]
        for labels, value in samples:
            pairs = ",".join(f"{k}={prometheus_label(v)}" for k, v in {"model": model, **labels}.items())
            lines.append(f"atsplan_{name}{{{pairs}}} {value:.9g}")
    return "\n".join(lines) + "\n"


def _samples(name: str, result: Result) -> Iterator[tuple[dict[str, str], float]]:
    rival = {"arm": result.rival.name}
    if name == "tokens_total":
        yield rival, result.tokens
    elif name == "tpot_seconds":
        for prompt, values in sorted(result.decode.items()):
            yield {**rival, "prompt": str(prompt)}, median(values) / 1e9
    elif name == "prefill_seconds":
        for prompt, values in sorted(result.prefill.items()):
            yield {**rival, "prompt": str(prompt)}, median(values) / 1e9
    elif name == "load_seconds" and result.load_ns:
        yield rival, median(result.load_ns) / 1e9
    elif name == "device_bytes":
        for device, sizes in sorted(result.memory.items()):
            yield {**rival, "device": device}, sizes.total
    elif name == "gpu_peak_bytes" and result.peak_bytes:
        yield rival, max(result.peak_bytes)
    elif name == "gpu_utilisation_ratio" and result.utilisation:
        yield rival, median(result.utilisation) / 100
    elif name == "draft_accepted_ratio" and result.guessed:
        yield rival, result.accepted / result.guessed
    elif name == "cache_hit_ratio":
        rates = [float(m[1]) / 100 for note in result.notes if (m := _HITS.search(note))]
        if rates:
            yield rival, rates[0]
    elif name == "failures_total":
        yield rival, len(result.failures)
