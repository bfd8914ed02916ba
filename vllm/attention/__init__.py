"""Attention over the paged KV cache: the layer, what a launch looks like, and the backends."""

from vllm.attention.layer import Attention
from vllm.attention.metadata import AttentionMetadata, attention_metadata, current_metadata

__all__ = ["Attention", "AttentionMetadata", "attention_metadata", "current_metadata"]
