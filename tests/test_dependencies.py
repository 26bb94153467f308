"""No installed dependency is of a version with a published fault, as far as the committed list knows."""

from __future__ import annotations

import csv
import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

LIST = Path(__file__).parent / "data" / "advisories.csv"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(name: str, extras: frozenset[str], seen: set[str]) -> set[str]:
    """A distribution and all that it needs, as far as they are installed here."""
    try:
        requirements = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return seen
    seen.add(canonical(name))
    for text in requirements:
        wanted = Requirement(text)
        fits = wanted.marker is None or any(wanted.marker.evaluate({"extra": e}) for e in ("", *extras))
        if fits and canonical(wanted.name) not in seen:
            needed(wanted.name, frozenset(wanted.extras), seen)
    return seen


def affected(installed: dict[str, str]) -> list[str]:
    with LIST.open() as file:
        return [
            f"{row['package']} {installed[row['package']]}: {row['advisory']}, {row['fault']}"
            for row in csv.DictReader(file)
            if row["package"] in installed
            and SpecifierSet(row["affected"]).contains(installed[row["package"]], prereleases=True)
        ]


def test_no_dependency_has_a_fault_that_is_known_here() -> None:
    names = needed("atsplan", frozenset({"plot", "gpu"}), set())
    assert {"pydantic", "pyyaml", "numpy", "click", "google-re2"} <= names
    assert affected({name: metadata.version(name) for name in names}) == []


def test_every_line_says_where_it_is_written() -> None:
    with LIST.open() as file:
        for row in csv.DictReader(file):
            assert re.search(r"PYSEC-|https://|GHSA-", row["source"]), row
            assert re.fullmatch(r"20\d\d-\d\d-\d\d", row["checked"]) and row["fault"], row


def test_an_affected_version_is_named() -> None:
    assert len(affected({"pyyaml": "5.3", "protobuf": "6.33.4", "numpy": "2.0"})) == 2
    assert affected({"protobuf": "6.33.5"}) == []
