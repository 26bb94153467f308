"""Texts of strangers in reports, records, pictures and on terminals: read back, one value, nothing else."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit
from xml.etree import ElementTree

import pytest
import yaml
from engines import missing
from hostile_texts import ANY, CRAFTED, crafted, is_argument, often, plan_of, seldom, unseemly
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from planner import quoting
from planner.check.findings import Finding, Severity, to_json, to_junit, to_sarif
from planner.errors import FileProblem, OptionProblem
from planner.model.inventory import Inventory, Tensor
from planner.model.requantise import tensor_types
from planner.plan.load_spec import LoadSpec
from planner.plan.plan import from_text, to_text
from planner.routing import expert_counts as heats
from planner.routing import trace as traces
from planner.workload import Workload
from runtime.bench.measure import Result
from runtime.bench.prometheus import prometheus
from runtime.bench.rivals import Rival

ROOT = Path(__file__).resolve().parent.parent
SPEC = LoadSpec((), (), 0, (), Workload(n_ctx=512))


# Reports


@given(path=ANY, message=ANY)
@crafted("path", "message")
@often
def test_reports_hold_one_finding(path: str, message: str) -> None:
    found = [
        Finding(path, 3, "memory", Severity.DRIFT, message),
        Finding(path, 4, "stale", Severity.NOTE, message),
    ]
    shown = found[0].text()
    assert not unseemly(shown) and "\n" not in shown
    ((entry,),) = [json.loads(to_json([path], found))["files"]]
    assert entry["path"] == path and [f["message"] for f in entry["findings"]] == [message, message]
    (case,) = ElementTree.fromstring(to_junit([path], found)).iter("testcase")
    (failure,) = case.iter("failure")
    allowed = [
        c in "\t\n" or (c >= " " and c not in "\ufffe\uffff" and unicodedata.category(c) != "Cs")
        for c in path
    ]
    if all(allowed):
        assert case.get("name") == case.get("file") == path
    assert failure.text == shown and [e.tag for e in case] == ["failure", "system-out"]
    run = json.loads(to_sarif(found, "1"))["runs"][0]
    assert len(run["results"]) == 2
    result = run["results"][0]
    said = result["message"]["text"]
    assert not re.search(r"\[[^\]]*\]\([^)]*\)", said)
    assert not re.sub(r"\{\{|\}\}", "", said).count("{") and "{0}" not in said.replace("{{", "").replace(
        "}}", ""
    )
    plain = said.replace("{{", "{").replace("}}", "}")
    assert plain == message.replace("](", "] (")
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    parts = urlsplit(uri)
    assert uri.isascii() and (parts.scheme, parts.netloc, parts.query, parts.fragment) == ("", "", "", "")
    if is_argument(path):
        back = os.fsdecode(unquote_to_bytes(parts.path))
        assert back == path or (path.startswith("//") and back == "/" + path.lstrip("/"))


@given(model=ANY, arm=ANY)
@crafted("model", "arm")
@often
def test_metrics_have_their_labels_and_no_other_series(model: str, arm: str) -> None:
    results = [Result(Rival(arm, SPEC, "", {}), {50: [2e6]}, {50: [4e6]})]
    text = prometheus(model, results)
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    plain = prometheus("m", [Result(Rival("a", SPEC, "", {}), {50: [2e6]}, {50: [4e6]})])
    benign = [s for family in text_string_to_metric_families(plain) for s in family.samples]
    assert [(s.name, s.value, set(s.labels)) for s in samples] == [
        (s.name, s.value, set(s.labels)) for s in benign
    ]
    spelt = [t.encode("utf-8", "backslashreplace").decode() for t in (model, arm)]
    assert {(s.labels["model"], s.labels["arm"]) for s in samples} == {tuple(spelt)}


# Records


@given(name=ANY)
@crafted("name")
@often
def test_a_plan_keeps_every_name_that_utf8_can_hold(name: str) -> None:
    plan = plan_of(name)
    text = to_text(plan)
    assert not unseemly(text)
    spelt = name.encode("utf-8", "backslashreplace").decode()
    assert yaml.safe_load(text)["model"]["name"] == spelt
    assert from_text(text, "plan.yaml") == plan_of(spelt)
    assert to_text(from_text(text, "plan.yaml")) == text


@given(name=ANY)
@crafted("name")
@often
def test_names_of_sources_stay_single_lines_of_heat_and_traces(name: str) -> None:
    part = heats.Part(name, heats.Phase.DECODE, 3, {0: (1, 0), 2: (0, 5)})
    heat = heats.make("", 2, 1, [part])
    text = heats.to_text(heat)
    assert not unseemly(text)
    assert heats.from_text(text, "h") == heat and len(heat.parts) == 1
    trace = traces.make("", 2, [name], [(0, True, 0, 0, (1,))])
    back = traces.from_text(traces.to_text(trace), "t")
    assert back.sources == heat.sources and back.ids.tolist() == [[1]]
    if not unseemly(name) and name.strip() and " ".join(name.split()) == name:
        assert heat.sources == (name,)


def table_of(name: str, kind: str) -> Inventory:
    """The table of one tensor."""
    tensor = Tensor(name=name, type=kind, shape=(256,), size_bytes=0, shard=0, offset=0)
    made: dict[str, Any] = {
        "name": "m",
        "architecture": "a",
        "header_digest": "",
        "hparams": {},
        "shards": (),
    }
    return Inventory(**made, tensors=(tensor,))


@given(name=ANY)
@crafted("name")
@often
def test_a_map_for_llama_quantize_has_one_word_a_tensor(name: str) -> None:
    before, after = (table_of(f"{name}.weight", kind) for kind in ("q8_0", "iq2_xs"))
    try:
        text = tensor_types(before, after)
    except OptionProblem:
        assert not re.fullmatch(r"[A-Za-z0-9_.-]+", name)
    else:
        assert text.split() == [f"{name}=iq2_xs"]


# Terminal, pictures, files


@given(text=ANY)
@crafted("text")
@often
def test_terminals_get_letters_on_one_line(text: str) -> None:
    for shown in (quoting.terminal(text), quoting.short(text), str(FileProblem(text, text))):
        assert not unseemly(shown) and "\n" not in shown
    assert len(quoting.short(text)) <= 100 and len(str(FileProblem(text, "x"))) <= 8192
    lines = quoting.document(text)
    assert not unseemly(lines) and lines.count("\n") == text.count("\n")
    if not unseemly(text) and "\n" not in text:
        assert quoting.terminal(text) == text
    else:
        assert text.isprintable() or ast.literal_eval(
            "'" + quoting.terminal(text.replace("\\", "")).replace("'", "\\'") + "'"
        ) == text.replace("\\", "")


@given(text=ANY)
@crafted("text")
@often
def test_prose_keeps_scripts_and_emoji_and_loses_controls(text: str) -> None:
    shown = quoting.running(text)
    bidi = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for letter in shown.replace("\r\n", "\n"):
        assert letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cs", "Zl", "Zp")
        assert unicodedata.bidirectional(letter) not in bidi
    assert quoting.running("👩‍👩‍👧 می‌خواهم\tcode\r\n") == "👩‍👩‍👧 می‌خواهم\tcode\r\n"


@given(text=ANY, suffix=st.sampled_from(["", ".gguf", ".inventory.yaml"]))
@seldom
def test_file_names_are_one_visible_name_in_the_folder(
    text: str, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_file_name(text, suffix, tmp_path_factory.mktemp("names"))


@pytest.mark.parametrize("text", CRAFTED)
def test_crafted_file_names(text: str, tmp_path: Path) -> None:
    check_file_name(text, ".gguf", tmp_path)


_RESERVED = r"(CON|PRN|AUX|NUL|(COM|LPT)[0-9¹²³])\s*(\..*)?"  # by Windows, whatever follows a point


def check_file_name(text: str, suffix: str, folder: Path) -> None:
    name = quoting.file_name(text, suffix)
    assert name.endswith(suffix) and len(name.encode()) <= 255 and not unseemly(name) and "\n" not in name
    assert not set(name) & set('<>:"/\\|?*;#') and name[0] not in ".-~ " and name[-1] not in ". "
    assert not re.fullmatch(_RESERVED, name, re.IGNORECASE)
    (folder / name).write_text("")
    assert [path.name for path in folder.iterdir()] == [name]
    stem = name[: len(name) - len(suffix)]
    assert quoting.file_name(stem, suffix) == name
    plain = re.fullmatch(r"[\w(][\w()+ .-]{0,80}[\w)]", text, re.ASCII)
    if plain and not re.fullmatch(_RESERVED, text, re.IGNORECASE):
        assert stem == text


@pytest.fixture
def plots() -> Any:
    try:
        import matplotlib
    except ImportError:
        missing("matplotlib is not here", "pip install 'atsplan[plot]'")
    from commands.shared.pictures import pyplot

    with matplotlib.rc_context({"text.usetex": True}):
        made = pyplot()
        matplotlib.rcParams["svg.fonttype"] = "none"
        yield made


@pytest.mark.parametrize("text", CRAFTED)
def test_pictures_show_texts_as_they_are(plots: Any, text: str, tmp_path: Path) -> None:
    """Also where the user's own settings send every text through TeX."""
    from commands.shared.pictures import save

    figure, axes = plots.subplots()
    axes.plot([0, 1], label=quoting.mathtext(text or "x"))
    axes.set_yticks([0], [quoting.mathtext(text)])
    axes.set_title(quoting.mathtext(text))
    axes.legend()
    save(figure, tmp_path / "p.svg")
    tree = ElementTree.parse(tmp_path / "p.svg")
    shown = ["".join(node.itertext()) for node in tree.iter("{http://www.w3.org/2000/svg}text")]
    expected = quoting.terminal(text).strip()
    assert expected == "" or sum(each.strip() == expected for each in shown) == 3


def test_long_names_stay_within_a_picture() -> None:
    assert len(quoting.mathtext("$" * 10**6)) <= 400 + 1


_PROGRESS = """
import sys, time
from commands.shared import console
console._SHOWN_AFTER_S = 0.0
with console.progress() as bar:
    bar.add_task(sys.argv[1], total=2, rate=sys.argv[1])
    time.sleep(0.3)
    bar.refresh()
"""


def test_progress_shows_names_as_they_are() -> None:
    """On a terminal, where colours of our own are at work."""
    ours, theirs = pty.openpty()
    name = "\x1b]0;evil\x07[red]x[/red]\u202e"
    child = [sys.executable, "-c", _PROGRESS, name]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(child, stderr=theirs, env=environment, timeout=60, check=True)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0 and "\x1b]0;" not in shown and "\u202e" not in shown
    assert shown.count("\\x1b]0;evil\\x07[red]x[/red]\\u202e") >= 2


def test_tables_hold_one_row_a_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from commands.shared.console import out_table, table

    monkeypatch.setenv("COLUMNS", "1000")  # narrower ones wrap inside a row
    for text in CRAFTED:
        made = table("head [red]", "second")
        made.add_row(text, "[bold]x[/bold]")
        out_table(made)
        shown = capsys.readouterr().out
        assert not unseemly(shown.replace("─", "-"))
        lines = [line.strip() for line in shown.splitlines() if line.strip()]
        assert len(lines) == 3 and "head [red]" in lines[0] and lines[2].endswith("[bold]x[/bold]")
        assert lines[2].removesuffix("[bold]x[/bold]").strip() == quoting.terminal(text).strip()
