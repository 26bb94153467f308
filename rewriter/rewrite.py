"""Model and plan to output files: the steps in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from planner.check.divided_sites import check_sites
from planner.errors import FileProblem, MachineError
from planner.model.gguf.header import DEFAULT_ALIGNMENT
from planner.model.gguf.reader import ModelFile
from planner.model.gguf.shards import output_name as output_name
from planner.model.units import units_of
from planner.plan.plan import Plan
from rewriter.experts import OrderRefused, gathers
from rewriter.layout import Layout, Request, make_layout
from rewriter.manifest import Manifest, ManifestFile, manifest_path, to_text
from rewriter.publishing.journal import write_synced
from rewriter.publishing.publish import Output, check_space, publish, recover_all, replaced_by, staging
from rewriter.regions import Region, regions
from rewriter.shards import limit, split
from rewriter.stamp import check_plan, plan_digest, read_stamp
from rewriter.stamps import set_digest, source_of, stamp_entries, trailing_of
from rewriter.stream import write_file
from rewriter.verify import Verification, verify

Progress = Callable[[str, int, int], None]  # what, bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class RewriteOptions:
    """Choices that the plan does not make."""

    alignment: int = 0  # bytes; 0: as the original source
    shard_by_device: bool = False
    shard_bytes: int = 0  # 0: no limit
    verify: bool = True
    force: bool = False
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What a rewrite did."""

    files: tuple[Path, ...]
    size_bytes: int
    padding_bytes: int
    regions: tuple[tuple[str, int, int], ...]  # name, tensors, bytes
    moved_layers: tuple[int, ...]  # whose experts stand in another order than in the original
    write_seconds: float
    verify_seconds: float
    verified: bool
    claims: tuple[str, ...]
    removed: tuple[Path, ...] = ()  # files of an earlier output that went with it
    notes: tuple[str, ...] = ()  # what a person should know


@dataclass(frozen=True, slots=True)
class Work:
    """A rewrite that has been decided and not begun."""

    layout: Layout
    regions: tuple[Region, ...]
    experts: Mapping[int, tuple[int, ...]]
    notes: tuple[str, ...] = ()


@dataclass(eq=False)
class WriteFailed(MachineError):
    """The output could not be written."""

    path: str
    why: str

    def message(self) -> str:
        return f"{self.path}: rewriting failed: {self.why}"


def rewrite(
    model: ModelFile,
    plan: Plan,
    out: Path,
    options: RewriteOptions,
    progress: Progress = lambda what, done, total: None,
    plan_path: str = "plan",
) -> Report:
    """Write the model in the order of a plan; the output appears whole, verified, or not at all.

    Raises PlanMismatch for another model's plan, OrderRefused for experts that must not move,
    FileProblem, DiskFull or WriteFailed for the output, NotFaithful when verification fails.
    """
    work = decide(model, plan, out.name, options, plan_path)
    return carry_out(model, plan, work, out, options, progress)


def decide(model: ModelFile, plan: Plan, name: str, options: RewriteOptions, plan_path: str) -> Work:
    """Everything a rewrite will do, without doing it. `name` is the output's."""
    check_plan(model, plan, plan_path)
    check_sites(plan, model.inventory, plan_path)
    if not model.inventory.tensors:
        raise FileProblem(str(model.paths[0]), "holds no tensors: there is nothing to put in order")
    _refuse_foreign_order(model, plan)
    found = regions(model.inventory, plan, units_of(model.inventory).units, plan_path)
    stamp = read_stamp(model)
    source = source_of(model, stamp)
    experts = _orders(plan)
    alignment = options.alignment or source.source_alignment or DEFAULT_ALIGNMENT
    files = split(found, options.shard_by_device)
    if options.shard_bytes:
        files = limit(model, files, plan.experts, alignment, options.shard_bytes)
    order = tuple(name for file in files for name in file)
    entries = stamp_entries(model, source, plan, order, experts)
    request = Request(
        files=files,
        name=output_name(name),
        alignment=alignment,
        keep_alignment_key=source.source_alignment > 0,
        stamp=entries,
        moves=gathers(model.inventory, experts, stamp.experts if stamp else {}),
        set_digest=set_digest(entries, files),
        trailing=trailing_of(model, source),
    )
    lost = source.source_lost
    notes = (f"{lost} bytes are not carried: padding that is not zero, ends of shards",) if lost else ()
    return Work(make_layout(model, request), found, experts, notes)


def _orders(plan: Plan) -> dict[int, tuple[int, ...]]:
    experts: dict[int, tuple[int, ...]] = {}
    for entry in plan.experts:
        if entry.layer in experts:
            raise OrderRefused(entry.layer, "the plan has two orders for it")
        experts[entry.layer] = entry.order
    return experts


def _refuse_foreign_order(model: ModelFile, plan: Plan) -> None:
    """Another program's order of experts, whose numbers the plan cannot know."""
    if plan.experts and model.get("mbolt.perm"):
        why = "mbolt has reordered this file (mbolt.perm): reorder the original instead"
        raise OrderRefused(plan.experts[0].layer, why)


def carry_out(
    model: ModelFile,
    plan: Plan | None,
    work: Work,
    out: Path,
    options: RewriteOptions,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Write, verify and publish what was decided."""
    output = Output(
        files=tuple(out.with_name(file.name) for file in work.layout.files),
        manifest=manifest_path(out.with_name(output_name(out.name))),
        sources=model.paths,
        force=options.force,
        in_place=options.in_place,
    )
    try:
        notes = (*work.notes, *recover_all(out))
        replaced_by(output)  # told before any work; decided when the files are put in place
        check_space(out.parent, work.layout.size_bytes)
        with staging(out) as folder:
            staged = tuple(folder / target.name for target in output.files)
            started = time.monotonic()
            _write(model, work.layout, staged, progress)
            seconds = time.monotonic() - started
            proof = None
            if options.verify:
                proof = _prove(model, plan, staged, progress)
                _write_manifest(folder / output.manifest.name, model, plan, work.layout, proof)
            removed = publish(folder, output, proof is not None)
    except OSError as problem:
        raise WriteFailed(str(out), problem.strerror or str(problem)) from None
    report = _report(model, work, output.files, seconds, proof)
    return replace(report, removed=removed, notes=notes)


def _write(model: ModelFile, layout: Layout, staged: tuple[Path, ...], progress: Progress) -> None:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("writing", done, layout.size_bytes)

    for file, target in zip(layout.files, staged, strict=True):
        write_file(file, model.paths, target, advance)


def _prove(model: ModelFile, plan: Plan | None, staged: tuple[Path, ...], progress: Progress) -> Verification:
    done = 0
    total = 2 * model.inventory.size_bytes

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("verifying", done, total)

    return verify(model, staged, plan, advance)


def _write_manifest(
    path: Path, model: ModelFile, plan: Plan | None, layout: Layout, proof: Verification
) -> None:
    manifest = Manifest(
        model=model.inventory.name,
        source_header=model.inventory.header_digest,
        plan_digest=plan_digest(plan) if plan else "",
        claims=proof.claims,
        files=tuple(ManifestFile(file=f.name, size_bytes=f.size_bytes) for f in layout.files),
        tensors=proof.tensors,
    )
    write_synced(path, to_text(manifest).encode())


def _report(
    model: ModelFile, work: Work, targets: tuple[Path, ...], seconds: float, proof: Verification | None
) -> Report:
    sizes = {tensor.name: tensor.size_bytes for tensor in model.inventory.tensors}
    moved = {n: order for n, order in work.experts.items() if order != tuple(range(len(order)))}
    return Report(
        files=targets,
        size_bytes=work.layout.size_bytes,
        padding_bytes=sum(file.padding_bytes for file in work.layout.files),
        regions=tuple((r.name, len(r.tensors), sum(sizes[n] for n in r.tensors)) for r in work.regions),
        moved_layers=tuple(sorted(moved)),
        write_seconds=seconds,
        verify_seconds=proof.seconds if proof else 0.0,
        verified=proof is not None,
        claims=proof.claims if proof else (),
    )
