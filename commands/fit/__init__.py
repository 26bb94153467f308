"""For a newcomer: does a model fit, and which machines are known."""
