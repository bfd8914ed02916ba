"""Serve the speech routes: an audio file becomes text."""
