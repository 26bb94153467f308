"""Texts of strangers through every writer, read back by parsers of the formats: one value, the right one.

Each format has its own account here of what it can hold; what it cannot is refused, never changed.
"""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostile_texts import ANY, CRAFTED, crafted, is_argument, often, plan_of, seldom, unseemly
from hypothesis import given
from sample_plan import sample_plan

from planner import quoting
from planner.plan.load_spec import LoadSpec
from planner.workload import Workload
from runtime.tools import hybrid_script
from runtime.tools.export import FORMATS, NotHeld, Published, arguments, export
from runtime.tools.options import ENVIRONMENT, Stock, options, stock

ROOT = Path(__file__).resolve().parent.parent
SPEC = LoadSpec((), (), 0, (), Workload(n_ctx=512))
PLAIN = stock(SPEC, 4)
PATH = ANY.map(lambda text: text or "m")


def exported(form: str, name: str, model: str, published: Published | None = None) -> str | None:
    """The text; None where the format refuses the path, in one line. What it prints is all printable."""
    try:
        text = export(plan_of(name), replace(PLAIN, notes=(name,)), model, form, published)
    except NotHeld as problem:
        assert not unseemly(str(problem)) and "\n" not in str(problem) and len(str(problem)) < 300
        return None
    assert not unseemly(text)
    return text


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


@given(name=ANY, model=PATH)
@crafted("name", "model")
@often
def test_llama_swap_starts_one_model_with_its_words(name: str, model: str) -> None:
    text = exported("llama-swap", name, model)
    assert (text is not None) == (not unseemly(model) and "\n" not in model and "${" not in model)
    if text is None:
        return
    ((key, entry),) = yaml.safe_load(text)["models"].items()
    assert set(yaml.safe_load(text)) == {"models"} and set(entry) == {"cmd"}
    assert key == quoting.short(name)
    program, *given_words = shlex.split(entry["cmd"])
    assert (program, given_words) == (
        "llama-server",
        [*words(model), "--host", "127.0.0.1", "--port", "${PORT}"],
    )
    assert entry["cmd"].count("${") == 1  # what it fills in itself


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
