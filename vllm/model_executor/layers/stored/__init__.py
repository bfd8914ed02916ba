"""Layers whose weights are stored quantized."""
