"""Pictures: matplotlib loaded on use, a fixed look, and files whose bytes depend on the data alone."""

from __future__ import annotations

import contextlib
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from commands.shared.console import PICTURE, check_target, replacing
from planner.errors import InputError, OptionProblem

SUFFIXES = (".png", ".svg", ".pdf")
_LACKING = "pictures need matplotlib: pip install 'atsplan[plot]'"
_DATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}


def check_name(path: Path | None, option: str) -> None:
    """Refuse a picture with no known suffix, or that nothing here draws, before any work is done."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise OptionProblem(option, str(path), "expected a name that ends in .png, .svg or .pdf")
    if find_spec("matplotlib") is None:
        raise InputError(_LACKING)


def pyplot() -> Any:
    """matplotlib.pyplot without a screen; InputError says how to install it."""
    try:
        # It reads settings from the current folder when it is imported, whoever wrote them.
        with contextlib.chdir(Path(__file__).parent):
            import matplotlib as mpl
    except ImportError:
        raise InputError(_LACKING) from None
    mpl.rcdefaults()
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "atsplan"  # element ids that do not change from run to run
    # Texts are data: whatever the user's own settings say, no TeX runs on them.
    mpl.rcParams["text.usetex"] = False
    mpl.rcParams["text.parse_math"] = True
    from matplotlib import pyplot as plots

    return plots


def save(figure: Any, path: Path) -> None:
    """Write a figure whole or not at all, without dates and versions, and close it."""
    check_target(path, PICTURE)
    with replacing(path, PICTURE) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a box stands for it
        figure.savefig(file, format=path.suffix[1:], dpi=130, metadata=_DATED[path.suffix])
    pyplot().close(figure)
