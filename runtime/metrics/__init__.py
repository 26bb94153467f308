"""Figures of a running plan for Prometheus: one page over HTTP, or a text file."""
