"""Encoders of sound."""
