"""Padded forward passes of a card: planning, inputs, execution."""
