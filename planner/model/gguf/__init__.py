"""GGUF files as bytes: header, tensor table, shards, and what damage looks like."""
