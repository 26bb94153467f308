"""Model, plan, profile and routing files full of hostile names through every command.

The oracle is a twin with harmless names: the same commands end with the same codes, print as many lines
and leave the same files. Nothing else ran, and no letter that moves a cursor reached the terminal.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import CliRunner, Result
from gguf_bytes import STR, T, arch, gguf, kv
from hostile_texts import CRAFTED, unseemly
from prometheus_client.parser import text_string_to_metric_families

from atsplan import main
from planner.machine import presets, profile
from planner.plan.plan import DeviceUse, from_text, to_text
from planner.site import ON_CPU, Site, SiteKind
from profiler.synth.synth import SynthSpec, write

HERE = ("--device-map", "CUDA0=CPU", "--threads", "1")
FORMATS = ("llama-server", "llama-cli", "llama-bench", "preset", "env", "json", "llama-cpp-python")
# (general.name and every other name, the name of the model file)
NAMES = {
    "shells": (
        'x"""\nopen("canary","w")\n"""$(touch canary)`touch canary`',
        "m $(touch canary)`touch canary`",
    ),
    "terminals": ("\x1b[2J\x1b]0;t\x07\x9b31m\u202e\u2028[red]m[/red]\ufeff", "m\x1b[31m\n\u202eb[red]"),
    "paths": ("../../evil/$HOME\r\n[other]\r\nmodel = /etc/passwd", "-m;#{0}](x) '\""),
    "bytes": ("coding: utf-7 +AAo-open('canary','w')+AAo- $\\frac{1}{2}$ _x\0", "m\udcff\\n"),
}


@dataclass(slots=True)
class Walk:
    """The commands that ran on one model, and what each printed."""

    folder: Path
    model: Path
    steps: list[tuple[str, int, int, int]] = field(
        default_factory=list
    )  # command, code, lines out, lines err
    files: set[str] = field(default_factory=set)

    def __call__(self, *words: object, code: int = 0, **given: Any) -> Result:
        arguments = [str(word) for word in words]
        done = CliRunner().invoke(main, arguments, **given)
        assert done.exit_code == code, (arguments, done.output, done.exc_info)
        label = " ".join(arguments[:2] if arguments[0] == "heat" else arguments[:1])
        for stream in (done.stdout, done.stderr):
            bad = unseemly(stream.translate({0x2500: "-"}))
            assert not bad, (label, bad)
        counts = (len(done.stdout.splitlines()), len(done.stderr.splitlines()))
        self.steps.append((label, code, *counts))
        return done


def made_in(folder: Path, name: str, file: str) -> Walk:
    """A small mixture of experts, a machine, heat and a trace that all bear the name."""
    folder.mkdir()
    model = write(folder / f"{file}.gguf", SynthSpec("qwen3moe", n_layers=2, name=name))
    machine = presets.load("rtx4090-ddr5")
    devices = tuple(d.model_copy(update={"description": name}) for d in machine.devices)
    named = machine.model_copy(update={"name": name, "devices": devices, "source": name})
    (folder / "machine.yaml").write_text(profile.to_text(named), encoding="utf-8")
    line = " ".join(name.split()).replace("\0", "")  # what a line of such a file can be given at all
    sources = "".join(
        f"# source: {line} {n}\n# phase: decode\n0,1,9\n0,2,5\n1,3,7\n1,0,4\n" for n in range(3)
    )
    heat = f"# heat: 1\n# model:\n# experts: 8\n# used: 2\nlayer,expert,count\n{sources}"
    (folder / "h.csv").write_text(heat, encoding="utf-8")
    rows = "".join(f"0,decode,{n},{la},{n % 8} {(n + 3) % 8}\n" for n in range(40) for la in range(2))
    trace = f"# trace: 1\n# model:\n# experts: 8\n# source: {line}\nsource,phase,step,layer,ids\n{rows}"
    (folder / "t.csv").write_text(trace, encoding="utf-8")
    prompts = [
        {"name": name, "text": "The hat of the ant"},
        {"name": f"{name}2", "text": name.replace("\0", "") + "!"},
    ]
    (folder / "p.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return Walk(folder, model)


def walk_all(walk: Walk) -> None:
    """Every command, in the folder of the model."""
    model = f"./{walk.model.name}"
    sides = ("--model", model, "--profile", "machine.yaml")
    asked = ("solve", model, "--profile", "machine.yaml", "--ctx", "512")
    walk("inventory", model)
    walk("inventory", model, "--json", "-o", "inv.yaml")
    walk(*asked, "--budget", "3000", "-o", "roomy.yaml")
    walk(*asked, "--budget", "CUDA0=700", "-o", "plan.yaml", "--json")
    walk(*asked, "--budget", "3000", "--quant", "ffn_.*_exps=iq2_xxs", "--tensor-types", "types.txt")
    walk(*asked, "--budget", "3000", "--heat", "h.csv")
    walk(*asked, "--budget", "1MiB", "--no-cpu", code=1)
    walk(
        "sweep",
        model,
        "--profile",
        "machine.yaml",
        "--ctx",
        "512",
        "--budgets",
        "700:3000:2300",
        "--plot",
        "s.svg",
    )
    walk("explain", "plan.yaml", *sides, "--plot", "p.svg", "--html", "p.html")
    walk("explain", "plan.yaml", *sides, "--json")
    walk("diff", "roomy.yaml", "plan.yaml", "--model", model, code=1)
    walk("diff", "roomy.yaml", "plan.yaml", "--json", code=1)
    walk("check", "plan.yaml", "roomy.yaml", *sides, "--list", "--sarif", "c.sarif", "--junit", "c.xml")
    walk("check", "plan.yaml", "--json", "--no-resolve", "--allow-missing")
    walk("fmt", "plan.yaml")
    for form in FORMATS:
        walk("export", "plan.yaml", "--inventory", model, "--profile", "machine.yaml", "--format", form)
    walk("export", "plan.yaml", "--format", "docker-compose", "-o", "compose.yaml")
    walk("heat", "import", "h.csv", "--source", walk.model.stem.replace("\udcff", "y"), "-o", "h2.csv")
    walk("heat", "merge", "h.csv", "h2.csv", "-o", "h3.csv")
    walk("heat", "report", "h3.csv", "--map", "map.svg", "--curves", "curves.svg")
    walk("heat", "report", "h.csv", "--json", "--model", model)
    for target in ("moe-trace", "moe-layer-perf", "perms", "heat"):
        walk("heat", "export", "h.csv", "--to", target)
    walk("simulate", "t.csv", "--model", model)
    walk("rewrite", model, "--plan", "plan.yaml", "-o", "out.gguf", "--json")
    walk("verify", model, "out.gguf", "--plan", "plan.yaml")
    walk("verify", "out.gguf")
    walk("doctor", "--profile", "machine.yaml", code=1)


def walk_engine(walk: Walk) -> None:
    """The commands that load the model."""
    model = f"./{walk.model.name}"
    asked = ("solve", model, "--profile", "machine.yaml", "--ctx", "512", "--ubatch", "64")
    walk(*asked, "--budget", "3000", "-o", "plan.yaml")
    found = from_text(Path("plan.yaml").read_text(encoding="utf-8"), "plan.yaml")
    walk(
        "run",
        model,
        "--plan",
        "plan.yaml",
        *HERE,
        "-p",
        "The hat",
        "-n",
        "3",
        "--raw",
        "--ignore-eos",
        "--json",
    )
    walk("run", model, "--plan", "plan.yaml", *HERE, "--smoke")
    walk(
        "heat",
        "trace",
        model,
        "--prompts",
        "p.jsonl",
        "-n",
        "2",
        "--threads",
        "1",
        "--no-cost",
        "-o",
        "h4.csv",
    )
    twin = found.model_copy(update={"command": found.command + "\n"})
    Path("twin.yaml").write_text(to_text(twin), encoding="utf-8")
    bench = ("--rounds", "1", "-n", "2", "--prompts", "4", "--prometheus", "m.prom")
    walk("bench", model, "--plan", "plan.yaml", *HERE, "--other-machine", "--against", "twin.yaml", *bench)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The harmless twin's folder."""
    yield tmp_path_factory.mktemp("twin")


def result_of(walk: Walk, steps: Any, monkeypatch: pytest.MonkeyPatch) -> Walk:
    monkeypatch.chdir(walk.folder)
    steps(walk)
    walk.files = {
        re.sub(r"^m.*\.gguf$|^-m.*", "gguf", path.name, flags=re.DOTALL) for path in walk.folder.iterdir()
    }
    return walk


_TWINS: dict[Any, Walk] = {}


def same_as_twin(steps: Any, kind: str, tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> Walk:
    """The walk over a hostile model, which went as that over a harmless one."""
    name = steps.__name__
    if name not in _TWINS:
        _TWINS[name] = result_of(made_in(plain / name, "harmless", "m"), steps, monkeypatch)
    twin, found = _TWINS[name], result_of(made_in(tmp_path / "w", *NAMES[kind]), steps, monkeypatch)
    assert found.steps == twin.steps
    assert found.files == twin.files
    assert {path.name for path in tmp_path.iterdir()} == {"w"}
    for path in found.folder.glob("*.yaml"):
        assert not unseemly(path.read_text(encoding="utf-8")), path
    return found


@pytest.mark.parametrize("kind", NAMES)
def test_every_command_on_hostile_files(
    kind: str, tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # narrower tables wrap long names inside a row
    walk = same_as_twin(walk_all, kind, tmp_path, plain, monkeypatch)
    name = NAMES[kind][0]
    plan = from_text((walk.folder / "plan.yaml").read_text(encoding="utf-8"), "plan.yaml")
    assert plan.model.name == plan.machine.name == name
    for picture in ("s", "p", "map", "curves"):
        ElementTree.parse(walk.folder / f"{picture}.svg")
    assert len(list(ElementTree.parse(walk.folder / "c.xml").iter("testcase"))) == 2
    json.loads((walk.folder / "c.sarif").read_text())
    service = yaml.safe_load((walk.folder / "compose.yaml").read_text(encoding="utf-8"))["services"]["llama"]
    assert service["ports"] == ["127.0.0.1:8080:8080"]


@pytest.mark.parametrize("kind", NAMES)
def test_commands_that_load_hostile_models(
    kind: str, tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = same_as_twin(walk_engine, kind, tmp_path, plain, monkeypatch)
    text = (walk.folder / "m.prom").read_bytes().decode()  # a carriage return is part of a label
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert samples and {s.labels["model"] for s in samples} == {NAMES[kind][0]}


# Names of tensors, architectures, devices and sites: no engine takes such files, but people look at them.


@pytest.mark.parametrize(
    "name", [text for text in CRAFTED if text and "\ud800" not in text and "\udcff" not in text]
)
def test_hostile_tensors_and_architectures_are_shown(name: str, tmp_path: Path) -> None:
    entries = [arch(name), kv("general.name", STR, name), kv(f"{name}.block_count", STR, name)]
    tensors = [T(name, (8,), 0, bytes(32)), T(f"blk.0.{name}", (8,), 0, bytes(32))]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(entries, tensors))
    for more in ((), ("--json",), ("--strict",), ("-o", str(tmp_path / "i.yaml"))):
        done = CliRunner().invoke(main, ["inventory", str(path), *more])
        assert done.exit_code in (0, 1, 2) and not unseemly(done.stderr)
        assert not unseemly(done.stdout.translate({0x2500: "-"}))
        if done.exit_code:
            assert sum(line.startswith("atsplan: ") for line in done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "name", [text for text in CRAFTED if text and "\ud800" not in text and "\udcff" not in text]
)
def test_hostile_devices_and_reasons_of_a_plan(name: str, tmp_path: Path) -> None:
    from sample_plan import sample_plan

    sample = sample_plan()
    use: DeviceUse = sample.devices[0].model_copy(update={"name": name})
    sites = (Site(SiteKind.GPU, name), ON_CPU)
    units = tuple(
        u.model_copy(update={"why": name, "unit": f"blk.{n}.{name}", "site": sites[n]})
        for n, u in enumerate(sample.units)
    )
    layers = (sample.layers[0].model_copy(update={"device": name}),)
    rules = tuple(b.model_copy(update={"name": name, "setting": name}) for b in sample.baselines)
    devices = (use, *sample.devices[1:])
    changed = {"devices": devices, "units": units, "layers": layers, "notes": (name,), "baselines": rules}
    plan, other = tmp_path / "plan.yaml", tmp_path / "other.yaml"
    plan.write_text(to_text(sample.model_copy(update=changed)), encoding="utf-8")
    other.write_text(to_text(sample), encoding="utf-8")
    reports = ("--sarif", str(tmp_path / "c.sarif"), "--junit", str(tmp_path / "c.xml"))
    commands = [
        ["explain", str(plan), "--plot", str(tmp_path / "p.svg")],
        ["diff", str(other), str(plan)],
        ["check", str(plan), "--list", *reports],
        *(["export", str(plan), "--format", form] for form in (*FORMATS, "docker-compose")),
    ]
    for words in commands:
        done = CliRunner().invoke(main, words)
        assert done.exit_code in (0, 1, 2), (words, done.exc_info)
        assert not unseemly(done.output.translate({0x2500: "-"})), words
        assert (
            done.exit_code != 2 or done.stderr.splitlines()[-1].startswith("atsplan: ") or words[0] == "check"
        )
    ElementTree.parse(tmp_path / "c.xml")
    ElementTree.parse(tmp_path / "p.svg")


@pytest.mark.parametrize(
    "text", [text for text in CRAFTED if text and "\0" not in text and "\ud800" not in text]
)
def test_what_a_person_gives_is_one_line_too(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = f"./none{text}"
    for words in (
        ["inventory", missing],
        ["solve", missing, "--machine", "rtx4090-ddr5", "--budget", text],
        ["solve", missing, "--machine", text],
        ["explain", missing],
        ["check", missing],
        ["diff", missing, missing],
        ["heat", "report", missing],
        ["heat", "import", missing, "-o", f"./no/{text.replace('/', '')}"],
        ["rewrite", missing, "--plan", missing, "-o", "x.gguf"],
        ["run", missing, "--plan", missing, "-p", text],
        ["--", text],
        ["inventory", missing, f"--{text}"],
        ["check", missing, "--max-age", text],
    ):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 2 and done.stdout == "", (words, done.output)
        assert not unseemly(done.stderr) and len(done.stderr.splitlines()) == 1, (words, done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_a_name_of_a_megabyte_floods_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    walk = made_in(tmp_path / "w", "long [red]\x1b " * 60_000, "m")
    monkeypatch.chdir(walk.folder)
    asked = ("solve", "m.gguf", "--profile", "machine.yaml", "--ctx", "512", "--budget", "3000")
    shown = [walk("inventory", "m.gguf"), walk(*asked, "-o", "plan.yaml"),
             walk("check", "plan.yaml", "--allow-missing"),
             walk("explain", "plan.yaml", "--plot", "p.svg"), walk("heat", "report", "h.csv"),
             walk("inventory", "none" + "e" * 10**6, code=2)]  # fmt: skip
    assert [(n, len(done.output)) for n, done in enumerate(shown) if len(done.output) > 20_000] == []
    text = walk("export", "plan.yaml").stdout
    words = subprocess.run(
        ["bash", "-c", f"set -- {text.splitlines()[-1]}; printf '%s\\0' \"$@\""], capture_output=True
    )
    (path,) = [word for word in words.stdout.decode().split("\0") if word.endswith(".gguf")]
    assert len(os.fsencode(path)) == 255 and "/" not in path


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (("--host", "0.0.0.0"), 2, "other machines reach it: give --api-key-file FILE"),
        (("--host", "::"), 2, "other machines reach it"),
        (("--host", "0.0.0.0", "--api-key", ""), 2, "other machines reach it"),
        (("--host", "0.0.0.0", "--api-key", "k"), 2, "no such file"),
        (("--host", "0.0.0.0", "--no-key"), 2, "no such file"),
        (("--host", "localhost"), 2, "no such file"),
        (("--host", "127.0.0.2"), 2, "no such file"),
    ],
)
def test_a_server_for_other_machines_needs_a_key(
    more: tuple[str, ...], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMA_API_KEY", raising=False)
    done = CliRunner().invoke(
        main, ["serve", str(tmp_path / "m"), "--plan", str(tmp_path / "p"), "--port", "8397", *more]
    )
    assert (done.exit_code, done.stdout) == (code, "")
    lines = done.stderr.splitlines()
    assert said in lines[-1] and len(lines) == (2 if "--no-key" in more else 1)
    monkeypatch.setenv("LLAMA_API_KEY", "k")
    done = CliRunner().invoke(
        main, ["serve", str(tmp_path / "m"), "--plan", str(tmp_path / "p"), "--port", "8397", *more]
    )
    assert "no such file" in done.stderr


def test_publishing_is_for_compose_and_for_addresses(tmp_path: Path) -> None:
    from sample_plan import sample_plan

    plan = tmp_path / "plan.yaml"
    plan.write_text(to_text(sample_plan()))
    for words, said in (
        (("--publish", "0.0.0.0"), "--publish 0.0.0.0: is for --format docker-compose"),
        (("--format", "docker-compose", "--no-key"), "--no-key"),
        (("--format", "docker-compose", "--publish", "0.0.0.0:80\n"), "expected an IP address"),
    ):
        done = CliRunner().invoke(main, ["export", str(plan), *words])
        assert done.exit_code == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
