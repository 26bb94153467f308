"""The search on integers only: bytes and nanoseconds; it knows nothing of models."""
