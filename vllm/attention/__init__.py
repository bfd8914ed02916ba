"""Attention over the paged KV cache: the layer, what a launch looks like, and the backends."""

from vllm.attention.backends.native_attn import RaggedMetadata
from vllm.attention.layer import Attention
from vllm.attention.metadata import (
    LaunchMetadata,
    attention_metadata,
    current_metadata,
    set_metadata,
)

__all__ = [
    "Attention",
    "LaunchMetadata",
    "RaggedMetadata",
    "attention_metadata",
    "current_metadata",
    "set_metadata",
]
