"""Serve embeddings, scores and classes: /v1/embeddings, /pooling, /score, /rerank, /classify."""
