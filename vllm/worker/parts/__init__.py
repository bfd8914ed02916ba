"""Data of the requests in a batch: embeddings, adapters and prompt log-probabilities."""
