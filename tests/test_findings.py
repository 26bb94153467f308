"""The report formats: exit codes, JUnit, SARIF and JSON say the same."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from planner.check.findings import Finding, Severity, exit_code, to_json, to_junit, to_sarif

DRIFT = Finding("plans/a.yaml", 12, "memory", Severity.DRIFT, "CUDA0 holds 9 MiB & 8 are <there>")
NOTE = Finding("plans/b.yaml", 1, "stale", Severity.NOTE, "profile is 200 days old")
INPUT = Finding("plans/c.yaml", 3, "schema", Severity.INPUT, "schema: input should be 1")
PATHS = ["plans/a.yaml", "plans/b.yaml", "plans/c.yaml", "plans/d.yaml"]


def test_exit_codes() -> None:
    assert [exit_code(f) for f in ([], [NOTE], [NOTE, DRIFT], [DRIFT, INPUT])] == [0, 0, 1, 2]


def test_junit_counts_failures_and_errors() -> None:
    suite = ElementTree.fromstring(to_junit(PATHS, [DRIFT, NOTE, INPUT]))[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "1", "1")
    failure = suite.find("testcase[@name='plans/a.yaml']/failure")
    assert failure is not None
    assert failure.text == DRIFT.text()


def test_sarif_places_each_finding() -> None:
    results = json.loads(to_sarif([DRIFT, NOTE], "0"))["runs"][0]["results"]
    assert [(r["ruleId"], r["level"]) for r in results] == [("memory", "error"), ("stale", "note")]
    place = results[0]["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("plans/a.yaml", 12)


def test_json_groups_by_file() -> None:
    report = json.loads(to_json(PATHS, [DRIFT]))
    assert report["exit_code"] == 1
    assert [len(f["findings"]) for f in report["files"]] == [1, 0, 0, 0]
