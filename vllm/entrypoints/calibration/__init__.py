"""Implement `vllm calibrate`: compute FP8 scales of a model from texts, and the perplexity before
and after.
"""
