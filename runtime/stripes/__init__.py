"""Experts split between VRAM and pinned host memory inside one tensor."""
