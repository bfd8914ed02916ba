"""Resolve arguments to the complete config of an engine."""
