"""atsplan doctor: the engine, the devices, what is possible here, and what the rest would take."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commands.shared.console import COMPILING, mib, next_step, out, out_json, out_table, table, waiting
from commands.shared.plan_job import engine_options
from planner.errors import AnswerIsNo

if TYPE_CHECKING:
    from runtime.doctor import Findings


@click.command()
@click.option(
    "--profile", "profile_path", type=click.Path(path_type=Path), help="Also say whether it holds here."
)
@click.option("--json", "as_json", is_flag=True, help="The findings as JSON.")
@click.option("--native", is_flag=True, help="Only print the path of the device for experts in slots.")
@engine_options
def command(
    profile_path: Path | None, as_json: bool, native: bool, engine: str | None, llama_h: Path | None
) -> None:
    """Say which llama.cpp is used, which devices it sees, and what this program can do with them.

    Ends with status 3 when there is no engine that can be used, and with 1 when --profile is that of another
    machine, or of this one before something changed.
    """
    from dataclasses import asdict

    from profiler.synth.synth import SynthSpec, write
    from runtime.doctor import examine, others

    if native:
        from runtime.hybrid.build import library

        with waiting(COMPILING):
            made = library()
        out(str(made))
        return

    with tempfile.TemporaryDirectory() as folder:
        probe = write(Path(folder) / "probe.gguf", SynthSpec("llama", n_layers=1))
        with waiting("examining the engine"):
            found = examine(engine, llama_h, probe)
    elsewhere = others(Path(found.build.path))
    changes = _changes(profile_path, found) if profile_path else ()
    if as_json:
        stale = {"profile_changes": changes} if profile_path else {}
        out_json({**asdict(found), "others": elsewhere, **stale})
    else:
        _show(found)
        for label, path in elsewhere:
            out(f"also here: {label} ({path}): --engine {path}")
    next_step("atsplan", *(("profile", "MODEL", "-o", str(profile_path)) if changes else ("fit", "MODEL")))
    if changes:
        raise AnswerIsNo(f"{profile_path} does not hold here: {'; '.join(changes)}: profile again")
    if profile_path and not as_json:
        out(f"{profile_path} holds here")


def _changes(path: Path, found: Findings) -> tuple[str, ...]:
    """What a profile was measured with that is not so here."""
    from commands.shared.models import load_profile
    from planner.machine.engine_builds import same_build
    from planner.machine.fingerprint import differences, facts_of, host_facts
    from profiler import host

    profile = load_profile(path, None)
    known = facts_of(profile, [d.name for d in profile.devices])
    if not known:
        return ("it is assumed, not measured",)
    here = host_facts(host.fingerprint("")) | {d.name: d.description for d in found.devices}
    missing = tuple(f"{name} is not here" for name in known if name not in here)
    before, now = profile.fingerprint.engine, found.build.text
    engine = () if same_build(before, now) else (f"engine was {before}, is {now}",)
    return (*differences(known, here), *missing, *engine)


def _show(found: Findings) -> None:
    from runtime.doctor import cores

    build = found.build
    out(f"engine   {build.text}")
    out(f"library  {build.path}")
    out(f"structs  model {build.model_params_bytes}, context {build.context_params_bytes} bytes")
    out(f"cores    {cores()}")
    devices = table("device", "kind", "what", "free", "total", "buffers")
    for d in found.devices:
        memory = (mib(d.free_bytes), mib(d.total_bytes)) if d.total_bytes else ("?", "?")
        devices.add_row(d.name, d.kind, d.description, *memory, ", ".join(d.buffers))
    out_table(devices)
    for ability in found.abilities:
        out(f"{'yes' if ability.works else 'no ':3} {ability.name}" + _because(ability.why_not))


def _because(why: str) -> str:
    return f": {why}" if why else ""
