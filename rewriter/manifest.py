"""The manifest beside a rewritten file: a digest of every tensor as the original source has it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from planner.records import Bytes, Many, Record, dump, load
from rewriter.publishing.journal import MANIFEST_SUFFIX

MOST_BYTES = 64 << 20  # of a manifest: 65 536 tensors of long names have a quarter of it


class ManifestFile(Record):
    """One output file."""

    file: str
    size_bytes: Bytes


class ManifestTensor(Record):
    """A tensor: SHA-256 of its payload with its experts in original order."""

    name: str
    size_bytes: Bytes
    sha256: str


class Manifest(Record):
    """What a rewrite made and proved."""

    schema_: int = Field(1, alias="schema", ge=1, le=1)
    model: str
    source_header: str
    plan_digest: str
    claims: Many[str]
    files: Many[ManifestFile]
    tensors: Many[ManifestTensor]


def manifest_path(out: Path) -> Path:
    """Where the manifest of an output stands."""
    return out.with_name(out.name + MANIFEST_SUFFIX)


def to_text(manifest: Manifest) -> str:
    """Canonical YAML of a manifest."""
    return dump(manifest)


def from_text(text: str, path: str) -> Manifest:
    """Manifest from YAML text; FieldProblem names the line of what is wrong."""
    return load(text, Manifest, path)
