"""Shared by all APIs of the server: its context and arguments, bodies, errors, streams."""
