"""Fetches the files that requests name by URLs."""
