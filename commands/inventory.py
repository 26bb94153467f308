"""atsplan inventory: what a model file holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from commands.shared.console import mib, next_step, out, out_json, out_table, say, table, write_text
from commands.shared.models import load_inventory
from commands.shared.option_types import Target

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.check.model_summary import Summary
    from planner.model.inventory import Inventory

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("model", type=_FILE)
@click.option(
    "-o",
    "--output",
    "--out",
    "output",
    type=Target("inventory"),
    help="Write the inventory as YAML: the model's table without weights.",
)
@click.option("--json", "as_json", is_flag=True, help="The summary for a program.")
@click.option("--mmproj", type=_FILE, help="A vision projector that is loaded beside the model.")
@click.option("--draft", type=_FILE, help="A draft model for speculative decoding.")
@click.option(
    "--strict",
    is_flag=True,
    help="Refuse a file with anything that is not known (exit 1), or that llama.cpp refuses (exit 2).",
)
def command(
    model: Path, output: Path | None, as_json: bool, mmproj: Path | None, draft: Path | None, strict: bool
) -> None:
    """What MODEL holds: layers by kind, bytes by role, experts, bytes read per token, caches.

    MODEL is a GGUF file (any shard of a split one, or its folder) or an inventory.yaml.
    """
    from planner.check.model_summary import extra_of, refuse_strange, summary_of
    from planner.model.nextn import promised_in_vain

    inventory = load_inventory(model, planned=strict)
    if strict:
        refuse_strange(inventory)
    if fault := promised_in_vain(inventory):
        say(f"note: the model {fault}")
    summary = summary_of(inventory)
    given = (("mmproj", mmproj), ("draft", draft))
    extras = [extra_of(kind, load_inventory(path)) for kind, path in given if path is not None]
    if output is not None:
        _write(output, inventory)
    if as_json:
        out_json(_plain(summary, extras))
    else:
        _show(summary, extras)
    next_step("atsplan", "fit", model)


def _write(path: Path, inventory: Inventory) -> None:
    from planner.model.inventory import from_text, to_text

    text = to_text(inventory)
    from_text(text, str(path))  # what cannot be read back is not written
    write_text(path, text)
    say(f"wrote {path}")


def _plain(summary: Summary, extras: list[Mapping[str, object]]) -> dict[str, object]:
    from dataclasses import asdict

    return {**asdict(summary), "extras": extras}


def _show(summary: Summary, extras: list[Mapping[str, object]]) -> None:
    from planner.quoting import short

    files = f"{summary.files} file{'s' if summary.files != 1 else ''}"
    size = f"{summary.size_bytes / 2**30:.2f} GiB" if summary.size_bytes >= 2**30 else mib(summary.size_bytes)
    what = f"{short(summary.name)}: {short(summary.architecture)}"
    out(f"{what}, {size} in {summary.tensors} tensor{'s' if summary.tensors != 1 else ''}, {files}")
    out("layers: " + ", ".join(f"{count} {kind}" for kind, count in summary.layers.items()))
    for line in summary.experts:
        out(
            f"experts: {line.experts} in each of {line.layers} layers, {line.used} used per token, "
            f"{line.expert_bytes / 2**20:.2f} MiB each"
        )
    _show_roles(summary)
    _show_memory(summary)
    for extra in extras:
        out(f"{extra['kind']} {short(str(extra['name']))}: " + _sizes(extra))
    for note in summary.notes:
        say(f"note: {note}")
    if summary.unknown:
        shown = ", ".join(map(short, summary.unknown[:5])) + (" …" if len(summary.unknown) > 5 else "")
        say(f"note: not recognised, stays with its layer: {shown} ({len(summary.unknown)} in all)")


def _show_roles(summary: Summary) -> None:
    rows = table("role", "tensors", "size", "share", "read per token", "types")
    for line in summary.roles:
        share = line.size_bytes / max(summary.size_bytes, 1)
        rows.add_row(
            line.role,
            str(line.tensors),
            mib(line.size_bytes),
            f"{share:.1%}",
            mib(line.active_bytes),
            " ".join(line.types[:4]),
        )
    out_table(rows)


def _show_memory(summary: Summary) -> None:
    out(f"read per token: {mib(summary.active_bytes)}")
    if summary.tied_bytes:
        out(f"tied output: {mib(summary.tied_bytes)} more on the device of the output head")
    out(f"KV cache: {summary.kv_bytes_per_1k / 2**20:.1f} MiB per 1024 tokens (f16)")
    if summary.kv_fixed_bytes:
        out(f"KV cache of sliding layers: {mib(summary.kv_fixed_bytes)} (window {summary.window})")
    if summary.state_bytes:
        out(f"recurrent state: {summary.state_bytes / 2**20:.1f} MiB per sequence")
    out(f"compute buffer: {mib(summary.compute_bytes)} (batches of 512, context 4096, all on one device)")


def _sizes(extra: Mapping[str, object]) -> str:
    named = (
        ("weights", "size_bytes"),
        ("compute", "compute_bytes"),
        ("KV per 1024 tokens", "kv_bytes_per_1k"),
    )
    found = []
    for name, key in named:
        value = extra.get(key)
        if isinstance(value, int) and value:
            found.append(f"{name} {value / 2**20:.1f} MiB")
    return ", ".join(found)
