"""Layout to bytes: unchanged ranges by the kernel where it can, else through one fixed buffer."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from planner.errors import MachineError
from rewriter.layout import Copy, Gather, Literal, OutFile, Segment, Zeros

BUFFER_BYTES = 1 << 20  # stays in the processor's cache between read and write
# The kernel shares blocks, or moves whole pages, where source and target agree on page borders. Elsewhere
# and for short pieces a pass through memory costs less.
KERNEL_COPY_BYTES = 256 << 10
PAGE_BYTES = 4096
KERNEL_STEP_BYTES = 64 << 20  # between two looks at progress and Ctrl-C
_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}

Advance = Callable[[int], None]


class ShortRead(MachineError):
    """The source ended while it was copied: something else changes it."""

    def message(self) -> str:
        return f"{self.args[0]}: became shorter while it was read"


def write_file(file: OutFile, sources: Sequence[Path], target: Path, advance: Advance) -> None:
    """Write one output file and flush it to the disk; `advance` is told the bytes as they are done.

    OSError and ShortRead leave a partial `target` behind for the caller to remove.
    """
    handles: list[int] = []
    try:
        handles += [os.open(source, os.O_RDONLY) for source in sources]
        out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        handles.append(out)
        writer = _Writer(handles[:-1], sources, out, advance)
        for segment in file.segments:
            writer.put(segment)
        writer.flush()
        os.fsync(out)
    finally:
        for handle in handles:
            os.close(handle)


class _Writer:
    """Collects small pieces in a buffer, hands long ones to the kernel."""

    def __init__(self, handles: list[int], sources: Sequence[Path], out: int, advance: Advance) -> None:
        self.handles = handles
        self.sources = sources
        self.out = out
        self.advance = advance
        self.buffer = memoryview(bytearray(BUFFER_BYTES))
        self.filled = 0
        self.written = 0
        self.kernel_copy = hasattr(os, "copy_file_range")

    def put(self, segment: Segment) -> None:
        if isinstance(segment, Copy):
            self.copy(segment.shard, segment.start, segment.length)
        elif isinstance(segment, Gather):
            self.gather(segment)
        elif isinstance(segment, Zeros):
            self.zeros(segment.length)
        else:
            self.literal(segment)

    def gather(self, segment: Gather) -> None:
        """Slices in their new order; neighbours that stay neighbours are copied together."""
        size, positions = segment.slice_bytes, segment.positions
        first = 0
        for n in range(1, len(positions) + 1):
            if n == len(positions) or positions[n] != positions[n - 1] + 1:
                self.copy(segment.shard, segment.start + positions[first] * size, (n - first) * size)
                first = n

    def copy(self, shard: int, start: int, length: int) -> None:
        aligned = (start - self.written - self.filled) % PAGE_BYTES == 0
        if aligned and length >= KERNEL_COPY_BYTES and self.kernel_copy:
            self.flush()
            done = self.copy_in_kernel(shard, start, length)
            start, length = start + done, length - done
        while length:
            step = min(length, self.room())
            self.fill(shard, start, step)
            start, length = start + step, length - step

    def copy_in_kernel(self, shard: int, start: int, length: int) -> int:
        """Bytes done; fewer than `length` when this kernel or file system cannot."""
        done = 0
        while done < length:
            step = min(length - done, KERNEL_STEP_BYTES)
            try:
                moved = os.copy_file_range(self.handles[shard], self.out, step, start + done)
            except OSError as problem:
                if problem.errno not in _NO_KERNEL_COPY:
                    raise
                self.kernel_copy = False
                return done
            if moved == 0:  # end of file, or a file system that does not do it and does not say so
                return done
            done += moved
            self.written += moved
            self.advance(moved)
        return done

    def fill(self, shard: int, start: int, length: int) -> None:
        """Read into the buffer; `length` is at most the room there."""
        end = self.filled + length
        while self.filled < end:
            got = os.preadv(self.handles[shard], [self.buffer[self.filled : end]], start)
            if got == 0:
                raise ShortRead(str(self.sources[shard]))
            self.filled += got
            start += got

    def zeros(self, length: int) -> None:
        while length:
            step = min(length, self.room())
            self.buffer[self.filled : self.filled + step] = bytes(step)
            self.filled += step
            length -= step

    def literal(self, segment: Literal) -> None:
        data = segment.data
        for start in range(0, len(data), BUFFER_BYTES):
            piece = data[start : start + BUFFER_BYTES]
            if len(piece) > BUFFER_BYTES - self.filled:
                self.flush()
            self.buffer[self.filled : self.filled + len(piece)] = piece
            self.filled += len(piece)

    def room(self) -> int:
        if self.filled == BUFFER_BYTES:
            self.flush()
        return BUFFER_BYTES - self.filled

    def flush(self) -> None:
        start = 0
        while start < self.filled:
            start += os.write(self.out, self.buffer[start : self.filled])
        if self.filled:
            self.advance(self.filled)
        self.written += self.filled
        self.filled = 0
