"""The operators of a card."""
