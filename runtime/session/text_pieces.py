"""Text from token pieces: whole characters only, stop texts held back."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class Pieces:
    """Joins the bytes of tokens into text for `on_text`; stops at the first stop text."""

    def __init__(self, on_text: Callable[[str], None], stop: Sequence[str]) -> None:
        self._on_text = on_text
        self._stop = tuple(text for text in stop if text)
        # A character may be spread over several tokens.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, piece: bytes) -> bool:
        """Take one token's bytes; False once a stop text has come."""
        self._held += self._decoder.decode(piece)
        at = min((i for s in self._stop if (i := self._held.find(s)) >= 0), default=-1)
        if at >= 0:
            self._emit(self._held[:at])
            self._held = ""
            self._decoder.reset()
            return False
        keep = self._could_stop()
        self._emit(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return True

    def finish(self) -> None:
        """Give out what was held back."""
        self._emit(self._held + self._decoder.decode(b"", final=True))
        self._held = ""

    def _could_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop text."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self._stop):
                return size
        return 0

    def _emit(self, text: str) -> None:
        if text:
            self._on_text(text)
