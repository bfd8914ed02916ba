"""Resolves arguments to the config of an engine."""
