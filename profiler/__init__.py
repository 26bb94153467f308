"""Measures this machine: operators, links, expert routing."""
