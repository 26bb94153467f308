"""A model loaded by its plan that generates text."""
