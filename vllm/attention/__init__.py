"""Compute attention over the paged KV cache: layers, metadata of a forward pass, and backends."""

from vllm.attention.backends.encoder_attn import whole_prompts
from vllm.attention.backends.metadata import AttentionMetadata
from vllm.attention.backends.native_attn import RaggedMetadata
from vllm.attention.cached_layer import CachedLayer, layers_with_cache
from vllm.attention.context import (
    AddedStates,
    ContextHolder,
    LaunchAdapters,
    LaunchContext,
    LaunchParts,
    ReadsContext,
    ReplacedTokens,
    TableEmbeddings,
    share_context,
    text_positions,
)
from vllm.attention.cross import RaggedItems, SeenItems, SeenRun
from vllm.attention.encoder import EncoderAttention, bind_prompt_caches
from vllm.attention.latent import LatentAttention
from vllm.attention.layer import Attention
from vllm.attention.ragged_states import RaggedStates, StateCopies, StateLaunch
from vllm.attention.state import PaddedReplays, PaddedStates, StateLayer, StateRows, States

__all__ = [
    "AddedStates",
    "Attention",
    "AttentionMetadata",
    "CachedLayer",
    "ContextHolder",
    "EncoderAttention",
    "LatentAttention",
    "LaunchAdapters",
    "LaunchContext",
    "LaunchParts",
    "PaddedReplays",
    "PaddedStates",
    "RaggedItems",
    "RaggedMetadata",
    "RaggedStates",
    "ReadsContext",
    "ReplacedTokens",
    "SeenItems",
    "SeenRun",
    "StateCopies",
    "StateLaunch",
    "StateLayer",
    "StateRows",
    "States",
    "TableEmbeddings",
    "bind_prompt_caches",
    "layers_with_cache",
    "share_context",
    "text_positions",
    "whole_prompts",
]
