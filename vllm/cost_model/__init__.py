"""Predicted time on a card: published figures and the constants made from them. No torch."""
