"""Draft models and speculators: the tokens that they have computed, and their stored states."""
