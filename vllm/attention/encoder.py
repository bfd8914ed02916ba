"""Provide the attention layer of encoders: every token sees its whole prompt, and nothing is
cached.
"""

import torch
from torch import Tensor, nn

from vllm.attention.backends.cache_scales import CacheScales, PromptScales
from vllm.attention.backends.encoder_attn import full_attention, make_prompt_caches
from vllm.attention.cached_layer import CachedLayer
from vllm.attention.context import ContextHolder, ReadsContext
from vllm.kv_cache_spec import CacheKind, KVCacheSpec
from vllm.ops.attention_options import PLAIN_ATTENTION


class EncoderAttention(CachedLayer, ReadsContext):
    """Bidirectional scaled dot product attention, without a KV cache.

    H heads, D head size; all per rank.

    Args:
        num_heads: H.
        head_size: D.

    Shape: query, key and value [T, H, D] -> [T, H, D]
    """

    cache_names = ()

    key_cache: Tensor | None = None
    """Keys of a ragged forward pass while this layer runs; None: the device keeps none."""
    value_cache: Tensor | int | None = None
    """Values of a ragged forward pass while this layer runs."""
    options = PLAIN_ATTENTION
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    key_scales: Tensor = torch.ones(1)
    value_scales: Tensor = key_scales
    cache_scales: CacheScales | None = None
    prompt_scales: PromptScales | None = None

    def __init__(self, num_heads: int, head_size: int) -> None:
        super().__init__()
        self.launch = ContextHolder()
        self.num_heads = num_heads
        self.head_size = head_size

    def cache_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """Return an empty spec: nothing is cached."""
        return KVCacheSpec(CacheKind.NONE)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context = self.launch.context
        if context is None or context.attention is None:
            # Without a batch context, all tokens are one prompt.
            scale = self.options.scale_of(self.head_size)
            return full_attention(query[None], key[None], value[None], None, scale)[0]
        return context.attention.attend(self, query, key, value)


def bind_prompt_caches(
    model: nn.Module, num_tokens: int, num_prompts: int, dtype: torch.dtype
) -> None:
    """Give the layers of an encoder shared memory for ragged batches.

    Args:
        model: model whose layers all have the same shape.
        num_tokens: maximum number of tokens in a batch.
        num_prompts: maximum number of prompts in a batch.
        dtype: dtype of keys and values.
    """
    layers = [module for module in model.modules() if isinstance(module, EncoderAttention)]
    if not layers:
        return
    shape = layers[0].num_heads, layers[0].head_size
    keys, values = make_prompt_caches(num_tokens, num_prompts, *shape, dtype)
    for layer in layers:
        layer.key_cache, layer.value_cache = keys, values
