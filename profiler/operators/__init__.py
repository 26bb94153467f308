"""Single operators timed on every device."""
