"""atsplan machines: what machines and cards are known, and a profile of one that is only described."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from commands.shared.console import mib, next_step, out, out_json, out_table, say, table, write_text
from commands.shared.machine_options import Described, from_parts, machine_parts, words_of
from commands.shared.option_types import Target
from planner.errors import OptionProblem

if TYPE_CHECKING:
    from planner.machine.profile import Profile


@click.command()
@click.argument("name", required=False)
@machine_parts
@click.option("-o", "--output", "--out", "output", type=Target("profile"), help="Write the profile (YAML).")
@click.option("--json", "as_json", is_flag=True, help="For a program.")
def command(name: str | None, parts: Described, output: Path | None, as_json: bool) -> None:
    """List known machines and cards, describe machine NAME, or make a profile from parts.

    All of them are assumed from published figures; `atsplan profile` measures this machine.
    """
    from planner.machine.presets import load

    if name is not None and parts:
        raise OptionProblem("NAME", name, "is a machine already: leave it out to describe one by its parts")
    if name is None and not parts:
        if output is not None:
            raise OptionProblem("--output", str(output), "needs a machine: its name, or --gpu and the rest")
        _list(as_json)
        return
    profile = load(name) if name is not None else from_parts(parts)
    if output is not None:
        from planner.machine.profile import to_text

        write_text(output, to_text(profile))
        say(f"wrote {output}")
    if as_json:
        out_json(profile.model_dump(mode="json", by_alias=True))
    else:
        _show(profile)
    if output is not None:
        next_step("atsplan", "fit", "MODEL", "--profile", output)
    else:
        which = ["--machine", name] if name is not None else words_of(parts)
        next_step("atsplan", "fit", "MODEL", *which)


def _list(as_json: bool) -> None:
    from planner.machine.cards import table as cards
    from planner.machine.presets import load, names

    known = cards()
    if as_json:
        shipped = [{"name": name, "source": load(name).source} for name in names()]
        out_json({"machines": shipped, **known.model_dump(mode="json")})
        return
    known_machines = names()
    machines = table("machine", "GPU", "host")
    for name in known_machines:
        profile = load(name)
        gpus = ", ".join(d.description for d in profile.devices if d.kind != "cpu")
        machines.add_row(name, gpus, profile.device("CPU").description)
    out_table(machines)
    made = table("card", "memory", "GB/s", "TFLOPS", "PCIe")
    for card in known.cards:
        made.add_row(card.name, f"{card.memory} GiB", str(card.bandwidth), f"{card.fp32:g}", card.pcie or "?")
    out_table(made)
    say("all assumed, not measured; where PCIe is ?, no source was found: add --pcie 4x16")
    next_step("atsplan", "fit", "MODEL", "--machine", known_machines[0])
    parts = ("--gpu", known.cards[0].name, "--ram", "64GiB", "--memory", "ddr5-6000", "--cpu", "8")
    next_step("atsplan", "fit", "MODEL", *parts)


def _show(profile: Profile) -> None:
    out(f"{profile.name}: {profile.source}")
    made = table("device", "what", "memory", "GB/s", "prompt TFLOP/s", "copies to it, GB/s")
    copies = {link.target: link.bandwidth_bytes_per_s for link in profile.links if link.source == "CPU"}
    for device in profile.devices:
        made.add_row(
            device.name,
            device.description,
            mib(device.memory_bytes),
            f"{device.bandwidth_bytes_per_s / 1e9:.1f}",
            f"{device.flops_per_s / 1e12:.1f}",
            f"{copies[device.name] / 1e9:.1f}" if device.name in copies else "",
        )
    out_table(made)
