"""What a check found, and the report formats that code forges show inline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from xml.etree import ElementTree

from planner.quoting import json_text, sarif, terminal, uri, xml


class Severity(StrEnum):
    """How much a finding matters; only NOTE leaves the exit code at 0."""

    INPUT = "input"  # the file cannot be judged: exit 2
    DRIFT = "drift"  # the plan is wrong, stale or not what its inputs give: exit 1
    NOTE = "note"


RULES = {
    "schema": "The file is not a plan of a known schema, or of an older one",
    "canonical": "The file is not in canonical form",
    "inputs": "The plan's inventory or profile is missing or another one",
    "units": "The plan does not place exactly the model's units",
    "sites": "A unit is at a place where it must not be",
    "overrides": "An override does not match exactly the tensors it is meant to",
    "memory": "The byte counts of a device are wrong or above its budget",
    "cost": "A recorded prediction is not what the inputs give",
    "optimal": "A better placement exists",
    "search": "The search of the plan, or of its check, was ended by a clock",
    "stale": "The profile is old or was made with another engine",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about one file; `line` counts from 1."""

    path: str
    line: int
    rule: str  # a key of RULES
    severity: Severity
    message: str

    def text(self) -> str:
        """`path:line: message [rule]`, on one line."""
        return terminal(f"{self.path}:{self.line}: {self.message} [{self.rule}]")


def exit_code(findings: Iterable[Finding]) -> int:
    """2 when a file could not be judged, else 1 on drift, else 0."""
    severities = {finding.severity for finding in findings}
    if Severity.INPUT in severities:
        return 2
    return 1 if Severity.DRIFT in severities else 0


def to_json(paths: Sequence[str], findings: Sequence[Finding]) -> str:
    """Findings by file, as JSON."""
    files = [
        {
            "path": path,
            "findings": [
                {"line": f.line, "rule": f.rule, "severity": f.severity.value, "message": f.message}
                for f in findings
                if f.path == path
            ],
        }
        for path in paths
    ]
    return json_text({"exit_code": exit_code(findings), "files": files})


def to_junit(paths: Sequence[str], findings: Sequence[Finding]) -> str:
    """JUnit XML: one test case a file, a failure for drift, an error for a file that cannot be judged."""
    suite = ElementTree.Element("testsuite", name="atsplan check", tests=str(len(paths)))
    counts = {"failure": 0, "error": 0}
    for path in paths:
        name = xml(path)
        case = ElementTree.SubElement(suite, "testcase", classname="atsplan.check", name=name, file=name)
        mine = [f for f in findings if f.path == path]
        bad = [f for f in mine if f.severity is not Severity.NOTE]
        if bad:
            tag = "error" if any(f.severity is Severity.INPUT for f in bad) else "failure"
            counts[tag] += 1
            node = ElementTree.SubElement(case, tag, message=xml(bad[0].message), type=bad[0].rule)
            node.text = xml("\n".join(f.text() for f in bad))
        notes = [xml(f.text()) for f in mine if f.severity is Severity.NOTE]
        if notes:
            ElementTree.SubElement(case, "system-out").text = "\n".join(notes)
    suite.set("failures", str(counts["failure"]))
    suite.set("errors", str(counts["error"]))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def to_sarif(findings: Sequence[Finding], version: str) -> str:
    """SARIF 2.1.0 with one rule per kind of finding (OASIS sarif-v2.1.0)."""
    levels = {Severity.INPUT: "error", Severity.DRIFT: "error", Severity.NOTE: "note"}
    rules = [{"id": name, "shortDescription": {"text": text}} for name, text in RULES.items()]
    results = [
        {
            "ruleId": f.rule,
            "ruleIndex": list(RULES).index(f.rule),
            "level": levels[f.severity],
            "message": {"text": sarif(f.message)},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": uri(f.path)},
                        "region": {"startLine": max(f.line, 1)},
                    }
                }
            ],
        }
        for f in findings
    ]
    driver = {"name": "atsplan", "version": version, "rules": rules}
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json_text(log) + "\n"
