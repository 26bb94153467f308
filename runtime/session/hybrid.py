"""Sessions whose spec puts experts into slots: through a device of this program, the slots proven."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from planner.constants import CPU
from planner.errors import EngineProblem, MachineError
from planner.model.gguf.expert_orders import damaged, expert_orders
from planner.model.gguf.reader import read_model
from planner.plan.load_spec import LoadSpec, Residents
from planner.site import GUESTS, Site, SiteKind
from runtime.hybrid.config import Config, Resident
from runtime.hybrid.device import HybridDevice, Report
from runtime.load.dry_run import Breakdown
from runtime.session.session import Session
from runtime.verify.loaded_placement import Weight


@dataclass(eq=False)
class SlotsDiffer(MachineError):
    """Experts of a loaded model that are not where the plan puts them."""

    layer: int
    planned: tuple[int, ...]
    found: tuple[int, ...]

    def message(self) -> str:
        missing = sorted(set(self.planned) - set(self.found))[:4]
        return (
            f"layer {self.layer}: {len(self.found)} experts have slots, the plan names {len(self.planned)}; "
            f"without: {', '.join(map(str, missing)) or 'none'}"
        )


class HybridSession(Session):
    """A session of a spec that names slots; `wrapped`: this program's device for each of the plan's."""

    wrapped: Mapping[str, HybridDevice]

    def __enter__(self) -> HybridSession:
        """Raises HybridRefused with what to install, SlotsDiffer."""
        asked, here = self.spec, positions(self.path, self.spec.residents)
        self.wrapped = {
            name: HybridDevice(self.engine.ggml, name, settings(asked, name, here, self._free_name()))
            for name in slotted(asked)
        }
        self._own = {d.buffer_name: d.buffer_type for d in self.wrapped.values()}
        self.spec = through(asked, self.wrapped)
        with self._named():
            super().__enter__()
        try:
            self._prove(here)
        except BaseException:
            self.close()
            raise
        return self

    def _free_name(self) -> str:
        """A wrapper stays registered as long as the process lives, so the next one has the next number."""
        taken = {device.name for device in self.engine.ggml.devices()}
        return next(name for n in range(len(taken) + 1) if (name := f"HYBRID{n}") not in taken)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """The device's own sentence in the place of what the engine makes of it, if it is of this step."""
        before = {name: device.faults for name, device in self.wrapped.items()}
        try:
            yield
        except EngineProblem as problem:
            faults = [device.fault for name, device in self.wrapped.items() if device.faults != before[name]]
            if not faults:
                raise
            raise EngineProblem(problem.engine, f"hybrid experts: {faults[0]}") from None

    def _decode(self, tokens: Sequence[int], start: int, wanted: Sequence[bool]) -> None:
        with self._named():
            super()._decode(tokens, start, wanted)

    def _prove(self, residents: Residents) -> None:
        """Slots hold the plan's experts, to the expert."""
        held = {b.block: b for report in self.reports().values() for b in report.blocks}
        for layer, _, experts in residents:
            found = tuple(e for e in held[layer].resident if e >= 0) if layer in held else ()
            if set(found) != set(experts):
                raise SlotsDiffer(layer, experts, found)

    def reports(self) -> dict[str, Report]:
        """What became of each layer's choices, by the plan's device."""
        return {name: device.report() for name, device in self.wrapped.items()}

    def weights(self) -> tuple[Weight, ...]:
        """Experts in slots belong to the device that is wrapped, as the plan says it."""
        home = {device.buffer_name: name for name, device in self.wrapped.items()}
        found = super().weights()
        return tuple(replace(w, device=home[w.buffer]) if w.buffer in home else w for w in found)

    def memory(self) -> dict[str, Breakdown]:
        """Bytes per device: experts, and what mapped ones come through, on the host; slots, guests and stage
        on the device that is wrapped."""
        none, found = Breakdown(0, 0, 0), super().memory()
        here = {device.name for device in self.engine.ggml.devices() if device.kind != "accel"}
        lent = [name for name in found if name not in here]
        for name in lent:  # the second device, which only lends the buffer type its name
            found[CPU] = found.get(CPU, none) + found.pop(name)
        for name, report in self.reports().items():
            slots = sum(block.device_bytes for block in report.blocks)
            moved = Breakdown(slots, 0, report.stage_bytes + report.stream_device_bytes)
            found[name] = found.get(name, none) + moved
            if report.ring_bytes:
                found[CPU] = found.get(CPU, none) + Breakdown(0, 0, report.ring_bytes)
        return found


def slotted(spec: LoadSpec) -> tuple[str, ...]:
    """The devices whose slots a spec names, each once."""
    sites = (Site.of_buffer(buffer) for _, buffer in spec.overrides)
    return tuple(dict.fromkeys(site.device for site in sites if site.kind is SiteKind.HYBRID))


def positions(path: Path, residents: Residents) -> Residents:
    """The same experts by their position in the file, which a rewrite may have put in another order.

    FileProblem for a file whose record of that is damaged, or is of another number of experts.
    """
    orders = expert_orders(read_model(path).headers[0].header, str(path))
    found = []
    for layer, n, experts in residents:
        order = orders.get(layer, range(n))
        if len(order) != n:
            raise damaged(str(path), f"the order of layer {layer} is of {len(order)} experts, not {n}")
        at = {e: i for i, e in enumerate(order)}
        found.append((layer, n, tuple(at[e] for e in experts)))
    return tuple(found)


def settings(spec: LoadSpec, device: str, residents: Residents, name: str) -> Config:
    """What the native device is told; the same text serves stock tools as a file."""
    how, guests = spec.adaptation, dict(spec.guests)
    return Config(
        device=device,
        name=name,
        residents={layer: Resident(n, experts, guests.get(layer)) for layer, n, experts in residents},
        guests=GUESTS,
        banks=spec.banks,
        memory="mapped" if spec.use_mmap else "pinned",
        policy=how.policy.value,
        half_life=how.half_life,
        protect=how.protect,
        upload_bytes=how.upload_bytes,
        refill_bytes=how.refill_bytes,
        least_misses=how.least_misses,
    )


def through(spec: LoadSpec, wrapped: Mapping[str, HybridDevice]) -> LoadSpec:
    """The spec with wrappers in the place of their devices."""

    def buffer(name: str) -> str:
        site = Site.of_buffer(name)
        return wrapped[site.device].buffer_name if site.kind is SiteKind.HYBRID else name

    return replace(
        spec,
        devices=tuple(wrapped[d].name if d in wrapped else d for d in spec.devices),
        overrides=tuple((pattern, buffer(name)) for pattern, name in spec.overrides),
    )
