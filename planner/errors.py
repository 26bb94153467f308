"""The errors of atsplan: types that hold the facts; the text is built once, when printed.

Exit codes: 1 the answer is no, 2 the input is wrong, 3 the engine or the machine failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from planner import quoting


class AtsplanError(Exception):
    """Root of everything atsplan raises on purpose; `str()` is the one line a user reads."""

    exit_code: ClassVar[int] = 2

    def __str__(self) -> str:
        # Messages quote names out of files: no name may break the line or speak to the terminal.
        return quoting.message(self.message())

    def message(self) -> str:
        """The one line for the user: what is wrong, where, and what to do."""
        return ", ".join(str(a) for a in self.args)


class InputError(AtsplanError):
    """A file or an option is wrong."""

    exit_code = 2


class AnswerIsNo(AtsplanError):
    """The question was understood and the answer is no: infeasible, drift found, slower than a baseline."""

    exit_code = 1


class MachineError(AtsplanError):
    """The engine or the machine failed."""

    exit_code = 3


@dataclass(eq=False)
class FileProblem(InputError):
    """A file that cannot be used, and the reason."""

    path: str
    why: str

    def message(self) -> str:
        return f"{self.path}: {self.why}"


@dataclass(eq=False)
class FieldProblem(InputError):
    """A wrong value in a YAML file; `line` counts from 1, 0 when unknown."""

    path: str
    line: int
    field: str
    why: str

    def message(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        return f"{place}: {self.field}: {self.why}" if self.field else f"{place}: {self.why}"


@dataclass(eq=False)
class OptionProblem(InputError):
    """A command-line value that makes no sense."""

    option: str
    value: str
    why: str

    def message(self) -> str:
        return f"{' '.join(filter(None, (self.option, self.value)))}: {self.why}"


@dataclass(eq=False)
class EngineProblem(MachineError):
    """The inference engine is missing, unusable, or failed."""

    engine: str
    why: str

    def message(self) -> str:
        return f"engine {self.engine}: {self.why}"
