"""Valid GGUF files of random weights, for every architecture that is planned for."""
