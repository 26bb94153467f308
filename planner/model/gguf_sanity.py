"""Hyperparameters that everybody later takes for plain counts: checked once, where the file is read."""

from __future__ import annotations

import re
from collections.abc import Mapping

from planner.errors import FileProblem
from planner.model.gguf_header import Header, one_line
from planner.model.inventory import MAX_LAYERS, Hparam, too_many_used, wrong_counts

_BLOCK = re.compile(r"(?:enc\.|dec\.)?blk\.([0-9]+)\.")


def check_counts(hparams: Mapping[str, Hparam], path: str) -> None:
    """FileProblem for a count that is no number, negative, or larger than anything could hold."""
    for key, value in wrong_counts(hparams):
        raise FileProblem(path, f"damaged: {key} is {one_line(str(value))}")
    if why := too_many_used(hparams):
        raise FileProblem(path, f"damaged: {why}")


def check_layers(header: Header, path: str) -> None:
    """FileProblem for a tensor of a layer that cannot be."""
    for info in header.infos:
        block = _BLOCK.match(info.name)
        if block and (len(block[1]) > 9 or int(block[1]) >= MAX_LAYERS):
            raise FileProblem(path, f"damaged: tensor {one_line(info.name)} belongs to no possible layer")
