"""Loads a planned model through libllama and judges it against the plan."""
