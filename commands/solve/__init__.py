"""Planning commands: solve and sweep."""
