"""Warm-up of a card: which shapes, in which order, and how long it takes."""
