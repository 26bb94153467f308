"""Compiles a GGUF file to match a plan, and proves the result."""
