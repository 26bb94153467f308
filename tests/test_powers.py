"""Chances to a power: the same number everywhere, and right."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from planner.machine.op_time import experts_touched
from planner.powers import power

ROOT = Path(__file__).parent.parent
# Whose base is a whole number or a fraction, or whose answer is rounded to a whole number.
OTHERS = {"planner/plan/plan.py", "planner/routing/residency.py", "planner/routing/verify_batches.py"}


@pytest.mark.parametrize("base", [0.0, 1.0, 0.5, 1 - 8 / 128, 1 - 1 / 3, 1 - 2**-40])
@pytest.mark.parametrize("exponent", [0, 1, 2, 7, 32, 511, 512, 4096])
def test_a_power_is_within_rounding_of_the_true_one(base: float, exponent: int) -> None:
    true = Fraction(base) ** exponent
    assert abs(Fraction(power(base, exponent)) - true) <= true / 10**12 + Fraction(1, 2**1000)


def test_a_negative_exponent_is_none() -> None:
    with pytest.raises(ValueError, match="-1 is negative"):
        power(0.5, -1)


def test_the_experts_of_a_batch_are_those_of_exact_arithmetic() -> None:
    for experts, used, batch in ((128, 8, 512), (32, 4, 7), (512, 10, 2048), (8, 2, 1)):
        share = Fraction(used, experts)
        true = experts * (1 - (1 - share) / (1 + (batch - 1) * share))
        assert abs(Fraction(experts_touched(experts, used, batch)) - true) < Fraction(1, 10**9)


def test_no_chance_is_given_to_the_c_library_s_pow() -> None:
    """A power whose exponent is no constant, in what plans are made of."""
    found = set()
    for path in (ROOT / "planner").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if any(not isinstance(exponent, ast.Constant) for exponent in exponents(node)):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == OTHERS


def exponents(node: ast.AST) -> Iterator[ast.AST]:
    """Of `a ** b`, `a **= b`, and of any pow or power but ours."""
    match node:
        case ast.BinOp(op=ast.Pow(), right=exponent) | ast.AugAssign(op=ast.Pow(), value=exponent):
            yield exponent
        case ast.Call(func=ast.Name("pow") | ast.Attribute(attr="pow" | "power" | "float_power"), args=args):
            yield from args[1:2] or [node]


@pytest.mark.parametrize("text", ["a ** n", "a **= n", "pow(a, n)", "math.pow(a, n)", "np.power(a, n)"])
def test_no_way_to_raise_a_chance_is_overlooked(text: str) -> None:
    assert [exponent for node in ast.walk(ast.parse(text)) for exponent in exponents(node)]
    assert not [exponent for node in ast.walk(ast.parse("power(a, n)")) for exponent in exponents(node)]
