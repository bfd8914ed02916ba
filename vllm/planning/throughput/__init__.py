"""Predicted speed of an engine, and goals for it."""
