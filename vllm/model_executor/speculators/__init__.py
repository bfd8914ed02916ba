"""Speculators: small networks that predict draft tokens from hidden states of the model."""
