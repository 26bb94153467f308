"""Plans with experts in slots for stock llama.cpp: a shell script of one file and one command.

An unpatched program takes the device from the environment (GGML_BACKEND_PATH), its slots from a small
text file (ATSPLAN_HYBRID), and the placement from its usual options.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from planner import quoting
from planner.files import try_lock
from planner.plan.load_spec import LoadSpec, Residents
from planner.site import Site, SiteKind
from runtime.hybrid import build
from runtime.hybrid.config import ENVIRONMENT, LIBRARY
from runtime.hybrid.lane_files import EVERY_MS, LaneFiles
from runtime.hybrid.orders import Orders
from runtime.session.hybrid import positions, settings, slotted
from runtime.tools.export import NotHeld

FORMS = ("llama-server", "llama-cli", "llama-bench")
FIND_LIBRARY = '"$(atsplan doctor --native)"'
_END = "END_OF_SLOTS"
_FOLDER = "atsplan-slots-"
_NEW_S = 60


def has_slots(spec: LoadSpec) -> bool:
    """Whether a spec needs the native device."""
    return bool(slotted(spec))


def named(spec: LoadSpec) -> LoadSpec:
    """The spec with the names that the wrappers take in a stock program: HYBRID0 for the first device."""
    names = {device: f"HYBRID{n}" for n, device in enumerate(slotted(spec))}

    def buffer(name: str) -> str:
        site = Site.of_buffer(name)
        return f"{names[site.device]}_EXPERTS" if site.kind is SiteKind.HYBRID else name

    return replace(
        spec,
        devices=tuple(names.get(device, device) for device in spec.devices),
        overrides=tuple((pattern, buffer(name)) for pattern, name in spec.overrides),
    )


def slots_text(spec: LoadSpec, residents: Residents, orders: Orders | None = None) -> str:
    """The file that ATSPLAN_HYBRID names: what each wrapper holds; `residents` by position in the file.

    `orders` has files by device in which a wrapper says now and then what it has done, and looks for others.
    """
    parts = []
    for n, device in enumerate(slotted(spec)):
        config = settings(spec, device, residents, f"HYBRID{n}")
        if orders is not None:
            report, given = orders.reports.files[device], orders.files[device]
            config = replace(config, report=str(report), orders=str(given), report_ms=EVERY_MS)
        parts.append(config.text().decode())
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class SlottedServer:
    """A stock program with experts in slots: placement, environment, and where it says what it does."""

    spec: LoadSpec
    variables: Mapping[str, str]
    orders: Orders

    @property
    def reports(self) -> LaneFiles:
        return self.orders.reports


@contextmanager
def settings_folder() -> Iterator[Path]:
    """A folder for `slotted_server`, as long as the block; what a program that was killed left is removed.

    Whoever uses such a folder has it locked, so that one without a lock is nobody's.
    """
    for old in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        handle = try_lock(old) if _is_abandoned(old) else None
        if handle is not None:
            shutil.rmtree(old, ignore_errors=True)
            os.close(handle)
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
        handle = try_lock(Path(folder))
        try:
            yield Path(folder)
        finally:
            if handle is not None:
                os.close(handle)


def _is_abandoned(folder: Path) -> bool:
    """Whether a folder is the user's own, and not so new that its maker may be about to lock it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and time.time() - found.st_mtime > _NEW_S
    )


def slotted_server(spec: LoadSpec, model: Path, folder: Path) -> SlottedServer:
    """Settings of a spec with slots written into `folder`, which no other user may write to.

    Raises HybridRefused with what to install, quoting.Unquotable for a folder that settings cannot name.
    """
    reports = {device: folder / f"HYBRID{n}.json" for n, device in enumerate(slotted(spec))}
    files = {device: path.with_suffix(".orders") for device, path in reports.items()}
    orders = Orders(files, LaneFiles(reports))
    path = folder / "slots"
    path.write_text(slots_text(spec, positions(model, spec.residents), orders))
    variables = {ENVIRONMENT: str(path), LIBRARY: str(build.library())}
    return SlottedServer(named(spec), variables, orders)


def script(spec: LoadSpec, residents: Residents, command: str, name: str) -> str:
    """The script around `command`: comments and one command line of the spec that `named` gives.

    Raises NotHeld for names that its settings cannot hold.
    """
    try:
        slots = quoting.heredoc(slots_text(spec, residents).splitlines(), _END)
    except quoting.Unquotable as problem:
        raise NotHeld("a script with slots", str(problem)) from None
    *comments, line = command.rstrip("\n").split("\n")
    path = quoting.shell([quoting.file_name(name, ".slots")])
    head = [
        *comments,
        "# Which experts have slots, for the device of atsplan in an unpatched llama.cpp.",
        f"cat >{path} <<'{_END}'",
        slots,
        f"export {ENVIRONMENT}={path} {LIBRARY}={FIND_LIBRARY}",
    ]
    return "\n".join([*head, line]) + "\n"
