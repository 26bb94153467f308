"""The plan as a file, what it asks of the engine, and the engine's rules that a plan must follow."""
