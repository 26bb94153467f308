"""Wrong command lines: one line, exit 2; a group alone shows its help."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from atsplan import main


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["solve"], "atsplan solve: Missing argument 'MODEL'."),
        (["nope"], "atsplan: No such command 'nope'."),
        (["heat", "nope"], "atsplan heat: No such command 'nope'."),
        (["export", "x", "--format", "q"], "atsplan export: Invalid value for '--format': 'q'"),
        (["solve", "x", "--time-limit", "0"], "atsplan solve: Invalid value for '--time-limit'"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], part: str) -> None:
    result = CliRunner().invoke(main, arguments, prog_name="atsplan")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(part)
    assert result.stderr.count("\n") == 1
    assert "--help)" in result.stderr


def test_a_group_alone_shows_its_help() -> None:
    assert "Commands:" in CliRunner().invoke(main, ["heat"]).output
    assert "solve" in CliRunner().invoke(main, []).output
