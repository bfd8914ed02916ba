"""Predicts times on a card, from published values and constants fitted to them. Without torch."""
