"""What a file is that should be a GGUF and is not: failed downloads, other formats, pieces of files."""

from __future__ import annotations

import re

from planner.file_kinds import kind_of, named

MAGIC = b"GGUF"
_UNFINISHED = (".part", ".incomplete", ".crdownload", ".download", ".partial", ".tmp", ".aria2")
_RAW_PART = re.compile(r"\.gguf(\.([0-9]+|[a-z]{2})|-split-[a-z]+)$")
_ARCHIVES = {
    b"PK\x03\x04": "a zip archive or PyTorch file",
    b"\x80\x02": "a Python pickle: convert the model first",
    b"\x1f\x8b": "a gzip archive: unpack it first",
    b"\x28\xb5\x2f\xfd": "a zstd archive: unpack it first",
    b"7z\xbc\xaf": "a 7z archive: unpack it first",
}


def part_advice(path: str) -> str:
    """What to do with a piece of a file that was cut into parts, told by its name."""
    name = path.rpartition("/")[2].lower()
    if name.endswith(_UNFINISHED):
        return " (a download that has not ended: start it again)"
    if ".part" in name or _RAW_PART.search(name):
        return " (a raw part of a file: join the parts with cat)"
    return ""


def not_gguf(head: bytes) -> str:
    """What the first bytes of a file say that it is instead."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not head:
        return "empty file"
    if text.startswith((b"<!doctype", b"<html", b"<!--")):
        return "not a GGUF but an HTML page: the download failed"
    if not head.strip(b"\0"):
        return "not a GGUF file: it starts with zeros, as downloads do that have not ended"
    if head.startswith(b"version https://git-lfs"):
        return "not a GGUF but an LFS pointer: fetch the real file with `git lfs pull`"
    if head.startswith(b"FUGG"):
        return "big-endian GGUF: convert it to little-endian first"
    if head[:4] in (b"lmgg", b"tjgg", b"algg", b"fmgg"):
        return "an old GGML file, from before GGUF: convert it first"
    for magic, what in _ARCHIVES.items():
        if head.startswith(magic):
            return f"not a GGUF but {what}"
    if head[8:9] == b"{" and head[4:8] == b"\0\0\0\0":
        return "not a GGUF but a safetensors file: convert it first"
    if text.startswith(b"{"):
        return "not a GGUF but JSON text: the download failed"
    if kind := kind_of(head.decode(errors="replace")):
        return f"is {named(kind)}, a model is needed"
    if _is_text(head) and len(head) > 8:
        return f"not a GGUF but text, {_told(head)}: a failed download?"
    return f"not a GGUF file: it starts with {_told(head) if _is_text(head) else head[:8].hex(' ')}"


def _is_text(head: bytes) -> bool:
    return all(32 <= letter < 127 or letter in b"\t\r\n" for letter in head)


def _told(text: bytes) -> str:
    """How a text begins, on one line."""
    return repr(" ".join(text[:40].decode("ascii").split()))
