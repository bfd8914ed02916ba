"""Padded batches of a card: planned, filled and run."""
