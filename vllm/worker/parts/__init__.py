"""Embeddings, adapters and prompt log-probabilities of the requests in a batch."""
