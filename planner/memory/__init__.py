"""Bytes by formula: KV cache, recurrent state, compute buffers, reserves."""
