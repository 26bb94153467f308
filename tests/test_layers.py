"""Imports flow one way, the solver core touches no files, heavy libraries load where they are used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from planner.left_out import left_out

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "planner": set[str](),
    "rewriter": {"planner"},
    "runtime": {"planner"},
    "profiler": {"planner", "runtime"},
    "commands": {"planner", "rewriter", "runtime", "profiler"},
}
# The rooms of the planner in the order data flows: each may import those before it.
ROOMS = (
    *(
        "constants",
        "block_names",
        "quoting",
        "file_kinds",
        "errors",
        "files",
        "yaml_reader",
        "records",
        "remember",
        "powers",
        "left_out",
        "llama_server",
    ),
    *("workload", "site"),
    *(
        "model",
        "machine",
        "memory",
        "solver",
        "drafts",
        "plan",
        "routing",
        "cost",
        "passes",
        "check",
        "learn",
    ),
)
MOST_FILES = 16  # of a folder: what a person can look over
MOST_LINES = 500  # of a file
PURE = ("solver", "cost", "memory", "model/units.py", "model/tensor_roles.py", "machine/budgets.py")
IO_MODULES = {
    "os",
    "io",
    "pathlib",
    "subprocess",
    "sys",
    "yaml",
    "click",
    "mmap",
    "ctypes",
    "tempfile",
}
ONLY_IN = {"ortools": "planner/solver/solve.py", "networkx": "planner/model/units.py"}
# Loaded inside the function that needs them; numpy also by modules that work on arrays, not by a command.
HEAVY = {"ortools", "networkx", "gguf", "matplotlib", "rich", "xllamacpp", "pandas"}


@cache
def tree(path: Path) -> ast.Module:
    """A file, read once for all tests that ask of it."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file."""
    return tuple(ast.walk(tree(path)))


@cache
def imported(path: Path) -> tuple[tuple[str, bool], ...]:
    """Top-level name of every import in a file, and whether it runs when the module is imported."""
    found: list[tuple[str, bool]] = []
    for node, late in _imports(path):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [node.module or ""]
        found += ((name.split(".")[0], not late) for name in names)
    return tuple(found)


@cache
def _imports(path: Path) -> tuple[tuple[ast.Import | ast.ImportFrom, bool], ...]:
    """The import statements of a file, and whether each runs late."""
    inner = {id(node) for function in nodes(path) if _is_late(function) for node in _imports_in(function)}
    return tuple((node, id(node) in inner) for node in nodes(path) if isinstance(node, _IMPORT))


def _imports_in(node: ast.AST) -> Iterator[ast.AST]:
    """Import statements below a node; functions inside it answer for their own."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _IMPORT):
            yield child
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case) and not _is_late(child):
            yield from _imports_in(child)


_IMPORT = (ast.Import, ast.ImportFrom)


def _is_late(node: ast.AST) -> bool:
    """Functions, and `if TYPE_CHECKING:` blocks."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_what_lies_upstream(package: str) -> None:
    others = {*MAY_IMPORT, "atsplan", "tests", "benchmarks"} - {package}
    found = files(package)
    assert found, package
    for path in found:
        assert {name for name, _ in imported(path)} & others <= MAY_IMPORT[package], path


@pytest.mark.parametrize("name", PURE)
def test_the_solver_core_does_no_io(name: str) -> None:
    place = ROOT / "planner" / name
    found = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert found
    for path in found:
        assert not {name for name, _ in imported(path)} & IO_MODULES, path


def test_evaluation_shares_nothing_with_the_solver() -> None:
    found = nodes(ROOT / "planner/solver/evaluate.py")
    modules = {node.module for node in found if isinstance(node, ast.ImportFrom)}
    assert not modules & {"planner.solver.solve", "planner.cost.build_problem", "planner.passes.stock_rules"}


@pytest.mark.parametrize(("library", "home"), ONLY_IN.items())
def test_big_libraries_stay_in_one_file(library: str, home: str) -> None:
    users = [path for package in MAY_IMPORT for path in files(package) if (library, True) in imported(path)]
    late = [path for package in MAY_IMPORT for path in files(package) if (library, False) in imported(path)]
    assert {path.relative_to(ROOT).as_posix() for path in (*users, *late)} <= {home}


def test_one_file_reads_and_writes_sites() -> None:
    """Elsewhere no text begins like a site's: it would be cut or pasted by hand."""
    text = re.compile(r"(gpu|stripe|cache|hybrid):")
    for path in (path for package in MAY_IMPORT for path in files(package)):
        if path == ROOT / "planner/site.py":
            continue
        for node in nodes(path):
            here = isinstance(node, ast.Constant) and isinstance(node.value, str) and text.match(node.value)
            assert not here, f"{path}:{getattr(node, 'lineno', 0)}"


# Patterns that an engine reads, and names as an engine's log cuts them.
SPELL_PATTERNS = {
    "planner/plan/override_match.py",
    "planner/plan/overrides.py",
    "planner/plan/stock.py",
    "runtime/engine/scheduler_log.py",
    "runtime/tools/expert_rule.py",
}


def test_names_of_tensors_are_read_in_one_room() -> None:
    """Elsewhere no regular expression has a layer's name in it, and no name of a tensor or unit is cut."""
    cut = re.compile(r"\b(u|name|unit|tensor)\.r?(split|partition)\(['\"]\.['\"]")
    found = set()
    for path in (path for package in MAY_IMPORT for path in files(package)):
        place = path.relative_to(ROOT).as_posix()
        if place.startswith("planner/model/") or place == "planner/block_names.py":
            continue
        text = path.read_text(encoding="utf-8")
        constants = (n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant))
        if any(isinstance(value, str) and re.search(r"blk\W*\\", value) for value in constants):
            found.add(place)
        assert not cut.search(text), place
    assert found == SPELL_PATTERNS


def test_memory_takes_the_model_as_it_was_analysed() -> None:
    """No formula counts layers or units again: what follows from a file is in `Structure`."""
    again = {
        "layers_of",
        "units_of",
        "sliding_layers",
        "all_sliding",
        "stems_by_layer",
        "by_name",
        "shared_kv",
    }
    for path in files("planner/memory"):
        tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        names = {a.name for n in tree if isinstance(n, ast.ImportFrom) for a in n.names}
        assert not names & again, path


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_heavy_libraries_are_imported_late(package: str) -> None:
    for path in files(package):
        early = {name for name, at_import in imported(path) if at_import}
        assert not early & HEAVY, path


def modules() -> dict[str, Path]:
    """Every module of the project by its full name."""
    paths = [path for package in MAY_IMPORT for path in files(package) if path.stem != "__init__"]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}


def early_modules(path: Path) -> Iterator[str]:
    """Full names of what a file imports when it is imported, `from package import module` resolved."""
    for node, late in _imports(path):
        if late:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def planner_rooms(path: Path) -> Iterator[str]:
    """The rooms of the planner that a file imports from, when it is imported or later."""
    for node, _ in _imports(path):
        if isinstance(node, ast.ImportFrom) and node.module == "planner":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("planner."):
            yield (node.module or "").split(".")[1]


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_the_planner_import_only_earlier_ones(room: str) -> None:
    place = ROOT / "planner" / room
    found = [place.with_suffix(".py")] if not place.is_dir() else sorted(place.rglob("*.py"))
    allowed = {*ROOMS[: ROOMS.index(room)], room}
    for path in found:
        assert set(planner_rooms(path)) <= allowed, path


def test_every_room_of_the_planner_has_its_place() -> None:
    names = {path.stem for path in (ROOT / "planner").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert names - {"__init__", "__pycache__"} == set(ROOMS)


def test_the_solver_imports_nothing_of_the_planner_but_errors() -> None:
    for path in files("planner/solver"):
        assert set(planner_rooms(path)) <= {"solver", "errors"}, path


def test_folders_and_files_are_small_enough_to_look_over() -> None:
    for package in (*MAY_IMPORT, "benchmarks"):
        found = files(package)
        for folder, inside in Counter(path.parent for path in found).items():
            assert inside <= MOST_FILES, folder
        for path in found:
            assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES, path


def test_no_file_only_passes_on_what_others_hold() -> None:
    for path in (path for package in MAY_IMPORT for path in files(package)):
        body = tree(path).body
        own = [n for n in body if not isinstance(n, ast.Import | ast.ImportFrom | ast.Expr)]
        listed = [n for n in own if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
        assert path.stem == "__init__" or len(own) > len(listed), path
        assert path.stem != "__init__" or not own, path


def test_no_test_module_imports_another() -> None:
    names = {path.stem for path in (ROOT / "tests").glob("test_*.py")}
    for path in (ROOT / "tests").rglob("*.py"):
        assert not {name for name, _ in imported(path)} & names, path


def loaded_by(code: str) -> set[str]:
    """Top-level modules in sys.modules of a fresh interpreter after `code`."""
    code += "\nimport sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.splitlines()[-1].split())


def test_help_loads_no_library_but_click() -> None:
    loaded = loaded_by(
        "import click.testing, atsplan\nclick.testing.CliRunner().invoke(atsplan.main, ['--help'])"
    )
    assert "click" in loaded
    assert not loaded & {*HEAVY, "pydantic", "yaml", *MAY_IMPORT}


_TABLE, _PLAN = "plans/inputs/Qwen3.5-0.8B-q8_0.inventory.yaml", "plans/Qwen3.6-27B-q4_K--rtx4090-ddr5.yaml"
_FILES = {"pydantic", "yaml"}  # to read a file of ours
_PRICED = {*_FILES, "networkx", "numpy"}
# What takes long to load, by the commands that may: a library of the solver or of an engine, the network's.
LOADED = {
    ("--help",): set[str](),
    ("--version",): set[str](),
    ("solve", "--help"): _FILES,
    ("machines", "rtx4060-8gb-ddr5"): {*_FILES, "rich"},
    ("diff", _PLAN, _PLAN): _FILES,
    ("fmt", "--check", _PLAN): {*_FILES, "rich"},
    ("heat", "report", "tests/data/heat/qwen3-30b-a3b.csv"): {*_FILES, "numpy", "rich"},
    ("inventory", "tests/data/tiny-moe.gguf"): {*_FILES, "networkx", "rich"},
    ("export", _PLAN): {*_PRICED, "re2"},
    ("check", "--no-resolve", _PLAN): {*_PRICED, "rich"},
    ("explain", _PLAN): {*_PRICED, "rich"},
    ("fit", _TABLE, "--machine", "rtx4060-8gb-ddr5", "--no-levers"): {*_PRICED, "ortools", "rich"},
}
_LONG = {*HEAVY, *_PRICED, "re2", "prometheus_client", "urllib.request", "http.client", "ssl"}


@pytest.mark.parametrize("words", LOADED, ids=lambda words: " ".join(words[:2]))
def test_a_command_loads_no_more_than_it_uses(words: tuple[str, ...]) -> None:
    code = (
        "import sys; from click.testing import CliRunner; from atsplan import main\n"
        f"done = CliRunner().invoke(main, {list(words)!r})\n"
        "assert done.exit_code == 0, done.output\nprint(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert set(done.stdout.splitlines()[-1].split()) & _LONG <= LOADED[words]


def test_a_command_loads_what_it_needs_when_it_runs() -> None:
    code = (
        "import atsplan, importlib\nfor name, _ in atsplan.COMMANDS.values(): importlib.import_module(name)"
    )
    assert not loaded_by(code) & (HEAVY | {"numpy"})


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {name: set(early_modules(path)) for name, path in modules().items()}
    order = TopologicalSorter({name: graph[name] & graph.keys() for name in graph})
    assert len(tuple(order.static_order())) == len(graph)  # CycleError names the circle


def test_importing_everything_loads_nothing_heavy() -> None:
    code = f"import importlib\nfor name in {list(modules())}: importlib.import_module(name)"
    assert not loaded_by(code) & HEAVY


def test_plans_are_made_without_what_the_solver_s_library_imports_for_arrays() -> None:
    """Afterwards nothing is left of the stand-in: who imports pandas gets the real one."""
    loaded = loaded_by(
        "from click.testing import CliRunner; from atsplan import main\n"
        "table, machine = 'plans/inputs/Qwen3.5-0.8B-q8_0.inventory.yaml', 'rtx4060-8gb-ddr5'\n"
        "done = CliRunner().invoke(main, ['fit', table, '--machine', machine, '--no-levers'])\n"
        "assert done.exit_code == 0, done.output"
    )
    assert "ortools" in loaded and "pandas" not in loaded


def test_a_stand_in_is_the_real_module_where_more_is_asked_of_it() -> None:
    assert "zipapp" not in sys.modules
    with left_out("zipapp", "create_archive"):
        import zipapp as found

        own = found.create_archive
        assert isinstance(own, type) and callable(found.get_interpreter)
    import zipapp as real

    assert real is not found and real.create_archive is not own


@pytest.mark.parametrize("package", [*MAY_IMPORT, "atsplan"])
def test_no_other_distribution_owns_our_names(package: str) -> None:
    # An editable install names no files, so that its names have no owner.
    assert set(packages_distributions().get(package, [])) <= {"atsplan"}


def test_test_files_are_flat_and_packages_are_typed() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))
    for package in MAY_IMPORT:
        assert (ROOT / package / "py.typed").exists()


_CHANGES = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft"),
    *("remove", "setdefault", "update"),
}


def _root(node: ast.expr) -> str:
    """The name that an expression such as `name.part[3]` starts from; "" when it is none."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _changed(node: ast.AST) -> Iterator[str]:
    """Names of things that a statement or call changes in place."""
    if isinstance(node, ast.Global):
        yield from node.names
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
        yield _root(node.func.value)
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    yield from (_root(t) for t in targets if isinstance(t, ast.Attribute | ast.Subscript))


@pytest.mark.parametrize("package", ["planner", "rewriter", "runtime", "profiler"])
def test_modules_hold_no_state(package: str) -> None:
    """Plans, engines and sessions of one process share nothing: no function changes what a module holds."""
    for path in files(package):
        own = {
            name.id
            for node in tree(path).body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for name in ast.walk(node)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        found = {name for node in nodes(path) for name in _changed(node)} & own
        assert not found, f"{path} changes {', '.join(sorted(found))}"


def test_nothing_of_an_engine_is_remembered_by_a_function() -> None:
    for path in files("runtime"):
        text = path.read_text(encoding="utf-8")
        assert "lru_cache" not in text and "@cache" not in text, path


# What starts other processes, and the one file that may use it. All else goes through runtime/child.
STARTS = {
    "subprocess": "runtime/child/process.py",
    "multiprocessing": "runtime/child/pool.py",
    "pty": "",
    "posix": "",
}
OS_STARTS = re.compile(r"ProcessPoolExecutor|os\.(system|popen|fork\w*|posix_spawn\w*|spawn\w+|exec\w+)\b")


@pytest.mark.parametrize(("library", "home"), STARTS.items())
def test_processes_are_started_in_one_place(library: str, home: str) -> None:
    paths = [path for package in MAY_IMPORT for path in files(package)]
    users = {path.relative_to(ROOT).as_posix() for path in paths if library in dict(imported(path))}
    assert users == ({home} if home else set())


def test_nothing_is_started_behind_its_back() -> None:
    paths = (path for package in MAY_IMPORT for path in files(package))
    for path in (path for path in paths if path != ROOT / "runtime/child/pool.py"):
        assert not OS_STARTS.search(path.read_text(encoding="utf-8")), path


def test_engine_children_are_opened_in_one_file_and_programs_in_few() -> None:
    """Python is named in one file; only what asks and what starts programs reaches for `process`."""
    python, starters = set(), set()
    for path in (path for package in MAY_IMPORT for path in files(package)):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        if "sys.executable" in text:
            python.add(name)
        if re.search(r"\bprocess\.(start|run|follow)\(", text):
            starters.add(name)
    assert python == {"runtime/child/environment.py"}
    programs = {"runtime/tools/llama_server.py", "runtime/hybrid/build.py", "commands/demo.py"}
    assert starters == {"runtime/child/ask.py", *programs}


def test_python_children_of_benchmarks_are_isolated_too() -> None:
    """They may measure programs of any kind, but a child that runs a module of ours goes through `python`."""
    for path in files("benchmarks"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"sys\.executable, \"-[mc]\"", text), path


# Who may spell a text for another language, and why; everybody else asks planner.quoting.
QUOTERS: dict[str, dict[str, str]] = {
    "shlex": {},
    "html": {},
    "xml.sax": {},
    "urllib.parse": {"commands/fit/remote.py": "takes addresses apart; uri() spells them"},
    "json.dumps": {
        "planner/records.py": "between YAML and the validator, within a process",
        "planner/plan/schema.py": "our own schema, keys sorted",
        "runtime/child/ask.py": "a pipe between our processes",
        "runtime/child/serve.py": "a pipe between our processes",
        "runtime/stripes/server.py": "an argument of our own child",
        "profiler/journal.py": "our own journal",
        "profiler/routed/model.py": "metadata of files that we generate",
    },
    "yaml.dump": {},
    "yaml.serialize": {},
    "yaml.emit": {"planner/records.py": "the canonical text of records"},
    "xml.etree": {
        "planner/check/findings.py": "ElementTree, on texts that went through xml()",
        "commands/page/elements.py": "ElementTree, on texts that went through message() and xml()",
    },
    "repr": {
        "rewriter/publishing/journal.py": "in a message, through terminal()",
        "planner/model/inventory.py": "a digest",
        "planner/model/gguf/magic.py": "bytes, in a message",
        "runtime/session/draft_model.py": "bytes, in a message",
    },
    "isprintable": {},
    "backslashreplace": {},
    "print": {
        "commands/shared/console.py": "the one place that prints",
        "planner/plan/schema.py": "our own schema",
        "profiler/routed/presets.py": "a developer's own figures",
        "runtime/hybrid/build.py": "paths of ours, for whom makes a wheel",
        "runtime/stripes/server.py": "errors show themselves; device names through terminal()",
    },
    "click.echo": {
        "commands/shared/console.py": "the one place that prints",
        "atsplan.py": "constants, when memory is short or the terminal gone",
    },
    "rich": {"commands/shared/console.py": "cells are Text, never markup"},
}


def _spellings(path: Path) -> Iterator[str]:
    """The ways to spell texts by hand that a file uses."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.FormattedValue) and node.conversion in map(ord, "ra"):
            yield "repr"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ("repr" for _ in re.findall(r"\{\w+![ra]\}|%r", node.value))
            yield from ("backslashreplace" for _ in re.findall("backslashreplace", node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield {"ascii": "repr"}.get(node.func.id, node.func.id)
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            yield from (
                node.attr,
                f"{owner}.{node.attr}",
                {"json.dump": "json.dumps"}.get(f"{owner}.{node.attr}", ""),
            )


def test_one_file_spells_texts_for_other_languages() -> None:
    users: dict[str, set[str]] = {name: set() for name in QUOTERS}
    for path in (ROOT / "atsplan.py", *(path for package in MAY_IMPORT for path in files(package))):
        place = path.relative_to(ROOT).as_posix()
        for found in _spellings(path):
            for name, places in users.items():
                if found == name or found.startswith(f"{name}."):
                    places.add(place)
    for name, places in users.items():
        assert places - {"planner/quoting.py"} == set(QUOTERS[name]), name
