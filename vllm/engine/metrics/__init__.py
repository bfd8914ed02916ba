"""Collect, log and expose the metrics of an engine."""
