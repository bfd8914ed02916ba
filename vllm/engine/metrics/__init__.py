"""Metrics of an engine."""
