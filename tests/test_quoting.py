"""Texts of strangers through every writer, read back by parsers of the formats: one value, the right one.

Each format has its own account here of what it can hold; what it cannot is refused, never changed.
"""

from __future__ import annotations

import ast
import configparser
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit
from xml.etree import ElementTree

import pytest
import yaml
from engines import missing
from hostile_texts import ANY, CRAFTED, unseemly
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from sample_plan import sample_plan

from planner import quoting
from planner.check.findings import Finding, Severity, to_json, to_junit, to_sarif
from planner.errors import FileProblem, OptionProblem
from planner.model.inventory import Inventory, Tensor
from planner.model.requantise import tensor_types
from planner.plan.load_spec import LoadSpec
from planner.plan.plan import Plan, from_text, to_text
from planner.routing import expert_counts as heats
from planner.routing import trace as traces
from planner.workload import Workload
from runtime.bench.measure import Result
from runtime.bench.prometheus import prometheus
from runtime.bench.rivals import Rival
from runtime.tools import hybrid_script
from runtime.tools.export import FORMATS, NotHeld, Published, arguments, export
from runtime.tools.options import ENVIRONMENT, Stock, options, stock

ROOT = Path(__file__).resolve().parent.parent
SPEC = LoadSpec((), (), 0, (), Workload(n_ctx=512))
PLAIN = stock(SPEC, 4)
PATH = ANY.map(lambda text: text or "m")
often = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
seldom = settings(often, max_examples=40)


def crafted(*names: str) -> Callable[[Any], Any]:
    """Every crafted text as an explicit example for each of these arguments."""

    def wrapped(test: Any) -> Any:
        for text in CRAFTED:
            test = example(**{name: text or ("m" if name == "model" else "") for name in names})(test)
        return test

    return wrapped


def plan_of(name: str) -> Plan:
    plan = sample_plan()
    return plan.model_copy(
        update={"command": f"solve {name}", "model": plan.model.model_copy(update={"name": name})}
    )


def exported(form: str, name: str, model: str, published: Published | None = None) -> str | None:
    """The text; None where the format refuses the path, in one line. What it prints is all printable."""
    try:
        text = export(plan_of(name), replace(PLAIN, notes=(name,)), model, form, published)
    except NotHeld as problem:
        assert not unseemly(str(problem)) and "\n" not in str(problem) and len(str(problem)) < 300
        return None
    assert not unseemly(text)
    return text


def is_argument(text: str) -> bool:
    """Whether the system can give it to a program."""
    return "\0" not in text and not any("\ud800" <= c < "\udc80" or "\udcff" < c < "\ue000" for c in text)


def words(model: str) -> list[str]:
    """The arguments that every tool must get for this path."""
    return [part for pair in options(PLAIN, model) for part in pair if part]


# Export formats


@pytest.mark.parametrize("form", ["llama-server", "llama-cli", "llama-bench"])
@given(name=ANY, model=PATH)
@crafted("name", "model")
@often
def test_bash_reads_one_argument(form: str, name: str, model: str) -> None:
    text = exported(form, name, model)
    assert (text is not None) == is_argument(model)
    if text is None or len(model) > 9000:  # the system's own limit of one argument
        return
    head = f"cd /nowhere 2>/dev/null; {form}() {{ printf '%s\\0' \"$@\"; }}\n"
    done = subprocess.run(["bash"], input=head.encode() + text.encode(), capture_output=True, check=True)
    assert done.stderr == b""
    flag = "-m" if form == "llama-bench" else "--model"
    got = done.stdout.split(b"\0")[:-1]
    assert got[got.index(flag.encode()) + 1] == os.fsencode(model)
    if form == "llama-cli":
        assert got == list(map(os.fsencode, words(model)))


@given(device=ANY, name=ANY)
@crafted("device", "name")
@seldom
def test_a_script_with_slots_writes_them_and_runs_one_command(device: str, name: str) -> None:
    """Its here-document ends where it should, whatever a device is called; or it is refused in one line."""
    overrides = ((r"^blk\.0\.ffn_up_exps\.weight$", f"hybrid:{device or 'X'}:4"),)
    spec = replace(SPEC, devices=(device or "X",), tensor_split=(4,), overrides=overrides)
    residents = ((0, 8, (3, 1, 2, 0)),)
    command = export(plan_of(name), replace(PLAIN, notes=(name,)), "m.gguf", "llama-server")
    try:
        text = hybrid_script.script(spec, residents, command, name)
    except NotHeld as problem:
        assert not unseemly(str(problem)) and "\n" not in str(problem)
        assert not (device.isascii() and device.isalnum())
        return
    assert not unseemly(text)
    head = "llama-server() { echo server $ATSPLAN_HYBRID; }; atsplan() { echo native.so; }\n"
    with tempfile.TemporaryDirectory() as folder:
        given_text = (head + text).encode()
        done = subprocess.run(["bash"], input=given_text, capture_output=True, check=True, cwd=folder)
        assert done.stderr == b""
        (made,) = Path(folder).iterdir()
        assert done.stdout == f"server {made.name}\n".encode() or " " in made.name
        assert made.read_text() == hybrid_script.slots_text(spec, residents)


def read_preset(text: str) -> dict[str, dict[str, str]]:
    """Presets by the grammar of llama.cpp's own reader: values end at a comment, names at a bracket."""
    found: dict[str, dict[str, str]] = {}
    for line in re.split(r"\r\n|\n|\r", text):
        if head := re.fullmatch(r"\[[ \t]*([^]]+)\][ \t]*([;#].*)?", line):
            found[head[1]] = {}
        elif pair := re.fullmatch(
            r"([A-Za-z_][A-Za-z0-9_.-]*)[ \t]*=[ \t]*(.*?)[ \t]*([;#].*)?", line, re.DOTALL
        ):
            list(found.values())[-1][pair[1]] = pair[2]
        else:
            assert re.fullmatch(r"[ \t]*([;#].*)?", line, re.DOTALL), line
    return found


@given(name=ANY, model=PATH)
@crafted("name", "model")
@often
def test_a_preset_has_one_section_and_the_path(name: str, model: str) -> None:
    text = exported("preset", name, model)
    holds = bool(model) and not unseemly(model) and not set(model) & set("\n;#") and model.strip() == model
    assert (text is not None) == holds
    if text is None:
        return
    ((section, values),) = read_preset(text).items()
    assert values == {option.removeprefix("--"): value or "true" for option, value in options(PLAIN, model)}
    assert section.strip() == section not in ("", "*") and not set(section) & set("[]:")
    if not unseemly(name) and not set(name) & set("[]:\n") and name.strip() == name not in ("", "*"):
        assert section == name
    python = configparser.RawConfigParser(default_section="\0", delimiters="=", strict=True)
    python.read_string(text)
    assert {s: dict(python[s]) for s in python.sections()} == {section: values}


@given(name=ANY, model=PATH)
@crafted("name", "model")
@often
def test_an_environment_file_has_the_variables_and_no_other(name: str, model: str) -> None:
    text = exported("env", name, model)
    assert (text is not None) == (not unseemly(model) and "\n" not in model)
    if text is None:
        return
    lines = [line.lstrip() for line in text.split("\n")]  # as docker reads them
    found = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    wanted = {ENVIRONMENT[o]: v for o, v in options(PLAIN, model) if o in ENVIRONMENT and v}
    assert found == wanted


@given(name=ANY, model=PATH)
@crafted("name", "model")
@often
def test_json_holds_everything(name: str, model: str) -> None:
    text = exported("json", name, model)
    assert (text is not None) == is_argument(model)
    if text is not None:
        data = json.loads(text)
        assert data["model"] == name and data["arguments"] == words(model)
        assert data["environment"]["LLAMA_ARG_MODEL"] == model and data["notes"] == [name]


@given(name=ANY, model=PATH)
@crafted("name", "model")
@often
def test_compose_gets_its_command_its_folder_and_its_port(name: str, model: str) -> None:
    text = exported("docker-compose", name, model)
    surrogates = any(unicodedata.category(c) == "Cs" for c in model)
    assert (text is not None) == (is_argument(model) and not surrogates)
    if text is None:
        return
    ((key, service),) = yaml.safe_load(text)["services"].items()
    assert key == "llama" and set(service) == {"image", "command", "ports", "volumes"}
    folder, slash, file = model.rpartition("/")
    given = [interpolated(word) for word in service["command"]]
    assert given == [*words(f"/models/{file}"), "--host", "0.0.0.0", "--port", "8080"]
    (volume,) = service["volumes"]
    assert interpolated(volume.pop("source")) == (folder or slash or ".")
    assert volume == {"type": "bind", "target": "/models", "read_only": True}
    assert service["ports"] == ["127.0.0.1:8080:8080"]


def interpolated(text: str) -> str:
    """What compose makes of a scalar: $$ is a dollar sign, and nothing else may begin with one."""
    assert not re.sub(r"\$\$", "", text).count("$"), text
    return text.replace("$$", "$")


@pytest.mark.parametrize(
    ("published", "port", "key"),
    [
        (Published(), "127.0.0.1:8080:8080", False),
        (Published("::1"), "[::1]:8080:8080", False),
        (Published("0.0.0.0"), "0.0.0.0:8080:8080", True),
        (Published("::"), "[::]:8080:8080", True),
        (Published("192.168.1.4", keyless=True), "192.168.1.4:8080:8080", False),
    ],
)
def test_compose_publishes_to_this_machine_or_asks_for_a_key(
    published: Published, port: str, key: bool
) -> None:
    text = exported("docker-compose", "x", "m.gguf", published)
    assert text is not None
    service = yaml.safe_load(text)["services"]["llama"]
    assert service["ports"] == [port]
    wanted = "${LLAMA_API_KEY:?set it: the server can be reached from other machines}"
    assert service.get("environment") == ({"LLAMA_API_KEY": wanted} if key else None)
    assert ("without a key" in text) == published.keyless


def constants(tree: ast.AST) -> tuple[str, list[Any]]:
    """The shape of a program without its constants, and those."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            found.append(node.value)
            node.value = None
    return ast.dump(tree), found


@given(name=ANY, model=PATH)
@crafted("name", "model")
@often
def test_a_python_script_has_the_same_program_for_every_name(name: str, model: str) -> None:
    text, benign = exported("llama-cpp-python", name, model), exported("llama-cpp-python", "x", "m")
    assert (text is not None) == is_argument(model)
    if text is None:
        return
    assert benign is not None
    # From bytes: the comments on top could choose another encoding.
    shape, values = constants(ast.parse(text.encode()))
    assert (shape, [model if v == "m" else v for v in constants(ast.parse(benign))[1]]) == (
        constants(ast.parse(benign))[0],
        values,
    )


_STAND_IN = """
import json, os, runpy, sys, types

class Function:
    def __call__(self, *arguments):
        return 1

class Library:
    def __getattr__(self, name):
        return Function()

class Llama:
    def __init__(self, **given):
        self.path = given["model_path"]

package = types.ModuleType("llama_cpp")
package.llama_cpp = types.SimpleNamespace(_lib=Library())
package.llama_model_default_params = types.SimpleNamespace
package.Llama = Llama
sys.modules["llama_cpp"] = package
before = sorted(os.listdir())
found = [runpy.run_path(path)["llm"].path for path in sys.argv[1:]]
print(json.dumps([found, sorted(os.listdir()) == before]))
"""


def test_python_scripts_run_and_nothing_else_does(tmp_path: Path) -> None:
    paths, models = [], []
    for index, name in enumerate(CRAFTED):
        if (text := exported("llama-cpp-python", name, name)) is not None:
            path = tmp_path / f"{index}.py"
            path.write_bytes(text.encode())
            paths.append(str(path))
            models.append(name)
    child = [sys.executable, "-I", "-c", _STAND_IN, *paths]
    done = subprocess.run(child, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [models, True]


@given(name=ANY)
@crafted("name")
@often
def test_default_paths_are_names_in_the_folder(name: str) -> None:
    for form in FORMATS:
        model = quoting.file_name(name, ".gguf")
        if form == "llama-swap" and "${" in model:  # it fills in such names, and has no other spelling
            assert exported(form, name, model) is None
            continue
        assert exported(form, name, model) is not None


@pytest.mark.parametrize("text", CRAFTED)
def test_devices_and_patterns_are_arguments_too(text: str) -> None:
    spec = replace(
        SPEC, devices=(text,), tensor_split=(5,), n_gpu_layers=5, overrides=((f"^{text}$", "CPU"),)
    )
    if set(text) & set(",=/;"):
        return  # refused before: what parsers of options cut
    placed = Stock(spec, (), (), True)
    if is_argument(text):
        assert f"^{text}$=CPU" in arguments(placed, "m") and (text or "none") in arguments(placed, "m")
    else:
        with pytest.raises(quoting.Unquotable):
            arguments(placed, "m")
        with pytest.raises(NotHeld):
            export(sample_plan(), placed, "m", "llama-cpp-python")


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


def check_file_name(text: str, suffix: str, folder: Path) -> None:
    name = quoting.file_name(text, suffix)
    assert name.endswith(suffix) and len(name.encode()) <= 255 and not unseemly(name) and "\n" not in name
    assert not set(name) & set('<>:"/\\|?*;#') and name[0] not in ".-~ " and name[-1] not in ". "
    assert not re.fullmatch(r"(CON|PRN|AUX|NUL|(COM|LPT)[0-9¹²³])\s*(\..*)?", name, re.IGNORECASE)
    (folder / name).write_text("")
    assert [path.name for path in folder.iterdir()] == [name]
    stem = name[: len(name) - len(suffix)]
    assert quoting.file_name(stem, suffix) == name
    if re.fullmatch(r"[\w(][\w()+ .-]{0,80}[\w)]", text, re.ASCII) and text.partition(".")[0].upper() not in (
        "NUL",
        "CON",
        "COM1",
    ):
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
import sys
from commands.shared.console import progress
with progress() as bar:
    bar.add_task(sys.argv[1], total=2, rate=sys.argv[1])
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
