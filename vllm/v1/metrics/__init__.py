"""Metrics of the engine."""
