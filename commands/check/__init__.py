"""Plans checked again, without model or GPU, and on request with them."""
