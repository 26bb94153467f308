"""Patterns of overrides are matched in time linear in the names, and as the engine would match them."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.model import inventory as inventories
from planner.plan import plan as plans
from planner.plan.override_match import MOST_OTHERS, matches
from planner.plan.overrides import collate
from planner.plan.patterns import hits, listed, searcher

PLANS = Path(__file__).parent.parent / "plans"
STEMS = ["ffn_gate_exps", "ffn_up.7", "attn_q", "a|b", "x(y)", "p-q", "[0-9]", "ü"]
NAMES = [f"blk.{n}.{stem}.weight" for n in (*range(24), 100, 511) for stem in STEMS] + ["output.weight"]


@settings(max_examples=200, deadline=None)
@given(st.sets(st.sampled_from(NAMES), min_size=1))
def test_patterns_of_our_own_list_exactly_the_names_they_were_made_from(wanted: set[str]) -> None:
    for override in collate(dict.fromkeys(sorted(wanted), "CPU")):
        by_re = {name for name in NAMES if re.search(override.pattern, name)}
        assert set(hits(override.pattern, NAMES)) == by_re <= wanted


@pytest.mark.parametrize("name", sorted(path.name for path in PLANS.glob("*.yaml"))[::6])
def test_patterns_of_committed_plans_are_of_our_own_form(name: str) -> None:
    plan = plans.from_text((PLANS / name).read_text(), name)
    source = PLANS / "inputs" / f"{plan.model.name}.inventory.yaml"
    names = [t.name for t in inventories.from_text(source.read_text(), str(source)).tensors]
    for override in plan.overrides:
        assert listed(override.pattern) is not None
        assert set(hits(override.pattern, names)) == {n for n in names if re.search(override.pattern, n)}


OF_USERS = [
    r"\.ffn_.*_exps\.",
    r"blk\.([2-9]|1[0-5])\.ffn_(up|down|gate_up|gate)_(ch|)exps",
    r"exps",
    r"blk\.\d+\.attn",
    r"^blk\.1",
    r"ffn_up\.7|attn_q\.weight$",
    r"blk\.1[^1]",
    r"^blk\.[0-9-]+\.attn_q\.weight$",
    r"^$",
    r"^[9-1]$",
]


@pytest.mark.parametrize("pattern", OF_USERS[:-1])
def test_other_patterns_match_as_a_backtracking_matcher_has_it(pattern: str) -> None:
    assert set(hits(pattern, NAMES)) == {name for name in NAMES if re.search(pattern, name)}


BAD = ["(", "(?=a)", r"(a)\1", "(" * 5000, "[9-1]", "a{1001}", "x" * 9000 + "("]


@pytest.mark.parametrize("pattern", BAD)
def test_what_cannot_be_matched_in_bounded_time_is_no_pattern(pattern: str) -> None:
    assert searcher(pattern) is None
    assert list(hits(pattern, NAMES)) == []


CATASTROPHES = ["(a+)+$", "(a|a)*$", "(a|aa)+$", "(.*)*x", ".*.*.*.*.*.*.*.*=", "(x+x+)+y", "((a*)*)*b"]


@pytest.mark.parametrize("pattern", CATASTROPHES)
def test_catastrophes_end_at_once_and_are_named(pattern: str) -> None:
    long = inventories.Tensor(name="a" * 4000 + "!", type="f32", shape=(1,), size_bytes=4, shard=0, offset=0)
    one = inventories.Inventory(
        name="m", architecture="llama", header_digest="", hparams={}, shards=(), tensors=(long,)
    )
    before = time.process_time()
    found = matches(one, [(pattern, "CPU")])
    assert time.process_time() - before < 5  # a matcher that goes back would need the age of the universe
    assert any("never end" in fault for fault in found[0].faults)


def test_patterns_of_other_forms_are_counted() -> None:
    one = inventories.Inventory(
        name="m", architecture="llama", header_digest="", hparams={}, shards=(), tensors=()
    )
    found = matches(one, [("exps", "CPU")] * (MOST_OTHERS + 1))
    assert all("matches no tensor" in match.faults for match in found)
