"""Plans of older schemas are read by every command, and `fmt` brings them to today's.

`data/plans-of-schema-1` keeps four plans as they were written then: one of a single GPU, one with stripes,
one of two GPUs, one with a remote GPU.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hand_plans import hand_plan

from atsplan import main
from planner.errors import FieldProblem
from planner.model.gguf.reader import read_model
from planner.plan.difference import difference
from planner.plan.plan import from_text, to_text, to_text_of_schema_1
from planner.records import digest
from rewriter.rewrite import RewriteOptions, rewrite
from rewriter.stamp import PLAN_DIGEST, plan_digest
from rewriter.verify import NotFaithful, verify

OLD = sorted((Path(__file__).parent / "data" / "plans-of-schema-1").glob("*.yaml"))
of_each = pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)


def told(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def by_hand(text: str) -> str:
    """A text of schema 1 as schema 2 has it."""
    return re.sub(r", memory_from: formula}$", "}", text.replace("schema: 1\n", "schema: 2\n", 1), flags=re.M)


def test_some_are_kept() -> None:
    assert len(OLD) == 4
    assert all(path.read_text().count("memory_from: formula") >= 1 for path in OLD)


@of_each
def test_only_the_schema_and_what_left_it_differ(path: Path) -> None:
    text = path.read_text()
    plan = from_text(text, path.name)
    assert to_text(plan) == by_hand(text)
    assert plan == from_text(by_hand(text), path.name)
    assert to_text_of_schema_1(plan) == text


@of_each
def test_fmt_migrates(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    shutil.copy(path, copy)
    assert told("fmt", "--check", copy).exit_code == 1
    assert told("fmt", copy).exit_code == 0
    assert copy.read_text() == by_hand(path.read_text())
    assert told("fmt", "--check", copy).exit_code == 0


@of_each
def test_check_notes_it_in_one_line_and_passes(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name  # where no inputs lie: what it rests on may have other figures today
    shutil.copy(path, copy)
    result = told("check", "--allow-missing", "--json", copy)
    found = json.loads(result.stdout)["files"][0]["findings"]
    assert result.exit_code == 0
    assert [(f["line"], f["severity"], f["message"]) for f in found if f["rule"] != "inputs"] == [
        (1, "note", "schema 1: atsplan fmt writes it in today's, 2")
    ]


def test_rules_of_schema_1_beside_pins_were_priced_without_them(tmp_path: Path) -> None:
    """Such a rule may be faster than the plan; of today's schema it keeps the pins and may not."""
    plan = from_text(next(path for path in OLD if "gpt-oss" in path.name).read_text(), "plan")
    rules = tuple(
        rule.model_copy(update={"tpot_ns": rule.tpot_ns // 2, "prefill_ns": rule.prefill_ns // 2})
        for rule in plan.baselines
    )
    pinned = plan.constraints.model_copy(update={"pins": ("blk.0.*=gpu",)})
    changed = plan.model_copy(update={"constraints": pinned, "baselines": rules})
    copy = tmp_path / "plan.yaml"
    for text, code in ((to_text_of_schema_1(changed), 0), (to_text(changed), 1)):
        copy.write_text(text)
        result = told("check", "--allow-missing", copy)
        assert (result.exit_code, "slower than the stock rule" in result.output) == (code, bool(code))


def test_an_old_plan_that_is_not_canonical_is_drift_still(tmp_path: Path) -> None:
    copy = tmp_path / "plan.yaml"
    copy.write_text(OLD[0].read_text().replace("op_offload:", "op_offload:  ", 1))
    result = told("check", "--allow-missing", "--json", copy)
    found = json.loads(result.stdout)["files"][0]["findings"]
    rules = {f["rule"]: f["line"] for f in found}
    assert (result.exit_code, "schema" in rules) == (1, True)
    assert copy.read_text().splitlines()[rules["canonical"] - 1].startswith("op_offload:  ")


@of_each
def test_explain_diff_and_export_say_what_they_say_of_the_migrated_plan(path: Path, tmp_path: Path) -> None:
    now = tmp_path / path.name
    now.write_text(by_hand(path.read_text()))
    assert told("diff", path, now).stdout == told("diff", now, now).stdout
    commands = [("explain", ()), ("export", ("--format", "llama-server"))]
    if "+heat" in path.name or "rpc" in path.name:  # no stock tool takes these as they are
        commands = commands[:1]
    for name, words in commands:
        old, new = told(name, path, *words), told(name, now, *words)
        assert (old.exit_code, old.stdout) == (0, new.stdout.replace(str(now), str(path))), old.output


@pytest.mark.parametrize(
    ("change", "line", "why"),
    [
        (
            lambda text: text.replace("schema: 1", "schema: 2"),
            None,
            "memory_from: unknown key: a key of schema",
        ),
        (lambda text: text.replace("schema: 1", "schema: 3"), 1, "3 was written by a newer atsplan"),
        (lambda text: text.replace("schema: 1", "schema: 3"), 1, "this one reads up to 2"),
        (lambda text: text.replace("schema: 1", "schema: 0"), 1, "0 is none; the oldest is 1"),
        (
            lambda text: text.replace("schema: 1", "schema: true"),
            1,
            "schema: input should be a valid integer",
        ),
        (lambda text: text.replace("memory_from: formula", "memory_from: [a]"), None, "memory_from: unknown"),
        (
            lambda text: text.replace("memory_from: formula", "memory_form: a"),
            None,
            "memory_form: unknown key",
        ),
        (lambda text: text.replace("devices:", "devices: 1\nolder:", 1), None, "devices: input should be"),
    ],
)
def test_what_is_of_neither_schema_is_refused_where_it_stands(
    change: Callable[[str], str], line: int | None, why: str
) -> None:
    text = change(OLD[0].read_text())
    with pytest.raises(FieldProblem) as caught:
        from_text(text, "old.yaml")
    assert why in str(caught.value)
    where = line or next(
        n for n, each in enumerate(text.splitlines(), 1) if re.match("devices: 1|- .*memory_f", each)
    )
    assert caught.value.line == where


def test_a_file_rewritten_by_an_old_plan_is_of_the_plan_in_every_schema(
    moe_model: Path, tmp_path: Path
) -> None:
    model = read_model(moe_model)
    plan = hand_plan(model)
    out = tmp_path / "out.gguf"
    rewrite(model, plan, out, RewriteOptions())
    now, then = plan_digest(plan).encode(), digest(to_text_of_schema_1(plan)).encode()
    data = out.read_bytes()
    assert data.count(now) == 1 and PLAN_DIGEST.encode() in data
    out.write_bytes(data.replace(now, then))
    for text in (to_text(plan), to_text_of_schema_1(plan)):
        verify(model, (out,), from_text(text, "plan.yaml"))
    out.write_bytes(data.replace(now, b"sha256:" + b"0" * 64))
    with pytest.raises(NotFaithful, match="made by another plan"):
        verify(model, (out,), plan)
    assert difference(plan, from_text(to_text_of_schema_1(plan), "plan.yaml")).changes == ()
