"""Texts of unknown origin as single values of other languages: one function each, and no other file quotes.

Names of models, tensors, devices and files come from strangers. What a machine reads back is the same text
or is refused with Unquotable: a wrong path is worse than none. What people read shows every letter that is
not printable (controls, marks of direction, lone surrogates) as Python spells it: `\\x1b`, `\\u202e`.
Nothing here gives more than one line, except `document` and `running`, which keep the lines they are given.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

NAME_LETTERS = 100  # of a name within a sentence
LINE_LETTERS = 8192  # of one message
FILE_NAME_BYTES = 255  # what file systems allow
_FORBIDDEN = frozenset('<>:"/\\|?*;#')  # in file names somewhere, or in a preset
_DEVICES = frozenset(
    ["CON", "PRN", "AUX", "NUL", *(f"{port}{n}" for port in ("COM", "LPT") for n in "0123456789¹²³")]
)  # file names that Windows keeps for itself, whatever their suffix
_SECTION = str.maketrans("[]:", "()-")
_ENDS_VALUE = frozenset(";#\r\n")  # in a preset of llama.cpp, also within a word
# What moves the cursor, changes colours or turns the direction of what stands around it.
_UNRULY = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
    "\ufff9-\ufffb\U000e0000-\U000e007f]|\r(?!\n)"
)
_NO_XML = re.compile("[\x00-\x08\x0b-\x1f\ud800-\udfff\ufffe\uffff]")
_NO_UTF8 = re.compile("[\ud800-\udfff]")
_LINK = re.compile(r"\](?=\()")
_PLAIN_TENSOR = re.compile(r"[A-Za-z0-9_.-]+")


class Unquotable(ValueError):
    """A text that a language has no spelling for."""

    def __init__(self, language: str, text: str) -> None:
        super().__init__(f"{language} cannot hold {short(text) or 'an empty text'}")
        self.language, self.text = language, text


# For people


def terminal(text: str) -> str:
    """A text as one line of a terminal: what is not printable is spelt out."""
    return text if text.isprintable() else "".join(map(_shown, text))


def short(text: str, most: int = NAME_LETTERS) -> str:
    """A name within a sentence or a cell: one line, at most so many letters."""
    shown = terminal(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 3]}…"


def message(text: str) -> str:
    """A message of one line, of bounded length."""
    return short(text, LINE_LETTERS)


def document(text: str) -> str:
    """A text of several lines, each as `terminal` shows it."""
    return text if text.replace("\n", "").isprintable() else "\n".join(map(terminal, text.split("\n")))


def running(text: str) -> str:
    """A piece of prose, as a model writes it: any script and emoji, lines and tabs, but no control codes."""
    return _UNRULY.sub(lambda found: _shown(found[0]), text)


def comment(mark: str, text: str) -> str:
    """One line of comment, with its line feed; `mark` begins it."""
    return f"{mark} {message(text)}\n"


def mathtext(text: str) -> str:
    """A text in a picture: dollar signs begin no formula, an underscore in front hides no legend entry."""
    shown = short(text, 2 * NAME_LETTERS).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def file_name(text: str, suffix: str = "") -> str:
    """One name in one folder of any system, visible, no option: what may not be in it is an underscore."""
    stem = "".join("_" if letter in _FORBIDDEN or not letter.isprintable() else letter for letter in text)
    if stem.partition(".")[0].strip().upper() in _DEVICES:
        stem = f"_{stem}"
    if not stem or stem[0] in ".-~ ":
        stem = f"_{stem[1:]}"
    room = FILE_NAME_BYTES - len(suffix.encode())
    stem = stem.encode()[:room].decode(errors="ignore")
    if not suffix and stem[-1] in ". ":
        stem = f"{stem[:-1]}_"
    return stem + suffix


def heat_name(text: str) -> str:
    """The name of a source in heat and trace files: blanks are one space, the rest is printable."""
    return terminal(" ".join(text.split())) or "unnamed"


# For files


def utf8(text: str) -> str:
    """A text that UTF-8 can hold: bytes of a file name that no encoding explains become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def argument(text: str) -> str:
    """A text as one argument of a process; Unquotable for what no argument can be."""
    if "\0" in text or not _has_bytes(text):
        raise Unquotable("a command line", text)
    return text


def shell(words: Iterable[str]) -> str:
    """A command line on one line, for bash, zsh and POSIX.1-2024 shells."""
    return " ".join(map(_shell_word, words))


def heredoc(lines: Iterable[str], end: str) -> str:
    """Lines as a quoted here-document of a shell, with its end; Unquotable for what ends it early."""
    found = list(lines)
    for line in found:
        if line == end or not line.isprintable():
            raise Unquotable("a here-document", line)
    return "\n".join([*found, end])


def word(text: str) -> str:
    """A value in settings that are read word by word, line by line; Unquotable for what is not one word."""
    if not text or not text.isprintable() or " " in text:
        raise Unquotable("a line of settings", text)
    return text


def swap_command(words: Iterable[str]) -> str:
    """A command of llama-swap, which splits it as a shell does and fills in its own ${names}.

    It knows no escapes of a shell: Unquotable for a word that would become another.
    """
    found = list(words)
    for word in found:
        if "${" in word or not word.isprintable():
            raise Unquotable("llama-swap", word)
    return shell(found)


def ini_section(text: str) -> str:
    """The name of a section in a preset: brackets become round, a colon, which begins a tag, a dash."""
    name = terminal(text.translate(_SECTION)).strip()
    return f"_{name}" if name in ("", "*") else name  # [*] speaks of all models


def ini_value(text: str) -> str:
    """A value in a preset, which knows no quotes; Unquotable for what would end it or is not printable."""
    if not text or not text.isprintable() or _ENDS_VALUE & set(text) or text != text.strip():
        raise Unquotable("a preset", text)
    return text


def env_value(text: str) -> str:
    """A value in a file for `docker run --env-file`, which knows no quotes; Unquotable when not printable."""
    if not text.isprintable():
        raise Unquotable("an environment file", text)
    return text


def yaml(text: str) -> str:
    """A text as a double-quoted YAML scalar; Unquotable for lone surrogates."""
    if _NO_UTF8.search(text):
        raise Unquotable("YAML", text)
    return '"' + "".join(map(_yaml_letter, text)) + '"'


def needs_escapes(text: str) -> bool:
    """Whether a text, to be safe to look at, must stand in double quotes."""
    return not text.isprintable()


def yaml_escapes(text: str) -> str:
    """YAML in which only double-quoted scalars hold what is not printable: that spelt out."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else _yaml_letter(c) for c in text)


def compose(text: str) -> str:
    """A text as a scalar of a compose file, where $name is a variable."""
    return yaml(text.replace("$", "$$"))


def python(value: object) -> str:
    """Texts, numbers and lists of them as a Python expression on one line."""
    return repr(value)


def json_text(data: Any, indent: int | None = 2) -> str:
    """Data as JSON; what is not printable is written as \\uXXXX, lone surrogates too."""
    parts = (",", ":") if indent is None else None
    text = json.dumps(data, indent=indent, separators=parts, ensure_ascii=False)
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else _json_letter(c) for c in text)


def xml(text: str) -> str:
    """A text for ElementTree, which escapes the rest; what XML 1.0 cannot hold is shown as on a terminal."""
    return _NO_XML.sub(lambda found: _shown(found[0]), text)


def sarif(text: str) -> str:
    """The plain text of a SARIF message (2.1.0, 3.11.5 and 3.11.6): no placeholder, no link."""
    return _LINK.sub("] ", text.replace("{", "{{").replace("}", "}}"))


def uri(path: str) -> str:
    """A path as a relative or absolute URI reference, never one of another host."""
    path = path.replace(os.sep, "/")
    raw = path.encode("utf-8", "surrogateescape") if _has_bytes(path) else utf8(path).encode()
    shown = quote(raw, safe="/")
    return "/" + shown.lstrip("/") if shown.startswith("//") else shown


def prometheus_label(text: str) -> str:
    """The value of a label with its quotes (exposition format 0.0.4)."""
    text = utf8(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{text}"'


def quantize_name(text: str) -> str:
    """A tensor in a map for llama-quantize, which reads words as patterns; Unquotable for special letters."""
    if not _PLAIN_TENSOR.fullmatch(text):
        raise Unquotable("a map for llama-quantize", text)
    return text


def _shown(letter: str) -> str:
    return letter if letter.isprintable() else ascii(letter)[1:-1]


def _has_bytes(text: str) -> bool:
    """Whether the system can be given this text; file names hold odd bytes as surrogates."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _shell_word(word: str) -> str:
    if argument(word).isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_ansi_c, word)) + "'"


def _ansi_c(letter: str) -> str:
    if letter.isprintable() and letter not in "\\'!":
        return letter
    return "".join(f"\\{byte:03o}" for byte in letter.encode("utf-8", "surrogateescape"))


def _yaml_letter(letter: str) -> str:
    if letter in '"\\':
        return f"\\{letter}"
    if letter.isprintable():
        return letter
    code = ord(letter)
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def _json_letter(letter: str) -> str:
    units = letter.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
