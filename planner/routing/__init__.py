"""Expert usage counts, routing traces, coverage, and expert caches replayed on them."""
