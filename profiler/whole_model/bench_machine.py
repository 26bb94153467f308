"""Which rows of llama-bench are of a model and of a machine, and on which GPUs each ran.

llama-bench says what it ran on beside the settings: size of the model, backends, GPUs, threads. A row of
another model, or of another machine, is no measurement of this one, however well it might be fitted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.learn.llama_bench import another_model
from planner.machine.profile import Profile
from planner.model.inventory import Inventory

_NO_GPU = ("cpu", "blas", "accelerate", "zendnn")
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT])iB")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_OFF, _ON = (False, 0, "0", "off", "disabled"), (True, 1, "1", "on", "enabled")


@dataclass(frozen=True, slots=True)
class Ran:
    """What a row of llama-bench ran on, as far as it says; 0, "" and None where it does not."""

    model_bytes: int = 0
    backends: str = ""
    gpus: int = 0
    device: str = ""  # the only one, by name
    threads: int = 0
    flash: bool | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether it could use a GPU: a build without one says 99 layers all the same."""
        named = [one.strip().lower() for one in self.backends.split(",") if one.strip()]
        return not named or any(one not in _NO_GPU for one in named)


def ran(values: Mapping[str, Any]) -> Ran:
    """What the fields or columns of a row say."""
    flash, threads = values.get("flash_attn"), values.get("n_threads")
    devices = [one for one in re.split(r"[/,]", str(values.get("devices") or "")) if one not in ("", "auto")]
    cards = [one for one in str(values.get("gpu_info") or "").split(", ") if one]
    alone = values.get("split_mode") == "none"
    return Ran(
        model_bytes=_bytes(values.get("model_size")),
        backends=str(values.get("backends") or ""),
        gpus=1 if alone else len(devices) or len(cards),
        device=devices[0] if len(devices) == 1 else "",
        threads=threads if isinstance(threads, int) and 0 < threads < 2**31 else 0,
        flash=True if flash in _ON else False if flash in _OFF else None,
    )


def _bytes(said: object) -> int:
    if isinstance(said, int) and not isinstance(said, bool):
        return max(said, 0)
    match = _SIZE.fullmatch(said) if isinstance(said, str) else None
    return round(float(match[1]) * _UNITS[match[2]]) if match else 0


def gpus_of(row: Ran, profile: Profile) -> list[tuple[str, int]]:
    """The GPUs that a row's layers are dealt to, with shares as the engine's: by free memory."""
    found = [(d.name, max(d.free_bytes, 1)) for d in profile.devices if d.kind == "gpu"]
    if row.device and any(name == row.device for name, _ in found):
        found = [(name, share) for name, share in found if name == row.device]
    return found[: row.gpus or len(found)] if row.on_gpu else []


def refusals(rows: Sequence[tuple[Ran, bool, bool]], inventory: Inventory, profile: Profile) -> list[str]:
    """Why each row is no measurement of that model on that machine; "" for those that are.

    Of each row what it ran on, whether it is of a prompt, and whether the CPU computes a part of it.
    """
    there = sum(d.kind == "gpu" for d in profile.devices)
    threads = Counter(on.threads for on, _, mixed in rows if mixed and on.threads)
    usual = max(threads, key=lambda count: (threads[count], count), default=0)
    flashed = any(on.flash for on, _, _ in rows)
    return [_refusal(row, inventory, there, usual, flashed) for row in rows]


def _refusal(
    row: tuple[Ran, bool, bool], inventory: Inventory, there: int, threads: int, flashed: bool
) -> str:
    on, prompt, mixed = row
    if why := another_model(on.model_bytes, inventory):
        return why
    if on.on_gpu and on.gpus > there > 0:
        return f"it ran on {on.gpus} GPUs, the machine has {there}"
    if on.on_gpu and on.backends and not there:
        return f"it ran on a GPU ({on.backends}), the machine has none"
    if not on.on_gpu and there and prompt:
        return f"the CPU alone computed its prompt ({on.backends}), which a machine with a GPU does not"
    if mixed and on.threads and on.threads != threads:
        return f"{on.threads} threads, where other rows have {threads}"
    if on.flash is False and flashed:
        return "it is without flash attention, where other rows are with it"
    return ""
