"""Back to the order of the original source, from what the rewritten file records."""

from __future__ import annotations

from collections.abc import Iterator

from planner.errors import FileProblem
from planner.model.gguf.header import DEFAULT_ALIGNMENT
from planner.model.gguf.reader import ModelFile
from planner.model.gguf.shards import output_name
from rewriter.experts import gathers
from rewriter.layout import Request, make_layout
from rewriter.regions import Region
from rewriter.rewrite import Work
from rewriter.stamp import Stamp, read_stamp
from rewriter.stamps import original_order, trailing_of

HEADER_IS_BACK = "the header is the original's, byte for byte"
HEADER_DIFFERS = "the header differs from the original's: its tensors stood in several files, or out of order"


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
        trailing=trailing_of(model, stamp),
    )
    return Work(make_layout(model, request), (Region("original", order),), {})


def what_is_back(rewritten: ModelFile, restored: ModelFile) -> tuple[str, ...]:
    """What may be said of a file that was put back; its weights are verified already.

    The first sentence is on the header, the others tell what is not as it was.
    """
    stamp = read_stamp(rewritten)
    assert stamp is not None
    if restored.inventory.header_digest != stamp.source_header:
        return (HEADER_DIFFERS, *_not_back(stamp, restored))
    return (HEADER_IS_BACK, *_not_back(stamp, restored))


def _not_back(stamp: Stamp, restored: ModelFile) -> Iterator[str]:
    found = restored.headers[0]
    missing = (stamp.source_trailing or 0) - found.trailing_bytes
    if missing > 0:
        yield f"{missing} bytes behind the original's last tensor are not back: they were cut off since"
    if stamp.source_trailing is None:
        yield "bytes behind the original's last tensor, if there were any, are not back"
    if stamp.source_lost:
        yield (
            f"{stamp.source_lost} bytes of the original are not back: "
            "padding that was not zero, or what stood behind the tensors of a shard"
        )
    size = found.size_bytes - found.trailing_bytes
    if stamp.source_size and size != stamp.source_size:
        yield f"the original had {stamp.source_size} bytes up to the end of its tensors, this file {size}"
