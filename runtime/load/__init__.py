"""Placements as the engine's load parameters, and dry loads that tell its own bytes."""
