"""Attention over the paged KV cache: the layer, what a launch looks like, and the backends."""

from vllm.attention.backends.encoder_attn import EncoderMetadata
from vllm.attention.backends.native_attn import RaggedMetadata
from vllm.attention.cached_layer import CachedLayer
from vllm.attention.encoder import EncoderAttention
from vllm.attention.layer import Attention
from vllm.attention.metadata import (
    LaunchMetadata,
    attention_metadata,
    current_metadata,
    set_metadata,
)

__all__ = [
    "Attention",
    "CachedLayer",
    "EncoderAttention",
    "EncoderMetadata",
    "LaunchMetadata",
    "RaggedMetadata",
    "attention_metadata",
    "current_metadata",
    "set_metadata",
]
