"""Weights of GGUF files."""
