"""Expert routing commands: heat and simulate."""
