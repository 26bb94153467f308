"""Drafted tokens: how many are accepted by position, lengths that follow it, both replayed on logs."""
