"""Time and memory of every choice of every layer: from a model and a machine to a problem of integers."""
