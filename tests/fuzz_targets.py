"""What the fuzzer damages, and who reads it: every format of this program, its seed file, the commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.records import digest

DATA = Path(__file__).parent / "data" / "fuzz"
OUT = "out"  # where commands write: the only place
OUT_PLAN = f"{OUT}/plan.yaml"


@dataclass(frozen=True)
class Target:
    """A format: its seed, where the mutant stands, the files beside it, and the commands that read it."""

    seed: str
    place: str
    beside: tuple[tuple[str, str], ...]  # (seed, place)
    commands: tuple[tuple[str, ...], ...]


_MODEL = ("model.gguf", "model.gguf")
_PLAN = ("plan.yaml", "plan.yaml")
_ORDER = ("order.yaml", "order.yaml")
INPUTS = (
    ("model.inventory.yaml", "inputs/Fuzz.inventory.yaml"),
    ("machine.profile.yaml", "inputs/rtx4060-8gb-ddr5.profile.yaml"),
)
# No command reads a journal without an engine: it is read as `atsplan profile` does.
READ_JOURNAL, JOURNAL_OF = "(journal)", "one machine"
JOURNAL = f"profile-{digest(JOURNAL_OF).removeprefix('sha256:')[:24]}.jsonl"
# Nor of the digests beside libraries that are kept: they are read as the loading of one does.
READ_DIGESTS = "(digests)"
DIGESTS = "atsplan/libraries/engine/SHA256SUMS"
_SMALL = ("--budget", "1000", "--ctx", "512")
_MACHINE = ("--machine", "rtx4060-8gb-ddr5")
_FORMS = (
    *("llama-server", "llama-cli", "llama-bench", "preset", "env", "json"),
    *("llama-cpp-python", "docker-compose", "llama-swap"),
)
_PAGE = ("--html", f"{OUT}/page.html")
_CHECK = ("check", "--no-resolve", "plan.yaml")


def _routing(seed: str, *more: tuple[str, ...]) -> Target:
    commands = (("heat", "import", seed), ("heat", "import", seed, "--model", "moe.yaml"), *more)
    return Target(seed, seed, (("moe.inventory.yaml", "moe.yaml"),), commands)


def _trace(seed: str) -> Target:
    out = ("heat", "import", seed, "--trace", f"{OUT}/t.csv", "-o", f"{OUT}/h.csv")
    return _routing(seed, ("simulate", seed, "--policy", "lru"), out)


TARGETS = (
    Target(
        "model.gguf",
        "model.gguf",
        (_ORDER, ("model.gguf", "other.gguf")),
        (
            ("inventory", "model.gguf"),
            ("inventory", "model.gguf", "--strict", "--json"),
            ("inventory", "model.gguf", "-o", f"{OUT}/m.yaml"),
            ("rewrite", "model.gguf", "--plan", "order.yaml", "-o", f"{OUT}/m.gguf"),
            ("heat", "import", "model.gguf"),
            ("fit", "model.gguf", *_MACHINE, "-c", "512"),
            ("solve", "other.gguf", *_MACHINE, *_SMALL, "--draft", "model.gguf", "-o", OUT_PLAN),
        ),
    ),
    *(
        Target(
            f"split-0000{n}-of-00002.gguf",
            f"split-0000{n}-of-00002.gguf",
            ((f"split-0000{3 - n}-of-00002.gguf", f"split-0000{3 - n}-of-00002.gguf"),),
            (("inventory", "."), ("inventory", "split-00002-of-00002.gguf", "--json")),
        )
        for n in (1, 2)
    ),
    Target(
        "rewritten.gguf",
        "rewritten.gguf",
        (_MODEL, _ORDER, ("rewritten.gguf.manifest.yaml", "rewritten.gguf.manifest.yaml")),
        (
            ("rewrite", "rewritten.gguf", "--undo", "-o", f"{OUT}/m.gguf"),
            ("rewrite", "rewritten.gguf", "--plan", "order.yaml", "-o", f"{OUT}/m.gguf"),
            ("verify", "model.gguf", "rewritten.gguf", "--plan", "order.yaml"),
            ("verify", "rewritten.gguf"),
            ("heat", "import", "heat.csv", "--permutation", "rewritten.gguf"),
        ),
    ),
    Target(
        "rewritten.gguf.manifest.yaml",
        "rewritten.gguf.manifest.yaml",
        (("rewritten.gguf", "rewritten.gguf"),),
        (("verify", "rewritten.gguf"),),
    ),
    Target(
        "plan.yaml",
        "plan.yaml",
        (*INPUTS, _MODEL, ("plan.yaml", "first.yaml")),
        (
            _CHECK,
            ("check", "--no-resolve", "--json", "--list", "plan.yaml"),
            ("fmt", "--check", "plan.yaml"),
            ("diff", "first.yaml", "plan.yaml"),
            ("check", "--no-resolve", "plan.yaml", "--sarif", f"{OUT}/c.sarif", "--junit", f"{OUT}/c.xml"),
            ("explain", "plan.yaml"),
            ("explain", "plan.yaml", "--json"),
            ("explain", "plan.yaml", "--model", "model.gguf"),
            ("explain", "plan.yaml", *_PAGE),
            ("explain", "plan.yaml", "--model", "model.gguf", *_PAGE),
            *(("export", "plan.yaml", "--model", "model.gguf", "--format", form) for form in _FORMS),
            ("rewrite", "model.gguf", "--plan", "plan.yaml", "-o", f"{OUT}/m.gguf"),
        ),
    ),
    Target("machine.profile.yaml", INPUTS[1][1], (_PLAN, INPUTS[0]), (_CHECK,)),
    Target(
        "machine.profile.yaml",
        "machine.yaml",
        (_MODEL,),
        (("solve", "model.gguf", "--profile", "machine.yaml", *_SMALL, "-o", OUT_PLAN),),
    ),
    Target("model.inventory.yaml", INPUTS[0][1], (_PLAN, INPUTS[1]), (_CHECK,)),
    Target(
        "model.inventory.yaml",
        "model.yaml",
        (INPUTS[1],),
        (
            ("inventory", "model.yaml"),
            ("solve", "model.yaml", "--profile", INPUTS[1][1], *_SMALL, "-o", OUT_PLAN),
        ),
    ),
    *map(_trace, ("positions.csv", "route_trace.csv", "topk.json", "demand.txt", "lines.jsonl", "trace.csv")),
    *map(_trace, ("route.bin", "longspear.bin")),
    *map(_routing, ("plain.csv", "choices.csv", "perf.json", "logical.json")),
    _routing("perms.json", ("heat", "import", "heat.csv", "--permutation", "perms.json")),
    Target("order.yaml", "order.yaml", (), (("heat", "import", "heat.csv", "--permutation", "order.yaml"),)),
    Target(
        "publication.yaml",
        f"{OUT}/.m.gguf.atsplan-x/journal.yaml",
        (("model.gguf", f"{OUT}/m.gguf"),),
        (("rewrite", f"{OUT}/m.gguf", "--recover"), ("inventory", f"{OUT}/m.gguf"), ("inventory", OUT)),
    ),
    Target(
        "digests.txt", DIGESTS, (("order.yaml", "atsplan/libraries/engine/libllama.so"),), ((READ_DIGESTS,),)
    ),
    Target(
        "moe.inventory.yaml",
        "moe.yaml",
        (),
        (
            ("heat", "report", "heat.csv", "--model", "moe.yaml"),
            ("heat", "export", "heat.csv", "--to", "moe-layer-perf", "--model", "moe.yaml", "--budget", "1"),
            ("solve", "moe.yaml", *_MACHINE, *_SMALL, "--heat", "heat.csv", "-o", OUT_PLAN),
        ),
    ),
    Target(
        "mmproj.gguf",
        "mmproj.gguf",
        (("model.gguf", "other.gguf"),),
        (
            ("inventory", "mmproj.gguf"),
            ("inventory", "other.gguf", "--mmproj", "mmproj.gguf"),
            ("solve", "other.gguf", *_MACHINE, *_SMALL, "--mmproj", "mmproj.gguf", "-o", OUT_PLAN),
        ),
    ),
    Target("journal.jsonl", JOURNAL, (), ((READ_JOURNAL,),)),
    *map(_routing, ("imatrix.gguf", "mbolt.gguf")),
    _routing(
        "heat.csv",
        ("heat", "report", "heat.csv"),
        ("heat", "merge", "heat.csv", "heat.csv"),
        ("heat", "export", "heat.csv", "--to", "perms"),
        ("solve", "moe.yaml", *_MACHINE, *_SMALL, "--heat", "heat.csv", "-o", OUT_PLAN),
    ),
)
