"""Back to the order of the original source, from what the rewritten file records."""

from __future__ import annotations

from planner.errors import FileProblem
from planner.model.gguf_file import ModelFile
from planner.model.gguf_header import DEFAULT_ALIGNMENT
from rewriter.experts import gathers
from rewriter.layout import Request, make_layout
from rewriter.regions import Region
from rewriter.rewrite import Work, output_name
from rewriter.stamp import read_stamp
from rewriter.stamps import original_order


def decide_undo(model: ModelFile, name: str) -> Work:
    """The way back: original order of tensors and experts, original alignment, no record left.

    The output is one file; it is the source byte for byte when that was one ordinary file. Raises
    FileProblem when the model was never rewritten.
    """
    stamp = read_stamp(model)
    if stamp is None:
        raise FileProblem(str(model.paths[0]), "is not a rewritten file: there is nothing to undo")
    order = original_order(model, stamp)
    request = Request(
        files=(order,),
        name=output_name(name),
        alignment=stamp.source_alignment or DEFAULT_ALIGNMENT,
        keep_alignment_key=stamp.source_alignment > 0,
        stamp=(),
        moves=gathers(model.inventory, {}, stamp.experts),
        tail_to=stamp.source_size,
    )
    return Work(make_layout(model, request), (Region("original", order),), {})
